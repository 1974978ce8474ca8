// Usage and money: sums over time and by whom, and the same as CSV.

import { csv, get } from "../api.js";
import { bars } from "../charts.js";
import { button, field, h, mark, number, percent, problem, s, select, short, stamp, table, toast, usd, whole } from "../dom.js";

export const title = "Usage";
const HOUR = 3600;
const DAY = 86_400;
const SPANS = [["86400", "Last 24 hours"], ["604800", "Last 7 days"], ["2592000", "Last 30 days"], ["7776000", "Last 90 days"]];
const GROUPS = [["model", "Model"], ["key", "Key"], ["team", "Team"], ["user", "User"], ["provider", "Provider"], ["route", "Route"], ["tag", "Tag"]];
const MEASURES = {
  usd: { name: "Cost", of: (sum) => sum.usd, show: (value) => usd(value) },
  requests: { name: "Requests", of: (sum) => sum.requests, show: short },
  output: { name: "Output tokens", of: (sum) => sum.output_tokens, show: short },
  input: { name: "Prompt tokens", of: (sum) => sum.input_tokens, show: short },
};

export function show(root) {
  const wish = { span: "604800", group: "model", measure: "output" };
  const set = (name) => (value) => {
    wish[name] = value;
    load();
  };
  const download = button("Download CSV", save);
  const filters = h("div", { class: "filters" }, field("Time", select(SPANS, wish.span, set("span"))), field("By", select(GROUPS, wish.group, set("group"))),
    field("Chart", select(Object.entries(MEASURES).map(([key, one]) => [key, one.name]), wish.measure, set("measure"))));
  const out = h("div", { "aria-live": "polite" });
  root.append(h("header", { class: "head" }, h("h1", null, title), download), filters, out);
  let asked = 0;

  // Whole hours or days, so that the first bar is not a part of one.
  function range() {
    const unit = Number(wish.span) <= DAY ? HOUR : DAY;
    const until = Math.floor(Date.now() / 1000) + 1;
    return { unit, from: Math.floor((until - Number(wish.span)) / unit) * unit + unit, until };
  }

  async function load() {
    asked += 1;
    const mine = asked;
    const { unit, from, until } = range();
    try {
      const [all, times, groups] = await Promise.all([
        get("/usage", { from, until }), get("/usage", { from, until, group: unit === HOUR ? "hour" : "day", limit: 1000 }),
        get("/usage", { from, until, group: wish.group, limit: 1000 }),
      ]);
      if (mine !== asked) return;
      const sum = all.data[0] ?? { usd: 0, requests: 0, failed: 0, input_tokens: 0, input_cached_tokens: 0, output_tokens: 0, reasoning_tokens: 0 };
      const measure = MEASURES[wish.measure];
      const at = new Map(times.data.map((one) => [Number(Object.values(one.groups)[0]), one]));
      const items = [];
      for (let time = Math.floor(from / unit) * unit; time < until; time += unit) {
        const value = at.has(time) ? measure.of(at.get(time)) : 0;
        // Days are summed from midnight to midnight in UTC, and named so; hours by the clock of the page.
        const when = unit === HOUR ? stamp(time).slice(0, 16) : new Date(time * 1000).toISOString().slice(0, 10);
        items.push({ value, label: unit === HOUR ? when.slice(11) : when.slice(5), title: `${when}: ${measure.show(value)}` });
      }
      const name = GROUPS.find(([key]) => key === wish.group)[1];
      const most = Math.max(...groups.data.map(measure.of), 0);
      const sorted = groups.data.toSorted((one, other) => measure.of(other) - measure.of(one));
      const rows = sorted.map((one) => h("tr", null,
        h("th", { scope: "row", class: "mono" }, one.groups[wish.group] || "none"), h("td", { class: "share" }, share(measure.of(one), most)),
        number(usd(one.usd)), number(whole(one.requests)), number(whole(one.failed)), number(whole(one.input_tokens)),
        number(percent(one.input_cached_tokens, one.input_tokens)), number(whole(one.output_tokens))));
      const heads = [name, measure.name, "Cost", "Requests", "Failed", "Prompt tokens", "Cached", "Output tokens"]
        .map((head, place) => ({ name: head, number: place > 1 }));
      heads[1].name = `Share of ${measure.name.toLowerCase()}`;
      const cut = groups.next ? h("p", { class: "note" }, "Only the first 1,000 groups are shown; the CSV has all of them.") : "";
      const over = `${measure.name} by ${unit === HOUR ? "hour" : "day (UTC)"}`;
      out.replaceChildren(
        h("section", { class: "tiles", "aria-label": "Sums" }, [
          ["Cost", usd(sum.usd), `${usd(sum.requests ? sum.usd / sum.requests : 0)} a request`],
          ["Requests", whole(sum.requests), `${whole(sum.failed)} failed`],
          ["Prompt tokens", short(sum.input_tokens), `${percent(sum.input_cached_tokens, sum.input_tokens)} from caches`],
          ["Output tokens", short(sum.output_tokens), `${short(sum.reasoning_tokens)} of them reasoning`],
        ].map(([label, value, below]) => h("article", { class: "tile" }, h("h2", null, label), h("p", { class: "figure" }, value),
          h("p", { class: "small" }, below)))),
        h("section", { class: "panel" }, h("h2", null, over),
          bars(`${over}; the table below has the sums`, items, measure.show, Math.min(1400, Math.max(300, root.clientWidth - 34)))),
        h("section", { class: "panel" }, h("h2", null, `By ${name.toLowerCase()}`),
          table(`Usage by ${name.toLowerCase()}`, heads, rows, "No requests in this time."), cut));
    } catch (error) {
      out.replaceChildren(problem(error));
    }
  }

  async function save() {
    mark(download, "disabled", "");
    try {
      const { unit, from, until } = range();
      const group = `${unit === HOUR ? "hour" : "day"},${wish.group}`;
      const url = URL.createObjectURL(new Blob(await csv("/usage.csv", { from, until, group }), { type: "text/csv" }));
      const link = h("a", { href: url, download: `penstock-usage-${wish.group}.csv` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 10_000);
    } catch (error) {
      toast(error.message, "bad");
    }
    mark(download, "disabled", null);
  }
  load();
}

function share(value, most) {
  const width = most > 0 ? (100 * value) / most : 0;
  return s("svg", { class: "meter", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { x: 0, y: 0, width: 100, height: 6, class: "meter-back" }),
    s("rect", { x: 0, y: 0, width: width.toFixed(1), height: 6, class: "meter-bar" }));
}
