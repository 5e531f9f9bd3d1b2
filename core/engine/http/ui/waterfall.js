// One request: its spans as a waterfall, and what held them up.

import { getJson, getText } from "./api.js";
import { h } from "./dom.js";
import { count, figure, ms, percent, shortIds } from "./format.js";
import { SPANS } from "./spans.js";
import { waterfall } from "./waterfall_svg.js";

/** Filled when the engine answers. */
export function waterfallView(id) {
  const back = h("a", { href: "#requests", title: "Escape" }, "← Requests");
  const view = h("div", { class: "waterfall" }, back, h("p", { class: "muted", role: "status" }, "Loading"));
  load(id).then(
    ({ sequences }) => view.replaceChildren(back, ...sequences.flatMap((each) => sequenceView(each, id))),
    (error) => view.replaceChildren(back, h("p", { class: "problem", role: "alert" }, error.message)));
  return view;
}

async function load(id) {
  const path = `engine/requests/${encodeURIComponent(id)}`;
  try {
    return await getJson(path);
  } catch (error) {
    if (error.status !== 404) throw error;
    await new Promise((resolve) => setTimeout(resolve, 500)); // it may end just now
    return getJson(path);
  }
}

function sequenceView(sequence, id) {
  return [
    h("div", { class: "head" },
      h("div", {}, h("h1", {}, shortIds(sequence.cause)), h("p", { class: "mono muted" }, sequence.request_id)),
      h("div", { class: "row" },
        download("Chrome trace", `${id}.trace.json`, `engine/requests/${encodeURIComponent(id)}?format=chrome`),
        download("JSON", `${id}.json`, `engine/requests/${encodeURIComponent(id)}`))),
    figures(sequence),
    h("figure", {}, waterfall(sequence), legend(sequence)),
    h("h2", {}, "What held it up"),
    h("ul", { class: "reasons" }, reasons(sequence).map((said) => h("li", {}, said))),
    h("details", {}, h("summary", {}, "All spans as a table"), table(sequence)),
  ];
}

/** Saved from memory: a link alone would not send the key. */
function download(label, name, path) {
  const save = async ({ target }) => {
    const text = await getText(path).catch((error) => { target.textContent = error.message; });
    if (text === undefined) return;
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    h("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  };
  return h("button", { type: "button", onclick: save }, label);
}

function figures(sequence) {
  const { tpot_ms: tpot, prompt_tokens: prompt, cached_tokens: cached } = sequence;
  const shown = [
    ["Total", ms(sequence.total_ms)],
    ["TTFT", sequence.ttft_ms ? ms(sequence.ttft_ms) : "–"],
    ["TPOT", tpot ? ms(tpot) : "–"],
    ["Speed", tpot ? `${figure(1000 / tpot)} tokens/s` : "–"],
    ["Prompt", cached ? `${count(prompt)}, ${count(cached)} cached` : count(prompt)],
    ["Output", `${count(sequence.output_tokens)}, ${sequence.finish_reason}`],
    ...(sequence.engine === "default" ? [] : [["Engine", sequence.engine]]),
    ["Unattributed", percent(sequence.total_ms ? sequence.unattributed_ms / sequence.total_ms : 0)],
  ];
  return h("dl", { class: "figures" }, shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function legend(sequence) {
  const has = (test) => sequence.spans.some(test);
  const shown = [
    has((span) => span.inside) && ["chunk", "prompt chunk, a step each"],
    has((span) => span.blocked_by) && ["blocked", "steps shared with other prompts"],
    has((span) => span.gap_ms > 0) && ["gap", "device idle between steps, added up"],
    has((span) => span.preempted) && ["preempted", "preempted"],
  ].filter(Boolean);
  return h("figcaption", {}, shown.map(([kind, said]) => h("span", { class: `legend ${kind}` }, said)));
}

const requestLink = (id) => h("a", { href: `#requests/${encodeURIComponent(id)}`, class: "mono", title: id }, shortIds(id));

/** A sentence each, with links to the requests that they name. */
function reasons(sequence) {
  const found = [];
  if (sequence.attempts > 1) found.push([`route: sent to ${count(sequence.attempts)} engines one after the other; ${sequence.engine} began with it.`]);
  for (const span of sequence.spans) {
    const others = span.blocked_by;
    if (span.name === "queue" && span.ms >= 1) {
      const queue = `${span.running} running, ${span.waiting} waiting, ${percent(span.kv_used)} of the KV blocks used.`;
      found.push([`queue: waited ${ms(span.ms)}; ${queue}`]);
    }
    if (span.staged) found.push([`queue: ${span.staged.said}.`]);
    if (others) {
      const more = others.of > 1 ? ` and of ${others.of - 1} more` : "";
      found.push([
        `${span.name}: in ${count(others.steps)} of ${count(span.steps)} steps beside ${count(others.num_tokens)} prompt tokens of `,
        requestLink(others.request_id), `${more}.`,
      ]);
    }
    if (span.name === "decode" && span.steps) {
      const captured = span.captured_steps ? `, ${count(span.captured_steps)} of them captured` : "";
      const idle = span.gap_ms > 0 ? `; the device was idle for ${ms(span.gap_ms)} between them (${percent(span.gap_ms / span.ms)})` : "";
      found.push([`decode: ${count(span.steps)} steps of ${ms(span.ms / span.steps)} on average${captured}${idle}.`]);
    }
    for (const lost of span.preempted ?? []) {
      const again = lost.waited_ms === null ? "" : `, waited ${ms(lost.waited_ms)}`;
      found.push([`${span.name}: preempted at ${ms(lost.at_ms)}${lost.by ? ` for ${shortIds(lost.by)}` : ""}; ${count(lost.lost_tokens)} tokens computed again${again}.`]);
    }
  }
  const { prefix } = sequence;
  if (prefix) {
    const shared = prefix.shared_tokens ? `; ${count(prefix.shared_tokens)} tokens are as in ` : "";
    found.push([
      `prefix cache: ${prefix.why}${shared}`,
      shared && requestLink(prefix.nearest), ".",
    ]);
  }
  const { detokenize_ms: detokenize, write_ms: write, draft_ms: draft } = sequence.meanwhile;
  const drafting = draft > 0 ? `, drafting ${ms(draft)}` : "";
  found.push([`meanwhile, beside the steps: making text ${ms(detokenize)}, writing to the client ${ms(write)}${drafting}.`]);
  return found.map((parts) => h("span", {}, ...parts));
}

function table(sequence) {
  const line = (name, start, took, detail, className = "") => h("tr", { class: className },
    h("th", { scope: "row" }, h("span", { class: `dot span-${name}` }), name, h("span", { class: "muted wide-only" }, ` ${detail}`)),
    h("td", { class: "number" }, start === null ? "" : ms(start)), h("td", { class: "number" }, ms(took)),
    h("td", { class: "number" }, percent(sequence.total_ms ? took / sequence.total_ms : 0)));
  const lines = sequence.spans.flatMap((span) => [
    line(span.name, span.start_ms, span.ms, SPANS[span.name] ?? ""),
    ...(span.inside ?? []).map((chunk) => line("chunk", chunk.start_ms, chunk.ms,
      `step ${chunk.step}: ${count(chunk.num_tokens)} tokens after ${count(chunk.context)}`, "inside")),
  ]);
  return h("table", {},
    h("thead", {}, h("tr", {}, ["Span", "Start", "Time", "Share"].map((name, at) =>
      h("th", { scope: "col", class: at ? "number" : "" }, name)))),
    h("tbody", {}, lines, line("unattributed", null, sequence.unattributed_ms, SPANS.unattributed)));
}
