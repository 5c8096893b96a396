// What callbacks do in the browser: filter a grid by the field above it, put a rank or the fixes
// that are not ticked into the address.
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.advisor = Object.assign(window.dash_clientside.advisor || {}, {
  quickFilter: function (text, options) {
    "use strict";
    return Object.assign({}, options, { quickFilterText: text || "" });
  },
  // Clicked on the map of a job, or chosen in its table: the rank's timeline.
  openRank: function (clicked, selected) {
    "use strict";
    var still = window.dash_clientside.no_update;
    var chosen = window.dash_clientside.callback_context.triggered_id;
    var key = null;
    if (chosen === "job-map" && clicked && clicked.points.length) {
      key = clicked.points[0].text;
    } else if (chosen === "job-ranks" && selected && selected.length) {
      key = selected[0].query;
    }
    return key ? ["/timeline", "?" + key] : [still, still];
  },
  // The address changes, and that of the links: to Dash a new one would be a new page.
  keepTicks: function (ticks, fixes, links) {
    "use strict";
    var without = fixes
      .filter(function (_, i) {
        return !ticks[i];
      })
      .map(function (id) {
        return id.fix;
      });
    function keep(href) {
      var address = new URL(href, location.href);
      address.searchParams.delete("without");
      if (without.length) {
        address.search += (address.search ? "&" : "?") + "without=" + without.join(",");
      }
      return address.href.slice(address.origin.length);
    }
    history.replaceState(history.state, "", keep(location.href));
    return links.map(keep);
  },
  // What a chosen row is about stands below the grid, maybe below the window.
  reveal: function () {
    "use strict";
    requestAnimationFrame(function () {
      document.getElementById("kernel-detail").scrollIntoView({ block: "nearest" });
    });
    return window.dash_clientside.no_update;
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
