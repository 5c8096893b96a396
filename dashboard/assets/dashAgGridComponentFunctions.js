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
// The library of grids (1.3 MB) is asked for by the first page that has one: what stands for it
// here draws nothing until it has come.
(function () {
  "use strict";
  var meta = document.querySelector("meta[name=advisor-grid]"),
    library = null,
    waiting = [];
  function load() {
    var script = document.createElement("script");
    script.src = meta.content;
    script.onload = function () {
      library = window.dash_ag_grid;
      window.dash_ag_grid = Object.assign({}, library, { AgGrid: Grid });
      waiting.splice(0).forEach(function (draw) {
        draw(true);
      });
    };
    document.head.appendChild(script);
  }
  // On a telephone the numbers stand beside the name, and what else there is after them.
  function narrowed(props) {
    if (!matchMedia("(max-width: 620px)").matches) {
      return props;
    }
    var first = Object.assign({}, props.columnDefs[0]),
      rest = props.columnDefs.slice(1);
    first.width = first.minWidth = Math.min(first.minWidth || 150, 150);
    delete first.maxWidth;
    function ofKind(numbers) {
      return rest.filter(function (column) {
        return (column.type === "rightAligned") === numbers;
      });
    }
    return Object.assign({}, props, { columnDefs: [first].concat(ofKind(true), ofKind(false)) });
  }
  function Grid(props) {
    var draw = React.useState(false)[1];
    React.useEffect(function () {
      if (library) {
        return;
      }
      if (waiting.push(draw) === 1) {
        load();
      }
    }, []);
    return library ? React.createElement(library.AgGrid, narrowed(props)) : null;
  }
  Grid.dashRenderType = true;
  window.dash_ag_grid = { AgGrid: Grid };
})();
// A figure waits until it is near the window, or for a while: what draws it (1.5 MB) then delays
// nothing of what is read first, and paper has all figures.
(function () {
  "use strict";
  var PATIENCE_MS = 6000,
    Graph = null;
  function Late(props) {
    var place = React.useRef(null),
      state = React.useState(false);
    React.useEffect(function () {
      function come() {
        state[1](true);
      }
      var timer = setTimeout(come, PATIENCE_MS),
        watch = new IntersectionObserver(
          function (seen) {
            if (seen[seen.length - 1].isIntersecting) {
              come();
            }
          },
          { rootMargin: "300px" },
        );
      watch.observe(place.current);
      window.addEventListener("beforeprint", come);
      return function () {
        clearTimeout(timer);
        watch.disconnect();
        window.removeEventListener("beforeprint", come);
      };
    }, []);
    return state[0]
      ? React.createElement(Graph, props)
      : React.createElement("div", { ref: place, style: props.style });
  }
  Object.defineProperty(window, "dash_core_components", {
    configurable: true,
    set: function (library) {
      Graph = library.Graph;
      var value = Object.assign({}, library, { Graph: Late });
      Object.defineProperty(window, "dash_core_components", { value: value, writable: true });
    },
  });
})();
