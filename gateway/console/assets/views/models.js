// Names that requests can ask for, who answers them, and the limits in between. A model can be tried: one tiny request of the signed-in person.

import { all, may, stream } from "../api.js";
import { button, chip, dialog, field, h, mark, number, options, problem, say, seconds, short, table, usd, whole } from "../dom.js";

export const title = "Models";
const BREAKERS = { closed: "good", probing: "wait", open_softly: "wait", open_hard: "bad" };
const WORDS = { closed: "closed", probing: "probing", open_softly: "asked last", open_hard: "open" };

export function show(root) {
  const out = h("div", { "aria-live": "polite" });
  const refresh = button("Refresh", () => load());
  root.append(h("header", { class: "head" }, h("h1", null, title), refresh), out);
  let over = false;
  async function load() {
    mark(refresh, "disabled", "");
    try {
      const [models, providers, limits] = await Promise.all([all("/models"), all("/providers"), all("/limits")]);
      if (!over) out.replaceChildren(modelPanel(models), providerPanel(providers, models), limitPanel(limits));
    } catch (error) {
      out.replaceChildren(problem(error));
    }
    mark(refresh, "disabled", null);
  }
  load();
  return () => {
    over = true;
  };
}

const heads = (names, numbers = []) => names.map((name) => ({ name, number: numbers.includes(name), hidden: name === "Try" }));
const tries = () => may("operator");

// --- a model that is tried ---

const ASKED = "Say hello.";
const TOKENS_MAX = 16;

// Asks one of the models with these names, through all that a request passes, and shows times, tokens and cost, or the error.
async function trial(about, names) {
  const model = h("select", null, options(names.map((name) => [name, name])));
  const out = h("div", { class: "after", "aria-live": "polite" });
  const aborter = new AbortController();
  const send = button("Send", () => ask(), "primary");
  async function ask() {
    mark(send, "disabled", "");
    out.replaceChildren(h("p", { class: "small" }, "Waiting for the first token …"));
    const told = await answer(model.value, aborter.signal);
    if (!aborter.signal.aborted) out.replaceChildren(...told);
    mark(send, "disabled", null);
  }
  await dialog(`Try ${about}`, (close) => [
    field("Model", model, `Asks "${ASKED}" for at most ${TOKENS_MAX} tokens, as you: your role, limits, the ledger and the log apply.`), out,
    h("footer", null, button("Done", () => close()), send),
  ]);
  aborter.abort();
}

async function answer(model, signal) {
  const body = { model, messages: [{ role: "user", content: ASKED }], max_tokens: TOKENS_MAX, stream: true, stream_options: { include_usage: true } };
  const began = performance.now();
  let [first, usage, cost, finish, text, error] = [0, null, null, "", "", null];
  const take = (chunk) => {
    usage = chunk.usage ?? usage;
    const choice = chunk.choices?.[0];
    const { content, reasoning, reasoning_content: thought, refusal, tool_calls: calls } = choice?.delta ?? {};
    if (content || reasoning || thought || refusal || calls) first ||= performance.now();
    text += content ?? refusal ?? "";
    finish = choice?.finish_reason ?? finish;
  };
  const aside = (comment) => {
    const found = /^x-penstock-cost: ([\d.]+)$/.exec(comment);
    if (found) cost = Number(found[1]);
  };
  try {
    await stream("/playground", body, signal, take, aside);
  } catch (caught) {
    error = caught;
  }
  const total = performance.now() - began;
  const isDone = !error && finish !== "";
  if (!error && !isDone) error = new Error("The answer has no end.");
  const facts = [["Time to the first token", first ? seconds((first - began) / 1000) : "–"], ["Time in all", seconds(total / 1000)],
    ["Prompt tokens", usage ? whole(usage.prompt_tokens) : "–"], ["Output tokens", usage ? whole(usage.completion_tokens) : "–"],
    ["Cost", cost === null ? "no price" : usd(cost)], ["Ended by", finish || "–"]];
  return [h("p", null, isDone ? chip("answered", "good") : chip("failed", "bad")), error ? problem(error) : null,
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
    text ? say(h("div", { class: "said note" }), text) : null].filter(Boolean);
}

const tryButton = (about, names) => button("Try", () => trial(about, names), "small", { "aria-label": `Try ${about}` });

function modelPanel(models) {
  const rows = models.map((model) => h("tr", null,
    h("th", { scope: "row", class: "mono" }, model.name), h("td", null, model.ready ? chip("ready", "good") : chip(model.unready ?? "not ready", "bad")),
    h("td", { class: "mono" }, model.aliases.join(", ") || "–"), number(model.context_tokens ? whole(model.context_tokens) : "–"),
    h("td", null, model.targets.length ? h("ul", { class: "breakers" }, model.targets.map((target) => h("li", null,
      h("span", { class: "mono" }, target.id), h("span", { class: "faint" }, target.weight ? `weight ${target.weight}` : "fallback"),
      chip(`breaker ${WORDS[target.breaker]}`, BREAKERS[target.breaker]), h("span", { class: "faint" }, `${whole(target.in_flight)} in flight`))))
      : h("span", { class: "faint" }, model.discovered ? "found at a provider" : "under its own name")),
    tries() ? h("td", null, tryButton(model.name, [model.name])) : null));
  return h("section", { class: "panel" }, h("h2", null, "Models"),
    table("Models", heads(["Name", "State", "Aliases", "Context", "Who answers", ...(tries() ? ["Try"] : [])], ["Context"]), rows, "No model is served."));
}

function providerPanel(providers, models) {
  // Names that no entry of [[models]] leads elsewhere: the provider itself answers.
  const own = new Set(models.filter((model) => model.targets.length === 0).map((model) => model.name));
  const rows = providers.map((one) => {
    const direct = [...one.models, ...one.discovered.map((name) => `${one.id}/${name}`)].filter((name) => own.has(name));
    const failed = Object.entries(one.outcomes).filter(([name, count]) => name !== "ok" && count > 0);
    return h("tr", null, h("th", { scope: "row" }, one.id), h("td", null, one.protocol), h("td", { class: "mono" }, one.url),
      h("td", null, one.keys_resting ? chip(`${one.keys_resting} of ${one.keys} rest`, "wait") : whole(one.keys)),
      number(`${whole(one.in_flight)} of ${whole(one.in_flight_max)}`), number(short(one.outcomes.ok ?? 0)),
      h("td", null, failed.map(([name, count]) => `${name} ${whole(count)}`).join(", ") || "none"),
      h("td", { class: "mono" }, [...one.models, ...one.discovered].join(", ") || "–"),
      tries() ? h("td", null, direct.length ? tryButton(`provider ${one.id}`, direct) : null) : null);
  });
  const names = ["Id", "Protocol", "URL", "Keys", "In flight", "Answered", "Failures", "Models"];
  return h("section", { class: "panel" }, h("h2", null, "Providers"),
    table("Providers", heads([...names, ...(tries() ? ["Try"] : [])], ["In flight", "Answered"]), rows,
      "The config has no [[providers]]: pools of this gateway answer."));
}

function limitPanel(limits) {
  const rows = limits.map((one) => h("tr", null, h("th", { scope: "row" }, one.id),
    h("td", null, one.measures.map((measure) => `${measure.measure.replaceAll("_", " ")} ${short(measure.max)}`).join(", ")),
    h("td", null, one.applies), h("td", null, one.by), h("td", null, one.models.join(", ") || "all"),
    h("td", null, one.effective ? chip("acts", "good") : chip(one.why_not ?? "has no effect", "wait"))));
  return h("section", { class: "panel" }, h("h2", null, "Limits"),
    table("Limits", heads(["Id", "Measures", "Applies to", "Counted by", "Models", "Effect"]), rows, "The config has no [[limits]]."));
}
