// The official client of Anthropic's API for JavaScript.
import Anthropic from "@anthropic-ai/sdk";
const { run, check, text, told } = await import(process.env.RUN);
const { url, ask, answer } = told;
const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "unused", maxRetries: 0 });
const { model, messages } = ask;
const asked = { model, messages, max_tokens: 80, temperature: 0 };
const cases = {
  models: [async () => {
    const ids = []; for await (const model of client.models.list()) ids.push(model.id);
    check(ids.length === 1 && (await client.models.retrieve(ids[0])).id === "bundled", ids);
  }, 0],
  messages: [async () => {
    const whole = (await client.messages.create(asked)).content[0].text;
    const stream = await client.messages.create({ ...asked, stream: true });
    const streamed = await text(stream, (event) => event.type === "content_block_delta" ? event.delta.text : "");
    check(whole.startsWith(answer) && streamed === whole, whole);
    check((await client.messages.stream(asked).finalMessage()).content[0].text === whole, whole);
  }, 0],
  count_tokens: [async () => {
    const { usage } = await client.messages.create(asked);
    const { input_tokens } = await client.messages.countTokens({ model, messages });
    check(input_tokens === usage.input_tokens + usage.cache_read_input_tokens, input_tokens);
  }, 0],
};
await run("@anthropic-ai/sdk", cases, (error) => error.status);
