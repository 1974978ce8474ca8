//! Cost of plugins: `cargo run --release -p penstock-builtin --example cost`.
//!
//! The figures are nanoseconds of one core, without the gateway around: the plugins' own hooks, and the further cost of
//! a passed-on answer whose events a plugin sees (decoding each chunk, and encoding it again).

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use bytes::BytesMut;
use penstock_dialects::openai;
use penstock_plugins::testing::{FakeHost, build, now, request};
use penstock_plugins::{Hooks, Kind, Plugin};
use penstock_types::{AnswerMeta, Bounds, ChatEvent, ProviderCodec, Surface};
use serde_json::{Value, json};

const CHUNKS: usize = 200_000;
const REQUESTS: usize = 50_000;

fn kind(name: &str) -> &'static dyn Kind {
    *penstock_builtin::KINDS.iter().find(|kind| kind.name() == name).expect("a plugin")
}

fn plugin(name: &str, settings: &Value) -> Arc<dyn Plugin> {
    build(kind(name), settings).expect("valid settings")
}

fn said(what: &str, count: usize, began: Instant) {
    println!("{:>8.0} ns  {what}", began.elapsed().as_nanos() as f64 / count as f64);
}

fn body() -> Value {
    let text =
        "Write to ann.lee@example.com that the parcel of order 7741 has been sent and should be there by Monday.";
    json!({ "model": "m", "stream": true, "messages": [{ "role": "user", "content": text }] })
}

fn requests(what: &str, plugins: &[Arc<dyn Plugin>]) {
    let host: Arc<FakeHost> = Arc::default();
    let mut contexts: Vec<_> = (0..1000).map(|_| request(Surface::Chat, &body(), host.clone())).collect();
    let began = Instant::now();
    for round in 0..REQUESTS {
        let context = &mut contexts[round % 1000];
        for plugin in plugins {
            let mut hooks = plugin.begin();
            black_box(now(hooks.on_request(context)).expect("no failure"));
        }
        context.tags.clear();
        context.send.clear();
    }
    said(what, REQUESTS, began);
}

fn chunk(at: usize) -> ChatEvent {
    let text = [" the", " parcel", " of", " order", " [EMAIL_1]", " is", " there", "."][at % 8].to_owned();
    ChatEvent::Text { choice: 0, text, logprobs: Vec::new(), tokens: Vec::new() }
}

fn hooks(plugin: &Arc<dyn Plugin>) -> Box<dyn Hooks> {
    let mut hooks = plugin.begin();
    now(hooks.on_request(&mut request(Surface::Chat, &body(), Arc::new(FakeHost::default())))).expect("no failure");
    hooks
}

fn chunks(what: &str, plugin: &Arc<dyn Plugin>) {
    let mut hooks = hooks(plugin);
    let mut all: Vec<_> = (0..CHUNKS).map(|at| vec![chunk(at)]).collect();
    let began = Instant::now();
    for events in &mut all {
        black_box(hooks.on_event(events, false).expect("no failure"));
    }
    said(what, CHUNKS, began);
}

fn read_and_said_again() {
    let decoded = openai::chat(body().to_string().as_bytes(), &Bounds::default()).expect("a request");
    let mut decoder = openai::ChatCodec::default().decoder(&decoded.request);
    let mut encoder = decoded.form.stream(&AnswerMeta::new("x".into(), 1));
    let line =
        b"data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":\
        [{\"index\":0,\"delta\":{\"content\":\" parcel\"},\"finish_reason\":null}]}\n\n";
    let began = Instant::now();
    for _ in 0..CHUNKS {
        let (mut events, mut out) = (Vec::new(), BytesMut::new());
        decoder.push(line, &mut events).expect("a chunk");
        events.iter().for_each(|event| encoder.event(event, &mut out));
        black_box(out.freeze());
    }
    said("a chunk read and said again, as for anybody who sees events", CHUNKS, began);
}

fn main() {
    let headers = plugin("headers", &json!({ "request": { "set": { "x-team": "search" } } }));
    let tags = plugin("tags", &json!({ "set": { "env": "prod" }, "headers": { "team": "x-team" } }));
    let pii = plugin("pii", &json!({}));
    let words: Vec<String> = (0..1000).map(|at| format!("forbidden{at}")).collect();
    let guard = plugin("guard", &json!({ "rules": [{ "words": words }] }));
    let pattern = plugin("guard", &json!({ "rules": [{ "pattern": r"(?i)\bproject [a-z]+\b" }] }));
    println!("on_request, per request of 170 bytes:");
    requests("headers and tags", &[headers, tags]);
    requests("pii, all kinds", std::slice::from_ref(&pii));
    requests("guard, 1,000 words", std::slice::from_ref(&guard));
    println!("on_event, per chunk of a stream:");
    read_and_said_again();
    chunks("pii", &pii);
    chunks("guard, 1,000 words", &guard);
    chunks("guard, one pattern", &pattern);
}
