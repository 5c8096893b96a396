// What every page can do: switch the theme, copy code, filter rows, print grids, wait for a run
// that is being read.
(function () {
  "use strict";

  function setTheme(theme) {
    var root = document.documentElement;
    root.setAttribute("data-theme", theme);
    root.setAttribute("data-mantine-color-scheme", theme);
    root.setAttribute("data-ag-theme-mode", theme);
    try {
      localStorage.setItem("advisor-theme", theme);
    } catch (_) {
      /* storage is switched off */
    }
    window.dispatchEvent(new CustomEvent("advisor-theme", { detail: theme }));
  }

  function copy(button) {
    var text = button.closest(".code").querySelector("pre").textContent;
    var label = button.querySelector(".label");
    var done = function (word) {
      label.textContent = word;
      setTimeout(function () {
        label.textContent = "Copy";
      }, 1600);
    };
    if (!navigator.clipboard) {
      done("Blocked");
      return;
    }
    navigator.clipboard.writeText(text).then(
      function () {
        done("Copied");
      },
      function () {
        done("Blocked");
      },
    );
  }

  document.addEventListener("click", function (event) {
    var target = event.target;
    if (target.closest("#theme-switch")) {
      setTheme(document.documentElement.getAttribute("data-theme") === "dark" ? "light" : "dark");
    } else if (target.closest(".code .copy")) {
      copy(target.closest(".copy"));
    } else if (target.closest(".print-page")) {
      window.print();
    }
  });

  // A field above a table keeps the rows with its words.
  document.addEventListener("input", function (event) {
    if (!event.target.closest(".filter-rows")) {
      return;
    }
    var words = event.target.value.toLowerCase().split(/\s+/);
    event.target
      .closest(".card")
      .querySelectorAll("tbody tr")
      .forEach(function (row) {
        var text = row.textContent.toLowerCase();
        row.hidden = !words.every(function (word) {
          return text.includes(word);
        });
      });
  });

  // A grid draws the rows and columns that its window has room for: on paper a table has them all.
  var MAX_PRINTED = 200;
  function cell(kind, column, text) {
    var made = document.createElement(kind);
    made.textContent = text;
    var about = column.getColDef();
    made.className = about.type === "rightAligned" ? "num" : about.cellRenderer ? "name" : "";
    return made;
  }
  function printed(grid) {
    var table = document.createElement("table"),
      columns = grid.getAllDisplayedColumns(),
      head = table.createTHead().insertRow(),
      body = table.createTBody(),
      count = grid.getDisplayedRowCount();
    table.className = "data on-paper";
    columns.forEach(function (column) {
      head.append(cell("th", column, column.getColDef().headerName));
    });
    for (var i = 0; i < Math.min(count, MAX_PRINTED); i++) {
      var node = grid.getDisplayedRowAtIndex(i),
        row = body.insertRow();
      columns.forEach(function (column) {
        var value = { rowNode: node, colKey: column, useFormatter: true },
          short = node.data[column.getColId() + "_short"] || [grid.getCellValue(value)];
        row.append(cell("td", column, short[short.length - 1]));
      });
    }
    if (count > MAX_PRINTED) {
      table.createCaption().textContent = "The first " + MAX_PRINTED + " of " + count + " rows";
    }
    return table;
  }
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll(".save-csv").forEach(function (button) {
      var id = button.getAttribute("data-grid");
      var grid = document.getElementById(id); // none until it is drawn
      if (grid && window.dash_ag_grid && window.dash_ag_grid.getApi) {
        grid.after(printed(window.dash_ag_grid.getApi(id)));
      }
    });
  });
  window.addEventListener("afterprint", function () {
    document.querySelectorAll(".on-paper").forEach(function (table) {
      table.remove();
    });
  });

  // A part of the step's bar and its line in the legend light up together.
  function light(event) {
    var card = event.target.closest && event.target.closest(".card");
    var name = /(?:^| )(part-\S+)/.exec((event.target.closest("[class*='part-']") || {}).className);
    document.querySelectorAll(".lit").forEach(function (node) {
      node.classList.remove("lit");
    });
    if (card && name) {
      card.querySelectorAll("." + CSS.escape(name[1])).forEach(function (node) {
        node.classList.add("lit");
      });
    }
  }
  document.addEventListener("mouseover", light);
  document.addEventListener("focusin", light);

  // A name that is shown short is copied whole: the selection of all of it, or of a part with a gap
  // in it, stands for the name; so does a chosen cell with nothing selected.
  function fullText(selection) {
    var whole = null,
      parts = [];
    for (var i = 0; i < selection.rangeCount; i++) {
      var range = selection.getRangeAt(i),
        part = range.cloneContents();
      var around = range.commonAncestorContainer;
      around = (around.nodeType === 1 ? around : around.parentNode).closest("[data-full]");
      if (around) {
        return /…/.test(range.toString()) || range.toString() === around.innerText
          ? around.dataset.full
          : null;
      }
      if (part.querySelector("[data-full]")) {
        whole = true;
      }
      parts.push(range);
    }
    if (!whole) {
      return null;
    }
    // what the browser would copy, with the short names changed for the time of asking
    var short = Array.from(document.querySelectorAll("[data-full]")).filter(function (node) {
      return selection.containsNode(node, true);
    });
    var shown = short.map(function (node) {
        return node.innerText;
      }),
      text = selection.toString();
    return shown.reduce(function (all, label, i) {
      return label
        ? all.replace(label, function () {
            return short[i].dataset.full;
          })
        : all;
    }, text);
  }

  document.addEventListener("copy", function (event) {
    var selection = window.getSelection(),
      text = null,
      cell = event.target.closest && event.target.closest(".ag-cell");
    if (!selection.isCollapsed) {
      text = fullText(selection);
    } else if (cell && cell.querySelector("[data-full]")) {
      text = cell.querySelector("[data-full]").dataset.full;
    }
    if (text === null) {
      return;
    }
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  });

  // After each change of page: what there is room for, open; what the address points at, and the
  // page's own link, into view; and the focus to what is new, so that a screen reader says it and
  // Tab goes on from there.
  var before = location.pathname,
    wide = window.matchMedia("(min-width: 621px)");
  function arrived() {
    document.querySelectorAll("details.grounds").forEach(function (part) {
      part.open = wide.matches;
    });
    var here = document.querySelector(".side .here");
    if (here && here.querySelector("a")) {
      here.querySelector("a").setAttribute("aria-current", "page");
    }
    if (here && here.parentNode.scrollWidth > window.innerWidth) {
      here.scrollIntoView({ block: "nearest", inline: "center" });
    }
    if (location.hash.length > 1) {
      var target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
      if (target) {
        target.scrollIntoView();
        target.focus({ preventScroll: true });
      }
    } else if (location.pathname !== before && document.getElementById("content")) {
      document.getElementById("content").focus({ preventScroll: true });
    }
    before = location.pathname;
  }
  var waiting = setInterval(function () {
    var page = document.getElementById("_pages_content");
    if (!page) {
      return;
    }
    clearInterval(waiting);
    new MutationObserver(arrived).observe(page, { childList: true });
    arrived();
  }, 50);

  // The page of a run that is being read asks how far it is, and shows the run once it is there.
  setInterval(function () {
    var page = document.getElementById("progress");
    if (!page) {
      return;
    }
    fetch("/_advisor/status")
      .then(function (answer) {
        return answer.json();
      })
      .then(
        function (status) {
          var key = page.getAttribute("data-advisor-progress");
          var entry = status.entries.filter(function (one) {
            return one.key === key;
          })[0];
          if (!entry || entry.state !== "loading") {
            page.id = "progress-done"; // asked once: what follows is another page
            window.dash_clientside.set_props("_pages_location", { search: location.search });
            return;
          }
          document.getElementById("progress-doing").textContent = entry.doing;
        },
        function () {
          /* the server is gone: the page stays as it is */
        },
      );
  }, 500);
})();
