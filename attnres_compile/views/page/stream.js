// The picture of one stream: its sources as columns, its sites as rows, a mark where a site looks at a source.
"use strict";

attnres.stream = function stream(host, data, key) {
  const { blocks, full, columns, rows, cells, numbers, describe, name } = attnres.words(data);
  const byRow = d3.group(cells, (cell) => cell.row);
  // Sites during one block are a band of rows.
  const bands = d3
    .groups(
      rows.map((site, row) => ({ row, block: site.block })),
      (one) => one.block,
    )
    .map(([block, members]) => ({ block, from: members[0].row, length: members.length, last: block > blocks }));
  let brackets;

  function drawUnder(group, { layout: { cw, ch, plotWidth } }) {
    const rectangle = (found, className) =>
      group
        .selectAll(null)
        .data(found)
        .join("rect")
        .attr("class", className)
        .attr("y", (band) => band.from * ch)
        .attr("height", (band) => band.length * ch);
    if (!full) rectangle(bands, (_, i) => `band ${i % 2 ? "odd" : "even"}`).attr("width", plotWidth);
    rectangle(
      bands.filter((band) => !band.last),
      "filling",
    )
      .attr("x", (band) => band.block * cw)
      .attr("width", cw);
    if (!full)
      group
        .selectAll("line")
        .data(bands.slice(1))
        .join("line")
        .attr("class", "rule")
        .attr("x2", plotWidth)
        .attr("y1", (band) => band.from * ch)
        .attr("y2", (band) => band.from * ch);
  }

  function drawCells(groups, { layout: { cw, ch }, parts }) {
    const radius = Math.min(7, Math.min(cw, ch) * 0.36);
    const shapes = d3.rollup(
      cells,
      ([{ site }]) => outline(site.kind, Math.PI * radius * radius),
      (cell) => cell.site.kind,
    );
    const fills = d3.rollup(
      cells.filter((cell) => cell.partial),
      ([cell]) => filling(parts.defs, cell.site.kind, cell.share),
      (cell) => `${cell.site.kind} ${cell.share}`,
    );
    groups
      .selectAll("path")
      .data((_, i) => byRow.get(i) ?? [])
      .join("path")
      .attr(
        "class",
        (cell) => `cell mark ${cell.site.kind}${cell.partial ? " partial" : ""}${cell.site.query ? "" : " bypass"}`,
      )
      .attr("d", (cell) => shapes.get(cell.site.kind))
      .attr("transform", (cell) => `translate(${(cell.column + 0.5) * cw},${ch / 2})`)
      .attr("fill", (cell) => fills.get(`${cell.site.kind} ${cell.share}`) ?? null)
      .attr("role", "gridcell")
      .attr("tabindex", -1)
      .attr("aria-colindex", (cell) => cell.column + 2)
      .attr("aria-label", (cell) => name({ type: "cell", row: cell.row, column: cell.column, cell }))
      .each(function remember(cell) {
        cell.node = this;
      });
  }

  const outline = (kind, area) => d3.symbol(attnres.KINDS[kind].shape, area)();

  // A partial sum is filled from below, as far as its block is.
  function filling(to, kind, share) {
    const id = `filling-${(attnres.stream.fillings = (attnres.stream.fillings ?? 0) + 1)}`;
    const gradient = to.append("linearGradient").attr("id", id).attr("x2", 0).attr("y2", 1);
    for (const className of ["nothing", kind])
      gradient
        .append("stop")
        .attr("offset", 1 - share)
        .attr("class", className);
    return `url(#${id})`;
  }

  function drawColumnHeads(groups, { layout: { cw, top } }) {
    const text = (className, y, value) =>
      groups.append("text").attr("class", className).attr("text-anchor", "middle").attr("y", y).text(value);
    groups
      .append("rect")
      .attr("class", "hit")
      .attr("x", -cw / 2)
      .attr("y", -top)
      .attr("width", cw)
      .attr("height", top);
    text("label", full ? -8 : -22, (column, j) => (j > blocks ? attnres.cut(column.name, 8) : "b"))
      .filter((_, j) => j <= blocks)
      .append("tspan")
      .attr("class", "sub")
      .attr("dy", 3)
      .text((_, j) => j);
    if (!full && cw >= 26)
      text("range", -7, ({ members }, j) =>
        j === 0 ? "root" : cw < 38 ? `\u00d7${members.length}` : numbers(members),
      );
  }

  function drawRowHeads(groups, { layout: { left, ch } }) {
    // A narrow page leaves room for a layer's number and a bit of its part's name.
    const narrow = left < 116;
    const strip = full ? 0 : narrow ? 24 : 46;
    groups
      .append("rect")
      .attr("class", "hit")
      .attr("x", strip)
      .attr("y", -ch / 2)
      .attr("width", left - strip)
      .attr("height", ch);
    groups
      .append("path")
      .attr("class", (site) => `badge ${site.kind}`)
      .attr("d", (site) => outline(site.kind, 46))
      .attr("transform", `translate(${left - 12},0)`);
    groups
      .append("text")
      .attr("class", "label")
      .attr("x", left - 24)
      .attr("dy", "0.34em")
      .attr("text-anchor", "end")
      .text((site) =>
        attnres.cut(narrow ? attnres.fromNumber(site.label) : site.label, Math.floor((left - 26 - strip) / 6.1)),
      );
    if (!strip) return;
    brackets = d3
      .select(groups.node().parentNode)
      .insert("g", "g")
      .attr("aria-hidden", "true")
      .selectAll("g")
      .data(bands)
      .join("g");
    brackets
      .append("rect")
      .attr("class", (_, i) => `bracket ${i % 2 ? "odd" : "even"}`)
      .attr("x", 1)
      .attr("width", strip - 6);
    const text = brackets
      .append("text")
      .attr("class", "label")
      .attr("x", strip / 2 - 2)
      .attr("text-anchor", "middle")
      .attr("dy", "0.3em");
    text.append("tspan").text((band) => (band.last ? (strip > 30 ? "end" : "") : "b"));
    text
      .append("tspan")
      .attr("class", "sub")
      .attr("dy", 3)
      .text((band) => (band.last ? "" : band.block));
  }

  // The brackets move with the rows; a block's number stays in view while the block is.
  function afterZoom({ transform, layout: { ch, plotHeight } }) {
    if (!brackets) return;
    const [from, to] = [
      (band) => transform.applyY(band.from * ch),
      (band) => transform.applyY((band.from + band.length) * ch),
    ];
    brackets.attr("transform", (band) => `translate(0,${from(band)})`);
    brackets.select("rect").attr("height", (band) => Math.max(0.5, to(band) - from(band) - 1));
    brackets
      .select("text")
      .classed("thin", (band) => to(band) - from(band) < 14)
      .attr("y", (band) => (Math.max(0, from(band)) + Math.min(plotHeight, to(band))) / 2 - from(band));
  }

  // Only what occurs.
  function legend() {
    const list = host.appendChild(attnres.element("ul", "legend"));
    const entry = (text) => {
      const item = list.appendChild(attnres.element("li", ""));
      const svg = d3
        .select(item)
        .append("svg")
        .attr("width", 18)
        .attr("height", 18)
        .attr("viewBox", "-9 -9 18 18")
        .attr("aria-hidden", "true");
      item.append(text);
      return svg;
    };
    const mark = (svg, kind, className = "") =>
      svg.append("path").attr("class", `mark ${kind} ${className}`).attr("d", outline(kind, 110));
    for (const kind of Object.keys(attnres.KINDS)) {
      const found = rows.filter((site) => site.kind === kind);
      if (found.length)
        mark(entry(found.some((site) => site.known) ? `read by ${attnres.KINDS[kind].name}` : "read"), kind);
    }
    const { kind } = rows[0];
    if (cells.some((cell) => cell.partial)) {
      const svg = entry("partial sum, filled as far as its block is");
      mark(svg, kind, "partial").attr("fill", filling(svg.append("defs"), kind, 0.5));
    }
    if (rows.some((site) => !site.query)) mark(entry("bypass: one source, no query"), kind, "bypass");
    entry("block in progress")
      .append("rect")
      .attr("class", "filling")
      .attr("x", -8)
      .attr("y", -8)
      .attr("width", 16)
      .attr("height", 16);
  }

  const longest = d3.max(rows, (site) => site.label.length);
  if (rows.length) legend();
  return attnres.matrix(host, {
    label: `Stream ${data.name}: which site looks at which source`,
    rows,
    columns,
    cells,
    describe,
    name,
    drawUnder,
    drawCells,
    drawColumnHeads,
    drawRowHeads,
    afterZoom,
    size: {
      left: (width) => (width < 560 ? 108 : Math.min(320, Math.max(120, (full ? 34 : 80) + 6.2 * longest))),
      right: () => 4,
      top: full ? 26 : 40,
      rowMax: 22,
      columnMax: 92,
      heightMax: 860,
      columnNeeds: full ? (blocks < 100 ? 26 : 36) : 26,
    },
  });
};
