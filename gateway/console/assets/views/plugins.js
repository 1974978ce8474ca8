// Plugins in the order in which requests pass them, and what they do to a request that is tried: nothing of it is sent.

import { get, may, post } from "../api.js";
import { chip, field, h, mark, number, problem, say, seconds, table, whole } from "../dom.js";

export const title = "Plugins";

const PATH = "/v1/chat/completions";
const OUTCOMES = {
  passed: ["passed", "good"], changed: ["changed", "good"], answered: ["answered", "wait"], refused: ["refused", "bad"], failed: ["failed", "bad"],
  not_run: ["not run", "wait"], skipped: ["not for this request", ""], not_reached: ["not reached", ""],
};
const PARTS = { model: "Model", header: "Header", upstream_header: "Header for providers", tag: "Tag", body: "Body" };
const ENDS = {
  passed: "The request would go on to its model, under its limits.", answered: "A plugin would answer; no model is asked.",
  refused: "The client would get an error.",
};

export function show(root) {
  const out = h("div", { "aria-live": "polite" });
  root.append(h("header", { class: "head" }, h("h1", null, title)), out);
  if (may("operator")) root.append(trial());
  let over = false;
  get("/plugins").then((page) => !over && out.replaceChildren(panel(page.data))).catch((error) => out.replaceChildren(problem(error)));
  return () => {
    over = true;
  };
}

const heads = (names, numbers = []) => names.map((name) => ({ name, number: numbers.includes(name) }));

function panel(plugins) {
  const list = (items) => items.join(", ") || "all";
  const rows = plugins.map((one) => h("tr", null, h("th", { scope: "row" }, one.id), h("td", { class: "mono" }, one.name), h("td", null, list(one.routes)),
    h("td", null, list(one.models)), h("td", null, list(one.keys)), h("td", null, list(one.teams)), h("td", null, one.on_fail),
    number(seconds(one.timeout_ms / 1000))));
  const names = ["Id", "Plugin", "Routes", "Models", "Keys", "Teams", "When it fails", "Timeout"];
  return h("section", { class: "panel" }, h("h2", null, "In the order in which requests pass them"),
    table("Plugins, in the order in which requests pass them", heads(names, ["Timeout"]), rows, "The config has no [[plugins]]."));
}

// --- a request that is tried ---

function trial() {
  const path = h("input", { type: "text", value: PATH, maxlength: "2048", spellcheck: "false", autocomplete: "off", required: true });
  const key = h("input", { type: "text", maxlength: "512", spellcheck: "false", autocomplete: "off" });
  const headers = h("textarea", { rows: 2, class: "code", spellcheck: "false", placeholder: "x-team: red" });
  const body = h("textarea", { rows: 9, class: "code", spellcheck: "false" });
  const result = h("div", { class: "after", "aria-live": "polite" });
  const submit = h("button", { type: "submit", class: "button primary" }, "Try");
  get("/models", { limit: 1000 }).catch(() => ({ data: [] })).then((page) => {
    const model = page.data.find((one) => one.ready)?.name ?? "MODEL";
    body.value ||= JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] }, null, 2);
  });
  const act = async (event) => {
    event.preventDefault();
    mark(submit, "disabled", "");
    try {
      const asked = { path: path.value.trim(), headers: fields(headers.value), body: parsed(body.value) };
      if (key.value.trim()) asked.key = key.value.trim();
      result.replaceChildren(...told(await post("/plugins/dry-run", asked)));
    } catch (error) {
      result.replaceChildren(problem(error));
    } finally {
      mark(submit, "disabled", null);
    }
  };
  const form = h("form", { class: "ask", on: { submit: act } },
    h("div", { class: "filters" }, field("Path", path), field("Key id", key, "Empty: no key. A person at the console is console:ID.")),
    field("Headers", headers, "One in a line. Credentials are dropped."), field("Body", body, "JSON in the API of the path, at most 256 KiB."),
    h("div", { class: "acts" }, submit));
  return h("section", { class: "panel" }, h("h2", null, "Try a request"),
    h("p", { class: "small" }, "Runs the plugins on it as they are in force. No model or service is asked, and nothing is kept, counted or logged."),
    form, result);
}

function fields(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  return Object.fromEntries(lines.map((line) => {
    const [, name, value] = /^([^:\s]+)\s*:\s*(.*)$/.exec(line) ?? [];
    if (!name) throw new Error(`Headers: ${line} is no "name: value".`);
    return [name, value];
  }));
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Body: no JSON: ${error.message}`, { cause: error });
  }
}

function told(found) {
  const [who, by] = [found.key ? `key ${found.key}` : "no key", found.team ? `, team ${found.team}` : ""];
  const end = h("p", { class: found.end === "refused" ? "problem" : "note" }, h("strong", null, ENDS[found.end]), " ",
    `${found.route}, model ${found.model}${found.request.model === found.model ? "" : ` → ${found.request.model}`}, ${who}${by}.`);
  const steps = h("ol", { class: "steps", "aria-label": "Steps" }, found.steps.map(step));
  return [end, found.refusal ? refusal(found.refusal) : null, steps, behind(found.request)].filter(Boolean);
}

function step(one) {
  const [word, tone] = OUTCOMES[one.outcome] ?? [one.outcome, ""];
  const facts = [];
  if (["passed", "changed", "answered", "refused", "failed"].includes(one.outcome)) facts.push(seconds(one.seconds));
  if (one.waits_seconds) facts.push(`would wait ${seconds(one.waits_seconds)}`);
  if (one.sees_answer) facts.push("looks at the answer");
  if (one.why) facts.push(one.why);
  const rows = one.changes.map((change) => h("tr", null, h("td", null, PARTS[change.part] ?? change.part),
    h("th", { scope: "row", class: "mono" }, change.name), value(change.before), value(change.after)));
  return h("li", { class: "step" },
    h("p", null, h("strong", null, one.plugin), one.name === one.plugin ? null : h("span", { class: "faint mono" }, ` ${one.name}`), " ", chip(word, tone),
      facts.length ? h("span", { class: "faint" }, ` ${facts.join(" · ")}`) : null),
    rows.length ? table(`Edits by ${one.plugin}`, heads(["Part", "Name", "Before", "After"]), rows) : null,
    one.changes_left_out ? h("p", { class: "small" }, `and ${whole(one.changes_left_out)} more`) : null);
}

const value = (text) => (text === null ? h("td", { class: "faint" }, "–") : h("td", { class: "mono" }, text));

const refusal = (one) => h("div", null, h("h3", null, `What the client gets: ${one.status}`), block("Error for the client", one.body));

function behind(request) {
  const lines = (pairs) => pairs.map((one) => `${one.name}: ${one.value}`).join("\n");
  const parts = [["Body", request.body === null ? "" : pretty(request.body)], ["Headers", lines(request.headers)],
    ["Headers for providers", lines(request.upstream_headers)], ["Tags", lines(request.tags)]].filter(([, text]) => text);
  return h("details", null, h("summary", null, "The request behind the plugins"),
    parts.map(([name, text]) => h("div", null, h("h3", null, name), block(`${name} behind the plugins`, text))));
}

const block = (label, text) => say(h("pre", { tabindex: "0", role: "region", "aria-label": label }), text);

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
