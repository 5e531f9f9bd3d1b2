// The engine's own routes, beside this page. With a key, every call carries it.

const ROOT = new URL("../", import.meta.url);
const KEPT = "engine-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const dialog = () => document.getElementById("key");
let asking = null;

/** Has the person give the key. One dialog, however many calls wait for it. */
function ask(problem) {
  asking ??= new Promise((resolve, reject) => {
    const shown = dialog();
    const field = shown.querySelector("input");
    shown.querySelector("[role=alert]").textContent = problem;
    field.value = "";
    shown.returnValue = "";
    shown.addEventListener("close", () => {
      asking = null;
      if (shown.returnValue !== "use") return reject(new Refused(401, "This needs the API key."));
      sessionStorage.setItem(KEPT, field.value);
      field.value = "";
      resolve();
    }, { once: true });
    shown.showModal();
  });
  return asking;
}

async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEPT);
    const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${encoded(key)}` }) };
    const response = await fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store" });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEPT) === key) {
      if (options.quiet) throw new Refused(401, "This needs the API key.");
      await ask(key === null ? "" : "That is not the key of this server.");
    }
  }
}

/** Header values are bytes: the key's UTF-8, as one character each. */
const encoded = (key) => String.fromCharCode(...new TextEncoder().encode(key));

let chosen = null; // the id of the engine that is shown; null: the server has one

/** What is read from now on is of this engine. */
export const useEngine = (id) => { chosen = id; };

/** The path of something about an engine, as it is asked of the one that is shown. */
function ofEngine(path) {
  if (chosen === null || !path.startsWith("engine/")) return path;
  return `${path}${path.includes("?") ? "&" : "?"}engine=${encodeURIComponent(chosen)}`;
}

async function answered(path, options) {
  const response = await call(ofEngine(path), options);
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error?.message ?? `The server answered ${response.status}.`);
}

/** `quiet`: a refusal for want of a key asks nobody. */
export const getJson = async (path, options) => (await answered(path, options)).json();
export const postJson = async (path, options) =>
  (await answered(path, { ...options, method: "POST", headers: { "Content-Type": "application/json" } })).json();
export const getText = async (path, options) => (await answered(path, options)).text();

/** The events of a stream as objects. Throws {@link Refused} for an error before or within it. */
export async function* postStream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await answered(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  let rest = "";
  for await (const text of pieces(response.body)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(event.error.code, event.error.message);
      yield event;
    }
  }
  throw new Refused(0, "The connection ended before the answer did.");
}

async function* pieces(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Calls `work` every `period_ms` while the page is visible, never twice at once, until the function returned is called. */
export function poll(period_ms, work) {
  let stopped = false;
  const tick = async () => {
    if (stopped) return;
    if (!document.hidden) await work().catch(() => {});
    if (!stopped) setTimeout(tick, period_ms);
  };
  tick();
  return () => { stopped = true; };
}
