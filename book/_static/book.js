// Wide formulas scroll on their own, and keyboard users can reach the ones that do.
document.addEventListener("DOMContentLoaded", () => {
  const scrollable = "div.math, .pst-scrollable-table-container, div.highlight pre, .cell_output > .output";
  const mark = () => {
    for (const box of document.querySelectorAll(scrollable)) {
      if (box.scrollWidth > box.clientWidth + 1) box.setAttribute("tabindex", "0");
    }
  };
  (window.MathJax?.startup?.promise ?? Promise.resolve()).then(mark);
  // A printed page shows what was folded away on the screen.
  window.addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("article details:not([open])")) fold.open = true;
  });
});
