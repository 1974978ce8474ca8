// The line as it runs: gateway, pools and their workers, providers.

import { call, may, part } from "../api.js";
import { meter, sparkline } from "../charts.js";
import { button, chip, confirmed, dialog, field, h, keyed, mark, percent, say, seconds, short, toast, whole } from "../dom.js";

export const title = "Live";

const PHASES = { ready: "good", loading: "wait", starting: "wait", draining: "wait", suspected: "bad", down: "bad", stopped: "" };
const BREAKERS = { closed: "good", probing: "wait", open_softly: "wait", open_hard: "bad" };
const BREAKER_WORDS = { closed: "closed", probing: "probing", open_softly: "asked last", open_hard: "open" };

export function show(root, store) {
  const state = h("div", { class: "states" });
  root.append(h("header", { class: "head" }, h("h1", null, title), state));
  const waiting = h("p", { class: "note" }, "Waiting for the gateway …");
  root.append(waiting);

  const tiles = [
    tile("Requests in flight", (one) => one.inFlight, (now) => whole(now.requests_in_flight), (now) => `${short(now.requests_ended)} answered so far`),
    tile("Output tokens / s", (one) => one.rate, (_, last) => rate(last), (now) => `${short(now.output_tokens)} so far`),
    tile("First token, median", (one) => one.p50 ?? Number.NaN, (_, last) => seconds(last.p50),
      (_, last) => (last.p95 === null ? "none in the last minute" : `p95 ${seconds(last.p95)}, last minute`)),
    tile("Prefix cache hits", (one) => one.hits, (_, last) => (Number.isFinite(last.hits) ? percent(last.hits, 1) : "–"),
      (now) => `${percent(sum(now.workers, "cached_tokens"), sum(now.workers, "prompt_tokens"))} since the start`),
  ];
  const board = h("section", { class: "tiles", "aria-label": "Key figures" }, tiles.map((one) => one.node));

  const gate = gatewayCard();
  const lanes = h("div", { class: "lanes" });
  const drawLanes = keyed(lanes, lane);
  const providers = h("div", { class: "lanes" });
  const drawProviders = keyed(providers, providerLane);
  const line = h("section", { class: "line", "aria-label": "The line: gateway, pools, workers and providers" },
    h("div", { class: "source" }, gate.node), h("div", { class: "targets" }, lanes, providers));

  const update = ({ state: now, readings, link }) => {
    if (!now) return;
    if (waiting.isConnected) {
      waiting.remove();
      root.append(board, line);
    }
    const last = readings.at(-1);
    const before = readings.at(-2);
    const words = now.unready.length ? `${now.unready.length} of ${now.models.length} models not ready` : "All models ready";
    if (state.dataset.words !== words + link) {
      state.dataset.words = words + link;
      state.replaceChildren(chip(words, now.unready.length ? "bad" : "good"), link ? chip(link, "bad") : "");
    }
    for (const one of tiles) one.update(now, readings, last);
    gate.update(now);
    const speeds = new Map(now.workers.map((worker) => {
      const had = before?.workers.get(worker.name);
      const span = before ? (last.at - before.at) / 1000 : 0;
      return [worker.name, span > 0 && had !== undefined ? Math.max(0, worker.output_tokens - had) / span : 0];
    }));
    drawLanes(now.pools.map((pool) => ({ pool, workers: now.workers.filter((worker) => worker.pool === pool.id), speeds })), (one) => one.pool.id);
    drawProviders(now.providers, (one) => one.id);
    mark(providers, "hidden", now.providers.length === 0);
    mark(lanes, "hidden", now.pools.length === 0);
  };
  store.listeners.add(update);
  update(store);
  return () => store.listeners.delete(update);
}

const sum = (items, name) => items.reduce((total, item) => total + item[name], 0);
const rate = (last) => (Number.isFinite(last.rate) ? short(Math.round(last.rate)) : "–");

function tile(label, pick, value, below) {
  const figure = h("p", { class: "figure" });
  const small = h("p", { class: "small" });
  const line = sparkline(`${label}, last two minutes`);
  return {
    node: h("article", { class: "tile" }, h("h2", null, label), figure, line.node, small),
    update(now, readings, last) {
      say(figure, value(now, last));
      say(small, below(now, last));
      line.update(readings.map(pick));
    },
  };
}

function facts(names) {
  const cells = names.map((name) => h("dd"));
  const node = h("dl", { class: "facts" }, names.map((name, at) => h("div", null, h("dt", null, name), cells[at])));
  return { node, update: (...values) => values.forEach((value, at) => say(cells[at], value)) };
}

function gatewayCard() {
  const rows = facts(["Address", "Keys", "Connections", "In flight", "Config", "Version", "Up"]);
  return {
    node: h("article", { class: "card gateway" }, h("h2", null, "Gateway"), rows.node),
    update(now) {
      const keys = now.keys_required ? "required" : "not needed";
      rows.update(`${now.listen}${now.tls ? " TLS" : ""}`, keys, whole(now.connections), whole(now.requests_in_flight),
        `version ${now.config_version}`, now.version, seconds(now.uptime_seconds));
    },
  };
}

const pipe = () => h("span", { class: "pipe", "aria-hidden": "true" }, h("span"));

function lane({ pool }) {
  const name = h("h2", null, pool.id);
  const ready = h("span", { class: "stat" });
  const open = h("span", { class: "stat" });
  const wait = h("span", { class: "stat" });
  const ttft = h("span", { class: "stat" });
  const moved = h("span", { class: "stat" });
  const note = h("p", { class: "small" });
  const grid = h("div", { class: "workers" });
  const draw = keyed(grid, workerCard);
  const explain = button("Explain", () => explained(pool.id), "small", { "aria-label": `Explain where ${pool.id} would send a prompt` });
  const stats = h("div", { class: "stats" }, ready, open, wait, ttft, moved);
  const node = h("article", { class: "lane" }, pipe(), h("header", null, name, stats, explain), note, grid);
  return {
    node,
    update({ pool: now, workers, speeds }) {
      const busy = workers.some((worker) => worker.sequences_running > 0) || now.open > 0;
      node.classList.toggle("busy", busy);
      say(ready, `${now.workers_ready} of ${now.workers} ready`);
      say(open, `${whole(now.open)} open`);
      say(wait, `${whole(now.waiting)} waiting`);
      mark(wait, "class", now.waiting > 0 ? "stat hot" : "stat");
      say(ttft, now.ttft_predicted_seconds === null || now.ttft_predicted_seconds === undefined
        ? "no worker ready" : `first token in ${seconds(now.ttft_predicted_seconds)}`);
      const transfers = now.transfers.completed + now.transfers.failed;
      const failed = now.transfers.failed ? `, ${short(now.transfers.failed)} failed` : "";
      say(moved, transfers ? `${short(now.transfers.completed)} KV transfers${failed}` : "");
      mark(moved, "hidden", transfers === 0);
      const wanted = now.replicas ? `${now.replicas.wanted} workers wanted: ${now.replicas.reason}` : "";
      const words = [wanted, now.role_advice].filter(Boolean).join(" · ");
      say(note, words);
      mark(note, "hidden", !words);
      draw(workers.map((worker) => ({ worker, speed: speeds.get(worker.name) })), (one) => one.worker.name);
    },
  };
}

// What a worker's GPU does, in a line; empty without one.
function gpuWords(gpu) {
  if (!gpu) return "";
  const gigabytes = (bytes) => (bytes / 1e9).toFixed(1);
  const words = [
    gpu.utilization == null ? "" : `GPU ${Math.round(gpu.utilization * 100)} %`,
    gpu.memory_used_bytes == null ? "" : `${gigabytes(gpu.memory_used_bytes)} of ${gigabytes(gpu.memory_total_bytes)} GB`,
    gpu.power_watts == null ? "" : `${Math.round(gpu.power_watts)} W`,
    gpu.sm_clock_hertz == null ? "" : `${Math.round(gpu.sm_clock_hertz / 1e6)} MHz`,
    gpu.temperature_celsius == null ? "" : `${gpu.temperature_celsius} °C`,
    gpu.throttled?.length ? `slowed by ${gpu.throttled.join(", ")}` : "",
  ];
  return words.filter(Boolean).join(" · ");
}

function workerCard({ worker }) {
  const phase = h("span", { class: "phase" });
  const role = h("span", { class: "role" });
  const dot = h("span", { class: "dot", "aria-hidden": "true" });
  const batch = h("dd");
  const queue = h("dd");
  const speed = h("dd");
  const step = h("dd");
  const kv = meter("KV");
  const hits = meter("Hits");
  const detail = h("p", { class: "detail" });
  const acts = may("operator") ? h("div", { class: "acts" }) : null;
  let held = null;
  const steer = async (name, act, body, words) => {
    try {
      await call("POST", `/workers/${part(name)}/${act}`, body);
      toast(words);
    } catch (error) {
      toast(error.message, "bad");
    }
  };
  const restart = async () => {
    const text = "Open requests have a minute to finish; the rest go on at other workers, or at the new process.";
    if (await confirmed(`Restart ${worker.name}?`, text, "Restart")) steer(worker.name, "restart", { patience_seconds: 60 }, `${worker.name} restarts.`);
  };
  const rows = h("dl", { class: "figures" }, [["Batch", batch], ["Queue", queue], ["Tokens/s", speed], ["Step", step]]
    .map(([text, cell]) => h("div", null, h("dt", null, text), cell)));
  const node = h("section", { class: "worker", "aria-label": `Worker ${worker.name}` },
    h("header", null, dot, h("h3", null, worker.name), role, phase), rows, kv.node, hits.node, detail, acts);
  return {
    node,
    update({ worker: now, speed: tokens }) {
      mark(node, "data-tone", PHASES[now.phase] ?? "");
      say(phase, now.phase);
      say(role, now.role);
      mark(role, "data-role", now.role);
      say(batch, whole(now.sequences_running));
      say(queue, now.queue_seconds > 0.001 ? `${whole(now.sequences_waiting)} · ${seconds(now.queue_seconds)}` : whole(now.sequences_waiting));
      say(speed, short(Math.round(tokens ?? 0)));
      say(step, now.step_seconds > 0 ? seconds(now.step_seconds) : "–");
      const used = now.blocks_total - now.blocks_free;
      const share = now.blocks_total ? used / now.blocks_total : 0;
      kv.update(share, percent(used, now.blocks_total), share > 0.95 ? "hot" : "");
      hits.update(now.prompt_tokens ? now.cached_tokens / now.prompt_tokens : 0, percent(now.cached_tokens, now.prompt_tokens), "second");
      const deaths = now.deaths ? `lost ${now.deaths} time${now.deaths > 1 ? "s" : ""}` : "";
      const words = [now.detail, ...now.troubles, gpuWords(now.gpu), deaths].filter(Boolean).join(" · ");
      say(detail, words);
      mark(detail, "hidden", !words);
      if (acts && held !== now.phase) {
        held = now.phase;
        const drains = now.phase === "draining";
        acts.replaceChildren(
          button(drains ? "Resume" : "Drain", () => steer(now.name, drains ? "resume" : "drain", undefined, drains ? `${now.name} takes requests again.`
            : `${now.name} drains.`), "small", { "aria-label": `${drains ? "Resume" : "Drain"} ${now.name}` }),
          button("Restart", restart, "small", { "aria-label": `Restart ${now.name}` }));
      }
    },
  };
}

function providerLane(provider) {
  const stats = h("div", { class: "stats" });
  const targets = h("ul", { class: "breakers" });
  const drawTargets = keyed(targets, (target) => {
    const state = h("span");
    return {
      node: h("li", null, h("span", { class: "mono" }, target.id), state),
      update: (now) => {
        if (state.dataset.breaker === now.breaker + now.in_flight) return;
        state.dataset.breaker = now.breaker + now.in_flight;
        state.replaceChildren(chip(`breaker ${BREAKER_WORDS[now.breaker]}`, BREAKERS[now.breaker]), ` ${whole(now.in_flight)} in flight`);
      },
    };
  });
  const node = h("article", { class: "lane provider" }, pipe(), h("header", null, h("h2", null, provider.id), stats), targets);
  const spans = ["", "", "", "", ""].map(() => h("span", { class: "stat" }));
  stats.append(...spans);
  return {
    node,
    update(now) {
      node.classList.toggle("busy", now.in_flight > 0);
      const failed = Object.entries(now.outcomes).filter(([name]) => name !== "ok").reduce((total, [, count]) => total + count, 0);
      const words = [now.protocol, `${whole(now.in_flight)} of ${whole(now.in_flight_max)} in flight`, `${short(now.outcomes.ok ?? 0)} answered`,
        `${short(failed)} failed`, now.keys_resting ? `${now.keys_resting} of ${now.keys} keys rest` : `${now.keys} keys`];
      words.forEach((text, at) => say(spans[at], text));
      mark(spans[4], "class", now.keys_resting ? "stat hot" : "stat");
      drawTargets(now.targets, (one) => one.id);
      mark(targets, "hidden", now.targets.length === 0);
    },
  };
}

// Which worker a prompt would go to, and what it would have cost elsewhere.
function explained(pool) {
  return dialog(`Where would ${pool} send a prompt?`, () => {
    const prompt = h("textarea", { rows: "5", maxlength: "262144", required: true });
    const found = h("div", { "aria-live": "polite" });
    const act = async (event) => {
      event.preventDefault();
      try {
        const decision = await call("POST", `/pools/${part(pool)}/explain`, { prompt: prompt.value });
        const rows = decision.candidates.map((one) => h("tr", one.worker === decision.worker ? { class: "chosen" } : null,
          h("th", { scope: "row" }, one.worker, one.worker === decision.worker ? chip("chosen", "good") : null),
          h("td", { class: "number" }, seconds(one.cost_seconds)), h("td", { class: "number" }, seconds(one.ttft_seconds)),
          h("td", { class: "number" }, whole(one.found_tokens.device)),
          h("td", null, Object.entries(one.parts_seconds).filter(([, value]) => value > 1e-6).map(([name, value]) => `${name} ${seconds(value)}`).join(", "))));
        const heads = ["Worker", "Price", "First token", "Cached tokens", "The price by its reasons"];
        found.replaceChildren(
          h("p", null, `${whole(decision.prompt_tokens)} tokens, policy ${decision.policy}, because: ${decision.why}.`),
          h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Candidates" },
            h("table", null, h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", null, rows))));
      } catch (error) {
        found.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
      }
    };
    return h("form", { on: { submit: act } }, field("Prompt", prompt, "Nothing is sent to a model. The prompt is tokenized and priced for each worker."),
      h("footer", null, h("button", { type: "submit", class: "button primary" }, "Explain")), found);
  }, "large");
}

