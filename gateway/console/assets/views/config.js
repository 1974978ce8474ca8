// The config in force: read, check, compare, apply, roll back.

import { call, get, may, part, post } from "../api.js";
import { button, chip, confirmed, dialog, field, h, number, problem, stamp, table, toast, whole } from "../dom.js";

export const title = "Config";

export function show(root) {
  const owns = may("owner");
  const about = h("p", { class: "note" });
  const editor = h("textarea", { class: "code", id: "config", rows: "28", spellcheck: "false", wrap: "off", readonly: !owns, autocomplete: "off" });
  const note = h("input", { type: "text", maxlength: "1000" });
  const result = h("div", { "aria-live": "polite" });
  const past = h("div");
  let inForce = { text: "", version: 0 };

  const check = button("Check", () => verify(), "primary");
  const apply = button("Apply …", () => put());
  const revert = button("Discard changes", () => { editor.value = inForce.text; changed(); result.replaceChildren(); });
  const reread = button("Reload the file …", () => reload());
  const acts = may("operator") ? h("div", { class: "acts" }, owns ? [check, apply, revert] : null, reread) : null;
  root.append(h("header", { class: "head" }, h("h1", null, title)), about,
    h("section", { class: "panel" }, h("label", { for: "config", class: "title" }, "Config as TOML"), editor, acts, result),
    h("section", { class: "panel" }, h("h2", null, "History"), past));

  function changed() {
    const same = editor.value === inForce.text;
    for (const one of [check, apply, revert]) one.disabled = same;
  }
  editor.addEventListener("input", changed);

  async function load() {
    try {
      inForce = await get("/config");
      editor.value = inForce.text;
      changed();
      const where = inForce.path ? `from ${inForce.path}` : "from defaults and the command line";
      const other = inForce.writes ? "the file has another text." : "server.config_writes is off.";
      const kept = inForce.persisted ? "A restart loads it." : `A restart does not load it: ${other}`;
      reread.disabled = !inForce.path;
      const later = inForce.pending.length ? ` Waiting for a restart: ${inForce.pending.join(", ")}.` : "";
      about.textContent = `Version ${inForce.version}, ${where}. ${kept}${later} Secrets read "[hidden]" and stay what they are.`;
    } catch (error) {
      result.replaceChildren(problem(error));
    }
    await history();
  }

  async function verify() {
    try {
      const verdict = await post("/config/validate", { text: editor.value });
      const state = verdict.valid ? chip("The config is valid", "good") : chip(`${verdict.faults.length} fault${verdict.faults.length > 1 ? "s" : ""}`, "bad");
      const faults = verdict.faults.length ? h("ul", { class: "faults" }, verdict.faults.map((fault) => h("li", null, fault))) : null;
      result.replaceChildren(h("p", null, state), faults ?? changes(verdict.changes), difference(inForce.text, editor.value, "Lines that change"));
      return verdict.valid;
    } catch (error) {
      result.replaceChildren(problem(error));
      return false;
    }
  }

  async function put() {
    if (!(await verify())) return;
    const sure = await dialog("Apply this config?", (close) => h("form", { on: { submit: (event) => { event.preventDefault(); close(true); } } },
      h("p", null, "It comes into force whole or not at all. Running streams go on."), field("Note for the history", note),
      h("footer", null, button("Back", () => close(false)), h("button", { type: "submit", class: "button primary" }, "Apply"))), "narrow");
    if (!sure) return;
    try {
      const done = await call("PUT", "/config", { text: editor.value, note: note.value }, { "if-match": inForce.tag });
      note.value = "";
      result.replaceChildren(h("p", null, chip(`Version ${done.version} is in force`, "good")), changes(done.changes));
      await load();
    } catch (error) {
      result.replaceChildren(problem(error));
    }
  }

  async function reload() {
    const text = "The text of the config file comes into force in place of the one above, if it is valid. Running streams go on.";
    if (!(await confirmed("Reload the config file?", text, "Reload", "primary"))) return;
    try {
      const done = await post("/config/reload", {});
      const edited = editor.value;
      const kept = edited !== inForce.text;
      await load();
      result.replaceChildren(h("p", null, chip(`Version ${done.version} is in force`, "good")), changes(done.changes));
      if (!kept) return;
      // What was typed and not applied stays, with what it would change of the file's text.
      editor.value = edited;
      changed();
      const about = h("p", null, "What you typed is kept. Applied as it is, it would change the file's text:");
      result.append(about, difference(inForce.text, edited, "Lines that change"));
    } catch (error) {
      result.replaceChildren(problem(error));
    }
  }

  async function history() {
    try {
      const page = await get("/config/history");
      const heads = ["Version", "Time", "By", "Note", "Outcome", "Bytes", "Compare"].map((name) => ({ name, number: ["Version", "Bytes"].includes(name) }));
      heads[6].hidden = true;
      const rows = page.data.map((one) => {
        const now = one.version === inForce.version;
        const compare = button("Compare", () => look(one), "small", { "aria-label": `Compare version ${one.version}` });
        const back = owns && !now && one.outcome === "applied"
          ? button("Roll back", () => roll(one), "small", { "aria-label": `Roll back to version ${one.version}` }) : null;
        return h("tr", null, h("th", { scope: "row", class: "number" }, whole(one.version)), h("td", null, stamp(one.at)), h("td", null, one.actor),
          h("td", null, one.note || "–"), h("td", null, now ? chip("in force", "good") : chip(one.outcome, one.outcome === "refused" ? "bad" : "")),
          number(whole(one.bytes)), h("td", null, h("div", { class: "acts" }, now ? null : compare, back)));
      });
      past.replaceChildren(table("Configs that were applied or refused", heads, rows));
    } catch (error) {
      past.replaceChildren(problem(error));
    }
  }

  async function look(one) {
    try {
      const old = await get(`/config/history/${part(one.version)}`);
      await dialog(`From version ${one.version} to the one in force`, () => difference(old.text, inForce.text, "Lines that differ"), "large");
    } catch (error) {
      toast(error.message, "bad");
    }
  }

  async function roll(one) {
    const text = "Its text is applied again, as a new version. Running streams go on.";
    if (!(await confirmed(`Roll back to version ${one.version}?`, text, "Roll back", "primary"))) return;
    try {
      const back = { version: one.version, note: `back to version ${one.version}` };
      const done = await call("POST", "/config/rollback", back, { "if-match": inForce.tag });
      toast(`Version ${done.version} is in force.`);
      await load();
    } catch (error) {
      toast(error.message, "bad");
    }
  }
  load();
}

function changes(list) {
  if (!list.length) return h("p", { class: "hint" }, "Nothing changes.");
  const rows = list.map((one) => h("tr", null, h("th", { scope: "row", class: "mono" }, one.path), h("td", { class: "mono" }, one.before ?? "–"),
    h("td", { class: "mono" }, one.after ?? "–"), h("td", null, one.when)));
  return table("Changes", ["Key", "Before", "After", "In force"].map((name) => ({ name })), rows);
}

// Lines of two texts side by side in time: kept, gone, new. Texts without anything in common beyond these bounds are shown as replaced.
const CELLS_MAX = 4_000_000;
function difference(before, after, label) {
  const [old, fresh] = [before.split("\n"), after.split("\n")];
  let head = 0;
  while (head < old.length && head < fresh.length && old[head] === fresh[head]) head += 1;
  let tail = 0;
  while (tail < old.length - head && tail < fresh.length - head && old.at(-1 - tail) === fresh.at(-1 - tail)) tail += 1;
  const [a, b] = [old.slice(head, old.length - tail), fresh.slice(head, fresh.length - tail)];
  const marked = a.length * b.length <= CELLS_MAX ? compared(a, b) : [...a.map((line) => ["-", line]), ...b.map((line) => ["+", line])];
  if (!marked.some(([sign]) => sign !== " ")) return h("p", { class: "hint" }, "No line differs.");
  const around = 3;
  const lines = [
    ...old.slice(Math.max(0, head - around), head).map((line) => [" ", line]), ...marked,
    ...old.slice(old.length - tail, old.length - tail + around).map((line) => [" ", line]),
  ];
  const shown = lines.map(([sign, line]) => h("span", { class: sign === "+" ? "new" : sign === "-" ? "gone" : "" }, `${sign} ${line}\n`));
  return h("pre", { class: "diff", tabindex: "0", role: "region", "aria-label": label }, shown);
}

// Longest common subsequence of lines.
function compared(a, b) {
  const wide = b.length + 1;
  const lengths = new Uint32Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i * wide + j] = a[i] === b[j] ? lengths[(i + 1) * wide + j + 1] + 1 : Math.max(lengths[(i + 1) * wide + j], lengths[i * wide + j + 1]);
    }
  }
  const out = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      out.push([" ", a[i]]);
      i += 1;
      j += 1;
    } else if (i < a.length && (j >= b.length || lengths[(i + 1) * wide + j] >= lengths[i * wide + j + 1])) {
      out.push(["-", a[i]]);
      i += 1;
    } else {
      out.push(["+", b[j]]);
      j += 1;
    }
  }
  return out;
}
