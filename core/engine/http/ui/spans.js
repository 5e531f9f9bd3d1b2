// The spans of a request's time, one after the other, and their colours: `--span-<name>` in the style sheet.

import { h } from "./dom.js";
import { ms } from "./format.js";

export const SPANS = {
  receive: "reading and parsing the body",
  tokenize: "admission, chat template and tokenizer",
  route: "checking parameters, asking the router",
  dispatch: "on the way to the engine process",
  queue: "waiting for a row and KV blocks",
  prefill: "computing the prompt, to the first token",
  decode: "first to last token",
  deliver: "from the engine to the client's stream",
  write: "the client takes the last bytes",
  unattributed: "time that nothing accounts for",
};

/** Which colour is which. */
export const legend = () => h("p", { class: "row muted" }, Object.entries(SPANS).map(([name, what]) =>
  h("span", { title: what }, h("span", { class: `dot span-${name}` }), name)));

/** One bar of all spans. `timings`: `<name>_ms` by span. */
export function spansBar(timings) {
  const found = Object.keys(SPANS).map((name) => [name, timings[`${name}_ms`] ?? 0]).filter(([, took]) => took > 0);
  const total = found.reduce((sum, [, took]) => sum + took, 0);
  const said = found.filter(([, took]) => took >= 0.01 * total).map(([name, took]) => `${name} ${ms(took)}`).join(", ");
  return h("span", { class: "spans", role: "img", "aria-label": said, title: said }, found.map(([name, took]) => {
    const part = h("span", { class: `span-${name}` });
    part.style.flexGrow = took / total;
    return part;
  }));
}
