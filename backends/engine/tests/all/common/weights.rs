//! The weights of the goldens, derived from a seed exactly as `tests/goldens/make_goldens.py` derives them, and written as
//! safetensors.

use std::borrow::Cow;
use std::collections::BTreeMap;

use half::{bf16, f16};
use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::Checkpoint;
use serde::Deserialize;
use serde_json::json;

/// One golden case, a file of `tests/goldens/models`: model, tokens, and the results of transformers.
#[derive(Deserialize)]
pub(crate) struct Golden {
    pub(crate) case: String,
    pub(crate) config: serde_json::Value,
    pub(crate) seed: u64,
    pub(crate) dtype: String,
    pub(crate) shards: usize,
    /// Served context, where the rotations depend on it.
    pub(crate) context: Option<usize>,
    /// Names and shapes of the tensors, as in transformers.
    pub(crate) tensors: Vec<(String, Vec<usize>)>,
    pub(crate) tokens: Vec<u32>,
    /// Number of tokens before the greedy ones.
    pub(crate) prompt: usize,
    /// Best next token at each position, `[tokens]`.
    pub(crate) argmax: Vec<u32>,
    /// Positions of `tokens` at which `top` and `logprobs` are given.
    pub(crate) positions: Vec<usize>,
    /// Best tokens, best first, `[positions][8]`.
    pub(crate) top: Vec<Vec<usize>>,
    /// Logprobs of the tokens in `top`, then of eight tokens spread over the vocabulary, `[positions][16]`.
    pub(crate) logprobs: Vec<Vec<f64>>,
    pub(crate) bf16: Yardstick,
    /// Experts that each token chooses, ascending, in each layer that has experts: `[layers][tokens][chosen]`.
    #[serde(default)]
    pub(crate) routes: Vec<Vec<Vec<usize>>>,
    /// Share of the tokens that choose the same experts in transformers' bf16 run; `bf16` is over those.
    #[serde(default)]
    pub(crate) routes_alike: f64,
    /// Types of the tensors of quantized matrices, by name.
    #[serde(default)]
    pub(crate) stored: BTreeMap<String, String>,
    /// Integers of tensors that are not random, by name.
    #[serde(default)]
    pub(crate) values: BTreeMap<String, Vec<i64>>,
    /// Size of the scales of quantized matrices.
    #[serde(default)]
    pub(crate) scale: f32,
}

/// Distance of transformers' bf16 run from its f32 run.
#[derive(Deserialize)]
pub(crate) struct Yardstick {
    pub(crate) mean: f64,
    pub(crate) max: f64,
}

pub(crate) type Files = Vec<(String, Cow<'static, [u8]>)>;

impl Golden {
    /// A model of a few hundred bytes that has no goldens, for damage tests.
    pub(crate) fn tiny(shards: usize) -> Golden {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 5, "hidden_size": 4, "intermediate_size": 3,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
            "rope_scaling": {"type": "yarn", "factor": 2.0}, "eos_token_id": [1, 2],
        });
        let layer = [
            ("input_layernorm", vec![4]),
            ("self_attn.q_proj", vec![4, 4]),
            ("self_attn.k_proj", vec![2, 4]),
            ("self_attn.v_proj", vec![2, 4]),
            ("self_attn.o_proj", vec![4, 4]),
            ("post_attention_layernorm", vec![4]),
            ("mlp.gate_proj", vec![3, 4]),
            ("mlp.up_proj", vec![3, 4]),
            ("mlp.down_proj", vec![4, 3]),
        ];
        let layer = layer.map(|(name, shape)| (format!("model.layers.0.{name}.weight"), shape));
        let outer = [("model.embed_tokens", vec![5, 4]), ("model.norm", vec![4]), ("lm_head", vec![5, 4])];
        let outer = outer.map(|(name, shape)| (format!("{name}.weight"), shape));
        Golden {
            case: "tiny".into(),
            config,
            seed: 1,
            dtype: "bf16".into(),
            shards,
            context: None,
            tensors: layer.into_iter().chain(outer).collect(),
            tokens: Vec::new(),
            prompt: 0,
            argmax: Vec::new(),
            positions: Vec::new(),
            top: Vec::new(),
            logprobs: Vec::new(),
            bf16: Yardstick { mean: 0.0, max: 0.0 },
            routes: Vec::new(),
            routes_alike: 0.0,
            stored: BTreeMap::new(),
            values: BTreeMap::new(),
            scale: 0.0,
        }
    }

    /// A small model without goldens whose matrices are stored as GPTQ, AWQ, fp8 or compressed-tensors, for damage tests.
    pub(crate) fn tiny_quantized(form: usize) -> Golden {
        let group = |format: &str, weights: serde_json::Value| json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}});
        let (config, [codes, scales, zeros, order]) = [
            (
                json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true}),
                [".qweight", ".scales", ".qzeros", ".g_idx"],
            ),
            (json!({"quant_method": "awq", "bits": 4, "group_size": 32}), [".qweight", ".scales", ".qzeros", ""]),
            (json!({"quant_method": "fp8", "weight_block_size": [16, 64]}), [".weight", ".weight_scale_inv", "", ""]),
            (
                group(
                    "pack-quantized",
                    json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": false}),
                ),
                [".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx"],
            ),
        ][form % 4]
            .clone();
        let mut golden = Golden { scale: 0.01, ..Golden::tiny(1) };
        golden.config["quantization_config"] = config;
        golden.config["hidden_size"] = json!(64);
        golden.config["intermediate_size"] = json!(32);
        let mut tensors = Vec::new();
        for (name, shape) in std::mem::take(&mut golden.tensors) {
            let wide = |n: usize| if n == 3 { 32 } else { n * 16 };
            let Some(module) = name.strip_suffix("_proj.weight") else {
                let last = shape.len() - 1;
                let shape = shape.iter().enumerate().map(|(i, &n)| if i == last { wide(n) } else { n }).collect();
                tensors.push((name, shape));
                continue;
            };
            let (rows, columns) = (wide(shape[0]), wide(shape[1]));
            let groups = columns / 32;
            let shapes = match form % 4 {
                0 => [vec![columns / 8, rows], vec![groups, rows], vec![groups, rows / 8], vec![columns]],
                1 => [vec![columns, rows / 8], vec![groups, rows], vec![groups, rows / 8], vec![]],
                2 => [vec![rows, columns], vec![rows / 16, columns.div_ceil(64)], vec![], vec![]],
                _ => [vec![rows, columns / 8], vec![rows, groups], vec![rows / 8, groups], vec![columns]],
            };
            let codes_type = if form % 4 == 2 { "F8_E4M3" } else { "I32" };
            let types = [codes_type, "F32", "I32", "I32"];
            let kinds = [codes, scales, zeros, order].into_iter().zip(shapes).zip(types);
            for ((kind, shape), dtype) in kinds.filter(|((kind, _), _)| !kind.is_empty()) {
                let name = format!("{module}_proj{kind}");
                if kind.ends_with("g_idx") {
                    golden.values.insert(name.clone(), (0..columns as i64).rev().map(|i| i / 32).collect());
                }
                golden.stored.insert(name.clone(), dtype.to_owned());
                tensors.push((name, shape));
            }
            if form % 4 == 3 {
                let name = format!("{module}_proj.weight_shape");
                golden.values.insert(name.clone(), vec![rows as i64, columns as i64]);
                golden.stored.insert(name.clone(), "I64".to_owned());
                tensors.push((name, vec![2]));
            }
        }
        golden.tensors = tensors;
        golden
    }

    /// All cases, in order of names.
    pub(crate) fn all() -> Vec<Golden> {
        read_all("tests/goldens/models")
    }

    /// Case with the given name.
    pub(crate) fn named(name: &str) -> Golden {
        Golden::all().into_iter().find(|golden| golden.case == name).expect("a golden of this name")
    }

    /// Tokens whose logprobs are given at `positions[i]`, in the order of `logprobs[i]`.
    pub(crate) fn tokens_at(&self, i: usize) -> Vec<usize> {
        let vocab = self.config["vocab_size"].as_u64().expect("vocab_size") as usize;
        let spread = (0..8).map(|j| (self.positions[i] * 7 + j * vocab / 8) % vocab);
        self.top[i].iter().copied().chain(spread).collect()
    }

    /// The checkpoint as files: config, weights, and an index if there are several shards.
    pub(crate) fn files(&self) -> Files {
        let config = serde_json::to_vec(&self.config).expect("json");
        let mut files: Files = vec![("config.json".into(), config.into())];
        let tensors = self.stored();
        if self.shards == 1 {
            files.push(("model.safetensors".into(), write_safetensors(&tensors).into()));
            return files;
        }
        let mut map = serde_json::Map::new();
        for (i, part) in tensors.chunks(tensors.len().div_ceil(self.shards)).enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, self.shards);
            map.extend(part.iter().map(|tensor| (tensor.name.clone(), json!(name))));
            files.push((name, write_safetensors(part).into()));
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
        files.push(("model.safetensors.index.json".into(), serde_json::to_vec(&index).expect("json").into()));
        files
    }

    /// All tensors with their data.
    pub(crate) fn stored(&self) -> Vec<Tensor> {
        self.tensors.iter().map(|(name, shape)| self.tensor(name, shape)).collect()
    }

    pub(crate) fn checkpoint(&self) -> Checkpoint {
        Checkpoint::from_buffers(self.files()).unwrap_or_else(|error| panic!("{}: {error}", self.case))
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Tensor {
        match self.stored.get(name) {
            Some(dtype) => self.quantized(name, shape, dtype),
            None => tensor(self.seed, &self.dtype, name, shape),
        }
    }

    /// A tensor of a quantized matrix: the integers that are listed, random codes, or scales.
    fn quantized(&self, name: &str, shape: &[usize], dtype: &str) -> Tensor {
        const TYPES: [(&str, usize); 7] =
            [("I32", 4), ("I64", 8), ("I8", 1), ("F8_E4M3", 1), ("BF16", 2), ("F16", 2), ("F32", 4)];
        let (dtype, size) = *TYPES.iter().find(|(name, _)| *name == dtype).expect("a type");
        let (name, shape) = (name.to_owned(), shape.to_vec());
        if let Some(values) = self.values.get(&name) {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()[..size].to_vec()).collect();
            return Tensor { name, dtype, shape, bytes };
        }
        let count = shape.iter().product::<usize>();
        let random = |count| uniform(self.seed, &name, count);
        if ["BF16", "F16", "F32"].contains(&dtype) {
            let scales = random(count).map(|u| self.scale * (1.0 + 0.5 * u));
            let bytes = match dtype {
                "BF16" => scales.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
                "F16" => scales.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(),
                _ => scales.flat_map(f32::to_le_bytes).collect(),
            };
            return Tensor { dtype, shape, bytes, name };
        }
        let codes = random(count * size).map(|u| ((u + 1.0) * 128.0).floor() as u8);
        let is_nan = |code: u8| dtype == "F8_E4M3" && code & 0x7f == 0x7f;
        let bytes = codes.map(|code| code ^ u8::from(is_nan(code))).collect();
        Tensor { dtype, shape, bytes, name }
    }

    /// An adapter of this rank on all projections of the model, with weights of its own seed.
    pub(crate) fn adapter(&self, seed: u64, rank: usize) -> Adapter {
        let projections =
            self.tensors.iter().filter_map(|(name, shape)| Some((name.strip_suffix("_proj.weight")?, shape)));
        let matrices = projections.flat_map(|(name, shape)| {
            [("A", [rank, shape[1]]), ("B", [shape[0], rank])].map(|(side, shape)| {
                tensor(seed, "bf16", &format!("base_model.model.{name}_proj.lora_{side}.weight"), &shape)
            })
        });
        let config = json!({"peft_type": "LORA", "r": rank, "lora_alpha": rank});
        let files = adapter_files(&config, &matrices.collect::<Vec<_>>());
        Adapter::from_buffers(files, self.checkpoint().config()).expect("it fits the model")
    }
}

/// A case with an adapter, a file of `tests/goldens/adapters`: what PEFT computes.
#[derive(Deserialize)]
pub(crate) struct Adapted {
    #[serde(flatten)]
    pub(crate) golden: Golden,
    /// The adapter's config, as PEFT writes it.
    pub(crate) adapter_config: serde_json::Value,
    /// Stored type of the adapter's matrices.
    pub(crate) adapter_dtype: String,
    /// Names and shapes of the adapter's matrices, as PEFT saves them.
    pub(crate) adapter_tensors: Vec<(String, Vec<usize>)>,
}

impl Adapted {
    /// All cases, in order of names.
    pub(crate) fn all() -> Vec<Adapted> {
        read_all("tests/goldens/adapters")
    }

    /// Matrices of the adapter.
    pub(crate) fn stored(&self) -> Vec<Tensor> {
        let of = |(name, shape): &(String, Vec<usize>)| tensor(self.golden.seed, &self.adapter_dtype, name, shape);
        self.adapter_tensors.iter().map(of).collect()
    }

    pub(crate) fn adapter(&self) -> Adapter {
        let adapter = Adapter::from_buffers(
            adapter_files(&self.adapter_config, &self.stored()),
            self.golden.checkpoint().config(),
        );
        adapter.unwrap_or_else(|error| panic!("{}: {error}", self.golden.case))
    }
}

/// Files of an adapter's folder.
pub(crate) fn adapter_files(config: &serde_json::Value, tensors: &[Tensor]) -> Files {
    let config = serde_json::to_vec(config).expect("json");
    vec![
        ("adapter_config.json".into(), config.into()),
        ("adapter_model.safetensors".into(), write_safetensors(tensors).into()),
    ]
}

/// All cases in a folder of the repository, in order of names.
fn read_all<T: serde::de::DeserializeOwned>(folder: &str) -> Vec<T> {
    let entries = std::fs::read_dir(super::repository(folder)).expect("goldens");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let read = |path| std::fs::read(path).expect("a golden");
    paths.iter().map(|path| serde_json::from_slice(&read(path)).expect("a golden")).collect()
}

/// The tensor `name`, its weights rounded to `dtype`.
pub(crate) fn tensor(seed: u64, dtype: &str, name: &str, shape: &[usize]) -> Tensor {
    let values = weights(seed, name, shape);
    let is_packed = name.ends_with("_blocks") || name.ends_with("_scales");
    let (dtype, bytes) = match dtype {
        _ if is_packed => ("U8", values.iter().map(|&v| v as u8).collect()),
        "bf16" => ("BF16", values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect()),
        "f16" => ("F16", values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect()),
        "f32" => ("F32", values.iter().flat_map(|&v| v.to_le_bytes()).collect()),
        other => panic!("dtype {other}"),
    };
    Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

/// A tensor to be written.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) fn write_safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = serde_json::Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
    let mut at = 0;
    for Tensor { name, dtype, shape, bytes } in tensors {
        let end = at + bytes.len();
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let mut file = with_header(&serde_json::to_vec(&header).expect("json"));
    tensors.iter().for_each(|tensor| file.extend_from_slice(&tensor.bytes));
    file
}

/// A safetensors file of this header and no data.
pub(crate) fn with_header(header: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header].concat()
}

fn weights(seed: u64, name: &str, shape: &[usize]) -> Vec<f32> {
    let uniform = uniform(seed, name, shape.iter().product());
    let scale: Box<dyn Fn(f32) -> f32> =
        if name.contains("norm") || name.ends_with("_ln.weight") || name.ends_with("LayerNorm.weight") {
            Box::new(|u| 1.0 + 0.25 * u)
        } else if name.ends_with("_blocks") {
            Box::new(|u| ((u + 1.0) * 128.0).floor())
        } else if name.ends_with("_scales") {
            Box::new(|u| ((u + 1.0) * 1.5).floor() + 122.0)
        } else if name.ends_with(".sinks") {
            Box::new(|u| 3.0 * u)
        } else if name.ends_with(".bias") || name.ends_with("_bias") {
            Box::new(|u| 0.25 * u)
        } else if name.contains("embed") || name.contains("lm_head") {
            Box::new(|u| 0.5 * u)
        } else if name.contains(".lora_B.") {
            let scale = (3.0 / shape[1] as f32).sqrt();
            Box::new(move |u| 0.25 * u * scale)
        } else {
            let scale = (3.0 / shape[1] as f32).sqrt();
            Box::new(move |u| u * scale)
        };
    uniform.map(scale).collect()
}

/// Pseudorandom values: FNV-1a of seed and name, then splitmix64 of the index; 24 bits to `[-1, 1)`.
fn uniform(seed: u64, name: &str, count: usize) -> impl Iterator<Item = f32> {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let key = format!("{seed}:{name}").bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
    (1..=count as u64).map(move |i| {
        let mut z = i.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(key);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / 8_388_608.0 - 1.0
    })
}
