// "Open in Perfetto": the first click shows a notice. The second one opens a tab and posts the
// trace to it, as Perfetto's "Deep linking to the Perfetto UI" describes. Nothing is requested
// from that site before the second click, and only the opened tab receives the trace.
(function () {
  "use strict";
  var PING_INTERVAL_MS = 100,
    REPLY_TIMEOUT_MS = 90000;

  function showStatus(text) {
    var status = document.getElementById("perfetto-state");
    if (status) {
      status.textContent = text;
    }
  }

  // Resolves when the viewer in the tab answers a ping.
  function waitForViewer(tab, origin) {
    return new Promise(function (resolve, reject) {
      var pingTimer = setInterval(function () {
        if (tab.closed) {
          cleanUp();
          reject(new Error("The tab was closed."));
          return;
        }
        tab.postMessage("PING", origin);
      }, PING_INTERVAL_MS);
      var timeoutTimer = setTimeout(function () {
        cleanUp();
        reject(new Error("That site does not respond. Save the trace and open the file there."));
      }, REPLY_TIMEOUT_MS);
      function onMessage(event) {
        if (event.source !== tab || event.origin !== origin || event.data !== "PONG") {
          return;
        }
        cleanUp();
        resolve();
      }
      function cleanUp() {
        clearInterval(pingTimer);
        clearTimeout(timeoutTimer);
        window.removeEventListener("message", onMessage);
      }
      window.addEventListener("message", onMessage);
    });
  }

  function sendTrace(button) {
    var viewer = button.getAttribute("data-viewer"),
      title = button.getAttribute("data-title");
    var origin = new URL(viewer).origin;
    // during the click event: browsers block pop-ups that are opened later
    var tab = window.open(viewer, "_blank");
    if (!tab) {
      showStatus("The browser blocked the new tab. Save the trace and open the file there.");
      return;
    }
    button.disabled = true;
    showStatus("Writing the trace…");
    var traceRequest = fetch(button.getAttribute("data-trace")).then(function (response) {
      if (response.ok) {
        return response.arrayBuffer();
      }
      return response.text().then(function (reason) {
        throw new Error(reason);
      });
    });
    Promise.all([traceRequest, waitForViewer(tab, origin)])
      .then(function (results) {
        tab.postMessage(
          { perfetto: { buffer: results[0], title: title, fileName: title } },
          origin,
          [results[0]],
        );
        showStatus("Trace sent.");
      })
      .catch(function (error) {
        showStatus(error.message);
      })
      .then(function () {
        button.disabled = false;
      });
  }

  document.addEventListener("click", function (event) {
    var notice = document.getElementById("perfetto");
    if (!notice) {
      return;
    }
    if (event.target.closest("#perfetto-ask")) {
      notice.hidden = false;
      showStatus("");
      notice.focus();
    } else if (event.target.closest("#perfetto-leave")) {
      notice.hidden = true;
      document.getElementById("perfetto-ask").focus();
    } else if (event.target.closest("#perfetto-open")) {
      sendTrace(event.target.closest("#perfetto-open"));
    }
  });
})();
