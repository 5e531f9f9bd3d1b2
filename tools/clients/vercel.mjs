// Vercel's AI SDK, with its provider for servers that speak OpenAI's API.
import { generateText, streamText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
const { run, check, text, told } = await import(process.env.RUN);
const { url, ask, complete, answer, beside } = told;
const provider = createOpenAICompatible({ name: "engine", baseURL: url, apiKey: "unused", includeUsage: true });
const chat = { model: provider("bundled"), messages: ask.messages, temperature: 0, maxOutputTokens: 80, maxRetries: 0 };
const completion = { model: provider.completionModel("bundled"), prompt: complete.prompt, temperature: 0, maxOutputTokens: 8, maxRetries: 0 };
const { chat_template_kwargs, ...rest } = beside;
const options = { reasoningEffort: "low", textVerbosity: "low", user: "u", metadata: { a: "b" }, store: false, service_tier: "auto" };
const parts = [{ role: "system", content: "You are" }, { role: "user", content: [{ type: "text", text: "What does " }, { type: "text", text: "json.dumps do?" }] }];
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
    const asked = { ...chat, seed: 1, presencePenalty: 0, frequencyPenalty: 0, providerOptions: { engine: { ...options, ...beside } } };
    check((await generateText(asked)).text.startsWith(answer), asked);
    check((await text(streamText(asked).textStream, (part) => part)).startsWith(answer), asked);
  }, 0],
  "harmless fields, completions": [async () => {
    const asked = { ...completion, providerOptions: { engine: { user: "u", ...rest } } };
    check((await generateText(asked)).text === (await generateText(completion)).text, asked);
  }, 0],
  parts: [async () => check((await generateText({ ...chat, messages: parts })).text !== "", parts), 0],
};
await run("@ai-sdk/openai-compatible", cases, (error) => error.statusCode);
