// Plots of columns over time with uPlot, a legend that shows the values under the cursor, in the colours of the theme.

import { colour, h } from "./dom.js";
import { clock, lastTime, seconds } from "./format.js";

const LEAST_S = 60;
const SIGHT = 4;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];

/** Without the zeros after the point. */
const round = (text) => text.replace(/\.(\d*?)0+(?=\D|$)/, (_, kept) => (kept ? `.${kept}` : ""));

/** `series`: [column, label, colour, "points" where no line joins them]; `target`: which of the history's is drawn, too;
 * `format` writes a value; the axis reaches from 0 to `least` at least, in steps of whole numbers if `isWhole`. */
export class Plot {
  constructor({ title, series, format, note, least, isWhole, target }) {
    this.names = series.map(([name]) => name);
    this.series = series;
    this.format = format;
    this.least = least;
    this.isWhole = isWhole;
    this.targetOf = (history) => (target && history?.targets[target]) ?? null;
    this.plot = null;
    this.history = null;
    this.window = null;
    this.legend = series.map(([, label, tint]) => {
      const value = h("span", { class: "value" }, "–");
      return { value, node: h("span", { class: "series" }, h("span", { class: `dot tint-${tint}` }), `${label} `, value) };
    });
    this.promised = h("span", { class: "series muted" });
    this.period = h("span", { class: "muted period" });
    this.canvas = h("div", { class: "canvas", role: "img", "aria-label": `${title} over time` });
    this.element = h("figure", { class: "plot" },
      h("figcaption", {}, h("h2", {}, title), note && h("span", { class: "muted" }, note), this.period,
        h("div", { class: "series-row" }, this.legend.map(({ node }) => node), this.promised)),
      this.canvas);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  /** `window`: the seconds to show. */
  draw(history, window) {
    this.history = history;
    this.window = window;
    if (!this.canvas.clientWidth) return;
    this.plot ??= this.make();
    const promised = this.targetOf(history);
    this.promised.textContent = promised === null ? "" : `┄ target ${this.format(promised)}`;
    const last = history.at.at(-1) ?? 0;
    const first = Math.max(history.at[0] ?? last, last - window);
    this.plot.batch(() => {
      this.plot.setData(history.data(this.names), false);
      this.plot.setScale("x", { min: Math.min(first, last - LEAST_S), max: last });
    });
    this.showValues(this.plot.cursor.idx);
  }

  resize() {
    if (!this.plot) return this.history && this.draw(this.history, this.window);
    const width = this.canvas.clientWidth;
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: this.canvas.clientHeight });
  }

  /** Draws again in the colours of another theme. */
  recolour() {
    this.plot?.destroy();
    this.plot = null;
    if (this.history) this.draw(this.history, this.window);
  }

  /** Of the period under the cursor, or of the last one that is over. */
  showValues(at) {
    const { at: begins, columns, periodS } = this.history;
    const index = at ?? begins.length - 2;
    this.period.textContent = typeof at === "number" ? `${seconds(periodS)} from ${clock(begins[at])}` : lastTime(periodS);
    this.names.forEach((name, each) => {
      this.legend[each].value.textContent = this.format(columns[name]?.[index] ?? null);
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
      cursor: { sync: { key: "overview" }, drag: { x: false, y: false }, y: false },
      scales: { x: { time: true }, y: { range: (_, __, max) => this.range(max) } },
      axes: [
        { ...axis, space: 70, size: 30, gap: 8, values: (_, splits, __, ___, step) => splits.map((at) => clock(at, step < 60)) },
        { ...axis, size: 58, ...(this.isWhole ? { incrs: WHOLE } : {}), values: (_, splits) => splits.map((value) => round(this.format(value))) },
      ],
      series: [{}, ...this.series.map(([, label, tint, form]) => {
        const stroke = colour(`tint-${tint}`), isPoints = form === "points";
        const points = { show: isPoints, size: 4, width: 0, fill: stroke };
        return { label, stroke, width: 1.5, points, spanGaps: false, ...(isPoints ? { paths: () => null } : {}) };
      })],
      hooks: {
        setCursor: [(plot) => this.history && this.showValues(plot.cursor.idx)],
        draw: [(plot) => this.drawTarget(plot, text)],
      },
    }, this.history.data(this.names), this.canvas);
  }

  drawTarget(plot, stroke) {
    const promised = this.targetOf(this.history);
    if (promised === null || promised > plot.scales.y.max) return;
    const { left, width } = plot.bbox, y = Math.round(plot.valToPos(promised, "y", true));
    const { ctx } = plot;
    ctx.save();
    Object.assign(ctx, { strokeStyle: stroke, lineWidth: devicePixelRatio });
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(left + width, y);
    ctx.stroke();
    ctx.restore();
  }

  /** What was promised is in sight, unless it is far above everything that was measured. */
  range(max) {
    const most = max ?? 0, promised = this.targetOf(this.history) ?? 0;
    return [0, Math.max(promised <= SIGHT * most ? Math.max(most, promised) * 1.15 : most * 1.15, this.least)];
  }
}
