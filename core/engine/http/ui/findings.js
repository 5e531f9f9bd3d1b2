// What is wrong with the engine and what to change, as commands of plugins say it.

import { getJson, postJson } from "./api.js";
import { h } from "./dom.js";
import { count, figure, seconds } from "./format.js";

export function findingsScreen() {
  const buttons = h("div", { class: "row" });
  const said = h("p", { class: "muted", role: "status" }, "Loading");
  const waited = h("p", { class: "muted" });
  const found = h("div", {});
  const element = h("section", { "aria-label": "Findings", class: "findings" },
    h("div", { class: "head" }, h("h1", {}, "Findings"), buttons), said, waited, found);
  let known = false;

  async function show() {
    if (known) return;
    try {
      const { commands } = await getJson("engine/findings");
      known = true;
      buttons.replaceChildren(...commands.map(({ name, doc }) =>
        h("button", { type: "button", class: "primary", title: doc, onclick: () => run(name) }, `Run ${name}`)));
      say(commands.length ? commands.map(({ name, doc }) => `${name}: ${doc}.`).join(" ") : "No command that is installed prints findings.");
    } catch (error) {
      say(error.message, true);
    }
  }

  async function run(name) {
    const started = performance.now();
    const wait = () => { waited.textContent = seconds(Math.round((performance.now() - started) / 1000)); };
    const ticking = setInterval(wait, 1000);
    say(`engine ${name} runs. What it watches are requests: let some come.`);
    for (const button of buttons.children) button.disabled = true;
    wait();
    try {
      const { findings, meanings = {}, notes = [] } = await postJson(`engine/findings/${encodeURIComponent(name)}`);
      found.replaceChildren(...findings.map((each, at) => card(each, at, meanings)), ...notes.map((note) => h("p", { class: "muted" }, note)));
      say(`${name}: ${["no finding", "1 finding"][findings.length] ?? `${findings.length} findings`}.`);
    } catch (error) {
      say(error.message, true);
    } finally {
      clearInterval(ticking);
      waited.textContent = "";
      for (const button of buttons.children) button.disabled = false;
    }
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
    h("p", { class: "muted mono" }, cause),
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
