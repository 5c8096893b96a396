// Saves a card of HTML elements, such as the step's bar, as a PNG. The elements are copied with
// their computed styles into an SVG, which is drawn onto a canvas.
(function () {
  "use strict";
  var PIXEL_RATIO = 2;

  function copyStyles(source, target) {
    var style = getComputedStyle(source),
      css = "";
    for (var i = 0; i < style.length; i++) {
      css += style[i] + ":" + style.getPropertyValue(style[i]) + ";";
    }
    target.setAttribute("style", css);
    for (var j = 0; j < source.children.length; j++) {
      copyStyles(source.children[j], target.children[j]);
    }
  }

  function saveCard(card, name) {
    var bounds = card.getBoundingClientRect(),
      copy = card.cloneNode(true);
    copyStyles(card, copy);
    copy.querySelectorAll(".tools").forEach(function (tool) {
      tool.remove();
    });
    copy.style.margin = "0";
    var svg =
      '<svg xmlns="http://www.w3.org/2000/svg" width="' +
      bounds.width +
      '" height="' +
      bounds.height +
      '">' +
      '<foreignObject width="100%" height="100%">' +
      new XMLSerializer().serializeToString(copy) +
      "</foreignObject></svg>";
    var image = new Image();
    image.onload = function () {
      var canvas = document.createElement("canvas");
      canvas.width = Math.ceil(bounds.width * PIXEL_RATIO);
      canvas.height = Math.ceil(bounds.height * PIXEL_RATIO);
      var context = canvas.getContext("2d");
      context.scale(PIXEL_RATIO, PIXEL_RATIO);
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
      saveCard(button.closest(".card"), button.getAttribute("data-name"));
    }
  });
})();
