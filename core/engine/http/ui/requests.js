// Ended requests in a table, and the screen that lists them and leads to the waterfall of one.

import { getJson, poll } from "./api.js";
import { h } from "./dom.js";
import { count, lastTime, ms, seconds, shortIds } from "./format.js";
import { legend, spansBar } from "./spans.js";
import { waterfallView } from "./waterfall.js";

const COUNT = 64;
const PERIOD_MS = 3000;
const ORDERS = { latest: "latest", slowest: "total", "highest TTFT": "ttft", "highest TPOT": "tpot", "longest queue": "queue" };

/** `show(requests)`: as /engine/requests has them, in that order. */
export function requestTable() {
  const rows = h("tbody");
  const head = (text, className, title) => h("th", { scope: "col", class: className, title }, text);
  const element = h("table", { class: "requests", hidden: true },
    h("thead", {}, h("tr", {},
      head("Share of the total time", "cause"), head("Total", "number"), head("TTFT", "number"),
      head("TPOT", "number wide-only", "Time per output token after the first"),
      head("Prompt", "number wide-only", "Tokens; of them from the prefix cache"),
      head("Output", "number wide-only"), head("Finish reason", "wide-only"), head("Age", "number"))),
    rows);

  function show(requests) {
    element.hidden = !requests.length;
    // A row keeps its element, and so the focus, from one answer to the next.
    const kept = new Map([...rows.children].map((row) => [row.dataset.id, row]));
    const drawn = requests.map((each) => kept.get(each.request_id) ?? row(each));
    drawn.forEach((each, at) => {
      each.lastChild.textContent = seconds(Math.round(requests[at].ended_s_ago));
      if (rows.children[at] !== each) rows.insertBefore(each, rows.children[at] ?? null);
    });
    while (rows.children.length > drawn.length) rows.lastChild.remove();
  }
  return { element, show };
}

export function requestsScreen() {
  let stop = null;
  let hasSome = false;
  let changes = 0; // of what is asked
  const ask = () => { changes += 1; return load(true); };
  const order = h("select", { id: "order", onchange: ask }, Object.entries(ORDERS).map(([name, value]) => h("option", { value }, name)));
  const follow = h("input", { id: "follow", type: "checkbox", checked: true });
  const said = h("p", { class: "muted", role: "status" });
  const table = requestTable();
  const list = h("div", {},
    h("div", { class: "head" },
      h("h1", {}, "Requests"),
      h("div", { class: "row" },
        h("label", { for: "order" }, "Order", order), h("label", { for: "follow", class: "check" }, follow, "Live"))),
    said, legend(), table.element);
  const detail = h("div", { hidden: true });
  const element = h("section", { "aria-label": "Requests" }, list, detail);

  async function load(isAsked = false) {
    if (!follow.checked && hasSome && !isAsked) return;
    const asked = changes;
    try {
      const { requests, covers_s: covered } = await getJson(`engine/requests?count=${COUNT}&order=${order.value}`);
      if (asked !== changes) return; // something else by now
      hasSome = requests.length > 0;
      said.textContent = !hasSome
        ? "No request has ended yet. Ask something in the chat."
        : order.value === "latest" ? `The last ${requests.length === 1 ? "request" : `${requests.length} requests`} that ended.`
          : `The ${requests.length} of ${covered === null ? "all since the server started" : `the ${lastTime(covered)}: the server keeps no more`}.`;
      said.className = "muted";
      table.show(requests);
    } catch (error) {
      said.textContent = error.message;
      said.className = "problem";
      if (error.status === 401) end(); // asked once, until this screen is opened again
    }
  }

  function begin() {
    stop ??= poll(PERIOD_MS, () => load());
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
      hasSome = false;
      changes += 1;
      table.show([]);
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
