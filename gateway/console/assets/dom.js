// Elements and texts. Whatever comes from outside becomes a text node or an attribute's value; there is no way here to write markup.

const SVG = "http://www.w3.org/2000/svg";
// Attributes that could run text or load something are not for values from outside: only these are ever set.
const ATTRIBUTES = new Set([
  "class", "id", "for", "type", "name", "value", "href", "role", "title", "placeholder", "rows", "cols", "min", "max", "step", "maxlength",
  "autocomplete", "spellcheck", "wrap", "tabindex", "scope", "colspan", "hidden", "disabled", "checked", "selected", "readonly", "required",
  "open", "method", "lang", "download", "viewBox", "preserveAspectRatio", "d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx",
  "width", "height", "fill", "stroke", "stroke-width", "stroke-linecap", "vector-effect", "text-anchor", "points", "focusable", "inputmode",
  "autofocus", "datetime",
]);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    } else if (ATTRIBUTES.has(name) || name.startsWith("aria-") || name.startsWith("data-")) {
      node.setAttribute(name, value === true ? "" : String(value));
    } else {
      throw new Error(`attribute ${name}`);
    }
  }
  node.append(...children.flat(4).filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Writes a text only where it is another one, so that nothing is laid out again and no selection is lost.
export function say(node, text) {
  const wanted = text === undefined || text === null ? "" : String(text);
  const only = node.firstChild;
  if (only && only === node.lastChild && only.nodeType === Node.TEXT_NODE) {
    if (only.data !== wanted) only.data = wanted;
  } else if (only || wanted) {
    node.textContent = wanted;
  }
  return node;
}

export function mark(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

// Children of `parent`, one per item, kept by key: `make(item)` gives { node, update(item) }.
export function keyed(parent, make) {
  const kept = new Map();
  return (items, keyOf) => {
    const seen = new Set();
    let before = null;
    for (const item of items) {
      let key = keyOf(item);
      while (seen.has(key)) key += "'";
      seen.add(key);
      let entry = kept.get(key);
      if (!entry) {
        entry = make(item);
        kept.set(key, entry);
      }
      entry.update?.(item);
      const place = before ? before.nextSibling : parent.firstChild;
      if (place !== entry.node) parent.insertBefore(entry.node, place);
      before = entry.node;
    }
    for (const [key, entry] of kept) {
      if (!seen.has(key)) {
        entry.node.remove();
        kept.delete(key);
      }
    }
  };
}

// --- numbers and times ---

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
export const whole = (value) => WHOLE.format(value ?? 0);
export const short = (value) => (Math.abs(value ?? 0) < 10_000 ? WHOLE.format(value ?? 0) : SHORT.format(value));
export const percent = (part, of) => (of > 0 ? `${((100 * part) / of).toFixed(part === of ? 0 : 1)} %` : "–");

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let [value, at] = [bytes ?? 0, 0];
  for (; value >= 1024 && at < units.length - 1; at += 1) value /= 1024;
  return `${at === 0 || value >= 100 ? whole(value) : value.toFixed(1)} ${units[at]}`;
}

export function usd(value) {
  const size = Math.abs(value ?? 0);
  if (size === 0) return "$0";
  return `$${value.toFixed(size < 0.01 ? 6 : size < 1 ? 4 : 2)}`;
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 86_400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86_400)} d ${Math.floor((value % 86_400) / 3600)} h`;
}

const two = (value) => String(value).padStart(2, "0");
export function stamp(unix) {
  if (!unix) return "–";
  const at = new Date(unix * 1000);
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}
export const day = (unix) => stamp(unix).slice(0, 10);

// --- parts that views share ---

export function icon(name) {
  const paths = {
    live: "M3 12h4l3-7 4 14 3-7h4",
    requests: "M4 6h16M4 12h16M4 18h10",
    playground: "M4 5h16v11H9l-5 4V5Zm4 4h8m-8 3h5",
    decisions: "M5 4v6a4 4 0 0 0 4 4h10m-4-4 4 4-4 4M5 20v-6",
    keys: "M14.5 9.5a4 4 0 1 1-1.6-3.2 4 4 0 0 1 1.6 3.2Zm-.6 2.2L21 18v3h-3l-1-2-2-.5-.5-2-2-1.4",
    usage: "M4 20V10m6 10V4m6 16v-7m4 7H2",
    models: "M12 3 4 7.5v9L12 21l8-4.5v-9L12 3Zm0 9 8-4.5M12 12v9m0-9L4 7.5",
    plugins: "M9 3v5m6-5v5M6 8h12v4a6 6 0 0 1-12 0V8Zm6 10v3",
    batches: "M4 8h16M4 8v11h16V8M4 8l2-4h12l2 4m-11 4h6",
    config: "M4 7h9m4 0h3M4 17h3m4 0h9M15 4.5v5M9 14.5v5",
    audit: "M7 3h8l4 4v14H7V3Zm3 8h6m-6 4h6m-6 4h3",
    menu: "M4 7h16M4 12h16M4 17h16",
    theme: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18Zm0 0v18m3-16v14m3-12v10",
    out: "M14 4h5v16h-5M4 12h10m-4-4 4 4-4 4",
    copy: "M9 9h11v11H9V9Zm-4 6H4V4h11v1",
  };
  const drawn = s("path", { d: paths[name], fill: "none", stroke: "currentColor", "stroke-width": "1.7", "stroke-linecap": "round" });
  return s("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true", focusable: "false" }, drawn);
}

// A state is a word with a dot; the colour says nothing that the word does not.
export const chip = (text, tone = "") => h("span", { class: `chip ${tone}` }, h("span", { class: "dot", "aria-hidden": "true" }), text);

export function table(label, heads, rows, empty) {
  const cells = heads.map((head) =>
    h("th", { scope: "col", class: head.number ? "number" : "" }, head.hidden ? h("span", { class: "unseen" }, head.name) : head.name),
  );
  const body = h("tbody", null, rows.length ? rows : h("tr", { class: "empty" }, h("td", { colspan: heads.length }, empty ?? "Nothing here.")));
  const whole = h("table", null, h("caption", { class: "unseen" }, label), h("thead", null, h("tr", null, cells)), body);
  return h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": label }, whole);
}

export const number = (text, attributes) => h("td", { class: "number", ...attributes }, text);

export function field(label, control, hint) {
  const id = control.id || `f${Math.random().toString(36).slice(2)}`;
  control.id = id;
  const about = hint ? h("span", { class: "hint", id: `${id}h` }, hint) : null;
  if (about) control.setAttribute("aria-describedby", about.id);
  return h("div", { class: "field" }, h("label", { for: id }, label), control, about);
}

export const options = (items, value) => items.map(([key, text]) => h("option", { value: key, selected: key === value }, text));

export const select = (items, value, change) => h("select", { on: { change: (event) => change?.(event.target.value) } }, options(items, value));

export const button = (text, act, kind = "", more = {}) =>
  h("button", { type: "button", class: `button ${kind}`, ...more, on: { click: act } }, text);

export function toast(text, tone = "") {
  const note = h("div", { class: `toast ${tone}` }, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), 6000);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  } catch {
    toast("The browser did not allow copying: select the text instead.", "bad");
  }
}

// Dialogs that are open, each with the way to close it.
const opened = new Map();
let dialogs = 0;

// Closes every dialog: what it shows and asks belongs to a session.
export const closeDialogs = () => [...opened.values()].forEach((close) => close());

// A modal dialog with a heading; resolves when it is closed. `build(close)` gives its content.
export function dialog(title, build, kind = "") {
  dialogs += 1;
  const id = `dialog-${dialogs}`;
  const head = h("h2", { id }, title);
  const node = h("dialog", { class: kind, "aria-labelledby": id });
  return new Promise((done) => {
    // Gone at once: a dialog may show a secret.
    const close = (value) => {
      opened.delete(node);
      node.close();
      node.remove();
      done(value);
    };
    opened.set(node, close);
    const cross = h("button", { type: "button", class: "cross", "aria-label": "Close", on: { click: () => close() } }, "×");
    node.append(h("header", null, head, cross), ...[build(close)].flat());
    // By the Escape key.
    node.addEventListener("close", () => {
      opened.delete(node);
      node.remove();
      done();
    });
    document.body.append(node);
    node.showModal();
  });
}

export const confirmed = (title, text, word, kind = "danger") =>
  dialog(title, (close) => [
    h("p", null, text),
    h("footer", null, button("Back", () => close(false)), button(word, () => close(true), kind)),
  ], "narrow");

export const problem = (error) =>
  h("div", { class: "problem", role: "alert" }, h("strong", null, error.message ?? String(error)),
    error.details?.length ? h("ul", null, error.details.map((detail) => h("li", null, detail))) : null);
