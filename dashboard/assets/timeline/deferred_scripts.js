// Runs Dash's scripts after the first paint, in their order. On the timeline's page they are in a
// template (see dashboard/app.py).
const MAX_WAIT_MS = 1500; // then the scripts run even if the timeline is not painted yet
let template = /** @type {HTMLTemplateElement | null} */ (document.getElementById("dash-scripts"));

function runScripts() {
  if (!template) {
    return;
  }
  const scripts = Array.from(template.content.querySelectorAll("script"));
  template = null;
  scripts
    .filter((source) => {
      return source.hasAttribute("src");
    })
    .forEach((source) => {
      const preload = document.createElement("link");
      preload.rel = "preload";
      preload.as = "script";
      preload.href = source.getAttribute("src") || "";
      document.head.appendChild(preload);
    });
  (function runNext() {
    const source = scripts.shift();
    if (!source) {
      performance.mark("advisor-frame-scripts-loaded");
      return;
    }
    const script = document.createElement("script");
    const isInline = !source.hasAttribute("src");
    Array.from(source.attributes).forEach((attribute) => {
      script.setAttribute(attribute.name, attribute.value);
    });
    script.textContent = source.textContent;
    if (isInline) {
      document.body.appendChild(script);
      runNext();
      return;
    }
    // each script is a separate task, so that the timeline responds to input between them
    script.onload = script.onerror = runNext;
    document.body.appendChild(script);
  })();
}

window.addEventListener("advisor-timeline-ready", runScripts);
setTimeout(runScripts, MAX_WAIT_MS);
