// Chats with models, one or two at a time, as the signed-in person: limits, ledger and log apply.

import { get, stream } from "../api.js";
import { button, copy, dialog, field, h, mark, options, percent, problem, say, seconds, select, table, usd, whole } from "../dom.js";
import { base, snippets } from "./snippets.js";

export const title = "Playground";
export const role = "operator";

// Tokens whose probabilities are drawn one by one, and those of the table.
const SHADED_MAX = 4000;
const LISTED_MAX = 200;
const ALTERNATIVES = 3;
// Time below which an answer came too fast for the page to see its rate.
const BURST_MS = 100;
// Upper bounds of the probabilities of the shades.
const SHADES = [0.05, 0.25, 0.5, 0.8];

const box = (attributes) => h("input", { type: "text", inputmode: "decimal", autocomplete: "off", ...attributes });
const area = (rows, attributes) => h("textarea", { rows, spellcheck: "false", ...attributes });

export function show(root, store) {
  const talks = [talk(), talk()];
  let running = [];

  // What is asked.
  const models = [h("select", { id: "model" }), h("select", { id: "other-model" })];
  const system = area(2);
  const numbers = { temperature: box(), max_tokens: box({ value: "512", inputmode: "numeric" }), top_p: box(), seed: box({ inputmode: "numeric" }) };
  const words = { temperature: "Temperature", max_tokens: "Most output tokens", top_p: "Top p", seed: "Seed" };
  const logprobs = h("input", { type: "checkbox", id: "logprobs" });
  const tools = area(6, { class: "code", placeholder: "[{\"type\": \"function\", \"function\": {…}}]" });
  const schema = area(6, { class: "code", placeholder: "{\"type\": \"object\", \"properties\": {…}}" });
  const message = area(3, { id: "message" });
  const fault = h("div", { "aria-live": "assertive" });
  const state = h("p", { class: "small", role: "status" });

  const send = h("button", { type: "submit", class: "button primary" }, "Send");
  const stop = button("Stop", () => running.forEach((one) => one.abort()), "danger", { disabled: true });
  const clear = button("Clear", () => {
    talks.forEach((one) => one.clear());
    fault.replaceChildren();
    say(state, "");
  });
  const code = button("Code", () => attempt(() => shown(talks[0])));
  const form = h("form", { class: "ask", on: { submit: (event) => { event.preventDefault(); attempt(ask); } } },
    field("Message", message, "Control and Enter send it."), h("div", { class: "acts" }, send, stop, clear, code), fault, state);
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !send.disabled) form.requestSubmit();
  });
  const columns = h("div", { class: "columns" }, talks[0].node);
  root.append(h("header", { class: "head" }, h("h1", null, title)),
    h("section", { class: "panel" },
      h("div", { class: "filters" }, field("Model", models[0]), field("Beside it", models[1])),
      h("details", null, h("summary", null, "Parameters"),
        field("System prompt", system),
        h("div", { class: "filters" }, Object.entries(numbers).map(([name, input]) => field(words[name], input))),
        h("div", { class: "check" }, logprobs, h("label", { for: "logprobs" }, "Probabilities of tokens",
          h("span", { class: "hint" }, "Shades each token: the redder, the less likely it was.")))),
      h("details", null, h("summary", null, "Tools and structured output"),
        h("div", { class: "columns two" }, field("Tools", tools, "JSON, as the field tools of a chat completion."),
          field("Schema of the answer", schema, "JSON schema that the answer is held to.")))),
    columns, h("section", { class: "panel" }, form));

  models[1].addEventListener("change", () => {
    if (models[1].value) columns.append(talks[1].node);
    else talks[1].node.remove();
    columns.classList.toggle("two", models[1].value !== "");
  });
  get("/models", { limit: 1000 }).then((page) => {
    const sorted = page.data.toSorted((one, other) => Number(other.ready) - Number(one.ready));
    const all = sorted.map((one) => [one.name, one.ready ? one.name : `${one.name} (not ready)`]);
    for (const [at, list] of [all, [["", "nothing"], ...all]].entries()) models[at].replaceChildren(...options(list));
    if (!all.length) fault.replaceChildren(problem(new Error("No model is served.")));
  }).catch((error) => fault.replaceChildren(problem(error)));

  // Runs what may throw a fault of the form.
  async function attempt(act) {
    fault.replaceChildren();
    try {
      return await act();
    } catch (error) {
      fault.replaceChildren(problem(error));
      return undefined;
    }
  }

  function parsed(name, text) {
    if (!text.trim()) return undefined;
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`${name}: no JSON: ${error.message}`, { cause: error });
    }
  }

  // Body of a chat completion with these messages.
  function request(model, messages) {
    const body = { model, messages: system.value.trim() ? [{ role: "system", content: system.value }, ...messages] : messages };
    for (const [name, input] of Object.entries(numbers)) {
      if (!input.value.trim()) continue;
      body[name] = Number(input.value);
      if (!Number.isFinite(body[name])) throw new Error(`${words[name]}: ${input.value} is no number.`);
    }
    const asked = parsed("Tools", tools.value);
    if (asked !== undefined) body.tools = asked;
    const held = parsed("Schema of the answer", schema.value);
    if (held !== undefined) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: held, strict: true } };
    if (logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
    return body;
  }

  const asked = () => talks.map((one, at) => ({ one, model: models[at].value })).filter(({ one, model }) => model && one.node.isConnected);

  async function ask() {
    const text = message.value;
    if (!text.trim()) throw new Error("Write a message first.");
    mayGoOn(asked().map(({ one }) => one));
    const bodies = asked().map(({ one, model }) => ({ one, body: request(model, [...one.messages, { role: "user", content: text }]) }));
    message.value = "";
    for (const { one } of bodies) one.tell(text);
    const said = await run(bodies, [{ role: "user", content: text }]);
    // What nobody has answered can be sent again as it is.
    if (!said.some(Boolean) && !message.value) message.value = text;
  }

  // A model waits for the results of its calls, and no API takes another message before them.
  function mayGoOn(all) {
    if (all.some((one) => one.awaits())) throw new Error("Send the results of the model's calls first, or clear the chat.");
  }

  // The results of tools that a model has called, sent back to it; true if it has answered.
  async function resume(one, model, results) {
    const [answered] = await run([{ one, body: request(model, [...one.messages, ...results]) }], results);
    return answered;
  }

  // Asks each of them, with `added` behind the chat so far; says of each whether it has answered.
  async function run(bodies, added) {
    if (running.length) throw new Error("Wait for the answer that is coming.");
    running = bodies.map(() => new AbortController());
    busy(true);
    try {
      return await Promise.all(bodies.map(({ one, body }, at) =>
        one.answer(body, added, running[at].signal, (results) => attempt(() => resume(one, body.model, results)))));
    } finally {
      running = [];
      busy(false);
    }
  }

  function busy(is) {
    mark(send, "disabled", is ? "" : null);
    mark(clear, "disabled", is ? "" : null);
    mark(stop, "disabled", is ? null : "");
    say(state, is ? "Answering …" : "The answer has ended.");
  }

  async function shown(one) {
    mayGoOn([one]);
    const now = store.state ?? (await get("/live"));
    const last = message.value.trim() ? [{ role: "user", content: message.value }] : [];
    const messages = [...one.messages, ...last];
    const body = request(models[0].value, messages.length ? messages : [{ role: "user", content: "Hello" }]);
    const all = snippets(base(now), body);
    const text = h("pre", { id: "code", tabindex: "0", role: "region", "aria-label": "Code" }, all[0][1]);
    const choice = select(all.map(([name]) => [name, name]), all[0][0], (name) => say(text, all.find(([had]) => had === name)[1]));
    await dialog("The same request from outside", (close) => [
      field("Dialect", choice, "PENSTOCK_API_KEY in the environment is an API key; a gateway that needs none takes any."), text,
      h("footer", null, button("Copy", () => copy(text.textContent), "primary"), button("Done", () => close())),
    ], "large");
  }

  return () => running.forEach((one) => one.abort());
}

// One model's side of a chat.
function talk() {
  const name = h("h2", null, "Answers");
  const list = h("div", { class: "turns" });
  const messages = [];
  return {
    node: h("section", { class: "panel talk" }, name, list),
    messages,
    awaits: () => messages.at(-1)?.tool_calls !== undefined,
    clear() {
      messages.length = 0;
      list.replaceChildren();
      say(name, "Answers");
    },
    tell(text) {
      list.append(h("article", { class: "turn mine" }, h("h3", null, "You"), h("div", { class: "said" }, text)));
    },
    // Draws the answer to a request; true if there is one. The chat then goes on with what was `added` for it and with the answer: a turn that
    // nobody has answered would stand beside the next one, and chats alternate.
    async answer(body, added, signal, resume) {
      say(name, body.model);
      const drawn = turn(body.model);
      list.append(drawn.node);
      const whole = { ...body, stream: true, stream_options: { include_usage: true } };
      let error = null;
      try {
        await stream("/playground", whole, signal, drawn.take, drawn.aside);
      } catch (caught) {
        error = caught;
      }
      const said = drawn.end(signal.aborted ? null : error, signal.aborted, resume);
      if (said) messages.push(...added, said);
      return said !== null;
    },
  };
}

// One answer as it comes.
function turn(model) {
  const began = performance.now();
  const thought = document.createTextNode("");
  const reasoning = h("details", { open: true, hidden: true }, h("summary", null, "Reasoning"), h("div", { class: "said faint" }, thought));
  const text = document.createTextNode("");
  const said = h("div", { class: "said" }, text);
  const after = h("div", { class: "after" });
  const stats = h("p", { class: "small stats" }, "Waiting for the first token …");
  const calls = [];
  const tokens = [];
  let [first, last, usage, finish, cost, pieces, content, refusal] = [0, 0, null, "", null, 0, "", ""];

  function figures(ending) {
    const parts = [];
    if (first) parts.push(`first token ${seconds((first - began) / 1000)}`);
    const output = usage?.completion_tokens ?? 0;
    // What comes in one burst was made before, so only the whole time says how fast.
    const span = last - first;
    if (output > 1 && span >= BURST_MS) parts.push(`${whole((1000 * (output - 1)) / span)} tokens/s`);
    else if (output > 0) parts.push(`${whole((1000 * output) / Math.max(1, last - began))} tokens/s in all`);
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${whole(usage.prompt_tokens)} prompt tokens`, `${whole(cached)} of them cached`, `${whole(output)} output tokens`);
      const thoughts = usage.completion_tokens_details?.reasoning_tokens;
      if (thoughts) parts.push(`${whole(thoughts)} of them reasoning`);
    } else if (pieces) {
      parts.push(`${whole(pieces)} pieces`);
    }
    if (cost !== null) parts.push(usd(cost));
    if (ending) parts.push(ending);
    say(stats, parts.join(" · "));
  }

  // With probabilities, a token is an element of its own.
  function shade(entry) {
    tokens.push(entry);
    if (tokens.length > SHADED_MAX) return said.append(entry.token);
    const chance = Math.exp(entry.logprob);
    const level = SHADES.findIndex((bound) => chance < bound);
    const others = (entry.top_logprobs ?? []).map((one) => `${JSON.stringify(one.token)} ${percent(Math.exp(one.logprob), 1)}`);
    said.append(h("span", { class: `token p${level < 0 ? SHADES.length : level}`, title: `${percent(chance, 1)}; likely: ${others.join(", ")}` }, entry.token));
    return undefined;
  }

  function take(chunk) {
    if (chunk.usage) usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const thoughts = delta.reasoning ?? delta.reasoning_content;
    const entries = choice.logprobs?.content;
    if (delta.content || thoughts || delta.tool_calls || delta.refusal || entries?.length) {
      last = performance.now();
      first ||= last;
      pieces += 1;
      if (pieces === 1) figures();
    }
    if (thoughts) {
      reasoning.hidden = false;
      thought.appendData(thoughts);
    }
    if (delta.refusal) refusal += delta.refusal;
    content += delta.content ?? "";
    if (entries?.length) entries.forEach(shade);
    else if (delta.content) (tokens.length ? said.append(delta.content) : text.appendData(delta.content));
    for (const part of delta.tool_calls ?? []) {
      calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
      const call = calls[part.index];
      call.id ||= part.id ?? "";
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
    }
    if (choice.finish_reason) finish = choice.finish_reason;
  }

  // Comments of the stream: what the answer has cost.
  function aside(comment) {
    const found = /^x-penstock-cost: ([\d.]+)$/.exec(comment);
    if (found) cost = Number(found[1]);
  }

  // Ends the answer; returns it as a message for the next request.
  function end(error, stopped, resume) {
    figures(stopped ? "stopped" : finish);
    if (error) after.append(problem(error));
    if (refusal) after.append(h("p", { class: "note" }, refusal));
    if (tokens.length) after.append(probabilities(tokens));
    const made = calls.filter(Boolean);
    // Calls that were cut are shown and forgotten: nobody can give their results.
    const isWhole = !error && !stopped && finish !== "" && finish !== "length";
    if (made.length) after.append(toolCalls(made, isWhole ? resume : null));
    const message = { role: "assistant", content: content || refusal || null };
    if (made.length && isWhole) message.tool_calls = made;
    if (message.content || message.tool_calls) return message;
    after.append(h("p", { class: "hint" }, "Without an answer, this turn is no part of the chat."));
    return null;
  }

  const node = h("article", { class: "turn" }, h("h3", null, model), reasoning, said, after, stats);
  return { node, take, aside, end };
}

function probabilities(tokens) {
  const rows = tokens.slice(0, LISTED_MAX).map((entry) => h("tr", null, h("th", { scope: "row", class: "mono" }, JSON.stringify(entry.token)),
    h("td", { class: "number" }, percent(Math.exp(entry.logprob), 1)),
    h("td", { class: "mono" }, (entry.top_logprobs ?? []).map((one) => `${JSON.stringify(one.token)} ${percent(Math.exp(one.logprob), 1)}`).join(", "))));
  const cut = tokens.length > LISTED_MAX ? h("p", { class: "hint" }, `The first ${LISTED_MAX} of ${whole(tokens.length)} tokens.`) : null;
  return h("details", null, h("summary", null, "Probabilities"),
    table("Probabilities of the tokens", [{ name: "Token" }, { name: "Probability", number: true }, { name: "Likely here" }], rows), cut);
}

// Calls that the model has made, and a form for what the tools have said.
function toolCalls(calls, resume) {
  const inputs = calls.map(() => area(2, { class: "code" }));
  const drawn = calls.map((call, at) => h("div", { class: "call" }, h("h4", { class: "mono" }, call.function.name),
    h("pre", { tabindex: "0", role: "region", "aria-label": `Arguments of ${call.function.name}` }, call.function.arguments),
    resume ? field(`Result of ${call.function.name}`, inputs[at]) : null));
  const act = async (event) => {
    event.preventDefault();
    const lock = (is) => form.querySelectorAll("button, textarea").forEach((one) => mark(one, "disabled", is ? "" : null));
    lock(true);
    // Results that have had no answer can be sent again.
    lock(await resume(calls.map((call, at) => ({ role: "tool", tool_call_id: call.id, content: inputs[at].value }))));
  };
  const form = h("form", { class: "calls", on: { submit: act } }, drawn,
    resume ? h("div", { class: "acts" }, h("button", { type: "submit", class: "button" }, "Send the results")) : null);
  return form;
}
