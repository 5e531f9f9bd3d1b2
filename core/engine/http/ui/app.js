// The frame of the page: which screen is shown, the theme, shortcuts, and whether the engine is ready.

import { getJson, poll, useEngine } from "./api.js";
import { chatScreen } from "./chat.js";
import { findingsScreen } from "./findings.js";
import { overviewScreen } from "./overview.js";
import { planScreen } from "./plan.js";
import { requestsScreen } from "./requests.js";

const main = document.getElementById("main");
const links = [...document.querySelectorAll("nav a")];
const chat = chatScreen();
const screens = { overview: overviewScreen(), requests: requestsScreen(), findings: findingsScreen(), plan: planScreen(), chat };
const names = Object.keys(screens);
let shown = null;

for (const screen of Object.values(screens)) {
  screen.element.hidden = true;
  main.append(screen.element);
}

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const next = Object.hasOwn(screens, name) ? screens[name] : screens.overview;
  if (shown && shown !== next) {
    shown.element.hidden = true;
    shown.hide?.();
  }
  shown = next;
  for (const link of links) {
    if (screens[link.hash.slice(1)] === next) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  next.element.hidden = false;
  document.title = `${links[Object.values(screens).indexOf(next)].textContent} · engine`;
  next.show?.(decoded(rest.join("/")));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a lone %
  }
}

// --- theme

const THEMES = { system: "◐", light: "☀", dark: "☾" };
const themeButton = document.getElementById("theme");

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "system";
  themeButton.textContent = THEMES[theme];
  themeButton.setAttribute("aria-label", `Theme: ${theme}`);
  themeButton.title = `Theme: ${theme} (t)`;
}

function nextTheme() {
  const order = Object.keys(THEMES);
  const theme = order[(order.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % order.length];
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  if (theme === "system") localStorage.removeItem("engine-theme");
  else localStorage.setItem("engine-theme", theme);
  themeChanged();
}

function themeChanged() {
  showTheme();
  dispatchEvent(new Event("theme"));
}

themeButton.addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

// --- shortcuts

const shortcuts = document.getElementById("shortcuts");
document.getElementById("help").addEventListener("click", () => shortcuts.showModal());

function open(name) {
  location.hash = name;
  route(); // at once, so that what it holds can have the focus
}

const KEYS = {
  "/": () => { open("chat"); chat.focus(); },
  "n": () => { open("chat"); chat.clear(); },
  "t": nextTheme,
  "?": () => shortcuts.showModal(),
};
names.forEach((name, at) => { KEYS[at + 1] = () => open(name); });

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "Escape") {
    if (shown.escape?.()) event.preventDefault();
    else if (isTyping) event.target.blur();
  } else if (!isTyping && Object.hasOwn(KEYS, event.key)) {
    event.preventDefault();
    KEYS[event.key]();
  }
});

// --- is it ready?

const state = document.getElementById("state");

async function showState() {
  try {
    const { engine } = await getJson("health", { quiet: true });
    state.textContent = engine;
    state.dataset.state = engine === "ready" ? "good" : "wait";
  } catch {
    state.textContent = "not reachable";
    state.dataset.state = "bad";
  }
}

// --- which of several engines is shown

const engines = document.getElementById("engines");
const engineChoice = engines.querySelector("select");

/** Follows the fleet. The chat goes where the router sends it; everything else is of the engine that is chosen. */
async function showEngines() {
  const { engines: found } = await getJson("engine/fleet", { quiet: true });
  if (found.length < 2) return;
  const options = [...engineChoice.options];
  if (options.map((each) => each.value).join() !== found.map((each) => each.id).join()) {
    const before = engineChoice.value;
    engineChoice.replaceChildren(...found.map(({ id }) => new Option(id, id, false, id === before)));
    engines.hidden = false;
    if (before !== engineChoice.value) chooseEngine();
  }
  const models = new Set(found.map((each) => each.model));
  found.forEach(({ id, model, why_not: reason }, at) => {
    const name = models.size > 1 ? `${id} (${model})` : id;
    engineChoice.options[at].text = reason === null ? name : `${name}: ${reason}`;
  });
}

function chooseEngine() {
  useEngine(engineChoice.value);
  for (const screen of Object.values(screens)) screen.forget?.();
  route();
}

engineChoice.addEventListener("change", chooseEngine);

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
showTheme();
addEventListener("hashchange", route);
route();
poll(3000, showState);
poll(3000, showEngines);
getJson("v1/models").then(({ data: [model] }) => {
  document.getElementById("model").textContent = model.id;
  chat.useModel(model);
}, () => {});
