// Timeline: the controls beside the picture: toolbar, details, statistics, table, hover card.
// Everything from a trace goes in as text, never as markup.

import { ranges } from "./data.js";
import * as ui from "./ui.js";

const KEYS = [
  ["W S", "zoom in, out"],
  ["A D  ← →", "pan (with shift: further)"],
  ["↑ ↓", "scroll the lanes"],
  ["F", "fit the selection, then everything"],
  ["/", "search; Enter next, shift+Enter previous"],
  ["N", "next match (with shift: previous)"],
  ["[ ]", "previous, next slice in the lane"],
  ["Enter", "select a slice in view; then zoom to it"],
  ["Z", "zoom to the selected range"],
  ["Esc", "clear the selection"],
  ["P", "show or hide the panel"],
  ["wheel", "scroll the lanes"],
  ["ctrl or ⌘+wheel", "zoom (or pinch)"],
  ["shift+wheel", "pan"],
  ["drag", "select a range and show its statistics"],
  ["shift+drag", "pan"],
  ["drag on the axis", "zoom to that range"],
];

// Findings about events; others (memory that grows, clocks that fall) have nothing to outline.
function hasEvents(finding) {
  return finding.places.length || finding.edits;
}

function button(label, title, onclick, cls) {
  return ui.el("button", {
    type: "button",
    cls: "tl-button " + (cls || ""),
    title,
    "aria-label": title,
    onclick,
    text: label,
  });
}

// A line of a list that leads somewhere: what it is, and a figure beside it.
function linkItem(text, figure, onclick) {
  return ui.el("li", {}, [
    ui.el("button", { type: "button", cls: "tl-link", onclick }, [
      ui.el("span", { text }),
      ui.el("span", { cls: "num", text: figure }),
    ]),
  ]);
}

function storedState(value) {
  try {
    if (value) {
      localStorage.setItem("advisor-timeline-panel", value);
    }
    return localStorage.getItem("advisor-timeline-panel");
  } catch {
    return null; /* storage is switched off */
  }
}

export class Panel {
  /** @type {Record<string, number>} */
  timers = {};

  constructor(timeline) {
    this.t = timeline;
    this.build();
  }

  build() {
    const t = this.t;
    const self = this;
    this.search = ui.el("input", {
      type: "search",
      cls: "tl-search",
      placeholder: "Search names  /",
      "aria-label": "Search names",
      maxlength: 200,
      autocomplete: "off",
      spellcheck: "false",
    });
    this.search.addEventListener("keydown", (e) => {
      if (e.key === "Enter") {
        e.preventDefault();
        t.find(self.search.value, e.shiftKey);
      }
      if (e.key === "Escape") {
        self.search.value = "";
        t.setQuery("");
        t.stage.focus();
        e.stopPropagation();
      }
    });
    this.search.addEventListener("input", () => {
      self.later("search", 250, () => {
        t.setQuery(self.search.value);
      });
    });
    this.hits = ui.el("span", { cls: "tl-hits", "aria-live": "polite" });
    this.rank = ui.el("select", {
      cls: "tl-select",
      "aria-label": "Rank",
      onchange() {
        t.setRank(Number(self.rank.value));
      },
    });
    this.rankBox = ui.el("label", { cls: "tl-field", hidden: true }, [
      ui.el("span", { text: "Rank" }),
      this.rank,
    ]);
    this.focus = ui.el("select", {
      cls: "tl-select tl-focus",
      "aria-label": "Highlight a finding",
      onchange() {
        t.setFinding(self.focus.value, true);
      },
    });
    this.beside = ui.el("select", {
      cls: "tl-select tl-beside",
      hidden: true,
      "aria-label": "Compare with",
      onchange() {
        t.setBeside(self.beside.value);
      },
    });
    this.frames = button(
      "Library frames",
      "Frames of PyTorch, the standard library and installed packages",
      () => {
        t.setLibraries(!t.libraries);
      },
    );
    this.frames.hidden = true;
    this.opener = button("Panel", "Panel: details, findings and colours (P)", () => {
      self.toggle();
    });
    this.open = storedState() === "open";
    this.bar = ui.el("div", { cls: "tl-bar", role: "toolbar", "aria-label": "Timeline" }, [
      this.rankBox,
      ui.el("div", { cls: "tl-find" }, [
        this.search,
        button("‹", "Previous match", () => {
          t.find(self.search.value, true);
        }),
        button("›", "Next match", () => {
          t.find(self.search.value, false);
        }),
        this.hits,
      ]),
      this.focus,
      this.beside,
      ui.el("div", { cls: "tl-buttons" }, [
        this.frames,
        button("−", "Zoom out (S)", () => {
          t.zoom(1.6, 0.5, true);
        }),
        button("+", "Zoom in (W)", () => {
          t.zoom(1 / 1.6, 0.5, true);
        }),
        button("Fit", "Fit (F)", () => {
          t.fit();
        }),
        this.opener,
        button("?", "Keys", () => {
          self.help();
        }),
      ]),
    ]);
    this.side = ui.el("aside", { cls: "tl-side", "aria-label": "Details", tabindex: "0" });
    this.card = ui.el("div", { cls: "tl-card", hidden: true, "aria-hidden": "true" });
    this.status = ui.el("p", { cls: "tl-status", role: "status" });
    this.body = ui.el("tbody");
    this.caption = ui.el("caption");
    this.table = ui.el("details", { cls: "tl-table" }, [
      ui.el("summary", { text: "Table of visible slices" }),
      ui.el(
        "div",
        { cls: "tl-table-box", tabindex: "0", role: "region", "aria-label": "Visible slices" },
        [
          ui.el("table", {}, [
            this.caption,
            ui.el("thead", {}, [
              ui.el(
                "tr",
                {},
                ["Name", "Lane", "Category", "Start", "Duration"].map((name) => {
                  return ui.el("th", { scope: "col", text: name });
                }),
              ),
            ]),
            this.body,
          ]),
        ],
      ),
    ]);
    this.table.addEventListener("toggle", () => {
      self.fillTable();
    });
    this.dialog = ui.el("dialog", { cls: "tl-help", "aria-label": "Keys" }, [
      ui.el("h2", { text: "Keys and gestures" }),
      ui.el(
        "dl",
        {},
        KEYS.reduce((all, k) => {
          return all.concat([ui.el("dt", { text: k[0] }), ui.el("dd", { text: k[1] })]);
        }, []),
      ),
      button("Close", "Close", () => {
        self.dialog.close();
      }),
    ]);
  }

  later(name, ms, f) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(f, ms);
  }

  help() {
    if (!this.dialog.open) {
      this.dialog.showModal();
    }
  }

  // Once the run is known: ranks and findings to choose from.
  options(info) {
    const t = this.t;
    const self = this;
    this.rank.replaceChildren.apply(
      this.rank,
      info.ranks.map((rank) => {
        return ui.el("option", {
          value: rank,
          selected: rank === info.rank,
          text: rank < 0 ? "unknown" : String(rank),
        });
      }),
    );
    this.rankBox.hidden = info.ranks.length < 2;
    this.focus.replaceChildren(
      ui.el("option", {
        value: "",
        text: info.findings.some(hasEvents) ? "Highlight a finding…" : "No findings to show",
      }),
    );
    info.findings.filter(hasEvents).forEach((finding) => {
      self.focus.appendChild(
        ui.el("option", {
          value: finding.key,
          selected: finding.key === t.finding,
          text: finding.title,
        }),
      );
    });
    this.focus.disabled = !info.findings.some(hasEvents);
    this.frames.hidden = !info.frames;
    this.frames.textContent = t.libraries ? "Hide library frames" : "Show library frames";
    this.frames.setAttribute("aria-label", this.frames.textContent);
    const others = [];
    info.ranks.forEach((rank) => {
      if (rank !== info.rank) {
        others.push(["rank:" + rank, "rank " + rank]);
      }
    });
    info.runs.forEach((run) => {
      if (run.key !== t.runKey()) {
        others.push(["run:" + run.key, run.name]);
      }
    });
    this.beside.replaceChildren.apply(
      this.beside,
      [["", "Compare with…"]].concat(others).map((pair) => {
        return ui.el("option", {
          value: pair[0],
          selected: pair[0] === t.beside_,
          text: pair[0] ? "With: " + pair[1] : pair[1],
        });
      }),
    );
    this.beside.hidden = !others.length;
  }

  showMatchCount(answer) {
    this.hits.textContent = !answer
      ? ""
      : answer.total
        ? (answer.at === undefined ? "" : ui.formatCount(answer.at + 1) + " of ") +
          ui.formatCount(answer.total)
        : "no match";
  }

  // Only what was asked for opens the panel by itself: details, a range, an outlined finding.
  show(children, asked) {
    this.side.replaceChildren.apply(this.side, children.filter(Boolean));
    this.asked = Boolean(asked);
    this.t.sides();
  }

  toggle() {
    const t = this.t;
    const both = [t, t.partner].filter(Boolean);
    const shut = both.every((one) => {
      return one.panel.side.hidden;
    });
    this.open = shut;
    storedState(shut ? "open" : "shut");
    if (!shut) {
      both.forEach((one) => {
        one.panel.asked = false;
      });
    }
    t.sides();
  }

  chip(category, label) {
    const colour = this.t.data.info.categories.filter((c) => {
      return c[1] === category;
    })[0];
    const dot = ui.el("span", { cls: "tl-dot" });
    if (colour) {
      dot.style.background = colour[2];
    }
    return ui.el("span", { cls: "tl-chip" }, [dot, label || category]);
  }

  details(slice) {
    const t = this.t;
    const self = this;
    const groups = [];
    const by = {};
    (slice.links || []).forEach((link) => {
      if (!by[link.kind]) {
        by[link.kind] = [];
        groups.push(link.kind);
      }
      by[link.kind].push(link);
    });
    this.show(
      [
        ui.el("div", { cls: "tl-head" }, [
          ui.el("h2", { cls: "tl-name", text: slice.name }),
          button(
            "×",
            "Close details",
            () => {
              t.choose(null);
            },
            "plain",
          ),
        ]),
        ui.el("p", { cls: "tl-where" }, [
          this.chip(slice.category),
          ui.el("span", { text: slice.group }),
        ]),
        ui.el("p", { cls: "tl-big" }, [
          ui.el("strong", { text: ui.formatDuration(slice.dur) }),
          " from " + ui.formatInstant(slice.ts, Math.max(slice.dur / 100, 1)),
        ]),
        slice.line
          ? ui.el("p", { cls: "tl-line" }, [
              ui.el("code", {
                text: slice.line.file + (slice.line.line ? ":" + slice.line.line : ""),
              }),
              slice.line["function"] ? ui.el("span", { text: slice.line["function"] }) : null,
            ])
          : null,
        ui.el("div", { cls: "tl-actions" }, [
          button("Zoom to it", "Zoom to it (Enter)", () => {
            t.zoomTo(slice);
          }),
          button("‹ Previous", "Previous slice in this lane ([)", () => {
            t.beside(-1);
          }),
          button("Next ›", "Next slice in this lane (])", () => {
            t.beside(1);
          }),
          button("Find all", "Search this name", () => {
            self.search.value = slice.name.slice(0, 200);
            t.find(self.search.value, false, true);
          }),
        ]),
      ].concat(
        groups.map((kind) => {
          return ui.el("section", { cls: "tl-links" }, [
            ui.el("h3", { text: kind.charAt(0).toUpperCase() + kind.slice(1) }),
            ui.el(
              "ul",
              {},
              by[kind].map((link) => {
                return linkItem(link.label, ui.formatDuration(link.dur), () => {
                  t.go(link);
                });
              }),
            ),
          ]);
        }),
        [(slice.facts || []).length ? facts(slice.facts) : null],
      ),
      true,
    );
  }

  range(stats) {
    const t = this.t;
    const span = stats.x1 - stats.x0;
    const children = [
      ui.el("div", { cls: "tl-head" }, [
        ui.el("h2", { text: ui.formatDuration(span) + " selected" }),
        button(
          "×",
          "Clear the range",
          () => {
            t.setRange(null);
          },
          "plain",
        ),
      ]),
      ui.el("div", { cls: "tl-actions" }, [
        button("Zoom to it", "Zoom to the range (Z)", () => {
          t.zoomToRange();
        }),
      ]),
    ];
    if (stats.device) {
      const busy = stats.measured - stats.device.idle;
      children.push(
        ui.el("p", { cls: "tl-big" }, [
          ui.el("strong", { text: ui.formatShare(busy, stats.measured) }),
          " of " + ui.formatDuration(stats.measured) + " in analysed steps with a busy GPU",
        ]),
      );
      children.push(
        facts(
          Object.keys(stats.device)
            .filter((k) => {
              return stats.device[k];
            })
            .map((k) => {
              return [
                k,
                ui.formatDuration(stats.device[k]) +
                  " · " +
                  ui.formatShare(stats.device[k], stats.measured),
              ];
            }),
        ),
      );
      if (stats.idle.length) {
        children.push(ui.el("h3", { text: "Idle, by cause" }));
        children.push(
          facts(
            stats.idle.map((c) => {
              return [
                c.label,
                ui.formatDuration(c.ns) + " · " + ui.formatShare(c.ns, stats.measured),
              ];
            }),
          ),
        );
      }
    } else {
      children.push(
        ui.el("p", {
          cls: "dim",
          text: "No GPU time here: no GPU work, or outside the analysed steps.",
        }),
      );
    }
    [
      ["kernels", "GPU work"],
      ["operators", "Operators, with their children"],
      ["calls", "Runtime calls"],
    ].forEach((part) => {
      const of = stats[part[0]];
      if (!of.count) {
        return;
      }
      children.push(ui.el("h3", { text: part[1] }));
      children.push(
        ui.el("table", { cls: "tl-stats" }, [
          ui.el("caption", {
            text:
              ui.formatCount(of.count) +
              " slices of " +
              ui.formatCount(of.names) +
              " names" +
              (of.rows.length < of.names ? "; top " + of.rows.length : ""),
          }),
          ui.el("thead", {}, [
            ui.el(
              "tr",
              {},
              ["Name", "Count", "Total", "Mean"].map((n) => {
                return ui.el("th", { scope: "col", text: n });
              }),
            ),
          ]),
          ui.el(
            "tbody",
            {},
            of.rows.map((row) => {
              return ui.el("tr", {}, [
                ui.el("td", { title: row.name, "data-full": row.name, text: row.label }),
                ui.el("td", { cls: "num", text: ui.formatCount(row.count) }),
                ui.el("td", { cls: "num", text: ui.formatDuration(row.total) }),
                ui.el("td", { cls: "num", text: ui.formatDuration(row.mean) }),
              ]);
            }),
          ),
        ]),
      );
    });
    this.show(children, true);
  }

  // With nothing chosen: what to look at, what the colours mean, what is missing.
  welcome() {
    const t = this.t;
    const info = t.data.info;
    const self = this;
    if (!info) {
      return;
    }
    const chosen = info.findings.filter((f) => {
      return f.key === t.finding;
    })[0];
    const children = [];
    if (chosen) {
      children.push(
        ui.el("div", { cls: "tl-head" }, [
          ui.el("h2", { text: chosen.title }),
          button(
            "×",
            "Clear the highlight",
            () => {
              t.setFinding("", false);
            },
            "plain",
          ),
        ]),
      );
      children.push(
        ui.el("p", {
          cls: "dim",
          text: "Slices that the fix changes are outlined; all others are dimmed.",
        }),
      );
      if (chosen.places.length) {
        children.push(ui.el("h3", { text: "Where it costs most" }));
        children.push(
          ui.el(
            "ul",
            { cls: "tl-links" },
            chosen.places.map((place) => {
              return linkItem(place.label || "worst instance", ui.formatDuration(place.dur), () => {
                t.showPlace(place);
              });
            }),
          ),
        );
      }
    } else if (info.findings.some(hasEvents)) {
      children.push(ui.el("h2", { text: "Findings" }));
      children.push(
        ui.el(
          "ul",
          { cls: "tl-links" },
          info.findings
            .filter(hasEvents)
            .slice(0, 12)
            .map((f) => {
              return linkItem(f.title, f.places.length ? "show" : "highlight", () => {
                t.setFinding(f.key, true);
              });
            }),
        ),
      );
    }
    children.push(ui.el("h2", { text: "Colours in view" }));
    this.legend = ui.el("div");
    children.push(this.legend);
    if (info.notes.length) {
      children.push(ui.el("h2", { text: "Not in this trace" }));
      children.push(
        ui.el(
          "ul",
          { cls: "tl-notes" },
          info.notes.map((note) => {
            return ui.el("li", { text: note });
          }),
        ),
      );
    }
    children.push(
      ui.el("p", {
        cls: "dim tl-hint",
        text:
          "Wheel: scroll. Ctrl or ⌘+wheel: zoom. Shift+wheel: pan. " +
          "Drag: select a range. / searches; ? lists all keys.",
      }),
    );
    this.show(children, chosen);
    self.colours();
  }

  // The colours in view, by what they are colours of.
  colours() {
    const t = this.t;
    const seen = {};
    const answer = t.answer;
    let i;
    const info = t.data.info;
    const children = [];
    if (!this.legend || !this.legend.isConnected || !answer) {
      return;
    }
    for (i = 0; i < answer.slices.n; i++) {
      seen[answer.slices.category[i]] = true;
    }
    for (i = 0; i < answer.runs.n; i++) {
      seen[answer.runs.category[i]] = true;
    }
    const key = Object.keys(seen).join();
    if (this.legendKey === key && this.legend.childNodes.length) {
      return;
    }
    this.legendKey = key;
    info.sets.forEach((set) => {
      const items = [];
      for (let c = set[1]; c < set[1] + set[2]; c++) {
        if (!seen[c]) {
          continue;
        }
        const dot = ui.el("span", { cls: "tl-dot" });
        dot.style.background = info.categories[c][2];
        items.push(ui.el("li", {}, [dot, info.categories[c][1]]));
      }
      if (items.length) {
        children.push(ui.el("h3", { text: set[0] }), ui.el("ul", { cls: "tl-legend" }, items));
      }
    });
    this.legend.replaceChildren.apply(this.legend, children);
  }

  hover(slice, x, y) {
    const card = this.card;
    const t = this.t;
    if (!slice) {
      card.hidden = true;
      return;
    }
    if (slice.counter) {
      card.replaceChildren(
        ui.el("p", { text: slice.counter }),
        ui.el("strong", { text: slice.value }),
      );
    } else {
      card.replaceChildren(
        ui.el("p", { cls: "tl-name", text: slice.name || "…" }),
        ui.el("p", {}, [
          ui.el("strong", { text: ui.formatDuration(slice.dur) }),
          this.chip(slice.label, ""),
        ]),
        ui.el("p", {
          cls: "dim",
          text: slice.count > 1 ? "the longest of " + ui.formatCount(slice.count) + " here" : "",
        }),
      );
    }
    card.hidden = false;
    const box = card.getBoundingClientRect();
    let left = x + 14;
    let top = y + 16;
    if (left + box.width > t.stage.clientWidth - 8) {
      left = Math.max(x - box.width - 12, 4);
    }
    if (top + box.height > t.stage.clientHeight - 4) {
      top = Math.max(y - box.height - 10, 4);
    }
    card.style.transform = "translate(" + Math.round(left) + "px," + Math.round(top) + "px)";
  }

  // The wheel was turned where there is nothing to scroll: perhaps a zoom was meant.
  hintZoom() {
    this.tipped = true;
    this.showStatus();
  }

  showStatus() {
    const t = this.t;
    if (!t.answer) {
      return;
    }
    this.status.textContent =
      ui.formatDuration(t.x1 - t.x0) +
      " shown, from " +
      ui.formatInstant(t.x0, Math.max((t.x1 - t.x0) / 1000, 1)) +
      " · " +
      ui.formatCount(t.data.info.slices) +
      " slices in total" +
      (t.data.info.device ? " · " + t.data.info.device : "") +
      (t.data.info.notes.length
        ? " · " + t.data.info.notes.length + " not recorded (see the panel)"
        : "") +
      (this.tipped ? " · ctrl or ⌘+wheel zooms" : "");
  }

  fillTable() {
    const t = this.t;
    const self = this;
    if (!this.table.open || !t.data.info) {
      return;
    }
    const lanes = t.data.info.groups.reduce((all, g) => {
      for (let i = 0; i < (t.folded[g.key] ? 1 : g.count) && all.length < 900; i++) {
        all.push(g.first + i);
      }
      return all;
    }, []);
    const wanted = { x0: Math.floor(t.x0), x1: Math.ceil(t.x1), lanes: ranges(lanes) };
    const data = t.data;
    const key = JSON.stringify(wanted);
    if (data.tabled === key) {
      return;
    } // new rows would take the focus from the old ones
    data.tabled = key;
    data.json("table", wanted).then(
      (answer) => {
        if (t.data !== data || data.tabled !== key) {
          return;
        }
        self.caption.textContent =
          answer.total > answer.rows.length
            ? "The " +
              answer.rows.length +
              " longest of " +
              ui.formatCount(answer.total) +
              " visible slices, by start time"
            : ui.formatCount(answer.total) + " visible slices, by start time";
        const focused = self.body.contains(document.activeElement)
          ? /** @type {HTMLElement} */ (document.activeElement).dataset.slice
          : null;
        self.body.replaceChildren.apply(
          self.body,
          answer.rows.map((row) => {
            const button = ui.el(
              "button",
              {
                type: "button",
                cls: "tl-link",
                title: row.name,
                onclick() {
                  t.go(row);
                },
              },
              [ui.el("span", { "data-full": row.name, text: row.label })],
            );
            button.dataset.slice = row.id;
            return ui.el("tr", {}, [
              ui.el("th", { scope: "row" }, [button]),
              ui.el("td", { text: row.group }),
              ui.el("td", { text: row.category }),
              ui.el("td", {
                cls: "num",
                text: ui.formatInstant(row.ts, Math.max(row.dur / 100, 1)),
              }),
              ui.el("td", { cls: "num", text: ui.formatDuration(row.dur) }),
            ]);
          }),
        );
        if (focused !== null) {
          const again = Array.from(self.body.querySelectorAll("button")).find((b) => {
            return b.dataset.slice === focused;
          });
          if (again) {
            again.focus({ preventScroll: true });
          }
        }
      },
      (error) => {
        if (t.data !== data || data.tabled !== key) {
          return;
        }
        data.tabled = "";
        self.caption.textContent = error.message;
      },
    );
  }
}

// -- the side panel ----------------------------------------------------------------------------

function facts(rows) {
  return ui.el(
    "dl",
    { cls: "tl-facts" },
    rows.reduce((all, row) => {
      const value = ui.formatQuantity(row[1], row[2]);
      const long = value.length > 26;
      return all.concat([
        ui.el("dt", { text: row[0] }),
        ui.el("dd", { cls: long ? "long" : "", text: value }),
      ]);
    }, []),
  );
}

// -- hover card, status, table -----------------------------------------------------------------
