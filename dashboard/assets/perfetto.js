// "Open in Perfetto": the first click shows an explanation. The second opens a tab and posts the
// trace to it (see Perfetto's "Deep linking to the Perfetto UI"). Nothing is requested from that
// site before, and only the opened page receives the trace.
(function () {
  "use strict";
  var KNOCK_MS = 100,
    PATIENCE_MS = 90000;

  function say(words) {
    var place = document.getElementById("perfetto-state");
    if (place) {
      place.textContent = words;
    }
  }

  // Resolves once the tab says that it listens.
  function listening(tab, origin) {
    return new Promise(function (done, fail) {
      var knocking = setInterval(function () {
        if (tab.closed) {
          end();
          fail(new Error("The tab was closed."));
          return;
        }
        tab.postMessage("PING", origin);
      }, KNOCK_MS);
      var late = setTimeout(function () {
        end();
        fail(new Error("That site does not respond. Save the trace and open the file there."));
      }, PATIENCE_MS);
      function heard(event) {
        if (event.source !== tab || event.origin !== origin || event.data !== "PONG") {
          return;
        }
        end();
        done();
      }
      function end() {
        clearInterval(knocking);
        clearTimeout(late);
        window.removeEventListener("message", heard);
      }
      window.addEventListener("message", heard);
    });
  }

  function open(button) {
    var viewer = button.getAttribute("data-viewer"),
      title = button.getAttribute("data-title");
    var origin = new URL(viewer).origin;
    // in the click itself: later it would be a pop-up that nobody asked for
    var tab = window.open(viewer, "_blank");
    if (!tab) {
      say("The browser blocked the new tab. Save the trace and open the file there.");
      return;
    }
    button.disabled = true;
    say("Writing the trace…");
    var made = fetch(button.getAttribute("data-trace")).then(function (answer) {
      if (answer.ok) {
        return answer.arrayBuffer();
      }
      return answer.text().then(function (why) {
        throw new Error(why);
      });
    });
    Promise.all([made, listening(tab, origin)])
      .then(function (both) {
        tab.postMessage({ perfetto: { buffer: both[0], title: title, fileName: title } }, origin, [
          both[0],
        ]);
        say("Trace sent.");
      })
      .catch(function (error) {
        say(error.message);
      })
      .then(function () {
        button.disabled = false;
      });
  }

  document.addEventListener("click", function (event) {
    var box = document.getElementById("perfetto");
    if (!box) {
      return;
    }
    if (event.target.closest("#perfetto-ask")) {
      box.hidden = false;
      say("");
      box.focus();
    } else if (event.target.closest("#perfetto-leave")) {
      box.hidden = true;
      document.getElementById("perfetto-ask").focus();
    } else if (event.target.closest("#perfetto-open")) {
      open(event.target.closest("#perfetto-open"));
    }
  });
})();
