// The keyboard on a matrix: one of its cells and heads is in the tab order, arrows move on from there.
"use strict";

attnres.keys = function keys(matrix) {
  const { rows, columns, byRow, byColumn, parts } = matrix;
  const cell = (found) => found && { type: "cell", row: found.row, column: found.column, cell: found };
  const clamp = (value, most) => Math.max(0, Math.min(most, value));

  // In another row: the same column, or the nearest that has a cell there.
  function inRow(row, column) {
    const found = byRow.get(row);
    if (!found) return { type: "row", row };
    return cell(d3.least(found, (one) => Math.abs(one.column - column)));
  }

  function sideways(target, step) {
    if (target.type === "column") return { type: "column", column: clamp(target.column + step, columns.length - 1) };
    const found = byRow.get(target.row) ?? [];
    const place = target.type === "row" ? -1 : found.indexOf(target.cell);
    const next = clamp(place + step + 1, found.length) - 1;
    return next < 0 ? { type: "row", row: target.row } : cell(found[next]);
  }

  function upOrDown(target, step) {
    if (target.type === "row") return { type: "row", row: clamp(target.row + step, rows.length - 1) };
    if (target.type === "column") {
      if (step < 0) return target;
      return cell(byColumn.get(target.column)?.[0]) ?? target;
    }
    if (target.row + step < 0) return { type: "column", column: target.column };
    return inRow(clamp(target.row + step, rows.length - 1), target.column);
  }

  function moved(event, target) {
    const all = event.ctrlKey || event.metaKey;
    switch (event.key) {
      case "ArrowLeft":
        return sideways(target, -1);
      case "ArrowRight":
        return sideways(target, 1);
      case "ArrowUp":
        return upOrDown(target, -1);
      case "ArrowDown":
        return upOrDown(target, 1);
      case "PageUp":
        return upOrDown(target, -Math.min(10, target.row ?? 0));
      case "PageDown":
        return upOrDown(target, 10);
      case "Home":
        return all ? inRow(0, 0) : sideways(target, -columns.length);
      case "End":
        return all ? inRow(rows.length - 1, columns.length) : sideways(target, columns.length);
      default:
        return null;
    }
  }

  const pans = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };

  function act(event, target) {
    if (event.shiftKey && pans[event.key]) return (matrix.panBy(...pans[event.key]), true);
    if (event.altKey) return false;
    if (!event.ctrlKey && !event.metaKey) {
      if (event.key === "+" || event.key === "=") return (matrix.zoomBy(1.5), true);
      if (event.key === "-") return (matrix.zoomBy(1 / 1.5), true);
      if (event.key === "0") return (matrix.reset(), true);
      if (event.key === "Enter" || event.key === " ") return (matrix.pin(target), true);
    }
    const next = moved(event, target);
    if (next) matrix.focus(next);
    return !!next;
  }

  // Each node of the grid knows its target.
  function targetOf(node) {
    const found = d3.select(node);
    if (found.classed("cell")) return cell(found.datum());
    if (!found.classed("head")) return null;
    const row = parts.rowHeads.nodes().indexOf(node);
    return row >= 0 ? { type: "row", row } : { type: "column", column: parts.columnHeads.nodes().indexOf(node) };
  }

  parts.svg
    .on("keydown", (event) => {
      const target = targetOf(event.target);
      if (target && act(event, target)) event.preventDefault();
    })
    .on("focusin", (event) => {
      const target = targetOf(event.target);
      if (!target) return;
      matrix.activate(target);
      ring(target);
      attnres.tip.show(matrix.spec.describe(target), event.target.getBoundingClientRect(), event.target);
    })
    .on("focusout", () => {
      parts.ring.classed("shown", false);
      matrix.activate(null);
      attnres.tip.leave();
    });

  function ring({ row, column }) {
    const { cw, ch, plotWidth } = matrix.layout;
    const visible = document.activeElement?.matches(":focus-visible");
    parts.ring
      .classed("shown", visible && row !== undefined)
      .attr("x", (column ?? 0) * cw)
      .attr("y", (row ?? 0) * ch)
      .attr("width", column === undefined ? plotWidth : cw)
      .attr("height", ch);
  }
};
