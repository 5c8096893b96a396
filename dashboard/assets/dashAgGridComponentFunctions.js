// Cell renderer of names in AG Grid. A cell has labels of several lengths, and the style sheet
// shows the longest one that fits. The tooltip and the copied text (shell.js) are the full name.
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
// Loads AG Grid (1.3 MB) on the first page with a grid. Until it is loaded, grids draw nothing.
(function () {
  "use strict";
  var meta = document.querySelector("meta[name=advisor-grid]"),
    library = null,
    redraws = [];
  function loadLibrary() {
    var script = document.createElement("script");
    script.src = meta.content;
    script.onload = function () {
      library = window.dash_ag_grid;
      window.dash_ag_grid = Object.assign({}, library, { AgGrid: Grid });
      redraws.splice(0).forEach(function (redraw) {
        redraw(true);
      });
    };
    document.head.appendChild(script);
  }
  // Puts the columns of numbers next to the name on a phone, and the other columns after them.
  function withNarrowColumns(props) {
    if (!matchMedia("(max-width: 620px)").matches) {
      return props;
    }
    var nameColumn = Object.assign({}, props.columnDefs[0]),
      otherColumns = props.columnDefs.slice(1);
    nameColumn.width = nameColumn.minWidth = Math.min(nameColumn.minWidth || 150, 150);
    delete nameColumn.maxWidth;
    function columnsOfKind(isNumeric) {
      return otherColumns.filter(function (column) {
        return (column.type === "rightAligned") === isNumeric;
      });
    }
    return Object.assign({}, props, {
      columnDefs: [nameColumn].concat(columnsOfKind(true), columnsOfKind(false)),
    });
  }
  function Grid(props) {
    var redraw = React.useState(false)[1];
    React.useEffect(function () {
      if (library) {
        return;
      }
      if (redraws.push(redraw) === 1) {
        loadLibrary();
      }
    }, []);
    return library ? React.createElement(library.AgGrid, withNarrowColumns(props)) : null;
  }
  Grid.dashRenderType = true;
  window.dash_ag_grid = { AgGrid: Grid };
})();
// Draws a figure when it is near the view, before printing, or after MAX_WAIT_MS. That way plotly
// (1.5 MB) does not delay the text of the page.
(function () {
  "use strict";
  var MAX_WAIT_MS = 6000,
    Graph = null;
  function LazyGraph(props) {
    var placeholder = React.useRef(null),
      state = React.useState(false);
    React.useEffect(function () {
      function show() {
        state[1](true);
      }
      var timer = setTimeout(show, MAX_WAIT_MS),
        observer = new IntersectionObserver(
          function (entries) {
            if (entries[entries.length - 1].isIntersecting) {
              show();
            }
          },
          { rootMargin: "300px" },
        );
      observer.observe(placeholder.current);
      window.addEventListener("beforeprint", show);
      return function () {
        clearTimeout(timer);
        observer.disconnect();
        window.removeEventListener("beforeprint", show);
      };
    }, []);
    return state[0]
      ? React.createElement(Graph, props)
      : React.createElement("div", { ref: placeholder, style: props.style });
  }
  Object.defineProperty(window, "dash_core_components", {
    configurable: true,
    set: function (library) {
      Graph = library.Graph;
      var value = Object.assign({}, library, { Graph: LazyGraph });
      Object.defineProperty(window, "dash_core_components", { value: value, writable: true });
    },
  });
})();
