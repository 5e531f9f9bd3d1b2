// What an incident needs, on one screen: rates, latencies beside what was promised, queues, and the slowest requests.

import { getJson, poll } from "./api.js";
import { h } from "./dom.js";
import { count, figure, ms, percent } from "./format.js";
import { History } from "./history.js";
import { machineUse } from "./machine.js";
import { Plot } from "./plots.js";
import { requestTable } from "./requests.js";

const PERIOD_MS = 2000;
const MINUTE_S = 60;
const SLOWEST = 8;
const WINDOWS = { "5 min": 300, "15 min": 900, "1 h": 3600 };
const ORDERS = { TTFT: "ttft", "total time": "total", "time per token": "tpot", "queue": "queue" };
const share = (value) => (value === null ? "–" : percent(value));
const latency = (name) => [[`${name}_max_ms`, "slowest", "red", "points"], [`${name}_p95_ms`, "P95", "amber"], [`${name}_p50_ms`, "P50", "blue"]];

export function overviewScreen(history = new History()) {
  let window = 300;
  let machine = null; // as it was read last
  let stop = null;
  let isShown = false;
  const plots = [
    new Plot({ title: "TTFT", note: "arrival to the first token", series: latency("ttft"), target: "ttft_ms", format: ms, least: 1 }),
    new Plot({ title: "ITL", note: "between two tokens", series: latency("itl"), target: "itl_ms", format: ms, least: 1 }),
    new Plot({ title: "Requests", note: "in the engine", series: [["waiting", "waiting", "amber"], ["running", "running", "green"]], format: count, least: 4, isWhole: true }),
    new Plot({ title: "Tokens/s", series: [["prompt", "prompt", "blue"], ["output", "output", "green"]], format: figure, least: 10 }),
    new Plot({ title: "Requests/s", note: "that ended", series: [["errors", "errors", "red"], ["requests", "ended", "green"]], format: figure, least: 1 }),
    new Plot({ title: "KV cache", note: "blocks leased", series: [["kv_used", "used", "violet"]], format: share, least: 0.01 }),
  ];
  const said = h("p", { class: "problem", role: "alert", hidden: true });
  const figures = h("dl", { class: "figures" });
  const summary = h("tbody");
  const slowest = requestTable();
  const none = h("p", { class: "muted" }, "No request has ended in this time.");
  const order = h("select", { onchange: tick }, Object.entries(ORDERS).map(([name, value]) => h("option", { value }, name)));
  const classes = h("select", { onchange: () => { history = new History(classes.value); tick(); } });
  const classLabel = h("label", { hidden: true }, "Class", classes);
  const choose = Object.entries(WINDOWS).map(([name, width]) => h("label", { class: "choice" },
    h("input", { type: "radio", name: "window", checked: width === window, onchange: () => { window = width; tick(); } }), h("span", {}, name)));
  const element = h("section", { "aria-label": "Overview" },
    h("div", { class: "head" }, h("h1", {}, "Overview"),
      h("div", { class: "row" }, classLabel,
        h("fieldset", { class: "choices" }, h("legend", { class: "hidden-text" }, "Time shown"), choose))),
    said, h("div", { class: "now" }, h("p", { class: "muted" }, "Last minute"), figures),
    h("div", { class: "plots" }, plots.map((plot) => plot.element)),
    h("div", { class: "head below-plots" }, h("h2", {}, "Slowest requests of this time"), h("label", {}, "By", order)),
    none, slowest.element,
    h("figure", { class: "plot table" },
      h("figcaption", {}, h("h2", {}, "Percentiles"), h("span", { class: "muted" }, "of all requests, last 5 minutes")),
      h("table", {},
        h("thead", {}, h("tr", {}, ["", "P50", "P95", "P99", "n"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
        summary)));

  async function tick() {
    const of = history;
    try {
      const ofClass = of.name ? `&class=${encodeURIComponent(of.name)}` : "";
      const slow = `engine/requests?count=${SLOWEST}&order=${order.value}&within_s=${window}${ofClass}`;
      const [stats, rolling, { requests }] = await Promise.all([
        getJson("engine/stats"), getJson("engine/latency"), getJson(slow), of.read()]);
      if (of !== history) return; // another engine or class was chosen
      said.hidden = true;
      showClasses();
      figures.replaceChildren(...now(history, stats, machineUse(machine, stats.machine, stats.busy_from)));
      machine = stats.machine;
      summary.replaceChildren(...percentiles(rolling));
      slowest.show(requests);
      none.hidden = requests.length > 0;
      if (isShown) draw();
    } catch (error) {
      said.hidden = false;
      said.textContent = error.message;
      if (error.status !== 401) return;
      stop?.(); // asked once, until this screen is opened again
      stop = null;
    }
  }

  function draw() {
    for (const plot of plots) plot.draw(history, window);
  }

  function showClasses() {
    if (classes.options.length || history.classes.length < 2) return;
    classes.append(new Option("all", ""), ...history.classes.map((name) => new Option(name, name)));
    classLabel.hidden = false;
  }

  addEventListener("theme", () => plots.forEach((plot) => plot.recolour()));
  return {
    element,
    draw,
    show: () => {
      isShown = true;
      stop ??= poll(PERIOD_MS, tick);
      if (history.at.length) draw();
    },
    hide: () => {
      isShown = false;
      stop?.();
      stop = null;
    },
    forget: () => { // of another engine
      history = new History(history.name);
      machine = null;
      slowest.show([]);
    },
  };
}

/** The last minute in a line. `use`: of the machine. */
function now(history, stats, use) {
  const sum = (name) => history.last(name, MINUTE_S).reduce((all, value) => all + value * history.periodS, 0);
  const seconds = history.last("requests", MINUTE_S).length * history.periodS;
  const worst = (name) => Math.max(...history.last(name, MINUTE_S));
  const late = (name) => history.targets[`${name}_ms`] !== null && worst(`${name}_max_ms`) > history.targets[`${name}_ms`];
  const kv = Math.max(0, ...stats.blocks.map((group) => group.leased / Math.max(1, group.total)));
  const shown = [
    ["Requests/s", figure(seconds ? sum("requests") / seconds : null)],
    ["Errors", count(sum("errors")), sum("errors") > 0],
    ["Slowest TTFT", ms(worst("ttft_max_ms")), late("ttft")],
    ["Slowest ITL", ms(worst("itl_max_ms")), late("itl")],
    ["Running", count(stats.running)],
    ["Waiting", count(stats.waiting), stats.waiting > stats.running],
    ["KV cache", percent(kv), kv > 0.9],
    use && ["CPUs of others", use.text, use.busy],
  ].filter(Boolean);
  return shown.map(([name, value, isBad]) => h("div", {}, h("dt", {}, name), h("dd", { class: isBad ? "problem" : null }, value)));
}

function percentiles(rolling) {
  const names = { TTFT: "ttft_ms", ITL: "itl_ms", TPOT: "tpot_ms", Queue: "queue_ms", Total: "e2e_ms" };
  return Object.entries(names).map(([name, key]) => {
    const { count: n, p50, p95, p99 } = rolling[key];
    const cell = (value) => h("td", { class: "number", title: value === null ? "of too few values" : null }, value === null ? "–" : ms(value));
    return h("tr", {}, h("th", { scope: "row" }, name), cell(p50), cell(p95), cell(p99), h("td", { class: "number" }, count(n)));
  });
}
