// Timeline, 3 of 6: pointer, wheel, touch and keys.
(function () {
  "use strict";
  var T = window.advisorTimeline;
  if (T.Input) { return; }
  var CLICK = 4;

  function Input(timeline) {
    this.t = timeline;
    this.pointers = new Map();
    this.drag = null;
    this.off = [];
    var t = timeline, self = this;
    this.on(t.overlay, "wheel", function (e) { self.wheel(e); }, { passive: false });
    this.on(t.overlay, "pointerdown", function (e) { self.down(e); });
    this.on(t.overlay, "pointermove", function (e) { self.move(e); });
    this.on(t.overlay, "pointerup", function (e) { self.up(e); });
    this.on(t.overlay, "pointercancel", function (e) { self.cancel(e); });
    this.on(t.overlay, "pointerleave", function () { t.point(null, null); });
    this.on(t.overlay, "dblclick", function () { if (t.chosen) { t.zoomTo(t.chosen); } });
    this.on(t.axis, "wheel", function (e) { self.wheel(e); }, { passive: false });
    this.strip(t.axis, function () { return [t.x0, t.x1]; }, false);
    this.strip(t.map, function () { return [t.data.info.begin, t.data.info.finish]; }, true);
    this.on(document, "keydown", function (e) { self.key(e); });
  }

  Input.prototype.on = function (target, name, listener, options) {
    target.addEventListener(name, listener, options);
    this.off.push(function () { target.removeEventListener(name, listener, options); });
  };

  Input.prototype.destroy = function () { this.off.forEach(function (f) { f(); }); };

  Input.prototype.wheel = function (e) {
    var t = this.t, unit = e.deltaMode === 1 ? 16 : e.deltaMode === 2 ? 300 : 1;
    var dx = e.deltaX * unit, dy = e.deltaY * unit;
    if (!t.data.info) { return; }
    if (e.altKey) { return; }  // scrolls the lanes
    e.preventDefault();
    if (e.shiftKey || Math.abs(dx) > Math.abs(dy)) {
      t.pan((Math.abs(dx) > Math.abs(dy) ? dx : dy) / t.width);
    } else {
      // a pinch on a touchpad comes as ctrl and small steps
      t.zoom(Math.exp(T.clamp(dy * (e.ctrlKey ? 0.012 : 0.0022), -1, 1)), e.offsetX / t.width);
    }
  };

  Input.prototype.down = function (e) {
    var t = this.t;
    t.stage.focus({ preventScroll: true });
    if (e.button > 1) { return; }
    if (t.overlay.setPointerCapture) { t.overlay.setPointerCapture(e.pointerId); }
    this.pointers.set(e.pointerId, { x: e.offsetX, y: e.offsetY });
    if (this.pointers.size === 2) {
      var p = Array.from(this.pointers.values());
      this.drag = { kind: "pinch", distance: Math.abs(p[0].x - p[1].x) || 1, x0: t.x0, x1: t.x1, middle: (p[0].x + p[1].x) / 2 };
      t.setRange(null);
      return;
    }
    var pans = e.pointerType === "touch" || e.button === 1 || e.shiftKey;
    this.drag = {
      kind: pans ? "pan" : "range", x: e.offsetX, y: e.offsetY, lastX: e.offsetX, lastY: e.offsetY,
      moved: false, at: t.timeAt(e.offsetX)
    };
    if (e.button === 1) { e.preventDefault(); }
  };

  Input.prototype.move = function (e) {
    var t = this.t, d = this.drag;
    if (this.pointers.has(e.pointerId)) { this.pointers.set(e.pointerId, { x: e.offsetX, y: e.offsetY }); }
    if (!d) { t.point(e.offsetX, e.offsetY); return; }
    if (d.kind === "pinch") {
      if (this.pointers.size < 2) { return; }
      var p = Array.from(this.pointers.values());
      var distance = Math.max(Math.abs(p[0].x - p[1].x), 8), span = (d.x1 - d.x0) * d.distance / distance;
      var held = d.x0 + d.middle / t.width * (d.x1 - d.x0), now = (p[0].x + p[1].x) / 2 / t.width;
      t.setView(held - now * span, held - now * span + span);
      return;
    }
    if (!d.moved && Math.hypot(e.offsetX - d.x, e.offsetY - d.y) < CLICK) { return; }
    d.moved = true;
    if (d.kind === "pan") {
      t.pan(-(e.offsetX - d.lastX) / t.width);
      t.body.scrollTop -= e.offsetY - d.lastY;
      d.lastX = e.offsetX;
      d.lastY = e.offsetY;
    } else {
      t.setRange([d.at, t.timeAt(e.offsetX)], false);
    }
  };

  Input.prototype.up = function (e) {
    var t = this.t, d = this.drag;
    this.pointers.delete(e.pointerId);
    if (this.pointers.size) { this.drag = null; return; }
    this.drag = null;
    if (!d || d.kind === "pinch") { return; }
    if (!d.moved) { t.click(e.offsetX, e.offsetY); return; }
    if (d.kind === "range") { t.setRange([d.at, t.timeAt(e.offsetX)], true); }
  };

  Input.prototype.cancel = function (e) { this.pointers.delete(e.pointerId); this.drag = null; };

  // Axis and overview: a drag zooms to what it spans; a click on the overview goes there.
  Input.prototype.strip = function (canvas, span, whole) {
    var t = this.t, from = null, moved = false;
    function at(e) { var s = span(); return s[0] + e.offsetX / t.width * (s[1] - s[0]); }
    this.on(canvas, "pointerdown", function (e) {
      if (e.button || !t.data.info) { return; }
      canvas.setPointerCapture(e.pointerId);
      from = { x: e.offsetX, at: at(e) };
      moved = false;
    });
    this.on(canvas, "pointermove", function (e) {
      if (!from) { return; }
      if (Math.abs(e.offsetX - from.x) >= CLICK) { moved = true; }
      if (moved) { t.setRange([from.at, at(e)], false); }
    });
    this.on(canvas, "pointerup", function (e) {
      if (!from) { return; }
      var a = Math.min(from.at, at(e)), b = Math.max(from.at, at(e)), half = (t.x1 - t.x0) / 2;
      if (moved) { t.setRange(null); t.setView(a, b, true); }
      else if (whole) { t.setView(a - half, a + half, true); }
      from = null;
    });
    this.on(canvas, "pointercancel", function () { from = null; t.setRange(null); });
  };

  Input.prototype.key = function (e) {
    var t = this.t, target = e.target, typing = /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || target.isContentEditable;
    if (!t.data.info || e.ctrlKey || e.metaKey || e.altKey) { return; }
    if (e.key === "Escape") { t.escape(); return; }
    if (typing) { return; }
    // arrows scroll the page and move in lists, unless the picture itself has the focus
    var own = target === t.stage || target === document.body, arrow = e.key.slice(0, 5) === "Arrow";
    if (arrow && !own) { return; }
    var step = e.shiftKey ? 0.5 : 0.12, done = true;
    switch (e.key.length === 1 ? e.key.toLowerCase() : e.key) {
      case "w": case "+": case "=": t.zoom(1 / 1.4, t.pointer === null ? 0.5 : t.pointer / t.width, true); break;
      case "s": case "-": t.zoom(1.4, t.pointer === null ? 0.5 : t.pointer / t.width, true); break;
      case "a": case "ArrowLeft": t.pan(-step, true); break;
      case "d": case "ArrowRight": t.pan(step, true); break;
      case "ArrowUp": t.body.scrollTop -= 48; break;
      case "ArrowDown": t.body.scrollTop += 48; break;
      case "f": t.fit(); break;
      case "/": t.panel.search.focus(); t.panel.search.select(); break;
      case "n": t.next(e.shiftKey); break;
      case "[": t.beside(-1); break;
      case "]": t.beside(1); break;
      case "z": t.zoomToRange(); break;
      case "?": t.panel.help(); break;
      case "Enter": if (own && t.chosen) { t.zoomTo(t.chosen); } else { done = false; } break;
      default: done = false;
    }
    if (done) { e.preventDefault(); }
  };

  T.Input = Input;
})();
