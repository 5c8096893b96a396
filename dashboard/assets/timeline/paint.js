// Painter of the timeline: layout of its rows, and drawing on its canvases.

import * as ui from "./ui.js";

const LANE_HEIGHTS = {
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
const FOLDED_HEIGHT = 8;
const GROUP_GAP = 7;
const COUNTER_HEIGHT = 40;
const FRAME_MARGIN = 4;
const COUNTER_HEADER_HEIGHT = 22;
// minimum size of a click target by WCAG 2.5.8
export const LABEL_HEIGHT = 24;

/**
 * Returns how far a label extends above lanes that are lower than it, pixels.
 * @param {number} height of the lanes
 */
export function labelOverhang(height) {
  return Math.max(0, Math.ceil((LABEL_HEIGHT - height) / 2));
}

/**
 * Box around the lanes of a group, or around the counters.
 * @typedef {{ y: number, h: number, isFolded: boolean, isPinned: boolean,
 *   group?: import("./data.js").Group, counters?: boolean }} Box
 */

/**
 * Row of a lane or of a counter.
 * @typedef {{ y: number, h: number, isPinned: boolean, lane?: number, group?: number,
 *   counter?: number }} Row
 */

/**
 * Lays out rows and boxes from top to bottom. Pinned groups come first and do not scroll. In a
 * narrow window, labels are above the lanes instead of beside them.
 * @param {import("./data.js").Info} info
 * @param {Record<string, boolean>} folded by the groups' keys
 * @param {boolean} narrow
 * @param {string[]} pinned keys of groups
 */
export function layOutRows(info, folded, narrow, pinned) {
  let y = GROUP_GAP;
  /** @type {Row[]} */
  const rows = [];
  /** @type {Box[]} */
  const boxes = [];
  /** @type {number[]} */
  const byLane = [];
  let pinnedHeight = 0;
  let labelEnd = 0; // bottom of the previous group's label
  function placeGroup(group, number, isPinned) {
    const isFolded = folded[group.key];
    const laneCount = isFolded ? 1 : group.count;
    const laneHeight =
      isFolded && group.count === 1 ? FOLDED_HEIGHT : LANE_HEIGHTS[group.kind] || 16;
    const overhang = labelOverhang(laneCount * (laneHeight + 1));
    y = narrow ? y + LABEL_HEIGHT : Math.max(y, labelEnd + overhang);
    const top = y;
    labelEnd = top - overhang + LABEL_HEIGHT;
    for (let i = 0; i < laneCount; i++) {
      byLane[group.first + i] = rows.length;
      rows.push({ y, h: laneHeight, lane: group.first + i, group: number, isPinned });
      y += laneHeight + 1;
    }
    boxes.push({ y: top, h: y - top, group, isFolded, isPinned });
    y += narrow ? 0 : GROUP_GAP;
  }
  function isGroupPinned(group) {
    return pinned.indexOf(group.key) >= 0;
  }
  info.groups.forEach((group, number) => {
    if (isGroupPinned(group)) {
      placeGroup(group, number, true);
    }
  });
  if (boxes.length) {
    pinnedHeight = y;
    y += GROUP_GAP;
  }
  info.groups.forEach((group, number) => {
    if (!isGroupPinned(group)) {
      placeGroup(group, number, false);
    }
  });
  if (info.counters.length) {
    y += narrow ? LABEL_HEIGHT : 0;
    const countersTop = y;
    const areCountersFolded = folded.counters;
    if (!areCountersFolded) {
      y += narrow ? 0 : COUNTER_HEADER_HEIGHT;
      info.counters.forEach((counter, i) => {
        rows.push({ y, h: COUNTER_HEIGHT - 8, counter: i, isPinned: false });
        y += COUNTER_HEIGHT;
      });
    } else {
      y += LABEL_HEIGHT;
    }
    boxes.push({
      y: countersTop,
      h: y - countersTop,
      counters: true,
      isFolded: areCountersFolded,
      isPinned: false,
    });
  }
  return { rows, boxes, height: y + GROUP_GAP, byLane, pinnedHeight };
}

// Returns the relative luminance of a color such as #rrggbb, 0 to 1 (WCAG).
function luminance(hex) {
  function channel(offset) {
    const value = parseInt(hex.slice(offset, offset + 2), 16) / 255;
    return value <= 0.03928 ? value / 12.92 : Math.pow((value + 0.055) / 1.055, 2.4);
  }
  return 0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5);
}

// Draws one timeline on its canvases.
export class Painter {
  dpr = 1; // device pixels per CSS pixel

  // colors of the page, by the names of its CSS variables
  bg = "";
  card = "";
  sunk = "";
  line = "";
  lineStrong = "";
  text = "";
  dim = "";
  accent = "";

  constructor(timeline) {
    this.timeline = timeline;
    this.textWidths = new Map();
    this.readTheme();
  }

  // Reads the colors of the current theme. Slices have the same colors in both themes.
  readTheme() {
    const style = getComputedStyle(document.documentElement);
    ["bg", "card", "sunk", "line", "line-strong", "text", "dim", "accent"].forEach((name) => {
      this[name === "line-strong" ? "lineStrong" : name] =
        style.getPropertyValue("--" + name).trim() || "#888";
    });
    this.font = style.getPropertyValue("--sans").trim() || "sans-serif";
    this.dark = luminance(/^#[0-9a-f]{6}$/i.test(this.card) ? this.card : "#ffffff") < 0.2;
    this.outline = this.dark ? "#ffffff" : "#101014";
  }

  // Sets the colors of the categories, and the color of labels on each.
  setCategories(list) {
    this.colors = list.map((c) => {
      return c[2];
    });
    // white or black, whichever has more contrast
    this.labelColors = list.map((c) => {
      return luminance(c[2]) > 0.19 ? "#101014" : "#ffffff";
    });
  }

  // Resizes and clears a canvas. Returns its context, scaled to CSS pixels.
  prepareCanvas(canvas, width, height) {
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

  // Rounds a position to device pixels.
  snapToPixel(x) {
    return Math.round(x * this.dpr) / this.dpr;
  }

  // Draws the lanes, first those that scroll and then the pinned ones.
  drawLanes() {
    const timeline = this.timeline;
    const w = timeline.width;
    const h = timeline.height;
    const top = timeline.scroll;
    const layout = timeline.layout;
    const ctx = this.prepareCanvas(timeline.canvas, w, h);
    if (!layout || !timeline.data.info) {
      return;
    }
    const scale = w / (timeline.x1 - timeline.x0);
    this.isPinnedPass = false;
    this.drawLayers(ctx, layout, w, h, top, scale);
    if (timeline.answer) {
      this.drawCounters(ctx, timeline.answer, scale, layout, top);
    }
    if (!layout.pinnedHeight) {
      return;
    }
    this.isPinnedPass = true;
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, 0, w, layout.pinnedHeight);
    ctx.clip();
    this.drawLayers(ctx, layout, w, layout.pinnedHeight, 0, scale);
    ctx.restore();
    ctx.fillStyle = this.lineStrong;
    ctx.fillRect(0, layout.pinnedHeight, w, 1);
  }

  // Draws all layers, from back to front, of the pinned rows or of the others.
  drawLayers(ctx, layout, width, height, top, scale) {
    const timeline = this.timeline;
    ctx.fillStyle = this.card;
    ctx.fillRect(0, 0, width, height);
    this.drawGroupLines(ctx, layout, width, height, top);
    this.drawStepLines(ctx, width, height);
    const answers = timeline.isViewCovered()
      ? [timeline.answer]
      : [timeline.overviewAnswer, timeline.answer];
    // slices are drawn over all cells
    const passes = /** @type {const} */ (["drawCells", "drawSlices"]);
    passes.forEach((drawPass) => {
      answers.forEach((answer, i) => {
        if (answer) {
          const newerAnswer = answers.length > 1 && i === 0 ? timeline.answer : null;
          this[drawPass](ctx, answer, scale, layout, top, newerAnswer);
        }
      });
    });
    if (timeline.answer) {
      this.drawFlaggedCells(ctx, timeline.answer, scale, layout, top);
    }
    this.drawUnrecordedTime(ctx, width, height);
  }

  // Draws a line below each group.
  drawGroupLines(ctx, layout, w, h, top) {
    const line = this.line;
    const pinning = this.isPinnedPass;
    layout.boxes.forEach((box) => {
      if (box.isPinned !== pinning) {
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

  // Draws a line across all lanes at the start of each step.
  drawStepLines(ctx, w, h) {
    const timeline = this.timeline;
    const starts = timeline.stepStarts;
    const scale = w / (timeline.x1 - timeline.x0);
    if (!starts || starts.length * 3 > w) {
      return;
    }
    ctx.fillStyle = this.lineStrong;
    for (let i = 0; i < starts.length; i++) {
      const x = (starts[i] - timeline.x0) * scale;
      if (x >= 0 && x <= w) {
        ctx.fillRect(Math.round(x), 0, 1, h);
      }
    }
  }

  // Shades the time before the first and after the last event.
  drawUnrecordedTime(ctx, w, h) {
    const timeline = this.timeline;
    const info = timeline.data.info;
    const scale = w / (timeline.x1 - timeline.x0);
    const left = (info.first_ns - timeline.x0) * scale;
    const right = (info.last_ns - timeline.x0) * scale;
    ctx.fillStyle = this.sunk;
    if (left > 0) {
      ctx.fillRect(0, 0, Math.min(left, w), h);
    }
    if (right < w) {
      ctx.fillRect(Math.max(right, 0), 0, w, h);
    }
  }

  // Draws cells of narrow slices; the paler, the less of a cell they cover.
  drawCells(ctx, answer, scale, layout, top, newerAnswer) {
    const runs = answer.runs;
    const timeline = this.timeline;
    const colors = this.colors;
    const rows = layout.rows;
    const byLane = layout.byLane;
    const cellNs = answer.cell;
    const base = (answer.cell0 - timeline.x0) * scale;
    const cellWidth = cellNs * scale;
    const w = timeline.width;
    const h = timeline.height;
    const alpha = timeline.finding || timeline.query ? 0.38 : 1;
    let lastCategory = -1;
    // skip cells that a newer answer will draw
    const newerStart = newerAnswer ? (newerAnswer.x0 - timeline.x0) * scale : w + 1;
    const newerEnd = newerAnswer ? (newerAnswer.x1 - timeline.x0) * scale : w + 1;
    for (let i = 0; i < runs.n; i++) {
      const row = rows[byLane[runs.lane[i]]];
      if (!row || row.isPinned !== this.isPinnedPass) {
        continue;
      }
      const y = row.y - top;
      if (y > h || y + row.h < 0) {
        continue;
      }
      const start = base + runs.cell[i] * cellWidth;
      const end = start + runs.width[i] * cellWidth;
      if (
        end < 0 ||
        start > w ||
        (start >= newerStart && end <= newerEnd && newerAnswer.hasLane[runs.lane[i]])
      ) {
        continue;
      }
      const x = this.snapToPixel(Math.max(start, -2));
      const width = Math.max(this.snapToPixel(Math.min(end, w + 2)) - x, 1 / this.dpr);
      if (runs.category[i] !== lastCategory) {
        lastCategory = runs.category[i];
        ctx.fillStyle = colors[lastCategory];
      }
      ctx.globalAlpha = alpha * (0.3 + (0.7 * runs.cover[i]) / 255);
      ctx.fillRect(x, y, width, row.h);
    }
    ctx.globalAlpha = 1;
  }

  // Draws wide slices with their labels.
  drawSlices(ctx, answer, scale, layout, top, newerAnswer) {
    const slices = answer.slices;
    const timeline = this.timeline;
    const rows = layout.rows;
    const byLane = layout.byLane;
    const w = timeline.width;
    const h = timeline.height;
    const shift = answer.x0 - timeline.x0;
    const hasFocus = Boolean(timeline.finding || timeline.query);
    const labels = timeline.data.labels;
    const newerStart = newerAnswer ? (newerAnswer.x0 - timeline.x0) * scale : w + 1;
    const newerEnd = newerAnswer ? (newerAnswer.x1 - timeline.x0) * scale : w + 1;
    ctx.textBaseline = "middle";
    ctx.font = "11px " + this.font;
    for (let i = 0; i < slices.n; i++) {
      const row = rows[byLane[slices.lane[i]]];
      if (!row || row.isPinned !== this.isPinnedPass) {
        continue;
      }
      const y = row.y - top;
      if (y > h || y + row.h < 0) {
        continue;
      }
      const start = (shift + slices.start[i]) * scale;
      const end = start + slices.dur[i] * scale;
      if (
        end < 0 ||
        start > w ||
        (start >= newerStart && end <= newerEnd && newerAnswer.hasLane[slices.lane[i]])
      ) {
        continue;
      }
      const x = this.snapToPixel(Math.max(start, -4));
      const right = this.snapToPixel(Math.min(end, w + 4));
      const width = Math.max(right - x - (end - start > 3 ? 1 / this.dpr : 0), 1 / this.dpr);
      ctx.globalAlpha = hasFocus && !slices.flags[i] ? 0.3 : 1;
      ctx.fillStyle = this.colors[slices.category[i]];
      ctx.fillRect(x, y, width, row.h);
      if (width > 26 && row.h > 11) {
        // the background shows through a dimmed slice, so its label has the page's text color
        const isDimmed = hasFocus && !slices.flags[i];
        ctx.globalAlpha = isDimmed ? 0.75 : 1;
        ctx.fillStyle = isDimmed ? this.dim : this.labelColors[slices.category[i]];
        this.drawLabel(ctx, labels[slices.name[i]], x, y, width, row.h, slices.dur[i]);
      }
      if (slices.flags[i] & 1) {
        this.drawOutline(ctx, x, y, width, row.h, 1);
      } else if (slices.flags[i] & 2) {
        this.drawOutline(ctx, x, y, width, row.h, 2);
      }
    }
    ctx.globalAlpha = 1;
  }

  // Draws a slice's name, shortened to fit, and its duration if there is space.
  drawLabel(ctx, text, x, y, width, height, duration) {
    if (!text) {
      return;
    }
    const left = Math.max(x, 0) + 4;
    const available = Math.min(x + width, this.timeline.width) - left - 4;
    if (available < 14) {
      return;
    }
    const textWidth = this.measureText(ctx, text);
    if (textWidth > available) {
      const fittingLength = Math.floor((text.length * available) / textWidth) - 1;
      if (fittingLength < 2) {
        return;
      }
      text = text.slice(0, fittingLength) + "…";
    } else {
      const time = ui.formatDuration(duration);
      if (textWidth + 60 < available) {
        ctx.globalAlpha *= 0.72;
        ctx.fillText(time, left + textWidth + 8, y + height / 2 + 0.5);
        ctx.globalAlpha /= 0.72;
      }
    }
    ctx.fillText(text, left, y + height / 2 + 0.5);
  }

  // Returns the width of a text, from a cache.
  measureText(ctx, text) {
    let width = this.textWidths.get(text);
    if (width === undefined) {
      if (this.textWidths.size > 20000) {
        this.textWidths.clear();
      }
      width = ctx.measureText(text).width;
      this.textWidths.set(text, width);
    }
    return width;
  }

  // Outlines a slice: of the focused finding (1) or a match (2).
  drawOutline(ctx, x, y, width, height, kind) {
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

  // Marks cells with flagged slices.
  drawFlaggedCells(ctx, answer, scale, layout, top) {
    const flagged = answer.flagged;
    const timeline = this.timeline;
    const base = (answer.cell0 - timeline.x0) * scale;
    const cellWidth = answer.cell * scale;
    for (let i = 0; i < flagged.n; i++) {
      const row = layout.rows[layout.byLane[flagged.lane[i]]];
      if (!row || row.isPinned !== this.isPinnedPass) {
        continue;
      }
      const start = base + flagged.cell[i] * cellWidth;
      const end = start + flagged.width[i] * cellWidth;
      const y = row.y - top;
      if (end < 0 || start > timeline.width || y > timeline.height || y + row.h < 0) {
        continue;
      }
      const x = this.snapToPixel(start);
      const width = Math.max(end - start, 1.5);
      ctx.fillStyle = flagged.flags[i] & 1 ? this.outline : this.accent;
      // lines above and below the cell, which keeps its color
      ctx.fillRect(x, y - 1, width, 2.5);
      ctx.fillRect(x, y + row.h - 1.5, width, 2.5);
    }
  }

  // Draws counters as the range of values in each pixel.
  drawCounters(ctx, answer, scale, layout, top) {
    const timeline = this.timeline;
    const info = timeline.data.info;
    const w = timeline.width;
    const pixelNs = (answer.x1 - answer.x0) / answer.px;
    layout.rows.forEach((row) => {
      if (row.counter === undefined) {
        return;
      }
      const position = answer.counterNumbers.indexOf(row.counter);
      const y = row.y - top;
      if (position < 0 || y > timeline.height || y + row.h < 0) {
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
      ctx.fillStyle = this.accent;
      const offset = position * answer.px;
      for (let i = 0; i < answer.px; i++) {
        const largest = answer.high[offset + i];
        const smallest = answer.low[offset + i];
        if (largest !== largest) {
          continue;
        }
        let x = (answer.x0 - timeline.x0 + i * pixelNs) * scale;
        const width = pixelNs * scale;
        if (x + width < 0 || x > w) {
          continue;
        }
        const top = row.h * ui.clamp((largest - low) / span, 0, 1);
        const bottom = row.h * ui.clamp((smallest - low) / span, 0, 1);
        const right = this.snapToPixel(x + width); // start of the next pixel
        x = this.snapToPixel(x);
        const barWidth = Math.max(right - x, 0.5);
        ctx.globalAlpha = 0.22;
        ctx.fillRect(x, y + row.h - top, right - x, top); // translucent: bars must not overlap
        ctx.globalAlpha = 1;
        ctx.fillRect(x, y + row.h - top - 0.5, barWidth, Math.max(top - bottom, 1.5));
      }
    });
  }

  // Draws the time axis.
  drawAxis() {
    const timeline = this.timeline;
    const w = timeline.width;
    const ctx = this.prepareCanvas(timeline.axis, w, 26);
    const span = timeline.x1 - timeline.x0;
    const step = tickStep(span, w);
    const first = Math.ceil(timeline.x0 / step) * step;
    const scale = w / span;
    ctx.font = "11px " + this.font;
    ctx.textBaseline = "middle";
    let time = first;
    let count = 0;
    for (; time < timeline.x1 && count < 100; time += step, count++) {
      const x = Math.round((time - timeline.x0) * scale);
      ctx.fillStyle = this.lineStrong;
      ctx.fillRect(x, 16, 1, 10);
      ctx.fillStyle = this.dim;
      const text = ui.formatInstant(time, step);
      if (x + 6 + this.measureText(ctx, text) < w) {
        ctx.fillText(text, x + 4, 10);
      }
    }
    for (time = first - step; time < timeline.x1 && count < 1000; time += step / 5, count++) {
      ctx.fillStyle = this.line;
      ctx.fillRect(Math.round((time - timeline.x0) * scale), 21, 1, 5);
    }
  }

  // Draws the overview of the whole trace, with the visible span.
  drawOverview() {
    const timeline = this.timeline;
    const w = timeline.width;
    const h = 34;
    const ctx = this.prepareCanvas(timeline.overview, w, h);
    const base = timeline.overviewAnswer;
    const info = timeline.data.info;
    if (!info) {
      return;
    }
    const span = info.last_ns - info.first_ns;
    const scale = w / span;
    ctx.fillStyle = this.sunk;
    ctx.fillRect(0, 0, w, h);
    if (base) {
      const rows = timeline.overviewLanes;
      const height = (h - 6) / Math.max(rows.length, 1);
      const draw = function (lane, a, b, color, alpha) {
        const row = rows.indexOf(lane);
        if (row < 0) {
          return;
        }
        ctx.fillStyle = color;
        ctx.globalAlpha = alpha;
        ctx.fillRect(a, 3 + row * height, Math.max(b - a, 0.5), height - 1);
      };
      const r = base.runs;
      const s = base.slices;
      let i;
      let x;
      for (i = 0; i < r.n; i++) {
        x = (base.cell0 + r.cell[i] * base.cell - info.first_ns) * scale;
        draw(
          r.lane[i],
          x,
          x + r.width[i] * base.cell * scale,
          this.colors[r.category[i]],
          0.3 + (0.7 * r.cover[i]) / 255,
        );
      }
      for (i = 0; i < s.n; i++) {
        x = (base.x0 + s.start[i] - info.first_ns) * scale;
        draw(s.lane[i], x, x + s.dur[i] * scale, this.colors[s.category[i]], 1);
      }
      ctx.globalAlpha = 1;
    }
    let left = (timeline.x0 - info.first_ns) * scale;
    let right = (timeline.x1 - info.first_ns) * scale;
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

  // Draws pointer, range, instant, selection and arrows.
  drawOverlay() {
    const timeline = this.timeline;
    const w = timeline.width;
    const h = timeline.height;
    const ctx = this.prepareCanvas(timeline.overlay, w, h);
    const scale = w / (timeline.x1 - timeline.x0);
    if (!timeline.layout) {
      return;
    }
    if (timeline.range) {
      const left = (Math.min(timeline.range[0], timeline.range[1]) - timeline.x0) * scale;
      const right = (Math.max(timeline.range[0], timeline.range[1]) - timeline.x0) * scale;
      ctx.fillStyle = this.accent;
      ctx.globalAlpha = 0.13;
      ctx.fillRect(left, 0, right - left, h);
      ctx.globalAlpha = 1;
      ctx.fillRect(Math.round(left), 0, 1, h);
      ctx.fillRect(Math.round(right), 0, 1, h);
      const text = ui.formatDuration(Math.abs(timeline.range[1] - timeline.range[0]));
      ctx.font = "600 11px " + this.font;
      const textWidth = ctx.measureText(text).width + 12;
      const x = ui.clamp((left + right) / 2 - textWidth / 2, 2, w - textWidth - 2);
      ctx.fillRect(x, 4, textWidth, 18);
      ctx.fillStyle = this.card;
      ctx.textBaseline = "middle";
      ctx.fillText(text, x + 6, 13.5);
    } else if (timeline.pointer !== null) {
      ctx.fillStyle = this.dim;
      ctx.globalAlpha = 0.5;
      ctx.fillRect(Math.round(timeline.pointer), 0, 1, h);
      ctx.globalAlpha = 1;
    }
    if (timeline.instant !== null) {
      ctx.strokeStyle = this.accent;
      ctx.setLineDash([4, 3]);
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo((timeline.instant - timeline.x0) * scale, 0);
      ctx.lineTo((timeline.instant - timeline.x0) * scale, h);
      ctx.stroke();
      ctx.setLineDash([]);
    }
    if (timeline.hoveredSlice) {
      this.drawFrame(ctx, timeline.hoveredSlice, this.dim, 1.5);
    }
    if (timeline.selectedSlice) {
      this.drawFrame(ctx, timeline.selectedSlice, this.accent, 2.5);
      const links = timeline.selectedSlice.links || [];
      const hasManyLaunches =
        links.filter((link) => {
          return link.kind === "launched";
        }).length > 8;
      links.forEach((link) => {
        if (
          !["called from", "contains", "operator"].includes(link.kind) &&
          !(hasManyLaunches && link.kind === "launched")
        ) {
          this.drawArrow(ctx, timeline.selectedSlice, link);
        }
      });
    }
  }

  // Returns the box of a slice on the canvas, or null if its lane is folded.
  sliceBox(slice) {
    const timeline = this.timeline;
    const row = timeline.layout.rows[timeline.layout.byLane[slice.lane]];
    const scale = timeline.width / (timeline.x1 - timeline.x0);
    if (!row) {
      return null;
    }
    const x = (slice.ts - timeline.x0) * scale;
    return {
      x,
      y: row.y - (row.isPinned ? 0 : timeline.scroll),
      w: Math.max(slice.dur * scale, 2),
      h: row.h,
      pin: row.isPinned,
    };
  }

  // Draws a frame around a slice.
  drawFrame(ctx, slice, color, width) {
    const box = this.sliceBox(slice);
    if (!box || box.x > this.timeline.width + FRAME_MARGIN || box.x + box.w < -FRAME_MARGIN) {
      return;
    }
    if (!box.isPinned && box.y < this.timeline.layout.pinnedHeight) {
      return;
    } // hidden by pinned rows
    const x = Math.max(box.x, -FRAME_MARGIN);
    const right = Math.min(box.x + box.w, this.timeline.width + FRAME_MARGIN);
    ctx.strokeStyle = color;
    ctx.lineWidth = width;
    ctx.strokeRect(x - 1, box.y - 1, right - x + 2, box.h + 2);
  }

  // Draws an arrow from a launch to its work, or from a cause to its effect.
  drawArrow(ctx, from, link) {
    const isReversed = link.kind === "launched by" || link.kind === "caused by";
    const fromBox = this.sliceBox(isReversed ? link : from);
    const toBox = this.sliceBox(isReversed ? from : link);
    const w = this.timeline.width;
    if (!fromBox || !toBox) {
      return;
    }
    const x0 = ui.clamp(fromBox.x + Math.min(fromBox.w, 6) / 2, -40, w + 40);
    const y0 = fromBox.y + fromBox.h / 2;
    const x1 = ui.clamp(toBox.x, -40, w + 40);
    const y1 = toBox.y + toBox.h / 2;
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

// Returns the time between two labels of the axis, ns: 1, 2 or 5 times a power of ten.
export function tickStep(span, width) {
  const roughStep = span / Math.max(width / 110, 1);
  const size = Math.pow(10, Math.floor(Math.log10(roughStep)));
  const step =
    [1, 2, 5, 10].filter((multiple) => {
      return multiple * size >= roughStep;
    })[0] * size;
  return Math.max(step, 1);
}
