// Timeline, last: on its own page Dash's scripts wait in a template until the picture is painted
// (see advisor/dashboard/document.py); here they are set going, in their order.
(function () {
  "use strict";
  var PATIENCE = 1500;  // ms: what takes longer to draw is waited for with the frame around it
  var waiting = document.getElementById("dash-scripts");
  if (!waiting || window.advisorTimelineLast) { return; }
  window.advisorTimelineLast = true;

  function begin() {
    if (!waiting) { return; }
    var scripts = Array.from(waiting.content.querySelectorAll("script"));
    waiting = null;
    scripts.filter(function (one) { return one.hasAttribute("src"); }).forEach(function (one) {
      var ahead = document.createElement("link");
      ahead.rel = "preload";
      ahead.as = "script";
      ahead.href = one.getAttribute("src");
      document.head.appendChild(ahead);
    });
    (function next() {
      var old = scripts.shift();
      if (!old) { performance.mark("advisor-frame-begun"); return; }
      var made = document.createElement("script"), inline = !old.hasAttribute("src");
      Array.from(old.attributes).forEach(function (one) { made.setAttribute(one.name, one.value); });
      made.textContent = old.textContent;
      if (inline) { document.body.appendChild(made); next(); return; }
      made.onload = made.onerror = next;  // each a task of its own: the picture can be moved between them
      document.body.appendChild(made);
    })();
  }

  window.addEventListener("advisor-timeline-there", begin);
  setTimeout(begin, PATIENCE);
})();
