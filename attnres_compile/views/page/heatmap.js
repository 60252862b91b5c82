// Depth weights of one stream: a heat map per kind of reader, with the entropy of each site beside it.
"use strict";

attnres.heatmap = function heatmap(host, data, chosen, label, scale) {
  const columns = data.sources.map((name) => ({ name }));
  const rows = chosen.map((index) => ({
    index,
    name: data.sites[index],
    label: data.sites[index].slice(attnres.shared(data.sites).length),
    kind: attnres.kind(data.kinds[index]),
    entropy: data.entropy[index],
    sources: d3.count(data.weights[index], (value) => value ?? NaN),
  }));
  const cells = rows.flatMap((site, row) =>
    data.weights[site.index].flatMap((value, column) =>
      value === null ? [] : [{ row, column, site, value, colour: scale.colour(value) }],
    ),
  );
  const byRow = d3.group(cells, (cell) => cell.row);
  // Of all panels, so that their columns stand alike.
  const longest = d3.max(data.sites, (site) => site.length) - attnres.shared(data.sites).length;
  const entropyMost = Math.max(Math.log(Math.max(2, columns.length)), d3.max(rows, (site) => site.entropy) ?? 0);

  function weightText({ value, column, site }) {
    const spread = data.std?.[site.index]?.[column];
    return `${attnres.number(value)}${spread == null ? "" : ` \u00b1 ${attnres.number(spread)} over tokens`}; ${attnres.number(1 / site.sources)} if equal`;
  }

  function describe({ type, row, column, cell }) {
    if (type === "column") {
      const found = cells.filter((one) => one.column === column);
      return {
        title: columns[column].name,
        rows: [
          ["looked at by", `${found.length} sites`],
          ["mean weight", found.length ? attnres.number(d3.mean(found, (one) => one.value)) : ""],
        ],
      };
    }
    const site = rows[row];
    const facts = [
      ["entropy", `${attnres.number(site.entropy)} nats; ${attnres.number(Math.log(site.sources))} if equal`],
    ];
    const head = { title: site.name, badge: attnres.KINDS[site.kind].name };
    if (type === "gap") return { ...head, rows: [["not a source", columns[column].name], ...facts] };
    if (type === "cell")
      return { ...head, rows: [["source", columns[column].name], ["weight", weightText(cell)], ...facts] };
    const best = d3.greatest(byRow.get(row) ?? [], (one) => one.value);
    return {
      ...head,
      rows: [
        ["sources", String(site.sources)],
        ["most weight", best ? `${columns[best.column].name}, ${attnres.number(best.value)}` : ""],
        ...facts,
      ],
    };
  }

  function name({ type, row, column, cell }) {
    if (type === "column") return columns[column].name;
    if (type === "row") return `${rows[row].name}, entropy ${attnres.number(rows[row].entropy)} nats`;
    return `${rows[row].name}, ${columns[column].name}: ${attnres.number(cell.value)}`;
  }

  function drawCells(groups, { layout: { cw, ch } }) {
    const gap = Math.min(cw, ch) > 6 ? 1 : 0;
    groups
      .selectAll("rect")
      .data((_, i) => byRow.get(i) ?? [])
      .join("rect")
      .attr("class", "cell heat")
      .attr("x", (cell) => cell.column * cw)
      .attr("width", cw - gap)
      .attr("height", ch - gap)
      .attr("fill", (cell) => cell.colour)
      .attr("role", "gridcell")
      .attr("tabindex", -1)
      .attr("aria-colindex", (cell) => cell.column + 2)
      .attr("aria-label", (cell) => name({ type: "cell", row: cell.row, column: cell.column, cell }))
      .each(function remember(cell) {
        cell.node = this;
      });
  }

  // Block numbers alone: the heading of the panel says what the columns are.
  function drawColumnHeads(groups, { layout: { cw, top } }) {
    groups
      .append("rect")
      .attr("class", "hit")
      .attr("x", -cw / 2)
      .attr("y", -top)
      .attr("width", cw)
      .attr("height", top);
    groups
      .append("text")
      .attr("class", "label")
      .attr("text-anchor", "middle")
      .attr("y", -7)
      .text(({ name: text }) =>
        /^block \d+$/.test(text) ? text.slice(6) : text === "partial" && cw < 46 ? "part." : attnres.cut(text, 8),
      );
  }

  function drawRowHeads(groups, { layout: { left, ch } }) {
    groups
      .append("rect")
      .attr("class", "hit")
      .attr("y", -ch / 2)
      .attr("width", left)
      .attr("height", ch);
    groups
      .append("text")
      .attr("class", "label")
      .attr("x", left - 8)
      .attr("dy", "0.34em")
      .attr("text-anchor", "end")
      .text((site) =>
        attnres.cut(left < 100 ? attnres.fromNumber(site.label) : site.label, Math.floor((left - 12) / 6.1)),
      );
  }

  function drawAside(groups, { layout: { right, ch } }) {
    const width = (nats) => (Math.max(0, nats) / entropyMost) * (right - 14);
    const height = Math.max(1, Math.min(ch * 0.5, 9));
    groups
      .append("rect")
      .attr("class", "entropy")
      .attr("x", 8)
      .attr("y", -height / 2)
      .attr("height", height)
      .attr("width", (site) => width(site.entropy ?? 0));
    groups
      .append("line")
      .attr("class", "uniform")
      .attr("x1", (site) => 8 + width(Math.log(site.sources)))
      .attr("x2", (site) => 8 + width(Math.log(site.sources)))
      .attr("y1", -Math.min(7, ch * 0.4))
      .attr("y2", Math.min(7, ch * 0.4));
  }

  // Numbers stand in cells that have room for them, in the part that is seen.
  function afterZoom({ transform, layout, parts }) {
    const { cw, ch, plotWidth, plotHeight } = layout;
    const room = cw * transform.k >= 30 && ch * transform.k >= 13;
    const seen = room
      ? cells.filter(
          ({ row, column }) =>
            transform.applyX(column * cw) < plotWidth &&
            transform.applyX((column + 1) * cw) > 0 &&
            transform.applyY(row * ch) < plotHeight &&
            transform.applyY((row + 1) * ch) > 0,
        )
      : [];
    parts.over
      .selectAll("text")
      .data(seen, ({ row, column }) => `${row} ${column}`)
      .join("text")
      .attr("class", "value")
      .attr("text-anchor", "middle")
      .attr("dy", "0.34em")
      .style("fill", (cell) => attnres.inkOn(cell.colour))
      .attr("font-size", 10 / transform.k)
      .attr("x", ({ column }) => (column + 0.5) * cw - 0.5)
      .attr("y", ({ row }) => (row + 0.5) * ch - 0.5)
      .text((cell) => cell.value.toFixed(2).replace(/^0\./, "."));
  }

  return attnres.matrix(host, {
    label,
    rows,
    columns,
    cells,
    describe,
    name,
    drawCells,
    drawColumnHeads,
    drawRowHeads,
    drawAside,
    afterZoom,
    size: {
      left: (width) => (width < 420 ? 92 : Math.min(230, Math.max(90, 18 + 6.2 * longest))),
      right: (width) => (width < 420 ? 56 : 90),
      top: 26,
      rowMax: 20,
      columnMax: 46,
      heightMax: 620,
      columnNeeds: 30,
    },
  });
};
