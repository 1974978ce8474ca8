// Self-audit of the routers: what each choice of a worker cost beyond the cheapest, by the prices at that moment.

import { get, part } from "../api.js";
import { bars } from "../charts.js";
import { chip, field, h, keyed, mark, number, options, percent, problem, say, seconds, select, short, stamp, table, whole } from "../dom.js";

export const title = "Decisions";
// As many as a pool keeps.
const DECISIONS_MAX = 256;
const ROWS_MAX = 50;
const BARS_MAX = 48;
const EACH_MS = 3000;
const WORDS = { only: "the only one", cached: "has the prefix", cheaper: "cheapest", policy: "by the policy" };
const MEASURES = {
  regret: { name: "Regret", of: (one) => one.regret, about: "seconds that the choice cost beyond the cheapest worker" },
  saved: { name: "Saved", of: (one) => one.saved, about: "seconds that the next best worker would have cost more" },
  cost: { name: "Cost", of: (one) => one.cost, about: "seconds that the choice was predicted to cost" },
  waited: { name: "Waited", of: (one) => one.waited, about: "seconds that the request had waited before the choice" },
};

export function show(root, store) {
  const wish = { pool: "", measure: "regret" };
  const pools = h("select", { on: { change: (event) => { wish.pool = event.target.value; load(); } } });
  const measures = select(Object.entries(MEASURES).map(([key, one]) => [key, one.name]), wish.measure, (value) => { wish.measure = value; load(); });
  const out = h("div");
  const page = sheet();
  root.append(h("header", { class: "head" }, h("h1", null, title)),
    h("p", { class: "note" }, "A router gives every worker a price in seconds and takes the cheapest. Regret is what a choice cost beyond that: 0, unless the ",
      "policy decides otherwise, or a cheaper worker was not free. A pool keeps its last 256 decisions."),
    h("div", { class: "filters" }, field("Pool", pools), field("Chart", measures)), out);
  let [over, timer, asked] = [false, 0, 0];

  async function load() {
    clearTimeout(timer);
    asked += 1;
    const mine = asked;
    try {
      if (!wish.pool) {
        const ids = (await get("/pools", { limit: 1000 })).data.map((pool) => pool.id);
        pools.replaceChildren(...options(ids.map((id) => [id, id])));
        [wish.pool] = ids;
      }
      const made = wish.pool ? (await get(`/pools/${part(wish.pool)}/decisions`, { limit: DECISIONS_MAX })).data : [];
      if (over || mine !== asked) return;
      page.update(wish.pool, made.map(judged), MEASURES[wish.measure], root.clientWidth);
      // Put there once: what somebody has selected, scrolled to or focused stays.
      if (!page.nodes[0].isConnected) out.replaceChildren(...page.nodes);
    } catch (error) {
      if (!over && mine === asked) out.replaceChildren(problem(error));
    }
    again();
  }
  function again() {
    clearTimeout(timer);
    if (!over) timer = setTimeout(() => (document.hidden ? again() : load()), EACH_MS);
  }
  load();
  return () => {
    over = true;
    clearTimeout(timer);
  };
}

// A decision with what the alternatives would have cost.
function judged(made) {
  const chosen = made.candidates.find((one) => one.worker === made.worker);
  const others = made.candidates.filter((one) => one !== chosen).map((one) => one.cost_seconds);
  const cost = chosen?.cost_seconds ?? 0;
  const next = Math.min(...others);
  const found = chosen ? chosen.found_tokens.device + chosen.found_tokens.host + chosen.found_tokens.disk + chosen.found_tokens.remote : 0;
  return {
    request: made.request, at: Date.now() / 1000 - made.age_seconds, cost, found, why: made.why, policy: made.policy,
    worker: made.worker, tokens: made.prompt_tokens,
    waited: made.waited_seconds, count: made.candidates.length,
    regret: others.length ? Math.max(0, cost - next) : 0, saved: others.length ? Math.max(0, next - cost) : 0,
  };
}

const mean = (items, of) => (items.length ? items.reduce((sum, one) => sum + of(one), 0) / items.length : 0);

// Sums, chart and table of the decisions, which are drawn once and then kept up to date.
function sheet() {
  const figures = ["Decisions", "Regret, mean", "Saved, mean", "Found in caches"].map((label) => {
    const [value, below] = [h("p", { class: "figure" }), h("p", { class: "small" })];
    return { value, below, node: h("article", { class: "tile" }, h("h2", null, label), value, below) };
  });
  const [heading, hint, chart] = [h("h2"), h("p", { class: "hint" }), h("div")];
  const over = h("section", { class: "panel" }, heading, hint, chart);
  const names = ["Time", "Worker", "Why", "Prompt", "Found there", "Candidates", "Waited", "Cost", "Regret", "Saved"];
  const listed = table("Last decisions", names.map((name, at) => ({ name, number: at > 2 })), []);
  const body = listed.querySelector("tbody");
  body.replaceChildren();
  const none = h("p", { class: "empty" }, "The router has decided nothing yet.");
  const draw = keyed(body, (one) => ({ node: row(one) }));
  const nodes = [h("section", { class: "tiles", "aria-label": "Sums" }, figures.map((one) => one.node)), over,
    h("section", { class: "panel" }, h("h2", null, "Last decisions"), listed, none)];
  return {
    nodes,
    update(pool, all, measure, width) {
      const regrets = all.filter((one) => one.regret > 0).length;
      const said = [
        [short(all.length), all[0] ? `policy ${all[0].policy}` : "none yet"],
        [seconds(mean(all, MEASURES.regret.of)), `${percent(regrets, all.length)} of the choices were not the cheapest`],
        [seconds(mean(all, MEASURES.saved.of)), "against the next best worker"],
        [percent(mean(all, (one) => one.found), mean(all, (one) => one.tokens)), "of the prompts' tokens, where they went"],
      ];
      said.forEach(([value, below], at) => {
        say(figures[at].value, value);
        say(figures[at].below, below);
      });
      for (const part of [over, listed]) mark(part, "hidden", all.length ? null : "");
      mark(none, "hidden", all.length ? "" : null);
      say(heading, `${measure.name} over time`);
      say(hint, `Mean of the ${measure.about}.`);
      const about = `${measure.name} over time: ${measure.about}; the table below has the last ${ROWS_MAX}`;
      chart.replaceChildren(all.length ? bars(about, overTime(all, measure), seconds, Math.min(1400, Math.max(300, width - 34))) : "");
      draw(all.slice(0, ROWS_MAX), (one) => `${pool} ${one.request} ${one.worker} ${one.waited}`);
    },
  };
}

const row = (one) => h("tr", null, h("td", null, stamp(one.at)), h("th", { scope: "row", class: "mono" }, one.worker ?? "none"),
  h("td", null, chip(WORDS[one.why] ?? one.why, one.why === "cached" ? "good" : "")), number(whole(one.tokens)), number(percent(one.found, one.tokens)),
  number(whole(one.count)), number(seconds(one.waited)), number(seconds(one.cost)), number(seconds(one.regret)), number(seconds(one.saved)));

// Means over equal spans of time from the oldest decision to the newest.
function overTime(all, measure) {
  const [newest, oldest] = [all[0].at, all.at(-1).at];
  const count = Math.max(1, Math.min(BARS_MAX, all.length));
  const span = Math.max(1, newest - oldest) / count;
  const spans = Array.from({ length: count }, () => []);
  for (const one of all) spans[Math.min(count - 1, Math.floor((one.at - oldest) / span))].push(one);
  return spans.map((within, at) => {
    const value = mean(within, measure.of);
    const when = stamp(oldest + at * span);
    return { value, label: when.slice(11), title: `${when}: ${seconds(value)}, mean of ${whole(within.length)}` };
  });
}
