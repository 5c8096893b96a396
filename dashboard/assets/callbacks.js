// What callbacks do in the browser: filter a grid by the field above it, put a rank into the
// address.
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.advisor = Object.assign(window.dash_clientside.advisor || {}, {
  quickFilter: function (text, options) {
    "use strict";
    return Object.assign({}, options, { quickFilterText: text || "" });
  },
  chooseRank: function (rank, search) {
    "use strict";
    var query = new URLSearchParams(search || "");
    if (!rank || query.get("rank") === rank) {
      return window.dash_clientside.no_update;
    }
    query.set("rank", rank);
    return "?" + query.toString();
  },
});
