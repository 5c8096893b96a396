// Cells of AG Grid. A name is there in several lengths, of which the style sheet shows the longest
// that fits the column; the whole name is its tooltip, and what is copied (shell.js).
window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {};
window.dashAgGridComponentFunctions.AdvisorName = function (props) {
  "use strict";
  var labels = props.data[props.colDef.field + "_short"] || [props.value];
  return React.createElement(
    "span",
    { className: "lengths", "data-full": props.value },
    labels.map(function (label, i) {
      return React.createElement("span", { key: i, className: "length-" + i }, label);
    }),
  );
};
