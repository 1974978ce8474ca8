//! LoRA adapters: against PEFT on small random models (`tests/goldens/adapters`), in the whole engine, and what is refused.
//!
//! f32: within 1e-4 of PEFT's f32 logprobs, and the same best token everywhere. bf16, every CPU path: no further from its f32 than 1.5 times its
//! own bf16 run is, in mean and in maximum. That batches and cuts do not matter is in `serving.rs`.

use crate::common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::weights::{Adapted, Golden, Tensor, adapter_files, tensor};
use common::{argmax, cpu_paths, devices, load, log_softmax, logits_of, logits_with, reference, repository};
use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::Model;
use penstock_engine::{Drawing, Engine, EngineConfig, Forward, PageSink, Prefill};
use penstock_kernels::{ADAPTERS_MAX, AdapterSlot, Device, Limits};
use penstock_proto::WorkId;
use penstock_proto::frames::{ChoiceStart, Generate, Pooling, Sampling};
use penstock_proto::transfer::First;
use serde_json::{Value, json};

const FIRST: AdapterSlot = AdapterSlot(0);

/// Mean and maximum of |Δ logprob| from PEFT's f32, and positions with another best token.
fn distance(case: &Adapted, logits: &[Vec<f32>]) -> (f64, f64, Vec<usize>) {
    let golden = &case.golden;
    let mut errors = Vec::new();
    for (i, &position) in golden.positions.iter().enumerate() {
        let logprobs = log_softmax(&logits[position]);
        let pairs = golden.tokens_at(i).into_iter().zip(&golden.logprobs[i]);
        errors.extend(pairs.map(|(token, want)| (logprobs[token] - want).abs()));
    }
    let wrong = (0..golden.tokens.len()).filter(|&p| argmax(&logits[p]) != golden.argmax[p]).collect();
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    (mean, errors.iter().copied().fold(0.0, f64::max), wrong)
}

/// Model of a case with its adapter.
fn loaded(case: &Adapted, make: &dyn Fn(Limits) -> Box<dyn Device>) -> Model {
    let mut model = load(&case.golden.checkpoint(), make, 8, case.golden.tokens.len());
    model.add_adapter(FIRST, &case.adapter()).expect("every device here has adapters");
    model
}

#[test]
fn f32_agrees_with_peft() {
    let cases = Adapted::all();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let (name, tokens) = (&case.golden.case, &case.golden.tokens);
        let mut model = loaded(&case, &reference);
        let (mean, max, wrong) = distance(&case, &logits_with(&mut model, Some(FIRST), tokens, tokens.len()));
        println!("{name}: f32 mean {mean:.1e} max {max:.1e}");
        assert!(max < 1e-4, "{name}: {max:e}");
        assert!(wrong.is_empty(), "{name}: other tokens at {wrong:?}");
        // The adapter is felt: without it the text is another.
        let (_, max, wrong) = distance(&case, &logits_of(&mut model, tokens, tokens.len()));
        assert!(max > 1.0 && wrong.len() > 10, "{name}: {max}, {wrong:?}");
    }
}

#[test]
fn bf16_is_as_close_as_pefts_own() {
    for case in Adapted::all() {
        for (path, make) in cpu_paths() {
            let (name, tokens, want) = (&case.golden.case, &case.golden.tokens, &case.golden.bf16);
            let mut model = loaded(&case, &*make);
            let (mean, max, _) = distance(&case, &logits_with(&mut model, Some(FIRST), tokens, 50));
            println!("{name}, {path}: mean {:.2} max {:.2} of PEFT's own", mean / want.mean, max / want.max);
            assert!(mean <= 1.5 * want.mean, "{name}, {path}: mean {mean:.4}, PEFT {:.4}", want.mean);
            assert!(max <= 1.5 * want.max, "{name}, {path}: maximum {max:.4}, PEFT {:.4}", want.max);
        }
    }
}

#[test]
fn a_folder_that_peft_wrote() {
    #[derive(serde::Deserialize)]
    struct Expected {
        tokens: Vec<u32>,
        logprobs: Vec<f64>,
    }
    let folder = repository("tests/goldens/saved-adapter");
    let text = std::fs::read(folder.join("expected.json")).expect("the logprobs");
    let Expected { tokens, logprobs } = serde_json::from_slice(&text).expect("the logprobs");
    let checkpoint = Checkpoint::open(&repository("tests/goldens/saved")).expect("the folder opens");
    let adapter = Adapter::open(&folder, checkpoint.config()).expect("the adapter opens");
    assert_eq!(adapter.rank(), 2);
    // 14 projections of 48 × 48 or so, of rank 2 and padded to 4, in two bytes.
    assert!((10_000..20_000).contains(&adapter.bytes()), "{}", adapter.bytes());
    let mut model = load(&checkpoint, &reference, 4, 64);
    model.add_adapter(FIRST, &adapter).expect("the adapter loads");
    let logits = logits_with(&mut model, Some(FIRST), &tokens, 64);
    let got = log_softmax(&logits[tokens.len() - 1]);
    for (token, (got, want)) in got.iter().zip(&logprobs).enumerate() {
        assert!((got - want).abs() < 1e-4, "token {token}: {got} {want}");
    }
}

#[test]
fn the_name_is_that_of_the_content() {
    let case = Adapted::all().remove(0);
    let checkpoint = case.golden.checkpoint();
    let id = |change: &dyn Fn(&mut Value, &mut Vec<Tensor>)| {
        let (mut config, mut tensors) = (case.adapter_config.clone(), case.stored());
        change(&mut config, &mut tensors);
        Adapter::from_buffers(adapter_files(&config, &tensors), checkpoint.config()).expect("it fits").id()
    };
    let plain = id(&|_, _| ());
    assert_eq!(plain, case.adapter().id());
    assert_eq!(id(&|_, tensors| tensors.reverse()), plain, "the order of the file");
    assert_eq!(id(&|config, _| config["base_model_name_or_path"] = json!("elsewhere")), plain);
    let named = |name: &str| name.replace(".weight", ".default.weight");
    assert_eq!(id(&|_, all| all.iter_mut().for_each(|t| t.name = named(&t.name))), plain, "as PEFT has them in memory");
    assert_ne!(id(&|config, _| config["lora_alpha"] = json!(15)), plain);
    assert_ne!(id(&|config, _| config["use_rslora"] = json!(true)), plain);
    assert_ne!(id(&|_, tensors| tensors[3].bytes[2] ^= 1), plain);
    assert_ne!(id(&|_, tensors| drop(tensors.drain(..2))), plain);
}

/// Message of the refusal of the first case's adapter, changed.
fn refusal(model: &Golden, change: impl FnOnce(&mut Value, &mut Vec<Tensor>)) -> String {
    let case = Adapted::all().remove(0);
    let (mut config, mut tensors) = (case.adapter_config.clone(), case.stored());
    change(&mut config, &mut tensors);
    let adapter = Adapter::from_buffers(adapter_files(&config, &tensors), model.checkpoint().config());
    adapter.expect_err("it is refused").to_string()
}

#[test]
fn settings_beyond_low_rank_additions_are_refused_by_name() {
    let model = Adapted::all().remove(0).golden;
    let check = |field: &str, value: Value, want: &str| {
        let error = refusal(&model, |config, _| config[field] = value);
        assert_eq!(error, format!("adapter_config.json: {field}{want}"));
    };
    check("peft_type", json!("IA3"), ": is \"IA3\"; only LORA is served");
    check("peft_type", json!(null), ": is missing");
    check("r", json!(512), ": is 512, needs an integer from 1 to 256");
    check("lora_alpha", json!("16"), ": is \"16\", needs a number from -1000000 to 1000000");
    check("bias", json!("all"), ": is \"all\"; adapters that change biases are not served");
    let dora = ": weights are normalised (DoRA), which is not served (train the adapter without it)";
    check("use_dora", json!(true), dora);
    let transposed = ": matrices are stored transposed, as no served model has them (train the adapter without it)";
    check("fan_in_fan_out", json!(true), transposed);
    let whole = ": whole modules are stored beside the low-rank matrices, which is not served";
    check("modules_to_save", json!(["lm_head"]), whole);
    let later = ": the adapter begins at some tokens of a prompt (aLoRA), which is not served";
    check("alora_invocation_tokens", json!([1, 2]), later);
    let changed = ": is \"pissa_niter_16\": the adapter is for a changed copy of the model \
                   (save it with path_initial_model_for_weight_conversion, which makes it one for the plain model)";
    check("init_lora_weights", json!("pissa_niter_16"), changed);
    let regex = ".layers.\\d.mlp: is a regular expression; only names of modules are read (name each module with its own value)";
    check("rank_pattern", json!({"layers.\\d.mlp": 4}), regex);
    let twice = ".layers.0.mlp.gate_proj: also names model.layers.0.mlp.gate_proj, with another value than \
                 ^model.layers.0.mlp.gate_proj: which of them counts is not defined";
    check("alpha_pattern", json!({"layers.0.mlp.gate_proj": 4, "^model.layers.0.mlp.gate_proj": 5}), twice);
}

#[test]
fn tensors_that_would_be_passed_over_or_do_not_fit_are_refused_by_name() {
    let model = Adapted::all().remove(0).golden;
    let served = "(served are adapters of the projections of attention and of the MLP: q, k, v, o, gate, up and down)"
        .to_owned();
    let check = |model: &Golden, name: &str, want: &str, change: &dyn Fn(&mut Vec<Tensor>)| {
        let error = refusal(model, |_, tensors| change(tensors));
        let want = want.replace("(served)", &served);
        assert_eq!(error, format!("adapter_model.safetensors: tensor base_model.model.{name}: {want}"));
    };
    let beside = |name: &str, want: &str| {
        check(&model, name, want, &|all| {
            all.push(tensor(1, "f32", &format!("base_model.model.{name}"), &[8, 96]));
        });
    };
    beside("lm_head.lora_A.weight", "changes the embedding or the head, which is not served (served)");
    beside("model.embed_tokens.lora_embedding_A", "changes the embedding or the head, which is not served (served)");
    let dora = "is of DoRA, which is not served (served)";
    beside("model.layers.0.self_attn.q_proj.lora_magnitude_vector", dora);
    let bias = "is a bias, which adapters may not change here (served)";
    beside("model.layers.0.self_attn.q_proj.bias", bias);
    let absent = "changes a matrix that the model does not have (served)";
    beside("model.layers.0.self_attn.qkv_proj.lora_A.weight", absent);
    beside("model.layers.00003.mlp.up_proj.lora_A.weight", "is no matrix of a LoRA adapter (served)");
    let other = "is of layer 3, the model has 3 (the adapter is for another model)";
    beside("model.layers.3.mlp.up_proj.lora_A.weight", other);
    let twice = "is there twice, under two names";
    beside("model.layers.2.mlp.up_proj.lora_A.default.weight", twice);
    let alone = "comes without the other matrix of its product";
    let first = "model.layers.0.self_attn.q_proj.lora_A.weight";
    check(&model, first, alone, &|all| all.retain(|t| !t.name.ends_with("0.self_attn.q_proj.lora_B.weight")));
    let shape = "has shape [8, 90], needs [8, 96] for this model and the rank in adapter_config.json";
    check(&model, first, shape, &|all| all[0] = tensor(1, "f32", &all[0].name, &[8, 90]));
    let rank = "has shape [7, 96], needs [8, 96] for this model and the rank in adapter_config.json";
    check(&model, first, rank, &|all| all[0] = tensor(1, "f32", &all[0].name, &[7, 96]));
    let other = "has type I8, needs F32, BF16 or F16";
    check(&model, first, other, &|all| {
        all[0].dtype = "I8";
        all[0].bytes.truncate(8 * 96);
    });
    let experts = "changes a mixture of experts, which is not served (served)";
    let mixture = Golden::named("qwen3moe-plain");
    check(&mixture, "model.layers.0.mlp.gate_proj.lora_A.weight", experts, &|all| {
        all.retain(|t| t.name.contains("0.mlp.gate"));
    });
    let latents = "changes attention over latents (MLA), which is not served (served)";
    check(&Golden::named("deepseek2-plain"), first, latents, &|_| ());
    let empty = refusal(&model, |_, tensors| tensors.clear());
    assert_eq!(empty, "adapter_model.safetensors: has no tensors");
}

#[test]
fn folders_without_the_files_of_an_adapter_say_what_is_missing() {
    let case = Adapted::all().remove(0);
    let checkpoint = case.golden.checkpoint();
    let refused = |files| Adapter::from_buffers(files, checkpoint.config()).expect_err("refused").to_string();
    let mut files = adapter_files(&case.adapter_config, &case.stored());
    let help = "(give the folder that save_pretrained of PEFT wrote)";
    assert_eq!(refused(files.drain(1..).collect()), format!("adapter_config.json: is not there {help}"));
    assert_eq!(refused(files.clone()), format!("adapter_model.safetensors: is not there {help}"));
    files.push(("adapter_model.bin".into(), b"PK".into()));
    assert_eq!(
        refused(files.clone()),
        "adapter_model.bin: is a pickle, which may run code and is not read (load the adapter with \
         PeftModel.from_pretrained and save it with save_pretrained, which writes adapter_model.safetensors)"
    );
    files.push(("adapter_model.safetensors".into(), vec![9; 40].into()));
    assert!(refused(files).starts_with("adapter_model.safetensors: header length"));
    let absent = Adapter::open(&repository("no/such/folder"), checkpoint.config());
    assert!(absent.expect_err("refused").to_string().contains("cannot be opened"));
}

fn engine(golden: &Golden, make: &dyn Fn(Limits) -> Box<dyn Device>, adapters: &[Adapter]) -> Engine {
    let mut engine = Engine::new(Box::new(load(&golden.checkpoint(), make, 32, 64)), &EngineConfig::default());
    adapters.iter().for_each(|adapter| engine.add_adapter(adapter).expect("it loads"));
    engine
}

#[test]
fn an_engine_holds_each_content_once_and_no_more_than_its_limit() {
    let golden = Golden::tiny(1);
    let adapters: Vec<Adapter> = (0..=ADAPTERS_MAX as u64).map(|seed| golden.adapter(seed, 1)).collect();
    let mut engine = engine(&golden, &reference, &adapters[..ADAPTERS_MAX]);
    engine.add_adapter(&adapters[5]).expect("it is there");
    let ids: Vec<_> = adapters[..ADAPTERS_MAX].iter().map(Adapter::id).collect();
    assert_eq!(engine.adapters(), ids);
    let error = engine.add_adapter(&adapters[ADAPTERS_MAX]).unwrap_err().to_string();
    assert_eq!(error, "another adapter is not available on this machine: all 64 adapter slots are in use");
    assert_eq!(engine.adapters(), ids);
}

/// A request for a vector of `tokens`.
fn pooled(number: u64, tokens: &[u32], adapter: Option<&Adapter>) -> Generate {
    let name = adapter.map(|adapter| adapter.id().to_bytes().to_vec()).unwrap_or_default();
    let choices = vec![ChoiceStart::default()];
    let (prompt, pooling) = (tokens.to_vec(), Pooling::Last as i32);
    Generate { request: number, prompt, choices, pooling, salt: name.clone(), adapter: name, ..Default::default() }
}

#[test]
fn vectors_with_adapters_are_the_same_alone_and_beside_others() {
    let golden = Golden::named("qwen3-tied");
    let adapters = [golden.adapter(1, 4), golden.adapter(2, 8)];
    let vectors = |engine: &mut Engine, requests: Vec<Generate>| {
        requests.into_iter().for_each(|request| engine.submit(request));
        let mut vectors = std::collections::BTreeMap::new();
        while engine.has_work() {
            for output in engine.step(&|| Duration::ZERO).outputs {
                vectors.insert(output.request, output.vector.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
            }
        }
        vectors.into_values().collect::<Vec<_>>()
    };
    for (path, make) in devices() {
        let tokens = &golden.tokens[..70];
        let requests = || {
            vec![pooled(0, tokens, None), pooled(1, tokens, Some(&adapters[0])), pooled(2, tokens, Some(&adapters[1]))]
        };
        let alone: Vec<_> =
            requests().into_iter().flat_map(|r| vectors(&mut engine(&golden, &*make, &adapters), vec![r])).collect();
        assert!(alone.len() == 3 && alone[0] != alone[1] && alone[1] != alone[2], "{path}");
        let mut both = engine(&golden, &*make, &adapters);
        assert_eq!(vectors(&mut both, requests()), alone, "{path}: beside each other");
        assert_eq!(vectors(&mut both, requests()), alone, "{path}: behind prefix hits of their own");
    }
}

/// Pages and first token that an engine computes for another.
#[derive(Default)]
struct Given {
    pages: Vec<Vec<u8>>,
    first: Option<First>,
}

/// Receiver of pages of a number of bytes.
#[derive(Clone)]
struct Received(Arc<Mutex<Given>>, usize);

impl PageSink for Received {
    fn has_room(&mut self) -> bool {
        true
    }
    fn page(&mut self, _: usize, _: usize, fill: &mut dyn FnMut(&mut [u8])) {
        let mut bytes = vec![0; self.1];
        fill(&mut bytes);
        self.0.lock().expect("unpoisoned").pages.push(bytes);
    }
    fn computed(&mut self, _: usize) {}
    fn first(&mut self, first: First) {
        self.0.lock().expect("unpoisoned").first = Some(first);
    }
    fn end(&mut self, _: bool) {}
}

#[test]
fn a_prompt_computed_for_another_worker_has_its_adapter() {
    let golden = Golden::named("qwen3-tied");
    let adapters = [golden.adapter(1, 4), golden.adapter(2, 8)];
    let (path, make) = cpu_paths().remove(0);
    let computed = |adapter: Option<&Adapter>| {
        let mut holder = engine(&golden, &*make, &adapters);
        let name = adapter.map(|adapter| adapter.id().to_bytes().to_vec()).unwrap_or_default();
        let sampling = Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 4,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Default::default()
        };
        let generate = Generate {
            request: 1,
            prompt: golden.tokens[..70].to_vec(),
            choices: vec![ChoiceStart::default()],
            sampling: Some(sampling.clone()),
            salt: name.clone(),
            adapter: name.clone(),
            ..Default::default()
        };
        let draw = Some(Drawing { sampling, choices: vec![0], ..Default::default() });
        let (prompt, salt) = (generate.prompt.clone(), name.clone());
        let prefill = Prefill { id: WorkId(5), prompt, salt, adapter: name, blocks: 2, draw, ..Default::default() };
        let received = Received(Arc::default(), holder.page_bytes());
        holder.prefill(prefill, Box::new(received.clone())).expect("taken");
        while holder.has_work() || holder.can_give() {
            holder.step(&|| Duration::ZERO);
            while holder.give() {}
        }
        let Given { mut pages, first } = std::mem::take(&mut *received.0.lock().expect("unpoisoned"));
        pages.sort();
        let first = first.expect("drawn").tokens[0].token.clone().expect("a token").id;
        // What the asker computes itself.
        let mut asker = engine(&golden, &*make, &adapters);
        let chain = asker.chain(&generate);
        asker.submit(generate);
        let mut said = Vec::new();
        while asker.has_work() {
            let outputs = asker.step(&|| Duration::ZERO).outputs;
            said.extend(outputs.into_iter().flat_map(|output| output.tokens).map(|token| token.id));
        }
        let mut own = Vec::new();
        assert!(chain.iter().all(|hash| asker.export(*hash, &mut own)), "{path}: {} blocks", chain.len());
        let mut own: Vec<Vec<u8>> = own.chunks_exact(asker.page_bytes()).map(<[u8]>::to_vec).collect();
        own.sort();
        assert!(pages == own, "{path}: other pages");
        assert_eq!(first, said[0], "{path}");
        pages
    };
    let all = [computed(None), computed(Some(&adapters[0])), computed(Some(&adapters[1]))];
    assert!(all[0] != all[1] && all[1] != all[2], "{path}");
}
