// Before the first paint: the theme that was chosen, else the one of the system; and the timeline's
// own scripts, which need nothing of the page around them.
(function () {
  "use strict";
  var chosen = null;
  try { chosen = localStorage.getItem("advisor-theme"); } catch (_) { /* storage is switched off */ }
  var dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.setAttribute("data-theme", dark ? "dark" : "light");
  document.documentElement.setAttribute("data-mantine-color-scheme", dark ? "dark" : "light");
  document.documentElement.setAttribute("data-ag-theme-mode", dark ? "dark" : "light");

  if (/\/timeline$/.test(location.pathname)) {
    ["timeline", "timeline_data", "timeline_input", "timeline_paint", "timeline_panel", "timeline_view"].forEach(function (name) {
      var script = document.createElement("script");
      script.src = "/assets/" + name + ".js";
      script.async = false;  // one after another
      document.head.appendChild(script);
    });
  }
})();
