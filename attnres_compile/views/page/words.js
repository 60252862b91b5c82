// One stream as rows (sites), columns (sources) and cells, and what the tooltip and a screen reader say of each.
"use strict";

attnres.words = function words(data) {
  const blocks = data.blocks.length;
  const full = data.blocks.every((block) => block.length === 1);
  const columns = data.columns.map((name, j) => ({ name, members: j > 0 && j <= blocks ? data.blocks[j - 1] : [] }));
  const rows = data.sites.map((site) => ({ ...site, kind: attnres.kind(site.kind), known: site.kind !== "" }));
  const cells = rows.flatMap((site, row) => d3.sort(site.sources).map((column) => makeCell(site, row, column)));

  // `held` are the sublayers in the source, `share` is how much of its block that is.
  function makeCell(site, row, column) {
    const { members } = columns[column];
    const partial = column === site.partial;
    const known = partial && site.behind !== null;
    const held = known ? members.slice(0, site.behind - members[0]) : members;
    return { row, column, site, partial, held, share: known ? held.length / members.length : partial ? 0.5 : 1 };
  }

  const plural = (number, one) => `${number} ${one}${number === 1 ? "" : "s"}`;
  const numbers = (members) => attnres.runs(members.map((member) => member + 1));
  const sublayers = (members) => `${members.length === 1 ? "sublayer" : "sublayers"} ${numbers(members)}`;

  function columnName(j) {
    if (j > blocks) return data.columns[j];
    return j === 0 ? "b0, the root" : `b${j}`;
  }

  function sourceText({ column, partial, held, site }) {
    const { members } = columns[column];
    if (column === 0) return "b0, the root: what the stream starts from";
    if (column > blocks) return data.columns[column];
    if (partial && site.behind === null) return `b${column} in progress: a partial sum of ${sublayers(members)}`;
    if (partial) return `b${column} in progress: ${sublayers(held)} of ${numbers(members)}`;
    return `b${column}: ${members.length === 1 ? "the output of" : "the finished sum of"} ${sublayers(members)}`;
  }

  // Equal lines together: all layers add their attention on one line.
  function places(members) {
    const lines = d3
      .groups(members, (member) => data.sublayers[member].where)
      .map(([where, ones]) => {
        const modules = ones.map((member) => data.sublayers[member].module || "(model)");
        const shown = modules.length > 3 ? `${modules[0]} \u2026 ${modules.at(-1)}` : modules.join(", ");
        return `${numbers(ones)}: ${shown}, ${where || "line unknown"}`;
      });
    return lines.length > 6 ? [...lines.slice(0, 5), `and ${lines.length - 5} more lines`] : lines;
  }

  function siteFacts(site) {
    const feeds = site.behind !== null && site.behind < data.sublayers.length ? [site.behind] : [];
    return [
      ["read by", site.readers.map((reader) => reader || "(model)")],
      ["for sublayer", places(feeds)],
      ["value", site.tensor],
    ];
  }

  function describeColumn(j) {
    const { members } = columns[j];
    const readers = d3.count(cells, (cell) => (cell.column === j ? 1 : NaN));
    return {
      title: j === 0 || j > blocks ? columnName(j) : full ? `b${j}: ${sublayers(members)}` : `b${j}: block ${j}`,
      rows: [
        [
          "holds",
          j === 0
            ? "what the stream starts from"
            : members.length
              ? `the ${members.length > 1 ? "sum" : "output"} of ${sublayers(members)}`
              : "",
        ],
        ["added at", places(members)],
        ["value", members.length ? data.sublayers[members.at(-1)].tensor : rows[0]?.tensor],
        ["read by", plural(readers, "site")],
      ],
    };
  }

  function describeRow(site, row) {
    const names = site.sources.map((j) =>
      j === site.partial ? `b${j} in progress` : j === 0 ? "b0" : columnName(j),
    );
    const shown = names.length > 6 ? [...names.slice(0, 3), "\u2026", ...names.slice(-2)] : names;
    return [
      ["site", `${row + 1} of ${rows.length}`],
      ...siteFacts(site),
      [plural(names.length, "source"), shown.join(", ")],
      ["query", site.query ? plural(data.features, "number") : "none: one source leaves nothing to choose (bypass)"],
    ];
  }

  function describeGap(site, column) {
    const starts =
      column === site.block ? "it starts here, nothing is in it yet" : "it is not begun when this site reads";
    return [
      [
        "not a source",
        `${columnName(column)}: ${column >= site.block && column <= blocks ? starts : "the plan leaves it out"}`,
      ],
    ];
  }

  function describe({ type, row, column, cell }) {
    if (type === "column") return describeColumn(column);
    const site = rows[row];
    const head = { title: site.name, badge: site.known ? attnres.KINDS[site.kind].name : "" };
    if (type === "row") return { ...head, rows: describeRow(site, row) };
    if (type === "gap") return { ...head, rows: describeGap(site, column) };
    return { ...head, rows: [["looks at", sourceText(cell)], ["added at", places(cell.held)], ...siteFacts(site)] };
  }

  function name({ type, row, column, cell }) {
    if (type === "column") return describeColumn(column).title;
    const site = rows[row];
    const kind = site.known ? `, ${attnres.KINDS[site.kind].name}` : "";
    const bypass = site.query ? "" : ", bypass";
    if (type === "row") return `${site.name}${kind}, ${plural(site.sources.length, "source")}${bypass}`;
    return `${site.name}${kind}: ${sourceText(cell)}${bypass}`;
  }

  return { blocks, full, columns, rows, cells, numbers, describe, name };
};
