// What an incident needs, on one screen: rates, latencies beside what was promised, queues, and the slowest requests.

import { getJson, poll, postJson } from "./api.js";
import { h } from "./dom.js";
import { clock, count, figure, lastTime, ms, percent } from "./format.js";
import { History } from "./history.js";
import { Plot } from "./plots.js";
import { requestTable } from "./requests.js";

const PERIOD_MS = 2000;
const MINUTE_S = 60;
const FIND_EVERY_S = 60;
const SLOWEST = 8;
const WINDOWS = { "5 min": 300, "15 min": 900, "1 h": 3600 };
const ORDERS = { TTFT: "ttft", "total time": "total", "time per token": "tpot", "queue": "queue" };
const share = (value) => (value === null ? "–" : percent(value));
const latency = (name) => [[`${name}_max_ms`, "slowest", "red", "points"], [`${name}_p95_ms`, "P95", "amber"], [`${name}_p50_ms`, "P50", "blue"]];

export function overviewScreen(history = new History()) {
  let window = 300;
  let finding = null; // ends the run of a command that this screen began
  let foundAt = -Infinity; // when the last one was begun, of performance.now()
  let stop = null;
  let isShown = false;
  const plots = [
    new Plot({ title: "TTFT", note: "arrival to the first token", series: latency("ttft"), target: "ttft_ms", format: ms, least: 1 }),
    new Plot({ title: "ITL", note: "between two tokens", series: latency("itl"), target: "itl_ms", format: ms, least: 1 }),
    new Plot({ title: "Requests", note: "in the engine", series: [["waiting", "waiting", "amber"], ["running", "running", "green"]], format: count, least: 4, isWhole: true }),
    new Plot({ title: "CPUs", note: "of this machine", series: [["cpus_others", "others", "red"], ["cpus_used", "this server", "blue"]], format: figure, least: 1 }),
    new Plot({ title: "Tokens/s", series: [["prompt", "prompt", "blue"], ["output", "output", "green"]], format: figure, least: 10 }),
    new Plot({ title: "Requests/s", note: "that ended", series: [["errors", "errors", "red"], ["requests", "ended", "green"]], format: figure, least: 1 }),
    new Plot({ title: "KV cache", note: "blocks leased", series: [["kv_used", "used", "violet"]], format: share, least: 0.01 }),
  ];
  const said = h("p", { class: "problem", role: "alert", hidden: true });
  const figures = h("dl", { class: "figures" });
  const summary = h("tbody");
  const slowest = requestTable();
  const cause = h("p", { class: "finding", role: "status", hidden: true });
  const slowestOf = h("span", { class: "muted" });
  const rollingOf = h("span", { class: "muted" });
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
    said, cause, h("div", { class: "now" }, h("p", { class: "muted" }, lastTime(MINUTE_S)), figures),
    h("div", { class: "plots" }, plots.map((plot) => plot.element),
      h("figure", { class: "plot table" },
        h("figcaption", {}, h("h2", {}, "Percentiles"), h("span", { class: "muted" }, "of all requests, at most 20,000 values"), rollingOf),
        h("table", {},
          h("thead", {}, h("tr", {}, ["", "P50", "P95", "P99", "n"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
          summary))),
    h("div", { class: "head below-plots" }, h("h2", {}, "Slowest requests ", slowestOf), h("label", {}, "By", order)),
    none, slowest.element);

  async function tick() {
    const of = history, width = window;
    try {
      const ofClass = of.name ? `&class=${encodeURIComponent(of.name)}` : "";
      const slow = `engine/requests?count=${SLOWEST}&order=${order.value}&within_s=${width}${ofClass}`;
      const [stats, rolling, { requests, covers_s: covered }] = await Promise.all([
        getJson("engine/stats"), getJson("engine/latency"), getJson(slow), of.read()]);
      if (of !== history) return; // another engine or class was chosen
      said.hidden = true;
      showClasses();
      figures.replaceChildren(...now(history, stats));
      rollingOf.textContent = lastTime(rolling.window_s);
      slowestOf.textContent = covered !== null && covered < width
        ? `${lastTime(covered)}: the server keeps no more of them` : lastTime(width);
      summary.replaceChildren(...percentiles(rolling));
      slowest.show(requests);
      none.hidden = requests.length > 0;
      if (isShown) draw();
      await showFinding();
    } catch (error) {
      said.hidden = false;
      said.textContent = error.message;
      if (error.status !== 401) return;
      stop?.(); // asked once, until this screen is opened again
      stop = null;
    }
  }

  /** The first one of the command that found some last; has it look again, as long as this screen is shown. */
  async function showFinding() {
    const { commands } = await getJson("engine/findings");
    const [command] = commands.sort((one, other) => (other.latest?.ended_s ?? 0) - (one.latest?.ended_s ?? 0));
    cause.hidden = !command;
    if (!command) return;
    const { name, latest } = command;
    cause.replaceChildren(...(latest ? foundBy(name, latest) : [h("span", { class: "muted" }, `${name} is looking for a cause.`)]));
    if (finding || !isShown || performance.now() - foundAt < FIND_EVERY_S * 1000) return;
    foundAt = performance.now();
    finding = new AbortController();
    postJson(`engine/findings/${encodeURIComponent(name)}`, { signal: finding.signal, quiet: true })
      .catch(() => {}) // another one runs, or there is too little to see: the next time, then
      .finally(() => { finding = null; });
  }

  function stopFinding() {
    finding?.abort();
    foundAt = -Infinity;
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
      stopFinding();
    },
    forget: () => { // of another engine
      history = new History(history.name);
      stopFinding();
      slowest.show([]);
    },
  };
}

function foundBy(name, { findings, began_s: began, ended_s: ended }) {
  const [first] = findings;
  const when = h("span", { class: "muted" }, `${name}, ${clock(first?.first_seen_s ?? began)} to ${clock(ended)}`);
  if (!first) return [h("span", {}, "No finding "), when];
  return [h("a", { href: "#findings" }, first.says), " ", when];
}

/** The last minute in a line. */
function now(history, stats) {
  const sum = (name) => history.last(name, MINUTE_S).reduce((all, value) => all + value * history.periodS, 0);
  const seconds = history.last("requests", MINUTE_S).length * history.periodS;
  const worst = (name) => Math.max(...history.last(name, MINUTE_S));
  const late = (name) => history.targets[`${name}_ms`] !== null && worst(`${name}_max_ms`) > history.targets[`${name}_ms`];
  const most = (name) => Math.max(stats[name], ...history.last(name, MINUTE_S));
  const kv = Math.max(...stats.blocks.map((group) => group.leased / Math.max(1, group.total)), ...history.last("kv_used", MINUTE_S));
  const others = history.last("cpus_others", MINUTE_S);
  const shown = [
    ["Requests/s", figure(seconds ? sum("requests") / seconds : null)],
    ["Errors", count(sum("errors")), sum("errors") > 0],
    ["Slowest TTFT", ms(worst("ttft_max_ms")), late("ttft")],
    ["Slowest ITL", ms(worst("itl_max_ms")), late("itl")],
    ["Most running", count(most("running"))],
    ["Most waiting", count(most("waiting")), most("waiting") > most("running")],
    ["Most KV cache", percent(kv), kv > 0.9],
    others.length > 0 && ["Most CPUs of others", `${Math.max(...others).toFixed(1)} of ${stats.machine.cpus}`, history.last("machine_busy", MINUTE_S).includes(true)],
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
