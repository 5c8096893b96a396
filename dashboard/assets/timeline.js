// Timeline, 1 of 6: shared helpers, and finding the place on the page where a timeline belongs.
//
// The parts share one object, window.advisorTimeline: Data (what the server said), Paint (pixels),
// Input (pointer, wheel, keys), Panel (text beside the picture) and Timeline, which ties them.
(function () {
  "use strict";
  if (window.advisorTimeline) { return; }  // Dash loads these files once more

  var T = window.advisorTimeline = { current: null };

  T.clamp = function (value, low, high) { return Math.max(low, Math.min(high, value)); };

  T.el = function (tag, props, children) {
    var node = document.createElement(tag);
    Object.keys(props || {}).forEach(function (key) {
      var value = props[key];
      if (value === null || value === undefined || value === false) { return; }
      if (key === "text") { node.textContent = value; }
      else if (key === "cls") { node.className = value; }
      else if (key.slice(0, 2) === "on") { node.addEventListener(key.slice(2), value); }
      else { node.setAttribute(key, value === true ? "" : value); }
    });
    (children || []).forEach(function (child) {
      if (child) { node.appendChild(typeof child === "string" ? document.createTextNode(child) : child); }
    });
    return node;
  };

  var UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

  function digits(value) {
    var size = Math.abs(value);
    return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
  }

  // 12_621_000 -> "12.6 ms"
  T.time = function (ns) {
    if (!isFinite(ns)) { return "–"; }
    if (Math.abs(ns) < 1e3) { return Math.round(ns) + " ns"; }
    for (var i = 0; i < UNITS.length; i++) {
      if (Math.abs(ns) >= UNITS[i][0] * 0.9995) { return digits(ns / UNITS[i][0]) + " " + UNITS[i][1]; }
    }
    return ns + " ns";
  };

  // an instant with enough digits to tell it from another one "step" ns away
  T.instant = function (ns, step) {
    var unit = UNITS.filter(function (u) { return Math.max(Math.abs(ns), step) >= u[0]; })[0] || UNITS[3];
    var places = Math.max(0, Math.ceil(Math.log10(unit[0] / Math.max(step, 1)) - 1e-9));
    return (ns / unit[0]).toFixed(Math.min(places, 9)) + " " + unit[1];
  };

  T.count = function (n) { return Math.round(n).toLocaleString("en-US"); };

  T.share = function (part, whole) { return whole > 0 ? (100 * part / whole).toFixed(1) + " %" : "–"; };

  var PREFIX = ["", "k", "M", "G", "T", "P"];

  function scaled(value, base, names) {
    var i = 0;
    while (Math.abs(value) >= base && i < names.length - 1) { value /= base; i += 1; }
    return (i || !Number.isInteger(value) ? digits(value) : String(value)) + " " + names[i];
  }

  T.quantity = function (value, unit) {
    if (typeof value !== "number") { return String(value); }
    if (unit === "ns") { return T.time(value); }
    if (unit === "id") { return String(value); }
    if (unit === "bytes") { return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]); }
    if (unit === "bytes/s" || unit === "B/s" || unit === "FLOP/s") {
      return scaled(value, 1000, PREFIX.map(function (p) { return p + (unit === "bytes/s" ? "B/s" : unit); }));
    }
    var text = Number.isInteger(value) ? T.count(value) : digits(value);
    return unit && unit !== "count" ? text + " " + unit : text;
  };

  T.calm = function () { return window.matchMedia("(prefers-reduced-motion: reduce)").matches; };

  // -- life: React puts the place there and takes it away --------------------------------------

  function look() {
    var place = document.querySelector("[data-advisor-timeline]"), now = T.current;
    if (!T.Timeline) { return; }
    if (now && now.early && place && now.run === (place.getAttribute("data-run") || "")) {
      now.adopt(place);
    } else if (now && now.early && (place || document.getElementById("content"))) {
      now.destroy();  // another run, or the frame says that it is being read
      T.current = now = null;
    } else if (now && !now.early && now.root !== place) {
      now.destroy();
      T.current = now = null;
    }
    if (place && !T.current) { T.current = new T.Timeline(place); }
    else if (!now && !T.begun && document.body && /\/timeline$/.test(location.pathname)) { T.current = begin(); }
    T.begun = T.begun || Boolean(document.body);
  }

  // The picture does not need the page's frame: it begins where it will be, and moves in later.
  function begin() {
    var root = T.el("div", { cls: "tl-early", "data-run": new URLSearchParams(location.search).get("run") || "0" });
    document.body.appendChild(root);
    var made = new T.Timeline(root);
    made.early = true;
    return made;
  }

  T.start = function () {
    new MutationObserver(look).observe(document.documentElement, { childList: true, subtree: true });
    look();
  };
})();
