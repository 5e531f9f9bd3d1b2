// The official client for JavaScript.
import OpenAI from "openai";
const { run, check, text, told } = await import(process.env.RUN);
const { url, ask, complete, tool, schema, answer, plain, beside, history } = told;
const client = new OpenAI({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const cases = {
  chat: [async () => {
    const done = await client.chat.completions.create({ ...ask, n: 2 });
    check(done.choices.length === 2 && done.choices[1].message.content.startsWith(answer), done);
    check(done.usage.total_tokens === done.usage.prompt_tokens + done.usage.completion_tokens, done.usage);
  }, 0],
  stream: [async () => {
    const whole = (await client.chat.completions.create(ask)).choices[0].message.content;
    const stream = await client.chat.completions.create({ ...ask, stream: true });
    check(await text(stream, (part) => part.choices[0]?.delta.content ?? "") === whole, whole);
  }, 0],
  logprobs: [async () => {
    const done = await client.chat.completions.create({ ...ask, logprobs: true, top_logprobs: 3 });
    check(done.choices[0].logprobs.content.every((e) => e.logprob <= 0 && e.top_logprobs.length === 3), done);
  }, 0],
  models: [async () => {
    const ids = []; for await (const model of client.models.list()) ids.push(model.id);
    check(ids.length === 1 && (await client.models.retrieve(ids[0])).id === "bundled", ids);
  }, 0],
  completions: [async () => {
    const whole = (await client.completions.create({ ...complete, logprobs: 2 })).choices[0];
    check(whole.logprobs.tokens.join("") === whole.text && whole.text !== "", whole);
    const stream = await client.completions.create({ ...complete, stream: true });
    check(await text(stream, (part) => part.choices[0]?.text ?? "") === whole.text, whole);
  }, 0],
  "harmless fields": [async () => {
    const whole = (await client.chat.completions.create(ask)).choices[0].message.content;
    const asked = { ...ask, ...plain, ...beside };
    const done = await client.chat.completions.create(asked);
    check(done.choices[0].message.content === whole && done.choices[0].token_ids.length > 10, done);
    const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
    check(await text(stream, (part) => part.choices[0]?.delta.content ?? "") === whole, whole);
    check((await client.chat.completions.create({ ...asked, messages: history })).choices[0].message.content, history);
  }, 0],
  tools: [async () => {
    const asked = { ...ask, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
    const [call] = (await client.chat.completions.create(asked)).choices[0].message.tool_calls;
    check(call.function.name === "add" && "a" in JSON.parse(call.function.arguments), call);
  }, 0],
  json_schema: [async () => {
    const done = await client.chat.completions.create({ ...ask, response_format: schema });
    check(typeof JSON.parse(done.choices[0].message.content) === "object", done);
  }, 0],
  embeddings: [() => client.embeddings.create({ model: "bundled", input: "x" }), 404],
  responses: [async () => {
    const asked = { model: "bundled", input: ask.messages[0].content, temperature: 0, max_output_tokens: 80 };
    const whole = (await client.responses.create(asked)).output_text;
    const stream = await client.responses.create({ ...asked, stream: true });
    const streamed = await text(stream, (event) => event.type === "response.output_text.delta" ? event.delta : "");
    check(whole.startsWith(answer) && streamed === whole, whole);
  }, 0],
};
await run("openai", cases, (error) => error.status);
