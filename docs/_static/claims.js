// The filter of the claims: words, and an outcome. Without it the tables are whole.
"use strict";
(() => {
  const tables = [...document.querySelectorAll(".claims table")];
  const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
  const outcomes = [...new Set(rows.map((row) => row.cells[1].textContent.trim()))];
  const place = document.getElementById("filter");

  function add(parent, name, attributes, text = "") {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(text);
    return parent.appendChild(made);
  }

  const words = add(add(place, "label", {}, "Filter: "), "input", { type: "search" });
  const choice = add(add(place, "label", {}, "Outcome: "), "select", {});
  add(choice, "option", { value: "" }, "all");
  for (const outcome of outcomes) add(choice, "option", {}, outcome);
  const said = add(place, "span", { role: "status" });

  function filter() {
    const asked = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const outcome = row.cells[1].textContent.trim();
      row.hidden = !asked.every((word) => text.includes(word)) || !["", outcome].includes(choice.value);
    }
    said.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
  }
  for (const one of [words, choice]) one.addEventListener("input", filter);
  filter();
})();
