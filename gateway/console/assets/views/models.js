// Names that requests can ask for, who answers them, and the limits in between.

import { get } from "../api.js";
import { chip, h, number, problem, short, table, whole } from "../dom.js";

export const title = "Models";
const BREAKERS = { closed: "good", probing: "wait", open_softly: "wait", open_hard: "bad" };
const WORDS = { closed: "closed", probing: "probing", open_softly: "asked last", open_hard: "open" };

export function show(root) {
  const out = h("div", { "aria-live": "polite" });
  root.append(h("header", { class: "head" }, h("h1", null, title)), out);
  let over = false;
  async function load() {
    try {
      const [models, providers, limits] = await Promise.all([
        get("/models", { limit: 1000 }), get("/providers", { limit: 1000 }), get("/limits", { limit: 1000 }),
      ]);
      if (!over) out.replaceChildren(modelPanel(models.data), providerPanel(providers.data), limitPanel(limits.data));
    } catch (error) {
      out.replaceChildren(problem(error));
    }
  }
  load();
  return () => {
    over = true;
  };
}

const heads = (names, numbers = []) => names.map((name) => ({ name, number: numbers.includes(name) }));

function modelPanel(models) {
  const rows = models.map((model) => h("tr", null,
    h("th", { scope: "row", class: "mono" }, model.name), h("td", null, model.ready ? chip("ready", "good") : chip(model.unready ?? "not ready", "bad")),
    h("td", { class: "mono" }, model.aliases.join(", ") || "–"), number(model.context_tokens ? whole(model.context_tokens) : "–"),
    h("td", null, model.targets.length ? h("ul", { class: "breakers" }, model.targets.map((target) => h("li", null,
      h("span", { class: "mono" }, target.id), h("span", { class: "faint" }, target.weight ? `weight ${target.weight}` : "fallback"),
      chip(`breaker ${WORDS[target.breaker]}`, BREAKERS[target.breaker]), h("span", { class: "faint" }, `${whole(target.in_flight)} in flight`))))
      : h("span", { class: "faint" }, model.discovered ? "found at a provider" : "under its own name"))));
  return h("section", { class: "panel" }, h("h2", null, "Models"),
    table("Models", heads(["Name", "State", "Aliases", "Context", "Who answers"], ["Context"]), rows, "No model is served."));
}

function providerPanel(providers) {
  const rows = providers.map((one) => {
    const failed = Object.entries(one.outcomes).filter(([name, count]) => name !== "ok" && count > 0);
    return h("tr", null, h("th", { scope: "row" }, one.id), h("td", null, one.protocol), h("td", { class: "mono" }, one.url),
      h("td", null, one.keys_resting ? chip(`${one.keys_resting} of ${one.keys} rest`, "wait") : whole(one.keys)),
      number(`${whole(one.in_flight)} of ${whole(one.in_flight_max)}`), number(short(one.outcomes.ok ?? 0)),
      h("td", null, failed.map(([name, count]) => `${name} ${whole(count)}`).join(", ") || "none"),
      h("td", { class: "mono" }, [...one.models, ...one.discovered].join(", ") || "–"));
  });
  return h("section", { class: "panel" }, h("h2", null, "Providers"),
    table("Providers", heads(["Id", "Protocol", "URL", "Keys", "In flight", "Answered", "Failures", "Models"], ["In flight", "Answered"]), rows,
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
