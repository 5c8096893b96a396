// Timeline, 5 of 6: the words beside the picture: toolbar, details, statistics, table, hover card.
// Everything from a trace goes in as text, never as markup.
(function () {
  "use strict";
  var T = window.advisorTimeline, el = T.el;
  if (T.Panel) { return; }

  var KEYS = [
    ["W S", "zoom in, out"], ["A D  ← →", "pan (with shift: further)"], ["↑ ↓", "scroll the lanes"],
    ["F", "fit the selection, then everything"], ["/", "search; Enter next, shift+Enter previous"],
    ["N", "next found (with shift: previous)"], ["[ ]", "slice before, after in the same lane"],
    ["Enter", "zoom to the selected slice"], ["Z", "zoom to the chosen range"], ["Esc", "let go"],
    ["wheel", "zoom"], ["shift+wheel", "pan"], ["alt+wheel", "scroll the lanes"],
    ["drag", "choose a range: its statistics"], ["shift+drag", "pan"], ["drag on the axis", "zoom to it"]
  ];

  // Findings about events; others (memory that grows, clocks that fall) have nothing to outline.
  function seen(finding) { return finding.places.length || finding.edits; }

  function button(label, title, onclick, cls) {
    return el("button", { type: "button", cls: "tl-button " + (cls || ""), title: title, "aria-label": title, onclick: onclick, text: label });
  }

  function Panel(timeline) {
    this.t = timeline;
    this.build();
  }

  Panel.prototype.build = function () {
    var t = this.t, self = this;
    this.search = el("input", {
      type: "search", cls: "tl-search", placeholder: "Search names  /", "aria-label": "Search names", maxlength: 200,
      autocomplete: "off", spellcheck: "false"
    });
    this.search.addEventListener("keydown", function (e) {
      if (e.key === "Enter") { e.preventDefault(); t.find(self.search.value, e.shiftKey); }
      if (e.key === "Escape") { self.search.value = ""; t.setQuery(""); t.stage.focus(); e.stopPropagation(); }
    });
    this.search.addEventListener("input", function () { self.later("search", 250, function () { t.setQuery(self.search.value); }); });
    this.hits = el("span", { cls: "tl-hits", "aria-live": "polite" });
    this.rank = el("select", { cls: "tl-select", "aria-label": "Rank", onchange: function () { t.setRank(Number(self.rank.value)); } });
    this.rankBox = el("label", { cls: "tl-field", hidden: true }, [el("span", { text: "Rank" }), this.rank]);
    this.focus = el("select", { cls: "tl-select tl-focus", "aria-label": "Outline a finding", onchange: function () { t.setFinding(self.focus.value, true); } });
    this.bar = el("div", { cls: "tl-bar", role: "toolbar", "aria-label": "Timeline" }, [
      this.rankBox,
      el("div", { cls: "tl-find" }, [
        this.search, button("‹", "Previous found", function () { t.find(self.search.value, true); }),
        button("›", "Next found", function () { t.find(self.search.value, false); }), this.hits
      ]),
      this.focus,
      el("div", { cls: "tl-buttons" }, [
        button("−", "Zoom out (S)", function () { t.zoom(1.6, 0.5, true); }),
        button("+", "Zoom in (W)", function () { t.zoom(1 / 1.6, 0.5, true); }),
        button("Fit", "Fit (F)", function () { t.fit(); }),
        button("?", "Keys", function () { self.help(); })
      ])
    ]);
    this.side = el("aside", { cls: "tl-side", "aria-label": "Details", tabindex: "0" });
    this.card = el("div", { cls: "tl-card", hidden: true, "aria-hidden": "true" });
    this.status = el("p", { cls: "tl-status", role: "status" });
    this.body = el("tbody");
    this.caption = el("caption");
    this.table = el("details", { cls: "tl-table" }, [
      el("summary", { text: "Table of what is in view" }),
      el("div", { cls: "tl-table-box", tabindex: "0", role: "region", "aria-label": "Slices in view" }, [
        el("table", {}, [
          this.caption,
          el("thead", {}, [el("tr", {}, ["Name", "Lane", "What", "Start", "Duration"].map(function (name) {
            return el("th", { scope: "col", text: name });
          }))]),
          this.body
        ])
      ])
    ]);
    this.table.addEventListener("toggle", function () { self.fill(); });
    this.dialog = el("dialog", { cls: "tl-help", "aria-label": "Keys" }, [
      el("h2", { text: "Keys and gestures" }),
      el("dl", {}, KEYS.reduce(function (all, k) { return all.concat([el("dt", { text: k[0] }), el("dd", { text: k[1] })]); }, [])),
      button("Close", "Close", function () { self.dialog.close(); })
    ]);
    this.timers = {};
  };

  Panel.prototype.later = function (name, ms, f) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(f, ms);
  };

  Panel.prototype.help = function () { if (!this.dialog.open) { this.dialog.showModal(); } };

  // Once the run is known: ranks and findings to choose from.
  Panel.prototype.options = function (info) {
    var t = this.t, self = this;
    this.rank.replaceChildren.apply(this.rank, info.ranks.map(function (rank) {
      return el("option", { value: rank, selected: rank === info.rank, text: rank < 0 ? "not told" : String(rank) });
    }));
    this.rankBox.hidden = info.ranks.length < 2;
    this.focus.replaceChildren(el("option", { value: "", text: info.findings.some(seen) ? "Outline a finding…" : "No findings to show" }));
    info.findings.filter(seen).forEach(function (finding) {
      self.focus.appendChild(el("option", { value: finding.key, selected: finding.key === t.finding, text: finding.title }));
    });
    this.focus.disabled = !info.findings.some(seen);
  };

  Panel.prototype.found = function (answer) {
    this.hits.textContent = !answer ? "" : answer.total
      ? (answer.at === undefined ? "" : T.count(answer.at + 1) + " of ") + T.count(answer.total)
      : "nothing found";
  };

  // -- the side panel ----------------------------------------------------------------------------

  Panel.prototype.show = function (children) { this.side.replaceChildren.apply(this.side, children.filter(Boolean)); };

  function facts(rows) {
    return el("dl", { cls: "tl-facts" }, rows.reduce(function (all, row) {
      var value = T.quantity(row[1], row[2]), long = value.length > 26;
      return all.concat([el("dt", { text: row[0] }), el("dd", { cls: long ? "long" : "", text: value })]);
    }, []));
  }

  Panel.prototype.chip = function (category, label) {
    var colour = this.t.data.info.categories.filter(function (c) { return c[1] === category; })[0];
    var dot = el("span", { cls: "tl-dot" });
    if (colour) { dot.style.background = colour[2]; }
    return el("span", { cls: "tl-chip" }, [dot, label || category]);
  };

  Panel.prototype.details = function (slice) {
    var t = this.t, self = this, groups = [], by = {};
    (slice.links || []).forEach(function (link) {
      if (!by[link.kind]) { by[link.kind] = []; groups.push(link.kind); }
      by[link.kind].push(link);
    });
    this.show([
      el("div", { cls: "tl-head" }, [
        el("h2", { cls: "tl-name", text: slice.name }), button("×", "Close details", function () { t.choose(null); }, "plain")
      ]),
      el("p", { cls: "tl-where" }, [this.chip(slice.category), el("span", { text: slice.group })]),
      el("p", { cls: "tl-big" }, [el("strong", { text: T.time(slice.dur) }), " from " + T.instant(slice.ts, Math.max(slice.dur / 100, 1))]),
      slice.line ? el("p", { cls: "tl-line" }, [
        el("code", { text: slice.line.file + (slice.line.line ? ":" + slice.line.line : "") }),
        slice.line["function"] ? el("span", { text: slice.line["function"] }) : null
      ]) : null,
      el("div", { cls: "tl-actions" }, [
        button("Zoom to it", "Zoom to it (Enter)", function () { t.zoomTo(slice); }),
        button("‹ Before", "Slice before in this lane ([)", function () { t.beside(-1); }),
        button("After ›", "Slice after in this lane (])", function () { t.beside(1); }),
        button("Find all", "Search this name", function () { self.search.value = slice.name.slice(0, 200); t.find(self.search.value, false, true); })
      ])
    ].concat(groups.map(function (kind) {
      return el("section", { cls: "tl-links" }, [
        el("h3", { text: kind.charAt(0).toUpperCase() + kind.slice(1) }),
        el("ul", {}, by[kind].map(function (link) {
          return el("li", {}, [el("button", { type: "button", cls: "tl-link", onclick: function () { t.go(link); } }, [
            el("span", { text: T.short(link.name) }), el("span", { cls: "num", text: T.time(link.dur) })
          ])]);
        }))
      ]);
    }), [(slice.facts || []).length ? facts(slice.facts) : null]));
  };

  Panel.prototype.range = function (stats) {
    var t = this.t, span = stats.x1 - stats.x0, children = [
      el("div", { cls: "tl-head" }, [
        el("h2", { text: T.time(span) + " chosen" }), button("×", "Let go of the range", function () { t.setRange(null); }, "plain")
      ]),
      el("div", { cls: "tl-actions" }, [button("Zoom to it", "Zoom to the range (Z)", function () { t.zoomToRange(); })])
    ];
    if (stats.device) {
      var busy = stats.measured - stats.device.idle;
      children.push(el("p", { cls: "tl-big" }, [
        el("strong", { text: T.share(busy, stats.measured) }), " of " + T.time(stats.measured) + " in analysed steps the GPU was busy"
      ]));
      children.push(facts(Object.keys(stats.device).filter(function (k) { return stats.device[k]; }).map(function (k) {
        return [k, T.time(stats.device[k]) + " · " + T.share(stats.device[k], stats.measured)];
      })));
      if (stats.idle.length) {
        children.push(el("h3", { text: "Idle, by blame" }));
        children.push(facts(stats.idle.map(function (c) { return [c.label, T.time(c.ns) + " · " + T.share(c.ns, stats.measured)]; })));
      }
    } else {
      children.push(el("p", { cls: "dim", text: "No device time is measured here: no device work, or outside the analysed steps." }));
    }
    [["kernels", "GPU work"], ["operators", "Operators, with what they call"], ["calls", "Runtime calls"]].forEach(function (part) {
      var of = stats[part[0]];
      if (!of.count) { return; }
      children.push(el("h3", { text: part[1] }));
      children.push(el("table", { cls: "tl-stats" }, [
        el("caption", { text: T.count(of.count) + " slices of " + T.count(of.names) + " names" + (of.rows.length < of.names ? "; the first " + of.rows.length : "") }),
        el("thead", {}, [el("tr", {}, ["Name", "Count", "Total", "Mean"].map(function (n) { return el("th", { scope: "col", text: n }); }))]),
        el("tbody", {}, of.rows.map(function (row) {
          return el("tr", {}, [
            el("td", { title: row.name, text: T.short(row.name) }), el("td", { cls: "num", text: T.count(row.count) }),
            el("td", { cls: "num", text: T.time(row.total) }), el("td", { cls: "num", text: T.time(row.mean) })
          ]);
        }))
      ]));
    });
    this.show(children);
  };

  // With nothing chosen: what to look at, what the colours mean, what is missing.
  Panel.prototype.welcome = function () {
    var t = this.t, info = t.data.info, self = this;
    if (!info) { return; }
    var chosen = info.findings.filter(function (f) { return f.key === t.finding; })[0];
    var children = [];
    if (chosen) {
      children.push(el("div", { cls: "tl-head" }, [
        el("h2", { text: chosen.title }), button("×", "No outline", function () { t.setFinding("", false); }, "plain")
      ]));
      children.push(el("p", { cls: "dim", text: "What its fix would change is outlined; all else is dimmed." }));
      if (chosen.places.length) {
        children.push(el("h3", { text: "Where it costs most" }));
        children.push(el("ul", { cls: "tl-links" }, chosen.places.map(function (place) {
          return el("li", {}, [el("button", { type: "button", cls: "tl-link", onclick: function () { t.showPlace(place); } }, [
            el("span", { text: T.short(place.kernel || place.op || "worst instance") }), el("span", { cls: "num", text: T.time(place.dur) })
          ])]);
        })));
      }
    } else if (info.findings.some(seen)) {
      children.push(el("h2", { text: "Findings" }));
      children.push(el("ul", { cls: "tl-links" }, info.findings.filter(seen).slice(0, 12).map(function (f) {
        return el("li", {}, [el("button", { type: "button", cls: "tl-link", onclick: function () { t.setFinding(f.key, true); } }, [
          el("span", { text: f.title }), el("span", { cls: "num", text: f.places.length ? "show" : "outline" })
        ])]);
      })));
    }
    children.push(el("h2", { text: "Colours in view" }));
    this.legend = el("div");
    children.push(this.legend);
    if (info.notes.length) {
      children.push(el("h2", { text: "Not in this trace" }));
      children.push(el("ul", { cls: "tl-notes" }, info.notes.map(function (note) { return el("li", { text: note }); })));
    }
    children.push(el("p", { cls: "dim tl-hint", text: "Wheel zooms, shift+wheel pans, a drag chooses a range, / searches, ? lists all keys." }));
    this.show(children);
    self.colours();
  };

  // The colours in view, by what they are colours of.
  Panel.prototype.colours = function () {
    var t = this.t, seen = {}, answer = t.answer, i, info = t.data.info, children = [];
    if (!this.legend || !this.legend.isConnected || !answer) { return; }
    for (i = 0; i < answer.slices.n; i++) { seen[answer.slices.category[i]] = true; }
    for (i = 0; i < answer.runs.n; i++) { seen[answer.runs.category[i]] = true; }
    var key = Object.keys(seen).join();
    if (this.legendKey === key && this.legend.childNodes.length) { return; }
    this.legendKey = key;
    info.sets.forEach(function (set) {
      var items = [];
      for (var c = set[1]; c < set[1] + set[2]; c++) {
        if (!seen[c]) { continue; }
        var dot = el("span", { cls: "tl-dot" });
        dot.style.background = info.categories[c][2];
        items.push(el("li", {}, [dot, info.categories[c][1]]));
      }
      if (items.length) { children.push(el("h3", { text: set[0] }), el("ul", { cls: "tl-legend" }, items)); }
    });
    this.legend.replaceChildren.apply(this.legend, children);
  };

  // -- hover card, status, table -----------------------------------------------------------------

  Panel.prototype.hover = function (slice, x, y) {
    var card = this.card, t = this.t;
    if (!slice) { card.hidden = true; return; }
    if (slice.counter) { card.replaceChildren(el("p", { text: slice.counter }), el("strong", { text: slice.value })); }
    else { card.replaceChildren(
      el("p", { cls: "tl-name", text: slice.name || "…" }),
      el("p", {}, [el("strong", { text: T.time(slice.dur) }), this.chip(slice.label, "")]),
      el("p", { cls: "dim", text: slice.label + (slice.count > 1 ? " · the longest of " + T.count(slice.count) + " here" : "") })
    ); }
    card.hidden = false;
    var box = card.getBoundingClientRect(), left = x + 14, top = y + 16;
    if (left + box.width > t.stage.clientWidth - 8) { left = Math.max(x - box.width - 12, 4); }
    if (top + box.height > t.stage.clientHeight - 4) { top = Math.max(y - box.height - 10, 4); }
    card.style.transform = "translate(" + Math.round(left) + "px," + Math.round(top) + "px)";
  };

  Panel.prototype.say = function () {
    var t = this.t;
    if (!t.answer) { return; }
    this.status.textContent = T.time(t.x1 - t.x0) + " shown, from " + T.instant(t.x0, Math.max((t.x1 - t.x0) / 1000, 1)) + " · " +
      T.count(t.data.info.slices) + " slices in all" + (t.data.info.device ? " · " + t.data.info.device : "");
  };

  Panel.prototype.fill = function () {
    var t = this.t, self = this;
    if (!this.table.open || !t.data.info) { return; }
    var lanes = t.data.info.groups.reduce(function (all, g) {
      for (var i = 0; i < (t.folded[g.key] ? 1 : g.count) && all.length < 900; i++) { all.push(g.first + i); }
      return all;
    }, []);
    var wanted = { x0: Math.floor(t.x0), x1: Math.ceil(t.x1), lanes: T.ranges(lanes) };
    var data = t.data, key = JSON.stringify(wanted);
    if (data.tabled === key) { return; }  // new rows would take the focus from the old ones
    data.tabled = key;
    data.json("table", wanted).then(function (answer) {
      if (t.data !== data || data.tabled !== key) { return; }
      self.caption.textContent = answer.total > answer.rows.length
        ? "The " + answer.rows.length + " longest of " + T.count(answer.total) + " slices in view, in order of time"
        : T.count(answer.total) + " slices in view, in order of time";
      var focused = self.body.contains(document.activeElement) ? document.activeElement.dataset.slice : null;
      self.body.replaceChildren.apply(self.body, answer.rows.map(function (row) {
        var button = el("button", { type: "button", cls: "tl-link", title: row.name, onclick: function () { t.go(row); } }, [el("span", { text: T.short(row.name) })]);
        button.dataset.slice = row.id;
        return el("tr", {}, [
          el("th", { scope: "row" }, [button]),
          el("td", { text: row.group }), el("td", { text: row.category }),
          el("td", { cls: "num", text: T.instant(row.ts, Math.max(row.dur / 100, 1)) }), el("td", { cls: "num", text: T.time(row.dur) })
        ]);
      }));
      if (focused !== null) {
        var again = Array.from(self.body.querySelectorAll("button")).find(function (b) { return b.dataset.slice === focused; });
        if (again) { again.focus({ preventScroll: true }); }
      }
    }, function (error) {
      if (t.data !== data || data.tabled !== key) { return; }
      data.tabled = "";
      self.caption.textContent = error.message;
    });
  };

  T.Panel = Panel;
})();
