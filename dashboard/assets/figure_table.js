// The numbers of a figure as a table, for readers who cannot see it. It is built from what plotly
// drew, when "Data table" is opened.
(function () {
  "use strict";
  var MAX_ROWS = 200;

  function shown(value, format) {
    if (typeof value !== "number" || !isFinite(value)) {
      return value === null || value === undefined || value !== value ? "–" : String(value);
    }
    var percent = /%$/.test(format || "");
    var text = (percent ? value * 100 : value).toLocaleString("en-US", {
      maximumSignificantDigits: 4,
    });
    return text.replace("-", "−") + (percent ? "%" : "");
  }

  function title(axis) {
    return (axis && axis.title && axis.title.text) || "";
  }

  // Names are escaped for plotly (plotly_figures.escape_markup).
  function plain(text) {
    return String(text).replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  }

  // A row for each position on the x axis, a column for each series.
  function ofLines(traces, layout) {
    var rows = new Map(),
      names = traces.map(function (trace) {
        return plain(trace.name || title(layout.yaxis));
      });
    traces.forEach(function (trace, column) {
      Array.from(trace.x).forEach(function (x, i) {
        if (trace.y[i] === null || trace.y[i] === undefined) {
          return;
        }
        rows.set(x, rows.get(x) || traces.map(String.bind(null, "–")));
        rows.get(x)[column] = shown(trace.y[i], layout.yaxis.tickformat);
      });
    });
    var order = Array.from(rows.keys()).sort(function (a, b) {
      return a - b;
    });
    return {
      head: [title(layout.xaxis)].concat(names),
      rows: order.map(function (x) {
        return [shown(x)].concat(rows.get(x));
      }),
    };
  }

  function ofCells(trace) {
    return {
      head: [""].concat(Array.from(trace.x, plain)),
      rows: Array.from(trace.y, function (name, row) {
        return [plain(name)].concat(
          Array.from(trace.z[row], function (value) {
            return shown(value);
          }),
        );
      }),
    };
  }

  function cell(row, kind, text, scope) {
    var made = document.createElement(kind);
    made.textContent = text;
    if (scope) {
      made.scope = scope;
    }
    made.className = row.cells.length ? "num" : "";
    row.append(made);
  }

  function table(graph) {
    var cells = graph._fullData.filter(function (trace) {
      return trace.type === "heatmap";
    });
    var data = cells.length
      ? ofCells(cells[0])
      : ofLines(
          graph._fullData.filter(function (trace) {
            return trace.type === "scatter";
          }),
          graph._fullLayout,
        );
    var every = Math.ceil(data.rows.length / MAX_ROWS) || 1,
      made = document.createElement("table"),
      unit = title(graph._fullLayout.yaxis) || (cells.length && cells[0].colorbar.title.text),
      head = made.createTHead().insertRow(),
      body = made.createTBody();
    made.className = "data";
    made.createCaption().textContent =
      (unit || "") + (every > 1 ? ", one row in " + every + " of " + data.rows.length : "");
    data.head.forEach(function (text) {
      cell(head, "th", text, "col");
    });
    data.rows.forEach(function (texts, number) {
      if (number % every === 0) {
        var row = body.insertRow();
        texts.forEach(function (text, column) {
          cell(row, column ? "td" : "th", text, column ? "" : "row");
        });
      }
    });
    return made;
  }

  // A figure is drawn once it is in view.
  function fill(details) {
    var graph = details.closest(".with-data").querySelector(".js-plotly-plot");
    if (graph && graph._fullData) {
      details.querySelector(".scroll").replaceChildren(table(graph));
    } else if (details.open && details.isConnected) {
      setTimeout(fill, 100, details);
    }
  }

  document.addEventListener(
    "toggle",
    function (event) {
      if (event.target.matches(".figure-data") && event.target.open) {
        fill(event.target);
      }
    },
    true,
  );
})();
