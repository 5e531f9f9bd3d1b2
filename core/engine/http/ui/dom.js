// Elements without markup: whatever a model or a client wrote becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes: `on...` listeners, `class`, others as they are; false and null are left out. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A bar of `share` (0..1) of what holds it. */
export function bar(share, className = "") {
  const inner = h("span", { class: className });
  inner.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return h("span", { class: "bar", "aria-hidden": "true" }, inner);
}

/** The colour of a custom property, for a canvas. */
export function colour(name) {
  const probe = document.body.appendChild(h("span", { hidden: true }));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
