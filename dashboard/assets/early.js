// Sets the theme before the first paint: the one that the user selected, or the system's.
(function () {
  "use strict";
  var chosen = null;
  try {
    chosen = localStorage.getItem("advisor-theme");
  } catch (_) {
    /* storage is switched off */
  }
  var dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.setAttribute("data-theme", dark ? "dark" : "light");
  document.documentElement.setAttribute("data-mantine-color-scheme", dark ? "dark" : "light");
  document.documentElement.setAttribute("data-ag-theme-mode", dark ? "dark" : "light");
})();
