// Saves a card that is drawn with HTML (the step's bar, the staircase) as a PNG: its elements with
// the styles they have now, inside an SVG, drawn onto a canvas.
(function () {
  "use strict";
  var SCALE = 2;

  function withStyles(from, to) {
    var style = getComputedStyle(from),
      text = "";
    for (var i = 0; i < style.length; i++) {
      text += style[i] + ":" + style.getPropertyValue(style[i]) + ";";
    }
    to.setAttribute("style", text);
    for (var j = 0; j < from.children.length; j++) {
      withStyles(from.children[j], to.children[j]);
    }
  }

  function save(card, name) {
    var box = card.getBoundingClientRect(),
      copy = card.cloneNode(true);
    withStyles(card, copy);
    copy.querySelectorAll(".tools").forEach(function (tool) {
      tool.remove();
    });
    copy.style.margin = "0";
    var svg =
      '<svg xmlns="http://www.w3.org/2000/svg" width="' +
      box.width +
      '" height="' +
      box.height +
      '">' +
      '<foreignObject width="100%" height="100%">' +
      new XMLSerializer().serializeToString(copy) +
      "</foreignObject></svg>";
    var image = new Image();
    image.onload = function () {
      var canvas = document.createElement("canvas");
      canvas.width = Math.ceil(box.width * SCALE);
      canvas.height = Math.ceil(box.height * SCALE);
      var context = canvas.getContext("2d");
      context.scale(SCALE, SCALE);
      context.drawImage(image, 0, 0);
      canvas.toBlob(function (blob) {
        var link = document.createElement("a");
        link.href = URL.createObjectURL(blob);
        link.download = "advisor-" + name + ".png";
        link.click();
        setTimeout(function () {
          URL.revokeObjectURL(link.href);
        }, 10000);
      });
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg);
  }

  document.addEventListener("click", function (event) {
    var button = event.target.closest(".save-picture");
    if (button) {
      save(button.closest(".card"), button.getAttribute("data-name"));
    }
  });
})();
