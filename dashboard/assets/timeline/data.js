// Timeline: what the server says, asked for once and kept.

const HEADER = 72;

// The answer's columns as views into its bytes (see advisor/dashboard/timeline/encoding.py).
/**
 * @param {ArrayBuffer} buffer
 */
export function decode(buffer) {
  const head = new DataView(buffer);
  if (buffer.byteLength < HEADER || head.getUint32(0, true) !== 0x314c5441) {
    throw new Error("not an answer");
  }
  const n = head.getUint32(4, true);
  const m = head.getUint32(8, true);
  const f = head.getUint32(12, true);
  const c = head.getUint32(16, true);
  const px = head.getUint32(20, true);
  let at = HEADER;
  function column(Kind, count) {
    const found = new Kind(buffer, at, count);
    at += Math.ceil(found.byteLength / 8) * 8;
    return found;
  }
  return {
    k: head.getUint32(24, true),
    seen: head.getUint32(28, true),
    px,
    x0: head.getFloat64(32, true),
    x1: head.getFloat64(40, true),
    cell0: head.getFloat64(48, true),
    ms: head.getFloat64(56, true),
    version: head.getUint32(64, true),
    cell: Math.pow(2, head.getUint32(24, true)),
    slices: {
      n,
      start: column(Float64Array, n),
      dur: column(Float64Array, n),
      name: column(Uint32Array, n),
      id: column(Uint32Array, n),
      lane: column(Uint16Array, n),
      category: column(Uint8Array, n),
      flags: column(Uint8Array, n),
    },
    runs: {
      n: m,
      lane: column(Uint16Array, m),
      cell: column(Uint32Array, m),
      width: column(Uint16Array, m),
      category: column(Uint8Array, m),
      cover: column(Uint8Array, m),
    },
    flagged: {
      n: f,
      lane: column(Uint16Array, f),
      cell: column(Uint32Array, f),
      width: column(Uint16Array, f),
      flags: column(Uint8Array, f),
    },
    low: column(Float32Array, c * px),
    high: column(Float32Array, c * px),
    counters: c,
  };
}

// [0,1,2,5] -> "0-2,5"
export function ranges(numbers) {
  const parts = [];
  for (let i = 0; i < numbers.length; i++) {
    const from = numbers[i];
    while (i + 1 < numbers.length && numbers[i + 1] === numbers[i] + 1) {
      i += 1;
    }
    parts.push(from === numbers[i] ? from : from + "-" + numbers[i]);
  }
  return parts.join(",");
}

/**
 * What is known of a trace before any of it is drawn (dashboard/timeline/state.py).
 * @typedef {object} Info
 * @property {number} rank
 * @property {number} begin first instant, ns
 * @property {number} finish last instant, ns
 * @property {number} page names in a page of their table
 * @property {Group[]} groups
 * @property {any[]} counters
 * @property {any[]} runs
 * @property {any[]} findings
 */

/**
 * Lanes that belong together: a stream, a thread with its depths.
 * @typedef {object} Group
 * @property {string} key
 * @property {string} kind
 * @property {string} label
 * @property {number} first its first lane
 * @property {number} count how many lanes
 */

/** @typedef {ReturnType<typeof decode>} Answer what the server says of a span: columns */

export class Data {
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
    this.pages = {};
    this.pending = 0;
    this.onnames = function () {};
  }

  url(what, query) {
    const all = new URLSearchParams();
    if (this.run) {
      all.set("run", this.run);
    }
    if (this.rank !== null) {
      all.set("rank", String(this.rank));
    }
    if (!this.libraries) {
      all.set("libraries", "0");
    }
    Object.keys(query || {}).forEach((key) => {
      all.set(key, query[key]);
    });
    return "/_advisor/timeline/" + what + "?" + all.toString();
  }

  json(what, query) {
    const self = this;
    this.pending += 1;
    return fetch(this.url(what, query))
      .then((answer) => {
        return answer.json().then((body) => {
          if (!answer.ok) {
            throw new Error((body && body.error) || "no answer (" + answer.status + ")");
          }
          return body;
        });
      })
      .finally(() => {
        self.pending -= 1;
      });
  }

  load() {
    const self = this;
    return this.json("info").then((info) => {
      self.info = info;
      self.rank = info.rank;
      self.page(0);
      return info;
    });
  }

  // One page of the name table; names that are not there yet are drawn without a label.
  page(number) {
    const self = this;
    if (this.pages[number]) {
      return;
    }
    this.pages[number] = true;
    this.json("names", { page: number }).then(
      (answer) => {
        for (let i = 0; i < answer.names.length; i++) {
          self.names[number * self.info.page + i] = answer.names[i];
          self.labels[number * self.info.page + i] = answer.labels[i];
        }
        self.onnames();
      },
      () => {
        self.pages[number] = false;
      },
    );
  }

  view(x0, x1, px, lanes, counters, focus, q) {
    const self = this;
    const query = { x0, x1, px, lanes: ranges(lanes) };
    if (counters.length) {
      query.counters = ranges(counters);
    }
    if (focus) {
      query.focus = focus;
    }
    if (q) {
      query.q = q;
    }
    return fetch(this.url("view", query))
      .then((answer) => {
        if (!answer.ok) {
          throw new Error("no answer (" + answer.status + ")");
        }
        return answer.arrayBuffer();
      })
      .then((buffer) => {
        const found = decode(buffer);
        const name = found.slices.name;
        const need = {};
        for (let i = 0; i < name.length; i++) {
          need[Math.floor(name[i] / self.info.page)] = true;
        }
        Object.keys(need).forEach((page) => {
          self.page(Number(page));
        });
        return found;
      });
  }
}
