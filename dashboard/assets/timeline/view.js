// Timeline: the view itself: which span is shown, what is asked of the server and when.

import { Data } from "./data.js";
import { Input } from "./input.js";
import { LABEL, Paint, layOut, overhang } from "./paint.js";
import { Panel } from "./panel.js";
import * as ui from "./ui.js";

const MARGIN = 0.5; // asked for on each side of the view, so that a short pan is there already
const MINIMUM = 64; // shortest span, ns
const MOVE_MS = 140; // of a zoom by key or button

// "parent": the timeline under which this one is shown, with one zoom for both; it has neither
// toolbar nor address of its own.
export class Timeline {
  /** @type {ReturnType<typeof layOut> | null} */
  layout = null;
  /** @type {import("./data.js").Answer | null} */
  answer = null;
  /** @type {import("./data.js").Answer | null} the one before, of a wider span */
  base = null;
  /** @type {Data} asked for by "build" */
  data = /** @type {any} */ (null);
  written = ""; // the address as this view wrote it
  moving = 0; // the frame in which a zoom goes on
  linked = false; // it follows the other one, and does not lead
  /** @type {Error | null} */
  problem = null; // what went wrong: the message says it
  painted = 0; // when the first answer was
  frame = 0; // the one that is asked for
  /** @type {HTMLElement | null} */
  main = null;
  /** @type {any} */
  touched = null;
  narrow = false; // labels have lines of their own
  early = false; // begun before the page's frame was there
  gone = false;

  /**
   * @param {HTMLElement} root
   * @param {Timeline} [parent] the timeline under which this one is shown
   */
  constructor(root, parent) {
    const self = this;
    this.root = root;
    this.parent = parent || null;
    this.partner = null; // the one under this one
    this.shift = 0; // of a partner: what to add to the parent's times to get its own
    this.pinned = [];
    this.libraries = parent
      ? parent.libraries
      : new URLSearchParams(location.search).get("libraries") === "1";
    this.beside_ = "";
    this.run = root.getAttribute("data-run") || "";
    this.x0 = 0;
    this.x1 = 1;
    this.scroll = 0;
    this.width = 100;
    this.height = 100;
    this.layout = null;
    this.answer = null;
    this.base = null;
    this.steps = null;
    this.mapLanes = [];
    this.folded = {};
    this.pointer = null;
    this.hover = null;
    this.chosen = null;
    this.range = null;
    this.instant = null;
    this.finding = "";
    this.query = "";
    this.flying = null;
    this.waiters = [];
    this.build();
    this.panel = new Panel(this);
    if (parent) {
      root.replaceChildren(this.stage);
      /** @type {HTMLElement} */ (parent.main).appendChild(this.panel.side);
    } else {
      this.left = ui.el("div", { cls: "tl-left" }, [this.stage]);
      const main = ui.el("div", { cls: "tl-main wide" }, [this.left, this.panel.side]);
      this.main = main;
      root.replaceChildren(
        this.panel.bar,
        main,
        this.panel.status,
        this.panel.table,
        this.panel.dialog,
      );
    }
    this.panel.side.hidden = true;
    this.stage.appendChild(this.panel.card);
    this.paint = new Paint(this);
    this.input = new Input(this);
    this.watch = new ResizeObserver(() => {
      self.resize();
    });
    this.watch.observe(this.stage);
    this.onTheme = function () {
      self.paint.theme();
      self.draw();
    };
    this.onUrl = function () {
      if (location.pathname + location.search !== self.written) {
        self.fromUrl(false);
      }
    };
    window.addEventListener("advisor-theme", this.onTheme);
    if (parent) {
      return;
    }
    window.addEventListener("popstate", this.onUrl);
    window.addEventListener("_dashprivate_pushstate", this.onUrl);
    this.open(null);
  }

  build() {
    const self = this;
    this.map = ui.el("canvas", { cls: "tl-map", "aria-hidden": "true" });
    this.axis = ui.el("canvas", { cls: "tl-axis", "aria-hidden": "true" });
    this.canvas = ui.el("canvas", { cls: "tl-canvas", "aria-hidden": "true" });
    this.overlay = ui.el("canvas", { cls: "tl-overlay", "aria-hidden": "true" });
    this.labels = ui.el("div", { cls: "tl-labels" });
    this.pins = ui.el("div", { cls: "tl-pins" });
    this.who = ui.el("p", { cls: "tl-who", hidden: true });
    this.content = ui.el("div", { cls: "tl-content" }, [
      ui.el("div", { cls: "tl-sticky" }, [this.canvas, this.overlay]),
      this.pins,
      this.labels,
    ]);
    this.body = ui.el("div", { cls: "tl-body" }, [this.content]);
    this.message = ui.el("p", { cls: "tl-message", role: "status", text: "Reading…" });
    this.body.addEventListener("scroll", () => {
      self.scroll = self.body.scrollTop;
      self.draw();
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
      [ui.el("div", { cls: "tl-top" }, [this.who, this.map, this.axis]), this.body, this.message],
    );
  }

  // Move to the place on the page that came later.
  adopt(place) {
    const top = this.body.scrollTop;
    const focus = /** @type {HTMLElement | null} */ (document.activeElement);
    place.replaceChildren.apply(place, Array.from(this.root.childNodes));
    this.root.remove();
    this.root = place;
    this.early = false;
    performance.mark("advisor-frame-there");
    this.body.scrollTop = top;
    if (focus && place.contains(focus)) {
      focus.focus({ preventScroll: true });
    }
    this.resize();
  }

  destroy() {
    this.gone = true;
    if (this.partner) {
      this.partner.destroy();
    }
    if (this.parent) {
      this.root.remove();
      this.panel.side.remove();
    }
    if (this.early) {
      this.root.remove();
    }
    this.input.destroy();
    this.watch.disconnect();
    window.removeEventListener("advisor-theme", this.onTheme);
    window.removeEventListener("popstate", this.onUrl);
    window.removeEventListener("_dashprivate_pushstate", this.onUrl);
  }

  // ``rank``: null is the one of the address, else the reported one, which "fallback" insists on.
  open(rank, keep, fallback) {
    const self = this;
    const asked = new URLSearchParams(location.search);
    if (rank === null && !fallback && !this.parent && /^-?\d{1,6}$/.test(asked.get("rank") || "")) {
      rank = Number(asked.get("rank"));
    }
    this.data = new Data(this.run, rank, this.libraries);
    this.answer = this.base = null;
    this.data.onnames = function () {
      self.draw();
    };
    this.data.load().then(
      (info) => {
        if (self.gone) {
          return;
        }
        self.message.hidden = true;
        self.folded = {};
        self.layout = null; // its lanes are those of what was open before
        info.groups.forEach((g) => {
          self.folded[g.key] = g.folded;
        });
        self.paint.categories(info.categories);
        self.panel.options(info);
        if (self.parent) {
          self.beneath();
          return;
        }
        if (!keep) {
          self.pinned = (asked.get("pin") || "").split(",").filter(Boolean).slice(0, 40);
        }
        if (keep) {
          self.choose(null);
          self.setView(keep[0], keep[1]);
        } else {
          self.fromUrl(true);
        }
        self.arrange();
        self.panel.welcome();
        if (self.partner) {
          self.setBeside(self.beside_);
        } else if (asked.get("beside")) {
          self.setBeside(asked.get("beside"));
        }
        if (!info.groups.length && !info.counters.length) {
          self.fail("The trace has no events.");
        }
      },
      (error) => {
        if (rank !== null && !keep && !fallback) {
          self.open(null, null, true);
          return;
        }
        self.fail(error.message);
      },
    );
  }

  runKey() {
    return (
      this.run ||
      this.data.info.runs.map((run) => {
        return run.key;
      })[0] ||
      ""
    );
  }

  // "run:1" or "rank:3": shown under this one; an empty text: nothing.
  setBeside(key) {
    const info = this.data.info;
    const parts = /^(run|rank):(-?\w{1,9})$/.exec(key || "");
    const there =
      parts &&
      (parts[1] === "rank"
        ? info.ranks.indexOf(Number(parts[2])) >= 0 && Number(parts[2]) !== info.rank
        : info.runs.some((run) => {
            return run.key === parts[2];
          }) && parts[2] !== this.runKey());
    if (this.partner) {
      this.partner.destroy();
    }
    this.partner = null;
    this.beside_ = there ? key : "";
    this.panel.beside.value = this.beside_;
    if (there) {
      const root = ui.el("div", {
        cls: "tl-second",
        "data-run": parts[1] === "run" ? parts[2] : this.runKey(),
      });
      this.left.appendChild(root);
      this.partner = new Timeline(root, this);
      const runs = info.runs.filter((run) => {
        return parts[1] === "run" && run.key === parts[2];
      })[0];
      this.partner.open(
        parts[1] === "rank"
          ? Number(parts[2])
          : runs.ranks.indexOf(info.rank) >= 0
            ? info.rank
            : runs.ranks[0],
      );
    }
    this.caption("");
    this.activate();
    this.toUrl();
    this.resize();
  }

  // A partner is there: to the times of the one above it.
  beneath() {
    const self = this;
    const above = this.parent;
    const data = this.data;
    above.data.json("beside", { other_run: this.run, other_rank: data.rank }).then(
      (answer) => {
        if (self.gone || self.data !== data) {
          return;
        }
        self.shift = answer.ns;
        above.caption("");
        self.caption(answer.how);
        self.finding = "";
        self.query = above.query;
        self.arrange();
        self.panel.welcome();
        above.place(above.x0, above.x1);
      },
      (error) => {
        self.fail(error.message);
      },
    );
  }

  // Whose picture it is, where there are two.
  caption(how) {
    const info = this.data.info;
    const run = info && info.runs.filter((one) => one.key === this.runKey())[0];
    this.who.hidden = !this.partner && !this.parent;
    if (!info || this.who.hidden) {
      return;
    }
    const text =
      (info.runs.length > 1 && run ? run.name : "") +
      (info.ranks.length > 1 ? " rank " + info.rank : "");
    this.who.replaceChildren(
      ui.el("b", { text: text.trim() || "this run" }),
      ui.el("span", { text: how ? how : "" }),
    );
    this.who.title = text.trim() + (how ? ", " + how : "");
  }

  // Keys go to the one of the two that was touched last, and the panel is its.
  active() {
    const top = this.parent || this;
    return (top.touched || top) === this;
  }

  activate() {
    const top = this.parent || this;
    if (top.touched === this && !this.parent) {
      return;
    }
    top.touched = this;
    top.sides();
  }

  sides() {
    const top = this.parent || this;
    const both = [top, top.partner].filter(Boolean);
    let any = false;
    if (!top.panel || !top.main) {
      return;
    }
    if (both.indexOf(top.touched) < 0) {
      top.touched = top;
    }
    both.forEach((one) => {
      one.panel.side.hidden = !(one === top.touched && (one.panel.asked || top.panel.open));
      any = any || !one.panel.side.hidden;
      if (!one.panel.side.hidden) {
        one.panel.colours();
      }
    });
    top.main.classList.toggle("wide", !any);
    top.panel.opener.setAttribute("aria-expanded", String(any));
  }

  setLibraries(shown) {
    this.libraries = shown;
    this.open(this.data.rank, [this.x0, this.x1]);
  }

  fail(why) {
    this.message.hidden = false;
    this.message.textContent = why;
    this.there();
    this.settle();
  }

  setRank(rank) {
    this.finding = "";
    this.query = "";
    this.open(rank, [this.x0, this.x1]);
  }

  fromUrl(first) {
    const info = this.data.info;
    const asked = new URLSearchParams(location.search);
    const focus = asked.get("focus") || "";
    if (!info) {
      return;
    }
    const whole = /^-?\d{1,18}$/;
    const x0 = asked.get("x0") || "";
    const x1 = asked.get("x1") || "";
    // focus names a finding; a link of the findings page gives the instant, and the finding beside
    // it
    this.instant = whole.test(focus) ? Number(focus) : null;
    const finding = asked.get("finding") || (this.instant === null ? focus : "");
    const known = info.findings.filter((f) => {
      return f.key === finding;
    })[0];
    this.finding = known ? finding : "";
    this.panel.focus.value = this.finding;
    this.query = (asked.get("q") || "").slice(0, 200);
    this.panel.search.value = this.query;
    if (this.query) {
      this.find(this.query, false, true);
    }
    if (whole.test(x0) && whole.test(x1) && Number(x1) > Number(x0)) {
      this.setView(Number(x0), Number(x1));
    } else if (known && known.places.length) {
      this.showPlace(known.places[0], true);
    } else {
      this.setView(info.begin, info.finish);
    }
    if (/^\d{1,9}$/.test(asked.get("sel") || "")) {
      this.select(Number(asked.get("sel")), first);
    } else if (this.instant !== null) {
      const at = this.instant;
      const place =
        known &&
        known.places.filter((p) => {
          return p.ts === at;
        })[0];
      this.selectAt(at, place ? place.dur : null);
    }
    this.ask();
    this.draw();
  }

  toUrl() {
    const self = this;
    if (this.parent) {
      return;
    }
    clearTimeout(this.urlTimer);
    this.urlTimer = setTimeout(() => {
      self.urlTimer = undefined;
      if (self.gone || !self.data.info) {
        return;
      }
      const asked = new URLSearchParams(location.search);
      const info = self.data.info;
      function put(key, value) {
        if (value === null || value === "") {
          asked.delete(key);
        } else {
          asked.set(key, value);
        }
      }
      const all = Math.abs(self.x0 - info.begin) < 1 && Math.abs(self.x1 - info.finish) < 1;
      put("x0", all ? null : Math.floor(self.x0));
      put("x1", all ? null : Math.ceil(self.x1));
      put("rank", info.ranks.length > 1 || asked.has("rank") ? info.rank : null);
      put("finding", self.instant === null ? null : self.finding);
      put("focus", self.instant === null ? self.finding : self.instant);
      put("q", self.query);
      put("sel", self.chosen ? self.chosen.id : null);
      put("pin", self.pinned.join(","));
      put("beside", self.beside_);
      put("libraries", self.libraries ? 1 : null);
      const text = asked.toString();
      self.written = location.pathname + (text ? "?" + text : "");
      if (self.written !== location.pathname + location.search) {
        history.replaceState(history.state, "", self.written);
      }
    }, 250);
  }

  resize() {
    const gutter = this.stage.clientWidth < 620 ? 0 : 188;
    const turned = this.narrow !== !gutter;
    this.narrow = !gutter;
    this.stage.classList.toggle("narrow", this.narrow);
    this.stage.style.setProperty("--tl-gutter", gutter + "px");
    this.width = Math.max(this.body.clientWidth - gutter, 50);
    this.height = Math.max(this.body.clientHeight, 50);
    if (turned && this.layout) {
      this.arrange();
      return;
    }
    this.ask();
    this.draw();
  }

  arrange() {
    const self = this;
    const info = this.data.info;
    const layout = (this.layout = layOut(info, this.folded, this.narrow, this.pinned));
    this.content.style.height = layout.height + "px";
    this.stage.style.setProperty("--tl-pins", layout.pins + "px");
    const labelled = layout.boxes.map((box) => {
      const group = box.group;
      const key = group ? group.key : "counters";
      const text = group ? group.label : "Counters";
      const many = !group || group.count > 1;
      const node = ui.el(
        "button",
        {
          type: "button",
          cls: "tl-label" + (many ? " many" : "") + (box.shut ? " shut" : ""),
          "aria-expanded": box.shut ? "false" : "true",
          title: text,
        },
        [
          ui.el("span", { cls: "tl-arrow", "aria-hidden": "true" }),
          ui.el("span", { cls: "tl-text", text }),
        ],
      );
      node.style.height = LABEL + "px";
      const pin = box.counters
        ? null
        : ui.el(
            "button",
            {
              type: "button",
              cls: "tl-pin",
              "aria-pressed": String(box.pin),
              title: box.pin ? "Unpin" : "Pin to the top",
              "aria-label": (box.pin ? "Unpin " : "Pin to the top: ") + text,
            },
            [ui.el("span", { cls: "icon icon-pin", "aria-hidden": "true" })],
          );
      if (pin) {
        pin.addEventListener("click", () => {
          self.pin(key);
        });
      }
      // the label stays in sight while any of its lanes is
      const frame = ui.el("div", { cls: "tl-box" }, [ui.el("div", { cls: "tl-row" }, [node, pin])]);
      const above = self.narrow ? LABEL : overhang(box.h);
      frame.style.top = box.y - above + "px";
      frame.style.height = Math.max(box.h + above, LABEL) + "px";
      node.addEventListener("click", () => {
        self.fold(key);
      });
      return frame;
    });
    function of(pinned) {
      return labelled.filter((_, i) => {
        return layout.boxes[i].pin === pinned;
      });
    }
    this.pins.replaceChildren.apply(this.pins, of(true));
    this.labels.replaceChildren.apply(
      this.labels,
      of(false).concat(
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
    this.mapLanes = this.pickMap();
    this.ask();
    this.draw();
  }

  // Pinned lanes stay at the top while the others scroll.
  pin(key) {
    const at = this.pinned.indexOf(key);
    const label = function (one) {
      return one.querySelector(".tl-pin");
    };
    if (at >= 0) {
      this.pinned.splice(at, 1);
    } else {
      this.pinned.push(key);
    }
    this.arrange();
    this.toUrl();
    const groups = (this.layout ? this.layout.boxes : []).flatMap((box) => box.group || []);
    const i = groups.findIndex((group) => {
      return group.key === key;
    });
    const moved = Array.from(this.pins.children).concat(
      Array.from(this.labels.querySelectorAll(".tl-box")),
    )[i];
    if (moved && label(moved)) {
      label(moved).focus({ preventScroll: true });
    }
  }

  fold(key) {
    this.folded[key] = !this.folded[key];
    this.arrange();
  }

  // The overview shows steps, idle time and the busiest stream; without a device the main thread.
  pickMap() {
    const groups = this.data.info.groups;
    const found = [];
    ["steps", "idle", "stream", "thread"].forEach((kind) => {
      const group = groups.filter((g) => {
        return g.kind === kind;
      })[0];
      if (group && (kind !== "thread" || found.length < 2)) {
        found.push(group.first);
      }
    });
    return found;
  }

  timeAt(x) {
    return this.x0 + (x / this.width) * (this.x1 - this.x0);
  }

  setView(x0, x1, moves) {
    const info = this.data.info;
    const whole = info.finish - info.begin;
    const span = ui.clamp(x1 - x0, MINIMUM, whole * 1.2 + MINIMUM);
    const middle = ui.clamp((x0 + x1) / 2, info.begin, info.finish);
    const from = [this.x0, this.x1];
    const self = this;
    const to = [middle - span / 2, middle + span / 2];
    cancelAnimationFrame(this.moving);
    if (!moves || ui.prefersReducedMotion() || document.hidden) {
      this.place(to[0], to[1]);
      return;
    }
    const began = performance.now();
    (function frame(now) {
      const part = ui.clamp((now - began) / MOVE_MS, 0, 1);
      const ease = 1 - Math.pow(1 - part, 3);
      self.place(from[0] + (to[0] - from[0]) * ease, from[1] + (to[1] - from[1]) * ease);
      if (part < 1 && !self.gone) {
        self.moving = requestAnimationFrame(frame);
      }
    })(began);
    this.target = to;
  }

  place(x0, x1) {
    this.x0 = x0;
    this.x1 = x1;
    this.hover = null;
    this.panel.hover(null);
    this.ask();
    this.draw();
    this.toUrl();
    const other = this.parent || this.partner;
    const by = this.parent ? -this.shift : other ? other.shift : 0;
    if (!other || this.linked || !other.layout) {
      return;
    }
    other.linked = true;
    cancelAnimationFrame(other.moving);
    other.place(x0 + by, x1 + by);
    other.linked = false;
  }

  pan(share, moves) {
    const by = share * (this.x1 - this.x0);
    const info = this.data.info;
    const span = this.x1 - this.x0;
    const x0 = ui.clamp(this.x0 + by, info.begin - span / 2, info.finish - span / 2);
    this.setView(x0, x0 + span, moves);
  }

  zoom(factor, at, moves) {
    const span = this.x1 - this.x0;
    const info = this.data.info;
    const held = this.x0 + at * span;
    const wide = ui.clamp(span * factor, MINIMUM, (info.finish - info.begin) * 1.2 + MINIMUM);
    this.setView(held - at * wide, held - at * wide + wide, moves);
  }

  fit() {
    const info = this.data.info;
    const c = this.chosen;
    if (c && c !== this.fitted) {
      this.fitted = c;
      this.zoomTo(c);
      return;
    }
    this.fitted = null;
    this.setView(info.begin, info.finish, true);
  }

  zoomTo(slice) {
    const margin = Math.max(slice.dur * 0.6, 500);
    this.setView(slice.ts - margin, slice.ts + slice.dur + margin, true);
    this.reveal(slice);
  }

  zoomToRange() {
    if (!this.range) {
      return;
    }
    const a = Math.min(this.range[0], this.range[1]);
    const b = Math.max(this.range[0], this.range[1]);
    this.setView(a, b, true);
  }

  // Scroll a slice's lane into sight, opening what is folded.
  reveal(slice) {
    const info = this.data.info;
    const group = info.groups.filter((g) => {
      return slice.lane >= g.first && slice.lane < g.first + g.count;
    })[0];
    if (group && this.folded[group.key]) {
      this.fold(group.key);
    }
    const layout = this.layout;
    const row = layout && layout.rows[layout.byLane[slice.lane]];
    if (!row || row.pin) {
      return;
    }
    if (
      row.y < this.body.scrollTop + layout.pins + 10 ||
      row.y + row.h > this.body.scrollTop + this.height - 10
    ) {
      this.body.scrollTop = Math.max(row.y - this.height / 2, 0);
    }
  }

  // Bring a slice into view without changing the zoom more than is needed to see it.
  go(slice) {
    const span = this.x1 - this.x0;
    const scale = this.width / span;
    if (slice.dur * scale < 3 || slice.dur > span) {
      this.zoomTo(slice);
    } else if (slice.ts < this.x0 || slice.ts + slice.dur > this.x1) {
      const middle = slice.ts + slice.dur / 2;
      this.setView(middle - span / 2, middle + span / 2, true);
      this.reveal(slice);
    } else {
      this.reveal(slice);
    }
    this.select(slice.id);
  }

  showPlace(place, still) {
    const margin = Math.max(place.dur * 1.5, 20000);
    this.setView(place.ts - margin, place.ts + place.dur + margin, !still);
    this.selectAt(place.ts, place.dur);
  }

  choose(slice) {
    this.chosen = slice;
    if (slice) {
      this.range = null;
      this.panel.details(slice);
    } else {
      this.panel.welcome();
    }
    this.draw();
    this.toUrl();
  }

  select(id, show) {
    const self = this;
    const data = this.data;
    return data.json("slice", { id }).then(
      (slice) => {
        if (self.data !== data) {
          return;
        }
        self.choose(slice);
        if (show) {
          self.reveal(slice);
        }
      },
      () => {
        self.choose(null);
      },
    );
  }

  selectAt(ts, dur) {
    const self = this;
    const query = { t: Math.round(ts) };
    if (dur !== null) {
      query.dur = Math.round(dur);
    }
    this.data.json("find", query).then(
      (slice) => {
        if (slice) {
          self.select(slice.id, true);
        }
      },
      () => {
        /* an instant where nothing begins: the line shows it */
      },
    );
  }

  beside(by) {
    const self = this;
    const c = this.chosen;
    if (!c || c.id + by < 0) {
      return;
    }
    this.data.json("slice", { id: c.id + by }).then(
      (slice) => {
        if (slice.lane !== c.lane) {
          return;
        }
        self.choose(slice);
        if (slice.ts < self.x0 || slice.ts + slice.dur > self.x1) {
          self.go(slice);
        }
      },
      () => {
        /* the last one */
      },
    );
  }

  setRange(range, done) {
    this.range = range && Math.abs(range[1] - range[0]) >= 16 ? range : null;
    const self = this;
    const r = this.range;
    if (this.range === null) {
      if (!this.chosen && this.data.info) {
        this.panel.welcome();
      }
    } else if (done) {
      this.chosen = null;
      this.data
        .json("range", {
          x0: Math.floor(Math.min(r[0], r[1])),
          x1: Math.ceil(Math.max(r[0], r[1])),
        })
        .then(
          (stats) => {
            if (self.range === r) {
              self.panel.range(stats);
            }
          },
          () => {
            self.setRange(null);
          },
        );
    }
    this.draw();
  }

  escape() {
    if (this.range) {
      this.setRange(null);
    } else if (this.chosen) {
      this.choose(null);
    } else if (this.query) {
      this.panel.search.value = "";
      this.setQuery("");
    } else if (this.finding) {
      this.setFinding("", false);
    }
  }

  setFinding(key, show) {
    const found = this.data.info.findings.filter((f) => {
      return f.key === key;
    })[0];
    this.finding = found ? key : "";
    this.instant = null;
    this.chosen = null;
    this.panel.focus.value = this.finding;
    this.panel.welcome();
    if (found && show && found.places.length) {
      if (
        found.rank !== null &&
        found.rank !== this.data.rank &&
        this.data.info.ranks.indexOf(found.rank) >= 0
      ) {
        this.elsewhere(found);
        return;
      }
      this.setView(
        found.places[0].ts - Math.max(found.places[0].dur * 1.5, 20000),
        found.places[0].ts + found.places[0].dur + Math.max(found.places[0].dur * 1.5, 20000),
        true,
      );
      this.revealPlace(found.places[0]);
    }
    this.ask();
    this.toUrl();
  }

  elsewhere(found) {
    const place = found.places[0];
    const margin = Math.max(place.dur * 1.5, 20000);
    this.open(found.rank, [place.ts - margin, place.ts + place.dur + margin]);
  }

  revealPlace(place) {
    const self = this;
    this.data.json("find", { t: Math.round(place.ts), dur: Math.round(place.dur) }).then(
      (slice) => {
        if (slice) {
          self.reveal(slice);
        }
      },
      () => {
        /* nothing to scroll to */
      },
    );
  }

  setQuery(query) {
    query = query.trim();
    if (query === this.query) {
      return;
    }
    this.query = query;
    this.mirror();
    if (!query) {
      this.panel.showMatchCount(null);
    } else {
      this.find(query, false, true);
    }
    this.ask();
    this.draw();
    this.toUrl();
  }

  // What is searched for is marked in both.
  mirror() {
    if (this.partner && this.partner.layout) {
      this.partner.query = this.query;
      this.partner.ask();
      this.partner.draw();
    }
  }

  // Go to the next found slice; with "only" just count them.
  find(query, back, only) {
    const self = this;
    const data = this.data;
    query = query.trim();
    if (!query) {
      this.setQuery("");
      return Promise.resolve();
    }
    if (query !== this.query) {
      this.query = query;
      this.mirror();
      this.ask();
      this.toUrl();
    }
    const ask = { q: query, back: back ? 1 : 0, t: Math.round(this.x0) };
    if (this.chosen && !only) {
      ask.id = this.chosen.id;
      ask.t = this.chosen.ts;
    }
    return data.json("search", ask).then(
      (answer) => {
        if (self.query !== query || self.data !== data) {
          return;
        }
        if (only) {
          delete answer.at;
        }
        self.panel.showMatchCount(answer);
        if (!only && answer.total) {
          self.go(answer);
        }
      },
      () => {
        self.panel.showMatchCount({ total: 0 });
      },
    );
  }

  next(back) {
    if (this.query) {
      this.find(this.query, back);
    }
  }

  rowAt(y) {
    const rows = this.layout ? this.layout.rows : [];
    const pinned = Boolean(this.layout && y < this.layout.pins);
    const at = pinned ? y : y + this.scroll;
    for (let i = 0; i < rows.length; i++) {
      if (rows[i].pin === pinned && at >= rows[i].y - 1 && at < rows[i].y + rows[i].h + 1) {
        return rows[i];
      }
    }
    return null;
  }

  // The slice drawn at a place; among narrow ones the one nearest.
  sliceAt(x, y) {
    const row = this.rowAt(y);
    const a = this.answer;
    if (!row || row.lane === undefined || !a) {
      return null;
    }
    const s = a.slices;
    const at = this.timeAt(x) - a.x0;
    const slack = (2 * (this.x1 - this.x0)) / this.width;
    let best = -1;
    let nearest = slack;
    for (let i = 0; i < s.n; i++) {
      if (s.lane[i] !== row.lane) {
        continue;
      }
      const off =
        at < s.start[i]
          ? s.start[i] - at
          : at > s.start[i] + s.dur[i]
            ? at - s.start[i] - s.dur[i]
            : 0;
      if (off <= nearest && (best < 0 || off < nearest)) {
        best = i;
        nearest = off;
      }
    }
    if (best < 0) {
      return null;
    }
    return {
      id: s.id[best],
      lane: row.lane,
      ts: a.x0 + s.start[best],
      dur: s.dur[best],
      name: this.data.names[s.name[best]],
      label: this.data.info.categories[s.category[best]][1],
      count: 1,
    };
  }

  cellAt(x, y) {
    const row = this.rowAt(y);
    const a = this.answer;
    if (!row || row.lane === undefined || !a) {
      return null;
    }
    const r = a.runs;
    const cell = (this.timeAt(x) - a.cell0) / a.cell;
    for (let i = 0; i < r.n; i++) {
      if (r.lane[i] === row.lane && cell >= r.cell[i] - 1 && cell < r.cell[i] + r.width[i] + 1) {
        return row.lane;
      }
    }
    return null;
  }

  // A counter's value under the pointer.
  counterAt(x, y) {
    const row = this.rowAt(y);
    const a = this.answer;
    const number = row ? row.counter : undefined;
    if (!a || number === undefined || a.asked.indexOf(number) < 0) {
      return null;
    }
    const at = a.asked.indexOf(number);
    const counter = this.data.info.counters[number];
    const i = Math.floor(((this.timeAt(x) - a.x0) / (a.x1 - a.x0)) * a.px);
    const low = a.low[at * a.px + i];
    const high = a.high[at * a.px + i];
    if (!(i >= 0 && i < a.px) || low !== low) {
      return { counter: counter.label, value: "no sample" };
    }
    const text = ui.formatQuantity(high, counter.unit);
    return {
      counter: counter.label,
      value: low === high ? text : ui.formatQuantity(low, counter.unit) + " – " + text,
    };
  }

  under(x, y) {
    const lane = this.cellAt(x, y);
    if (lane === null) {
      return Promise.resolve(null);
    }
    return this.data.json("at", {
      lane,
      t: Math.round(this.timeAt(x)),
      reach: Math.max(1, Math.round((1.5 * (this.x1 - this.x0)) / this.width)),
    });
  }

  point(x, y) {
    const self = this;
    const found = x === null ? null : this.sliceAt(x, y);
    const card = this.panel;
    this.pointer = x;
    const other = this.parent || this.partner;
    if (other) {
      other.pointer = x;
      other.drawOver();
    }
    clearTimeout(this.pointTimer);
    this.hover = found;
    const left = this.overlay.parentNode.offsetLeft + x;
    const top = this.body.offsetTop + y;
    card.hover(found || (x !== null && this.counterAt(x, y)), left, top);
    if (!found && x !== null) {
      this.pointTimer = setTimeout(() => {
        self.under(x, y).then(
          (slice) => {
            if (!slice || self.pointer !== x || self.gone) {
              return;
            }
            slice.label = slice.category;
            self.hover = slice;
            card.hover(slice, left, top);
            self.draw();
          },
          () => {
            /* nothing there */
          },
        );
      }, 60);
    }
    this.drawOver();
  }

  // By the keyboard: the slice nearest the middle of the topmost lane that has one in view.
  chooseVisible() {
    for (let y = 2; y < this.height; y += 6) {
      for (let off = 0; off <= 0.5; off += 0.05) {
        const found =
          this.sliceAt((0.5 + off) * this.width, y) || this.sliceAt((0.5 - off) * this.width, y);
        if (found) {
          this.select(found.id);
          return;
        }
      }
    }
  }

  click(x, y) {
    const self = this;
    const found = this.sliceAt(x, y);
    if (found) {
      this.select(found.id);
      this.range = null;
      return;
    }
    this.under(x, y).then(
      (slice) => {
        if (slice) {
          self.range = null;
          self.select(slice.id);
        } else {
          self.setRange(null);
          self.choose(null);
        }
      },
      () => {
        self.choose(null);
      },
    );
  }

  // Lanes on the screen and a screen above and below it.
  wanted() {
    const lanes = [];
    const counters = [];
    const top = this.scroll - this.height;
    const bottom = this.scroll + 2 * this.height;
    (this.layout ? this.layout.rows : []).forEach((row) => {
      if (!row.pin && (row.y > bottom || row.y + row.h < top)) {
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

  covered() {
    const a = this.answer;
    return Boolean(a && a.x0 <= Math.max(this.x0, a.low0) && a.x1 >= Math.min(this.x1, a.high0));
  }

  // Whether the last answer is as good as a new one would be.
  enough(want) {
    const a = this.answer;
    if (!a || !this.covered() || a.focus !== this.finding || a.q !== this.query) {
      return false;
    }
    const ideal = (this.x1 - this.x0) / (this.width * this.sharp());
    if (
      a.cell > Math.max(ideal, 1) * 1.01 ||
      (a.cell < ideal / 4 && a.x1 - a.x0 > 3 * (this.x1 - this.x0))
    ) {
      return false;
    }
    return (
      want.lanes.every((lane) => {
        return a.has[lane];
      }) &&
      want.counters.every((c) => {
        return a.asked.indexOf(c) >= 0;
      })
    );
  }

  sharp() {
    return ui.clamp(window.devicePixelRatio || 1, 1, 2);
  }

  ask() {
    if (!this.layout || !this.data.info || this.flying || this.gone) {
      return;
    }
    const want = this.wanted();
    const self = this;
    const data = this.data;
    const span = this.x1 - this.x0;
    const info = data.info;
    if (this.enough(want) || this.x1 <= info.begin || this.x0 >= info.finish) {
      this.settle();
      return;
    }
    const slack = (info.finish - info.begin) * 0.1 + 1000;
    const low = Math.floor(Math.max(this.x0 - MARGIN * span, info.begin - slack));
    let high = Math.ceil(Math.min(this.x1 + MARGIN * span, info.finish + slack));
    if (high - low < 64) {
      high = low + 64;
    }
    const px = Math.round(ui.clamp(((high - low) / span) * this.width * this.sharp(), 16, 8192));
    const focus = this.finding;
    const q = this.query;
    this.flying = data.view(low, high, px, want.lanes, want.counters, focus, q).then(
      (answer) => {
        self.flying = null;
        if (self.gone || self.data !== data) {
          self.ask();
          return;
        }
        if (answer.version !== info.version) {
          self.open(data.rank, [self.x0, self.x1]);
          return;
        } // a live run's next window
        answer.asked = want.counters;
        answer.has = [];
        want.lanes.forEach((lane) => {
          answer.has[lane] = true;
        });
        answer.focus = focus;
        answer.q = q;
        answer.low0 = info.begin;
        answer.high0 = info.finish;
        self.answer = answer;
        self.problem = null;
        if (!self.base) {
          self.wide();
        }
        self.draw();
        self.ask();
      },
      (error) => {
        self.flying = null;
        self.problem = error;
        self.panel.status.textContent = "The server does not respond: " + error.message;
        self.there();
        self.settle();
      },
    );
  }

  // Everything once, coarsely: for the overview, and to be seen while a finer answer comes.
  wide() {
    const self = this;
    const data = this.data;
    const info = data.info;
    let lanes = this.wanted().lanes.concat(this.mapLanes);
    lanes = lanes
      .filter((lane, i) => {
        return lanes.indexOf(lane) === i;
      })
      .sort((a, b) => {
        return a - b;
      });
    data
      .view(
        info.begin,
        Math.max(info.finish, info.begin + 64),
        Math.round(ui.clamp(this.width, 64, 4096)),
        lanes,
        [],
        "",
        "",
      )
      .then(
        (base) => {
          if (self.data !== data) {
            return;
          }
          const s = base.slices;
          const first = info.groups.filter((g) => {
            return g.kind === "steps";
          })[0];
          base.has = [];
          base.asked = [];
          self.base = base;
          self.steps = [];
          for (let i = 0; first && i < s.n; i++) {
            if (s.lane[i] === first.first) {
              self.steps.push(base.x0 + s.start[i]);
            }
          }
          self.draw();
        },
        () => {
          self.there(); /* the overview stays empty */
        },
      );
  }

  draw() {
    const self = this;
    if (this.frame || this.gone) {
      return;
    }
    this.frame = requestAnimationFrame(() => {
      self.frame = 0;
      if (self.gone) {
        return;
      }
      self.paint.main();
      self.paint.axis();
      self.paint.overview();
      self.paint.over();
      self.panel.showStatus();
      self.panel.later("calm", 350, () => {
        self.panel.colours();
        self.panel.fillTable();
      });
      if (self.answer && !self.painted && !self.parent) {
        self.painted = performance.now();
        performance.mark("advisor-timeline-painted");
      }
      if (self.answer && self.base) {
        self.there();
      }
      self.settle();
    });
  }

  // Said once there is a picture, or never will be: the frame's scripts wait for it.
  there() {
    if (this.said || this.parent) {
      return;
    }
    this.said = true;
    setTimeout(() => {
      window.dispatchEvent(new Event("advisor-timeline-there"));
    });
  }

  drawOver() {
    const self = this;
    if (this.overFrame || this.frame) {
      return;
    }
    this.overFrame = requestAnimationFrame(() => {
      self.overFrame = 0;
      self.paint.over();
    });
  }

  // Resolves once what the view shows is all that can be shown of it: for tests and measurements.
  settled() {
    const self = this;
    return new Promise((done) => {
      self.waiters.push(done);
      self.settle();
    });
  }

  settle() {
    if (!this.waiters.length || this.flying || this.frame) {
      return;
    }
    if (
      !this.problem &&
      this.message.hidden &&
      (!this.layout || !this.data.info || !this.enough(this.wanted()))
    ) {
      return;
    }
    if (!this.problem && !this.message.hidden && this.message.textContent === "Reading…") {
      return;
    }
    this.waiters.splice(0).forEach((done) => {
      done();
    });
  }
}

// -- opening a rank ------------------------------------------------------------------------------

// -- two under each other
// --------------------------------------------------------------------------

// -- failing
// -----------------------------------------------------------------------------------------

// -- the address ---------------------------------------------------------------------------------

// -- size and rows -------------------------------------------------------------------------------

// -- moving --------------------------------------------------------------------------------------

// -- choosing ------------------------------------------------------------------------------------

// -- pointing ------------------------------------------------------------------------------------

// -- asking --------------------------------------------------------------------------------------

// -- drawing -------------------------------------------------------------------------------------
