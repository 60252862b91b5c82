// How weights become colours. Cividis is even in lightness and reads the same with any colour vision. The square root is
// for many sources: equal weights of 200 of them are all dark on an even scale.
"use strict";

attnres.scale = function scale(most, root) {
  const part = (value) => Math.max(0, Math.min(1, most > 0 ? value / most : 0));
  const colour = (value) => d3.interpolateCividis(root ? Math.sqrt(part(value)) : part(value));
  return { most, root, colour, value: (share) => most * (root ? share * share : share) };
};

// Black or white, whichever can be read on a colour.
attnres.inkOn = function inkOn(colour) {
  const channel = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const { r, g, b } = d3.rgb(colour);
  const light = 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  return (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) ? "#000" : "#fff";
};

attnres.number = (value) =>
  value === null || value === undefined ? "unknown" : Number(value.toPrecision(3)).toString();

attnres.colourLegend = function colourLegend(host, text, scale) {
  const [width, steps] = [240, 80];
  const line = host.appendChild(attnres.element("p", "scale", text));
  const svg = d3
    .select(line)
    .append("svg")
    .attr("width", width + 60)
    .attr("height", 28)
    .attr("viewBox", `-30 0 ${width + 60} 28`)
    .attr("role", "img")
    .attr("aria-label", `Colours from dark blue, 0, to yellow, ${attnres.number(scale.most)}`);
  svg
    .selectAll("rect")
    .data(d3.range(steps))
    .join("rect")
    .attr("x", (i) => (i * width) / steps)
    .attr("width", width / steps + 0.5)
    .attr("height", 12)
    .attr("fill", (i) => scale.colour(scale.value(i / (steps - 1))));
  svg
    .selectAll("text")
    .data([0, 0.25, 0.5, 0.75, 1])
    .join("text")
    .attr("x", (share) => share * width)
    .attr("y", 24)
    .attr("text-anchor", "middle")
    .text((share) => Number(scale.value(share).toPrecision(2)).toString());
};
