// The official Node SDK against a running gateway: node sdk.mjs BASE_URL MODEL. Prints {"checks": n} or fails.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const hello = { model, temperature: 0, messages: [{ role: "user", content: "Hello" }] };
const greeting = "Hello! How can I help you today?";
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather in a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string", description: "The city" } },
      required: ["city"],
    },
  },
};
const question = {
  model,
  temperature: 0,
  tools: [weather],
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
};
let checks = 0;

function check(got, want) {
  assert.deepEqual(got, want);
  checks += 1;
}

async function storedObjects() {
  const kept = await client.chat.completions.create({ ...hello, store: true, metadata: { from: "node" } });
  const listed = [];
  for await (const one of client.chat.completions.list({ metadata: { from: "node" }, limit: 1 })) listed.push(one.id);
  check(listed, [kept.id]);
  check((await client.chat.completions.update(kept.id, { metadata: { to: "it" } })).metadata, { to: "it" });
  check((await client.chat.completions.messages.list(kept.id)).data[0].content, "Hello");
  check((await client.chat.completions.delete(kept.id)).deleted, true);
  const talk = await client.conversations.create({ items: [{ role: "user", content: "Hello" }] });
  const counted = await client.responses.inputTokens.count({ model, conversation: talk.id });
  const said = await client.responses.create({ model, input: "Hello", conversation: talk.id, max_output_tokens: 8 });
  check(said.usage.input_tokens > counted.input_tokens, true);
  const items = [];
  for await (const item of client.conversations.items.list(talk.id, { order: "asc", limit: 2 })) items.push(item.role);
  check(items, ["user", "user", "assistant"]);
  check((await client.conversations.delete(talk.id)).deleted, true);
}

async function backgroundStream() {
  const stream = await client.responses.create({ model, input: "Hello", background: true, stream: true });
  const events = [];
  for await (const event of stream) events.push(event);
  const last = events.at(-1);
  check(last.type, "response.completed");
  const again = [];
  for await (const event of await client.responses.retrieve(last.response.id, { stream: true, starting_after: 3 })) again.push(event);
  check(again, events.slice(4));
}

async function wholeAnswers() {
  const answer = await client.chat.completions.create(hello);
  check(answer.choices[0].message.content, greeting);
  check(answer.choices[0].finish_reason, "stop");
  check(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
}

async function streams() {
  const stream = await client.chat.completions.create({ ...hello, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  check(text, greeting);
  check(usage.completion_tokens > 0, true);
}

async function streamHelper() {
  const runner = client.chat.completions.stream(hello);
  check(await runner.finalContent(), greeting);
}

async function tools() {
  const answer = await client.chat.completions.create(question);
  const [call] = answer.choices[0].message.tool_calls;
  check(call.function.name, "get_weather");
  check(JSON.parse(call.function.arguments), { city: "Paris" });
  const result = { role: "tool", tool_call_id: call.id, content: '{"temperature": 12, "condition": "rainy"}' };
  const messages = [...question.messages, answer.choices[0].message, result];
  const second = await client.chat.completions.create({ ...question, messages });
  check(second.choices[0].message.content, "It is rainy in Paris, 12 degrees.");
}

async function responses() {
  const ask = { model, temperature: 0, input: "Hello" };
  const answer = await client.responses.create(ask);
  check(answer.output_text, greeting);
  check(answer.status, "completed");
  const numbers = [];
  let text = "";
  for await (const event of await client.responses.create({ ...ask, stream: true })) {
    numbers.push(event.sequence_number);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  check(text, greeting);
  check(numbers, [...numbers.keys()]);
  const final = await client.responses.stream(ask).finalResponse();
  check(final.output_text, greeting);
  check((await client.responses.parse(ask)).output_text, greeting);
  const flat = { type: "function", ...weather.function, strict: false };
  const first = await client.responses.create({ ...ask, tools: [flat], input: question.messages });
  const call = first.output.find((item) => item.type === "function_call");
  check(JSON.parse(call.arguments), { city: "Paris" });
  const output = '{"temperature": 12, "condition": "rainy"}';
  const input = [...question.messages, ...first.output, { type: "function_call_output", call_id: call.call_id, output }];
  const second = await client.responses.create({ ...ask, tools: [flat], input });
  check(second.output_text, "It is rainy in Paris, 12 degrees.");
}

async function errors() {
  await assert.rejects(client.chat.completions.create({ ...hello, model: "gpt-9" }), (error) => {
    check(error instanceof OpenAI.NotFoundError, true);
    check(error.code, "model_not_found");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ ...hello, temperature: 9 }), (error) => {
    check(error instanceof OpenAI.BadRequestError, true);
    check(error.param, "temperature");
    return true;
  });
}

async function cancellation() {
  const stream = await client.chat.completions.create({ ...hello, max_tokens: 4000, ignore_eos: true, stream: true });
  let chunks = 0;
  for await (const _ of stream) {
    chunks += 1;
    if (chunks === 5) stream.controller.abort();
  }
  check(chunks < 4000, true);
}

const parts = [wholeAnswers, streams, streamHelper, tools, responses, storedObjects, backgroundStream, errors, cancellation];
for (const part of parts) await part();
console.log(JSON.stringify({ checks }));
