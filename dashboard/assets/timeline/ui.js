// Formatting of durations, counts and sizes, and creation of elements, for all timeline modules.

/**
 * @param {number} value
 * @param {number} low
 * @param {number} high
 */
export function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

/**
 * Creates an element. Properties are "text", "cls", listeners such as "onclick", and attributes.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {(Node | string | null | undefined | false)[]} [children]
 * @returns {any}
 */
export function el(tag, props, children) {
  const node = document.createElement(tag);
  Object.entries(props || {}).forEach(([key, value]) => {
    if (value === null || value === undefined || value === false) {
      return;
    }
    if (key === "text") {
      node.textContent = value;
    } else if (key === "cls") {
      node.className = value;
    } else if (key.slice(0, 2) === "on") {
      node.addEventListener(key.slice(2), value);
    } else {
      node.setAttribute(key, value === true ? "" : value);
    }
  });
  (children || []).forEach((child) => {
    if (child) {
      node.appendChild(typeof child === "string" ? document.createTextNode(child) : child);
    }
  });
  return node;
}

/** @type {[number, string][]} */
const UNITS = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
  [1, "ns"],
];

function formatDigits(value) {
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/**
 * Formats a duration: 12_621_000 becomes "12.6 ms".
 * @param {number} ns
 */
export function formatDuration(ns) {
  if (!isFinite(ns)) {
    return "–";
  }
  if (Math.abs(ns) < 1e3) {
    return Math.round(ns) + " ns";
  }
  for (let i = 0; i < UNITS.length; i++) {
    if (Math.abs(ns) >= UNITS[i][0] * 0.9995) {
      return formatDigits(ns / UNITS[i][0]) + " " + UNITS[i][1];
    }
  }
  return ns + " ns";
}

/**
 * Formats an instant, with enough digits to distinguish instants that are "step" ns apart.
 * @param {number} ns
 * @param {number} step
 */
export function formatInstant(ns, step) {
  const unit =
    UNITS.filter((u) => {
      return Math.max(Math.abs(ns), step) >= u[0];
    })[0] || UNITS[3];
  const decimals = Math.max(0, Math.ceil(Math.log10(unit[0] / Math.max(step, 1)) - 1e-9));
  return (ns / unit[0]).toFixed(Math.min(decimals, 9)) + " " + unit[1];
}

export function formatCount(n) {
  return Math.round(n).toLocaleString("en-US");
}

export function formatShare(part, total) {
  if (!(total > 0)) {
    return "–";
  }
  const share = ((100 * part) / total).toFixed(1);
  return part > 0 && share === "0.0" ? "<0.1%" : share + "%";
}

const SI_PREFIXES = ["", "k", "M", "G", "T", "P"];

function formatScaled(value, base, names) {
  let i = 0;
  while (Math.abs(value) >= base && i < names.length - 1) {
    value /= base;
    i += 1;
  }
  return (i || !Number.isInteger(value) ? formatDigits(value) : String(value)) + " " + names[i];
}

/**
 * Formats a value from the server by its unit.
 * @param {number | string} value
 * @param {string} unit
 */
export function formatQuantity(value, unit) {
  if (typeof value !== "number") {
    return String(value);
  }
  if (unit === "ns") {
    return formatDuration(value);
  }
  if (unit === "id") {
    return String(value);
  }
  if (unit === "bytes") {
    return formatScaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
  }
  if (unit === "bytes/s" || unit === "B/s" || unit === "FLOP/s") {
    return formatScaled(
      value,
      1000,
      SI_PREFIXES.map((p) => {
        return p + (unit === "bytes/s" ? "B/s" : unit);
      }),
    );
  }
  const text = Number.isInteger(value) ? formatCount(value) : formatDigits(value);
  if (!unit || unit === "count") {
    return text;
  }
  return text + (unit === "%" ? "" : " ") + unit;
}

export function prefersReducedMotion() {
  return window.matchMedia("(prefers-reduced-motion: reduce)").matches;
}
