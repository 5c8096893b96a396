// Timeline: on its own page Dash's scripts wait in a template until the picture is painted
// (see advisor/dashboard/app.py); here they are set going, in their order.
const PATIENCE = 1500; // ms: what takes longer to draw is waited for with the frame around it
let waiting = /** @type {HTMLTemplateElement | null} */ (document.getElementById("dash-scripts"));

function begin() {
  if (!waiting) {
    return;
  }
  const scripts = Array.from(waiting.content.querySelectorAll("script"));
  waiting = null;
  scripts
    .filter((one) => {
      return one.hasAttribute("src");
    })
    .forEach((one) => {
      const ahead = document.createElement("link");
      ahead.rel = "preload";
      ahead.as = "script";
      ahead.href = one.getAttribute("src") || "";
      document.head.appendChild(ahead);
    });
  (function next() {
    const old = scripts.shift();
    if (!old) {
      performance.mark("advisor-frame-begun");
      return;
    }
    const made = document.createElement("script");
    const inline = !old.hasAttribute("src");
    Array.from(old.attributes).forEach((one) => {
      made.setAttribute(one.name, one.value);
    });
    made.textContent = old.textContent;
    if (inline) {
      document.body.appendChild(made);
      next();
      return;
    }
    // each a task of its own: the picture can be moved between them
    made.onload = made.onerror = next;
    document.body.appendChild(made);
  })();
}

window.addEventListener("advisor-timeline-there", begin);
setTimeout(begin, PATIENCE);
