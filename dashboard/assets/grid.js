// What grids do in the browser: the field above one filters its rows.
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.advisor = Object.assign(window.dash_clientside.advisor || {}, {
  quickFilter: function (text, options) {
    "use strict";
    return Object.assign({}, options, { quickFilterText: text || "" });
  },
});
