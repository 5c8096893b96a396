// Input of the timeline: pointer, wheel, touch and keys.

import * as ui from "./ui.js";

const DRAG_THRESHOLD = 4;

// Handlers of pointer, wheel and keys of one timeline.
export class Input {
  /** @type {any} what a pressed pointer does; null: nothing */
  drag = null;

  constructor(timeline) {
    this.timeline = timeline;
    this.pointers = new Map();
    this.removers = [];
    this.listen(
      timeline.overlay,
      "wheel",
      (event) => {
        this.onWheel(event);
      },
      { passive: false },
    );
    this.listen(timeline.overlay, "pointerdown", (event) => {
      timeline.movePointer(null, null); // hide the hover card
      this.onPointerDown(event);
    });
    this.listen(timeline.overlay, "pointermove", (event) => {
      this.onPointerMove(event);
    });
    this.listen(timeline.overlay, "pointerup", (event) => {
      this.onPointerUp(event);
    });
    this.listen(timeline.overlay, "pointercancel", (event) => {
      this.onPointerCancel(event);
    });
    this.listen(timeline.overlay, "pointerleave", () => {
      timeline.movePointer(null, null);
    });
    this.listen(timeline.overlay, "dblclick", () => {
      if (timeline.selectedSlice) {
        timeline.zoomTo(timeline.selectedSlice);
      }
    });
    this.listen(
      timeline.axis,
      "wheel",
      (event) => {
        this.onWheel(event, true);
      },
      { passive: false },
    );
    this.listen(timeline.stage, "pointerdown", () => {
      timeline.activate();
    });
    this.listen(timeline.stage, "focusin", () => {
      timeline.activate();
    });
    this.enableDragZoom(
      timeline.axis,
      () => {
        return [timeline.x0, timeline.x1];
      },
      false,
    );
    this.enableDragZoom(
      timeline.overview,
      () => {
        return [timeline.data.info.first_ns, timeline.data.info.last_ns];
      },
      true,
    );
    this.listen(document, "keydown", (event) => {
      this.onKeyDown(event);
    });
  }

  // Adds a listener, which destroy removes.
  listen(target, name, listener, options) {
    target.addEventListener(name, listener, options);
    this.removers.push(() => {
      target.removeEventListener(name, listener, options);
    });
  }

  // Removes all listeners.
  destroy() {
    this.removers.forEach((f) => {
      f();
    });
  }

  // Zooms with ctrl or ⌘, pans with shift, as in Perfetto; otherwise the browser scrolls the
  // lanes. Browsers report a pinch on a touchpad as ctrl+wheel with small steps. On the axis,
  // where there is nothing to scroll, the wheel always zooms.
  onWheel(event, isOnAxis) {
    const timeline = this.timeline;
    const pixelsPerUnit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 300 : 1;
    const dx = event.deltaX * pixelsPerUnit;
    const dy = event.deltaY * pixelsPerUnit;
    if (!timeline.data.info) {
      return;
    }
    const isSideways = Math.abs(dx) > Math.abs(dy);
    const isZoomKeyDown = event.ctrlKey || event.metaKey;
    if (!isZoomKeyDown && (event.shiftKey || isSideways)) {
      event.preventDefault();
      timeline.pan((isSideways ? dx : dy) / timeline.width);
    } else if (isZoomKeyDown || isOnAxis) {
      event.preventDefault();
      timeline.zoom(
        Math.exp(ui.clamp(dy * (event.ctrlKey && Math.abs(dy) < 30 ? 0.012 : 0.0022), -1, 1)),
        event.offsetX / timeline.width,
      );
    } else if (timeline.body.scrollHeight <= timeline.body.clientHeight + 1) {
      (timeline.parent || timeline).panel.hintZoom();
    }
  }

  // Starts a drag: a range by mouse, a pan by touch, a pinch by two fingers.
  onPointerDown(event) {
    const timeline = this.timeline;
    timeline.stage.focus({ preventScroll: true });
    if (event.button > 1) {
      return;
    }
    if (timeline.overlay.setPointerCapture) {
      timeline.overlay.setPointerCapture(event.pointerId);
    }
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    if (this.pointers.size === 2) {
      const points = Array.from(this.pointers.values());
      this.drag = {
        kind: "pinch",
        distance: Math.abs(points[0].x - points[1].x) || 1,
        x0: timeline.x0,
        x1: timeline.x1,
        middle: (points[0].x + points[1].x) / 2,
      };
      timeline.setRange(null);
      return;
    }
    const isPan = event.pointerType === "touch" || event.button === 1 || event.shiftKey;
    this.drag = {
      kind: isPan ? "pan" : "range",
      x: event.offsetX,
      y: event.offsetY,
      lastX: event.offsetX,
      lastY: event.offsetY,
      moved: false,
      at: timeline.timeAt(event.offsetX),
    };
    if (event.button === 1) {
      event.preventDefault();
    }
  }

  // Continues a drag, or moves the hover card.
  onPointerMove(event) {
    const timeline = this.timeline;
    const drag = this.drag;
    if (this.pointers.has(event.pointerId)) {
      this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    }
    if (!drag) {
      timeline.movePointer(event.offsetX, event.offsetY);
      return;
    }
    if (drag.kind === "pinch") {
      if (this.pointers.size < 2) {
        return;
      }
      const points = Array.from(this.pointers.values());
      const distance = Math.max(Math.abs(points[0].x - points[1].x), 8);
      const span = ((drag.x1 - drag.x0) * drag.distance) / distance;
      const anchor = drag.x0 + (drag.middle / timeline.width) * (drag.x1 - drag.x0);
      const position = (points[0].x + points[1].x) / 2 / timeline.width;
      timeline.setView(anchor - position * span, anchor - position * span + span);
      return;
    }
    if (
      !drag.moved &&
      Math.hypot(event.offsetX - drag.x, event.offsetY - drag.y) < DRAG_THRESHOLD
    ) {
      return;
    }
    drag.moved = true;
    if (drag.kind === "pan") {
      timeline.pan(-(event.offsetX - drag.lastX) / timeline.width);
      timeline.body.scrollTop -= event.offsetY - drag.lastY;
      drag.lastX = event.offsetX;
      drag.lastY = event.offsetY;
    } else {
      timeline.setRange([drag.at, timeline.timeAt(event.offsetX)], false);
    }
  }

  // Ends a drag. Without movement it is a click.
  onPointerUp(event) {
    const timeline = this.timeline;
    const drag = this.drag;
    this.pointers.delete(event.pointerId);
    if (this.pointers.size) {
      return;
    }
    if (!drag || drag.kind === "pinch") {
      return;
    }
    if (!drag.moved) {
      timeline.click(event.offsetX, event.offsetY);
      return;
    }
    if (drag.kind === "range") {
      timeline.setRange([drag.at, timeline.timeAt(event.offsetX)], true);
    }
  }

  onPointerCancel(event) {
    this.pointers.delete(event.pointerId);
  }

  // Lets a drag on the axis or the overview zoom to the range. A click on the overview moves the
  // view.
  enableDragZoom(canvas, span, movesOnClick) {
    const timeline = this.timeline;
    let pressed = null;
    let hasMoved = false;
    function timeAt(event) {
      const ends = span();
      return ends[0] + (event.offsetX / timeline.width) * (ends[1] - ends[0]);
    }
    this.listen(canvas, "pointerdown", (event) => {
      if (event.button || !timeline.data.info) {
        return;
      }
      canvas.setPointerCapture(event.pointerId);
      pressed = { x: event.offsetX, time: timeAt(event) };
      hasMoved = false;
    });
    this.listen(canvas, "pointermove", (event) => {
      if (!pressed) {
        return;
      }
      if (Math.abs(event.offsetX - pressed.x) >= DRAG_THRESHOLD) {
        hasMoved = true;
      }
      if (hasMoved) {
        timeline.setRange([pressed.time, timeAt(event)], false);
      }
    });
    this.listen(canvas, "pointerup", (event) => {
      if (!pressed) {
        return;
      }
      const start = Math.min(pressed.time, timeAt(event));
      const end = Math.max(pressed.time, timeAt(event));
      const halfSpan = (timeline.x1 - timeline.x0) / 2;
      if (hasMoved) {
        timeline.setRange(null);
        timeline.setView(start, end, true);
      } else if (movesOnClick) {
        timeline.setView(start - halfSpan, start + halfSpan, true);
      }
      pressed = null;
    });
    this.listen(canvas, "pointercancel", () => {
      pressed = null;
      timeline.setRange(null);
    });
  }

  // Runs the command of a key. The panel lists the keys.
  onKeyDown(event) {
    const timeline = this.timeline;
    const target = event.target;
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || target.isContentEditable;
    if (
      !timeline.isActive() ||
      !timeline.data.info ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey
    ) {
      return;
    }
    if (event.key === "Escape") {
      timeline.clearSelection();
      return;
    }
    if (isTyping) {
      return;
    }
    // arrow keys belong to the page and its lists, unless the timeline has the focus
    const isOnTimeline = target === timeline.stage || target === document.body;
    const isArrow = event.key.slice(0, 5) === "Arrow";
    if (isArrow && !isOnTimeline) {
      return;
    }
    const step = event.shiftKey ? 0.5 : 0.12;
    let isHandled = true;
    switch (event.key.length === 1 ? event.key.toLowerCase() : event.key) {
      case "w":
      case "+":
      case "=":
        timeline.zoom(
          1 / 1.4,
          timeline.pointer === null ? 0.5 : timeline.pointer / timeline.width,
          true,
        );
        break;
      case "s":
      case "-":
        timeline.zoom(
          1.4,
          timeline.pointer === null ? 0.5 : timeline.pointer / timeline.width,
          true,
        );
        break;
      case "a":
      case "ArrowLeft":
        timeline.pan(-step, true);
        break;
      case "d":
      case "ArrowRight":
        timeline.pan(step, true);
        break;
      case "ArrowUp":
        timeline.body.scrollTop -= 48;
        break;
      case "ArrowDown":
        timeline.body.scrollTop += 48;
        break;
      case "f":
        timeline.fit();
        break;
      case "/":
        (timeline.parent || timeline).panel.search.focus();
        (timeline.parent || timeline).panel.search.select();
        break;
      case "n":
        timeline.findNext(event.shiftKey);
        break;
      case "[":
        timeline.selectNeighbor(-1);
        break;
      case "]":
        timeline.selectNeighbor(1);
        break;
      case "z":
        timeline.zoomToRange();
        break;
      case "p":
        (timeline.parent || timeline).panel.toggle();
        break;
      case "?":
        (timeline.parent || timeline).panel.showHelp();
        break;
      case "Enter":
        if (isOnTimeline && timeline.selectedSlice) {
          timeline.zoomTo(timeline.selectedSlice);
        } else if (isOnTimeline) {
          timeline.selectVisible();
        } else {
          isHandled = false;
        }
        break;
      default:
        isHandled = false;
    }
    if (isHandled) {
      event.preventDefault();
    }
  }
}
