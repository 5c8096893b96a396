// Scripts of all pages: theme switch, copying of code and names, row filters, printing of grids,
// highlights in the step's bar, and the progress of a run that is being read.
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

  function copyCode(button) {
    var text = button.closest(".code").querySelector("pre").textContent;
    var label = button.querySelector(".label");
    var showResult = function (result) {
      label.textContent = result;
      setTimeout(function () {
        label.textContent = "Copy";
      }, 1600);
    };
    if (!navigator.clipboard) {
      showResult("Blocked");
      return;
    }
    navigator.clipboard.writeText(text).then(
      function () {
        showResult("Copied");
      },
      function () {
        showResult("Blocked");
      },
    );
  }

  document.addEventListener("click", function (event) {
    var target = event.target;
    if (target.closest("#theme-switch")) {
      setTheme(document.documentElement.getAttribute("data-theme") === "dark" ? "light" : "dark");
    } else if (target.closest(".code .copy")) {
      copyCode(target.closest(".copy"));
    } else if (target.closest(".print-page")) {
      window.print();
    }
  });

  // Filters a table: rows that contain all words of the search field stay visible.
  document.addEventListener("input", function (event) {
    if (!event.target.closest(".filter-rows")) {
      return;
    }
    var searchWords = event.target.value.toLowerCase().split(/\s+/);
    event.target
      .closest(".card")
      .querySelectorAll("tbody tr")
      .forEach(function (row) {
        var text = row.textContent.toLowerCase();
        row.hidden = !searchWords.every(function (word) {
          return text.includes(word);
        });
      });
  });

  // Adds a plain table for printing, because a grid only draws the rows and columns in its window.
  var MAX_PRINTED = 200;
  function createCell(tag, column, text) {
    var element = document.createElement(tag);
    element.textContent = text;
    var definition = column.getColDef();
    element.className =
      definition.type === "rightAligned" ? "num" : definition.cellRenderer ? "name" : "";
    return element;
  }
  function printTable(grid) {
    var table = document.createElement("table"),
      columns = grid.getAllDisplayedColumns(),
      head = table.createTHead().insertRow(),
      body = table.createTBody(),
      count = grid.getDisplayedRowCount();
    table.className = "data on-paper";
    columns.forEach(function (column) {
      head.append(createCell("th", column, column.getColDef().headerName));
    });
    for (var i = 0; i < Math.min(count, MAX_PRINTED); i++) {
      var rowNode = grid.getDisplayedRowAtIndex(i),
        row = body.insertRow();
      columns.forEach(function (column) {
        var request = { rowNode: rowNode, colKey: column, useFormatter: true },
          texts = rowNode.data[column.getColId() + "_short"] || [grid.getCellValue(request)];
        row.append(createCell("td", column, texts[texts.length - 1]));
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
      var grid = document.getElementById(id); // null until it is drawn
      if (grid && window.dash_ag_grid && window.dash_ag_grid.getApi) {
        grid.after(printTable(window.dash_ag_grid.getApi(id)));
      }
    });
  });
  window.addEventListener("afterprint", function () {
    document.querySelectorAll(".on-paper").forEach(function (table) {
      table.remove();
    });
  });

  // Highlights a part of the step's bar together with its line in the legend.
  function highlightPart(event) {
    var card = event.target.closest && event.target.closest(".card");
    var match = /(?:^| )(part-\S+)/.exec(
      (event.target.closest("[class*='part-']") || {}).className,
    );
    document.querySelectorAll(".highlighted").forEach(function (node) {
      node.classList.remove("highlighted");
    });
    if (card && match) {
      card.querySelectorAll("." + CSS.escape(match[1])).forEach(function (node) {
        node.classList.add("highlighted");
      });
    }
  }
  document.addEventListener("mouseover", highlightPart);
  document.addEventListener("focusin", highlightPart);

  // Returns the text to copy, with full names instead of shortened labels. null: copy unchanged. A
  // selection that includes "…" copies the full label.
  function fullText(selection) {
    var hasFullName = null,
      ranges = [];
    for (var i = 0; i < selection.rangeCount; i++) {
      var range = selection.getRangeAt(i),
        content = range.cloneContents();
      var container = range.commonAncestorContainer;
      container = (container.nodeType === 1 ? container : container.parentNode).closest(
        "[data-full]",
      );
      if (container) {
        return /…/.test(range.toString()) || range.toString() === container.innerText
          ? container.dataset.full
          : null;
      }
      if (content.querySelector("[data-full]")) {
        hasFullName = true;
      }
      ranges.push(range);
    }
    if (!hasFullName) {
      return null;
    }
    // the text that the browser would copy, with each label replaced by its full name
    var labels = Array.from(document.querySelectorAll("[data-full]")).filter(function (node) {
      return selection.containsNode(node, true);
    });
    var labelTexts = labels.map(function (node) {
        return node.innerText;
      }),
      text = selection.toString();
    return labelTexts.reduce(function (all, label, i) {
      return label
        ? all.replace(label, function () {
            return labels[i].dataset.full;
          })
        : all;
    }, text);
  }

  document.addEventListener("copy", function (event) {
    var selection = window.getSelection(),
      text = null,
      gridCell = event.target.closest && event.target.closest(".ag-cell");
    if (!selection.isCollapsed) {
      text = fullText(selection);
    } else if (gridCell && gridCell.querySelector("[data-full]")) {
      text = gridCell.querySelector("[data-full]").dataset.full;
    }
    if (text === null) {
      return;
    }
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  });

  // Runs after each change of page. It opens the evidence on wide screens, and scrolls to the
  // target of the address and to the page's link in the menu. It moves the focus to the new
  // content, so that screen readers read it and Tab continues there.
  var previousPath = location.pathname,
    wideScreen = window.matchMedia("(min-width: 621px)");
  function onPageChange() {
    document.querySelectorAll("details.evidence-fold").forEach(function (details) {
      details.open = wideScreen.matches;
    });
    var currentLink = document.querySelector(".side .here");
    if (currentLink && currentLink.querySelector("a")) {
      currentLink.querySelector("a").setAttribute("aria-current", "page");
    }
    if (currentLink && currentLink.parentNode.scrollWidth > window.innerWidth) {
      currentLink.scrollIntoView({ block: "nearest", inline: "center" });
    }
    if (location.hash.length > 1) {
      var target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
      if (target) {
        target.scrollIntoView();
        target.focus({ preventScroll: true });
      }
    } else if (location.pathname !== previousPath && document.getElementById("content")) {
      document.getElementById("content").focus({ preventScroll: true });
    }
    previousPath = location.pathname;
  }
  var pageTimer = setInterval(function () {
    var page = document.getElementById("_pages_content");
    if (!page) {
      return;
    }
    clearInterval(pageTimer);
    new MutationObserver(onPageChange).observe(page, { childList: true });
    onPageChange();
  }, 50);

  // Updates the progress card of a run that is being read, and shows the run when it is ready.
  setInterval(function () {
    var page = document.getElementById("progress");
    if (!page) {
      return;
    }
    fetch("/_advisor/status")
      .then(function (response) {
        return response.json();
      })
      .then(
        function (status) {
          var key = page.getAttribute("data-advisor-progress");
          var entry = status.entries.filter(function (candidate) {
            return candidate.key === key;
          })[0];
          if (!entry || entry.state !== "loading") {
            page.id = "progress-done"; // stop polling: the next page replaces this card
            window.dash_clientside.set_props("_pages_location", { search: location.search });
            return;
          }
          document.getElementById("progress-doing").textContent = entry.progress;
        },
        function () {
          /* the server does not respond: keep the page as it is */
        },
      );
  }, 500);
})();
