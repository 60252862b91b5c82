// The page's data, and the few helpers that all other scripts use. Text from the data goes into the page as text only.
"use strict";

const attnres = { data: JSON.parse(document.getElementById("report-data").textContent) };

attnres.KINDS = {
  attention: { name: "attention", shape: d3.symbolCircle },
  mlp: { name: "MLP", shape: d3.symbolSquare },
  other: { name: "other", shape: d3.symbolDiamond },
  output: { name: "output", shape: d3.symbolTriangle },
};

attnres.kind = (name) => (Object.hasOwn(attnres.KINDS, name) ? name : "other");

// An element with a class, its children being elements or text.
attnres.element = function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
};

attnres.button = function button(text, label, onClick) {
  const made = attnres.element("button", "", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.title = label;
  made.addEventListener("click", onClick);
  return made;
};

// The middle goes first: a module's path is known by its layer number and its last part.
attnres.cut = function cut(text, length) {
  if (text.length <= length) return text;
  const tail = Math.max(1, Math.floor((length - 1) * 0.55));
  return text.slice(0, Math.max(1, length - 1 - tail)) + "\u2026" + text.slice(-tail);
};

// For narrow pages: what stands before a layer's number goes.
attnres.fromNumber = (path) => path.replace(/^(?:[^.\d]+\.)+(?=\d)/, "");

// 1, 2, 5, 10, 20..: every how many-th label fits where one takes `needed` of `step` pixels each.
attnres.every = function every(step, needed) {
  for (let scale = 1; ; scale *= 10) {
    for (const factor of [1, 2, 5]) if (factor * scale * step >= needed) return factor * scale;
  }
};

// Numbers as runs: [1, 2, 3, 7] -> "1-3, 7".
attnres.runs = function runs(numbers) {
  const parts = [];
  for (const number of numbers) {
    const last = parts.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([from, to]) => (from === to ? `${from}` : `${from}\u2013${to}`)).join(", ");
};

// What all module paths start with, up to a dot.
attnres.shared = function shared(paths) {
  let prefix = (paths[0] ?? "").slice(0, (paths[0] ?? "").lastIndexOf(".") + 1);
  while (prefix && !paths.every((path) => path.startsWith(prefix)))
    prefix = prefix.slice(0, prefix.lastIndexOf(".", prefix.length - 2) + 1);
  return prefix;
};
