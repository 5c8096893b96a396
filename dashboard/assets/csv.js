// Saves what a grid shows, in its order and filtered as it is, as CSV: numbers as they were
// measured, with the unit in the head.
(function () {
  "use strict";

  // What begins like this a spreadsheet takes for a formula, and names come from the trace.
  function text(value) {
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
        return text(cell.value);
      },
      processHeaderCallback: function (head) {
        var column = head.column.getColDef();
        return (column.context && column.context.csv) || column.headerName;
      },
    });
  });
})();
