// Client of the timeline's endpoints. It caches the trace's structure and its names.

const HEADER_BYTES = 72;

/**
 * Decodes the answer to a view (dashboard/timeline/encoding.py). Columns are views of the buffer.
 * @param {ArrayBuffer} buffer
 */
export function decodeAnswer(buffer) {
  const header = new DataView(buffer);
  if (buffer.byteLength < HEADER_BYTES || header.getUint32(0, true) !== 0x314c5441) {
    throw new Error("not an answer");
  }
  const sliceCount = header.getUint32(4, true);
  const runCount = header.getUint32(8, true);
  const flaggedCount = header.getUint32(12, true);
  const counterCount = header.getUint32(16, true);
  const px = header.getUint32(20, true);
  let offset = HEADER_BYTES;
  function column(ArrayType, count) {
    const values = new ArrayType(buffer, offset, count);
    offset += Math.ceil(values.byteLength / 8) * 8;
    return values;
  }
  return {
    k: header.getUint32(24, true),
    sliceCount: header.getUint32(28, true),
    px,
    x0: header.getFloat64(32, true),
    x1: header.getFloat64(40, true),
    cell0: header.getFloat64(48, true),
    ms: header.getFloat64(56, true),
    version: header.getUint32(64, true),
    cell: Math.pow(2, header.getUint32(24, true)),
    slices: {
      n: sliceCount,
      start: column(Float64Array, sliceCount),
      dur: column(Float64Array, sliceCount),
      name: column(Uint32Array, sliceCount),
      id: column(Uint32Array, sliceCount),
      lane: column(Uint16Array, sliceCount),
      category: column(Uint8Array, sliceCount),
      flags: column(Uint8Array, sliceCount),
    },
    runs: {
      n: runCount,
      lane: column(Uint16Array, runCount),
      cell: column(Uint32Array, runCount),
      width: column(Uint16Array, runCount),
      category: column(Uint8Array, runCount),
      cover: column(Uint8Array, runCount),
    },
    flagged: {
      n: flaggedCount,
      lane: column(Uint16Array, flaggedCount),
      cell: column(Uint32Array, flaggedCount),
      width: column(Uint16Array, flaggedCount),
      flags: column(Uint8Array, flaggedCount),
    },
    low: column(Float32Array, counterCount * px),
    high: column(Float32Array, counterCount * px),
    counters: counterCount,
  };
}

/** Formats sorted numbers as ranges: [0,1,2,5] becomes "0-2,5". */
export function formatRanges(numbers) {
  const parts = [];
  for (let i = 0; i < numbers.length; i++) {
    const first = numbers[i];
    while (i + 1 < numbers.length && numbers[i + 1] === numbers[i] + 1) {
      i += 1;
    }
    parts.push(first === numbers[i] ? first : first + "-" + numbers[i]);
  }
  return parts.join(",");
}

/**
 * Structure of a trace, which is loaded before its slices (dashboard/timeline/routes.py).
 * @typedef {object} Info
 * @property {number} rank
 * @property {number} first_ns start of the first slice, ns
 * @property {number} last_ns end of the last slice, ns
 * @property {number} page number of names per page of the name table
 * @property {Group[]} groups
 * @property {any[]} counters
 * @property {any[]} runs
 * @property {any[]} findings
 */

/**
 * Group of lanes, such as a stream, or a thread with its call depths.
 * @typedef {object} Group
 * @property {string} key
 * @property {string} kind
 * @property {string} label
 * @property {number} first index of its first lane
 * @property {number} count number of lanes
 */

/** @typedef {ReturnType<typeof decodeAnswer>} Answer slices, cells and counters of a view */

// Data of one rank: structure and names, and requests for views, slices and statistics.
export class TimelineData {
  /**
   * @param {string} run key of the run; empty: the only one
   * @param {number | null} rank
   * @param {boolean} [libraries] whether frames of libraries are lanes too
   */
  constructor(run, rank, libraries) {
    this.run = run;
    this.libraries = libraries !== false;
    this.rank = rank;
    this.info = null;
    this.names = [];
    this.labels = [];
    this.requestedPages = {};
    this.pending = 0;
    this.onNames = function () {};
  }

  // Returns the address of an endpoint, for this run and rank.
  buildUrl(endpoint, query) {
    const parameters = new URLSearchParams();
    if (this.run) {
      parameters.set("run", this.run);
    }
    if (this.rank !== null) {
      parameters.set("rank", String(this.rank));
    }
    if (!this.libraries) {
      parameters.set("libraries", "0");
    }
    Object.keys(query || {}).forEach((key) => {
      parameters.set(key, query[key]);
    });
    return "/_advisor/timeline/" + endpoint + "?" + parameters.toString();
  }

  // Requests an endpoint that answers JSON. Rejects with the reason that the server gives.
  fetchJson(endpoint, query) {
    this.pending += 1;
    return fetch(this.buildUrl(endpoint, query))
      .then((answer) => {
        return answer.json().then((body) => {
          if (!answer.ok) {
            throw new Error((body && body.error) || "no answer (" + answer.status + ")");
          }
          return body;
        });
      })
      .finally(() => {
        this.pending -= 1;
      });
  }

  // Loads the structure of the trace and the first page of names.
  loadInfo() {
    return this.fetchJson("info").then((info) => {
      this.info = info;
      this.rank = info.rank;
      this.loadNames(0);
      return info;
    });
  }

  // Loads a page of the name table. Slices whose names are not loaded yet have no label.
  loadNames(number) {
    if (this.requestedPages[number]) {
      return;
    }
    this.requestedPages[number] = true;
    this.fetchJson("names", { page: number }).then(
      (answer) => {
        for (let i = 0; i < answer.names.length; i++) {
          this.names[number * this.info.page + i] = answer.names[i];
          this.labels[number * this.info.page + i] = answer.labels[i];
        }
        this.onNames();
      },
      () => {
        this.requestedPages[number] = false;
      },
    );
  }

  // Requests slices, cells and counters of a span, and the pages of names that they need.
  fetchView(x0, x1, px, lanes, counters, focus, searchText) {
    const query = { x0, x1, px, lanes: formatRanges(lanes) };
    if (counters.length) {
      query.counters = formatRanges(counters);
    }
    if (focus) {
      query.focus = focus;
    }
    if (searchText) {
      query.q = searchText;
    }
    return fetch(this.buildUrl("view", query))
      .then((answer) => {
        if (!answer.ok) {
          throw new Error("no answer (" + answer.status + ")");
        }
        return answer.arrayBuffer();
      })
      .then((buffer) => {
        const decoded = decodeAnswer(buffer);
        const nameNumbers = decoded.slices.name;
        const neededPages = {};
        for (let i = 0; i < nameNumbers.length; i++) {
          neededPages[Math.floor(nameNumbers[i] / this.info.page)] = true;
        }
        Object.keys(neededPages).forEach((page) => {
          this.loadNames(Number(page));
        });
        return decoded;
      });
  }
}
