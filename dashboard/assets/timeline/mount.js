// Mounts the timeline in its element on the page, which React adds and removes.

import { Timeline } from "./view.js";
import * as ui from "./ui.js";

/**
 * The current timeline, for tests, benchmarks and the console.
 * @type {{ current: Timeline | null }}
 */
export const state = { current: null };
let hasStarted = false;

function update() {
  /** @type {HTMLElement | null} */
  const container = document.querySelector("[data-advisor-timeline]");
  let timeline = state.current;
  if (
    timeline &&
    timeline.isEarly &&
    container &&
    timeline.run === (container.getAttribute("data-run") || "")
  ) {
    timeline.moveInto(container);
  } else if (timeline && timeline.isEarly && (container || document.getElementById("content"))) {
    timeline.destroy(); // the page shows another run, or its progress
    state.current = timeline = null;
  } else if (timeline && !timeline.isEarly && timeline.root !== container) {
    timeline.destroy();
    state.current = timeline = null;
  }
  if (container && !state.current) {
    state.current = new Timeline(container);
  } else if (!timeline && !hasStarted && document.body && /\/timeline$/.test(location.pathname)) {
    state.current = startEarly();
  }
  hasStarted = hasStarted || Boolean(document.body);
}

// Starts a timeline before the page's frame exists, at its later position. It moves into the
// frame.
function startEarly() {
  const root = ui.el("div", {
    cls: "tl-early",
    "data-run": new URLSearchParams(location.search).get("run") || "0",
  });
  document.body.appendChild(root);
  const timeline = new Timeline(root);
  timeline.isEarly = true;
  return timeline;
}

export function start() {
  new MutationObserver(update).observe(document.documentElement, {
    childList: true,
    subtree: true,
  });
  update();
}
