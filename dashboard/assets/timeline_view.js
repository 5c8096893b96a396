// Timeline, 6 of 6: the view itself: which span is shown, what is asked of the server and when.
(function () {
  "use strict";
  var T = window.advisorTimeline, el = T.el;
  if (T.Timeline) { return; }
  var MARGIN = 0.5;      // asked for on each side of the view, so that a short pan is there already
  var LEAST = 64;        // shortest span, ns
  var MOVE_MS = 140;     // of a zoom by key or button

  function Timeline(root) {
    var self = this;
    this.root = root;
    this.run = root.getAttribute("data-run") || "";
    this.x0 = 0; this.x1 = 1; this.scroll = 0; this.width = 100; this.height = 100;
    this.layout = null; this.answer = null; this.base = null; this.steps = null; this.mapLanes = [];
    this.folded = {}; this.pointer = null; this.hover = null; this.chosen = null; this.range = null;
    this.instant = null; this.finding = ""; this.query = ""; this.flying = null; this.waiters = [];
    this.build();
    this.panel = new T.Panel(this);
    root.replaceChildren(this.panel.bar, el("div", { cls: "tl-main" }, [this.stage, this.panel.side]), this.panel.status, this.panel.table, this.panel.dialog);
    this.stage.appendChild(this.panel.card);
    this.paint = new T.Paint(this);
    this.input = new T.Input(this);
    this.watch = new ResizeObserver(function () { self.resize(); });
    this.watch.observe(this.stage);
    this.onTheme = function () { self.paint.theme(); self.draw(); };
    this.onUrl = function () { if (location.pathname + location.search !== self.written) { self.fromUrl(false); } };
    window.addEventListener("advisor-theme", this.onTheme);
    window.addEventListener("popstate", this.onUrl);
    window.addEventListener("_dashprivate_pushstate", this.onUrl);
    this.open(null);
  }

  Timeline.prototype.build = function () {
    var self = this;
    this.map = el("canvas", { cls: "tl-map", "aria-hidden": "true" });
    this.axis = el("canvas", { cls: "tl-axis", "aria-hidden": "true" });
    this.canvas = el("canvas", { cls: "tl-canvas", "aria-hidden": "true" });
    this.overlay = el("canvas", { cls: "tl-overlay", "aria-hidden": "true" });
    this.labels = el("div", { cls: "tl-labels" });
    this.content = el("div", { cls: "tl-content" }, [el("div", { cls: "tl-sticky" }, [this.canvas, this.overlay]), this.labels]);
    this.body = el("div", { cls: "tl-body" }, [this.content]);
    this.message = el("p", { cls: "tl-message", role: "status", text: "Reading…" });
    this.body.addEventListener("scroll", function () { self.scroll = self.body.scrollTop; self.draw(); });
    this.stage = el("div", {
      cls: "tl-stage", tabindex: "0", role: "application",
      "aria-label": "Timeline. W and S zoom, A and D pan, F fits, slash searches, question mark lists all keys. What is in view is in the table below."
    }, [el("div", { cls: "tl-top" }, [this.map, this.axis]), this.body, this.message]);
  };

  // Move to the place on the page that came later.
  Timeline.prototype.adopt = function (place) {
    var top = this.body.scrollTop, focus = document.activeElement;
    place.replaceChildren.apply(place, Array.from(this.root.childNodes));
    this.root.remove();
    this.root = place;
    this.early = false;
    performance.mark("advisor-frame-there");
    this.body.scrollTop = top;
    if (focus && place.contains(focus)) { focus.focus({ preventScroll: true }); }
    this.resize();
  };

  Timeline.prototype.destroy = function () {
    this.gone = true;
    if (this.early) { this.root.remove(); }
    this.input.destroy();
    this.watch.disconnect();
    window.removeEventListener("advisor-theme", this.onTheme);
    window.removeEventListener("popstate", this.onUrl);
    window.removeEventListener("_dashprivate_pushstate", this.onUrl);
  };

  // -- opening a rank ------------------------------------------------------------------------------

  // ``rank``: null is the one of the address, else the reported one, which "fallback" insists on.
  Timeline.prototype.open = function (rank, keep, fallback) {
    var self = this, asked = new URLSearchParams(location.search);
    if (rank === null && !fallback && /^-?\d{1,6}$/.test(asked.get("rank") || "")) { rank = Number(asked.get("rank")); }
    this.data = new T.Data(this.run, rank);
    this.answer = this.base = null;
    this.data.onnames = function () { self.draw(); };
    this.data.load().then(function (info) {
      if (self.gone) { return; }
      self.message.hidden = true;
      self.folded = {};
      info.groups.forEach(function (g) { self.folded[g.key] = g.folded; });
      self.paint.categories(info.categories);
      self.panel.options(info);
      if (keep) { self.choose(null); self.setView(keep[0], keep[1]); } else { self.fromUrl(true); }
      self.arrange();
      self.panel.welcome();
      if (!info.groups.length && !info.counters.length) { self.fail("There are no events in this trace."); }
    }, function (error) {
      if (rank !== null && !keep && !fallback) { self.open(null, null, true); return; }
      self.fail(error.message);
    });
  };

  Timeline.prototype.fail = function (why) {
    this.message.hidden = false;
    this.message.textContent = why;
    this.there();
    this.settle();
  };

  Timeline.prototype.setRank = function (rank) { this.finding = ""; this.query = ""; this.open(rank, [this.x0, this.x1]); };

  // -- the address ---------------------------------------------------------------------------------

  Timeline.prototype.fromUrl = function (first) {
    var info = this.data.info, asked = new URLSearchParams(location.search), focus = asked.get("focus") || "";
    if (!info) { return; }
    var whole = /^-?\d{1,18}$/, x0 = asked.get("x0") || "", x1 = asked.get("x1") || "";
    // focus names a finding; a link of the findings page gives the instant, and the finding beside it
    this.instant = whole.test(focus) ? Number(focus) : null;
    var finding = asked.get("finding") || (this.instant === null ? focus : "");
    var known = info.findings.filter(function (f) { return f.key === finding; })[0];
    this.finding = known ? finding : "";
    this.panel.focus.value = this.finding;
    this.query = (asked.get("q") || "").slice(0, 200);
    this.panel.search.value = this.query;
    if (this.query) { this.find(this.query, false, true); }
    if (whole.test(x0) && whole.test(x1) && Number(x1) > Number(x0)) { this.setView(Number(x0), Number(x1)); }
    else if (known && known.places.length) { this.showPlace(known.places[0], true); }
    else { this.setView(info.begin, info.finish); }
    if (/^\d{1,9}$/.test(asked.get("sel") || "")) { this.select(Number(asked.get("sel")), first); }
    else if (this.instant !== null) {
      var at = this.instant, place = known && known.places.filter(function (p) { return p.ts === at; })[0];
      this.selectAt(at, place ? place.dur : null);
    }
    this.ask();
    this.draw();
  };

  Timeline.prototype.toUrl = function () {
    var self = this;
    clearTimeout(this.urlTimer);
    this.urlTimer = setTimeout(function () {
      self.urlTimer = null;
      if (self.gone || !self.data.info) { return; }
      var asked = new URLSearchParams(location.search), info = self.data.info;
      function put(key, value) { if (value === null || value === "") { asked.delete(key); } else { asked.set(key, value); } }
      var all = Math.abs(self.x0 - info.begin) < 1 && Math.abs(self.x1 - info.finish) < 1;
      put("x0", all ? null : Math.floor(self.x0));
      put("x1", all ? null : Math.ceil(self.x1));
      put("rank", info.ranks.length > 1 || asked.has("rank") ? info.rank : null);
      put("finding", self.instant === null ? null : self.finding);
      put("focus", self.instant === null ? self.finding : self.instant);
      put("q", self.query);
      put("sel", self.chosen ? self.chosen.id : null);
      var text = asked.toString();
      self.written = location.pathname + (text ? "?" + text : "");
      if (self.written !== location.pathname + location.search) { history.replaceState(history.state, "", self.written); }
    }, 250);
  };

  // -- size and rows -------------------------------------------------------------------------------

  Timeline.prototype.resize = function () {
    var gutter = this.stage.clientWidth < 620 ? 0 : 188;
    var turned = this.narrow !== undefined && this.narrow !== !gutter;
    this.narrow = !gutter;
    this.stage.classList.toggle("narrow", this.narrow);
    this.stage.style.setProperty("--tl-gutter", gutter + "px");
    this.width = Math.max(this.body.clientWidth - gutter, 50);
    this.height = Math.max(this.body.clientHeight, 50);
    if (turned && this.layout) { this.arrange(); return; }
    this.ask();
    this.draw();
  };

  Timeline.prototype.arrange = function () {
    var self = this, info = this.data.info, layout = this.layout = T.layout(info, this.folded, this.narrow);
    this.content.style.height = layout.height + "px";
    this.labels.replaceChildren.apply(this.labels, layout.boxes.map(function (box) {
      var group = box.group, key = box.counters ? "counters" : group.key;
      var text = box.counters ? "Counters" : group.label, many = box.counters || group.count > 1;
      var node = el("button", {
        type: "button", cls: "tl-label" + (many ? " many" : "") + (box.shut ? " shut" : ""), "aria-expanded": box.shut ? "false" : "true", title: text
      }, [el("span", { cls: "tl-arrow", "aria-hidden": "true" }), el("span", { cls: "tl-text", text: text })]);
      node.style.height = self.narrow ? T.LABEL + "px" : Math.max(Math.min(box.h, many ? 24 : 22), 14) + "px";
      // the label stays in sight while any of its lanes is
      var frame = el("div", { cls: "tl-box" }, [node]), above = self.narrow ? T.LABEL + 2 : 0;
      frame.style.top = box.y - above + "px";
      frame.style.height = Math.max(box.h + above, 14) + "px";
      node.addEventListener("click", function () { self.fold(key); });
      return frame;
    }).concat(layout.rows.filter(function (row) { return row.counter !== undefined; }).map(function (row) {
      var counter = info.counters[row.counter], node = el("p", { cls: "tl-counter" }, [
        el("span", { text: counter.label }),
        el("span", { cls: "dim", text: (counter.low === counter.high ? "" : T.quantity(counter.low, counter.unit) + " – ") + T.quantity(counter.high, counter.unit) })
      ]);
      node.style.top = row.y + "px";
      return node;
    })));
    this.mapLanes = this.pickMap();
    this.ask();
    this.draw();
  };

  Timeline.prototype.fold = function (key) {
    this.folded[key] = !this.folded[key];
    this.arrange();
  };

  // The overview shows steps, idle time and the busiest stream; without a device the main thread.
  Timeline.prototype.pickMap = function () {
    var groups = this.data.info.groups, found = [];
    ["steps", "idle", "stream", "thread"].forEach(function (kind) {
      var group = groups.filter(function (g) { return g.kind === kind; })[0];
      if (group && (kind !== "thread" || found.length < 2)) { found.push(group.first); }
    });
    return found;
  };

  // -- moving --------------------------------------------------------------------------------------

  Timeline.prototype.timeAt = function (x) { return this.x0 + x / this.width * (this.x1 - this.x0); };

  Timeline.prototype.setView = function (x0, x1, moves) {
    var info = this.data.info, whole = info.finish - info.begin, span = T.clamp(x1 - x0, LEAST, whole * 1.2 + LEAST);
    var middle = T.clamp((x0 + x1) / 2, info.begin, info.finish), from = [this.x0, this.x1], self = this;
    var to = [middle - span / 2, middle + span / 2];
    cancelAnimationFrame(this.moving);
    if (!moves || T.calm() || document.hidden) { this.place(to[0], to[1]); return; }
    var began = performance.now();
    (function frame(now) {
      var part = T.clamp((now - began) / MOVE_MS, 0, 1), ease = 1 - Math.pow(1 - part, 3);
      self.place(from[0] + (to[0] - from[0]) * ease, from[1] + (to[1] - from[1]) * ease);
      if (part < 1 && !self.gone) { self.moving = requestAnimationFrame(frame); }
    })(began);
    this.target = to;
  };

  Timeline.prototype.place = function (x0, x1) {
    this.x0 = x0;
    this.x1 = x1;
    this.hover = null;
    this.panel.hover(null);
    this.ask();
    this.draw();
    this.toUrl();
  };

  Timeline.prototype.pan = function (share, moves) {
    var by = share * (this.x1 - this.x0), info = this.data.info, span = this.x1 - this.x0;
    var x0 = T.clamp(this.x0 + by, info.begin - span / 2, info.finish - span / 2);
    this.setView(x0, x0 + span, moves);
  };

  Timeline.prototype.zoom = function (factor, at, moves) {
    var span = this.x1 - this.x0, info = this.data.info, held = this.x0 + at * span;
    var wide = T.clamp(span * factor, LEAST, (info.finish - info.begin) * 1.2 + LEAST);
    this.setView(held - at * wide, held - at * wide + wide, moves);
  };

  Timeline.prototype.fit = function () {
    var info = this.data.info, c = this.chosen;
    if (c && c !== this.fitted) { this.fitted = c; this.zoomTo(c); return; }
    this.fitted = null;
    this.setView(info.begin, info.finish, true);
  };

  Timeline.prototype.zoomTo = function (slice) {
    var margin = Math.max(slice.dur * 0.6, 500);
    this.setView(slice.ts - margin, slice.ts + slice.dur + margin, true);
    this.reveal(slice);
  };

  Timeline.prototype.zoomToRange = function () {
    if (!this.range) { return; }
    var a = Math.min(this.range[0], this.range[1]), b = Math.max(this.range[0], this.range[1]);
    this.setView(a, b, true);
  };

  // Scroll a slice's lane into sight, opening what is folded.
  Timeline.prototype.reveal = function (slice) {
    var info = this.data.info, group = info.groups.filter(function (g) { return slice.lane >= g.first && slice.lane < g.first + g.count; })[0];
    if (group && this.folded[group.key]) { this.fold(group.key); }
    var row = this.layout && this.layout.rows[this.layout.byLane[slice.lane]];
    if (!row) { return; }
    if (row.y < this.body.scrollTop + 10 || row.y + row.h > this.body.scrollTop + this.height - 10) {
      this.body.scrollTop = Math.max(row.y - this.height / 2, 0);
    }
  };

  // Bring a slice into view without changing the zoom more than is needed to see it.
  Timeline.prototype.go = function (slice) {
    var span = this.x1 - this.x0, scale = this.width / span;
    if (slice.dur * scale < 3 || slice.dur > span) { this.zoomTo(slice); }
    else if (slice.ts < this.x0 || slice.ts + slice.dur > this.x1) {
      var middle = slice.ts + slice.dur / 2;
      this.setView(middle - span / 2, middle + span / 2, true);
      this.reveal(slice);
    } else { this.reveal(slice); }
    this.select(slice.id);
  };

  Timeline.prototype.showPlace = function (place, still) {
    var margin = Math.max(place.dur * 1.5, 20000);
    this.setView(place.ts - margin, place.ts + place.dur + margin, !still);
    this.selectAt(place.ts, place.dur);
  };

  // -- choosing ------------------------------------------------------------------------------------

  Timeline.prototype.choose = function (slice) {
    this.chosen = slice;
    if (slice) { this.range = null; this.panel.details(slice); } else { this.panel.welcome(); }
    this.draw();
    this.toUrl();
  };

  Timeline.prototype.select = function (id, show) {
    var self = this, data = this.data;
    return data.json("slice", { id: id }).then(function (slice) {
      if (self.data !== data) { return; }
      self.choose(slice);
      if (show) { self.reveal(slice); }
    }, function () { self.choose(null); });
  };

  Timeline.prototype.selectAt = function (ts, dur) {
    var self = this, query = { t: Math.round(ts) };
    if (dur !== null) { query.dur = Math.round(dur); }
    this.data.json("find", query).then(function (slice) {
      if (slice) { self.select(slice.id, true); }
    }, function () { /* an instant where nothing begins: the line shows it */ });
  };

  Timeline.prototype.beside = function (by) {
    var self = this, c = this.chosen;
    if (!c || c.id + by < 0) { return; }
    this.data.json("slice", { id: c.id + by }).then(function (slice) {
      if (slice.lane !== c.lane) { return; }
      self.choose(slice);
      if (slice.ts < self.x0 || slice.ts + slice.dur > self.x1) { self.go(slice); }
    }, function () { /* the last one */ });
  };

  Timeline.prototype.setRange = function (range, done) {
    this.range = range && Math.abs(range[1] - range[0]) >= 16 ? range : null;
    var self = this, r = this.range;
    if (this.range === null) { if (!this.chosen && this.data.info) { this.panel.welcome(); } }
    else if (done) {
      this.chosen = null;
      this.data.json("range", { x0: Math.floor(Math.min(r[0], r[1])), x1: Math.ceil(Math.max(r[0], r[1])) }).then(function (stats) {
        if (self.range === r) { self.panel.range(stats); }
      }, function () { self.setRange(null); });
    }
    this.draw();
  };

  Timeline.prototype.escape = function () {
    if (this.range) { this.setRange(null); }
    else if (this.chosen) { this.choose(null); }
    else if (this.query) { this.panel.search.value = ""; this.setQuery(""); }
    else if (this.finding) { this.setFinding("", false); }
  };

  Timeline.prototype.setFinding = function (key, show) {
    var found = this.data.info.findings.filter(function (f) { return f.key === key; })[0];
    this.finding = found ? key : "";
    this.instant = null;
    this.chosen = null;
    this.panel.focus.value = this.finding;
    this.panel.welcome();
    if (found && show && found.places.length) {
      if (found.rank !== null && found.rank !== this.data.rank && this.data.info.ranks.indexOf(found.rank) >= 0) {
        this.elsewhere(found);
        return;
      }
      this.setView(found.places[0].ts - Math.max(found.places[0].dur * 1.5, 20000), found.places[0].ts + found.places[0].dur + Math.max(found.places[0].dur * 1.5, 20000), true);
      this.revealPlace(found.places[0]);
    }
    this.ask();
    this.toUrl();
  };

  Timeline.prototype.elsewhere = function (found) {
    var place = found.places[0], margin = Math.max(place.dur * 1.5, 20000);
    this.open(found.rank, [place.ts - margin, place.ts + place.dur + margin]);
  };

  Timeline.prototype.revealPlace = function (place) {
    var self = this;
    this.data.json("find", { t: Math.round(place.ts), dur: Math.round(place.dur) }).then(function (slice) {
      if (slice) { self.reveal(slice); }
    }, function () { /* nothing to scroll to */ });
  };

  Timeline.prototype.setQuery = function (query) {
    query = query.trim();
    if (query === this.query) { return; }
    this.query = query;
    if (!query) { this.panel.found(null); } else { this.find(query, false, true); }
    this.ask();
    this.draw();
    this.toUrl();
  };

  // Go to the next found slice; with "only" just count them.
  Timeline.prototype.find = function (query, back, only) {
    var self = this, data = this.data;
    query = query.trim();
    if (!query) { this.setQuery(""); return Promise.resolve(); }
    if (query !== this.query) { this.query = query; this.ask(); this.toUrl(); }
    var ask = { q: query, back: back ? 1 : 0, t: Math.round(this.x0) };
    if (this.chosen && !only) { ask.id = this.chosen.id; ask.t = this.chosen.ts; }
    return data.json("search", ask).then(function (answer) {
      if (self.query !== query || self.data !== data) { return; }
      if (only) { delete answer.at; }
      self.panel.found(answer);
      if (!only && answer.total) { self.go(answer); }
    }, function () { self.panel.found({ total: 0 }); });
  };

  Timeline.prototype.next = function (back) { if (this.query) { this.find(this.query, back); } };

  // -- pointing ------------------------------------------------------------------------------------

  Timeline.prototype.rowAt = function (y) {
    var rows = this.layout ? this.layout.rows : [], at = y + this.scroll;
    for (var i = 0; i < rows.length; i++) { if (at >= rows[i].y - 1 && at < rows[i].y + rows[i].h + 1) { return rows[i]; } }
    return null;
  };

  // The slice drawn at a place; among narrow ones the one nearest.
  Timeline.prototype.sliceAt = function (x, y) {
    var row = this.rowAt(y), a = this.answer;
    if (!row || row.lane === undefined || !a) { return null; }
    var s = a.slices, at = this.timeAt(x) - a.x0, slack = 2 * (this.x1 - this.x0) / this.width, best = -1, nearest = slack;
    for (var i = 0; i < s.n; i++) {
      if (s.lane[i] !== row.lane) { continue; }
      var off = at < s.start[i] ? s.start[i] - at : at > s.start[i] + s.dur[i] ? at - s.start[i] - s.dur[i] : 0;
      if (off <= nearest && (best < 0 || off < nearest)) { best = i; nearest = off; }
    }
    if (best < 0) { return null; }
    return {
      id: s.id[best], lane: row.lane, ts: a.x0 + s.start[best], dur: s.dur[best], name: this.data.names[s.name[best]],
      label: this.data.info.categories[s.category[best]][1], count: 1
    };
  };

  Timeline.prototype.cellAt = function (x, y) {
    var row = this.rowAt(y), a = this.answer;
    if (!row || row.lane === undefined || !a) { return null; }
    var r = a.runs, cell = (this.timeAt(x) - a.cell0) / a.cell;
    for (var i = 0; i < r.n; i++) {
      if (r.lane[i] === row.lane && cell >= r.cell[i] - 1 && cell < r.cell[i] + r.width[i] + 1) { return row.lane; }
    }
    return null;
  };

  // A counter's value under the pointer.
  Timeline.prototype.counterAt = function (x, y) {
    var row = this.rowAt(y), a = this.answer, at = row && row.counter !== undefined && a ? a.asked.indexOf(row.counter) : -1;
    if (at < 0) { return null; }
    var counter = this.data.info.counters[row.counter], i = Math.floor((this.timeAt(x) - a.x0) / (a.x1 - a.x0) * a.px);
    var low = a.low[at * a.px + i], high = a.high[at * a.px + i];
    if (!(i >= 0 && i < a.px) || low !== low) { return { counter: counter.label, value: "no sample" }; }
    var text = T.quantity(high, counter.unit);
    return { counter: counter.label, value: low === high ? text : T.quantity(low, counter.unit) + " – " + text };
  };

  Timeline.prototype.under = function (x, y) {
    var lane = this.cellAt(x, y);
    if (lane === null) { return Promise.resolve(null); }
    return this.data.json("at", { lane: lane, t: Math.round(this.timeAt(x)), reach: Math.max(1, Math.round(1.5 * (this.x1 - this.x0) / this.width)) });
  };

  Timeline.prototype.point = function (x, y) {
    var self = this, found = x === null ? null : this.sliceAt(x, y), card = this.panel;
    this.pointer = x;
    clearTimeout(this.pointTimer);
    this.hover = found;
    var left = this.overlay.parentNode.offsetLeft + x, top = this.body.offsetTop + y;
    card.hover(found || (x !== null && this.counterAt(x, y)), left, top);
    if (!found && x !== null) {
      this.pointTimer = setTimeout(function () {
        self.under(x, y).then(function (slice) {
          if (!slice || self.pointer !== x || self.gone) { return; }
          slice.label = slice.category;
          self.hover = slice;
          card.hover(slice, left, top);
          self.draw();
        }, function () { /* nothing there */ });
      }, 60);
    }
    this.drawOver();
  };

  Timeline.prototype.click = function (x, y) {
    var self = this, found = this.sliceAt(x, y);
    if (found) { this.select(found.id); this.range = null; return; }
    this.under(x, y).then(function (slice) {
      if (slice) { self.range = null; self.select(slice.id); }
      else { self.setRange(null); self.choose(null); }
    }, function () { self.choose(null); });
  };

  // -- asking --------------------------------------------------------------------------------------

  // Lanes on the screen and a screen above and below it.
  Timeline.prototype.wanted = function () {
    var lanes = [], counters = [], top = this.scroll - this.height, bottom = this.scroll + 2 * this.height;
    this.layout.rows.forEach(function (row) {
      if (row.y > bottom || row.y + row.h < top) { return; }
      if (row.lane !== undefined) { lanes.push(row.lane); } else { counters.push(row.counter); }
    });
    return { lanes: lanes.slice(0, 1000), counters: counters };
  };

  Timeline.prototype.covered = function () {
    var a = this.answer;
    return Boolean(a && a.x0 <= Math.max(this.x0, a.low0) && a.x1 >= Math.min(this.x1, a.high0));
  };

  // Whether the last answer is as good as a new one would be.
  Timeline.prototype.enough = function (want) {
    var a = this.answer;
    if (!this.covered() || a.focus !== this.finding || a.q !== this.query) { return false; }
    var ideal = (this.x1 - this.x0) / (this.width * this.sharp());
    if (a.cell > Math.max(ideal, 1) * 1.01 || (a.cell < ideal / 4 && a.x1 - a.x0 > 3 * (this.x1 - this.x0))) { return false; }
    return want.lanes.every(function (lane) { return a.has[lane]; }) && want.counters.every(function (c) { return a.asked.indexOf(c) >= 0; });
  };

  Timeline.prototype.sharp = function () { return T.clamp(window.devicePixelRatio || 1, 1, 2); };

  Timeline.prototype.ask = function () {
    if (!this.layout || !this.data.info || this.flying || this.gone) { return; }
    var want = this.wanted(), self = this, data = this.data, span = this.x1 - this.x0, info = data.info;
    if (this.enough(want)) { this.settle(); return; }
    var slack = (info.finish - info.begin) * 0.1 + 1000;
    var low = Math.floor(Math.max(this.x0 - MARGIN * span, info.begin - slack)), high = Math.ceil(Math.min(this.x1 + MARGIN * span, info.finish + slack));
    if (high - low < 64) { high = low + 64; }
    var px = Math.round(T.clamp((high - low) / span * this.width * this.sharp(), 16, 8192));
    var focus = this.finding, q = this.query;
    this.flying = data.view(low, high, px, want.lanes, want.counters, focus, q).then(function (answer) {
      self.flying = null;
      if (self.gone || self.data !== data) { self.ask(); return; }
      if (answer.version !== info.version) { self.open(data.rank, [self.x0, self.x1]); return; }  // a live run's next window
      answer.asked = want.counters;
      answer.has = [];
      want.lanes.forEach(function (lane) { answer.has[lane] = true; });
      answer.focus = focus;
      answer.q = q;
      answer.low0 = info.begin;
      answer.high0 = info.finish;
      self.answer = answer;
      self.problem = null;
      if (!self.base) { self.wide(); }
      self.draw();
      self.ask();
    }, function (error) {
      self.flying = null;
      self.problem = error;
      self.panel.status.textContent = "The server does not answer: " + error.message;
      self.there();
      self.settle();
    });
  };

  // Everything once, coarsely: for the overview, and to be seen while a finer answer comes.
  Timeline.prototype.wide = function () {
    var self = this, data = this.data, info = data.info, lanes = this.wanted().lanes.concat(this.mapLanes);
    lanes = lanes.filter(function (lane, i) { return lanes.indexOf(lane) === i; }).sort(function (a, b) { return a - b; });
    data.view(info.begin, Math.max(info.finish, info.begin + 64), Math.round(T.clamp(this.width, 64, 4096)), lanes, [], "", "").then(function (base) {
      if (self.data !== data) { return; }
      var s = base.slices, first = info.groups.filter(function (g) { return g.kind === "steps"; })[0];
      base.has = [];
      base.asked = [];
      self.base = base;
      self.steps = [];
      for (var i = 0; first && i < s.n; i++) { if (s.lane[i] === first.first) { self.steps.push(base.x0 + s.start[i]); } }
      self.draw();
    }, function () { self.there(); /* the overview stays empty */ });
  };

  // -- drawing -------------------------------------------------------------------------------------

  Timeline.prototype.draw = function () {
    var self = this;
    if (this.frame || this.gone) { return; }
    this.frame = requestAnimationFrame(function () {
      self.frame = null;
      if (self.gone) { return; }
      self.paint.main();
      self.paint.axis();
      self.paint.overview();
      self.paint.over();
      self.panel.say();
      self.panel.later("calm", 350, function () { self.panel.colours(); self.panel.fill(); });
      if (self.answer && !self.painted) {
        self.painted = performance.now();
        performance.mark("advisor-timeline-painted");
      }
      if (self.answer && self.base) { self.there(); }
      self.settle();
    });
  };

  // Said once there is a picture, or never will be: the frame's scripts wait for it.
  Timeline.prototype.there = function () {
    if (this.said) { return; }
    this.said = true;
    setTimeout(function () { window.dispatchEvent(new Event("advisor-timeline-there")); });
  };

  Timeline.prototype.drawOver = function () {
    var self = this;
    if (this.overFrame || this.frame) { return; }
    this.overFrame = requestAnimationFrame(function () { self.overFrame = null; self.paint.over(); });
  };

  // Resolves once what the view shows is all that can be shown of it: for tests and measurements.
  Timeline.prototype.settled = function () {
    var self = this;
    return new Promise(function (done) { self.waiters.push(done); self.settle(); });
  };

  Timeline.prototype.settle = function () {
    if (!this.waiters.length || this.flying || this.frame) { return; }
    if (!this.problem && this.message.hidden && (!this.layout || !this.data.info || !this.enough(this.wanted()))) { return; }
    if (!this.problem && !this.message.hidden && this.message.textContent === "Reading…") { return; }
    this.waiters.splice(0).forEach(function (done) { done(); });
  };

  T.Timeline = Timeline;
  T.start();
})();
