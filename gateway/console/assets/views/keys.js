// API keys: issued, shown once, changed, rotated, revoked.

import { all, call, get, may, part, post } from "../api.js";
import { button, chip, confirmed, copy, day, dialog, field, h, number, problem, select, short, stamp, table, toast, usd } from "../dom.js";
import { base } from "./snippets.js";

export const title = "Keys";
const STATES = { good: "good", expired: "wait", revoked: "", parent_revoked: "", parent_expired: "wait", blocked: "bad" };
const WORDS = { parent_revoked: "parent revoked", parent_expired: "parent expired" };
const PAGE = 100;
// What a budget of a new key counts: measures of a limit.
const BUDGETS = [["usd_per_month", "US$ a month"], ["usd_per_day", "US$ a day"], ["tokens_per_month", "tokens a month"], ["tokens_per_day", "tokens a day"]];

export function show(root, store) {
  const issue = may("owner") ? button("Issue a key", () => edit(null, store.state).then((done) => done && load()), "primary") : null;
  const out = h("div", { "aria-live": "polite" });
  const revoked = h("input", { type: "checkbox", on: { change: () => load() } });
  const id = "show-revoked";
  revoked.id = id;
  root.append(h("header", { class: "head" }, h("h1", null, title), issue),
    h("section", { class: "panel" }, h("div", { class: "filters" }, h("div", { class: "check" }, revoked, h("label", { for: id }, "Show revoked keys"))), out));

  async function load(after) {
    try {
      const page = await get("/keys", { limit: PAGE, after, revoked: revoked.checked ? undefined : "false" });
      const use = await used(page.data.map((key) => key.id));
      const heads = ["Name", "State", "Ends with", "Team", "Models", "Limits", "Expires", "Requests, 30 d", "Cost, 30 d", "Details"]
        .map((name, at) => ({ name, number: at === 7 || at === 8, hidden: at === 9 }));
      const rows = page.data.map((key) => {
        const sum = use.get(key.id);
        const more = button("Details", () => details(key, store.state).then((done) => done && load()), "small", { "aria-label": `Details of ${key.name}` });
        return h("tr", null,
          h("th", { scope: "row" }, key.name), h("td", null, chip(WORDS[key.state] ?? key.state, STATES[key.state])),
          h("td", { class: "mono" }, `…${key.ends_with}`), h("td", null, key.team ?? "–"),
          h("td", null, key.allowed.models.join(", ") || "all"), h("td", null, key.limits.join(", ") || "none"),
          h("td", null, key.expires ? day(key.expires) : "never"), number(short(sum?.requests ?? 0)), number(usd(sum?.usd ?? 0)),
          h("td", null, more));
      });
      const next = page.next ? h("div", { class: "pager" }, button("More", () => load(page.next))) : null;
      out.replaceChildren(table("Issued keys", heads, rows, "No key has been issued yet."), next ?? "");
    } catch (error) {
      out.replaceChildren(problem(error));
    }
  }
  load();
}

// Sums of the last 30 days of these keys, by id. Sums come in the order of ids, and those of token users and of people at the console before
// those of keys: the cursor, which is a sum's group, leads to the first of these.
async function used(ids) {
  const sums = new Map();
  const sorted = ids.toSorted();
  const last = sorted.at(-1);
  let after = ids.length ? cursor(sorted[0].slice(0, -1)) : null;
  while (after) {
    const page = await get("/usage", { group: "key", limit: 1000, after });
    for (const sum of page.data) sums.set(sum.groups.key, sum);
    after = page.data.at(-1)?.groups.key < last ? page.next : null;
  }
  return sums;
}

const cursor = (value) => btoa(JSON.stringify([value])).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

const words = (input) => input.value.split(/[,\n]/).map((word) => word.trim()).filter(Boolean);

// Form of a key: a new one, or one that is changed.
async function edit(key, state) {
  let known;
  try {
    // Teams of the admin API and of the config's [[teams]].
    const read = [all("/limits"), all("/teams"), get("/config/teams"), key ? null : get("/config")];
    const [limits, stored, inFile, config] = await Promise.all(read);
    const teams = new Map([...stored.map((one) => [one.id, one.name]), ...inFile.data.map((one) => [one.id, one.id])]);
    known = { limits, teams: [...teams], config };
  } catch (error) {
    // Without what there is to choose from, a change would take away what the key has.
    toast(error.message, "bad");
    return false;
  }
  const { limits, teams, config } = known;
  return dialog(key ? `Change ${key.name}` : "Issue a key", (close) => {
    const name = h("input", { type: "text", maxlength: "256", value: key?.name ?? "", autofocus: true });
    const team = select([["", "none"], ...teams,
      ...(key?.team && !teams.some(([id]) => id === key.team) ? [[key.team, key.team]] : [])], key?.team ?? "");
    const models = h("input", { type: "text", value: key?.allowed.models.join(", ") ?? "", spellcheck: "false", placeholder: "all" });
    const tags = h("input", { type: "text", value: key?.tags.join(", ") ?? "", spellcheck: "false", placeholder: "none" });
    const shownEnd = key?.expires ? day(key.expires) : "";
    const expires = h("input", { type: "date", value: shownEnd });
    // Limits of the key that the config of this gateway does not have are shown, so that nobody takes them away unseen.
    const foreign = (key?.limits ?? []).filter((id) => !limits.some((limit) => limit.id === id)).map((id) => ({ id, measures: null }));
    const boxes = [...limits, ...foreign].map((limit) => {
      const box = h("input", { type: "checkbox", id: `limit-${limit.id}`, value: limit.id, checked: key?.limits.includes(limit.id) });
      const about = limit.measures?.map((one) => `${one.measure.replaceAll("_", " ")} ${short(one.max)}`).join(", ") ?? "not in this gateway's config";
      return { box, node: h("div", { class: "check" }, box, h("label", { for: box.id }, limit.id, h("span", { class: "hint" }, about))) };
    });
    const amount = h("input", { type: "text", inputmode: "decimal", autocomplete: "off", placeholder: "none" });
    const measure = select(BUDGETS, BUDGETS[0][0]);
    const fault = h("div", { "aria-live": "assertive" });
    // A new key with its budget; the budget goes again if there is no key for it.
    const issued = async (wish) => {
      const budget = amount.value.trim() ? budgetOf(wish.name, measure.value, amount.value.trim()) : null;
      if (!budget) return { made: await post("/keys", wish) };
      const note = new URLSearchParams({ note: `budget of a new key: ${budget.id}` });
      const put = await call("POST", `/config/limits?${note}`, budget);
      try {
        const made = await post("/keys", { ...wish, limits: [...wish.limits, budget.id] });
        return { made, toWrite: put.config.persisted ? null : budget };
      } catch (error) {
        await call("DELETE", `/config/limits/${part(budget.id)}?${new URLSearchParams({ note: "its key was not issued" })}`).catch((left) => {
          error.message += ` The limit ${budget.id} is left in the config: ${left.message}`;
        });
        throw error;
      }
    };
    const act = async (event) => {
      event.preventDefault();
      const allowed = { ...(key?.allowed ?? {}), models: words(models) };
      const wish = { name: name.value.trim(), team: team.value || null, allowed, tags: words(tags) };
      const checked = boxes.filter((one) => one.box.checked).map((one) => one.box.value);
      if (!key || checked.toSorted().join("\n") !== key.limits.toSorted().join("\n")) wish.limits = checked;
      // A moment within a day that nobody has changed is kept as it is.
      if (expires.value !== shownEnd) wish.expires = expires.value ? Math.floor(new Date(`${expires.value}T00:00:00`).getTime() / 1000) : null;
      try {
        if (key) {
          await call("PATCH", `/keys/${part(key.id)}`, { ...wish, expected_version: key.version });
          toast("The key is changed.");
          close(true);
        } else {
          const { made, toWrite } = await issued(wish);
          close(true);
          await shown(made, state, toWrite);
        }
      } catch (error) {
        fault.replaceChildren(problem(error));
      }
    };
    const warn = !key && state && !state.keys_required
      ? h("p", { class: "note" }, "This gateway takes requests without a key now. Once the first key is issued, every request needs one.") : null;
    return h("form", { on: { submit: act } }, warn, field("Name", name, "For people: lists and the audit log show it."),
      field("Team", team), field("Models", models, "Names separated by commas; a name may end in *. Empty: all models."),
      h("fieldset", null, h("legend", null, "Limits"),
        boxes.length ? boxes.map((one) => one.node) : h("p", { class: "hint" }, "The config has no [[limits]].")),
      key ? null : h("fieldset", null, h("legend", null, "Budget of its own"),
        h("div", { class: "filters pair" }, field("Amount", amount), field("Of", measure)),
        h("p", { class: "hint" }, "Adds a limit for this key to the config of this gateway. Empty: none."),
        config.writes ? null : h("p", { class: "note" },
          "This gateway does not write its config file (server.config_writes is off): after a restart, or a change of the ",
          "file, the limit is gone and requests of the key are refused, unless the file has the limit too. Its lines are shown with the key.")),
      field("Tags", tags, "Usage can be summed by tag."), field("Expires", expires, "The key is refused from the begin of that day. Empty: never."), fault,
      h("footer", null, button("Back", () => close(false)), h("button", { type: "submit", class: "button primary" }, key ? "Change" : "Issue")));
  });
}

// Entry of [[limits]] that a new key is to be under.
function budgetOf(name, measure, amount) {
  const number = Number(amount.replaceAll("_", ""));
  if (!(number > 0) || (!measure.startsWith("usd") && !Number.isInteger(number))) throw new Error(`Budget: ${amount} is no such amount.`);
  const word = name.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "").slice(0, 40);
  return { id: `budget-${word ? `${word}-` : ""}${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`, [measure]: number };
}

// Name of a model that the key may ask for.
function modelFor(key, state) {
  const ready = (state?.models ?? []).filter((one) => one.ready).map((one) => one.name);
  const served = [...(state?.pools ?? []).map((pool) => pool.id), ...ready];
  const allowed = key.allowed.models;
  const fits = (name) => allowed.some((one) => (one.endsWith("*") ? name.startsWith(one.slice(0, -1)) : name === one));
  const found = allowed.length ? served.find(fits) ?? allowed.find((one) => !one.endsWith("*")) : served[0];
  return found ?? "MODEL";
}

// The text of a key, which no other answer shows. `toWrite`: limit that the config file does not have.
function shown({ secret, key }, state, toWrite) {
  const body = JSON.stringify({ model: modelFor(key, state), messages: [{ role: "user", content: "Hello" }] });
  const command = `curl ${base(state)}/v1/chat/completions -H 'authorization: Bearer ${secret}' \\\n`
    + `  -H 'content-type: application/json' -d '${body.replaceAll("'", "'\\''")}'`;
  const lines = toWrite && `[[limits]]\n${Object.entries(toWrite).map(([name, value]) => `${name} = ${JSON.stringify(value)}`).join("\n")}`;
  return dialog(`Key ${key.name}`, (close) => [
    h("p", { class: "note" }, "This is the only time that the text is shown. The gateway keeps a digest of it."),
    h("div", { class: "secret" }, h("code", { id: "secret", tabindex: "0" }, secret), button("Copy the key", () => copy(secret), "primary")),
    lines ? [h("h3", null, "For the config file"), h("pre", { tabindex: "0", role: "region", "aria-label": "For the config file" }, lines),
      h("p", { class: "note" },
        "The gateway does not write its file. Without these lines, requests of the key are refused after a restart or a change of the file.")] : null,
    h("h3", null, "A first request"), h("pre", { tabindex: "0", role: "region", "aria-label": "A first request" }, command),
    h("footer", null, button("Copy the command", () => copy(command)), button("Done", () => close(true))),
  ].flat().filter(Boolean), "large");
}

// Counter in which the requests of a key are counted, by what its limit counts by; the others count by what is asked for.
const SUBJECTS = { key: (key) => key.id, team: (key) => key.team ?? key.id, user: (key) => key.user ?? key.id, all: () => "all" };
// Counters that are told of a limit with several.
const COUNTERS_SHOWN = 4;

// What is left of a limit that a key is under.
async function leftOf(key, id) {
  try {
    const limit = await get(`/limits/${part(id)}`);
    if (limit.by === "address") return `${id}: counted by address of the client`;
    const subject = SUBJECTS[limit.by]?.(key);
    // In the order of subjects: those of this one are behind its bare name.
    const { data } = await get(`/limits/${part(id)}/counters`, { limit: 1000, after: subject });
    const own = subject ? data.filter((one) => one.subject === subject) : data.slice(0, COUNTERS_SHOWN);
    const words = own.map((one) => {
      const show = one.measure.startsWith("usd") ? usd : short;
      const left = `${show(one.remaining)} of ${show(one.max)} ${one.measure.replace(/^usd_/, "").replaceAll("_", " ")} left`;
      return subject ? left : `${one.subject} ${left}`;
    });
    if (!subject && data.length > own.length) words.push("…");
    return `${id}: ${words.join(", ") || "unused"}${limit.by === "key" ? "" : ` (counted by ${limit.by})`}`;
  } catch (error) {
    return `${id}: ${error.status === 404 ? "not in this gateway's config, so requests of the key are refused" : error.message}`;
  }
}

async function details(key, state) {
  const [last, left] = await Promise.all([
    get("/usage/requests", { key: key.id, limit: 1 }).catch(() => ({ data: [] })), Promise.all(key.limits.map((id) => leftOf(key, id))),
  ]);
  return dialog(key.name, (close) => {
    const rows = [
      ["Id", h("code", null, key.id)], ["State", chip(WORDS[key.state] ?? key.state, STATES[key.state])], ["Ends with", h("code", null, `…${key.ends_with}`)],
      ["Team", key.team ?? "–"], ["User", key.user ?? "–"], ["Parent", key.parent ?? "–"], ["Models", key.allowed.models.join(", ") || "all"],
      ["Routes", key.allowed.routes.join(", ") || "all"], ["Dialects", key.allowed.dialects.join(", ") || "all"],
      ["Addresses", key.allowed.addresses.join(", ") || "all"], ["Limits", left.join("; ") || "none"], ["Tags", key.tags.join(", ") || "none"],
      ["Created", stamp(key.created)], ["Rotated", stamp(key.rotated)], ["Old text valid until", stamp(key.previous_until)], ["Expires", stamp(key.expires)],
      ["Revoked", stamp(key.revoked)], ["Last used", last.data.length ? stamp(last.data[0].at) : "not in the last 30 days"],
    ].filter(([name, value]) => value !== "–" || ["Team", "User"].includes(name));
    const alive = !key.revoked;
    const act = async (work, words) => {
      try {
        await work();
        if (words) toast(words);
      } catch (error) {
        toast(error.message, "bad");
      }
    };
    const rotate = async () => {
      close(true);
      if (!(await confirmed(`Rotate ${key.name}?`, "The key gets a new text, shown once. The old text stays valid for an hour.", "Rotate", "primary"))) return;
      await act(async () => shown(await post(`/keys/${part(key.id)}/rotate`, { grace_seconds: 3600 }), state));
    };
    const revoke = async () => {
      if (!(await confirmed(`Revoke ${key.name}?`, "Requests with this key, and with keys made from it, are refused within a second. This cannot be undone.",
        "Revoke"))) return;
      await act(() => post(`/keys/${part(key.id)}/revoke`), "The key is revoked.");
      close(true);
    };
    const change = async () => {
      close(await edit(key, state));
    };
    return [
      h("dl", { class: "facts wide" }, rows.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))),
      h("footer", null, may("operator") && alive ? button("Revoke", revoke, "danger") : null,
        may("owner") && alive ? [button("Rotate", rotate), button("Change", change, "primary")] : null),
    ];
  });
}
