//! Cost of reading a vocabulary: `read FILE`, a tokenizer.json. Prints the median time of eleven reads by the reader of this crate, which a worker waits for before it is ready, and
//! by the library that tokenizes.

use penstock_vocabulary::TokenBytes;
use std::time::Instant;

fn main() {
    let path = std::env::args().nth(1).expect("a tokenizer.json");
    let json = std::fs::read(path).expect("a readable file");
    let count = TokenBytes::from_json(&json).expect("a vocabulary").count();
    println!("{count} tokens, {} bytes", json.len());
    println!("bytes of the tokens: {:.0} ms", median(|| drop(TokenBytes::from_json(&json).expect("a vocabulary"))));
    println!(
        "the whole tokenizer: {:.0} ms",
        median(|| drop(tokenizers::Tokenizer::from_bytes(&json).expect("a tokenizer")))
    );
}

/// Median of eleven times, in milliseconds.
fn median(work: impl Fn()) -> f64 {
    let mut times = [(); 11].map(|()| {
        let began = Instant::now();
        work();
        began.elapsed().as_secs_f64() * 1e3
    });
    times.sort_by(f64::total_cmp);
    times[5]
}
