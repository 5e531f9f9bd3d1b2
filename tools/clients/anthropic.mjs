// The official client of Anthropic's API for JavaScript.
import Anthropic from "@anthropic-ai/sdk";
const { run, check, text, told } = await import(process.env.RUN);
const { url, ask } = told;
const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "unused", maxRetries: 0 });
const { model, messages } = ask;
const asked = { model, messages, max_tokens: 8 };
const cases = {
  models: [async () => {
    const ids = []; for await (const model of client.models.list()) ids.push(model.id);
    check(ids.length === 1 && (await client.models.retrieve(ids[0])).id === "bundled", ids);
  }, 0],
  messages: [() => client.messages.create(asked), 404],
  stream: [async () => text(await client.messages.create({ ...asked, stream: true }), () => ""), 404],
  count_tokens: [() => client.messages.countTokens({ model, messages }), 404],
};
await run("@anthropic-ai/sdk", cases, (error) => error.status);
