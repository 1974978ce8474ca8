//! Figures of pools and workers from the admin API, with the columns that are computed from several figures or from two
//! looks.

use std::collections::HashMap;
use std::time::Instant;

use serde_json::{Value, json};

use crate::admin::{Client, all};
use crate::out::harmless;

/// Counters at the last look, by name.
#[derive(Default)]
pub(super) struct Sums {
    at: Option<Instant>,
    counts: HashMap<String, f64>,
}

impl Sums {
    /// Rate of a counter per second since the last look; 0 at the first look, and when the counter began anew.
    fn rate(&mut self, name: String, value: f64, elapsed: f64) -> f64 {
        let before = self.counts.insert(name, value).unwrap_or(value);
        if elapsed > 0.0 { (value - before).max(0.0) / elapsed } else { 0.0 }
    }
}

/// Pools and workers of one look, with the computed columns.
pub(super) async fn look(client: &Client, sums: &mut Sums) -> anyhow::Result<(Vec<Value>, Vec<Value>)> {
    let mut pools = all(client, "/admin/v1/pools", &[]).await?;
    let mut workers = all(client, "/admin/v1/workers", &[]).await?;
    let elapsed = sums.at.replace(Instant::now()).map_or(0.0, |at| at.elapsed().as_secs_f64());
    workers.iter_mut().for_each(|worker| finish_worker(worker, sums, elapsed));
    pools.iter_mut().for_each(|pool| finish_pool(pool, &workers, sums, elapsed));
    Ok((pools, workers))
}

fn finish_pool(pool: &mut Value, workers: &[Value], sums: &mut Sums, elapsed: f64) {
    let id = pool["id"].as_str().unwrap_or_default().to_owned();
    let tokens = sums.rate(format!("pool {id}"), number(&pool["counts"]["tokens"]), elapsed);
    let mine = |field: &str| -> f64 {
        workers.iter().filter(|worker| worker["pool"] == pool["id"]).map(|worker| number(&worker[field])).sum()
    };
    let moved = |name: &str| number(&pool["transfers"][name]);
    let shown = [
        ("ready", format!("{} of {}", pool["workers_ready"], pool["workers"])),
        ("tokens_rate", format!("{tokens:.0}")),
        ("hits", percent(mine("cached_tokens"), mine("prompt_tokens"))),
        ("kv_moved", format!("{:.1} MB", moved("bytes") / 1e6)),
        ("hidden", percent(moved("hidden_seconds"), moved("prefill_seconds"))),
    ];
    shown.into_iter().for_each(|(name, text)| pool[name] = json!(text));
    let replicas = &pool["replicas"];
    let how = match (replicas["paused"] == true, replicas["dry_run"] == true) {
        (true, _) => ", paused",
        (_, true) => ", dry run",
        _ => "",
    };
    let wanted = replicas["wanted"]
        .as_u64()
        .map(|wanted| json!(format!("{wanted} ({} to {}{how})", replicas["min"], replicas["max"])));
    let late = replicas["late"].as_f64().map(|late| json!(percent(late, 1.0)));
    (pool["replicas_wanted"], pool["late"]) = (wanted.unwrap_or_default(), late.unwrap_or_default());
    pool["ttft"] = pool["ttft_predicted_seconds"].as_f64().map_or(Value::Null, |ttft| json!(seconds(ttft)));
}

fn finish_worker(worker: &mut Value, sums: &mut Sums, elapsed: f64) {
    let of = |name: &str| number(&worker[name]);
    let name = worker["name"].as_str().unwrap_or_default().to_owned();
    let mut rate = |field: &str| sums.rate(format!("worker {name} {field}"), number(&worker[field]), elapsed);
    let (tokens, kv_in, kv_out) = (rate("output_tokens"), rate("transfer_bytes_in"), rate("transfer_bytes_out"));
    let (used, shared) = (of("blocks_total") - of("blocks_free"), of("shared_weights_bytes"));
    let shown = [
        ("queue", seconds(of("queue_seconds"))),
        ("step", seconds(of("step_seconds"))),
        ("step_p99", seconds(number(&worker["decode_steps"]["p99_seconds"]))),
        ("tokens_rate", format!("{tokens:.0}")),
        ("hits", percent(of("cached_tokens"), of("prompt_tokens"))),
        ("kv", percent(used, of("blocks_total"))),
        ("kv_in", format!("{:.1} MB/s", kv_in / 1e6)),
        ("kv_out", format!("{:.1} MB/s", kv_out / 1e6)),
    ];
    shown.into_iter().for_each(|(name, text)| worker[name] = json!(text));
    worker["shared_weights"] = if shared > 0.0 { json!(format!("{:.2} GB", shared / 1e9)) } else { Value::Null };
    finish_gpu(worker);
}

/// Columns of a worker's GPU; none of what it does not tell.
fn finish_gpu(worker: &mut Value) {
    let gpu = worker["gpu"].clone();
    let of = |name: &str| gpu[name].as_f64();
    let pair = |value: Option<f64>, limit: Option<f64>, digits: usize, unit: &str| {
        let limit = limit.map_or_else(String::new, |limit| format!("/{limit:.digits$}"));
        value.map(|value| format!("{value:.digits$}{limit} {unit}"))
    };
    let gigabytes = |name: &str| of(name).map(|bytes| bytes / 1e9);
    let reasons = gpu["throttled"].as_array().filter(|reasons| !reasons.is_empty());
    let reasons = reasons.map(|all| all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", "));
    let shown = [
        ("gpu_busy", of("utilization").map(|share| percent(share, 1.0))),
        ("gpu_memory", pair(gigabytes("memory_used_bytes"), gigabytes("memory_total_bytes"), 1, "GB")),
        ("gpu_power", pair(of("power_watts"), of("power_limit_watts"), 0, "W")),
        ("gpu_clock", of("sm_clock_hertz").map(|hertz| format!("{:.0} MHz", hertz / 1e6))),
        ("gpu_temperature", of("temperature_celsius").map(|degrees| format!("{degrees:.0} °C"))),
        ("gpu_throttled", reasons.map(|text| harmless(&text))),
    ];
    shown.into_iter().for_each(|(name, text)| worker[name] = json!(text));
}

/// Troubles that workers report, one line each.
pub(super) fn troubles(workers: &[Value]) -> Vec<String> {
    let lines = workers.iter().flat_map(|worker| {
        let name = worker["name"].as_str().unwrap_or_default();
        let texts = worker["troubles"].as_array().into_iter().flatten().filter_map(Value::as_str);
        texts.map(move |text| harmless(&format!("{name}: {text}")))
    });
    lines.collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.0} %", 100.0 * part / whole) } else { "-".into() }
}

fn seconds(value: f64) -> String {
    if value < 1.0 { format!("{:.0} ms", value * 1e3) } else { format!("{value:.1} s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_shown_with_what_its_workers_moved() {
        let mut pool = json!({ "id": "a", "workers": 2, "workers_ready": 1, "counts": { "tokens": 5, "prefilled_apart": 3 },
            "replicas": { "wanted": 3, "min": 1, "max": 4, "paused": true, "late": 0.25 },
            "transfers": { "bytes": 2_500_000, "seconds": 9.0, "prefill_seconds": 4.0, "hidden_seconds": 3.0 }, "ttft_predicted_seconds": 0.5 });
        let workers = [("a", 10), ("a", 30), ("b", 1000)]
            .map(|(pool, cached)| json!({ "pool": pool, "cached_tokens": cached, "prompt_tokens": 100 }));
        finish_pool(&mut pool, &workers, &mut Sums::default(), 0.0);
        let shown = ["ready", "hits", "kv_moved", "hidden", "ttft", "replicas_wanted", "late"]
            .map(|name| pool[name].as_str().unwrap_or_default());
        assert_eq!(shown, ["1 of 2", "20 %", "2.5 MB", "75 %", "500 ms", "3 (1 to 4, paused)", "25 %"]);
    }

    #[test]
    fn a_gpu_and_shared_weights_are_shown_where_they_are() {
        use super::super::columns::{WORKERS, of_workers};
        let gpu = json!({ "utilization": 0.25, "memory_used_bytes": 3_200_000_000_u64, "memory_total_bytes": 85_000_000_000_u64,
            "power_watts": 70.5, "power_limit_watts": 700.0, "sm_clock_hertz": 1_980_000_000_u64, "temperature_celsius": 35,
            "throttled": ["power", "thermal"] });
        let mut worker = json!({ "name": "a-0", "gpu": gpu, "shared_weights_bytes": 1_190_000_000_u64 });
        finish_worker(&mut worker, &mut Sums::default(), 0.0);
        let shown =
            ["shared_weights", "gpu_busy", "gpu_memory", "gpu_power", "gpu_clock", "gpu_temperature", "gpu_throttled"]
                .map(|name| worker[name].as_str().unwrap_or_default());
        assert_eq!(shown, ["1.19 GB", "25 %", "3.2/85.0 GB", "70/700 W", "1980 MHz", "35 °C", "power, thermal"]);
        let mut other = json!({ "name": "a-1", "gpu": null, "shared_weights_bytes": 0 });
        finish_worker(&mut other, &mut Sums::default(), 0.0);
        assert!(["shared_weights", "gpu_busy", "gpu_power"].iter().all(|name| other[*name].is_null()), "{other}");
        assert_eq!((of_workers(&[worker]).len(), of_workers(&[other]).len()), (WORKERS.len(), WORKERS.len() - 6));
    }

    #[test]
    fn what_goes_wrong_is_a_line_below() {
        let workers =
            [json!({ "name": "a-0", "troubles": ["KV tier disk is off: it failed"] }), json!({ "name": "a-1" })];
        assert_eq!(troubles(&workers), ["a-0: KV tier disk is off: it failed"]);
        assert!(troubles(&workers[1..]).is_empty());
    }

    #[test]
    fn a_worker_is_shown_with_rates_and_shares() {
        let mut sums = Sums::default();
        let worker = |tokens: u64| {
            json!({ "name": "a-0", "output_tokens": tokens, "blocks_total": 200, "blocks_free": 150, "prompt_tokens": 80,
                "cached_tokens": 20, "queue_seconds": 0.25, "step_seconds": 1.25,
                "decode_steps": { "p99_seconds": 0.02 } })
        };
        finish_worker(&mut worker(100), &mut sums, 0.0);
        let mut second = worker(160);
        finish_worker(&mut second, &mut sums, 2.0);
        let shown = ["tokens_rate", "hits", "kv", "queue", "step", "step_p99"]
            .map(|name| second[name].as_str().unwrap_or_default());
        assert_eq!(shown, ["30", "25 %", "25 %", "250 ms", "1.2 s", "20 ms"]);
        // A worker's next life counts from 0.
        let mut third = worker(10);
        finish_worker(&mut third, &mut sums, 2.0);
        assert_eq!(third["tokens_rate"], "0");
    }
}
