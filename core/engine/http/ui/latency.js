// Percentiles, speed, queue and KV cache over time.

import { poll } from "./api.js";
import { h } from "./dom.js";
import { count, figure, ms } from "./format.js";
import { Plot } from "./plots.js";
import { Sampler, Samples } from "./samples.js";

const PERIOD_MS = 1000;
const WINDOWS = { "5 min": 300, "30 min": 1800, All: null };
const percentiles = (name) => [[`${name}50`, "P50", "blue"], [`${name}95`, "P95", "amber"], [`${name}99`, "P99", "red"]];

export function latencyScreen(samples = new Samples()) {
  let sampler = new Sampler();
  let window = 300;
  let isShown = false;
  let stop = null;
  const plots = [
    new Plot({ title: "TTFT", note: "arrival to the first token", series: percentiles("ttft"), format: ms, least: 1 }),
    new Plot({ title: "ITL", note: "between two tokens", series: percentiles("itl"), format: ms, least: 1 }),
    new Plot({ title: "Tokens/s", series: [["output", "output", "green"], ["prompt", "prompt", "blue"]], format: figure, least: 10 }),
    new Plot({ title: "Requests", series: [["running", "running", "green"], ["waiting", "waiting", "amber"]], format: count, least: 4, isWhole: true }),
    new Plot({ title: "KV cache", note: "blocks leased", series: [["kv", "used", "violet"]], format: (value) => (value === null ? "–" : `${figure(value)} %`), least: 1 }),
  ];
  const said = h("p", { class: "muted", role: "status" });
  const table = h("tbody");
  const choose = Object.entries(WINDOWS).map(([name, width]) => h("label", { class: "choice" },
    h("input", { type: "radio", name: "window", checked: width === window, onchange: () => { window = width; draw(); } }), h("span", {}, name)));
  const element = h("section", { "aria-label": "Latency" },
    h("div", { class: "head" }, h("h1", {}, "Latency"),
      h("fieldset", { class: "choices" }, h("legend", { class: "hidden-text" }, "Time shown"), choose)),
    said,
    h("div", { class: "plots" }, plots.map((plot) => plot.element),
      h("figure", { class: "plot table" },
        h("figcaption", {}, h("h2", {}, "Percentiles"), h("span", { class: "muted" }, "last 5 minutes")),
        h("table", {},
          h("thead", {}, h("tr", {}, ["", "P50", "P95", "P99", "n"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
          table))));

  async function tick() {
    try {
      samples.add(Date.now() / 1000, await sampler.read());
      said.textContent = "A sample a second while this page is open; percentiles are those of the last 5 minutes.";
      said.className = "muted";
      if (isShown) draw();
    } catch (error) {
      said.textContent = error.message;
      said.className = "problem";
      if (error.status !== 401) return;
      stop(); // asked once, until this screen is opened again
      stop = null;
    }
  }

  function draw() {
    for (const plot of plots) plot.draw(samples, window);
    if (sampler.latency) table.replaceChildren(...summary(sampler.latency));
  }

  addEventListener("theme", () => plots.forEach((plot) => plot.recolour()));
  return {
    element,
    draw,
    show: () => {
      isShown = true;
      stop ??= poll(PERIOD_MS, tick);
      if (samples.at.length) draw();
    },
    hide: () => { isShown = false; },
    forget: () => { // of another engine
      samples = new Samples();
      sampler = new Sampler();
      table.replaceChildren();
      if (isShown) draw();
    },
  };
}

function summary(latency) {
  const names = { TTFT: "ttft_ms", ITL: "itl_ms", TPOT: "tpot_ms", Queue: "queue_ms", Total: "e2e_ms" };
  return Object.entries(names).map(([name, key]) => {
    const { count: n, p50, p95, p99 } = latency[key];
    const cell = (value) => h("td", { class: "number", title: value === null ? "of too few values" : null }, value === null ? "–" : ms(value));
    return h("tr", {}, h("th", { scope: "row" }, name), cell(p50), cell(p95), cell(p99), h("td", { class: "number" }, count(n)));
  });
}
