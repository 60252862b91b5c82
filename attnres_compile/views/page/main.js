// Puts the pictures into the page, and makes the buttons and the filter work.
"use strict";

(function pictures() {
  for (const host of document.querySelectorAll(".picture")) {
    attnres.stream(host, attnres.data.streams[Number(host.dataset.stream)]);
  }
  const host = document.getElementById("heatmaps");
  if (host) for (const stream of attnres.data.weights.streams) attnres.weights(host, stream);
})();

(function theme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  name();
})();

(function filter() {
  const input = document.getElementById("filter");
  if (!input) return;
  const output = document.getElementById("filtered");
  const rows = [...document.querySelectorAll("#left-alone tr[data-place]")];
  // Collapsed rows are found by each of their modules.
  const texts = rows.map((row) =>
    [row.textContent, row.closest(".reason").dataset.reason, ...attnres.data.left[Number(row.dataset.place)]]
      .join("\n")
      .toLowerCase(),
  );
  input.parentElement.hidden = false;
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => (row.hidden = !words.every((word) => texts[i].includes(word))));
    for (const reason of document.querySelectorAll(".reason"))
      reason.hidden = !reason.querySelector("tr[data-place]:not([hidden])");
    output.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "";
  });
})();

// Paper has no folds.
(function print() {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("main details:not([open])")];
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });
})();
