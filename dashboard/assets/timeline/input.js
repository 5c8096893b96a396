// Timeline: pointer, wheel, touch and keys.

import * as ui from "./ui.js";

const CLICK = 4;

export class Input {
  /** @type {any} what a pressed pointer does; null: nothing */
  drag = null;

  constructor(timeline) {
    this.t = timeline;
    this.pointers = new Map();
    this.off = [];
    const t = timeline;
    const self = this;
    this.on(
      t.overlay,
      "wheel",
      (e) => {
        self.wheel(e);
      },
      { passive: false },
    );
    this.on(t.overlay, "pointerdown", (e) => {
      t.point(null, null); // the card is of what was under the pointer before
      self.down(e);
    });
    this.on(t.overlay, "pointermove", (e) => {
      self.move(e);
    });
    this.on(t.overlay, "pointerup", (e) => {
      self.up(e);
    });
    this.on(t.overlay, "pointercancel", (e) => {
      self.cancel(e);
    });
    this.on(t.overlay, "pointerleave", () => {
      t.point(null, null);
    });
    this.on(t.overlay, "dblclick", () => {
      if (t.chosen) {
        t.zoomTo(t.chosen);
      }
    });
    this.on(
      t.axis,
      "wheel",
      (e) => {
        self.wheel(e, true);
      },
      { passive: false },
    );
    this.on(t.stage, "pointerdown", () => {
      t.activate();
    });
    this.on(t.stage, "focusin", () => {
      t.activate();
    });
    this.strip(
      t.axis,
      () => {
        return [t.x0, t.x1];
      },
      false,
    );
    this.strip(
      t.map,
      () => {
        return [t.data.info.begin, t.data.info.finish];
      },
      true,
    );
    this.on(document, "keydown", (e) => {
      self.key(e);
    });
  }

  on(target, name, listener, options) {
    target.addEventListener(name, listener, options);
    this.off.push(() => {
      target.removeEventListener(name, listener, options);
    });
  }

  destroy() {
    this.off.forEach((f) => {
      f();
    });
  }

  // As in Perfetto: the wheel scrolls the lanes (which the browser does), with ctrl or ⌘ it zooms
  // as a pinch on a touchpad does, which comes as ctrl and small steps. On the axis there is
  // nothing to scroll.
  wheel(e, axis) {
    const t = this.t;
    const unit = e.deltaMode === 1 ? 16 : e.deltaMode === 2 ? 300 : 1;
    const dx = e.deltaX * unit;
    const dy = e.deltaY * unit;
    if (!t.data.info) {
      return;
    }
    const sideways = Math.abs(dx) > Math.abs(dy);
    const held = e.ctrlKey || e.metaKey;
    if (!held && (e.shiftKey || sideways)) {
      e.preventDefault();
      t.pan((sideways ? dx : dy) / t.width);
    } else if (held || axis) {
      e.preventDefault();
      t.zoom(
        Math.exp(ui.clamp(dy * (e.ctrlKey && Math.abs(dy) < 30 ? 0.012 : 0.0022), -1, 1)),
        e.offsetX / t.width,
      );
    } else if (t.body.scrollHeight <= t.body.clientHeight + 1) {
      (t.parent || t).panel.hintZoom();
    }
  }

  down(e) {
    const t = this.t;
    t.stage.focus({ preventScroll: true });
    if (e.button > 1) {
      return;
    }
    if (t.overlay.setPointerCapture) {
      t.overlay.setPointerCapture(e.pointerId);
    }
    this.pointers.set(e.pointerId, { x: e.offsetX, y: e.offsetY });
    if (this.pointers.size === 2) {
      const p = Array.from(this.pointers.values());
      this.drag = {
        kind: "pinch",
        distance: Math.abs(p[0].x - p[1].x) || 1,
        x0: t.x0,
        x1: t.x1,
        middle: (p[0].x + p[1].x) / 2,
      };
      t.setRange(null);
      return;
    }
    const pans = e.pointerType === "touch" || e.button === 1 || e.shiftKey;
    this.drag = {
      kind: pans ? "pan" : "range",
      x: e.offsetX,
      y: e.offsetY,
      lastX: e.offsetX,
      lastY: e.offsetY,
      moved: false,
      at: t.timeAt(e.offsetX),
    };
    if (e.button === 1) {
      e.preventDefault();
    }
  }

  move(e) {
    const t = this.t;
    const d = this.drag;
    if (this.pointers.has(e.pointerId)) {
      this.pointers.set(e.pointerId, { x: e.offsetX, y: e.offsetY });
    }
    if (!d) {
      t.point(e.offsetX, e.offsetY);
      return;
    }
    if (d.kind === "pinch") {
      if (this.pointers.size < 2) {
        return;
      }
      const p = Array.from(this.pointers.values());
      const distance = Math.max(Math.abs(p[0].x - p[1].x), 8);
      const span = ((d.x1 - d.x0) * d.distance) / distance;
      const held = d.x0 + (d.middle / t.width) * (d.x1 - d.x0);
      const now = (p[0].x + p[1].x) / 2 / t.width;
      t.setView(held - now * span, held - now * span + span);
      return;
    }
    if (!d.moved && Math.hypot(e.offsetX - d.x, e.offsetY - d.y) < CLICK) {
      return;
    }
    d.moved = true;
    if (d.kind === "pan") {
      t.pan(-(e.offsetX - d.lastX) / t.width);
      t.body.scrollTop -= e.offsetY - d.lastY;
      d.lastX = e.offsetX;
      d.lastY = e.offsetY;
    } else {
      t.setRange([d.at, t.timeAt(e.offsetX)], false);
    }
  }

  up(e) {
    const t = this.t;
    const d = this.drag;
    this.pointers.delete(e.pointerId);
    if (this.pointers.size) {
      return;
    }
    if (!d || d.kind === "pinch") {
      return;
    }
    if (!d.moved) {
      t.click(e.offsetX, e.offsetY);
      return;
    }
    if (d.kind === "range") {
      t.setRange([d.at, t.timeAt(e.offsetX)], true);
    }
  }

  cancel(e) {
    this.pointers.delete(e.pointerId);
  }

  // Axis and overview: a drag zooms to what it spans; a click on the overview goes there.
  strip(canvas, span, whole) {
    const t = this.t;
    let from = null;
    let moved = false;
    function at(e) {
      const s = span();
      return s[0] + (e.offsetX / t.width) * (s[1] - s[0]);
    }
    this.on(canvas, "pointerdown", (e) => {
      if (e.button || !t.data.info) {
        return;
      }
      canvas.setPointerCapture(e.pointerId);
      from = { x: e.offsetX, at: at(e) };
      moved = false;
    });
    this.on(canvas, "pointermove", (e) => {
      if (!from) {
        return;
      }
      if (Math.abs(e.offsetX - from.x) >= CLICK) {
        moved = true;
      }
      if (moved) {
        t.setRange([from.at, at(e)], false);
      }
    });
    this.on(canvas, "pointerup", (e) => {
      if (!from) {
        return;
      }
      const a = Math.min(from.at, at(e));
      const b = Math.max(from.at, at(e));
      const half = (t.x1 - t.x0) / 2;
      if (moved) {
        t.setRange(null);
        t.setView(a, b, true);
      } else if (whole) {
        t.setView(a - half, a + half, true);
      }
      from = null;
    });
    this.on(canvas, "pointercancel", () => {
      from = null;
      t.setRange(null);
    });
  }

  key(e) {
    const t = this.t;
    const target = e.target;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || target.isContentEditable;
    if (!t.active() || !t.data.info || e.ctrlKey || e.metaKey || e.altKey) {
      return;
    }
    if (e.key === "Escape") {
      t.escape();
      return;
    }
    if (typing) {
      return;
    }
    // arrows scroll the page and move in lists, unless the picture itself has the focus
    const own = target === t.stage || target === document.body;
    const arrow = e.key.slice(0, 5) === "Arrow";
    if (arrow && !own) {
      return;
    }
    const step = e.shiftKey ? 0.5 : 0.12;
    let done = true;
    switch (e.key.length === 1 ? e.key.toLowerCase() : e.key) {
      case "w":
      case "+":
      case "=":
        t.zoom(1 / 1.4, t.pointer === null ? 0.5 : t.pointer / t.width, true);
        break;
      case "s":
      case "-":
        t.zoom(1.4, t.pointer === null ? 0.5 : t.pointer / t.width, true);
        break;
      case "a":
      case "ArrowLeft":
        t.pan(-step, true);
        break;
      case "d":
      case "ArrowRight":
        t.pan(step, true);
        break;
      case "ArrowUp":
        t.body.scrollTop -= 48;
        break;
      case "ArrowDown":
        t.body.scrollTop += 48;
        break;
      case "f":
        t.fit();
        break;
      case "/":
        (t.parent || t).panel.search.focus();
        (t.parent || t).panel.search.select();
        break;
      case "n":
        t.next(e.shiftKey);
        break;
      case "[":
        t.beside(-1);
        break;
      case "]":
        t.beside(1);
        break;
      case "z":
        t.zoomToRange();
        break;
      case "p":
        (t.parent || t).panel.toggle();
        break;
      case "?":
        (t.parent || t).panel.help();
        break;
      case "Enter":
        if (own && t.chosen) {
          t.zoomTo(t.chosen);
        } else if (own) {
          t.chooseVisible();
        } else {
          done = false;
        }
        break;
      default:
        done = false;
    }
    if (done) {
      e.preventDefault();
    }
  }
}
