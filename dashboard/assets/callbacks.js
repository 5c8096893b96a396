// Clientside callbacks of Dash: filter a grid, put the selected rank or the unticked fixes into
// the address, scroll to the details of a kernel.
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.advisor = Object.assign(window.dash_clientside.advisor || {}, {
  // Filters a grid by the text of its search field.
  quickFilter: function (text, options) {
    "use strict";
    return Object.assign({}, options, { quickFilterText: text || "" });
  },
  // Opens the timeline of the rank that was clicked on the job's heat map or selected in its grid.
  openRank: function (clickData, selectedRows) {
    "use strict";
    var noUpdate = window.dash_clientside.no_update;
    var source = window.dash_clientside.callback_context.triggered_id;
    var key = null;
    if (source === "job-map" && clickData && clickData.points.length) {
      key = clickData.points[0].text;
    } else if (source === "job-ranks" && selectedRows && selectedRows.length) {
      key = selectedRows[0].query;
    }
    return key ? ["/timeline", "?" + key] : [noUpdate, noUpdate];
  },
  // Puts the unticked fixes into the page's address and its links. It uses replaceState, because
  // Dash would load the page again if its location changed.
  putFixesInLinks: function (ticks, ids, hrefs) {
    "use strict";
    var unticked = ids
      .filter(function (_, i) {
        return !ticks[i];
      })
      .map(function (id) {
        return id.fix;
      });
    function withUntickedFixes(href) {
      var address = new URL(href, location.href);
      address.searchParams.delete("without");
      if (unticked.length) {
        address.search += (address.search ? "&" : "?") + "without=" + unticked.join(",");
      }
      return address.href.slice(address.origin.length);
    }
    history.replaceState(history.state, "", withUntickedFixes(location.href));
    return hrefs.map(withUntickedFixes);
  },
  // Scrolls to the details of the selected kernel, which may be below the window.
  scrollToKernel: function () {
    "use strict";
    requestAnimationFrame(function () {
      document.getElementById("kernel-detail").scrollIntoView({ block: "nearest" });
    });
    return window.dash_clientside.no_update;
  },
  // Puts the rank selected in the list into the address.
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
