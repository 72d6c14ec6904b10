// Three turns with a tool each, by the AI SDK. Arguments: address, key, `chat`, `responses` or `messages`.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, key, dialect] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const model = {
  chat: () => openai.chat("parkd"),
  responses: () => openai.responses("parkd"),
  messages: () => createAnthropic({ baseURL: `${url}/v1`, apiKey: key })("parkd"),
}[dialect]();
const calls = [];
const look = tool({
  description: "Looks.",
  inputSchema: z.object({ path: z.string(), depth: z.number().optional() }),
  execute: async ({ path, depth }) => {
    calls.push([path, depth]);
    return `${path} holds three files`;
  },
});
const messages = [];
for (let turn = 0; turn < 3; turn++) {
  messages.push({ role: "user", content: `What is in folder ${turn}?` });
  // Without `store: false`, it would send ids of items instead of the items, which a server that keeps none refuses.
  const providerOptions = { openai: { store: false } };
  const asked = { model, providerOptions, system: "Look.", messages, tools: { look }, stopWhen: stepCountIs(4), maxRetries: 0 };
  let said, made;
  if (turn % 2) {
    const stream = streamText(asked);
    said = await stream.text;
    made = (await stream.response).messages;
  } else {
    const whole = await generateText(asked);
    said = whole.text;
    made = whole.response.messages;
  }
  assert.strictEqual(said.trim(), "I found it.");
  messages.push(...made);
}
assert.deepStrictEqual(calls, [["a/b", 2], ["a/b", 2], ["a/b", 2]]);
