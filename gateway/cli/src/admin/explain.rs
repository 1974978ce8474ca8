//! Explanation of a router's choice: the predicted cost of each worker, as a table, a chart, and one page for a browser.

use std::io::{IsTerminal, Read};

use anyhow::Context;
use hyper::Method;
use serde_json::{Value, json};

use super::arguments::Explain;
use super::client::{Client, encoded};
use super::columns::CANDIDATES;
use super::commands::{CONFIG_BYTES_MAX, Show};
use super::table::value;
use crate::chart::{Bar, lines, number};
use crate::out::harmless;
use crate::page::{Column, Page, PageFile};

/// Reasons of a cost, in the order in which the page draws them.
const PARTS: [&str; 7] = ["queue", "own", "later", "harm", "decode", "pressure", "overdue"];
/// Places where a worker has tokens of the prompt, and the tokens that it would load.
const FOUND: [&str; 6] = ["device", "promised", "host", "disk", "remote", "loaded"];

/// Asks which worker of a pool would get a prompt now, and prints why.
pub(super) async fn explain(client: &Client, asked: &Explain, show: Show) -> anyhow::Result<()> {
    let Explain { pool, prompt, key, adapter, html } = asked;
    let html = PageFile::open(html.as_deref())?;
    let prompt = match prompt.as_str() {
        "-" => {
            let mut text = String::new();
            std::io::stdin().take(CONFIG_BYTES_MAX).read_to_string(&mut text).context("the standard input")?;
            text
        }
        text => text.to_owned(),
    };
    let path = format!("/admin/v1/pools/{}/explain", encoded(pool));
    let body = json!({ "prompt": prompt, "key": key, "adapter": adapter });
    let made = client.change(Method::POST, &path, Some(&body), None).await?;
    if show.json {
        show.one(&made);
    } else {
        let worker = made["worker"].as_str().map_or_else(|| "nobody".to_owned(), harmless);
        let (why, tokens) = (value(&made, "why"), value(&made, "prompt_tokens"));
        println!("{worker} ({why}), of {tokens} tokens, by {}", value(&made, "policy"));
        let rows: Vec<Value> = candidates(&made).iter().map(flat).collect();
        show.rows(&rows, CANDIDATES, "no worker suits");
        if std::io::stdout().is_terminal() && rows.len() > 1 {
            print!("{}", lines("predicted cost in seconds, by worker", &costs(&made)));
        }
    }
    html.map_or(Ok(()), |file| file.write(page(asked, &made), show.json))
}

fn candidates(made: &Value) -> &[Value] {
    made["candidates"].as_array().map_or(&[], Vec::as_slice)
}

/// Row of a candidate in the table.
fn flat(candidate: &Value) -> Value {
    let mut row = candidate.clone();
    for (group, prefix) in [("parts_seconds", ""), ("found_tokens", "on_")] {
        for (name, value) in candidate[group].as_object().into_iter().flatten() {
            row[format!("{prefix}{name}")] = value
                .as_f64()
                .filter(|_| prefix.is_empty())
                .map_or_else(|| value.clone(), |seconds| json!(format!("{seconds:.4}")));
        }
    }
    row["cost"] = json!(format!("{:.4}", candidate["cost_seconds"].as_f64().unwrap_or_default()));
    row
}

/// Bars of the workers' costs, each by its reasons.
fn costs(made: &Value) -> Vec<Bar> {
    let bar = |candidate: &Value| {
        let part = |name: &&str| candidate["parts_seconds"][*name].as_f64().unwrap_or_default();
        let parts = PARTS.iter().map(part).collect();
        Bar { parts, ..Bar::new(worker(candidate), seconds(&candidate["cost_seconds"])) }
    };
    candidates(made).iter().map(bar).collect()
}

fn worker(candidate: &Value) -> &str {
    candidate["worker"].as_str().unwrap_or_default()
}

/// Seconds of a field; null stands for infinity, which JSON cannot say.
fn seconds(field: &Value) -> f64 {
    field.as_f64().unwrap_or(f64::INFINITY)
}

/// Page of a decision. The prompt is not on it.
fn page(asked: &Explain, made: &Value) -> Page {
    let mut facts = vec![
        ("worker", made["worker"].as_str().unwrap_or("nobody").to_owned()),
        ("why", value(made, "why")),
        ("policy", value(made, "policy")),
        ("tokens", value(made, "prompt_tokens")),
    ];
    facts.extend(asked.key.iter().map(|key| ("key", key.clone())));
    facts.extend(asked.adapter.iter().map(|adapter| ("adapter", adapter.clone())));
    let mut page = Page::new(&format!("penstock explain: {}", asked.pool), &facts);
    let all = candidates(made);
    if all.is_empty() {
        page.text("No worker suits.");
        return page;
    }
    page.heading("Predicted cost in seconds, by worker and reason");
    page.bars("predicted cost in seconds, by worker", &PARTS, &costs(made));
    let bars = |field: &str| -> Vec<Bar> {
        all.iter().map(|candidate| Bar::new(worker(candidate), seconds(&candidate[field]))).collect()
    };
    page.heading("Predicted time to the first token, in seconds");
    page.bars("predicted time to the first token in seconds, by worker", &[], &bars("ttft_seconds"));
    page.heading("Figures");
    let parts: Vec<Column<'_>> = PARTS.iter().map(|name| (*name, true)).collect();
    let head = [&[("worker", false), ("free", false), ("sequences", true), ("cost s", true)], &parts[..]].concat();
    page.table(
        &[&head[..], &[("TTFT s", true), ("TPOT s", true)]].concat(),
        all.iter().map(|candidate| {
            let mut row = vec![worker(candidate).to_owned(), value(candidate, "free"), value(candidate, "sequences")];
            row.push(number(seconds(&candidate["cost_seconds"])));
            row.extend(PARTS.iter().map(|name| number(seconds(&candidate["parts_seconds"][*name]))));
            row.extend(["ttft_seconds", "tpot_seconds"].map(|name| number(seconds(&candidate[name]))));
            row
        }),
    );
    page.heading("Tokens of the prompt that the worker has");
    let places: Vec<Column<'_>> = FOUND.iter().map(|name| (*name, true)).collect();
    page.table(
        &[&[("worker", false)], &places[..], &[("sent by", false)]].concat(),
        all.iter().map(|candidate| {
            let mut row = vec![worker(candidate).to_owned()];
            row.extend(FOUND.iter().map(|name| value(&candidate["found_tokens"], name)));
            row.push(value(candidate, "pull_from"));
            row
        }),
    );
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::assert_alone;

    fn candidate(worker: &str, own: f64, queue: f64) -> Value {
        let parts =
            json!({ "queue": queue, "own": own, "later": 0, "harm": 0, "decode": 0, "pressure": 0, "overdue": 0 });
        let found = json!({ "device": 48, "promised": 0, "host": 0, "disk": 0, "remote": 0, "loaded": 0 });
        json!({
            "worker": worker, "free": true, "sequences": 3, "cost_seconds": own + queue, "parts_seconds": parts, "found_tokens": found,
            "pull_from": null, "ttft_seconds": 0.5, "tpot_seconds": null,
        })
    }

    fn asked() -> Explain {
        let prompt = "a secret prompt".to_owned();
        Explain { pool: "<chat>".to_owned(), prompt, key: Some("k&y".to_owned()), adapter: None, html: None }
    }

    #[test]
    fn a_page_has_every_workers_cost_and_no_prompt() {
        let all = [candidate("chat-0", 1.0, 0.0), candidate("chat-1<script>", 1.0, 3.0)];
        let made = json!({ "worker": "chat-0", "why": "cached", "policy": "cache_aware", "prompt_tokens": 812, "candidates": all });
        let page = page(&asked(), &made).finish();
        let parts = [
            "penstock explain: &lt;chat&gt;",
            "k&amp;y",
            "cached",
            "812",
            ">4.00<",
            "chat-1&lt;script&gt;",
            ">48<",
            "never",
        ];
        assert_alone(&page, &parts);
        assert!(!page.contains("secret"), "{page}");
        // One part of the first cost, two of the second, and two times to the first token.
        assert_eq!(page.matches("<rect").count(), 1 + 2 + 2);
        let text = lines("costs", &costs(&made));
        assert!(text.contains(&format!("chat-1<script> {} 4.00\n", "█".repeat(40))), "{text}");
    }

    #[test]
    fn nobody_is_told_as_such() {
        let made = json!({ "worker": null, "why": "only", "policy": "session", "prompt_tokens": 1, "candidates": [] });
        assert_alone(&page(&asked(), &made).finish(), &["nobody", "No worker suits."]);
    }
}
