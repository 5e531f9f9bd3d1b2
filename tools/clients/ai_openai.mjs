// Vercel's AI SDK, with its provider for OpenAI itself: its default are responses, .chat is what works elsewhere.
import { embed, generateObject, generateText, jsonSchema, streamText, tool as made } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
const { run, check, text, told } = await import(process.env.RUN);
const { url, ask, complete, tool, schema, answer } = told;
const provider = createOpenAI({ baseURL: url, apiKey: "unused" });
const chat = { model: provider.chat("bundled"), messages: ask.messages, temperature: 0, maxOutputTokens: 80, maxRetries: 0 };
const completion = { model: provider.completion("bundled"), prompt: complete.prompt, temperature: 0, maxOutputTokens: 8, maxRetries: 0 };
const object = jsonSchema(schema.json_schema.schema);
const tools = { add: made({ inputSchema: jsonSchema(tool.function.parameters) }) };
const cases = {
  chat: [async () => {
    const done = await generateText(chat);
    check(done.text.startsWith(answer) && done.usage.totalTokens === done.usage.inputTokens + done.usage.outputTokens, done);
  }, 0],
  stream: [async () => {
    const done = streamText(chat);
    check((await text(done.textStream, (part) => part)).startsWith(answer), done);
    check((await done.usage).outputTokens > 10, await done.usage);
  }, 0],
  completions: [async () => {
    const whole = (await generateText(completion)).text;
    check(whole !== "" && (await text(streamText(completion).textStream, (part) => part)) === whole, whole);
  }, 0],
  "harmless fields": [async () => {
    const options = { user: "u", metadata: { a: "b" }, store: false, serviceTier: "auto", reasoningEffort: "low", textVerbosity: "low", safetyIdentifier: "u", promptCacheKey: "k" };
    const asked = { ...chat, seed: 1, presencePenalty: 0, frequencyPenalty: 0, providerOptions: { openai: options } };
    check((await generateText(asked)).text.startsWith(answer), asked);
  }, 0],
  tools: [() => generateText({ ...chat, tools }), 0],
  json_schema: [() => generateObject({ ...chat, schema: object }), 0],
  embeddings: [() => embed({ model: provider.textEmbeddingModel("bundled"), value: "x", maxRetries: 0 }), 404],
  responses: [async () => check((await generateText({ ...chat, model: provider("bundled") })).text.startsWith(answer), ask), 0],
};
await run("@ai-sdk/openai", cases, (error) => error.statusCode);
