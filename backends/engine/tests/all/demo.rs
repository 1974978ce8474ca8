//! The demo model against its goldens: eight prompts, 32 greedy tokens each, and the five best logprobs of every step, as
//! Hugging Face transformers computed them in f32.

use crate::common;

use common::{argmax, cpu_paths, load, log_softmax, logits_of, reference, repository};
use penstock_engine::Forward;
use penstock_engine::checkpoint::Checkpoint;
use serde::Deserialize;

#[derive(Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    top5: Vec<(usize, f64)>,
}

fn goldens() -> Goldens {
    let text = std::fs::read_to_string(repository("models/penstock-demo/goldens.json")).expect("goldens");
    serde_json::from_str(&text).expect("goldens parse")
}

#[test]
fn f32_gives_the_tokens_and_logprobs_of_transformers() {
    let checkpoint = Checkpoint::open(&repository("models/penstock-demo")).expect("the demo model opens");
    let mut model = load(&checkpoint, &reference, 16, 512);
    let goldens = goldens();
    assert_eq!(goldens.cases.len(), 8);
    for (number, case) in goldens.cases.iter().enumerate() {
        let tokens = [&case.prompt_ids[..], &case.output_ids[..31]].concat();
        let logits = logits_of(&mut model, &tokens, 512);
        for (i, (row, step)) in logits[case.prompt_ids.len() - 1..].iter().zip(&case.steps).enumerate() {
            assert_eq!(argmax(row), case.output_ids[i], "case {number}, token {i}");
            let logprobs = log_softmax(row);
            for &(token, logprob) in &step.top5 {
                let error = (logprobs[token] - logprob).abs();
                assert!(error < 1e-3, "case {number}, token {i}: logprob of {token} is off by {error:e}");
            }
        }
    }
}

#[test]
fn bf16_gives_the_tokens_where_the_choice_is_clear() {
    let checkpoint = Checkpoint::open(&repository("models/penstock-demo")).expect("the demo model opens");
    for (path, make) in cpu_paths() {
        let mut model = load(&checkpoint, &*make, 16, 512);
        let (mut clear, mut worst) = (0, 0.0_f64);
        for (number, case) in goldens().cases.iter().enumerate() {
            let tokens = [&case.prompt_ids[..], &case.output_ids[..31]].concat();
            let logits = logits_of(&mut model, &tokens, 512);
            for (i, (row, step)) in logits[case.prompt_ids.len() - 1..].iter().zip(&case.steps).enumerate() {
                let logprobs = log_softmax(row);
                // Likely tokens only; the far tail of a confident model moves more.
                let likely = step.top5.iter().filter(|(_, logprob)| *logprob > -5.0);
                worst = likely.map(|&(token, want)| (logprobs[token] - want).abs()).fold(worst, f64::max);
                if step.top5[0].1 - step.top5[1].1 > 0.5 {
                    clear += 1;
                    assert_eq!(argmax(row), case.output_ids[i], "{path}: case {number}, token {i}");
                }
            }
        }
        println!("{path}: {clear} of 256 tokens with a clear choice, likely logprobs off by at most {worst:.3}");
        assert!(clear > 200 && worst < 0.5, "{path}: {clear} clear, {worst}");
    }
}

#[test]
fn the_embedded_bytes_are_the_same_checkpoint() {
    let folder = repository("models/penstock-demo");
    let names = ["config.json", "generation_config.json", "model.safetensors"];
    let files = names.map(|name| (name.to_owned(), std::fs::read(folder.join(name)).expect("a file").into()));
    let embedded = Checkpoint::from_buffers(files.into()).expect("the demo model opens");
    let opened = Checkpoint::open(&folder).expect("the demo model opens");
    assert_eq!(embedded.model_hash(), opened.model_hash());
    assert_eq!(opened.architecture(), "Qwen3ForCausalLM");
    assert_eq!(opened.eos_token_ids(), [4087, 4089]);
    assert_eq!(opened.generation().do_sample, Some(false));
    assert!(opened.ignored().is_empty());
    assert_eq!(opened.weight_format(), "bf16");
    assert_eq!(opened.rounded_bytes(penstock_kernels::DType::Bf16), 0);
    let model = load(&opened, &reference, 4, 8);
    assert_eq!((model.geometry().context_tokens, model.geometry().vocab_size), (128, 4096));
}
