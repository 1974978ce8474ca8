// API keys: issued, shown once, changed, rotated, revoked.

import { call, get, may, part, post } from "../api.js";
import { button, chip, confirmed, copy, day, dialog, field, h, number, problem, select, short, stamp, table, toast, usd } from "../dom.js";

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
      const [page, spent] = await Promise.all([
        get("/keys", { limit: PAGE, after, revoked: revoked.checked ? undefined : "false" }),
        get("/usage", { group: "key", limit: 1000 }),
      ]);
      const use = new Map(spent.data.map((sum) => [sum.groups.key, sum]));
      const heads = ["Name", "State", "Ends with", "Team", "Models", "Limits", "Expires", "Requests, 30 d", "Cost, 30 d", "Details"]
        .map((name, at) => ({ name, number: at === 7 || at === 8, hidden: at === 9 }));
      const rows = page.data.map((key) => {
        const used = use.get(key.id);
        const more = button("Details", () => details(key, store.state).then((done) => done && load()), "small", { "aria-label": `Details of ${key.name}` });
        return h("tr", null,
          h("th", { scope: "row" }, key.name), h("td", null, chip(WORDS[key.state] ?? key.state, STATES[key.state])),
          h("td", { class: "mono" }, `…${key.ends_with}`), h("td", null, key.team ?? "–"),
          h("td", null, key.allowed.models.join(", ") || "all"), h("td", null, key.limits.join(", ") || "none"),
          h("td", null, key.expires ? day(key.expires) : "never"), number(short(used?.requests ?? 0)), number(usd(used?.usd ?? 0)),
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

const words = (input) => input.value.split(/[,\n]/).map((word) => word.trim()).filter(Boolean);

// Form of a key: a new one, or one that is changed.
async function edit(key, state) {
  const [limits, teams] = await Promise.all([get("/limits", { limit: 1000 }), get("/teams", { limit: 1000 })]).catch((error) => {
    toast(error.message, "bad");
    return [{ data: [] }, { data: [] }];
  });
  return dialog(key ? `Change ${key.name}` : "Issue a key", (close) => {
    const name = h("input", { type: "text", maxlength: "256", value: key?.name ?? "", autofocus: true });
    const team = select([["", "none"], ...teams.data.map((one) => [one.id, one.name]),
      ...(key?.team && !teams.data.some((one) => one.id === key.team) ? [[key.team, key.team]] : [])], key?.team ?? "");
    const models = h("input", { type: "text", value: key?.allowed.models.join(", ") ?? "", spellcheck: "false", placeholder: "all" });
    const tags = h("input", { type: "text", value: key?.tags.join(", ") ?? "", spellcheck: "false", placeholder: "none" });
    const expires = h("input", { type: "date", value: key?.expires ? day(key.expires) : "" });
    const boxes = limits.data.map((limit) => {
      const box = h("input", { type: "checkbox", id: `limit-${limit.id}`, value: limit.id, checked: key?.limits.includes(limit.id) });
      const about = limit.measures.map((one) => `${one.measure.replaceAll("_", " ")} ${short(one.max)}`).join(", ");
      return { box, node: h("div", { class: "check" }, box, h("label", { for: box.id }, limit.id, h("span", { class: "hint" }, about))) };
    });
    const amount = h("input", { type: "text", inputmode: "decimal", autocomplete: "off", placeholder: "none" });
    const measure = select(BUDGETS, BUDGETS[0][0]);
    const fault = h("div", { "aria-live": "assertive" });
    const act = async (event) => {
      event.preventDefault();
      const end = expires.value ? Math.floor(new Date(`${expires.value}T00:00:00`).getTime() / 1000) : null;
      const allowed = { ...(key?.allowed ?? {}), models: words(models) };
      const wish = { name: name.value.trim(), allowed, limits: boxes.filter((one) => one.box.checked).map((one) => one.box.value), tags: words(tags) };
      try {
        if (key) {
          const change = { ...wish, team: team.value || null, expires: end, expected_version: key.version };
          await call("PATCH", `/keys/${part(key.id)}`, change);
          toast("The key is changed.");
          close(true);
        } else {
          if (amount.value.trim()) wish.limits.push(await budgeted(wish.name, measure.value, amount.value.trim()));
          const made = await post("/keys", { ...wish, team: team.value || null, expires: end });
          close(true);
          await shown(made, state);
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
        h("p", { class: "hint" }, "Adds a limit for this key to the config. Empty: none.")),
      field("Tags", tags, "Usage can be summed by tag."), field("Expires", expires, "The key is refused from the begin of that day. Empty: never."), fault,
      h("footer", null, button("Back", () => close(false)), h("button", { type: "submit", class: "button primary" }, key ? "Change" : "Issue")));
  });
}

// Adds a limit for a new key to the config; returns its id.
async function budgeted(name, measure, amount) {
  const number = Number(amount.replaceAll("_", ""));
  if (!(number > 0) || (!measure.startsWith("usd") && !Number.isInteger(number))) throw new Error(`Budget: ${amount} is no such amount.`);
  const config = await get("/config");
  const word = name.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "").slice(0, 40);
  const id = `budget-${word ? `${word}-` : ""}${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
  const text = `${config.text.trimEnd()}\n\n[[limits]]\nid = "${id}"\n${measure} = ${number}\n`;
  await call("PUT", "/config", { text, note: `budget of a new key: ${id}` }, { "if-match": config.tag });
  return id;
}

// The text of a key, which no other answer shows.
function shown({ secret, key }, state) {
  const base = state ? `${state.tls ? "https" : "http"}://${state.listen}/v1` : "$URL/v1";
  const model = state?.pools[0]?.id ?? state?.models.find((one) => one.ready)?.name ?? "MODEL";
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] });
  const command = `curl ${base}/chat/completions -H 'authorization: Bearer ${secret}' \\\n  -H 'content-type: application/json' -d '${body}'`;
  return dialog(`Key ${key.name}`, (close) => [
    h("p", { class: "note" }, "This is the only time that the text is shown. The gateway keeps a digest of it."),
    h("div", { class: "secret" }, h("code", { id: "secret", tabindex: "0" }, secret), button("Copy the key", () => copy(secret), "primary")),
    h("h3", null, "A first request"), h("pre", { tabindex: "0", role: "region", "aria-label": "A first request" }, command),
    h("footer", null, button("Copy the command", () => copy(command)), button("Done", () => close(true))),
  ], "large");
}

async function details(key, state) {
  const none = { data: [] };
  const [last, ...counted] = await Promise.all([
    get("/usage/requests", { key: key.id, limit: 1 }).catch(() => none),
    ...key.limits.map((limit) => get(`/limits/${part(limit)}/counters`, { limit: 1000 }).catch(() => none)),
  ]);
  const left = key.limits.map((limit, at) => {
    const own = counted[at].data.filter((one) => one.subject === key.id);
    const words = own.map((one) => {
      const show = one.measure.startsWith("usd") ? usd : short;
      return `${show(one.remaining)} of ${show(one.max)} ${one.measure.replace(/^usd_/, "").replaceAll("_", " ")} left`;
    });
    return words.length ? `${limit}: ${words.join(", ")}` : `${limit}: unused`;
  });
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
