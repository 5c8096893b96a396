// Shows the numbers of a figure as a table, for readers who cannot see it. The table is built from
// plotly's data when "Data table" is opened.
(function () {
  "use strict";
  var MAX_ROWS = 200;

  function formatValue(value, format) {
    if (typeof value !== "number" || !isFinite(value)) {
      return value === null || value === undefined || value !== value ? "–" : String(value);
    }
    var percent = /%$/.test(format || "");
    var text = (percent ? value * 100 : value).toLocaleString("en-US", {
      maximumSignificantDigits: 4,
    });
    return text.replace("-", "−") + (percent ? "%" : "");
  }

  function axisTitle(axis) {
    return (axis && axis.title && axis.title.text) || "";
  }

  // Reverses plotly_figures.escape_markup.
  function unescapeMarkup(text) {
    return String(text).replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  }

  // Builds a row for each position on the x axis, and a column for each series.
  function tableOfLines(traces, layout) {
    var valuesByX = new Map(),
      names = traces.map(function (trace) {
        return unescapeMarkup(trace.name || axisTitle(layout.yaxis));
      });
    traces.forEach(function (trace, column) {
      Array.from(trace.x).forEach(function (x, i) {
        if (trace.y[i] === null || trace.y[i] === undefined) {
          return;
        }
        valuesByX.set(x, valuesByX.get(x) || traces.map(String.bind(null, "–")));
        valuesByX.get(x)[column] = formatValue(trace.y[i], layout.yaxis.tickformat);
      });
    });
    var order = Array.from(valuesByX.keys()).sort(function (a, b) {
      return a - b;
    });
    return {
      head: [axisTitle(layout.xaxis)].concat(names),
      rows: order.map(function (x) {
        return [formatValue(x)].concat(valuesByX.get(x));
      }),
    };
  }

  function tableOfHeatmap(trace) {
    return {
      head: [""].concat(Array.from(trace.x, unescapeMarkup)),
      rows: Array.from(trace.y, function (name, row) {
        return [unescapeMarkup(name)].concat(
          Array.from(trace.z[row], function (value) {
            return formatValue(value);
          }),
        );
      }),
    };
  }

  function appendCell(row, tag, text, scope) {
    var element = document.createElement(tag);
    element.textContent = text;
    if (scope) {
      element.scope = scope;
    }
    element.className = row.cells.length ? "num" : "";
    row.append(element);
  }

  function buildTable(graph) {
    var heatmaps = graph._fullData.filter(function (trace) {
      return trace.type === "heatmap";
    });
    var data = heatmaps.length
      ? tableOfHeatmap(heatmaps[0])
      : tableOfLines(
          graph._fullData.filter(function (trace) {
            return trace.type === "scatter";
          }),
          graph._fullLayout,
        );
    var rowStep = Math.ceil(data.rows.length / MAX_ROWS) || 1,
      element = document.createElement("table"),
      unit =
        axisTitle(graph._fullLayout.yaxis) || (heatmaps.length && heatmaps[0].colorbar.title.text),
      head = element.createTHead().insertRow(),
      body = element.createTBody();
    element.className = "data";
    element.createCaption().textContent =
      (unit || "") + (rowStep > 1 ? ", one row in " + rowStep + " of " + data.rows.length : "");
    data.head.forEach(function (text) {
      appendCell(head, "th", text, "col");
    });
    data.rows.forEach(function (texts, number) {
      if (number % rowStep === 0) {
        var row = body.insertRow();
        texts.forEach(function (text, column) {
          appendCell(row, column ? "td" : "th", text, column ? "" : "row");
        });
      }
    });
    return element;
  }

  // Fills the table as soon as plotly has drawn the figure, which happens when it is near the
  // view.
  function fillTable(details) {
    var graph = details.closest(".with-data").querySelector(".js-plotly-plot");
    if (graph && graph._fullData) {
      details.querySelector(".scroll").replaceChildren(buildTable(graph));
    } else if (details.open && details.isConnected) {
      setTimeout(fillTable, 100, details);
    }
  }

  document.addEventListener(
    "toggle",
    function (event) {
      if (event.target.matches(".figure-data") && event.target.open) {
        fillTable(event.target);
      }
    },
    true,
  );
})();
