//! Repeats one piece of work, so that its instructions can be counted; the count does not depend on other load of the
//! machine:
//!
//! ```text
//! cargo build --release -p penstock-dialects --example peek
//! for n in 0 1000; do valgrind --tool=callgrind --callgrind-out-file=/dev/null target/release/examples/peek token $n; done
//! ```
//!
//! The difference of the two counts, divided by the repeats, is the cost of one pass.

use std::hint::black_box;

use bytes::BytesMut;
use penstock_dialects::openai::{ChatEncoder, ChatMeta, decode_chat};
use penstock_types::Bounds;
use penstock_types::{ChatEvent, TokenLogprob, TokenPlace};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let work = arguments.next().unwrap_or_default();
    let repeats = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(1_000);
    match work.as_str() {
        "token" => encode(repeats, false),
        "token-logprobs" => encode(repeats, true),
        "short" => decode(repeats, &body("Hello, who are you?")),
        "200kB" => decode(repeats, &body(&"Plain words without any escapes go here. ".repeat(5_000))),
        "200kB-lines" => decode(repeats, &body(&"A line of forty bytes ends in escape.\\n".repeat(5_000))),
        "turns" => decode(repeats, &turns(1_000)),
        other => {
            eprintln!("{other}: give one of token, token-logprobs, short, 200kB, 200kB-lines, turns, and a count");
            std::process::exit(2);
        }
    }
}

fn body(content: &str) -> String {
    format!(
        r#"{{"model":"demo","stream":true,"temperature":0.7,"messages":[{{"role":"user","content":"{content}"}}]}}"#
    )
}

fn turns(count: usize) -> String {
    let turn = r#"{"role":"user","content":"What is next?"},{"role":"assistant","content":"This is."}"#;
    format!(r#"{{"model":"demo","messages":[{}]}}"#, vec![turn; count / 2].join(","))
}

fn decode(repeats: usize, body: &str) {
    let bounds = Bounds::default();
    for _ in 0..repeats {
        black_box(decode_chat(black_box(body.as_bytes()), &bounds)).expect("a good body");
    }
}

fn encode(repeats: usize, logprobs: bool) {
    let request = decode_chat(body("x").as_bytes(), &Bounds::default()).expect("a good body");
    let mut meta = ChatMeta::new(&request, "chatcmpl-0123456789abcdef".to_owned(), 1_750_000_000, None);
    meta.logprobs = logprobs;
    let mut encoder = ChatEncoder::new(&meta);
    let top = (0..5).map(|token| (token, b" word".to_vec(), -1.25 * token as f32)).collect();
    let token =
        TokenLogprob { token: 7, bytes: b" word".to_vec(), logprob: Some(-0.123_456), top, place: TokenPlace::Text };
    let logprobs = if logprobs { vec![token] } else { Vec::new() };
    let event = ChatEvent::Text { choice: 0, text: " word".to_owned(), logprobs, tokens: Vec::new() };
    let mut out = BytesMut::with_capacity(4_096);
    for _ in 0..repeats {
        encoder.event(black_box(&event), &mut out);
        black_box(&out);
        out.clear();
    }
}
