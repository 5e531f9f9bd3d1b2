// A waterfall as SVG: a row per span, drawn again whenever its width changes.

import { h, svg } from "./dom.js";
import { count, ms } from "./format.js";

const ROW = 30, AXIS = 26, BAR = 14;

export function waterfall(sequence) {
  const holder = h("div", { class: "drawing" });
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.round(contentRect.width) === width) return;
    width = Math.round(contentRect.width);
    if (width > 0) holder.replaceChildren(drawn(sequence, width));
  }).observe(holder);
  return holder;
}

function drawn(sequence, width) {
  const rows = [...sequence.spans];
  if (Math.abs(sequence.unattributed_ms) >= 0.0005 * sequence.total_ms) {
    // It lies somewhere between the others: shown at the end.
    const took = Math.max(0, sequence.unattributed_ms);
    rows.push({ name: "unattributed", start_ms: Math.max(0, sequence.total_ms - took), ms: took });
  }
  const left = width < 520 ? 92 : 118, right = 76;
  const total = Math.max(sequence.total_ms, 1e-6);
  const x = (at) => left + ((width - left - right) * at) / total;
  const height = AXIS + ROW * rows.length + 4;
  const said = rows.filter((span) => span.ms >= 0.01 * total).map((span) => `${span.name} ${ms(span.ms)}`).join(", ");
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Waterfall: ${said}` },
    svg("defs", {}, stripes("stripes-gap", "gap-line"), stripes("stripes-blocked", "blocked-line")),
    axis(total, x, height, width - left - right),
    rows.map((span, at) => row(span, AXIS + at * ROW, x, width)));
}

function stripes(id, className) {
  return svg("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 2, height: 5, class: className }));
}

function axis(total, x, height, width) {
  const rough = total / Math.max(2, Math.floor(width / 110));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const marks = [];
  for (let at = 0; at <= total * 1.0001; at += step) {
    marks.push(
      svg("line", { class: "grid", x1: x(at), x2: x(at), y1: AXIS - 6, y2: height }),
      svg("text", { class: "tick", x: x(at), y: 12, "text-anchor": at ? "middle" : "start" }, at ? ms(at) : "0"));
  }
  return svg("g", {}, marks);
}

function row(span, y, x, width) {
  const start = x(span.start_ms);
  const wide = (took) => Math.max(2, x(took) - x(0));
  const parts = [
    svg("title", {}, `${span.name}: ${ms(span.ms)}, from ${ms(span.start_ms)}`),
    svg("rect", { class: "hit", x: 0, y, width, height: ROW }),
    svg("text", { class: "label", x: 0, y: y + BAR }, span.name),
    svg("text", { class: "time", x: width, y: y + BAR, "text-anchor": "end" }, ms(span.ms)),
    svg("rect", { class: `span-${span.name}`, x: start, y: y + 3, width: wide(span.ms), height: BAR, rx: 2 }),
  ];
  if (span.blocked_by) {
    const share = Math.min(1, span.blocked_by.steps / Math.max(1, span.steps));
    parts.push(svg("rect", { fill: "url(#stripes-blocked)", x: start, y: y + 3, width: wide(span.ms * share), height: BAR }));
  }
  for (const chunk of span.inside ?? []) {
    parts.push(svg("rect", { class: "chunk", x: x(chunk.start_ms), y: y + 20, width: Math.max(1, wide(chunk.ms) - 1), height: 5 },
      svg("title", {}, `step ${chunk.step}: ${count(chunk.num_tokens)} prompt tokens, ${ms(chunk.ms)}`)));
  }
  if (span.gap_ms > 0 && !span.inside) {
    parts.push(svg("rect", { fill: "url(#stripes-gap)", x: start, y: y + 20, width: wide(span.gap_ms), height: 5 },
      svg("title", {}, `device idle between steps: ${ms(span.gap_ms)}`)));
  }
  for (const lost of span.preempted ?? []) {
    parts.push(svg("path", { class: "preempted", d: `M${x(lost.at_ms)},${y + 1} l4,-7 l-8,0 z` },
      svg("title", {}, `preempted at ${ms(lost.at_ms)}`)));
  }
  return svg("g", { class: "row" }, parts);
}
