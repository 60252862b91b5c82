// One tooltip for the whole page. It follows the pointer or the focus; a click or Enter pins it, Escape closes it.
"use strict";

attnres.tip = (function () {
  const box = document.getElementById("tip");
  let pinned = false;
  let owner = null;

  // content: {title, badge?, rows: [[label, text or list of texts], ..]}
  function fill(content) {
    const title = attnres.element("p", "tip-title", attnres.element("strong", "", content.title));
    if (content.badge) title.append(" ", attnres.element("span", "tip-badge", content.badge));
    const list = attnres.element("dl", "");
    for (const [label, value] of content.rows) {
      const texts = (Array.isArray(value) ? value : [value]).filter((text) => text !== "" && text != null);
      if (!texts.length) continue;
      list.append(attnres.element("dt", "", label));
      for (const text of texts) list.append(attnres.element("dd", "", text));
    }
    const close = attnres.button("\u00d7", "Close", hide);
    close.className = "tip-close";
    box.replaceChildren(close, title, list);
  }

  // at: {x, y} in the window (the pointer), or a rectangle (what has the focus).
  function place(at) {
    if (getComputedStyle(box).getPropertyValue("--docked").trim() === "1") {
      box.style.left = box.style.top = "";
      return;
    }
    const gap = 14;
    const size = box.getBoundingClientRect();
    const [left, right] = [at.left ?? at.x, at.right ?? at.x];
    const [top, bottom] = [at.top ?? at.y, at.bottom ?? at.y];
    const width = document.documentElement.clientWidth;
    const height = document.documentElement.clientHeight;
    let x = right + gap;
    if (x + size.width > width - 4) x = Math.max(4, left - gap - size.width);
    let y = bottom + gap;
    if (y + size.height > height - 4) y = Math.max(4, top - gap - size.height);
    box.style.left = `${x + scrollX}px`;
    box.style.top = `${y + scrollY}px`;
  }

  function show(content, at, node) {
    if (pinned) return;
    fill(content);
    box.hidden = false;
    place(at);
    describe(node);
  }

  function describe(node) {
    if (owner) owner.removeAttribute("aria-describedby");
    owner = node ?? null;
    if (owner) owner.setAttribute("aria-describedby", "tip");
  }

  function pin(content, at, node) {
    pinned = false;
    show(content, at, node);
    pinned = true;
    box.classList.add("pinned");
  }

  function hide() {
    pinned = false;
    box.hidden = true;
    box.classList.remove("pinned");
    describe(null);
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
  document.addEventListener("click", (event) => {
    if (pinned && !box.contains(event.target) && !event.target.closest?.(".matrix-frame svg, .mixing")) hide();
  });

  return { show, pin, hide, leave: () => pinned || hide() };
})();
