// The console: sign-in, the frame around the views, and which of them is shown.

import { answered, follow, leaveToSignOn, may, onLeft, provider, resume, session, signIn, signOn, signOut } from "./api.js";
import { button, closeDialogs, field, h, icon, mark, problem, say, toast } from "./dom.js";
import { quantile } from "./charts.js";
import * as audit from "./views/audit.js";
import * as batches from "./views/batches.js";
import * as config from "./views/config.js";
import * as decisions from "./views/decisions.js";
import * as keys from "./views/keys.js";
import * as live from "./views/live.js";
import * as models from "./views/models.js";
import * as playground from "./views/playground.js";
import * as plugins from "./views/plugins.js";
import * as requests from "./views/requests.js";
import * as usage from "./views/usage.js";

const VIEWS = { live, requests, playground, keys, usage, batches, models, plugins, decisions, config, audit };
const app = document.getElementById("app");

// --- theme ---

const THEMES = ["auto", "light", "dark"];
const theme = () => localStorage.getItem("penstock.theme") ?? "auto";
function dress() {
  mark(document.documentElement, "data-theme", THEMES.includes(theme()) ? theme() : "auto");
}
dress();

function themeButton() {
  const word = h("span");
  const label = () => say(word, `Theme: ${theme()}`);
  label();
  const turn = () => {
    localStorage.setItem("penstock.theme", THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
    dress();
    label();
  };
  return h("button", { type: "button", class: "quiet", on: { click: turn } }, icon("theme"), word);
}

// --- what the views look at ---

// Readings kept for the lines: two minutes at one a second.
const READINGS = 120;
export const store = { state: null, readings: [], listeners: new Set(), link: "connecting" };

function take(state) {
  const last = store.readings.at(-1);
  // The gateway makes a state once for all who look: a new stream may begin with the one that is known.
  if (last?.at === state.at_ms) return;
  const before = store.readings.find((one) => one.at >= state.at_ms - 60_000) ?? last;
  const span = last ? (state.at_ms - last.at) / 1000 : 0;
  const sum = (field) => state.workers.reduce((total, worker) => total + worker[field], 0);
  const [prompt, cached] = [sum("prompt_tokens"), sum("cached_tokens")];
  const since = before && prompt > before.prompt ? before : null;
  store.readings.push({
    at: state.at_ms, tokens: state.output_tokens, ttft: state.ttft, prompt, cached,
    inFlight: state.requests_in_flight,
    rate: span > 0 ? Math.max(0, state.output_tokens - last.tokens) / span : Number.NaN,
    p50: quantile(0.5, state.ttft, before?.ttft), p95: quantile(0.95, state.ttft, before?.ttft),
    hits: since ? (cached - since.cached) / (prompt - since.prompt) : prompt > 0 && !before ? cached / prompt : Number.NaN,
    workers: new Map(state.workers.map((worker) => [worker.name, worker.output_tokens])),
  });
  if (store.readings.length > READINGS) store.readings.shift();
  store.state = state;
  for (const listener of store.listeners) listener(store);
}

// --- sign-in ---

function showSignIn(why, refused) {
  stop?.();
  stop = null;
  leave?.();
  leave = null;
  closeDialogs();
  store.state = null;
  store.readings.length = 0;
  const input = h("input", { type: "password", name: "key", autocomplete: "current-password", required: true, spellcheck: "false" });
  const fault = h("div", { "aria-live": "assertive" }, why ? h("p", { class: "note" }, why) : null, refused ? problem(refused) : null);
  const submit = h("button", { type: "submit", class: "button primary wide" }, "Sign in");
  const act = async (event) => {
    event.preventDefault();
    submit.disabled = true;
    try {
      await signIn(input.value.trim());
      showFrame();
    } catch (error) {
      const text = error.status === 429 ? "Too many wrong keys came from here: wait a few seconds." : error.message;
      fault.replaceChildren(problem(new Error(text)));
      submit.disabled = false;
      input.select();
    }
  };
  const hint = "A key of [[admin_keys]], or on the gateway's own machine the text of admin.key in its state folder.";
  const form = h("form", { on: { submit: act } }, field("Admin key", input, hint), fault, submit);
  const brand = h("div", { class: "brand" }, mark2(), h("h1", null, "penstock"));
  const other = h("div");
  provider().then((name) => name && other.replaceChildren(providerButton(name, fault))).catch(() => {});
  app.replaceChildren(h("main", { class: "signin" }, brand, other, form, h("p", { class: "hint" }, themeButton())));
  document.title = "Sign in – penstock console";
  input.focus();
}

function providerButton(name, fault) {
  const leaving = h("button", { type: "button", class: "button primary wide" }, `Sign in with ${name}`);
  leaving.addEventListener("click", async () => {
    leaving.disabled = true;
    try {
      await leaveToSignOn();
    } catch (error) {
      fault.replaceChildren(problem(error));
      leaving.disabled = false;
    }
  });
  return leaving;
}

const mark2 = () => h("span", { class: "mark", "aria-hidden": "true" }, icon("live"));

// --- frame ---

let stop = null;
let leave = null;

function showFrame() {
  const links = Object.entries(VIEWS).filter(([, view]) => !view.role || may(view.role)).map(([name, view]) =>
    h("a", { href: `#/${name}`, "data-view": name }, icon(name), view.title));
  const nav = h("nav", { id: "nav", "aria-label": "Views" }, links);
  const link = h("span", { class: "link" });
  const toggle = h("button", {
    type: "button", class: "quiet menu", "aria-label": "Menu", "aria-expanded": "false", "aria-controls": "nav",
    on: { click: () => unfold(toggle.getAttribute("aria-expanded") !== "true") },
  }, icon("menu"));
  const side = h("header", { class: "side" },
    h("div", { class: "brand" }, mark2(), h("span", { class: "name" }, "penstock"), toggle), nav,
    h("div", { class: "me" }, link,
      h("p", { class: "who" }, h("strong", null, session.person ?? session.key), h("span", null, session.role)), themeButton(),
      h("button", { type: "button", class: "quiet", on: { click: () => signOut().catch(() => {}) } }, icon("out"), h("span", null, "Sign out"))));
  function unfold(open) {
    mark(toggle, "aria-expanded", open);
    side.classList.toggle("open", open);
  }
  const main = h("main", { id: "main", tabindex: "-1" });
  const skip = button("Skip to content", () => main.focus(), "skip");
  app.replaceChildren(skip, h("div", { class: "frame" }, side, main));

  const tellLink = (trouble) => {
    store.link = trouble;
    mark(link, "class", trouble ? "link bad" : "link");
    say(link, trouble ? trouble : "live");
    for (const listener of store.listeners) listener(store);
  };
  tellLink("connecting");
  stop = follow(take, tellLink);

  const show = () => {
    const name = location.hash.slice(2).split("/")[0];
    const view = VIEWS[name] && links.some((one) => one.dataset.view === name) ? VIEWS[name] : live;
    for (const one of links) mark(one, "aria-current", VIEWS[one.dataset.view] === view ? "page" : null);
    document.title = `${view.title} – penstock console`;
    leave?.();
    const shown = h("div", { class: "view" });
    main.replaceChildren(shown);
    const undo = view.show(shown, store);
    leave = () => {
      undo?.();
      leave = null;
    };
    unfold(false);
    scrollTo(0, 0);
  };
  const moved = () => {
    show();
    main.focus({ preventScroll: true });
  };
  addEventListener("hashchange", moved);
  const end = stop;
  stop = () => {
    end();
    removeEventListener("hashchange", moved);
  };
  show();
}

onLeft(showSignIn);
const answer = answered();
let refused = null;
if (answer) await signOn(answer).catch((error) => (refused = error));
if (session.role || (await resume())) {
  showFrame();
  if (refused) toast(refused.message, "bad");
} else {
  showSignIn(null, refused);
}
