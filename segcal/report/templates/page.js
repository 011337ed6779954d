"use strict";
// Sorting and opening of the case list; everything else on the page works without a script.
(() => {
  const table = document.getElementById("cases");
  if (!table) return;
  const heads = Array.from(table.tHead.rows[0].cells);
  const said = document.getElementById("sorted");
  const all = document.getElementById("open-all");

  function compare(column, descending) {
    const number = heads[column].dataset.kind === "number";
    return (one, other) => {
      const [a, b] = [one, other].map((body) => body.rows[0].cells[column].dataset.value);
      if (a === "" || b === "") return (a === "") - (b === "");  // what is not known stays at the end
      const order = number ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
      return descending ? -order : order;
    };
  }

  function sort(column) {
    const head = heads[column];
    const now = head.getAttribute("aria-sort");
    const next = now ? (now === "ascending" ? "descending" : "ascending") : head.dataset.first;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", next);
    table.append(...Array.from(table.tBodies).sort(compare(column, next === "descending")));
    said.textContent = `Sorted by ${head.textContent.trim()}, ${next}.`;
  }

  function open(button, wanted) {
    button.setAttribute("aria-expanded", String(wanted));
    document.getElementById(button.getAttribute("aria-controls")).hidden = !wanted;
  }

  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(column)));
  const buttons = Array.from(table.querySelectorAll("button.open"));
  const closed = (button) => button.getAttribute("aria-expanded") !== "true";
  function rename() {
    all.textContent = buttons.some(closed) ? "Open all cases (for printing)" : "Close all cases";
  }
  for (const button of buttons) {
    button.addEventListener("click", () => { open(button, closed(button)); rename(); });
  }
  all.addEventListener("click", () => {
    const wanted = buttons.some(closed);
    for (const button of buttons) open(button, wanted);
    rename();
  });
  all.hidden = false;
})();
