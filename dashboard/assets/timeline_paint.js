// Timeline, 4 of 6: pixels. Rows are laid out once; a frame is drawn from the last answers.
(function () {
  "use strict";
  var T = window.advisorTimeline;
  if (T.Paint) { return; }

  var HEIGHT = { steps: 20, phases: 16, idle: 22, stream: 22, collectives: 18, copies: 18, sync: 14, thread: 15, overhead: 14 };
  var THIN = 8, GAP = 7, COUNTER = 40, HALO = 4, LABEL = 14, HEAD = 22;
  T.LABEL = LABEL;

  // Rows of the picture from top to bottom: {y, h, lane} and {y, h, counter}, and the groups' boxes.
  // Without room for a gutter the labels have a line of their own.
  T.layout = function (info, folded, narrow) {
    var y = GAP, rows = [], boxes = [], byLane = [];
    info.groups.forEach(function (group, number) {
      y += narrow ? LABEL : 0;
      var top = y, shut = folded[group.key], shown = shut ? 1 : group.count;
      var h = HEIGHT[group.kind] || 16;
      for (var i = 0; i < shown; i++) {
        var own = shut && group.count === 1 ? THIN : h;
        byLane[group.first + i] = rows.length;
        rows.push({ y: y, h: own, lane: group.first + i, group: number });
        y += own + 1;
      }
      boxes.push({ y: top, h: y - top, group: group, shut: shut });
      y += GAP;
    });
    if (info.counters.length) {
      y += narrow ? LABEL : 0;
      var first = y, all = folded.counters;
      if (!all) {
        y += narrow ? 0 : HEAD;
        info.counters.forEach(function (counter, i) {
          rows.push({ y: y, h: COUNTER - 8, counter: i });
          y += COUNTER;
        });
      } else { y += THIN * 2; }
      boxes.push({ y: first, h: y - first, counters: true, shut: all });
    }
    return { rows: rows, boxes: boxes, height: y + GAP, byLane: byLane };
  };

  function luminance(hex) {
    function part(at) {
      var v = parseInt(hex.slice(at, at + 2), 16) / 255;
      return v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4);
    }
    return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
  }

  function Paint(timeline) {
    this.t = timeline;
    this.widths = new Map();
    this.theme();
  }

  // Colours of the page as it is now; those of the slices are the same in both themes.
  Paint.prototype.theme = function () {
    var style = getComputedStyle(document.documentElement), self = this;
    ["bg", "card", "sunk", "line", "line-strong", "text", "dim", "accent"].forEach(function (name) {
      self[name.replace("-", "_")] = style.getPropertyValue("--" + name).trim() || "#888";
    });
    this.font = style.getPropertyValue("--sans").trim() || "sans-serif";
    this.dark = luminance(/^#[0-9a-f]{6}$/i.test(this.card) ? this.card : "#ffffff") < 0.2;
    this.outline = this.dark ? "#ffffff" : "#101014";
  };

  Paint.prototype.categories = function (list) {
    this.colours = list.map(function (c) { return c[2]; });
    // white on it, or black: what has more contrast
    this.inks = list.map(function (c) { return luminance(c[2]) > 0.19 ? "#101014" : "#ffffff"; });
  };

  Paint.prototype.size = function (canvas, width, height) {
    var dpr = T.clamp(window.devicePixelRatio || 1, 1, 3);
    if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(height * dpr)) {
      canvas.width = Math.round(width * dpr);
      canvas.height = Math.round(height * dpr);
      canvas.style.width = width + "px";
      canvas.style.height = height + "px";
    }
    var ctx = canvas.getContext("2d");
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.clearRect(0, 0, width, height);
    this.dpr = dpr;
    return ctx;
  };

  Paint.prototype.snap = function (x) { return Math.round(x * this.dpr) / this.dpr; };

  // -- the lanes -------------------------------------------------------------------------------

  Paint.prototype.main = function () {
    var t = this.t, w = t.width, h = t.height, top = t.scroll, layout = t.layout, self = this;
    var ctx = this.size(t.canvas, w, h);
    if (!layout || !t.data.info) { return; }
    var scale = w / (t.x1 - t.x0);
    ctx.fillStyle = this.card;
    ctx.fillRect(0, 0, w, h);
    this.grounds(ctx, layout, w, h, top);
    this.grid(ctx, w, h);
    var answers = t.covered() ? [t.answer] : [t.base, t.answer];
    answers.forEach(function (answer, i) {
      if (answer) { self.cells(ctx, answer, scale, layout, top, answers.length > 1 && i === 0 ? t.answer : null); }
    });
    answers.forEach(function (answer, i) {
      if (answer) { self.slices(ctx, answer, scale, layout, top, answers.length > 1 && i === 0 ? t.answer : null); }
    });
    if (t.answer) { this.flagged(ctx, t.answer, scale, layout, top); }
    this.outside(ctx, w, h);
    if (t.answer) { this.counters(ctx, t.answer, scale, layout, top); }
  };

  Paint.prototype.grounds = function (ctx, layout, w, h, top) {
    var line = this.line;
    layout.boxes.forEach(function (box) {
      var y = box.y - top + box.h + 3;
      if (y < 0 || box.y - top > h) { return; }
      ctx.fillStyle = line;
      ctx.fillRect(0, Math.round(y), w, 1);
    });
  };

  // Lines where steps begin, so that one can see over all lanes to which step something belongs.
  Paint.prototype.grid = function (ctx, w, h) {
    var t = this.t, starts = t.steps, scale = w / (t.x1 - t.x0);
    if (!starts || starts.length * 3 > w) { return; }
    ctx.fillStyle = this.line_strong;
    for (var i = 0; i < starts.length; i++) {
      var x = (starts[i] - t.x0) * scale;
      if (x >= 0 && x <= w) { ctx.fillRect(Math.round(x), 0, 1, h); }
    }
  };

  // Beyond the first and last event nothing was recorded: hatched, not empty.
  Paint.prototype.outside = function (ctx, w, h) {
    var t = this.t, info = t.data.info, scale = w / (t.x1 - t.x0);
    var left = (info.begin - t.x0) * scale, right = (info.finish - t.x0) * scale;
    ctx.fillStyle = this.sunk;
    if (left > 0) { ctx.fillRect(0, 0, Math.min(left, w), h); }
    if (right < w) { ctx.fillRect(Math.max(right, 0), 0, w, h); }
  };

  Paint.prototype.cells = function (ctx, answer, scale, layout, top, except) {
    var r = answer.runs, t = this.t, colours = this.colours, rows = layout.rows, byLane = layout.byLane;
    var cell = answer.cell, base = (answer.cell0 - t.x0) * scale, size = cell * scale, w = t.width, h = t.height;
    var dim = t.finding || t.query ? 0.38 : 1, last = -1;
    // where a fresher answer is drawn over this one, this one is left out
    var from = except ? (except.x0 - t.x0) * scale : w + 1, to = except ? (except.x1 - t.x0) * scale : w + 1;
    for (var i = 0; i < r.n; i++) {
      var row = rows[byLane[r.lane[i]]];
      if (!row) { continue; }
      var y = row.y - top;
      if (y > h || y + row.h < 0) { continue; }
      var a = base + r.cell[i] * size, b = a + r.width[i] * size;
      if (b < 0 || a > w || (a >= from && b <= to && except.has[r.lane[i]])) { continue; }
      var x = this.snap(Math.max(a, -2)), width = Math.max(this.snap(Math.min(b, w + 2)) - x, 1 / this.dpr);
      if (r.category[i] !== last) { last = r.category[i]; ctx.fillStyle = colours[last]; }
      ctx.globalAlpha = dim * (0.3 + 0.7 * r.cover[i] / 255);
      ctx.fillRect(x, y, width, row.h);
    }
    ctx.globalAlpha = 1;
  };

  Paint.prototype.slices = function (ctx, answer, scale, layout, top, except) {
    var s = answer.slices, t = this.t, rows = layout.rows, byLane = layout.byLane, w = t.width, h = t.height;
    var shift = answer.x0 - t.x0, dimmed = Boolean(t.finding || t.query), names = t.data.names;
    var from = except ? (except.x0 - t.x0) * scale : w + 1, to = except ? (except.x1 - t.x0) * scale : w + 1;
    ctx.textBaseline = "middle";
    ctx.font = "11px " + this.font;
    for (var i = 0; i < s.n; i++) {
      var row = rows[byLane[s.lane[i]]];
      if (!row) { continue; }
      var y = row.y - top;
      if (y > h || y + row.h < 0) { continue; }
      var a = (shift + s.start[i]) * scale, b = a + s.dur[i] * scale;
      if (b < 0 || a > w || (a >= from && b <= to && except.has[s.lane[i]])) { continue; }
      var x = this.snap(Math.max(a, -4)), end = this.snap(Math.min(b, w + 4));
      var width = Math.max(end - x - (b - a > 3 ? 1 / this.dpr : 0), 1 / this.dpr);
      ctx.globalAlpha = dimmed && !s.flags[i] ? 0.3 : 1;
      ctx.fillStyle = this.colours[s.category[i]];
      ctx.fillRect(x, y, width, row.h);
      if (width > 26 && row.h > 11) {
        // on a dimmed slice the ground shows through: the page's own ink is the one to read
        var dull = dimmed && !s.flags[i];
        ctx.globalAlpha = dull ? 0.75 : 1;
        ctx.fillStyle = dull ? this.dim : this.inks[s.category[i]];
        this.label(ctx, names[s.name[i]], x, y, width, row.h, s.dur[i]);
      }
      if (s.flags[i] & 1) { this.mark(ctx, x, y, width, row.h, 1); }
      else if (s.flags[i] & 2) { this.mark(ctx, x, y, width, row.h, 2); }
    }
    ctx.globalAlpha = 1;
  };

  // The name as far as it fits, and the duration behind it where there is room.
  Paint.prototype.label = function (ctx, name, x, y, width, height, dur) {
    if (!name) { return; }
    var left = Math.max(x, 0) + 4, room = Math.min(x + width, this.t.width) - left - 4;
    if (room < 14) { return; }
    var text = T.short(name), full = this.measure(ctx, text);
    if (full > room) {
      var fit = Math.floor(text.length * room / full) - 1;
      if (fit < 2) { return; }
      text = text.slice(0, fit) + "…";
    } else {
      var time = T.time(dur);
      if (full + 60 < room) {
        ctx.globalAlpha *= 0.72;
        ctx.fillText(time, left + full + 8, y + height / 2 + 0.5);
        ctx.globalAlpha /= 0.72;
      }
    }
    ctx.fillText(text, left, y + height / 2 + 0.5);
  };

  Paint.prototype.measure = function (ctx, text) {
    var width = this.widths.get(text);
    if (width === undefined) {
      if (this.widths.size > 20000) { this.widths.clear(); }
      width = ctx.measureText(text).width;
      this.widths.set(text, width);
    }
    return width;
  };

  Paint.prototype.mark = function (ctx, x, y, width, height, kind) {
    ctx.globalAlpha = 1;
    ctx.lineWidth = kind === 1 ? 2 : 1.5;
    ctx.strokeStyle = kind === 1 ? this.outline : this.accent;
    if (width < 3) { ctx.fillStyle = ctx.strokeStyle; ctx.fillRect(x, y - 2, Math.max(width, 1.5), height + 4); return; }
    ctx.strokeRect(x + 1, y + 1, width - 2, height - 2);
  };

  Paint.prototype.flagged = function (ctx, answer, scale, layout, top) {
    var f = answer.flagged, t = this.t, base = (answer.cell0 - t.x0) * scale, size = answer.cell * scale;
    for (var i = 0; i < f.n; i++) {
      var row = layout.rows[layout.byLane[f.lane[i]]];
      if (!row) { continue; }
      var a = base + f.cell[i] * size, b = a + f.width[i] * size, y = row.y - top;
      if (b < 0 || a > t.width || y > t.height || y + row.h < 0) { continue; }
      var x = this.snap(a), width = Math.max(b - a, 1.5);
      ctx.fillStyle = f.flags[i] & 1 ? this.outline : this.accent;
      // a bar above and below, with the cell's own colour in full between them
      ctx.fillRect(x, y - 1, width, 2.5);
      ctx.fillRect(x, y + row.h - 1.5, width, 2.5);
    }
  };

  Paint.prototype.counters = function (ctx, answer, scale, layout, top) {
    var t = this.t, info = t.data.info, w = t.width, self = this;
    var step = (answer.x1 - answer.x0) / answer.px;
    layout.rows.forEach(function (row) {
      if (row.counter === undefined) { return; }
      var at = answer.asked.indexOf(row.counter), y = row.y - top;
      if (at < 0 || y > t.height || y + row.h < 0) { return; }
      var counter = info.counters[row.counter], low = counter.unit === "%" ? 0 : Math.min(counter.low, 0);
      var high = counter.unit === "%" ? 100 : counter.high, span = high - low || 1;
      if (counter.unit === "MHz" || counter.unit === "°C") { low = Math.min(counter.low, counter.high * 0.8); span = high - low || 1; }
      ctx.fillStyle = self.accent;
      var base = at * answer.px;
      for (var i = 0; i < answer.px; i++) {
        var value = answer.high[base + i], least = answer.low[base + i];
        if (value !== value) { continue; }
        var x = ((answer.x0 - t.x0) + i * step) * scale, width = step * scale;
        if (x + width < 0 || x > w) { continue; }
        var up = row.h * T.clamp((value - low) / span, 0, 1), down = row.h * T.clamp((least - low) / span, 0, 1);
        x = self.snap(x);
        ctx.globalAlpha = 0.22;
        ctx.fillRect(x, y + row.h - up, Math.max(self.snap(x + width) - x, 0.5), up);
        ctx.globalAlpha = 1;
        ctx.fillRect(x, y + row.h - up - 0.5, Math.max(self.snap(x + width) - x, 0.5), Math.max(up - down, 1.5));
      }
    });
  };

  // -- axis and overview -----------------------------------------------------------------------

  T.tick = function (span, width) {
    var rough = span / Math.max(width / 110, 1), size = Math.pow(10, Math.floor(Math.log10(rough)));
    var step = [1, 2, 5, 10].filter(function (m) { return m * size >= rough; })[0] * size;
    return Math.max(step, 1);
  };

  Paint.prototype.axis = function () {
    var t = this.t, w = t.width, ctx = this.size(t.axis, w, 26), span = t.x1 - t.x0;
    var step = T.tick(span, w), first = Math.ceil(t.x0 / step) * step, scale = w / span;
    ctx.font = "11px " + this.font;
    ctx.textBaseline = "middle";
    for (var at = first, n = 0; at < t.x1 && n < 100; at += step, n++) {
      var x = Math.round((at - t.x0) * scale);
      ctx.fillStyle = this.line_strong;
      ctx.fillRect(x, 16, 1, 10);
      ctx.fillStyle = this.dim;
      var text = T.instant(at, step);
      if (x + 6 + this.measure(ctx, text) < w) { ctx.fillText(text, x + 4, 10); }
    }
    for (at = first - step; at < t.x1 && n < 1000; at += step / 5, n++) {
      ctx.fillStyle = this.line;
      ctx.fillRect(Math.round((at - t.x0) * scale), 21, 1, 5);
    }
  };

  Paint.prototype.overview = function () {
    var t = this.t, w = t.width, h = 34, ctx = this.size(t.map, w, h), base = t.base, info = t.data.info;
    if (!info) { return; }
    var span = info.finish - info.begin, scale = w / span, self = this;
    ctx.fillStyle = this.sunk;
    ctx.fillRect(0, 0, w, h);
    if (base) {
      var rows = t.mapLanes, height = (h - 6) / Math.max(rows.length, 1);
      var draw = function (lane, a, b, colour, alpha) {
        var row = rows.indexOf(lane);
        if (row < 0) { return; }
        ctx.fillStyle = colour;
        ctx.globalAlpha = alpha;
        ctx.fillRect(a, 3 + row * height, Math.max(b - a, 0.5), height - 1);
      };
      var r = base.runs, s = base.slices, i, x;
      for (i = 0; i < r.n; i++) {
        x = (base.cell0 + r.cell[i] * base.cell - info.begin) * scale;
        draw(r.lane[i], x, x + r.width[i] * base.cell * scale, self.colours[r.category[i]], 0.3 + 0.7 * r.cover[i] / 255);
      }
      for (i = 0; i < s.n; i++) {
        x = (base.x0 + s.start[i] - info.begin) * scale;
        draw(s.lane[i], x, x + s.dur[i] * scale, self.colours[s.category[i]], 1);
      }
      ctx.globalAlpha = 1;
    }
    var left = (t.x0 - info.begin) * scale, right = (t.x1 - info.begin) * scale;
    ctx.fillStyle = this.card;
    ctx.globalAlpha = 0.66;
    ctx.fillRect(0, 0, Math.max(left, 0), h);
    ctx.fillRect(Math.min(right, w), 0, w, h);
    ctx.globalAlpha = 1;
    left = T.clamp(left, 1, w - 4);
    right = T.clamp(right, left + 3, w - 1);
    ctx.strokeStyle = this.accent;
    ctx.lineWidth = 2;
    ctx.strokeRect(left, 1, right - left, h - 2);
    ctx.fillStyle = this.accent;
    ctx.fillRect(left - 2, h / 2 - 6, 4, 12);
    ctx.fillRect(right - 2, h / 2 - 6, 4, 12);
  };

  // -- what lies over the lanes: selection, arrows, the chosen range -----------------------------

  Paint.prototype.over = function () {
    var t = this.t, w = t.width, h = t.height, ctx = this.size(t.overlay, w, h), scale = w / (t.x1 - t.x0), self = this;
    if (!t.layout) { return; }
    if (t.range) {
      var a = (Math.min(t.range[0], t.range[1]) - t.x0) * scale, b = (Math.max(t.range[0], t.range[1]) - t.x0) * scale;
      ctx.fillStyle = this.accent;
      ctx.globalAlpha = 0.13;
      ctx.fillRect(a, 0, b - a, h);
      ctx.globalAlpha = 1;
      ctx.fillRect(Math.round(a), 0, 1, h);
      ctx.fillRect(Math.round(b), 0, 1, h);
      var text = T.time(Math.abs(t.range[1] - t.range[0]));
      ctx.font = "600 11px " + this.font;
      var tw = ctx.measureText(text).width + 12, x = T.clamp((a + b) / 2 - tw / 2, 2, w - tw - 2);
      ctx.fillRect(x, 4, tw, 18);
      ctx.fillStyle = this.card;
      ctx.textBaseline = "middle";
      ctx.fillText(text, x + 6, 13.5);
    } else if (t.pointer !== null) {
      ctx.fillStyle = this.dim;
      ctx.globalAlpha = 0.5;
      ctx.fillRect(Math.round(t.pointer), 0, 1, h);
      ctx.globalAlpha = 1;
    }
    if (t.instant !== null) {
      ctx.strokeStyle = this.accent;
      ctx.setLineDash([4, 3]);
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo((t.instant - t.x0) * scale, 0);
      ctx.lineTo((t.instant - t.x0) * scale, h);
      ctx.stroke();
      ctx.setLineDash([]);
    }
    if (t.hover) { this.frame(ctx, t.hover, this.dim, 1.5); }
    if (t.chosen) {
      this.frame(ctx, t.chosen, this.accent, 2.5);
      var links = t.chosen.links || [], many = links.filter(function (link) { return link.kind === "launched"; }).length > 8;
      links.forEach(function (link) {
        if (link.kind !== "inside" && link.kind !== "operator" && !(many && link.kind === "launched")) { self.arrow(ctx, t.chosen, link); }
      });
    }
  };

  Paint.prototype.box = function (slice) {
    var t = this.t, row = t.layout.rows[t.layout.byLane[slice.lane]], scale = t.width / (t.x1 - t.x0);
    if (!row) { return null; }
    var x = (slice.ts - t.x0) * scale;
    return { x: x, y: row.y - t.scroll, w: Math.max(slice.dur * scale, 2), h: row.h };
  };

  Paint.prototype.frame = function (ctx, slice, colour, width) {
    var box = this.box(slice);
    if (!box || box.x > this.t.width + HALO || box.x + box.w < -HALO) { return; }
    var x = Math.max(box.x, -HALO), right = Math.min(box.x + box.w, this.t.width + HALO);
    ctx.strokeStyle = colour;
    ctx.lineWidth = width;
    ctx.strokeRect(x - 1, box.y - 1, right - x + 2, box.h + 2);
  };

  Paint.prototype.arrow = function (ctx, from, link) {
    var back = link.kind === "launched by" || link.kind === "blamed on" || link.kind === "explained by";
    var a = this.box(back ? link : from), b = this.box(back ? from : link), w = this.t.width;
    if (!a || !b) { return; }
    var x0 = T.clamp(a.x + Math.min(a.w, 6) / 2, -40, w + 40), y0 = a.y + a.h / 2;
    var x1 = T.clamp(b.x, -40, w + 40), y1 = b.y + b.h / 2, bend = Math.max(Math.abs(x1 - x0) * 0.4, 24);
    ctx.strokeStyle = this.card;
    ctx.lineWidth = 4;
    for (var pass = 0; pass < 2; pass++) {
      ctx.beginPath();
      ctx.moveTo(x0, y0);
      ctx.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
      ctx.stroke();
      ctx.strokeStyle = this.accent;
      ctx.lineWidth = 1.75;
    }
    ctx.fillStyle = this.accent;
    ctx.beginPath();
    ctx.moveTo(x1 + 1, y1);
    ctx.lineTo(x1 - 7, y1 - 4);
    ctx.lineTo(x1 - 7, y1 + 4);
    ctx.fill();
    ctx.beginPath();
    ctx.arc(x0, y0, 3, 0, 7);
    ctx.fill();
  };

  // "void at::native::(anonymous namespace)::foo<int>(…)" -> "at::native::foo<int>"
  T.short = function (name) {
    var text = name.replace(/^void /, "").replace(/\(anonymous namespace\)::/g, "");
    if (/^[\w:]*::[\w]/.test(text) && text.indexOf("<") > 0) {
      var head = text.slice(0, text.indexOf("<")), last = head.split("::").slice(-1)[0];
      if (head.indexOf("at::native") === 0 || head.indexOf("at_cuda_detail") === 0 || head.indexOf("cutlass") === 0) {
        var inner = /(\w*(?:[Ff]unctor|_kernel|gemm|relu|Op|_op)\w*)/.exec(text.slice(text.indexOf("<")));
        return last + (inner ? " · " + inner[1] : "");
      }
      return last + text.slice(text.indexOf("<"));
    }
    return text;
  };

  T.Paint = Paint;
})();
