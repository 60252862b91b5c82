// Depth-mixing matrices as small multiples: how much of each sublayer's output each site receives. One pixel per entry,
// enlarged; the pointer or the arrow keys read the numbers out.
"use strict";

attnres.mixing = function mixing(host, data, root) {
  const kinds = [
    ["plain", "plain residual"],
    ["full", "full form"],
    ["block", "block form"],
    ["measured", "measured"],
  ].filter(([key]) => data.mixing?.[key]?.length);
  if (!kinds.length) return;
  // The plain residual is 1 everywhere, and so is a site of one source: they take the last colour, whatever it is.
  const mixed = kinds
    .filter(([key]) => key !== "plain")
    .flatMap(([key]) => data.mixing[key])
    .filter((row) => d3.sum(row, (value) => value > 0) > 1);
  const scale = attnres.scale(d3.max(mixed, (row) => d3.max(row)) ?? 1, root);
  host.append(attnres.element("h4", "", "Depth mixing"));
  host.append(
    attnres.element(
      "p",
      "",
      "How much of the root and of each sublayer's output (columns) each site (rows) receives: 1 throughout in the plain residual; equal shares in the full and block forms with zero queries; what was measured here.",
    ),
  );
  attnres.colourLegend(host, "coefficient", scale);
  const grid = host.appendChild(attnres.element("div", "multiples"));
  for (const [key, name] of kinds) one(grid, data.mixing[key], name);

  function one(to, matrix, name) {
    const [height, width] = [matrix.length, d3.max(matrix, (row) => row.length)];
    const canvas = attnres.element("canvas", "mixing");
    const cursor = attnres.element("div", "cursor");
    const read = attnres.element("output", "", "\u00a0");
    const title = attnres.element("figcaption", "", name);
    const figure = attnres.element("figure", "", title, attnres.element("div", "canvas", canvas, cursor), read);
    canvas.width = width;
    canvas.height = height;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name}: ${height} sites, ${width} sources. Arrow keys read entries.`);
    to.append(figure);
    paint(canvas, matrix);
    cursor.hidden = true;
    let place = null;

    function move(row, column) {
      place = [Math.max(0, Math.min(height - 1, row)), Math.max(0, Math.min(width - 1, column))];
      const [i, j] = place;
      cursor.hidden = false;
      Object.assign(cursor.style, {
        left: `${(100 * j) / width}%`,
        top: `${(100 * i) / height}%`,
        width: `${100 / width}%`,
        height: `${100 / height}%`,
      });
      const source = j === 0 ? "root" : `sublayer ${j}`;
      read.textContent = `${attnres.cut(data.sites[i] ?? "", 34)}, ${source}: ${attnres.number(matrix[i][j] ?? 0)}`;
    }

    function leave() {
      cursor.hidden = true;
      read.textContent = "\u00a0";
    }

    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      move(
        Math.floor(((event.clientY - box.top) / box.height) * height),
        Math.floor(((event.clientX - box.left) / box.width) * width),
      );
    });
    canvas.addEventListener("pointerleave", leave);
    canvas.addEventListener("focus", () => move(...(place ?? [0, 0])));
    canvas.addEventListener("blur", leave);
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const [row, column] = place ?? [0, 0];
      move(row + step[0], column + step[1]);
    });
  }

  function paint(canvas, matrix) {
    const context = canvas.getContext("2d");
    matrix.forEach((row, i) =>
      row.forEach((value, j) => {
        if (!value) return; // nothing arrives: the page shows through
        context.fillStyle = scale.colour(value);
        context.fillRect(j, i, 1, 1);
      }),
    );
  }
};
