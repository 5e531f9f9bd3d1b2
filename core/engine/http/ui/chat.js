// A conversation, with the speed of the answer while it comes.

import { postStream } from "./api.js";
import { bar, h } from "./dom.js";
import { count, ms, percent, rate } from "./format.js";
import { LiveSpeed } from "./speed.js";
import { spansBar } from "./spans.js";
import { written } from "./text.js";

const BUNDLED_QUESTIONS = ["What does json.dumps do?", "How do I read a file line by line?", "What is a generator?"];

export function chatScreen() {
  let turns = []; // of this conversation
  let running = null; // the AbortController of the answer that comes
  let model = { id: "" };

  const log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const empty = h("div", { class: "empty" });
  const news = h("p", { class: "hidden-text", role: "status" });
  const message = h("textarea", { rows: 1, "aria-label": "Message", placeholder: "Message", enterkeyhint: "send" });
  const send = h("button", { class: "primary", type: "submit" }, "Send");
  const system = h("textarea", { id: "system", rows: 2 });
  const temperature = h("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: 0 });
  const mostTokens = h("input", { id: "max-tokens", type: "number", min: 1, step: 1, placeholder: "no limit" });
  const settings = h("details", { class: "settings" },
    h("summary", {}, "Settings"),
    h("div", { class: "fields" },
      h("label", { for: "system", class: "wide" }, "System prompt", system),
      h("label", { for: "temperature" }, "temperature", temperature),
      h("label", { for: "max-tokens" }, "max_tokens", mostTokens)));
  const fresh = h("button", { type: "button", class: "quiet", onclick: clear, title: "New chat (n)" }, "New chat");
  const form = h("form", { class: "composer" }, message, send);
  const element = h("section", { class: "chat", "aria-label": "Chat" },
    log, news, h("div", { class: "below" }, form, h("div", { class: "row" }, settings, fresh)));

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else answer();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) answer();
  });
  message.addEventListener("input", grow);
  log.append(empty);
  showEmpty();

  function grow() {
    message.style.height = "auto";
    message.style.height = `${Math.min(message.scrollHeight + 2, 200)}px`;
  }

  function showEmpty() {
    const ask = (text) => h("button", { type: "button", onclick: () => { message.value = text; answer(); } }, text);
    const isBundled = model.id === "bundled";
    empty.replaceChildren(
      h("h1", {}, "Ask, and watch the time"),
      h("p", { class: "muted" }, isBundled
        ? "The bundled model knows the documentation of Python's standard library, and nothing else."
        : "Every answer shows its speed while it comes, and where its time went."),
      isBundled && h("div", { class: "examples" }, BUNDLED_QUESTIONS.map(ask)));
  }

  function clear() {
    running?.abort();
    turns = [];
    log.replaceChildren(empty);
    message.focus();
  }

  function body() {
    const prompt = system.value.trim();
    return {
      model: model.id || undefined,
      messages: [...(prompt ? [{ role: "system", content: prompt }] : []), ...turns],
      temperature: temperature.valueAsNumber >= 0 ? temperature.valueAsNumber : undefined,
      max_tokens: mostTokens.valueAsNumber > 0 ? mostTokens.valueAsNumber : undefined,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      return_progress: true,
    };
  }

  async function answer() {
    const text = message.value.trim();
    if (!text || running) return;
    message.value = "";
    grow();
    empty.remove();
    const mine = turns; // another chat may begin meanwhile
    mine.push({ role: "user", content: text });
    log.append(h("div", { class: "turn user" }, h("h2", { class: "hidden-text" }, "You"), h("p", {}, text)));

    const out = h("div", { class: "text" });
    const live = h("div", { class: "live" });
    const turn = h("div", { class: "turn model", "aria-busy": "true" },
      h("h2", { class: "hidden-text" }, "Model"), out, live);
    log.append(turn);
    log.scrollTop = log.scrollHeight;

    running = new AbortController();
    send.textContent = "Stop";
    send.className = "stop";
    const speed = new LiveSpeed(performance.now());
    const reply = { text: "", id: "", timings: null, reason: null };
    let drawn = null;
    const draw = () => {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      if (drawn !== reply.text) out.replaceChildren(...written(drawn = reply.text));
      live.replaceChildren(...liveLine(speed));
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    };
    const timer = setInterval(draw, 80);
    draw();
    let problem = "";
    try {
      for await (const event of postStream("v1/chat/completions", body(), running.signal)) take(event, reply, speed);
    } catch (error) {
      problem = error.name === "AbortError" ? "Stopped." : error.message;
    }
    clearInterval(timer);
    running = null;
    send.textContent = "Send";
    send.className = "primary";
    draw();
    turn.removeAttribute("aria-busy");
    if (reply.text) mine.push({ role: "assistant", content: reply.text });
    else if (problem) {
      mine.pop();
      if (turn.isConnected) message.value ||= text; // to be changed and sent again
      grow();
    }
    live.replaceChildren(...ending(reply, problem, speed));
    log.scrollTop = log.scrollHeight;
    news.textContent = problem || `Answer complete: ${count(reply.timings?.predicted_n)} tokens.`;
  }

  return {
    element,
    focus: () => message.focus(),
    clear,
    show: () => { if (matchMedia("(hover: hover)").matches) message.focus(); },
    escape: () => {
      running?.abort();
      return false;
    },
    useModel: (found) => {
      model = found;
      message.placeholder = `Message ${model.id}`;
      showEmpty();
    },
  };
}

function take(event, reply, speed) {
  const now = performance.now();
  reply.id = event.id ?? reply.id;
  if (event.prompt_progress) speed.prefilled(event.prompt_progress);
  if (event.usage) speed.generated(event.usage.completion_tokens, now);
  if (event.timings) reply.timings = event.timings;
  for (const choice of event.choices) {
    reply.text += choice.delta.content ?? "";
    reply.reason = choice.finish_reason ?? reply.reason;
  }
}

/** While an answer comes. */
function liveLine(speed) {
  const now = performance.now();
  const elapsed = now - speed.began;
  if (speed.ttft === null) {
    const { progress } = speed;
    const share = progress && progress.total ? progress.processed / progress.total : null;
    return [
      h("span", { class: "phase" }, progress ? "Prefill" : "Waiting"),
      share === null ? h("span", { class: "bar busy" }, h("span")) : bar(share, "prefill"),
      progress && h("span", {}, `${count(progress.processed)} of ${count(progress.total)} tokens, ${percent(share)}`),
      h("span", {}, ms(elapsed)),
    ].filter(Boolean);
  }
  return [
    h("span", { class: "phase" }, "Decode"),
    h("strong", {}, rate(speed.now(now))),
    h("span", {}, `TTFT ${ms(speed.ttft)}`),
    h("span", {}, `${count(speed.tokens)} tokens`),
    h("span", {}, ms(elapsed)),
  ];
}

/** What is left of it afterwards: a line of figures that leads to the waterfall. */
function ending(reply, problem, speed) {
  const shown = [];
  if (problem) shown.push(h("p", { class: problem === "Stopped." ? "muted" : "problem", role: "alert" }, problem));
  if (!reply.id) return shown;
  const link = (text) => h("a", { href: `#requests/${reply.id}` }, text);
  const { timings } = reply;
  if (!timings) {
    if (speed.ttft !== null) shown.push(h("span", {}, `TTFT ${ms(speed.ttft)}`), h("span", {}, `${count(speed.tokens)} tokens`));
    return [...shown, link("Waterfall")];
  }
  const cached = timings.cache_n ? `, ${count(timings.cache_n)} cached` : "";
  shown.push(
    h("strong", {}, rate(timings.predicted_per_second)),
    h("span", {}, `TTFT ${ms(timings.ttft_ms)}`),
    h("span", {}, `${count(timings.predicted_n)} tokens`),
    h("span", {}, `prompt ${count(timings.prompt_n + timings.cache_n)}${cached}`),
    h("span", {}, `total ${ms(timings.total_ms)}`),
    reply.reason === "length" && h("span", { class: "tag" }, "max_tokens reached"),
    link("Waterfall"),
    spansBar(timings));
  return shown.filter(Boolean);
}
