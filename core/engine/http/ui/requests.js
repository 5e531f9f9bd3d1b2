// The requests that ended last, and the waterfall of one.

import { getJson, poll } from "./api.js";
import { h } from "./dom.js";
import { count, ms, seconds, shortIds } from "./format.js";
import { legend, spansBar } from "./spans.js";
import { waterfallView } from "./waterfall.js";

const COUNT = 32;
const PERIOD_MS = 3000;
const ORDERS = {
  latest: () => 0,
  "slowest": (a, b) => b.total_ms - a.total_ms,
  "highest TTFT": (a, b) => b.ttft_ms - a.ttft_ms,
  "highest TPOT": (a, b) => b.tpot_ms - a.tpot_ms,
  "longest queue": (a, b) => b.spans.queue - a.spans.queue,
};

export function requestsScreen() {
  let stop = null;
  let requests = [];
  let changes = 0; // of the engine that is shown
  const order = h("select", { id: "order", onchange: draw }, Object.keys(ORDERS).map((name) => h("option", {}, name)));
  const follow = h("input", { id: "follow", type: "checkbox", checked: true });
  const rows = h("tbody");
  const said = h("p", { class: "muted", role: "status" });
  const head = (text, className, title) => h("th", { scope: "col", class: className, title }, text);
  const table = h("table", { class: "requests" },
    h("thead", {}, h("tr", {},
      head("Share of the total time", "cause"), head("Total", "number"), head("TTFT", "number"),
      head("TPOT", "number wide-only", "Time per output token after the first"),
      head("Prompt", "number wide-only", "Tokens; of them from the prefix cache"),
      head("Output", "number wide-only"), head("Finish reason", "wide-only"), head("Age", "number"))),
    rows);
  const list = h("div", {},
    h("div", { class: "head" },
      h("h1", {}, "Requests"),
      h("div", { class: "row" },
        h("label", { for: "order" }, "Order", order), h("label", { for: "follow", class: "check" }, follow, "Live"))),
    said, legend(), table);
  const detail = h("div", { hidden: true });
  const element = h("section", { "aria-label": "Requests" }, list, detail);

  async function load() {
    if (!follow.checked && requests.length) return;
    const asked = changes;
    try {
      const { requests: found } = await getJson(`engine/requests?count=${COUNT}`);
      if (asked !== changes) return; // of another engine
      requests = found;
      said.textContent = requests.length
        ? `The last ${requests.length === 1 ? "request" : `${requests.length} requests`} that ended.`
        : "No request has ended yet. Ask something in the chat.";
      said.className = "muted";
      draw();
    } catch (error) {
      said.textContent = error.message;
      said.className = "problem";
      if (error.status === 401) end(); // asked once, until this screen is opened again
    }
  }

  function draw() {
    table.hidden = !requests.length;
    // A row keeps its element, and so the focus, from one answer to the next.
    const kept = new Map([...rows.children].map((row) => [row.dataset.id, row]));
    const ordered = [...requests].sort(ORDERS[order.value]);
    const drawn = ordered.map((each) => kept.get(each.request_id) ?? row(each));
    drawn.forEach((each, at) => {
      each.lastChild.textContent = seconds(Math.round(ordered[at].ended_s_ago));
      if (rows.children[at] !== each) rows.insertBefore(each, rows.children[at] ?? null);
    });
    while (rows.children.length > drawn.length) rows.lastChild.remove();
  }

  function begin() {
    stop ??= poll(PERIOD_MS, load);
  }

  function end() {
    stop?.();
    stop = null;
  }

  return {
    element,
    show: (id) => {
      list.hidden = Boolean(id);
      detail.hidden = !id;
      if (!id) return begin();
      end();
      detail.replaceChildren(waterfallView(id));
    },
    hide: end,
    forget: () => {
      end();
      requests = [];
      changes += 1;
      if (!list.hidden && !element.hidden) begin();
    },
    escape: () => {
      if (detail.hidden) return false;
      location.hash = "requests";
      return true;
    },
  };
}

function row(request) {
  const target = `#requests/${encodeURIComponent(request.request_id)}`;
  const cached = request.cached_tokens ? h("span", { class: "muted" }, ` (${count(request.cached_tokens)} cached)`) : null;
  const times = { ...request.spans, unattributed: request.unattributed_ms };
  const named = Object.fromEntries(Object.entries(times).map(([name, took]) => [`${name}_ms`, took]));
  const isFine = ["stop", "length"].includes(request.finish_reason);
  return h("tr", { "data-id": request.request_id, onclick: () => { location.hash = target; } },
    h("td", { class: "cause" },
      h("a", { href: target, title: request.request_id }, shortIds(request.cause)),
      h("span", { class: "muted mono wide-only" }, ` ${shortIds(request.request_id)}`), spansBar(named)),
    h("td", { class: "number" }, ms(request.total_ms)),
    h("td", { class: "number" }, request.ttft_ms ? ms(request.ttft_ms) : "–"),
    h("td", { class: "number wide-only" }, request.tpot_ms ? ms(request.tpot_ms) : "–"),
    h("td", { class: "number wide-only" }, count(request.prompt_tokens), cached),
    h("td", { class: "number wide-only" }, count(request.output_tokens)),
    h("td", { class: isFine ? "wide-only muted" : "wide-only problem" }, request.finish_reason),
    h("td", { class: "number muted" }));
}
