// A matrix of rows, columns and cells with heads that stay in place while the cells are zoomed and panned.
//
// spec: label       what a screen reader calls it
//       rows, columns   any objects, one per row and column
//       cells       [{row, column, ..}], ordered by row and column; a place without a cell is empty
//       size        {left(width), right(width), top, rowMax, columnMax, heightMax, rowNeeds, columnNeeds}, pixels
//       drawUnder(group, layout), drawCells(rowGroups, layout), drawRowHeads(groups, layout),
//       drawColumnHeads(groups, layout), drawAside(groups, layout), afterZoom(matrix)
//       describe(target) -> {title, badge, rows} for the tooltip, name(target) -> one line for a screen reader
// A target is {type: "cell" | "row" | "column" | "gap", row, column, cell}.
"use strict";

attnres.matrix = function matrix(host, spec) {
  const { rows, columns, cells, size } = spec;
  const at = new Map(cells.map((cell) => [cell.row * columns.length + cell.column, cell]));
  const byRow = d3.group(cells, (cell) => cell.row);
  const byColumn = d3.group(cells, (cell) => cell.column);
  const id = `matrix-${(attnres.matrix.made = (attnres.matrix.made ?? 0) + 1)}`;
  // Beyond this many cells the page would answer too slowly if all of them changed under the pointer.
  const few = cells.length <= 3000;
  let layout,
    parts,
    active = null,
    focused = null,
    drawnWidth = 0,
    transform = d3.zoomIdentity;

  const bar = host.appendChild(attnres.element("div", "matrix-bar"));
  const frame = host.appendChild(attnres.element("div", "matrix-frame"));
  const zoom = d3
    .zoom()
    .clickDistance(4)
    .filter(zooms)
    .on("zoom", (event) => apply(event.transform));

  const self = {
    spec,
    rows,
    columns,
    byRow,
    byColumn,
    cellAt,
    nodeOf,
    focus,
    activate,
    pin,
    zoomBy,
    panBy,
    reset,
    get layout() {
      return layout;
    },
    get transform() {
      return transform;
    },
    get parts() {
      return parts;
    },
    get focused() {
      return focused;
    },
  };

  bar.append(
    attnres.button("+", "Zoom in", () => zoomBy(1.5)),
    attnres.button("\u2212", "Zoom out", () => zoomBy(1 / 1.5)),
    attnres.button("Reset", "Show everything", reset),
    attnres.element(
      "span",
      "hint",
      "Ctrl + wheel or pinch zooms, dragging pans. Keys: arrows, + \u2212 0, Enter pins, Escape closes.",
    ),
  );

  function cellAt(row, column) {
    return at.get(row * columns.length + column);
  }

  // The wheel scrolls the page unless Ctrl is held; one finger scrolls it while everything is in view.
  function zooms(event) {
    if (event.type === "wheel") return event.ctrlKey || event.metaKey;
    if (event.type.startsWith("touch")) return event.touches.length > 1 || transform.k > 1;
    return !event.button && !event.ctrlKey;
  }

  function measure(width) {
    const [left, right] = [size.left(width), size.right(width)];
    const cw = Math.min(size.columnMax, (width - left - right) / columns.length);
    const ch = Math.min(size.rowMax, size.heightMax / rows.length);
    const [plotWidth, plotHeight] = [cw * columns.length, ch * rows.length];
    return {
      cw,
      ch,
      left,
      right,
      top: size.top,
      plotWidth,
      plotHeight,
      width: left + plotWidth + right,
      height: size.top + plotHeight + 6,
      most: Math.max(4, 40 / Math.min(cw, ch)),
    };
  }

  function draw() {
    drawnWidth = frame.clientWidth;
    if (drawnWidth < 40) return;
    layout = measure(drawnWidth);
    const hadFocus = focused && frame.contains(document.activeElement);
    const { left, top, plotWidth, plotHeight, width, height, cw, ch } = layout;
    frame.replaceChildren();
    const svg = d3
      .select(frame)
      .append("svg")
      .attr("viewBox", `0 0 ${width} ${height}`)
      .attr("width", width)
      .attr("height", height)
      .attr("role", "grid")
      .attr("aria-label", spec.label)
      .attr("aria-rowcount", rows.length + 1)
      .attr("aria-colcount", columns.length + 1)
      .classed("few", few);
    const defs = svg.append("defs");
    const clip = (name, x, y, w, h) => {
      defs
        .append("clipPath")
        .attr("id", `${id}-${name}`)
        .append("rect")
        .attr("x", x)
        .attr("y", y)
        .attr("width", w)
        .attr("height", h);
      return `url(#${id}-${name})`;
    };
    const plot = svg
      .append("g")
      .attr("class", "plot")
      .attr("transform", `translate(${left},${top})`)
      .attr("clip-path", clip("plot", -1, -1, plotWidth + 2, plotHeight + 2))
      .attr("role", "presentation");
    plot.append("rect").attr("class", "catch").attr("width", plotWidth).attr("height", plotHeight);
    const zoomed = plot.append("g").attr("role", "presentation");
    const under = zoomed.append("g").attr("aria-hidden", "true");
    const rowMark = zoomed.append("rect").attr("class", "row-mark").attr("width", plotWidth).attr("height", ch);
    const columnMark = zoomed
      .append("rect")
      .attr("class", "column-mark")
      .attr("width", cw)
      .attr("height", plotHeight);
    const rowGroups = zoomed
      .selectAll("g.row")
      .data(rows)
      .join("g")
      .attr("class", "row")
      .attr("role", "row")
      .attr("aria-rowindex", (_, i) => i + 2)
      .attr("aria-owns", (_, i) => `${id}-row-${i}`)
      .attr("transform", (_, i) => `translate(0,${i * ch})`);
    const over = zoomed.append("g").attr("class", "over").attr("aria-hidden", "true");
    const ring = zoomed.append("rect").attr("class", "ring");

    const columnHeads = svg
      .append("g")
      .attr("class", "column-heads")
      .attr("role", "row")
      .attr("aria-rowindex", 1)
      .attr("transform", `translate(${left},0)`)
      .attr("clip-path", clip("columns", -16, 0, plotWidth + 32, height))
      .selectAll("g")
      .data(columns)
      .join("g")
      .attr("class", "head")
      .attr("role", "columnheader")
      .attr("aria-colindex", (_, j) => j + 2)
      .attr("tabindex", -1)
      .attr("aria-label", (_, j) => spec.name({ type: "column", column: j }));
    const rowHeads = svg
      .append("g")
      .attr("class", "row-heads")
      .attr("transform", `translate(0,${top})`)
      .attr("clip-path", clip("rows", 0, -6, left, plotHeight + 10))
      .selectAll("g.head")
      .data(rows)
      .join("g")
      .attr("class", "head")
      .attr("role", "rowheader")
      .attr("id", (_, i) => `${id}-row-${i}`)
      .attr("aria-colindex", 1)
      .attr("tabindex", -1)
      .attr("aria-label", (_, i) => spec.name({ type: "row", row: i }));
    const asides = svg
      .append("g")
      .attr("class", "asides")
      .attr("aria-hidden", "true")
      .attr("transform", `translate(${left + plotWidth},${top})`)
      .attr("clip-path", clip("aside", -1, -1, layout.right + 1, plotHeight + 2))
      .selectAll("g")
      .data(rows)
      .join("g")
      .attr("class", "aside");

    parts = {
      svg,
      defs,
      plot,
      under,
      zoomed,
      rowGroups,
      rowHeads,
      columnHeads,
      asides,
      rowMark,
      columnMark,
      over,
      ring,
      id,
    };
    spec.drawUnder?.(under, self);
    spec.drawCells(rowGroups, self);
    spec.drawColumnHeads(columnHeads, self);
    spec.drawRowHeads(rowHeads, self);
    spec.drawAside?.(asides, self);

    zoom
      .extent([
        [0, 0],
        [plotWidth, plotHeight],
      ])
      .translateExtent([
        [0, 0],
        [plotWidth, plotHeight],
      ])
      .scaleExtent([1, layout.most]);
    plot.call(zoom).on("dblclick.zoom", null);
    svg
      .on("pointermove", hover)
      .on("pointerleave", () => {
        activate(null);
        attnres.tip.leave();
      })
      .on("click", (event) => {
        const target = targetOf(event);
        if (target) pin(target, event);
      });
    attnres.keys(self);
    plot.call(zoom.transform, d3.zoomIdentity);
    const first = cells[0];
    nodeOf(
      focused ?? (first ? { type: "cell", row: first.row, column: first.column } : { type: "row", row: 0 }),
    ).setAttribute("tabindex", 0);
    if (hadFocus) focus(focused);
  }

  function apply(next) {
    transform = next;
    const { cw, ch, top, left } = layout;
    parts.zoomed.attr("transform", next);
    const everyRow = attnres.every(ch * next.k, size.rowNeeds ?? 13);
    const everyColumn = attnres.every(cw * next.k, size.columnNeeds ?? 26);
    parts.rowHeads
      .attr("transform", (_, i) => `translate(0,${next.applyY((i + 0.5) * ch)})`)
      .classed("thin", (_, i) => i % everyRow > 0);
    parts.asides.attr("transform", (_, i) => `translate(0,${next.applyY((i + 0.5) * ch)})`);
    parts.columnHeads
      .attr("transform", (_, j) => `translate(${next.applyX((j + 0.5) * cw)},${top})`)
      .classed("thin", (_, j) => j % everyColumn > 0);
    parts.svg.classed("zoomed-in", next.k > 1);
    spec.afterZoom?.(self);
  }

  function zoomBy(factor) {
    parts.plot.call(zoom.scaleBy, factor);
  }
  function panBy(x, y) {
    parts.plot.call(zoom.translateBy, x / transform.k, y / transform.k);
  }
  function reset() {
    parts.plot.call(zoom.transform, d3.zoomIdentity);
  }

  // --- what is under the pointer or has the focus

  function targetOf(event) {
    const [px, py] = d3.pointer(event, parts.svg.node());
    const [x, y] = [transform.invertX(px - layout.left), transform.invertY(py - layout.top)];
    const [column, row] = [Math.floor(x / layout.cw), Math.floor(y / layout.ch)];
    const inColumns =
      px >= layout.left && px < layout.left + layout.plotWidth && column >= 0 && column < columns.length;
    const inRows = py >= layout.top && py < layout.top + layout.plotHeight && row >= 0 && row < rows.length;
    if (inRows && inColumns) {
      const cell = cellAt(row, column);
      return { type: cell ? "cell" : "gap", row, column, cell };
    }
    if (inRows) return { type: "row", row };
    if (inColumns && py < layout.top) return { type: "column", column };
    return null;
  }

  function nodeOf(target) {
    if (target.type === "cell") return cellAt(target.row, target.column)?.node;
    if (target.type === "row") return parts.rowHeads.nodes()[target.row];
    return parts.columnHeads.nodes()[target.column];
  }

  function hover(event) {
    if (event.buttons) return;
    const target = targetOf(event);
    activate(target);
    if (target) attnres.tip.show(spec.describe(target), { x: event.clientX, y: event.clientY }, null);
    else attnres.tip.leave();
  }

  function pin(target, event) {
    const node = nodeOf(target);
    activate(target);
    const place = event?.clientX ? { x: event.clientX, y: event.clientY } : node.getBoundingClientRect();
    if (target.type !== "gap") setFocus(target);
    attnres.tip.pin(spec.describe(target), place, node);
  }

  // Which rows and columns belong to a target: a row's sources, a column's readers.
  function activate(target) {
    const key = target && `${target.type} ${target.row} ${target.column}`;
    if (key === active) return;
    active = key;
    const onRow = target?.row;
    const onColumn = target?.column;
    const chosen = !target ? [] : onRow !== undefined ? (byRow.get(onRow) ?? []) : (byColumn.get(onColumn) ?? []);
    const columnsOn = new Set(onRow !== undefined ? chosen.map((cell) => cell.column) : [onColumn]);
    const rowsOn = new Set(onRow !== undefined ? [onRow] : chosen.map((cell) => cell.row));
    parts.zoomed.selectAll(".on").classed("on", false);
    for (const cell of chosen) cell.node.classList.add("on");
    parts.rowHeads.classed("on", (_, i) => rowsOn.has(i));
    parts.columnHeads.classed("on", (_, j) => columnsOn.has(j)).classed("here", (_, j) => j === onColumn);
    parts.asides.classed("on", (_, i) => rowsOn.has(i));
    parts.svg.classed("active", !!target);
    parts.rowMark.classed("shown", onRow !== undefined).attr("y", (onRow ?? 0) * layout.ch);
    parts.columnMark.classed("shown", onColumn !== undefined).attr("x", (onColumn ?? 0) * layout.cw);
  }

  function setFocus(target) {
    if (focused) nodeOf(focused)?.setAttribute("tabindex", -1);
    else parts.svg.selectAll("[tabindex='0']").attr("tabindex", -1);
    focused = target;
    nodeOf(target).setAttribute("tabindex", 0);
  }

  function focus(target) {
    setFocus(target);
    bringIntoView(target);
    nodeOf(target).focus();
  }

  function bringIntoView({ row, column }) {
    const outside = (from, length, low, high) => (from < low ? low - from : Math.min(0, high - from - length));
    const { cw, ch, plotWidth, plotHeight } = layout;
    const dx = column === undefined ? 0 : outside(transform.applyX(column * cw), cw * transform.k, 0, plotWidth);
    const dy = row === undefined ? 0 : outside(transform.applyY(row * ch), ch * transform.k, 0, plotHeight);
    if (dx || dy) panBy(dx, dy);
  }

  new ResizeObserver(() => {
    if (Math.abs(frame.clientWidth - drawnWidth) >= 1) draw();
  }).observe(frame);
  draw();
  return self;
};
