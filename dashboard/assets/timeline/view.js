// Timeline: the visible span, the selection, and the requests to the server.

import { TimelineData } from "./data.js";
import { Input } from "./input.js";
import { LABEL_HEIGHT, Painter, layOutRows, labelOverhang } from "./paint.js";
import { Panel } from "./panel.js";
import * as ui from "./ui.js";

const PREFETCH_SPANS = 0.5; // time requested on each side of the view, in spans of the view
const MIN_SPAN_NS = 64; // shortest span of a view
const ZOOM_MS = 140; // duration of an animated zoom

// A timeline may have a compared timeline below it. That one shares the zoom of its parent, and has
// neither a toolbar nor an address.
export class Timeline {
  /** @type {ReturnType<typeof layOutRows> | null} */
  layout = null;
  /** @type {import("./data.js").Answer | null} */
  answer = null;
  /** @type {import("./data.js").Answer | null} the one before, of a wider span */
  overviewAnswer = null;
  /** @type {TimelineData} set by "openRank" */
  data = /** @type {any} */ (null);
  writtenUrl = ""; // the last address that this timeline wrote
  zoomFrame = 0; // animation frame of a zoom
  isFollowing = false; // whether its span is being set by the other timeline
  /** @type {Error | null} */
  viewError = null; // error of the last request
  paintedAt = 0; // time of the first paint with slices, ms
  mainFrame = 0; // requested animation frame
  /** @type {HTMLElement | null} */
  main = null;
  /** @type {any} */
  activeTimeline = null;
  isNarrow = false; // labels are above the lanes
  isEarly = false; // started before the page's frame existed
  isDestroyed = false;

  /**
   * @param {HTMLElement} root
   * @param {Timeline} [parent] the timeline under which this one is shown
   */
  constructor(root, parent) {
    this.root = root;
    this.parent = parent || null;
    this.compared = null; // the compared timeline below this one
    this.offset = 0; // of a compared timeline: its time minus the parent's time, ns
    this.pinned = [];
    this.libraries = parent
      ? parent.libraries
      : new URLSearchParams(location.search).get("libraries") === "1";
    this.comparedKey = "";
    this.run = root.getAttribute("data-run") || "";
    this.x0 = 0;
    this.x1 = 1;
    this.scroll = 0;
    this.width = 100;
    this.height = 100;
    this.layout = null;
    this.answer = null;
    this.overviewAnswer = null;
    this.stepStarts = null;
    this.overviewLanes = [];
    this.folded = {};
    this.pointer = null;
    this.hoveredSlice = null;
    this.selectedSlice = null;
    this.range = null;
    this.instant = null;
    this.finding = "";
    this.query = "";
    this.pendingView = null;
    this.settledCallbacks = [];
    this.build();
    this.panel = new Panel(this);
    if (parent) {
      root.replaceChildren(this.stage);
      /** @type {HTMLElement} */ (parent.main).appendChild(this.panel.side);
    } else {
      this.left = ui.el("div", { cls: "tl-charts" }, [this.stage]);
      const main = ui.el("div", { cls: "tl-main wide" }, [this.left, this.panel.side]);
      this.main = main;
      root.replaceChildren(
        this.panel.toolbar,
        main,
        this.panel.status,
        this.panel.table,
        this.panel.helpDialog,
      );
    }
    this.panel.side.hidden = true;
    this.stage.appendChild(this.panel.hoverCard);
    this.painter = new Painter(this);
    this.input = new Input(this);
    this.resizeObserver = new ResizeObserver(() => {
      this.resize();
    });
    this.resizeObserver.observe(this.stage);
    this.onTheme = () => {
      this.painter.readTheme();
      this.draw();
    };
    this.onUrl = () => {
      if (location.pathname + location.search !== this.writtenUrl) {
        this.readUrl(false);
      }
    };
    window.addEventListener("advisor-theme", this.onTheme);
    if (parent) {
      return;
    }
    window.addEventListener("popstate", this.onUrl);
    window.addEventListener("_dashprivate_pushstate", this.onUrl);
    this.openRank(null);
  }

  // Creates the elements.
  build() {
    this.overview = ui.el("canvas", { cls: "tl-map", "aria-hidden": "true" });
    this.axis = ui.el("canvas", { cls: "tl-axis", "aria-hidden": "true" });
    this.canvas = ui.el("canvas", { cls: "tl-canvas", "aria-hidden": "true" });
    this.overlay = ui.el("canvas", { cls: "tl-overlay", "aria-hidden": "true" });
    this.labels = ui.el("div", { cls: "tl-labels" });
    this.pinnedLabels = ui.el("div", { cls: "tl-pins" });
    this.runCaption = ui.el("p", { cls: "tl-caption", hidden: true });
    this.content = ui.el("div", { cls: "tl-content" }, [
      ui.el("div", { cls: "tl-sticky" }, [this.canvas, this.overlay]),
      this.pinnedLabels,
      this.labels,
    ]);
    this.body = ui.el("div", { cls: "tl-body" }, [this.content]);
    this.message = ui.el("p", { cls: "tl-message", role: "status", text: "Reading…" });
    this.body.addEventListener("scroll", () => {
      this.scroll = this.body.scrollTop;
      this.draw();
    });
    this.stage = ui.el(
      "div",
      {
        cls: "tl-stage",
        tabindex: "0",
        role: "application",
        "aria-label":
          "Timeline. W and S zoom, A and D pan, F fits, slash searches, " +
          "question mark lists all keys. " +
          "The table below lists the visible slices.",
      },
      [
        ui.el("div", { cls: "tl-top" }, [this.runCaption, this.overview, this.axis]),
        this.body,
        this.message,
      ],
    );
  }

  // Moves into its element in the page's frame.
  moveInto(place) {
    const top = this.body.scrollTop;
    const focus = /** @type {HTMLElement | null} */ (document.activeElement);
    place.replaceChildren.apply(place, Array.from(this.root.childNodes));
    this.root.remove();
    this.root = place;
    this.isEarly = false;
    performance.mark("advisor-frame-ready");
    this.body.scrollTop = top;
    if (focus && place.contains(focus)) {
      focus.focus({ preventScroll: true });
    }
    this.resize();
  }

  // Removes the timeline and its listeners.
  destroy() {
    this.isDestroyed = true;
    if (this.compared) {
      this.compared.destroy();
    }
    if (this.parent) {
      this.root.remove();
      this.panel.side.remove();
    }
    if (this.isEarly) {
      this.root.remove();
    }
    this.input.destroy();
    this.resizeObserver.disconnect();
    window.removeEventListener("advisor-theme", this.onTheme);
    window.removeEventListener("popstate", this.onUrl);
    window.removeEventListener("_dashprivate_pushstate", this.onUrl);
  }

  // Loads a rank; null means the rank in the address, or the reported one. "span" keeps the view,
  // "usesDefault" ignores the address.
  openRank(rank, span, usesDefault) {
    const parameters = new URLSearchParams(location.search);
    if (
      rank === null &&
      !usesDefault &&
      !this.parent &&
      /^-?\d{1,6}$/.test(parameters.get("rank") || "")
    ) {
      rank = Number(parameters.get("rank"));
    }
    this.data = new TimelineData(this.run, rank, this.libraries);
    this.answer = this.overviewAnswer = null;
    this.data.onNames = () => {
      this.draw();
    };
    this.data.loadInfo().then(
      (info) => {
        if (this.isDestroyed) {
          return;
        }
        this.message.hidden = true;
        this.folded = {};
        this.layout = null; // the layout has the lanes of the previous rank
        info.groups.forEach((group) => {
          this.folded[group.key] = group.folded;
        });
        this.painter.setCategories(info.categories);
        this.panel.fillOptions(info);
        if (this.parent) {
          this.alignWithParent();
          return;
        }
        if (!span) {
          this.pinned = (parameters.get("pin") || "").split(",").filter(Boolean).slice(0, 40);
        }
        if (span) {
          this.setSelectedSlice(null);
          this.setView(span[0], span[1]);
        } else {
          this.readUrl(true);
        }
        this.layOutLanes();
        this.panel.showWelcome();
        if (this.compared) {
          this.setCompared(this.comparedKey);
        } else if (parameters.get("beside")) {
          this.setCompared(parameters.get("beside"));
        }
        if (!info.groups.length && !info.counters.length) {
          this.showError("The trace has no events.");
        }
      },
      (error) => {
        if (rank !== null && !span && !usesDefault) {
          this.openRank(null, null, true);
          return;
        }
        this.showError(error.message);
      },
    );
  }

  // Returns the key of the run that is shown.
  runKey() {
    return (
      this.run ||
      this.data.info.runs.map((run) => {
        return run.key;
      })[0] ||
      ""
    );
  }

  // Shows a run or rank below this one: "run:1" or "rank:3". An empty key removes it.
  setCompared(key) {
    const info = this.data.info;
    const parts = /^(run|rank):(-?\w{1,9})$/.exec(key || "");
    const isKnown =
      parts &&
      (parts[1] === "rank"
        ? info.ranks.indexOf(Number(parts[2])) >= 0 && Number(parts[2]) !== info.rank
        : info.runs.some((candidate) => {
            return candidate.key === parts[2];
          }) && parts[2] !== this.runKey());
    if (this.compared) {
      this.compared.destroy();
    }
    this.compared = null;
    this.comparedKey = isKnown ? key : "";
    this.panel.compareSelect.value = this.comparedKey;
    if (isKnown) {
      const root = ui.el("div", {
        cls: "tl-compared",
        "data-run": parts[1] === "run" ? parts[2] : this.runKey(),
      });
      this.left.appendChild(root);
      this.compared = new Timeline(root, this);
      const comparedRun = info.runs.filter((candidate) => {
        return parts[1] === "run" && candidate.key === parts[2];
      })[0];
      this.compared.openRank(
        parts[1] === "rank"
          ? Number(parts[2])
          : comparedRun.ranks.indexOf(info.rank) >= 0
            ? info.rank
            : comparedRun.ranks[0],
      );
    }
    this.showCaption("");
    this.activate();
    this.writeUrl();
    this.resize();
  }

  // Aligns a compared timeline with its parent, once its trace is loaded.
  alignWithParent() {
    const above = this.parent;
    const data = this.data;
    above.data.fetchJson("beside", { other_run: this.run, other_rank: data.rank }).then(
      (answer) => {
        if (this.isDestroyed || this.data !== data) {
          return;
        }
        this.offset = answer.ns;
        above.showCaption("");
        this.showCaption(answer.alignment);
        this.finding = "";
        this.query = above.query;
        this.layOutLanes();
        this.panel.showWelcome();
        above.setSpan(above.x0, above.x1);
      },
      (error) => {
        this.showError(error.message);
      },
    );
  }

  // Shows the run and rank of each timeline if there are two, and how their offset was found.
  showCaption(offsetText) {
    const info = this.data.info;
    const run = info && info.runs.filter((candidate) => candidate.key === this.runKey())[0];
    this.runCaption.hidden = !this.compared && !this.parent;
    if (!info || this.runCaption.hidden) {
      return;
    }
    const text =
      (info.runs.length > 1 && run ? run.name : "") +
      (info.ranks.length > 1 ? " rank " + info.rank : "");
    this.runCaption.replaceChildren(
      ui.el("b", { text: text.trim() || "this run" }),
      ui.el("span", { text: offsetText ? offsetText : "" }),
    );
    this.runCaption.title = text.trim() + (offsetText ? ", " + offsetText : "");
  }

  // Returns whether this timeline was used last, and so gets the keys.
  isActive() {
    const top = this.parent || this;
    return (top.activeTimeline || top) === this;
  }

  // Makes this one the active one of two timelines.
  activate() {
    const top = this.parent || this;
    if (top.activeTimeline === this && !this.parent) {
      return;
    }
    top.activeTimeline = this;
    top.updatePanels();
  }

  // Shows or hides the side panels of both timelines.
  updatePanels() {
    const top = this.parent || this;
    const timelines = [top, top.compared].filter(Boolean);
    let isAnyOpen = false;
    if (!top.panel || !top.main) {
      return;
    }
    if (timelines.indexOf(top.activeTimeline) < 0) {
      top.activeTimeline = top;
    }
    timelines.forEach((timeline) => {
      timeline.panel.side.hidden = !(
        timeline === top.activeTimeline &&
        (timeline.panel.isRequested || top.panel.isOpen)
      );
      isAnyOpen = isAnyOpen || !timeline.panel.side.hidden;
      if (!timeline.panel.side.hidden) {
        timeline.panel.updateLegend();
      }
    });
    top.main.classList.toggle("wide", !isAnyOpen);
    top.panel.panelButton.setAttribute("aria-expanded", String(isAnyOpen));
  }

  // Shows or hides library frames.
  setLibraries(libraries) {
    this.libraries = libraries;
    this.openRank(this.data.rank, [this.x0, this.x1]);
  }

  // Shows a message instead of the timeline.
  showError(reason) {
    this.message.hidden = false;
    this.message.textContent = reason;
    this.announceReady();
    this.resolveSettled();
  }

  // Shows another rank in the same span.
  setRank(rank) {
    this.finding = "";
    this.query = "";
    this.openRank(rank, [this.x0, this.x1]);
  }

  // Sets span, finding, search and selection from the address.
  readUrl(isFirst) {
    const info = this.data.info;
    const parameters = new URLSearchParams(location.search);
    const focus = parameters.get("focus") || "";
    if (!info) {
      return;
    }
    const integer = /^-?\d{1,18}$/;
    const x0 = parameters.get("x0") || "";
    const x1 = parameters.get("x1") || "";
    // focus is a finding's key, or an instant with the key in "finding" (from the findings page)
    this.instant = integer.test(focus) ? Number(focus) : null;
    const finding = parameters.get("finding") || (this.instant === null ? focus : "");
    const known = info.findings.filter((candidate) => {
      return candidate.key === finding;
    })[0];
    this.finding = known ? finding : "";
    this.panel.findingSelect.value = this.finding;
    this.query = (parameters.get("q") || "").slice(0, 200);
    this.panel.search.value = this.query;
    if (this.query) {
      this.findMatch(this.query, false, true);
    }
    if (integer.test(x0) && integer.test(x1) && Number(x1) > Number(x0)) {
      this.setView(Number(x0), Number(x1));
    } else if (known && known.places.length) {
      this.showPlace(known.places[0], true);
    } else {
      this.setView(info.first_ns, info.last_ns);
    }
    if (/^\d{1,9}$/.test(parameters.get("sel") || "")) {
      this.selectById(Number(parameters.get("sel")), isFirst);
    } else if (this.instant !== null) {
      const at = this.instant;
      const place =
        known &&
        known.places.filter((candidate) => {
          return candidate.ts === at;
        })[0];
      this.selectStartingAt(at, place ? place.dur : null);
    }
    this.requestView();
    this.draw();
  }

  // Puts span, finding, search and selection into the address, after a delay.
  writeUrl() {
    if (this.parent) {
      return;
    }
    clearTimeout(this.urlTimer);
    this.urlTimer = setTimeout(() => {
      this.urlTimer = undefined;
      if (this.isDestroyed || !this.data.info) {
        return;
      }
      const parameters = new URLSearchParams(location.search);
      const info = this.data.info;
      function setParameter(key, value) {
        if (value === null || value === "") {
          parameters.delete(key);
        } else {
          parameters.set(key, value);
        }
      }
      const isWholeTrace =
        Math.abs(this.x0 - info.first_ns) < 1 && Math.abs(this.x1 - info.last_ns) < 1;
      setParameter("x0", isWholeTrace ? null : Math.floor(this.x0));
      setParameter("x1", isWholeTrace ? null : Math.ceil(this.x1));
      setParameter("rank", info.ranks.length > 1 || parameters.has("rank") ? info.rank : null);
      setParameter("finding", this.instant === null ? null : this.finding);
      setParameter("focus", this.instant === null ? this.finding : this.instant);
      setParameter("q", this.query);
      setParameter("sel", this.selectedSlice ? this.selectedSlice.id : null);
      setParameter("pin", this.pinned.join(","));
      setParameter("beside", this.comparedKey);
      setParameter("libraries", this.libraries ? 1 : null);
      const text = parameters.toString();
      this.writtenUrl = location.pathname + (text ? "?" + text : "");
      if (this.writtenUrl !== location.pathname + location.search) {
        history.replaceState(history.state, "", this.writtenUrl);
      }
    }, 250);
  }

  // Adapts the layout to the size of the window.
  resize() {
    const gutter = this.stage.clientWidth < 620 ? 0 : 188;
    const hasChanged = this.isNarrow !== !gutter;
    this.isNarrow = !gutter;
    this.stage.classList.toggle("narrow", this.isNarrow);
    this.stage.style.setProperty("--tl-gutter", gutter + "px");
    this.width = Math.max(this.body.clientWidth - gutter, 50);
    this.height = Math.max(this.body.clientHeight, 50);
    if (hasChanged && this.layout) {
      this.layOutLanes();
      return;
    }
    this.requestView();
    this.draw();
  }

  // Lays out the rows and creates their labels.
  layOutLanes() {
    const info = this.data.info;
    const layout = (this.layout = layOutRows(info, this.folded, this.isNarrow, this.pinned));
    this.content.style.height = layout.height + "px";
    this.stage.style.setProperty("--tl-pins", layout.pinnedHeight + "px");
    const labels = layout.boxes.map((box) => {
      const group = box.group;
      const key = group ? group.key : "counters";
      const text = group ? group.label : "Counters";
      const hasSeveralLanes = !group || group.count > 1;
      const node = ui.el(
        "button",
        {
          type: "button",
          cls: "tl-label" + (hasSeveralLanes ? " many" : "") + (box.isFolded ? " shut" : ""),
          "aria-expanded": box.isFolded ? "false" : "true",
          title: text,
        },
        [
          ui.el("span", { cls: "tl-arrow", "aria-hidden": "true" }),
          ui.el("span", { cls: "tl-text", text }),
        ],
      );
      node.style.height = LABEL_HEIGHT + "px";
      const pinButton = box.counters
        ? null
        : ui.el(
            "button",
            {
              type: "button",
              cls: "tl-pin",
              "aria-pressed": String(box.isPinned),
              title: box.isPinned ? "Unpin" : "Pin to the top",
              "aria-label": (box.isPinned ? "Unpin " : "Pin to the top: ") + text,
            },
            [ui.el("span", { cls: "icon icon-pin", "aria-hidden": "true" })],
          );
      if (pinButton) {
        pinButton.addEventListener("click", () => {
          this.togglePin(key);
        });
      }
      // the label stays visible while any of its lanes is
      const labelBox = ui.el("div", { cls: "tl-box" }, [
        ui.el("div", { cls: "tl-row" }, [node, pinButton]),
      ]);
      const above = this.isNarrow ? LABEL_HEIGHT : labelOverhang(box.h);
      labelBox.style.top = box.y - above + "px";
      labelBox.style.height = Math.max(box.h + above, LABEL_HEIGHT) + "px";
      node.addEventListener("click", () => {
        this.toggleFold(key);
      });
      return labelBox;
    });
    function labelsOf(pinned) {
      return labels.filter((_, i) => {
        return layout.boxes[i].isPinned === pinned;
      });
    }
    this.pinnedLabels.replaceChildren.apply(this.pinnedLabels, labelsOf(true));
    this.labels.replaceChildren.apply(
      this.labels,
      labelsOf(false).concat(
        layout.rows
          .filter((row) => {
            return row.counter !== undefined;
          })
          .map((row) => {
            const counter = info.counters[/** @type {number} */ (row.counter)];
            const node = ui.el("p", { cls: "tl-counter" }, [
              ui.el("span", { text: counter.label }),
              ui.el("span", {
                cls: "dim",
                text:
                  (counter.low === counter.high
                    ? ""
                    : ui.formatQuantity(counter.low, counter.unit) + " – ") +
                  ui.formatQuantity(counter.high, counter.unit),
              }),
            ]);
            node.style.top = row.y + "px";
            return node;
          }),
      ),
    );
    this.overviewLanes = this.pickOverviewLanes();
    this.requestView();
    this.draw();
  }

  // Pins a group to the top, where it does not scroll, or unpins it.
  togglePin(key) {
    const position = this.pinned.indexOf(key);
    const pinButton = function (labelBox) {
      return labelBox.querySelector(".tl-pin");
    };
    if (position >= 0) {
      this.pinned.splice(position, 1);
    } else {
      this.pinned.push(key);
    }
    this.layOutLanes();
    this.writeUrl();
    const groups = (this.layout ? this.layout.boxes : []).flatMap((box) => box.group || []);
    const index = groups.findIndex((group) => {
      return group.key === key;
    });
    const movedLabel = Array.from(this.pinnedLabels.children).concat(
      Array.from(this.labels.querySelectorAll(".tl-box")),
    )[index];
    if (movedLabel && pinButton(movedLabel)) {
      pinButton(movedLabel).focus({ preventScroll: true });
    }
  }

  // Expands or collapses a group.
  toggleFold(key) {
    this.folded[key] = !this.folded[key];
    this.layOutLanes();
  }

  // Returns the overview's lanes: steps, idle time and the busiest stream, or the main thread.
  pickOverviewLanes() {
    const groups = this.data.info.groups;
    const lanes = [];
    ["steps", "idle", "stream", "thread"].forEach((kind) => {
      const group = groups.filter((candidate) => {
        return candidate.kind === kind;
      })[0];
      if (group && (kind !== "thread" || lanes.length < 2)) {
        lanes.push(group.first);
      }
    });
    return lanes;
  }

  // Returns the time at a position on the canvas, ns.
  timeAt(x) {
    return this.x0 + (x / this.width) * (this.x1 - this.x0);
  }

  // Moves the view to a span, within limits, with an animation if "isAnimated".
  setView(x0, x1, isAnimated) {
    const info = this.data.info;
    const traceSpan = info.last_ns - info.first_ns;
    const span = ui.clamp(x1 - x0, MIN_SPAN_NS, traceSpan * 1.2 + MIN_SPAN_NS);
    const middle = ui.clamp((x0 + x1) / 2, info.first_ns, info.last_ns);
    const previous = [this.x0, this.x1];
    const target = [middle - span / 2, middle + span / 2];
    cancelAnimationFrame(this.zoomFrame);
    if (!isAnimated || ui.prefersReducedMotion() || document.hidden) {
      this.setSpan(target[0], target[1]);
      return;
    }
    const startTime = performance.now();
    const frame = (now) => {
      const progress = ui.clamp((now - startTime) / ZOOM_MS, 0, 1);
      const eased = 1 - Math.pow(1 - progress, 3);
      this.setSpan(
        previous[0] + (target[0] - previous[0]) * eased,
        previous[1] + (target[1] - previous[1]) * eased,
      );
      if (progress < 1 && !this.isDestroyed) {
        this.zoomFrame = requestAnimationFrame(frame);
      }
    };
    frame(startTime);
    this.target = target;
  }

  // Sets the visible span, and that of the other timeline.
  setSpan(x0, x1) {
    this.x0 = x0;
    this.x1 = x1;
    this.hoveredSlice = null;
    this.panel.showHoverCard(null);
    this.requestView();
    this.draw();
    this.writeUrl();
    const otherTimeline = this.parent || this.compared;
    const offset = this.parent ? -this.offset : otherTimeline ? otherTimeline.offset : 0;
    if (!otherTimeline || this.isFollowing || !otherTimeline.layout) {
      return;
    }
    otherTimeline.isFollowing = true;
    cancelAnimationFrame(otherTimeline.zoomFrame);
    otherTimeline.setSpan(x0 + offset, x1 + offset);
    otherTimeline.isFollowing = false;
  }

  // Moves the view by a share of its span.
  pan(share, isAnimated) {
    const offset = share * (this.x1 - this.x0);
    const info = this.data.info;
    const span = this.x1 - this.x0;
    const x0 = ui.clamp(this.x0 + offset, info.first_ns - span / 2, info.last_ns - span / 2);
    this.setView(x0, x0 + span, isAnimated);
  }

  // Zooms by a factor around a position, 0 to 1 of the width.
  zoom(factor, anchor, isAnimated) {
    const span = this.x1 - this.x0;
    const info = this.data.info;
    const anchorTime = this.x0 + anchor * span;
    const newSpan = ui.clamp(
      span * factor,
      MIN_SPAN_NS,
      (info.last_ns - info.first_ns) * 1.2 + MIN_SPAN_NS,
    );
    this.setView(
      anchorTime - anchor * newSpan,
      anchorTime - anchor * newSpan + newSpan,
      isAnimated,
    );
  }

  // Zooms to the selected slice, and the second time to the whole trace.
  fit() {
    const info = this.data.info;
    const slice = this.selectedSlice;
    if (slice && slice !== this.fittedSlice) {
      this.fittedSlice = slice;
      this.zoomTo(slice);
      return;
    }
    this.fittedSlice = null;
    this.setView(info.first_ns, info.last_ns, true);
  }

  // Zooms to a slice.
  zoomTo(slice) {
    const margin = Math.max(slice.dur * 0.6, 500);
    this.setView(slice.ts - margin, slice.ts + slice.dur + margin, true);
    this.scrollToSlice(slice);
  }

  // Zooms to the selected range.
  zoomToRange() {
    if (!this.range) {
      return;
    }
    const start = Math.min(this.range[0], this.range[1]);
    const end = Math.max(this.range[0], this.range[1]);
    this.setView(start, end, true);
  }

  // Scrolls to the lane of a slice, and expands its group.
  scrollToSlice(slice) {
    const info = this.data.info;
    const group = info.groups.filter((candidate) => {
      return slice.lane >= candidate.first && slice.lane < candidate.first + candidate.count;
    })[0];
    if (group && this.folded[group.key]) {
      this.toggleFold(group.key);
    }
    const layout = this.layout;
    const row = layout && layout.rows[layout.byLane[slice.lane]];
    if (!row || row.isPinned) {
      return;
    }
    if (
      row.y < this.body.scrollTop + layout.pinnedHeight + 10 ||
      row.y + row.h > this.body.scrollTop + this.height - 10
    ) {
      this.body.scrollTop = Math.max(row.y - this.height / 2, 0);
    }
  }

  // Selects a slice and moves it into view. The zoom changes only if the slice would be too small.
  goToSlice(slice) {
    const span = this.x1 - this.x0;
    const scale = this.width / span;
    if (slice.dur * scale < 3 || slice.dur > span) {
      this.zoomTo(slice);
    } else if (slice.ts < this.x0 || slice.ts + slice.dur > this.x1) {
      const middle = slice.ts + slice.dur / 2;
      this.setView(middle - span / 2, middle + span / 2, true);
      this.scrollToSlice(slice);
    } else {
      this.scrollToSlice(slice);
    }
    this.selectById(slice.id);
  }

  // Zooms to a place of a finding and selects its slice.
  showPlace(place, isImmediate) {
    const margin = Math.max(place.dur * 1.5, 20000);
    this.setView(place.ts - margin, place.ts + place.dur + margin, !isImmediate);
    this.selectStartingAt(place.ts, place.dur);
  }

  // Selects a slice and shows its details; null deselects.
  setSelectedSlice(slice) {
    this.selectedSlice = slice;
    if (slice) {
      this.range = null;
      this.panel.showDetails(slice);
    } else {
      this.panel.showWelcome();
    }
    this.draw();
    this.writeUrl();
  }

  // Selects a slice by its id.
  selectById(id, scrolls) {
    const data = this.data;
    return data.fetchJson("slice", { id }).then(
      (slice) => {
        if (this.data !== data) {
          return;
        }
        this.setSelectedSlice(slice);
        if (scrolls) {
          this.scrollToSlice(slice);
        }
      },
      () => {
        this.setSelectedSlice(null);
      },
    );
  }

  // Selects the slice that starts at an instant.
  selectStartingAt(ts, dur) {
    const query = { t: Math.round(ts) };
    if (dur !== null) {
      query.dur = Math.round(dur);
    }
    this.data.fetchJson("find", query).then(
      (slice) => {
        if (slice) {
          this.selectById(slice.id, true);
        }
      },
      () => {
        /* no slice starts there: only the line at the instant is shown */
      },
    );
  }

  // Selects the previous or next slice in the lane.
  selectNeighbor(offset) {
    const current = this.selectedSlice;
    if (!current || current.id + offset < 0) {
      return;
    }
    this.data.fetchJson("slice", { id: current.id + offset }).then(
      (slice) => {
        if (slice.lane !== current.lane) {
          return;
        }
        this.setSelectedSlice(slice);
        if (slice.ts < this.x0 || slice.ts + slice.dur > this.x1) {
          this.goToSlice(slice);
        }
      },
      () => {
        /* there is no such slice */
      },
    );
  }

  // Selects a range. Once it is complete, its statistics are shown.
  setRange(range, isComplete) {
    this.range = range && Math.abs(range[1] - range[0]) >= 16 ? range : null;
    const requested = this.range;
    if (this.range === null) {
      if (!this.selectedSlice && this.data.info) {
        this.panel.showWelcome();
      }
    } else if (isComplete) {
      this.selectedSlice = null;
      this.data
        .fetchJson("range", {
          x0: Math.floor(Math.min(requested[0], requested[1])),
          x1: Math.ceil(Math.max(requested[0], requested[1])),
        })
        .then(
          (stats) => {
            if (this.range === requested) {
              this.panel.showRange(stats);
            }
          },
          () => {
            this.setRange(null);
          },
        );
    }
    this.draw();
  }

  // Clears the range, or else the selection, the search or the finding.
  clearSelection() {
    if (this.range) {
      this.setRange(null);
    } else if (this.selectedSlice) {
      this.setSelectedSlice(null);
    } else if (this.query) {
      this.panel.search.value = "";
      this.setQuery("");
    } else if (this.finding) {
      this.setFinding("", false);
    }
  }

  // Highlights a finding, and shows its first place if "showsPlace".
  setFinding(key, showsPlace) {
    const finding = this.data.info.findings.filter((candidate) => {
      return candidate.key === key;
    })[0];
    this.finding = finding ? key : "";
    this.instant = null;
    this.selectedSlice = null;
    this.panel.findingSelect.value = this.finding;
    this.panel.showWelcome();
    if (finding && showsPlace && finding.places.length) {
      if (
        finding.rank !== null &&
        finding.rank !== this.data.rank &&
        this.data.info.ranks.indexOf(finding.rank) >= 0
      ) {
        this.openFindingRank(finding);
        return;
      }
      this.setView(
        finding.places[0].ts - Math.max(finding.places[0].dur * 1.5, 20000),
        finding.places[0].ts + finding.places[0].dur + Math.max(finding.places[0].dur * 1.5, 20000),
        true,
      );
      this.scrollToPlace(finding.places[0]);
    }
    this.requestView();
    this.writeUrl();
  }

  // Loads the rank of a finding at its first place.
  openFindingRank(finding) {
    const place = finding.places[0];
    const margin = Math.max(place.dur * 1.5, 20000);
    this.openRank(finding.rank, [place.ts - margin, place.ts + place.dur + margin]);
  }

  // Scrolls to the lane of a place.
  scrollToPlace(place) {
    this.data.fetchJson("find", { t: Math.round(place.ts), dur: Math.round(place.dur) }).then(
      (slice) => {
        if (slice) {
          this.scrollToSlice(slice);
        }
      },
      () => {
        /* there is no such slice */
      },
    );
  }

  // Sets the text to search for, and counts its matches.
  setQuery(query) {
    query = query.trim();
    if (query === this.query) {
      return;
    }
    this.query = query;
    this.copyQueryToPartner();
    if (!query) {
      this.panel.showMatchCount(null);
    } else {
      this.findMatch(query, false, true);
    }
    this.requestView();
    this.draw();
    this.writeUrl();
  }

  // Marks search matches in the compared timeline too.
  copyQueryToPartner() {
    if (this.compared && this.compared.layout) {
      this.compared.query = this.query;
      this.compared.requestView();
      this.compared.draw();
    }
  }

  // Moves to the next match. "countsOnly" only counts the matches.
  findMatch(query, isBackward, countsOnly) {
    const data = this.data;
    query = query.trim();
    if (!query) {
      this.setQuery("");
      return Promise.resolve();
    }
    if (query !== this.query) {
      this.query = query;
      this.copyQueryToPartner();
      this.requestView();
      this.writeUrl();
    }
    const parameters = { q: query, back: isBackward ? 1 : 0, t: Math.round(this.x0) };
    if (this.selectedSlice && !countsOnly) {
      parameters.id = this.selectedSlice.id;
      parameters.t = this.selectedSlice.ts;
    }
    return data.fetchJson("search", parameters).then(
      (answer) => {
        if (this.query !== query || this.data !== data) {
          return;
        }
        if (countsOnly) {
          delete answer.at;
        }
        this.panel.showMatchCount(answer);
        if (!countsOnly && answer.total) {
          this.goToSlice(answer);
        }
      },
      () => {
        this.panel.showMatchCount({ total: 0 });
      },
    );
  }

  // Moves to the next or previous match.
  findNext(isBackward) {
    if (this.query) {
      this.findMatch(this.query, isBackward);
    }
  }

  // Returns the row at a vertical position, or null.
  rowAt(y) {
    const rows = this.layout ? this.layout.rows : [];
    const isPinnedPart = Boolean(this.layout && y < this.layout.pinnedHeight);
    const position = isPinnedPart ? y : y + this.scroll;
    for (let i = 0; i < rows.length; i++) {
      if (
        rows[i].isPinned === isPinnedPart &&
        position >= rows[i].y - 1 &&
        position < rows[i].y + rows[i].h + 1
      ) {
        return rows[i];
      }
    }
    return null;
  }

  // Returns the slice drawn at a point, or the nearest one within two pixels.
  sliceAt(x, y) {
    const row = this.rowAt(y);
    const answer = this.answer;
    if (!row || row.lane === undefined || !answer) {
      return null;
    }
    const slices = answer.slices;
    const time = this.timeAt(x) - answer.x0;
    const slack = (2 * (this.x1 - this.x0)) / this.width;
    let best = -1;
    let nearest = slack;
    for (let i = 0; i < slices.n; i++) {
      if (slices.lane[i] !== row.lane) {
        continue;
      }
      const distance =
        time < slices.start[i]
          ? slices.start[i] - time
          : time > slices.start[i] + slices.dur[i]
            ? time - slices.start[i] - slices.dur[i]
            : 0;
      if (distance <= nearest && (best < 0 || distance < nearest)) {
        best = i;
        nearest = distance;
      }
    }
    if (best < 0) {
      return null;
    }
    return {
      id: slices.id[best],
      lane: row.lane,
      ts: answer.x0 + slices.start[best],
      dur: slices.dur[best],
      name: this.data.names[slices.name[best]],
      label: this.data.info.categories[slices.category[best]][1],
      count: 1,
    };
  }

  // Returns the lane of the cell at a point, or null.
  cellAt(x, y) {
    const row = this.rowAt(y);
    const answer = this.answer;
    if (!row || row.lane === undefined || !answer) {
      return null;
    }
    const runs = answer.runs;
    const cell = (this.timeAt(x) - answer.cell0) / answer.cell;
    for (let i = 0; i < runs.n; i++) {
      if (
        runs.lane[i] === row.lane &&
        cell >= runs.cell[i] - 1 &&
        cell < runs.cell[i] + runs.width[i] + 1
      ) {
        return row.lane;
      }
    }
    return null;
  }

  // Returns the value of the counter at a point.
  counterAt(x, y) {
    const row = this.rowAt(y);
    const answer = this.answer;
    const number = row ? row.counter : undefined;
    if (!answer || number === undefined || answer.counterNumbers.indexOf(number) < 0) {
      return null;
    }
    const position = answer.counterNumbers.indexOf(number);
    const counter = this.data.info.counters[number];
    const pixel = Math.floor(((this.timeAt(x) - answer.x0) / (answer.x1 - answer.x0)) * answer.px);
    const low = answer.low[position * answer.px + pixel];
    const high = answer.high[position * answer.px + pixel];
    if (!(pixel >= 0 && pixel < answer.px) || low !== low) {
      return { counter: counter.label, value: "no sample" };
    }
    const text = ui.formatQuantity(high, counter.unit);
    return {
      counter: counter.label,
      value: low === high ? text : ui.formatQuantity(low, counter.unit) + " – " + text,
    };
  }

  // Requests the longest slice of the cell at a point.
  fetchSliceAt(x, y) {
    const lane = this.cellAt(x, y);
    if (lane === null) {
      return Promise.resolve(null);
    }
    return this.data.fetchJson("at", {
      lane,
      t: Math.round(this.timeAt(x)),
      reach: Math.max(1, Math.round((1.5 * (this.x1 - this.x0)) / this.width)),
    });
  }

  // Updates pointer and hover card; null: the pointer left.
  movePointer(x, y) {
    const slice = x === null ? null : this.sliceAt(x, y);
    const card = this.panel;
    this.pointer = x;
    const otherTimeline = this.parent || this.compared;
    if (otherTimeline) {
      otherTimeline.pointer = x;
      otherTimeline.drawOverlay();
    }
    clearTimeout(this.hoverTimer);
    this.hoveredSlice = slice;
    const left = this.overlay.parentNode.offsetLeft + x;
    const top = this.body.offsetTop + y;
    card.showHoverCard(slice || (x !== null && this.counterAt(x, y)), left, top);
    if (!slice && x !== null) {
      this.hoverTimer = setTimeout(() => {
        this.fetchSliceAt(x, y).then(
          (slice) => {
            if (!slice || this.pointer !== x || this.isDestroyed) {
              return;
            }
            slice.label = slice.category;
            this.hoveredSlice = slice;
            card.showHoverCard(slice, left, top);
            this.draw();
          },
          () => {
            /* no slice there */
          },
        );
      }, 60);
    }
    this.drawOverlay();
  }

  // Selects the slice nearest to the middle of the topmost lane with a slice in view.
  selectVisible() {
    for (let y = 2; y < this.height; y += 6) {
      for (let offset = 0; offset <= 0.5; offset += 0.05) {
        const slice =
          this.sliceAt((0.5 + offset) * this.width, y) ||
          this.sliceAt((0.5 - offset) * this.width, y);
        if (slice) {
          this.selectById(slice.id);
          return;
        }
      }
    }
  }

  // Selects the slice at a point.
  click(x, y) {
    const slice = this.sliceAt(x, y);
    if (slice) {
      this.selectById(slice.id);
      this.range = null;
      return;
    }
    this.fetchSliceAt(x, y).then(
      (slice) => {
        if (slice) {
          this.range = null;
          this.selectById(slice.id);
        } else {
          this.setRange(null);
          this.setSelectedSlice(null);
        }
      },
      () => {
        this.setSelectedSlice(null);
      },
    );
  }

  // Returns the lanes and counters on the screen, and one screen above and below it.
  lanesToRequest() {
    const lanes = [];
    const counters = [];
    const top = this.scroll - this.height;
    const bottom = this.scroll + 2 * this.height;
    (this.layout ? this.layout.rows : []).forEach((row) => {
      if (!row.isPinned && (row.y > bottom || row.y + row.h < top)) {
        return;
      }
      if (row.lane !== undefined) {
        lanes.push(row.lane);
      } else {
        counters.push(row.counter);
      }
    });
    return { lanes: lanes.slice(0, 1000), counters };
  }

  // Returns whether the last answer covers the visible span.
  isViewCovered() {
    const answer = this.answer;
    return Boolean(
      answer &&
      answer.x0 <= Math.max(this.x0, answer.firstEvent) &&
      answer.x1 >= Math.min(this.x1, answer.lastEvent),
    );
  }

  // Returns whether the last answer has everything that a new answer would have.
  isAnswerSufficient(wanted) {
    const answer = this.answer;
    if (
      !answer ||
      !this.isViewCovered() ||
      answer.focus !== this.finding ||
      answer.q !== this.query
    ) {
      return false;
    }
    const idealCell = (this.x1 - this.x0) / (this.width * this.pixelRatio());
    if (
      answer.cell > Math.max(idealCell, 1) * 1.01 ||
      (answer.cell < idealCell / 4 && answer.x1 - answer.x0 > 3 * (this.x1 - this.x0))
    ) {
      return false;
    }
    return (
      wanted.lanes.every((lane) => {
        return answer.hasLane[lane];
      }) &&
      wanted.counters.every((counter) => {
        return answer.counterNumbers.indexOf(counter) >= 0;
      })
    );
  }

  // Returns the device pixels per CSS pixel, at most 2.
  pixelRatio() {
    return ui.clamp(window.devicePixelRatio || 1, 1, 2);
  }

  // Requests the visible span, unless a request is pending or the last answer suffices.
  requestView() {
    if (!this.layout || !this.data.info || this.pendingView || this.isDestroyed) {
      return;
    }
    const wanted = this.lanesToRequest();
    const data = this.data;
    const span = this.x1 - this.x0;
    const info = data.info;
    if (this.isAnswerSufficient(wanted) || this.x1 <= info.first_ns || this.x0 >= info.last_ns) {
      this.resolveSettled();
      return;
    }
    const slack = (info.last_ns - info.first_ns) * 0.1 + 1000;
    const low = Math.floor(Math.max(this.x0 - PREFETCH_SPANS * span, info.first_ns - slack));
    let high = Math.ceil(Math.min(this.x1 + PREFETCH_SPANS * span, info.last_ns + slack));
    if (high - low < 64) {
      high = low + 64;
    }
    const px = Math.round(
      ui.clamp(((high - low) / span) * this.width * this.pixelRatio(), 16, 8192),
    );
    const focus = this.finding;
    const searchText = this.query;
    this.pendingView = data
      .fetchView(low, high, px, wanted.lanes, wanted.counters, focus, searchText)
      .then(
        (answer) => {
          this.pendingView = null;
          if (this.isDestroyed || this.data !== data) {
            this.requestView();
            return;
          }
          if (answer.version !== info.version) {
            this.openRank(data.rank, [this.x0, this.x1]);
            return;
          } // a live run has a new window
          answer.counterNumbers = wanted.counters;
          answer.hasLane = [];
          wanted.lanes.forEach((lane) => {
            answer.hasLane[lane] = true;
          });
          answer.focus = focus;
          answer.q = searchText;
          answer.firstEvent = info.first_ns;
          answer.lastEvent = info.last_ns;
          this.answer = answer;
          this.viewError = null;
          if (!this.overviewAnswer) {
            this.requestOverview();
          }
          this.draw();
          this.requestView();
        },
        (error) => {
          this.pendingView = null;
          this.viewError = error;
          this.panel.status.textContent = "The server does not respond: " + error.message;
          this.announceReady();
          this.resolveSettled();
        },
      );
  }

  // Requests the whole trace once, for the overview and as a preview until a finer answer arrives.
  requestOverview() {
    const data = this.data;
    const info = data.info;
    let lanes = this.lanesToRequest().lanes.concat(this.overviewLanes);
    lanes = lanes
      .filter((lane, i) => {
        return lanes.indexOf(lane) === i;
      })
      .sort((a, b) => {
        return a - b;
      });
    data
      .fetchView(
        info.first_ns,
        Math.max(info.last_ns, info.first_ns + 64),
        Math.round(ui.clamp(this.width, 64, 4096)),
        lanes,
        [],
        "",
        "",
      )
      .then(
        (overviewAnswer) => {
          if (this.data !== data) {
            return;
          }
          const slices = overviewAnswer.slices;
          const stepGroup = info.groups.filter((group) => {
            return group.kind === "steps";
          })[0];
          overviewAnswer.hasLane = [];
          overviewAnswer.counterNumbers = [];
          this.overviewAnswer = overviewAnswer;
          this.stepStarts = [];
          for (let i = 0; stepGroup && i < slices.n; i++) {
            if (slices.lane[i] === stepGroup.first) {
              this.stepStarts.push(overviewAnswer.x0 + slices.start[i]);
            }
          }
          this.draw();
        },
        () => {
          this.announceReady(); /* without an overview */
        },
      );
  }

  // Draws everything in the next animation frame.
  draw() {
    if (this.mainFrame || this.isDestroyed) {
      return;
    }
    this.mainFrame = requestAnimationFrame(() => {
      this.mainFrame = 0;
      if (this.isDestroyed) {
        return;
      }
      this.painter.drawLanes();
      this.painter.drawAxis();
      this.painter.drawOverview();
      this.painter.drawOverlay();
      this.panel.showStatus();
      this.panel.debounce("calm", 350, () => {
        this.panel.updateLegend();
        this.panel.fillTable();
      });
      if (this.answer && !this.paintedAt && !this.parent) {
        this.paintedAt = performance.now();
        performance.mark("advisor-timeline-painted");
      }
      if (this.answer && this.overviewAnswer) {
        this.announceReady();
      }
      this.resolveSettled();
    });
  }

  // Announces the first paint, or that there will be none. deferred_scripts.js waits for it.
  announceReady() {
    if (this.isReadyAnnounced || this.parent) {
      return;
    }
    this.isReadyAnnounced = true;
    setTimeout(() => {
      window.dispatchEvent(new Event("advisor-timeline-ready"));
    });
  }

  // Draws only the overlay in the next animation frame.
  drawOverlay() {
    if (this.overlayFrame || this.mainFrame) {
      return;
    }
    this.overlayFrame = requestAnimationFrame(() => {
      this.overlayFrame = 0;
      this.painter.drawOverlay();
    });
  }

  // Resolves when the view is completely drawn. Tests and benchmarks use it.
  whenSettled() {
    return new Promise((resolve) => {
      this.settledCallbacks.push(resolve);
      this.resolveSettled();
    });
  }

  // Resolves the promises of whenSettled if the view is complete.
  resolveSettled() {
    if (!this.settledCallbacks.length || this.pendingView || this.mainFrame) {
      return;
    }
    if (
      !this.viewError &&
      this.message.hidden &&
      (!this.layout || !this.data.info || !this.isAnswerSufficient(this.lanesToRequest()))
    ) {
      return;
    }
    if (!this.viewError && !this.message.hidden && this.message.textContent === "Reading…") {
      return;
    }
    this.settledCallbacks.splice(0).forEach((resolve) => {
      resolve();
    });
  }
}
