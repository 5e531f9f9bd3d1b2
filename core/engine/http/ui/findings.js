// What is wrong with the engine and what to change, as commands of plugins say it.

import { getJson, postJson } from "./api.js";
import { h } from "./dom.js";
import { clock, count, figure, seconds } from "./format.js";

export function findingsScreen() {
  const buttons = h("div", { class: "row" });
  const said = h("p", { class: "muted", role: "status" }, "Loading");
  const waited = h("p", { class: "muted" });
  const found = h("div", {});
  const element = h("section", { "aria-label": "Findings", class: "findings" },
    h("div", { class: "head" }, h("h1", {}, "Findings"), buttons), said, waited, found);
  let known = false;
  let isRunning = false;

  async function show() {
    if (isRunning) return;
    try {
      const { commands } = await getJson("engine/findings");
      known = true;
      const { name, latest } = commands.reduce((one, other) => ((other.latest?.ended_s ?? 0) > (one.latest?.ended_s ?? 0) ? other : one), {});
      buttons.replaceChildren(...commands.map(({ name, doc }) =>
        h("button", { type: "button", class: "primary", title: doc, onclick: () => run(name) }, `Run ${name}`)));
      say(commands.length ? commands.map(({ name, doc }) => `${name}: ${doc}.`).join(" ") : "No command that is installed prints findings.");
      if (latest) list(name, latest);
    } catch (error) {
      say(error.message, true);
    }
  }

  async function run(name) {
    isRunning = true;
    const started = performance.now();
    const wait = () => { waited.textContent = seconds(Math.round((performance.now() - started) / 1000)); };
    const ticking = setInterval(wait, 1000);
    say(`engine ${name} runs. What it watches are requests: let some come.`);
    for (const button of buttons.children) button.disabled = true;
    wait();
    try {
      list(name, await postJson(`engine/findings/${encodeURIComponent(name)}`));
    } catch (error) {
      say(error.message, true);
    } finally {
      isRunning = false;
      clearInterval(ticking);
      waited.textContent = "";
      for (const button of buttons.children) button.disabled = false;
    }
  }

  function list(name, { findings, meanings = {}, notes = [], began_s: began, ended_s: ended }) {
    found.replaceChildren(...findings.map((each, at) => card(each, at, meanings)), ...notes.map((note) => h("p", { class: "muted" }, note)));
    const number = ["no finding", "1 finding"][findings.length] ?? `${findings.length} findings`;
    say(`${name}: ${number}, ${clock(began)} to ${clock(ended)}.`);
  }

  function say(text, isProblem = false) {
    said.textContent = text;
    said.className = isProblem ? "problem" : "muted";
  }

  const forget = () => { // of another engine
    found.replaceChildren();
    if (known && !waited.textContent) say("");
  };
  return { element, show, forget };
}

const value = (number) => (Number.isInteger(number) ? count(number) : figure(number));

function card(finding, at, meanings) {
  const { cause, says, evidence = {}, overrides = [], replaces = [], advice = "", predicts = "", falsifier = "" } = finding;
  const figures = Object.entries(evidence);
  return h("div", { class: "card" },
    h("h2", {}, `${at + 1}. ${says}`),
    h("p", { class: "muted" }, h("span", { class: "mono" }, cause), `, seen ${clock(finding.first_seen_s)} to ${clock(finding.last_seen_s)}`),
    overrides.length > 0 && [h("p", {}, "Start the engine with"), h("pre", {}, h("code", {}, overrides.join(" "))),
      replaces.length > 0 && h("p", { class: "muted" }, "instead of ", h("code", {}, replaces.join(" ")))],
    advice && h("p", {}, advice),
    predicts && h("p", {}, `Predicts ${predicts}.`),
    figures.length > 0 && h("p", {}, "Evidence, a value for each window"),
    figures.length > 0 && h("dl", { class: "facts" }, figures.map(([name, values]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, values.map(value).join(" / ")),
        meanings[name] && h("dd", { class: "muted" }, meanings[name])))),
    falsifier && h("p", { class: "muted" }, `${falsifier[0].toUpperCase()}${falsifier.slice(1)}.`));
}
