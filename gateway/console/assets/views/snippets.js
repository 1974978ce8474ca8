// Code for a chat through OpenAI's, Anthropic's and Gemini's API, to be copied: the same request as the playground sends.

// A text as one word of a shell.
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const json = (value) => JSON.stringify(value, null, 2);
// Fields that have a value.
const given = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));

// A JSON value in Python's notation.
function python(value, indent = "    ") {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => python(item, deeper))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, deeper)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  return line.length < 80 ? line : `${open}\n${items.map((item) => `${deeper}${item},\n`).join("")}${indent}${close}`;
}

const textOf = (message) => message.content ?? "";
const argumentsOf = (call) => {
  try {
    return JSON.parse(call.function.arguments || "{}");
  } catch {
    return {};
  }
};
// Name of the function whose result a message tells.
function named(messages, id) {
  const calls = messages.flatMap((message) => message.tool_calls ?? []);
  return calls.find((call) => call.id === id)?.function.name ?? id;
}
const functions = (body) => body.tools?.map((tool) => tool.function ?? tool);
const schemaOf = (body) => body.response_format?.json_schema?.schema;

function anthropic(body) {
  const turns = body.messages.filter((message) => message.role !== "system").map((message) => {
    if (message.role === "tool") return { role: "user", content: [{ type: "tool_result", tool_use_id: message.tool_call_id, content: textOf(message) }] };
    const calls = message.tool_calls?.map((call) => ({ type: "tool_use", id: call.id, name: call.function.name, input: argumentsOf(call) }));
    const said = textOf(message) ? [{ type: "text", text: textOf(message) }] : [];
    return { role: message.role, content: calls ? [...said, ...calls] : textOf(message) };
  });
  const schema = schemaOf(body);
  return given({
    model: body.model, max_tokens: body.max_tokens ?? 1024, system: body.messages.find((message) => message.role === "system")?.content,
    messages: turns, temperature: body.temperature, top_p: body.top_p,
    tools: functions(body)?.map((one) => given({ name: one.name, description: one.description, input_schema: one.parameters ?? { type: "object" } })),
    output_config: schema && { format: { type: "json_schema", schema } },
  });
}

function gemini(body) {
  const turns = body.messages.filter((message) => message.role !== "system").map((message) => {
    if (message.role === "tool") {
      const name = named(body.messages, message.tool_call_id);
      return { role: "user", parts: [{ functionResponse: { name, response: { result: textOf(message) } } }] };
    }
    const calls = message.tool_calls?.map((call) => ({ functionCall: { name: call.function.name, args: argumentsOf(call) } })) ?? [];
    const said = textOf(message) || !calls.length ? [{ text: textOf(message) }] : [];
    return { role: message.role === "assistant" ? "model" : "user", parts: [...said, ...calls] };
  });
  const system = body.messages.find((message) => message.role === "system")?.content;
  const schema = schemaOf(body);
  const config = given({
    temperature: body.temperature, topP: body.top_p, maxOutputTokens: body.max_tokens, seed: body.seed,
    responseMimeType: schema && "application/json", responseJsonSchema: schema,
  });
  const declared = functions(body)?.map((one) => given({ name: one.name, description: one.description, parametersJsonSchema: one.parameters }));
  return given({
    contents: turns, systemInstruction: system && { parts: [{ text: system }] },
    generationConfig: Object.keys(config).length ? config : undefined, tools: declared && [{ functionDeclarations: declared }],
  });
}

function curl(url, headers, body) {
  const fields = ["content-type: application/json", ...headers].map((field) => `  -H "${field}" \\\n`).join("");
  return `curl ${quoted(url)} \\\n${fields}  -d ${quoted(json(body))}`;
}

// URL of the data port, as somebody outside writes it. One that listens at every address is taken for where this page came from.
export function base(state) {
  if (!state) return "$URL";
  const [, host, port] = /^(.*):(\d+)$/.exec(state.listen) ?? [];
  const place = ["0.0.0.0", "[::]"].includes(host) ? `${location.hostname}:${port}` : state.listen;
  return `${state.tls ? "https" : "http"}://${place}`;
}

// [name, code] of each of these APIs for the body of a chat completion. `base`: the gateway's URL. A gateway that needs no key takes any.
export function snippets(base, body) {
  const lines = Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},\n`).join("");
  const client = `OpenAI(base_url=${JSON.stringify(`${base}/v1`)}, api_key=os.environ.get("PENSTOCK_API_KEY", "none"))`;
  return [
    ["OpenAI, Python", `import os\n\nfrom openai import OpenAI\n\nclient = ${client}\nanswer = client.chat.completions.create(\n${lines})\n`
      + "print(answer.choices[0].message.content)"],
    ["OpenAI, curl", curl(`${base}/v1/chat/completions`, ["authorization: Bearer $PENSTOCK_API_KEY"], body)],
    ["Anthropic, curl", curl(`${base}/v1/messages`, ["x-api-key: $PENSTOCK_API_KEY", "anthropic-version: 2023-06-01"], anthropic(body))],
    ["Gemini, curl", curl(`${base}/v1beta/models/${encodeURIComponent(body.model)}:generateContent`, ["x-goog-api-key: $PENSTOCK_API_KEY"], gemini(body))],
  ];
}
