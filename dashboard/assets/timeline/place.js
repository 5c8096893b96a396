// Finding the place on the page where a timeline belongs: React puts it there and takes it away.

import { Timeline } from "./view.js";
import * as ui from "./ui.js";

/**
 * The timeline that is shown, for tests, benchmarks and the console.
 * @type {{ current: Timeline | null }}
 */
export const state = { current: null };
let begun = false;

function look() {
  /** @type {HTMLElement | null} */
  const place = document.querySelector("[data-advisor-timeline]");
  let now = state.current;
  if (now && now.early && place && now.run === (place.getAttribute("data-run") || "")) {
    now.adopt(place);
  } else if (now && now.early && (place || document.getElementById("content"))) {
    now.destroy(); // another run, or the frame says that it is being read
    state.current = now = null;
  } else if (now && !now.early && now.root !== place) {
    now.destroy();
    state.current = now = null;
  }
  if (place && !state.current) {
    state.current = new Timeline(place);
  } else if (!now && !begun && document.body && /\/timeline$/.test(location.pathname)) {
    state.current = begin();
  }
  begun = begun || Boolean(document.body);
}

// The picture does not need the page's frame: it begins where it will be, and moves in later.
function begin() {
  const root = ui.el("div", {
    cls: "tl-early",
    "data-run": new URLSearchParams(location.search).get("run") || "0",
  });
  document.body.appendChild(root);
  const made = new Timeline(root);
  made.early = true;
  return made;
}

export function start() {
  new MutationObserver(look).observe(document.documentElement, { childList: true, subtree: true });
  look();
}
