// Small charts in SVG: a line that moves, and bars over time.

import { h, mark, s, say } from "./dom.js";

const WIDE = 240;
const HIGH = 44;

// Line of the last values, the newest at the right. `most`: how many fit.
export function sparkline(label, most = 120) {
  const area = s("path", { class: "spark-area" });
  const line = s("path", { class: "spark-line", fill: "none", "vector-effect": "non-scaling-stroke" });
  const node = s("svg", {
    class: "spark", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": label, focusable: "false",
  }, area, line);
  return {
    node,
    update(values) {
      const shown = values.slice(-most);
      const top = Math.max(...shown.filter(Number.isFinite), 1e-9);
      const step = WIDE / (most - 1);
      const points = [];
      shown.forEach((value, at) => {
        if (!Number.isFinite(value)) return;
        const x = WIDE - (shown.length - 1 - at) * step;
        points.push(`${x.toFixed(1)} ${(HIGH - 2 - (value / top) * (HIGH - 6)).toFixed(1)}`);
      });
      if (points.length < 2) return;
      const first = points[0].split(" ")[0];
      mark(line, "d", `M${points.join("L")}`);
      mark(area, "d", `M${points.join("L")}V${HIGH}H${first}Z`);
    },
  };
}

// A share of a whole, as a bar with its text beside it.
export function meter(label) {
  const bar = s("rect", { x: 0, y: 0, height: 6, width: 0, class: "meter-bar" });
  const back = s("rect", { x: 0, y: 0, height: 6, width: 100, class: "meter-back" });
  const drawing = s("svg", { class: "meter", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, back, bar);
  const text = h("span", { class: "meter-text" });
  const node = h("div", { class: "metered" }, h("span", { class: "meter-label" }, label), drawing, text);
  return {
    node,
    update(share, shown, tone = "") {
      mark(bar, "width", (100 * Math.min(1, Math.max(0, share || 0))).toFixed(1));
      mark(bar, "class", `meter-bar ${tone}`);
      say(text, shown);
    },
  };
}

// Bars over time: `items` are { label, value, title }, `show` writes a value.
export function bars(label, items, show, width = 720) {
  const height = 190;
  const bottom = 22;
  const leftEdge = 56;
  const top = niceTop(Math.max(...items.map((item) => item.value), 0));
  const room = (width - leftEdge - 8) / Math.max(1, items.length);
  const y = (value) => 8 + (height - bottom - 8) * (1 - value / top);
  const lines = [0, 0.5, 1].map((share) => [
    s("line", { x1: leftEdge, x2: width - 8, y1: y(top * share), y2: y(top * share), class: "grid" }),
    s("text", { x: leftEdge - 8, y: y(top * share) + 4, "text-anchor": "end", class: "tick" }, show(top * share)),
  ]);
  const each = Math.max(1, Math.ceil(items.length / ((width - leftEdge) / 64)));
  const drawn = items.map((item, at) => {
    const x = leftEdge + at * room;
    const bar = s("rect", {
      x: (x + room * 0.14).toFixed(1), width: Math.max(1, room * 0.72).toFixed(1), y: y(item.value).toFixed(1),
      height: Math.max(0, y(0) - y(item.value)).toFixed(1), rx: Math.min(2, room * 0.2), class: "bar",
    }, s("title", null, item.title));
    const tick = at % each === 0
      ? s("text", { x: (x + room / 2).toFixed(1), y: height - 6, "text-anchor": "middle", class: "tick" }, item.label) : null;
    return [bar, tick];
  });
  return s("svg", { class: "bars", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, focusable: "false" }, lines, drawn);
}

// The next number above that reads well: 1, 2 or 5 and zeros.
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

// Value below which a share of the observations between two readings of a histogram lies; null where there were none.
export function quantile(share, now, before) {
  const count = now.count - (before?.count ?? 0);
  if (count <= 0) return null;
  const wanted = share * count;
  let below = 0;
  for (let at = 0; at < now.bounds.length; at += 1) {
    const here = now.buckets[at] - (before?.buckets[at] ?? 0);
    if (below + here >= wanted && here > 0) {
      const low = at ? now.bounds[at - 1] : 0;
      return low + (now.bounds[at] - low) * ((wanted - below) / here);
    }
    below += here;
  }
  return now.bounds.at(-1) ?? null;
}
