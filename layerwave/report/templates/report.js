"use strict";
// Sorting: a click on a header orders the rows by that column, a second click turns the order around.
for (const table of document.querySelectorAll("table")) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    header.firstElementChild.addEventListener("click", () => {
      const direction = header.ariaSort === "ascending" ? -1 : 1;
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.ariaSort = direction === 1 ? "ascending" : "descending";
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort((a, b) => direction * compare(a.cells[column], b.cells[column])));
    });
  });
}

function compare(a, b) {
  if ("value" in a.dataset && "value" in b.dataset) return a.dataset.value - b.dataset.value;
  return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
}
