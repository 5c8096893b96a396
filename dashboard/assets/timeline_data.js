// Timeline, 2 of 6: what the server says, asked for once and kept.
(function () {
  "use strict";
  var T = window.advisorTimeline;
  if (T.Data) { return; }
  var HEADER = 72;

  // The answer's columns as views into its bytes (see advisor/dashboard/timeline/wire.py).
  function decode(buffer) {
    var head = new DataView(buffer);
    if (buffer.byteLength < HEADER || head.getUint32(0, true) !== 0x314c5441) { throw new Error("not an answer"); }
    var n = head.getUint32(4, true), m = head.getUint32(8, true), f = head.getUint32(12, true);
    var c = head.getUint32(16, true), px = head.getUint32(20, true), at = HEADER;
    function column(Kind, count) {
      var found = new Kind(buffer, at, count);
      at += Math.ceil(found.byteLength / 8) * 8;
      return found;
    }
    return {
      k: head.getUint32(24, true), seen: head.getUint32(28, true), px: px,
      x0: head.getFloat64(32, true), x1: head.getFloat64(40, true), cell0: head.getFloat64(48, true),
      ms: head.getFloat64(56, true), version: head.getUint32(64, true), cell: Math.pow(2, head.getUint32(24, true)),
      slices: {
        n: n, start: column(Float64Array, n), dur: column(Float64Array, n), name: column(Uint32Array, n),
        id: column(Uint32Array, n), lane: column(Uint16Array, n), category: column(Uint8Array, n),
        flags: column(Uint8Array, n)
      },
      runs: {
        n: m, lane: column(Uint16Array, m), cell: column(Uint32Array, m), width: column(Uint16Array, m),
        category: column(Uint8Array, m), cover: column(Uint8Array, m)
      },
      flagged: {
        n: f, lane: column(Uint16Array, f), cell: column(Uint32Array, f), width: column(Uint16Array, f),
        flags: column(Uint8Array, f)
      },
      low: column(Float32Array, c * px), high: column(Float32Array, c * px), counters: c
    };
  }

  // [0,1,2,5] -> "0-2,5"
  function ranges(numbers) {
    var parts = [];
    for (var i = 0; i < numbers.length; i++) {
      var from = numbers[i];
      while (i + 1 < numbers.length && numbers[i + 1] === numbers[i] + 1) { i += 1; }
      parts.push(from === numbers[i] ? from : from + "-" + numbers[i]);
    }
    return parts.join(",");
  }

  function Data(run, rank) {
    this.run = run;
    this.rank = rank;
    this.info = null;
    this.names = [];
    this.pages = {};
    this.pending = 0;
    this.onnames = function () {};
  }

  Data.prototype.url = function (what, query) {
    var all = new URLSearchParams();
    if (this.run) { all.set("run", this.run); }
    if (this.rank !== null) { all.set("rank", this.rank); }
    Object.keys(query || {}).forEach(function (key) { all.set(key, query[key]); });
    return "/_advisor/timeline/" + what + "?" + all.toString();
  };

  Data.prototype.json = function (what, query) {
    var self = this;
    this.pending += 1;
    return fetch(this.url(what, query)).then(function (answer) {
      return answer.json().then(function (body) {
        if (!answer.ok) { throw new Error((body && body.error) || "no answer (" + answer.status + ")"); }
        return body;
      });
    }).finally(function () { self.pending -= 1; });
  };

  Data.prototype.load = function () {
    var self = this;
    return this.json("info").then(function (info) {
      self.info = info;
      self.rank = info.rank;
      self.page(0);
      return info;
    });
  };

  // One page of the name table; names that are not there yet are drawn without a label.
  Data.prototype.page = function (number) {
    var self = this;
    if (this.pages[number]) { return; }
    this.pages[number] = true;
    this.json("names", { page: number }).then(function (names) {
      for (var i = 0; i < names.length; i++) { self.names[number * self.info.page + i] = names[i]; }
      self.onnames();
    }, function () { self.pages[number] = false; });
  };

  Data.prototype.view = function (x0, x1, px, lanes, counters, focus, q) {
    var self = this, query = { x0: x0, x1: x1, px: px, lanes: ranges(lanes) };
    if (counters.length) { query.counters = ranges(counters); }
    if (focus) { query.focus = focus; }
    if (q) { query.q = q; }
    return fetch(this.url("view", query)).then(function (answer) {
      if (!answer.ok) { throw new Error("no answer (" + answer.status + ")"); }
      return answer.arrayBuffer();
    }).then(function (buffer) {
      var found = decode(buffer), name = found.slices.name, need = {};
      for (var i = 0; i < name.length; i++) { need[Math.floor(name[i] / self.info.page)] = true; }
      Object.keys(need).forEach(function (page) { self.page(Number(page)); });
      return found;
    });
  };

  T.Data = Data;
  T.ranges = ranges;
  T.decode = decode;
})();
