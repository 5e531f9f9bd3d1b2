// What a model wrote, as nodes: paragraphs as they are, fenced code apart, `code` in a line. Nothing else is interpreted.

import { h } from "./dom.js";

const FENCE = /^\s*```/;

export function written(text) {
  const nodes = [];
  let lines = [];
  let isCode = false;
  const flush = () => {
    const part = lines.join("\n");
    lines = [];
    if (isCode) nodes.push(h("pre", { tabindex: "0" }, h("code", {}, part)));
    else if (part.trim()) nodes.push(h("p", {}, ...inline(part.replace(/^\n+|\n+$/g, ""))));
  };
  for (const line of text.split("\n")) {
    if (FENCE.test(line)) {
      flush();
      isCode = !isCode;
    } else lines.push(line);
  }
  flush();
  return nodes;
}

function inline(text) {
  // `like this` and, as in reStructuredText, ``like that``.
  const parts = text.split(/(``[^`\n]+``|`[^`\n]+`)/);
  return parts.map((part, at) => (at % 2 ? h("code", {}, part.replace(/^`+|`+$/g, "")) : part));
}
