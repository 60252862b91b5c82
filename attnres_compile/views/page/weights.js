// The depth weights of one stream: heat maps by kind of reader, the same as a table, and the mixing matrices.
"use strict";

attnres.weights = function weights(host, stream) {
  // A site of one source has weight 1 on it, which says nothing and would darken the rest.
  const most =
    d3.max(
      stream.weights.filter((row) => d3.count(row, (value) => value ?? NaN) > 1),
      (row) => d3.max(row),
    ) ?? 1;
  const title = attnres.element(
    "h3",
    "",
    attnres.element("code", "", stream.name),
    ` over ${stream.tokens.toLocaleString("en")} tokens`,
  );
  const drawn = attnres.element("div", "");
  const root = attnres.element("input", "");
  root.type = "checkbox";
  root.checked = stream.sources.length > 17;
  root.addEventListener("change", draw);
  host.append(
    title,
    attnres.element("label", "option", root, " colours by the square root, for small weights"),
    drawn,
  );
  draw();

  function draw() {
    drawn.replaceChildren();
    const scale = attnres.scale(most, root.checked);
    attnres.colourLegend(drawn, "mean weight", scale);
    const panels = drawn.appendChild(attnres.element("div", "panels"));
    for (const [kind, name] of [
      ["attention", "Attention"],
      ["mlp", "MLP"],
      ["other", "Other readers"],
      ["output", "Output"],
    ]) {
      const chosen = d3.range(stream.sites.length).filter((index) => attnres.kind(stream.kinds[index]) === kind);
      if (!chosen.length) continue;
      const axis = attnres.element("span", "axis", "columns: root, blocks by number, sum in progress");
      const panel = panels.appendChild(
        attnres.element("div", "panel heatmap", attnres.element("h4", "", name, axis)),
      );
      panel.dataset.kind = kind;
      attnres.heatmap(panel, stream, chosen, `${stream.name}: depth weights, ${name}`, scale);
    }
    numbers(
      drawn.appendChild(attnres.element("details", "", attnres.element("summary", "", "The weights as a table"))),
    );
    attnres.mixing(drawn.appendChild(attnres.element("div", "mixings")), stream, root.checked);
  }

  // Made when it is opened: it may have tens of thousands of cells.
  function numbers(details) {
    details.addEventListener("toggle", () => {
      if (details.children.length > 1) return;
      const table = d3.select(details).append("div").attr("class", "scroll").append("table").attr("class", "weights");
      table
        .append("thead")
        .append("tr")
        .selectAll("th")
        .data(["site", "read by", ...stream.sources, "entropy"])
        .join("th")
        .attr("scope", "col")
        .text((text) => text);
      const row = table.append("tbody").selectAll("tr").data(d3.range(stream.sites.length)).join("tr");
      row
        .append("th")
        .attr("scope", "row")
        .append("code")
        .text((i) => stream.sites[i]);
      row.append("td").text((i) => attnres.KINDS[attnres.kind(stream.kinds[i])].name);
      row
        .selectAll("td.number")
        .data((i) => [...stream.weights[i], stream.entropy[i]])
        .join("td")
        .attr("class", "number")
        .text((value) => (value === null ? "" : value.toFixed(4)));
    });
  }
};
