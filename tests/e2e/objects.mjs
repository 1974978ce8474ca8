// Typed answers as TypeScript applications ask for them: zod through OpenAI's helpers, and the Vercel SDK.
// node objects.mjs BASE_URL MODEL prints {"checks": n} or fails.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const Person = z.object({ name: z.string(), age: z.number().int().min(0).max(150) });
const Mood = z.object({
  mood: z.enum(["calm", "angry"]),
  words: z.array(z.string().max(8)).max(3),
  note: z.string().max(12).nullable(),
});
const ALICE = "Give me JSON with name and age: Alice is 31";
const WEATHER = "What is the weather in Paris?";
const City = z.object({ city: z.string().max(20) });
let checks = 0;

function check(got, want) {
  assert.deepEqual(got, want);
  checks += 1;
}

// The demo model was taught JSON with blanks, and gets figures wrong without them.
function checkAlice(got) {
  check(Person.parse(got).name, "Alice");
}

function checkCity(got) {
  City.parse(got);
  checks += 1;
}

function checkMood(got) {
  Mood.parse(got);
  checks += 1;
}

async function zodHelpers() {
  const asked = { model, temperature: 0, messages: [{ role: "user", content: ALICE }] };
  const chat = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(Person, "person") });
  checkAlice(chat.choices[0].message.parsed);
  const stream = client.chat.completions.stream({ ...asked, response_format: zodResponseFormat(Person, "person") });
  checkAlice((await stream.finalChatCompletion()).choices[0].message.parsed);
  const answer = await client.responses.parse({ model, temperature: 0, input: ALICE, text: { format: zodTextFormat(Person, "person") } });
  checkAlice(answer.output_parsed);
  const called = await client.chat.completions.parse({
    model,
    temperature: 0,
    messages: [{ role: "user", content: WEATHER }],
    tools: [zodFunction({ name: "get_weather", description: "Get the weather in a city", parameters: City })],
    tool_choice: "required",
  });
  checkCity(called.choices[0].message.tool_calls[0].function.parsed_arguments);
}

async function vercel(provider) {
  const one = await generateObject({ model: provider, schema: Person, prompt: ALICE, temperature: 0 });
  checkAlice(one.object);
  checkMood((await generateObject({ model: provider, schema: Mood, prompt: "Say how you are", temperature: 1.2, seed: 3 })).object);
  const many = streamObject({ model: provider, schema: Person, prompt: ALICE, temperature: 0 });
  const parts = [];
  for await (const part of many.partialObjectStream) parts.push(part);
  checkAlice(await many.object);
  checkAlice(parts.at(-1));
  const choice = await generateObject({ model: provider, output: "enum", enum: ["red", "blue"], prompt: "A color?", temperature: 1.5, seed: 1 });
  check(["red", "blue"].includes(choice.object), true);
  const text = await generateText({ model: provider, output: Output.object({ schema: Mood }), prompt: "Say how you are", temperature: 1.2, seed: 5 });
  checkMood(text.output);
  const asked = [];
  const tools = {
    get_weather: tool({
      description: "Get the weather in a city",
      inputSchema: City,
      execute: async ({ city }) => {
        asked.push(typeof city);
        return "12 degrees, cloudy";
      },
    }),
  };
  const forced = await generateText({ model: provider, tools, toolChoice: "required", prompt: WEATHER, temperature: 0 });
  checkCity(forced.toolCalls[0].input);
  const steps = streamText({ model: provider, tools, stopWhen: stepCountIs(3), prompt: WEATHER, temperature: 0 });
  check((await steps.text).length > 0, true);
  check(asked[0], "string");
}

await zodHelpers();
await vercel(createOpenAICompatible({ name: "pool", baseURL, apiKey: "none", supportsStructuredOutputs: true })(model));
await vercel(createOpenAI({ baseURL, apiKey: "none" }).chat(model));
await vercel(createOpenAI({ baseURL, apiKey: "none" }).responses(model));
console.log(JSON.stringify({ checks }));
