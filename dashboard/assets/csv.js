// Saves a grid as CSV, in its current order and with its filter. Numbers are not rounded. The
// column titles have the units.
(function () {
  "use strict";

  // Names come from the trace. A leading quote keeps a spreadsheet from running one as a formula.
  function cellText(value) {
    if (value === null || value === undefined || value === "–") {
      return "";
    } // not measured
    if (typeof value === "number") {
      return String(value);
    }
    return /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
  }

  document.addEventListener("click", function (event) {
    var button = event.target.closest(".save-csv");
    if (!button || !window.dash_ag_grid.getApi) {
      return;
    }
    var id = button.getAttribute("data-grid"),
      grid = window.dash_ag_grid.getApi(id);
    grid.exportDataAsCsv({
      fileName: "advisor-" + id.replace(/-grid$/, "") + ".csv",
      processCellCallback: function (cell) {
        return cellText(cell.value);
      },
      processHeaderCallback: function (header) {
        var column = header.column.getColDef();
        return (column.context && column.context.csv) || column.headerName;
      },
    });
  });
})();
