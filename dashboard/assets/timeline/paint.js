// Timeline: pixels. Rows are laid out once; a frame is drawn from the last answers.

import * as ui from "./ui.js";

const HEIGHT = {
  steps: 20,
  phases: 16,
  idle: 22,
  stream: 22,
  collectives: 18,
  copies: 18,
  sync: 14,
  thread: 15,
  overhead: 14,
};
const THIN = 8;
const GAP = 7;
const COUNTER = 40;
const HALO = 4;
const HEAD = 22;
// of a name, which is clicked: no less than WCAG 2.5.8 asks of a target
export const LABEL = 24;

// How far a name that stands beside low lanes reaches above them.
/** @param {number} height of the lanes */
export function overhang(height) {
  return Math.max(0, Math.ceil((LABEL - height) / 2));
}

// Rows of the picture from top to bottom: {y, h, lane} and {y, h, counter}, and the groups' boxes.
// Pinned groups come first; their rows stay where they are when the others scroll.
// Without room for a gutter the labels have a line of their own.
/**
 * A group's or the counters' box, across its lanes.
 * @typedef {{ y: number, h: number, shut: boolean, pin: boolean,
 *   group?: import("./data.js").Group, counters?: boolean }} Box
 */

/**
 * A lane, or a counter's.
 * @typedef {{ y: number, h: number, pin: boolean, lane?: number, group?: number,
 *   counter?: number }} Row
 */

/**
 * @param {import("./data.js").Info} info
 * @param {Record<string, boolean>} folded by the groups' keys
 * @param {boolean} narrow
 * @param {string[]} pinned keys of groups
 */
export function layOut(info, folded, narrow, pinned) {
  let y = GAP;
  /** @type {Row[]} */
  const rows = [];
  /** @type {Box[]} */
  const boxes = [];
  /** @type {number[]} */
  const byLane = [];
  let pins = 0;
  let below = 0; // the name of the group before
  function place(group, number, pin) {
    const shut = folded[group.key];
    const shown = shut ? 1 : group.count;
    const own = shut && group.count === 1 ? THIN : HEIGHT[group.kind] || 16;
    const over = overhang(shown * (own + 1));
    y = narrow ? y + LABEL : Math.max(y, below + over);
    const top = y;
    below = top - over + LABEL;
    for (let i = 0; i < shown; i++) {
      byLane[group.first + i] = rows.length;
      rows.push({ y, h: own, lane: group.first + i, group: number, pin });
      y += own + 1;
    }
    boxes.push({ y: top, h: y - top, group, shut, pin });
    y += narrow ? 0 : GAP;
  }
  function isPinned(group) {
    return pinned.indexOf(group.key) >= 0;
  }
  info.groups.forEach((group, number) => {
    if (isPinned(group)) {
      place(group, number, true);
    }
  });
  if (boxes.length) {
    pins = y;
    y += GAP;
  }
  info.groups.forEach((group, number) => {
    if (!isPinned(group)) {
      place(group, number, false);
    }
  });
  if (info.counters.length) {
    y += narrow ? LABEL : 0;
    const first = y;
    const all = folded.counters;
    if (!all) {
      y += narrow ? 0 : HEAD;
      info.counters.forEach((counter, i) => {
        rows.push({ y, h: COUNTER - 8, counter: i, pin: false });
        y += COUNTER;
      });
    } else {
      y += LABEL;
    }
    boxes.push({ y: first, h: y - first, counters: true, shut: all, pin: false });
  }
  return { rows, boxes, height: y + GAP, byLane, pins };
}

function luminance(hex) {
  function part(at) {
    const v = parseInt(hex.slice(at, at + 2), 16) / 255;
    return v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4);
  }
  return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
}

export class Paint {
  dpr = 1; // device pixels in one of the page

  // colours of the page, by the names of its style sheet (theme)
  bg = "";
  card = "";
  sunk = "";
  line = "";
  line_strong = "";
  text = "";
  dim = "";
  accent = "";

  constructor(timeline) {
    this.t = timeline;
    this.widths = new Map();
    this.theme();
  }

  // Colours of the page as it is now; those of the slices are the same in both themes.
  theme() {
    const style = getComputedStyle(document.documentElement);
    const self = this;
    ["bg", "card", "sunk", "line", "line-strong", "text", "dim", "accent"].forEach((name) => {
      self[name.replace("-", "_")] = style.getPropertyValue("--" + name).trim() || "#888";
    });
    this.font = style.getPropertyValue("--sans").trim() || "sans-serif";
    this.dark = luminance(/^#[0-9a-f]{6}$/i.test(this.card) ? this.card : "#ffffff") < 0.2;
    this.outline = this.dark ? "#ffffff" : "#101014";
  }

  categories(list) {
    this.colours = list.map((c) => {
      return c[2];
    });
    // white on it, or black: what has more contrast
    this.inks = list.map((c) => {
      return luminance(c[2]) > 0.19 ? "#101014" : "#ffffff";
    });
  }

  size(canvas, width, height) {
    const dpr = ui.clamp(window.devicePixelRatio || 1, 1, 3);
    if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(height * dpr)) {
      canvas.width = Math.round(width * dpr);
      canvas.height = Math.round(height * dpr);
      canvas.style.width = width + "px";
      canvas.style.height = height + "px";
    }
    const ctx = canvas.getContext("2d");
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.clearRect(0, 0, width, height);
    this.dpr = dpr;
    return ctx;
  }

  snap(x) {
    return Math.round(x * this.dpr) / this.dpr;
  }

  main() {
    const t = this.t;
    const w = t.width;
    const h = t.height;
    const top = t.scroll;
    const layout = t.layout;
    const ctx = this.size(t.canvas, w, h);
    if (!layout || !t.data.info) {
      return;
    }
    const scale = w / (t.x1 - t.x0);
    this.pinning = false;
    this.layers(ctx, layout, w, h, top, scale);
    if (t.answer) {
      this.counters(ctx, t.answer, scale, layout, top);
    }
    if (!layout.pins) {
      return;
    }
    this.pinning = true;
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, 0, w, layout.pins);
    ctx.clip();
    this.layers(ctx, layout, w, layout.pins, 0, scale);
    ctx.restore();
    ctx.fillStyle = this.line_strong;
    ctx.fillRect(0, layout.pins, w, 1);
  }

  // What lies on each other, from the ground up: of the pinned rows, or of the others.
  layers(ctx, layout, w, h, top, scale) {
    const t = this.t;
    const self = this;
    ctx.fillStyle = this.card;
    ctx.fillRect(0, 0, w, h);
    this.grounds(ctx, layout, w, h, top);
    this.grid(ctx, w, h);
    const answers = t.covered() ? [t.answer] : [t.base, t.answer];
    // all cells first, then all slices on them
    const drawn = /** @type {const} */ (["cells", "slices"]);
    drawn.forEach((kind) => {
      answers.forEach((answer, i) => {
        if (answer) {
          const except = answers.length > 1 && i === 0 ? t.answer : null;
          self[kind](ctx, answer, scale, layout, top, except);
        }
      });
    });
    if (t.answer) {
      this.flagged(ctx, t.answer, scale, layout, top);
    }
    this.outside(ctx, w, h);
  }

  grounds(ctx, layout, w, h, top) {
    const line = this.line;
    const pinning = this.pinning;
    layout.boxes.forEach((box) => {
      if (box.pin !== pinning) {
        return;
      }
      const y = box.y - top + box.h + 3;
      if (y < 0 || box.y - top > h) {
        return;
      }
      ctx.fillStyle = line;
      ctx.fillRect(0, Math.round(y), w, 1);
    });
  }

  // Lines where steps begin, so that one can see over all lanes to which step something belongs.
  grid(ctx, w, h) {
    const t = this.t;
    const starts = t.steps;
    const scale = w / (t.x1 - t.x0);
    if (!starts || starts.length * 3 > w) {
      return;
    }
    ctx.fillStyle = this.line_strong;
    for (let i = 0; i < starts.length; i++) {
      const x = (starts[i] - t.x0) * scale;
      if (x >= 0 && x <= w) {
        ctx.fillRect(Math.round(x), 0, 1, h);
      }
    }
  }

  // Beyond the first and last event nothing was recorded: hatched, not empty.
  outside(ctx, w, h) {
    const t = this.t;
    const info = t.data.info;
    const scale = w / (t.x1 - t.x0);
    const left = (info.begin - t.x0) * scale;
    const right = (info.finish - t.x0) * scale;
    ctx.fillStyle = this.sunk;
    if (left > 0) {
      ctx.fillRect(0, 0, Math.min(left, w), h);
    }
    if (right < w) {
      ctx.fillRect(Math.max(right, 0), 0, w, h);
    }
  }

  cells(ctx, answer, scale, layout, top, except) {
    const r = answer.runs;
    const t = this.t;
    const colours = this.colours;
    const rows = layout.rows;
    const byLane = layout.byLane;
    const cell = answer.cell;
    const base = (answer.cell0 - t.x0) * scale;
    const size = cell * scale;
    const w = t.width;
    const h = t.height;
    const dim = t.finding || t.query ? 0.38 : 1;
    let last = -1;
    // where a fresher answer is drawn over this one, this one is left out
    const from = except ? (except.x0 - t.x0) * scale : w + 1;
    const to = except ? (except.x1 - t.x0) * scale : w + 1;
    for (let i = 0; i < r.n; i++) {
      const row = rows[byLane[r.lane[i]]];
      if (!row || row.pin !== this.pinning) {
        continue;
      }
      const y = row.y - top;
      if (y > h || y + row.h < 0) {
        continue;
      }
      const a = base + r.cell[i] * size;
      const b = a + r.width[i] * size;
      if (b < 0 || a > w || (a >= from && b <= to && except.has[r.lane[i]])) {
        continue;
      }
      const x = this.snap(Math.max(a, -2));
      const width = Math.max(this.snap(Math.min(b, w + 2)) - x, 1 / this.dpr);
      if (r.category[i] !== last) {
        last = r.category[i];
        ctx.fillStyle = colours[last];
      }
      ctx.globalAlpha = dim * (0.3 + (0.7 * r.cover[i]) / 255);
      ctx.fillRect(x, y, width, row.h);
    }
    ctx.globalAlpha = 1;
  }

  slices(ctx, answer, scale, layout, top, except) {
    const s = answer.slices;
    const t = this.t;
    const rows = layout.rows;
    const byLane = layout.byLane;
    const w = t.width;
    const h = t.height;
    const shift = answer.x0 - t.x0;
    const dimmed = Boolean(t.finding || t.query);
    const labels = t.data.labels;
    const from = except ? (except.x0 - t.x0) * scale : w + 1;
    const to = except ? (except.x1 - t.x0) * scale : w + 1;
    ctx.textBaseline = "middle";
    ctx.font = "11px " + this.font;
    for (let i = 0; i < s.n; i++) {
      const row = rows[byLane[s.lane[i]]];
      if (!row || row.pin !== this.pinning) {
        continue;
      }
      const y = row.y - top;
      if (y > h || y + row.h < 0) {
        continue;
      }
      const a = (shift + s.start[i]) * scale;
      const b = a + s.dur[i] * scale;
      if (b < 0 || a > w || (a >= from && b <= to && except.has[s.lane[i]])) {
        continue;
      }
      const x = this.snap(Math.max(a, -4));
      const end = this.snap(Math.min(b, w + 4));
      const width = Math.max(end - x - (b - a > 3 ? 1 / this.dpr : 0), 1 / this.dpr);
      ctx.globalAlpha = dimmed && !s.flags[i] ? 0.3 : 1;
      ctx.fillStyle = this.colours[s.category[i]];
      ctx.fillRect(x, y, width, row.h);
      if (width > 26 && row.h > 11) {
        // on a dimmed slice the ground shows through: the page's own ink is the one to read
        const dull = dimmed && !s.flags[i];
        ctx.globalAlpha = dull ? 0.75 : 1;
        ctx.fillStyle = dull ? this.dim : this.inks[s.category[i]];
        this.label(ctx, labels[s.name[i]], x, y, width, row.h, s.dur[i]);
      }
      if (s.flags[i] & 1) {
        this.mark(ctx, x, y, width, row.h, 1);
      } else if (s.flags[i] & 2) {
        this.mark(ctx, x, y, width, row.h, 2);
      }
    }
    ctx.globalAlpha = 1;
  }

  // The name as far as it fits, and the duration behind it where there is room.
  label(ctx, text, x, y, width, height, dur) {
    if (!text) {
      return;
    }
    const left = Math.max(x, 0) + 4;
    const room = Math.min(x + width, this.t.width) - left - 4;
    if (room < 14) {
      return;
    }
    const full = this.measure(ctx, text);
    if (full > room) {
      const fit = Math.floor((text.length * room) / full) - 1;
      if (fit < 2) {
        return;
      }
      text = text.slice(0, fit) + "…";
    } else {
      const time = ui.formatDuration(dur);
      if (full + 60 < room) {
        ctx.globalAlpha *= 0.72;
        ctx.fillText(time, left + full + 8, y + height / 2 + 0.5);
        ctx.globalAlpha /= 0.72;
      }
    }
    ctx.fillText(text, left, y + height / 2 + 0.5);
  }

  measure(ctx, text) {
    let width = this.widths.get(text);
    if (width === undefined) {
      if (this.widths.size > 20000) {
        this.widths.clear();
      }
      width = ctx.measureText(text).width;
      this.widths.set(text, width);
    }
    return width;
  }

  mark(ctx, x, y, width, height, kind) {
    ctx.globalAlpha = 1;
    ctx.lineWidth = kind === 1 ? 2 : 1.5;
    ctx.strokeStyle = kind === 1 ? this.outline : this.accent;
    if (width < 3) {
      ctx.fillStyle = ctx.strokeStyle;
      ctx.fillRect(x, y - 2, Math.max(width, 1.5), height + 4);
      return;
    }
    ctx.strokeRect(x + 1, y + 1, width - 2, height - 2);
  }

  flagged(ctx, answer, scale, layout, top) {
    const f = answer.flagged;
    const t = this.t;
    const base = (answer.cell0 - t.x0) * scale;
    const size = answer.cell * scale;
    for (let i = 0; i < f.n; i++) {
      const row = layout.rows[layout.byLane[f.lane[i]]];
      if (!row || row.pin !== this.pinning) {
        continue;
      }
      const a = base + f.cell[i] * size;
      const b = a + f.width[i] * size;
      const y = row.y - top;
      if (b < 0 || a > t.width || y > t.height || y + row.h < 0) {
        continue;
      }
      const x = this.snap(a);
      const width = Math.max(b - a, 1.5);
      ctx.fillStyle = f.flags[i] & 1 ? this.outline : this.accent;
      // a bar above and below, with the cell's own colour in full between them
      ctx.fillRect(x, y - 1, width, 2.5);
      ctx.fillRect(x, y + row.h - 1.5, width, 2.5);
    }
  }

  counters(ctx, answer, scale, layout, top) {
    const t = this.t;
    const info = t.data.info;
    const w = t.width;
    const self = this;
    const step = (answer.x1 - answer.x0) / answer.px;
    layout.rows.forEach((row) => {
      if (row.counter === undefined) {
        return;
      }
      const at = answer.asked.indexOf(row.counter);
      const y = row.y - top;
      if (at < 0 || y > t.height || y + row.h < 0) {
        return;
      }
      const counter = info.counters[row.counter];
      let low = counter.unit === "%" ? 0 : Math.min(counter.low, 0);
      const high = counter.unit === "%" ? 100 : counter.high;
      let span = high - low || 1;
      if (counter.unit === "MHz" || counter.unit === "°C") {
        low = Math.min(counter.low, counter.high * 0.8);
        span = high - low || 1;
      }
      ctx.fillStyle = self.accent;
      const base = at * answer.px;
      for (let i = 0; i < answer.px; i++) {
        const value = answer.high[base + i];
        const least = answer.low[base + i];
        if (value !== value) {
          continue;
        }
        let x = (answer.x0 - t.x0 + i * step) * scale;
        const width = step * scale;
        if (x + width < 0 || x > w) {
          continue;
        }
        const up = row.h * ui.clamp((value - low) / span, 0, 1);
        const down = row.h * ui.clamp((least - low) / span, 0, 1);
        const right = self.snap(x + width); // where the next one begins
        x = self.snap(x);
        const wide = Math.max(right - x, 0.5);
        ctx.globalAlpha = 0.22;
        ctx.fillRect(x, y + row.h - up, right - x, up); // never over another: it would be darker
        ctx.globalAlpha = 1;
        ctx.fillRect(x, y + row.h - up - 0.5, wide, Math.max(up - down, 1.5));
      }
    });
  }

  axis() {
    const t = this.t;
    const w = t.width;
    const ctx = this.size(t.axis, w, 26);
    const span = t.x1 - t.x0;
    const step = tick(span, w);
    const first = Math.ceil(t.x0 / step) * step;
    const scale = w / span;
    ctx.font = "11px " + this.font;
    ctx.textBaseline = "middle";
    let at = first;
    let n = 0;
    for (; at < t.x1 && n < 100; at += step, n++) {
      const x = Math.round((at - t.x0) * scale);
      ctx.fillStyle = this.line_strong;
      ctx.fillRect(x, 16, 1, 10);
      ctx.fillStyle = this.dim;
      const text = ui.formatInstant(at, step);
      if (x + 6 + this.measure(ctx, text) < w) {
        ctx.fillText(text, x + 4, 10);
      }
    }
    for (at = first - step; at < t.x1 && n < 1000; at += step / 5, n++) {
      ctx.fillStyle = this.line;
      ctx.fillRect(Math.round((at - t.x0) * scale), 21, 1, 5);
    }
  }

  overview() {
    const t = this.t;
    const w = t.width;
    const h = 34;
    const ctx = this.size(t.map, w, h);
    const base = t.base;
    const info = t.data.info;
    if (!info) {
      return;
    }
    const span = info.finish - info.begin;
    const scale = w / span;
    const self = this;
    ctx.fillStyle = this.sunk;
    ctx.fillRect(0, 0, w, h);
    if (base) {
      const rows = t.mapLanes;
      const height = (h - 6) / Math.max(rows.length, 1);
      const draw = function (lane, a, b, colour, alpha) {
        const row = rows.indexOf(lane);
        if (row < 0) {
          return;
        }
        ctx.fillStyle = colour;
        ctx.globalAlpha = alpha;
        ctx.fillRect(a, 3 + row * height, Math.max(b - a, 0.5), height - 1);
      };
      const r = base.runs;
      const s = base.slices;
      let i;
      let x;
      for (i = 0; i < r.n; i++) {
        x = (base.cell0 + r.cell[i] * base.cell - info.begin) * scale;
        draw(
          r.lane[i],
          x,
          x + r.width[i] * base.cell * scale,
          self.colours[r.category[i]],
          0.3 + (0.7 * r.cover[i]) / 255,
        );
      }
      for (i = 0; i < s.n; i++) {
        x = (base.x0 + s.start[i] - info.begin) * scale;
        draw(s.lane[i], x, x + s.dur[i] * scale, self.colours[s.category[i]], 1);
      }
      ctx.globalAlpha = 1;
    }
    let left = (t.x0 - info.begin) * scale;
    let right = (t.x1 - info.begin) * scale;
    ctx.fillStyle = this.card;
    ctx.globalAlpha = 0.66;
    ctx.fillRect(0, 0, Math.max(left, 0), h);
    ctx.fillRect(Math.min(right, w), 0, w, h);
    ctx.globalAlpha = 1;
    left = ui.clamp(left, 1, w - 4);
    right = ui.clamp(right, left + 3, w - 1);
    ctx.strokeStyle = this.accent;
    ctx.lineWidth = 2;
    ctx.strokeRect(left, 1, right - left, h - 2);
    ctx.fillStyle = this.accent;
    ctx.fillRect(left - 2, h / 2 - 6, 4, 12);
    ctx.fillRect(right - 2, h / 2 - 6, 4, 12);
  }

  over() {
    const t = this.t;
    const w = t.width;
    const h = t.height;
    const ctx = this.size(t.overlay, w, h);
    const scale = w / (t.x1 - t.x0);
    const self = this;
    if (!t.layout) {
      return;
    }
    if (t.range) {
      const a = (Math.min(t.range[0], t.range[1]) - t.x0) * scale;
      const b = (Math.max(t.range[0], t.range[1]) - t.x0) * scale;
      ctx.fillStyle = this.accent;
      ctx.globalAlpha = 0.13;
      ctx.fillRect(a, 0, b - a, h);
      ctx.globalAlpha = 1;
      ctx.fillRect(Math.round(a), 0, 1, h);
      ctx.fillRect(Math.round(b), 0, 1, h);
      const text = ui.formatDuration(Math.abs(t.range[1] - t.range[0]));
      ctx.font = "600 11px " + this.font;
      const tw = ctx.measureText(text).width + 12;
      const x = ui.clamp((a + b) / 2 - tw / 2, 2, w - tw - 2);
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
    if (t.hover) {
      this.frame(ctx, t.hover, this.dim, 1.5);
    }
    if (t.chosen) {
      this.frame(ctx, t.chosen, this.accent, 2.5);
      const links = t.chosen.links || [];
      const many =
        links.filter((link) => {
          return link.kind === "launched";
        }).length > 8;
      links.forEach((link) => {
        if (
          !["called from", "contains", "operator"].includes(link.kind) &&
          !(many && link.kind === "launched")
        ) {
          self.arrow(ctx, t.chosen, link);
        }
      });
    }
  }

  box(slice) {
    const t = this.t;
    const row = t.layout.rows[t.layout.byLane[slice.lane]];
    const scale = t.width / (t.x1 - t.x0);
    if (!row) {
      return null;
    }
    const x = (slice.ts - t.x0) * scale;
    return {
      x,
      y: row.y - (row.pin ? 0 : t.scroll),
      w: Math.max(slice.dur * scale, 2),
      h: row.h,
      pin: row.pin,
    };
  }

  frame(ctx, slice, colour, width) {
    const box = this.box(slice);
    if (!box || box.x > this.t.width + HALO || box.x + box.w < -HALO) {
      return;
    }
    if (!box.pin && box.y < this.t.layout.pins) {
      return;
    } // below what is pinned
    const x = Math.max(box.x, -HALO);
    const right = Math.min(box.x + box.w, this.t.width + HALO);
    ctx.strokeStyle = colour;
    ctx.lineWidth = width;
    ctx.strokeRect(x - 1, box.y - 1, right - x + 2, box.h + 2);
  }

  arrow(ctx, from, link) {
    const back = link.kind === "launched by" || link.kind === "caused by";
    const a = this.box(back ? link : from);
    const b = this.box(back ? from : link);
    const w = this.t.width;
    if (!a || !b) {
      return;
    }
    const x0 = ui.clamp(a.x + Math.min(a.w, 6) / 2, -40, w + 40);
    const y0 = a.y + a.h / 2;
    const x1 = ui.clamp(b.x, -40, w + 40);
    const y1 = b.y + b.h / 2;
    const bend = Math.max(Math.abs(x1 - x0) * 0.4, 24);
    ctx.strokeStyle = this.card;
    ctx.lineWidth = 4;
    for (let pass = 0; pass < 2; pass++) {
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
  }
}

// -- the lanes -------------------------------------------------------------------------------

// -- axis and overview -----------------------------------------------------------------------

export function tick(span, width) {
  const rough = span / Math.max(width / 110, 1);
  const size = Math.pow(10, Math.floor(Math.log10(rough)));
  const step =
    [1, 2, 5, 10].filter((m) => {
      return m * size >= rough;
    })[0] * size;
  return Math.max(step, 1);
}

// -- what lies over the lanes: selection, arrows, the chosen range -----------------------------
