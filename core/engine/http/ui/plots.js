// Plots of columns over time with uPlot, a legend that shows the values under the cursor, in the colours of the theme.

import { colour, h } from "./dom.js";

const LEAST_S = 30;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const two = (number) => String(number).padStart(2, "0");

/** Without the zeros after the point. */
const round = (text) => text.replace(/\.(\d*?)0+(?=\D|$)/, (_, kept) => (kept ? `.${kept}` : ""));

function clock(at, withSeconds) {
  const time = new Date(at * 1000);
  return `${two(time.getHours())}:${two(time.getMinutes())}${withSeconds ? `:${two(time.getSeconds())}` : ""}`;
}

/** `series`: [column, label, colour]; `format` writes a value; the axis reaches from 0 to `least` at least,
 * in steps of whole numbers if `isWhole`. */
export class Plot {
  constructor({ title, series, format, note, least, isWhole }) {
    this.names = series.map(([name]) => name);
    this.series = series;
    this.format = format;
    this.least = least;
    this.isWhole = isWhole;
    this.plot = null;
    this.samples = null;
    this.window = null;
    this.legend = series.map(([, label, tint]) => {
      const value = h("span", { class: "value" }, "–");
      return { value, node: h("span", { class: "series" }, h("span", { class: `dot tint-${tint}` }), `${label} `, value) };
    });
    this.canvas = h("div", { class: "canvas", role: "img", "aria-label": `${title} over time` });
    this.element = h("figure", { class: "plot" },
      h("figcaption", {}, h("h2", {}, title), note && h("span", { class: "muted" }, note),
        h("div", { class: "series-row" }, this.legend.map(({ node }) => node))),
      this.canvas);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  /** `window`: the seconds to show; null for all. */
  draw(samples, window) {
    this.samples = samples;
    this.window = window;
    if (!this.canvas.clientWidth) return;
    this.plot ??= this.make();
    const last = samples.at.at(-1) ?? 0;
    const first = Math.max(samples.at[0] ?? last, window === null ? 0 : last - window);
    this.plot.batch(() => {
      this.plot.setData(samples.data(this.names), false);
      this.plot.setScale("x", { min: Math.min(first, last - LEAST_S), max: last });
    });
    this.showValues(this.plot.cursor.idx);
  }

  resize() {
    if (!this.plot) return this.samples && this.draw(this.samples, this.window);
    const width = this.canvas.clientWidth;
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: this.canvas.clientHeight });
  }

  /** Draws again in the colours of another theme. */
  recolour() {
    this.plot?.destroy();
    this.plot = null;
    if (this.samples) this.draw(this.samples, this.window);
  }

  showValues(at) {
    const index = at ?? this.samples.at.length - 1;
    this.names.forEach((name, each) => {
      this.legend[each].value.textContent = this.format(this.samples.columns[name][index] ?? null);
    });
  }

  make() {
    const text = colour("muted"), line = colour("line");
    const axis = { stroke: text, font: "11px system-ui", grid: { stroke: line, width: 1 }, ticks: { show: false } };
    return new uPlot({
      width: this.canvas.clientWidth,
      height: this.canvas.clientHeight,
      padding: [8, 24, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "latency" }, drag: { x: false, y: false }, y: false },
      scales: { x: { time: true }, y: { range: (_, __, max) => this.range(max) } },
      axes: [
        { ...axis, space: 70, size: 30, gap: 8, values: (_, splits, __, ___, step) => splits.map((at) => clock(at, step < 60)) },
        { ...axis, size: 58, ...(this.isWhole ? { incrs: WHOLE } : {}), values: (_, splits) => splits.map((value) => round(this.format(value))) },
      ],
      series: [{}, ...this.series.map(([, label, tint]) => ({
        label, stroke: colour(`tint-${tint}`), width: 1.5, points: { show: false }, spanGaps: false,
      }))],
      hooks: { setCursor: [(plot) => this.samples && this.showValues(plot.cursor.idx)] },
    }, this.samples.data(this.names), this.canvas);
  }

  range(max) {
    return [0, Math.max((max ?? 0) * 1.15, this.least)];
  }
}
