// What was decided at start-up: plugins, memory, phases, kernels.

import { getJson } from "./api.js";
import { bar, h } from "./dom.js";
import { bytes, count, seconds } from "./format.js";

export function planScreen() {
  const body = h("div", {}, h("p", { class: "muted", role: "status" }, "Loading"));
  const element = h("section", { "aria-label": "Plan", class: "plan" }, h("h1", {}, "Plan"), body);
  const show = async () => {
    try {
      const { plan, engine } = await getJson("engine/plan");
      body.replaceChildren(...view(plan, engine));
    } catch (error) {
      body.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
    }
  };
  return { element, show };
}

function view(plan, engine) {
  const notes = [...plan.notes, ...(engine?.notes ?? [])];
  return [
    h("div", { class: "cards" }, facts("Model", modelFacts(plan)), facts("Device", deviceFacts(plan, engine))),
    notes.length > 0 && card("Notes", h("ul", {}, notes.map((note) => h("li", {}, note)))),
    card("Plugins", slots(plan.slots)),
    engine && h("div", { class: "cards" },
      engine.ledger && card("Memory", memory(engine.ledger)),
      card("Start-up", phases(engine.phases))),
    engine?.lowering.length > 0 && card("Kernels", kernels(engine.lowering)),
    engine ? null : h("p", { class: "muted" }, "The engine is not ready yet; memory and start-up follow."),
  ].filter(Boolean);
}

const card = (title, ...content) => h("div", { class: "card" }, h("h2", {}, title), content);
const facts = (title, pairs) => card(title, h("dl", { class: "facts" },
  pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));

function modelFacts({ model, dtype, max_len: context }) {
  return [
    ["name", model.name], ["architecture", model.architecture],
    ["layers × hidden", `${model.num_layers} × ${count(model.hidden_size)}`],
    ["vocabulary", count(model.vocab_size)], ["context", `${count(context)} tokens`], ["computed in", dtype],
  ];
}

function deviceFacts({ device, execution, overlap, engine_version: version }, engine) {
  return [
    ["device", device.name || device.kind], ["memory", bytes(device.memory_bytes)], ["execution", execution],
    ["overlap", overlap ? "on" : "off"],
    ...(engine ? [["KV pool", `${count(engine.kv_tokens)} tokens`]] : []),
    ["engine", version],
  ];
}

function slots(found) {
  const rows = Object.values(found).flat().map((choice) => h("tr", {},
    h("th", { scope: "row" }, choice.slot),
    h("td", {}, h("strong", {}, choice.name), choice.requested !== choice.name && h("span", { class: "tag" }, choice.requested),
      h("div", { class: "config mono" }, settings(choice.config)),
      choice.passed_over.map((why) => h("div", { class: "muted" }, `not ${why}`)))));
  return h("table", { class: "slots" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Slot"), h("th", { scope: "col" }, "Plugin and its settings"))), h("tbody", {}, rows));
}

const settings = (config) => Object.entries(config).map(([key, value]) =>
  h("span", {}, `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`));

function memory(ledger) {
  const budget = ledger.free_bytes * ledger.fraction;
  const lines = ledger.lines.filter((line) => line.planned_bytes || line.measured_bytes);
  const most = Math.max(...lines.map((line) => Math.max(line.planned_bytes, line.measured_bytes ?? 0)));
  return [
    h("p", { class: "muted" }, `${bytes(ledger.total_bytes)} planned of ${bytes(budget)} allowed (memory.fraction=${ledger.fraction}); peak so far ${bytes(ledger.peak_so_far_bytes)}.`),
    h("table", { class: "bars" },
      h("thead", {}, h("tr", {}, ["", "", "Estimated", "Measured"].map((name, at) => h("th", { scope: "col", class: ["", "wide-only", "number", "number"][at] }, name)))),
      h("tbody", {}, lines.map((line) => h("tr", {},
        h("th", { scope: "row" }, line.name),
        h("td", { class: "wide-only" }, bar((line.measured_bytes ?? line.planned_bytes) / most, "span-prefill")),
        h("td", { class: "number" }, bytes(line.planned_bytes)),
        h("td", { class: "number" }, bytes(line.measured_bytes)))))),
  ];
}

function phases(found) {
  const total = found.reduce((all, phase) => all + phase.seconds, 0);
  const most = Math.max(...found.map((phase) => phase.seconds), 1e-9);
  return [
    h("p", { class: "muted" }, `${seconds(total)} from the start of the engine's process to ready.`),
    h("table", { class: "bars" }, h("tbody", {}, found.map((phase) => h("tr", {},
      h("th", { scope: "row" }, phase.name), h("td", {}, bar(phase.seconds / most, "span-decode")),
      h("td", { class: "number" }, seconds(phase.seconds)))))),
  ];
}

function kernels(lowering) {
  return h("table", { class: "kernels" }, h("tbody", {}, lowering.map((line) => {
    const at = line.indexOf(": ");
    return h("tr", {}, h("th", { scope: "row" }, line.slice(0, at)), h("td", {}, line.slice(at + 2)));
  })));
}
