// The audit log: what was done or refused, by whom, from where.

import { get } from "../api.js";
import { button, chip, field, h, problem, select, stamp, table } from "../dom.js";

export const title = "Audit";
export const role = "owner";
const TONES = { done: "good", denied: "bad", failed: "wait" };

export function show(root) {
  const actor = h("input", { type: "text", maxlength: "256", spellcheck: "false" });
  const action = h("input", { type: "text", maxlength: "256", spellcheck: "false", placeholder: "key.*" });
  const outcome = select([["", "any"], ["done", "done"], ["denied", "denied"], ["failed", "failed"]], "");
  const out = h("div", { "aria-live": "polite" });
  const trail = [];

  async function load(after) {
    try {
      const page = await get("/audit", { limit: 50, after, actor: actor.value.trim(), action: action.value.trim(), outcome: outcome.value });
      const rows = page.data.map((event) => {
        const text = JSON.stringify(event.detail, null, 2);
        const detail = h("details", null, h("summary", null, "Detail", h("span", { class: "unseen" }, ` of ${event.action} at ${stamp(event.at)}`)),
          h("pre", { tabindex: "0", role: "region", "aria-label": "Detail" }, text));
        return h("tr", null, h("td", null, stamp(event.at)), h("th", { scope: "row", class: "mono" }, event.action), h("td", null, event.actor || "unknown"),
          h("td", { class: "mono" }, event.address || "socket"), h("td", { class: "mono" }, event.target || "–"),
          h("td", null, chip(event.outcome, TONES[event.outcome])), h("td", null, detail));
      });
      const heads = ["Time", "Action", "Admin key", "Address", "Object", "Outcome", "Detail"].map((name) => ({ name }));
      const older = button("Older", () => { trail.push(after); load(page.next); }, "", { disabled: !page.next });
      const newer = button("Newer", () => load(trail.pop()), "", { disabled: trail.length === 0 });
      out.replaceChildren(table("Audit log", heads, rows, "No such event."), h("div", { class: "pager" }, newer, older));
    } catch (error) {
      out.replaceChildren(problem(error));
    }
  }
  const again = (event) => {
    event?.preventDefault();
    trail.length = 0;
    load();
  };
  root.append(h("header", { class: "head" }, h("h1", null, title)),
    h("section", { class: "panel" }, h("form", { class: "filters", on: { submit: again } }, field("Admin key", actor), field("Action", action),
      field("Outcome", outcome), h("button", { type: "submit", class: "button" }, "Show")), out));
  load();
}
