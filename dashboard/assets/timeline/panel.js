// Panel of the timeline: toolbar, details, statistics, table and hover card. Text from a trace is
// always inserted as text, never as markup.

import { formatRanges } from "./data.js";
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

// Returns whether a finding is about events. Others, such as memory growth, cannot be highlighted.
function hasEvents(finding) {
  return finding.places.length || finding.edits;
}

// Builds a button.
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

// Builds a list item with a link and a figure beside it.
function linkItem(text, figure, onclick) {
  return ui.el("li", {}, [
    ui.el("button", { type: "button", cls: "tl-link", onclick }, [
      ui.el("span", { text }),
      ui.el("span", { cls: "num", text: figure }),
    ]),
  ]);
}

// Returns whether the panel was left "open" or "shut"; null if unknown.
function readStoredState() {
  try {
    return localStorage.getItem("advisor-timeline-panel");
  } catch {
    return null; /* storage is switched off */
  }
}

// Stores whether the panel is "open" or "shut".
function storeState(state) {
  try {
    localStorage.setItem("advisor-timeline-panel", state);
  } catch {
    /* storage is switched off */
  }
}

// Toolbar, side panel, hover card and table of one timeline.
export class Panel {
  /** @type {Record<string, number>} */
  timers = {};

  constructor(timeline) {
    this.timeline = timeline;
    this.build();
  }

  // Creates the elements.
  build() {
    const timeline = this.timeline;
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
        timeline.findMatch(this.search.value, e.shiftKey);
      }
      if (e.key === "Escape") {
        this.search.value = "";
        timeline.setQuery("");
        timeline.stage.focus();
        e.stopPropagation();
      }
    });
    this.search.addEventListener("input", () => {
      this.debounce("search", 250, () => {
        timeline.setQuery(this.search.value);
      });
    });
    this.matchCount = ui.el("span", { cls: "tl-match-count", "aria-live": "polite" });
    this.rankSelect = ui.el("select", {
      cls: "tl-select",
      "aria-label": "Rank",
      onchange: () => {
        timeline.setRank(Number(this.rankSelect.value));
      },
    });
    this.rankBox = ui.el("label", { cls: "tl-field", hidden: true }, [
      ui.el("span", { text: "Rank" }),
      this.rankSelect,
    ]);
    this.findingSelect = ui.el("select", {
      cls: "tl-select tl-focus",
      "aria-label": "Highlight a finding",
      onchange: () => {
        timeline.setFinding(this.findingSelect.value, true);
      },
    });
    this.compareSelect = ui.el("select", {
      cls: "tl-select tl-compare",
      hidden: true,
      "aria-label": "Compare with",
      onchange: () => {
        timeline.setCompared(this.compareSelect.value);
      },
    });
    this.libraryButton = button(
      "Library frames",
      "Frames of PyTorch, the standard library and installed packages",
      () => {
        timeline.setLibraries(!timeline.libraries);
      },
    );
    this.libraryButton.hidden = true;
    this.panelButton = button("Panel", "Panel: details, findings and colors (P)", () => {
      this.toggle();
    });
    this.isOpen = readStoredState() === "open";
    this.toolbar = ui.el("div", { cls: "tl-bar", role: "toolbar", "aria-label": "Timeline" }, [
      this.rankBox,
      ui.el("div", { cls: "tl-find" }, [
        this.search,
        button("‹", "Previous match", () => {
          timeline.findMatch(this.search.value, true);
        }),
        button("›", "Next match", () => {
          timeline.findMatch(this.search.value, false);
        }),
        this.matchCount,
      ]),
      this.findingSelect,
      this.compareSelect,
      ui.el("div", { cls: "tl-buttons" }, [
        this.libraryButton,
        button("−", "Zoom out (S)", () => {
          timeline.zoom(1.6, 0.5, true);
        }),
        button("+", "Zoom in (W)", () => {
          timeline.zoom(1 / 1.6, 0.5, true);
        }),
        button("Fit", "Fit (F)", () => {
          timeline.fit();
        }),
        this.panelButton,
        button("?", "Keys", () => {
          this.showHelp();
        }),
      ]),
    ]);
    this.side = ui.el("aside", { cls: "tl-side", "aria-label": "Details", tabindex: "0" });
    this.hoverCard = ui.el("div", { cls: "tl-card", hidden: true, "aria-hidden": "true" });
    this.status = ui.el("p", { cls: "tl-status", role: "status" });
    this.tableBody = ui.el("tbody");
    this.tableCaption = ui.el("caption");
    this.table = ui.el("details", { cls: "tl-table" }, [
      ui.el("summary", { text: "Table of visible slices" }),
      ui.el(
        "div",
        { cls: "tl-table-box", tabindex: "0", role: "region", "aria-label": "Visible slices" },
        [
          ui.el("table", {}, [
            this.tableCaption,
            ui.el("thead", {}, [
              ui.el(
                "tr",
                {},
                ["Name", "Lane", "Category", "Start", "Duration"].map((name) => {
                  return ui.el("th", { scope: "col", text: name });
                }),
              ),
            ]),
            this.tableBody,
          ]),
        ],
      ),
    ]);
    this.table.addEventListener("toggle", () => {
      this.fillTable();
    });
    this.helpDialog = ui.el("dialog", { cls: "tl-help", "aria-label": "Keys" }, [
      ui.el("h2", { text: "Keys and gestures" }),
      ui.el(
        "dl",
        {},
        KEYS.reduce((all, k) => {
          return all.concat([ui.el("dt", { text: k[0] }), ui.el("dd", { text: k[1] })]);
        }, []),
      ),
      button("Close", "Close", () => {
        this.helpDialog.close();
      }),
    ]);
  }

  // Runs an action after a delay, unless it is requested again before.
  debounce(name, delayMs, action) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(action, delayMs);
  }

  // Shows the list of keys.
  showHelp() {
    if (!this.helpDialog.open) {
      this.helpDialog.showModal();
    }
  }

  // Fills the lists of ranks, findings and runs after the trace's structure is loaded.
  fillOptions(info) {
    const timeline = this.timeline;
    this.rankSelect.replaceChildren.apply(
      this.rankSelect,
      info.ranks.map((rank) => {
        return ui.el("option", {
          value: rank,
          selected: rank === info.rank,
          text: rank < 0 ? "unknown" : String(rank),
        });
      }),
    );
    this.rankBox.hidden = info.ranks.length < 2;
    this.findingSelect.replaceChildren(
      ui.el("option", {
        value: "",
        text: info.findings.some(hasEvents) ? "Highlight a finding…" : "No findings to show",
      }),
    );
    info.findings.filter(hasEvents).forEach((finding) => {
      this.findingSelect.appendChild(
        ui.el("option", {
          value: finding.key,
          selected: finding.key === timeline.finding,
          text: finding.title,
        }),
      );
    });
    this.findingSelect.disabled = !info.findings.some(hasEvents);
    this.libraryButton.hidden = !info.frames;
    this.libraryButton.textContent = timeline.libraries
      ? "Hide library frames"
      : "Show library frames";
    this.libraryButton.setAttribute("aria-label", this.libraryButton.textContent);
    const others = [];
    info.ranks.forEach((rank) => {
      if (rank !== info.rank) {
        others.push(["rank:" + rank, "rank " + rank]);
      }
    });
    info.runs.forEach((run) => {
      if (run.key !== timeline.runKey()) {
        others.push(["run:" + run.key, run.name]);
      }
    });
    this.compareSelect.replaceChildren.apply(
      this.compareSelect,
      [["", "Compare with…"]].concat(others).map((pair) => {
        return ui.el("option", {
          value: pair[0],
          selected: pair[0] === timeline.comparedKey,
          text: pair[0] ? "With: " + pair[1] : pair[1],
        });
      }),
    );
    this.compareSelect.hidden = !others.length;
  }

  // Shows the number of matches, and which of them is selected.
  showMatchCount(answer) {
    this.matchCount.textContent = !answer
      ? ""
      : answer.total
        ? (answer.at === undefined ? "" : ui.formatCount(answer.at + 1) + " of ") +
          ui.formatCount(answer.total)
        : "no match";
  }

  // Shows content in the side panel. Content that the user requested opens a closed panel.
  showSide(children, isRequested) {
    this.side.replaceChildren.apply(this.side, children.filter(Boolean));
    this.isRequested = Boolean(isRequested);
    this.timeline.updatePanels();
  }

  // Opens or closes the side panel, and remembers that.
  toggle() {
    const timeline = this.timeline;
    const timelines = [timeline, timeline.compared].filter(Boolean);
    const areClosed = timelines.every((each) => {
      return each.panel.side.hidden;
    });
    this.isOpen = areClosed;
    storeState(areClosed ? "open" : "shut");
    if (!areClosed) {
      timelines.forEach((each) => {
        each.panel.isRequested = false;
      });
    }
    timeline.updatePanels();
  }

  // Builds a label with the color of a category.
  categoryChip(category, label) {
    const entry = this.timeline.data.info.categories.filter((candidate) => {
      return candidate[1] === category;
    })[0];
    const dot = ui.el("span", { cls: "tl-dot" });
    if (entry) {
      dot.style.background = entry[2];
    }
    return ui.el("span", { cls: "tl-chip" }, [dot, label || category]);
  }

  // Shows the details of a slice.
  showDetails(slice) {
    const timeline = this.timeline;
    const kinds = [];
    const linksByKind = {};
    (slice.links || []).forEach((link) => {
      if (!linksByKind[link.kind]) {
        linksByKind[link.kind] = [];
        kinds.push(link.kind);
      }
      linksByKind[link.kind].push(link);
    });
    this.showSide(
      [
        ui.el("div", { cls: "tl-head" }, [
          ui.el("h2", { cls: "tl-name", text: slice.name }),
          button(
            "×",
            "Close details",
            () => {
              timeline.setSelectedSlice(null);
            },
            "plain",
          ),
        ]),
        ui.el("p", { cls: "tl-where" }, [
          this.categoryChip(slice.category),
          ui.el("span", { text: slice.group }),
        ]),
        ui.el("p", { cls: "tl-headline" }, [
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
            timeline.zoomTo(slice);
          }),
          button("‹ Previous", "Previous slice in this lane ([)", () => {
            timeline.selectNeighbor(-1);
          }),
          button("Next ›", "Next slice in this lane (])", () => {
            timeline.selectNeighbor(1);
          }),
          button("Find all", "Search this name", () => {
            this.search.value = slice.name.slice(0, 200);
            timeline.findMatch(this.search.value, false, true);
          }),
        ]),
      ].concat(
        kinds.map((kind) => {
          return ui.el("section", { cls: "tl-links" }, [
            ui.el("h3", { text: kind.charAt(0).toUpperCase() + kind.slice(1) }),
            ui.el(
              "ul",
              {},
              linksByKind[kind].map((link) => {
                return linkItem(link.label, ui.formatDuration(link.dur), () => {
                  timeline.goToSlice(link);
                });
              }),
            ),
          ]);
        }),
        [(slice.facts || []).length ? factList(slice.facts) : null],
      ),
      true,
    );
  }

  // Shows the statistics of a range.
  showRange(stats) {
    const timeline = this.timeline;
    const span = stats.x1 - stats.x0;
    const children = [
      ui.el("div", { cls: "tl-head" }, [
        ui.el("h2", { text: ui.formatDuration(span) + " selected" }),
        button(
          "×",
          "Clear the range",
          () => {
            timeline.setRange(null);
          },
          "plain",
        ),
      ]),
      ui.el("div", { cls: "tl-actions" }, [
        button("Zoom to it", "Zoom to the range (Z)", () => {
          timeline.zoomToRange();
        }),
      ]),
    ];
    if (stats.device) {
      const busy = stats.measured - stats.device.idle;
      children.push(
        ui.el("p", { cls: "tl-headline" }, [
          ui.el("strong", { text: ui.formatShare(busy, stats.measured) }),
          " of " + ui.formatDuration(stats.measured) + " in analysed steps with a busy GPU",
        ]),
      );
      children.push(
        factList(
          Object.keys(stats.device)
            .filter((name) => {
              return stats.device[name];
            })
            .map((name) => {
              return [
                name,
                ui.formatDuration(stats.device[name]) +
                  " · " +
                  ui.formatShare(stats.device[name], stats.measured),
              ];
            }),
        ),
      );
      if (stats.idle.length) {
        children.push(ui.el("h3", { text: "Idle, by cause" }));
        children.push(
          factList(
            stats.idle.map((cause) => {
              return [
                cause.label,
                ui.formatDuration(cause.ns) + " · " + ui.formatShare(cause.ns, stats.measured),
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
    ].forEach((section) => {
      const statistics = stats[section[0]];
      if (!statistics.count) {
        return;
      }
      children.push(ui.el("h3", { text: section[1] }));
      children.push(
        ui.el("table", { cls: "tl-stats" }, [
          ui.el("caption", {
            text:
              ui.formatCount(statistics.count) +
              " slices of " +
              ui.formatCount(statistics.names) +
              " names" +
              (statistics.rows.length < statistics.names ? "; top " + statistics.rows.length : ""),
          }),
          ui.el("thead", {}, [
            ui.el(
              "tr",
              {},
              ["Name", "Count", "Total", "Mean"].map((title) => {
                return ui.el("th", { scope: "col", text: title });
              }),
            ),
          ]),
          ui.el(
            "tbody",
            {},
            statistics.rows.map((row) => {
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
    this.showSide(children, true);
  }

  // Shows findings, the legend and notes on missing data, while nothing is selected.
  showWelcome() {
    const timeline = this.timeline;
    const info = timeline.data.info;
    if (!info) {
      return;
    }
    const finding = info.findings.filter((each) => {
      return each.key === timeline.finding;
    })[0];
    const children = [];
    if (finding) {
      children.push(
        ui.el("div", { cls: "tl-head" }, [
          ui.el("h2", { text: finding.title }),
          button(
            "×",
            "Clear the highlight",
            () => {
              timeline.setFinding("", false);
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
      if (finding.places.length) {
        children.push(ui.el("h3", { text: "Where it costs most" }));
        children.push(
          ui.el(
            "ul",
            { cls: "tl-links" },
            finding.places.map((place) => {
              return linkItem(place.label || "worst instance", ui.formatDuration(place.dur), () => {
                timeline.showPlace(place);
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
            .map((each) => {
              return linkItem(each.title, each.places.length ? "show" : "highlight", () => {
                timeline.setFinding(each.key, true);
              });
            }),
        ),
      );
    }
    children.push(ui.el("h2", { text: "Colors in view" }));
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
    this.showSide(children, finding);
    this.updateLegend();
  }

  // Updates the legend with the categories in view.
  updateLegend() {
    const timeline = this.timeline;
    const shownCategories = {};
    const answer = timeline.answer;
    let i;
    const info = timeline.data.info;
    const children = [];
    if (!this.legend || !this.legend.isConnected || !answer) {
      return;
    }
    for (i = 0; i < answer.slices.n; i++) {
      shownCategories[answer.slices.category[i]] = true;
    }
    for (i = 0; i < answer.runs.n; i++) {
      shownCategories[answer.runs.category[i]] = true;
    }
    const key = Object.keys(shownCategories).join();
    if (this.legendKey === key && this.legend.childNodes.length) {
      return;
    }
    this.legendKey = key;
    info.sets.forEach((set) => {
      const items = [];
      for (let category = set[1]; category < set[1] + set[2]; category++) {
        if (!shownCategories[category]) {
          continue;
        }
        const dot = ui.el("span", { cls: "tl-dot" });
        dot.style.background = info.categories[category][2];
        items.push(ui.el("li", {}, [dot, info.categories[category][1]]));
      }
      if (items.length) {
        children.push(ui.el("h3", { text: set[0] }), ui.el("ul", { cls: "tl-legend" }, items));
      }
    });
    this.legend.replaceChildren.apply(this.legend, children);
  }

  // Shows the hover card of a slice or a counter near a point, or hides it.
  showHoverCard(slice, x, y) {
    const card = this.hoverCard;
    const timeline = this.timeline;
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
          this.categoryChip(slice.label, ""),
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
    if (left + box.width > timeline.stage.clientWidth - 8) {
      left = Math.max(x - box.width - 12, 4);
    }
    if (top + box.height > timeline.stage.clientHeight - 4) {
      top = Math.max(y - box.height - 10, 4);
    }
    card.style.transform = "translate(" + Math.round(left) + "px," + Math.round(top) + "px)";
  }

  // Adds a hint on zooming, after the wheel was turned without lanes to scroll.
  hintZoom() {
    this.hasZoomHint = true;
    this.showStatus();
  }

  // Shows the visible span and the size of the trace.
  showStatus() {
    const timeline = this.timeline;
    if (!timeline.answer) {
      return;
    }
    this.status.textContent =
      ui.formatDuration(timeline.x1 - timeline.x0) +
      " shown, from " +
      ui.formatInstant(timeline.x0, Math.max((timeline.x1 - timeline.x0) / 1000, 1)) +
      " · " +
      ui.formatCount(timeline.data.info.slices) +
      " slices in total" +
      (timeline.data.info.device ? " · " + timeline.data.info.device : "") +
      (timeline.data.info.notes.length
        ? " · " + timeline.data.info.notes.length + " not recorded (see the panel)"
        : "") +
      (this.hasZoomHint ? " · ctrl or ⌘+wheel zooms" : "");
  }

  // Fills the table of visible slices, if it is open.
  fillTable() {
    const timeline = this.timeline;
    if (!this.table.open || !timeline.data.info) {
      return;
    }
    const lanes = timeline.data.info.groups.reduce((all, group) => {
      for (let i = 0; i < (timeline.folded[group.key] ? 1 : group.count) && all.length < 900; i++) {
        all.push(group.first + i);
      }
      return all;
    }, []);
    const query = {
      x0: Math.floor(timeline.x0),
      x1: Math.ceil(timeline.x1),
      lanes: formatRanges(lanes),
    };
    const data = timeline.data;
    const key = JSON.stringify(query);
    if (data.tableKey === key) {
      return;
    } // new rows would lose the keyboard focus
    data.tableKey = key;
    data.fetchJson("table", query).then(
      (answer) => {
        if (timeline.data !== data || data.tableKey !== key) {
          return;
        }
        this.tableCaption.textContent =
          answer.total > answer.rows.length
            ? "The " +
              answer.rows.length +
              " longest of " +
              ui.formatCount(answer.total) +
              " visible slices, by start time"
            : ui.formatCount(answer.total) + " visible slices, by start time";
        const focusedId = this.tableBody.contains(document.activeElement)
          ? /** @type {HTMLElement} */ (document.activeElement).dataset.slice
          : null;
        this.tableBody.replaceChildren.apply(
          this.tableBody,
          answer.rows.map((row) => {
            const button = ui.el(
              "button",
              {
                type: "button",
                cls: "tl-link",
                title: row.name,
                onclick: () => {
                  timeline.goToSlice(row);
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
        if (focusedId !== null) {
          const focusedButton = Array.from(this.tableBody.querySelectorAll("button")).find(
            (candidate) => {
              return candidate.dataset.slice === focusedId;
            },
          );
          if (focusedButton) {
            focusedButton.focus({ preventScroll: true });
          }
        }
      },
      (error) => {
        if (timeline.data !== data || data.tableKey !== key) {
          return;
        }
        data.tableKey = "";
        this.tableCaption.textContent = error.message;
      },
    );
  }
}

// Builds a definition list of facts: (label, value, unit).
function factList(rows) {
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
