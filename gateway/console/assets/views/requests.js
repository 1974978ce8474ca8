// Requests in flight, with a way to stop each, and those that have ended.

import { get, may, part, post } from "../api.js";
import { button, chip, confirmed, field, h, keyed, mark, number, problem, say, seconds, short, stamp, table, toast, usd, whole } from "../dom.js";

export const title = "Requests";
const PAGE = 50;

export function show(root, store) {
  // Names of keys by their ids, for people.
  const names = new Map();
  const named = get("/keys", { limit: 1000 }).then((page) => page.data.forEach((one) => names.set(one.id, one.name))).catch(() => {});
  root.append(h("header", { class: "head" }, h("h1", null, title)));

  // In flight.
  const count = h("span", { class: "count" });
  const cancels = may("operator");
  const columns = ["Model", "Key", "Route", "Age", "Prompt", "Output", "Target", "Client"];
  const heads = columns.map((name) => ({ name, number: ["Age", "Prompt", "Output"].includes(name) }));
  if (cancels) heads.push({ name: "Cancel", hidden: true });
  const listed = table("Requests in flight", heads, []);
  const body = listed.querySelector("tbody");
  body.replaceChildren();
  const none = h("p", { class: "empty" }, "Nothing is in flight.");
  const draw = keyed(body, (one) => row(one, cancels, names));
  root.append(h("section", { class: "panel" }, h("h2", null, "In flight ", count), listed, none));
  const update = ({ state }) => {
    if (!state) return;
    say(count, whole(state.requests_in_flight));
    draw(state.requests, (one) => one.id);
    mark(none, "hidden", state.requests.length > 0);
    mark(listed, "hidden", state.requests.length === 0);
  };
  store.listeners.add(update);
  update(store);

  // Ended.
  const model = h("input", { type: "text", maxlength: "256", spellcheck: "false" });
  const key = h("input", { type: "text", maxlength: "256", spellcheck: "false" });
  const out = h("div", { "aria-live": "polite" });
  const trail = [];
  let asked = 0;
  async function load(after) {
    asked += 1;
    const mine = asked;
    try {
      const page = await get("/usage/requests", { limit: PAGE, after, model: model.value.trim(), key: key.value.trim() });
      await named;
      if (mine !== asked) return;
      const rows = page.data.map((one) => h("tr", null,
        h("td", null, stamp(one.at)), h("th", { scope: "row", class: "mono cut", title: one.model }, one.model || "–"),
        h("td", { class: "cut", title: one.key }, names.get(one.key) ?? (one.key || "–")),
        h("td", { class: "cut" }, one.provider || "own pool"),
        h("td", null, one.status >= 200 && one.status < 300 ? chip(one.status, "good") : chip(one.status || "none", "bad")),
        number(whole(one.input_tokens)), number(whole(one.input_cached_tokens)),
        number(whole(one.output_tokens)),
        number(one.first_ms ? seconds(one.first_ms / 1000) : "–"), number(seconds(one.total_ms / 1000)), number(usd(one.usd)),
        h("td", { class: "mono faint cut", title: one.request_id }, one.request_id)));
      const titles = ["Time", "Model", "Key", "Provider", "Status", "Prompt", "Cached", "Output", "First token", "Total", "Cost", "Request id"]
        .map((name) => ({ name, number: ["Prompt", "Cached", "Output", "First token", "Total", "Cost"].includes(name) }));
      const older = button("Older", () => { trail.push(after); load(page.next); }, "", { disabled: !page.next });
      const newer = button("Newer", () => load(trail.pop()), "", { disabled: trail.length === 0 });
      out.replaceChildren(table("Requests that have ended", titles, rows, "No request has ended in the last 30 days."),
        h("div", { class: "pager" }, newer, older));
    } catch (error) {
      out.replaceChildren(problem(error));
    }
  }
  const again = (event) => {
    event?.preventDefault();
    trail.length = 0;
    load();
  };
  const form = h("form", { class: "filters", on: { submit: again } }, field("Model", model), field("Key id", key),
    h("button", { type: "submit", class: "button" }, "Show"));
  root.append(h("section", { class: "panel" }, h("h2", null, "Ended"), form, out));
  load();
  return () => store.listeners.delete(update);
}

function row(request, cancels, names) {
  const cells = Object.fromEntries(["model", "key", "route", "age", "prompt", "output", "target", "client"].map((name) => [name, h("td")]));
  for (const name of ["age", "prompt", "output"]) cells[name].className = "number";
  for (const name of ["model", "target"]) cells[name].className = "mono cut";
  cells.key.className = "cut";
  const cancel = async () => {
    if (!(await confirmed("Cancel this request?", "Its client gets an error, and its compute is free at once.", "Cancel the request"))) return;
    try {
      await post(`/requests/${part(request.id)}/cancel`);
      toast("The request is cancelled.");
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  const act = cancels ? h("td", null, button("Cancel", cancel, "small", { "aria-label": `Cancel request ${request.id}` })) : null;
  return {
    node: h("tr", null, Object.values(cells), act),
    update(now) {
      say(cells.model, now.model ?? "–");
      say(cells.key, names.get(now.key) ?? now.key ?? (now.background ? "background" : "–"));
      say(cells.route, now.route);
      say(cells.age, seconds(now.age_ms / 1000));
      say(cells.prompt, now.prompt_tokens ? short(now.prompt_tokens) : "–");
      say(cells.output, now.answering ? short(now.completion_tokens) : "waits");
      say(cells.target, now.target ?? "–");
      say(cells.client, now.client ?? "–");
    },
  };
}
