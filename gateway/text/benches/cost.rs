//! Cost of text per request and per token, and of adversarial input: `cargo bench -p penstock-text`.
//!
//! Medians of 15 runs on one thread. The adversarial inputs are those on which careless tokenizers take quadratic
//! time.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use penstock_proto::frames::Token;
use penstock_text::{ChoiceDecoder, ChoiceOptions, TextFiles, TextModel};

fn median(mut run: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..15)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
    println!("load                    {:>10.2?}", median(|| drop(TextModel::from_dir(&dir).unwrap())));
    let tokenizer = std::fs::read(dir.join("tokenizer.json")).unwrap();
    // Without tokenizer_config.json no context length bounds the texts.
    let free = TextModel::load(&TextFiles { tokenizer_json: tokenizer.into(), ..TextFiles::default() }).unwrap();
    let model = Arc::new(TextModel::from_dir(&dir).unwrap());
    let story = "Once upon a time there was a brave fox named Mia. Mia lived in a forest. ";
    let prompt = story.repeat(120);
    let tokens = model.encode(&prompt, false).unwrap();
    let encode = median(|| drop(model.encode(&prompt, false).unwrap()));
    println!("encode {:>5} tokens     {encode:>10.2?}  {:.0} ns/token", tokens.len(), per(encode, tokens.len()));
    let stops: Vec<String> = (0..4).map(|n| format!("\n\nstop {n}")).collect();
    for (name, options) in [
        ("plain", ChoiceOptions::default()),
        ("4 stop strings", ChoiceOptions { stop: stops.clone(), ..ChoiceOptions::default() }),
        (
            "stops, reasoning, tools",
            ChoiceOptions { stop: stops, parse_reasoning: true, parse_tools: true, ..ChoiceOptions::default() },
        ),
    ] {
        let decode = median(|| {
            let mut decoder = ChoiceDecoder::new(model.clone(), options.clone());
            tokens.iter().for_each(|&id| drop(decoder.push(&Token { id, logprobs: None })));
        });
        println!("decode, {name:<24} {decode:>10.2?}  {:.0} ns/token", per(decode, tokens.len()));
    }
    for (name, text) in [
        ("one letter", "a".repeat(1 << 20)),
        ("blanks", " ".repeat(1 << 20)),
        ("blanks, then a letter", " ".repeat(1 << 20) + "a"),
        ("line breaks", "\n".repeat(1 << 20)),
        ("punctuation", "!".repeat(1 << 20)),
        ("combining marks", "e".to_owned() + &"\u{301}".repeat(1 << 19)),
        ("control tokens", "<|im_end|>".repeat((1 << 20) / 10)),
        ("prose", story.repeat((1 << 20) / story.len())),
    ] {
        let start = Instant::now();
        let count = free.encode_plain(&text).unwrap().len();
        println!("1 MiB of {name:<24} {:>10.2?}  {count} tokens", start.elapsed());
    }
}

fn per(time: Duration, count: usize) -> f64 {
    time.as_nanos() as f64 / count as f64
}
