// Batches and files of all keys: states, counts and sizes, never contents. A batch can be cancelled, a file deleted, as far as the role goes.

import { call, get, may, part, post } from "../api.js";
import { button, chip, confirmed, day, field, h, number, percent, problem, size, stamp, table, toast, whole } from "../dom.js";

export const title = "Batches";

const PAGE = 50;
const TONES = {
  completed: "good", failed: "bad", expired: "bad", cancelled: "", validating: "wait", in_progress: "wait", finalizing: "wait", cancelling: "wait",
};

export function show(root) {
  const names = new Map();
  const named = get("/keys", { limit: 1000 }).then((page) => page.data.forEach((one) => names.set(one.id, one.name))).catch(() => {});
  const key = (id) => h("td", { class: "cut", title: id }, names.get(id) ?? (id || "–"));
  const open = h("input", { type: "checkbox", id: "open" });
  const only = h("div", { class: "check" }, open, h("label", { for: "open" }, "Not ended"));
  root.append(h("header", { class: "head" }, h("h1", null, title)),
    list("Batches", "/batches", named, [only], () => ({ open: open.checked || null }), (page, again) => batches(page, key, again)),
    list("Files", "/files", named, [], () => ({}), (page, again) => files(page, key, again)));
}

// A list that is read page by page, with a filter by key.
function list(name, path, named, more, filter, draw) {
  const key = h("input", { type: "text", maxlength: "512", spellcheck: "false", autocomplete: "off" });
  const out = h("div", { "aria-live": "polite" });
  const trail = [];
  let asked = 0;
  async function load(after) {
    asked += 1;
    const mine = asked;
    try {
      const page = await get(path, { limit: PAGE, after, key: key.value.trim(), ...filter() });
      await named;
      if (mine !== asked) return;
      const older = button("Older", () => { trail.push(after); load(page.next); }, "", { disabled: !page.next, "aria-label": `Older ${name}` });
      const newer = button("Newer", () => load(trail.pop()), "", { disabled: trail.length === 0, "aria-label": `Newer ${name}` });
      out.replaceChildren(draw(page.data, () => load(after)), h("div", { class: "pager" }, newer, older));
    } catch (error) {
      if (mine === asked) out.replaceChildren(problem(error));
    }
  }
  const again = (event) => {
    event?.preventDefault();
    trail.length = 0;
    load();
  };
  const form = h("form", { class: "filters", "aria-label": `Which ${name}`, on: { submit: again } }, field("Key id", key), more,
    h("button", { type: "submit", class: "button" }, "Show"));
  load();
  return h("section", { class: "panel" }, h("h2", null, name), form, out);
}

const heads = (names, numbers) => names.map((name) => ({ name, number: numbers.includes(name), hidden: name === "Actions" }));

// Asks, acts, and tells what came of it.
async function act(question, why, word, does, done, again) {
  if (!(await confirmed(question, why, word))) return;
  try {
    await does();
    toast(done);
  } catch (error) {
    toast(error.message, "bad");
  }
  again();
}

function batches(items, key, again) {
  const cancels = may("operator");
  const cancel = (one) => act("Cancel this batch?", "Requests in progress are stopped; the results so far stay with its key.", "Cancel the batch",
    () => post(`/batches/${part(one.id)}/cancel`), "The batch is being cancelled.", again);
  const rows = items.map((one) => h("tr", null, h("th", { scope: "row", class: "mono cut", title: one.id }, one.id), key(one.key),
    h("td", null, chip(one.status.replaceAll("_", " "), TONES[one.status])), h("td", { class: "mono" }, one.endpoint),
    number(`${whole(one.requests_completed)} of ${whole(one.requests)}`, { title: percent(one.requests_completed, one.requests) }),
    number(whole(one.requests_failed)), number(one.input_bytes === null ? "deleted" : size(one.input_bytes)), number(size(one.output_bytes)),
    h("td", null, stamp(one.created_at)),
    h("td", null, stamp(one.ended_at ?? one.expires_at), one.ended_at ? null : h("span", { class: "faint" }, " at the latest")),
    cancels ? h("td", null, one.cancellable ? button("Cancel", () => cancel(one), "small", { "aria-label": `Cancel batch ${one.id}` }) : null) : null));
  const names = ["Id", "Key", "State", "Endpoint", "Answered", "Failed", "Input", "Results", "Created", "Ends", ...(cancels ? ["Actions"] : [])];
  return table("Batches", heads(names, ["Answered", "Failed", "Input", "Results"]), rows, "There is no batch.");
}

function files(items, key, again) {
  const deletes = may("owner");
  const why = (one) => `${one.name || one.id}, ${size(one.bytes)}. Its content is gone for good, for its key too.`;
  const remove = (one) => act("Delete this file?", why(one), "Delete the file",
    () => call("DELETE", `/files/${part(one.id)}`), "The file is deleted.", again);
  const rows = items.map((one) => h("tr", null, h("th", { scope: "row", class: "cut", title: one.name }, one.name || "–"),
    h("td", { class: "mono cut", title: one.id }, one.id), key(one.key), h("td", null, one.purpose), number(size(one.bytes)),
    h("td", null, stamp(one.created_at)), h("td", null, one.expires_at ? day(one.expires_at) : "kept"),
    deletes ? h("td", null, one.in_use ? h("span", { class: "faint" }, "in use")
      : button("Delete", () => remove(one), "small", { "aria-label": `Delete file ${one.name || one.id}` })) : null));
  const names = ["Name", "Id", "Key", "Purpose", "Size", "Created", "Expires", ...(deletes ? ["Actions"] : [])];
  return table("Files", heads(names, ["Size"]), rows, "There is no file.");
}
