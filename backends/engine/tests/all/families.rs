//! Configs of decoders: what each family reads into them, what configs leave out, and what is refused by field.

use crate::common;

use common::reference;
use common::weights::{Golden, Tensor, write_safetensors};
use penstock_engine::Forward;
use penstock_engine::checkpoint::{Checkpoint, ModelConfig, RopeScaling};
use penstock_kernels::{Feature, Span, StepBatch};
use serde_json::{Value, json};

/// Opens the checkpoint of `case` with some fields changed; a null leaves the field out.
fn open(case: &str, fields: &Value) -> Result<Checkpoint, String> {
    let mut golden = Golden::named(case);
    let config = golden.config.as_object_mut().expect("an object");
    for (name, value) in fields.as_object().expect("an object") {
        match value {
            Value::Null => drop(config.remove(name)),
            value => drop(config.insert(name.clone(), value.clone())),
        }
    }
    Checkpoint::from_buffers(golden.files()).map_err(|error| error.to_string())
}

fn changed(case: &str, fields: &Value) -> Result<ModelConfig, String> {
    open(case, fields).map(|checkpoint| checkpoint.config().clone())
}

fn config(case: &str) -> ModelConfig {
    changed(case, &json!({})).expect("it opens")
}

#[track_caller]
fn refused(case: &str, fields: Value, reason: &str) {
    let error = changed(case, &fields).expect_err(reason);
    assert!(error.contains(reason), "{case}, {fields}: {error}; expected {reason}");
}

#[test]
fn tokens_of_any_decoder_may_see_later_ones() {
    let both = json!({"is_causal": false});
    for case in
        ["llama-plain", "mistral-window", "qwen2-tied", "qwen3-mixed-windows", "gemma2-plain"]
    {
        let (plain, seeing) = (config(case), changed(case, &both).expect("it opens"));
        assert!(plain.causal && !seeing.causal && seeing.is_whole() && seeing.headless, "{case}");
        let wider: Vec<_> = plain.windows.iter().map(|window| window.map(|tokens| tokens + 1)).collect();
        assert_eq!(seeing.windows, wider, "{case}: as many tokens on each side, and the token itself");
        assert!(seeing.features().any(|feature| feature == Feature::Encoders), "{case}: GPUs refuse it by name");
        assert_eq!(changed(case, &json!({"is_causal": true})), Ok(plain), "{case}");
        refused(case, json!({"use_bidirectional_attention": true}), "is true, which this architecture does not have");
        let said_twice = json!({"is_causal": false, "use_bidirectional_attention": true});
        assert_eq!(changed(case, &said_twice), Ok(seeing), "{case}");
    }
    refused("llama-plain", json!({"is_causal": 0}), "is_causal: is 0, needs true or false");
    refused("deepseek2-plain", both.clone(), "is_causal: is false");
    refused("gptoss-plain", both, "is_causal: is false");
}

#[test]
fn decoders_that_were_saved_alone_make_vectors() {
    let cases =
        [("llama-plain", "Llama"), ("mistral-window", "Mistral"), ("qwen2-tied", "Qwen2"), ("qwen3-tied", "Qwen3")];
    for (case, name) in cases {
        let mut golden = Golden::named(case);
        golden.config["architectures"] = json!([format!("{name}Model")]);
        let mut tensors: Vec<Tensor> = golden.stored();
        tensors.retain(|tensor| tensor.name != "lm_head.weight");
        tensors.iter_mut().for_each(|tensor| tensor.name = tensor.name.replacen("model.", "", 1));
        let files = vec![
            ("config.json".into(), serde_json::to_vec(&golden.config).expect("json").into()),
            ("model.safetensors".into(), write_safetensors(&tensors).into()),
        ];
        let checkpoint = Checkpoint::from_buffers(files).unwrap_or_else(|error| panic!("{case}: {error}"));
        let want = ModelConfig { headless: true, tie_word_embeddings: false, ..config(case) };
        assert_eq!(checkpoint.config(), &want, "{case}");
        assert!(checkpoint.ignored().is_empty(), "{case}");
        let tokens = &golden.tokens[..7];
        let spans = [Span { rows: 0..7, context: 7, block_table: &[0], adapter: None }];
        let batch = StepBatch { tokens, spans: &spans, sampled: &[6], ..Default::default() };
        let state = |checkpoint: &Checkpoint| {
            let mut out = Vec::new();
            common::load(checkpoint, &reference, 8, 8).states(&batch, None, &mut out, false).expect("a state");
            out
        };
        assert_eq!(state(&checkpoint), state(&Golden::named(case).checkpoint()), "{case}");
        let error = common::load(&checkpoint, &reference, 8, 8).forward(&batch, None).expect_err("no head").to_string();
        assert!(error.contains("has no lm_head.weight"), "{case}: {error}");
    }
}

#[test]
fn a_factor_on_yarns_scale_is_one_on_what_is_inferred() {
    let of = |more: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        let more = more.as_object().expect("an object").clone();
        scaling.as_object_mut().expect("an object").extend(more);
        match changed("qwen3-tied", &json!({"rope_scaling": scaling})).expect("it opens").rope.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            other => panic!("{other:?}"),
        }
    };
    let inferred = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(of(json!({})), inferred);
    assert_eq!(of(json!({"attn_factor": 0.5})), 0.5 * inferred);
    // The value of DeepSeek-R1-0528-Qwen3-8B takes the scale back.
    assert!((of(json!({"attn_factor": 0.878_248_856_286_941_9})) - 1.0).abs() < 1e-12);
    assert_eq!(of(json!({"attn_factor": 0.5, "attention_factor": 1.25})), 1.25, "a scale that is given is whole");
    let text = json!({"rope_type": "yarn", "factor": 4.0, "attn_factor": "1"});
    refused("qwen3-tied", json!({"rope_scaling": text}), "rope_scaling.attn_factor: is \"1\", needs a number");
}
