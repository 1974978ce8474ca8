//! A LoRA adapter in PEFT's layout, checked against its model before anything is loaded (Hu et al. 2021, arXiv:2106.09685).
//!
//! A folder has `adapter_config.json` and `adapter_model.safetensors`; both come from strangers. What an adapter changes is decided by its
//! tensors: each must be one of the two matrices of a projection that the model has, in the shape that it needs, and a tensor that would be
//! passed over refuses the adapter. Follows `LoraConfig` and `tuners/lora` of PEFT.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use penstock_kernels::{ADAPTER_RANK_MAX, DType, HostTensor, LowRank, RowOrder};
use penstock_proto::AdapterId;

use crate::checkpoint::files::{Bytes, Folder};
use crate::checkpoint::safetensors::{Entry, read_header};
use crate::checkpoint::{CheckpointError, ModelConfig};
use crate::model_config::fields::{Fields, parse_object};

/// Reason why an adapter is refused: file, field or tensor, fault, and a remedy where one is known.
pub type AdapterError = CheckpointError;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const PICKLED: &str = "adapter_model.bin";
/// Largest config in bytes; real ones have about 1 kB, those with a rank for each module about 100 kB.
const CONFIG_BYTES_MAX: usize = 1 << 20;
/// Largest magnitude of `lora_alpha`; usual are 1 to 512.
const ALPHA_MAX: f64 = 1e6;

/// Prefix that PEFT gives all names.
const PREFIX: &str = "base_model.model.";
/// Prefixes of layers behind it: of a model with a head, of one without, and of a part of a larger model.
const LAYERS: [&str; 4] = ["model.layers.", "layers.", "model.language_model.layers.", "language_model.model.layers."];

/// An adapter that fits its model: low-rank matrices in mapped memory, and their scales.
#[derive(Debug)]
pub struct Adapter {
    id: AdapterId,
    targets: Vec<Target>,
    file: Bytes,
}

/// Weight of a layer, as devices hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Matrix {
    /// Queries, keys and values.
    Qkv,
    /// Output projection of attention.
    Output,
    /// Gate and up of the MLP.
    GateUp,
    /// Last projection of the MLP.
    Down,
}

/// Projection that adapters may change, in the weight that holds it.
struct Projection {
    name: &'static str,
    matrix: Matrix,
    /// First of its outputs in the weight.
    first: usize,
    outputs: usize,
    inputs: usize,
}

/// Both matrices of one projection.
#[derive(Debug)]
struct Target {
    layer: usize,
    matrix: Matrix,
    first: usize,
    scale: f32,
    a: Found,
    b: Found,
}

#[derive(Clone, Debug)]
struct Found {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    range: std::ops::Range<usize>,
}

impl Found {
    fn host<'a>(&'a self, file: &'a [u8]) -> HostTensor<'a> {
        let Self { name, dtype, shape, range } = self;
        HostTensor { name, dtype: *dtype, shape, bytes: &file[range.clone()], order: RowOrder::Plain, reader: None }
    }
}

impl Adapter {
    /// Opens and checks the adapter in `folder` for a model with `config`. Cost: reads the config and hashes the tensors.
    ///
    /// The files must not be changed in place while the adapter lives.
    ///
    /// # Errors
    /// The adapter is damaged, does not fit the model, or changes more than the engine computes: the sentence says which file, field or tensor.
    pub fn open(folder: &Path, config: &ModelConfig) -> Result<Self, AdapterError> {
        Self::read(&Folder::open(folder)?, config)
    }

    /// Opens an adapter as [`Adapter::open`] does, from (name, content) in memory.
    pub fn from_buffers(files: Vec<(String, Cow<'static, [u8]>)>, config: &ModelConfig) -> Result<Self, AdapterError> {
        Self::read(&Folder::Memory(files), config)
    }

    fn read(folder: &Folder, config: &ModelConfig) -> Result<Self, AdapterError> {
        if config.is_whole() {
            let reason = "adapters of encoders, and of models that make vectors of whole texts, are not supported";
            return Err(CheckpointError::file(folder.shown(CONFIG), reason));
        }
        let absent = |name: &str| CheckpointError::file(folder.shown(name), "is not there");
        let help = "give the folder that save_pretrained of PEFT wrote";
        let bytes = folder.read(CONFIG, CONFIG_BYTES_MAX)?.ok_or_else(|| absent(CONFIG).help(help))?;
        let (shown, weights) = (folder.shown(CONFIG), folder.shown(WEIGHTS));
        let map = parse_object(&shown, &bytes)?;
        let settings = Settings::read(&Fields::new(&shown, &map))?;
        let file = folder.map(WEIGHTS)?.ok_or_else(|| match folder.has(PICKLED) {
            true => CheckpointError::file(folder.shown(PICKLED), "is a pickle, which may run code and is not read").help(
                "load the adapter with PeftModel.from_pretrained and save it with save_pretrained, which writes adapter_model.safetensors",
            ),
            false => absent(WEIGHTS).help(help),
        })?;
        let targets = targets(&weights, &read_header(&weights, file.as_slice())?, &settings, config)?;
        Ok(Self { id: id(&targets, file.as_slice()), targets, file })
    }

    /// Name of the adapter's content: equal for equal matrices under equal scales, wherever they are stored.
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// Highest rank of the adapter's matrices.
    pub fn rank(&self) -> usize {
        self.targets.iter().map(|target| target.a.shape[0]).max().unwrap_or(0)
    }

    /// Most values that the `A` matrices of one weight make of a row, padded as a device pads them.
    pub fn low_values(&self) -> usize {
        let mut of_weight: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for Target { layer, matrix, a, .. } in &self.targets {
            *of_weight.entry((*layer, *matrix as usize)).or_default() += a.shape[0];
        }
        of_weight.into_values().max().unwrap_or(0).next_multiple_of(4)
    }

    /// Bytes of the matrices in a device's memory, at two bytes per value.
    pub fn bytes(&self) -> u64 {
        let padded = |n: usize| n.next_multiple_of(32) as u64;
        let of = |target: &Target| {
            let rank = target.a.shape[0].next_multiple_of(4) as u64;
            2 * rank * (padded(target.a.shape[1]) + padded(target.b.shape[0]))
        };
        self.targets.iter().map(of).sum()
    }

    /// Additions to one weight of a layer; empty if the adapter leaves it as it is.
    pub(crate) fn additions<'a>(&'a self, layer: usize, matrix: Matrix) -> Vec<LowRank<'a>> {
        let file = self.file.as_slice();
        let here = self.targets.iter().filter(|target| target.layer == layer && target.matrix == matrix);
        let low_rank = |Target { first, scale, a, b, .. }: &'a Target| LowRank {
            first: *first,
            a: a.host(file),
            b: b.host(file),
            scale: *scale,
        };
        here.map(low_rank).collect()
    }
}

/// Projections of a layer that adapters may change, under the names that they have in checkpoints.
fn projections(c: &ModelConfig, layer: usize) -> Vec<Projection> {
    let (queries, keys) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let (hidden, inner) = (c.hidden_size, c.intermediate_size);
    let of = |name, matrix, first, outputs, inputs| Projection { name, matrix, first, outputs, inputs };
    let mut list = Vec::new();
    if c.latent.is_none()
        && let Some(qkv) = c.layer_names.qkv
    {
        list.push(of(qkv, Matrix::Qkv, 0, queries + 2 * keys, hidden));
    } else if c.latent.is_none() {
        list.push(of("self_attn.q_proj", Matrix::Qkv, 0, queries, hidden));
        list.push(of("self_attn.k_proj", Matrix::Qkv, queries, keys, hidden));
        list.push(of("self_attn.v_proj", Matrix::Qkv, queries + keys, keys, hidden));
    }
    if c.latent.is_none() {
        list.push(of("self_attn.o_proj", Matrix::Output, 0, hidden, queries));
    }
    if c.is_sparse(layer) {
        return list;
    }
    if let Some(gate_up) = c.layer_names.gate_up {
        list.push(of(gate_up, Matrix::GateUp, 0, 2 * inner, hidden));
    } else {
        list.push(of("mlp.gate_proj", Matrix::GateUp, 0, inner, hidden));
        list.push(of("mlp.up_proj", Matrix::GateUp, inner, inner, hidden));
    }
    list.push(of(c.layer_names.down, Matrix::Down, 0, hidden, inner));
    list
}

/// Fields of an adapter's config that say how its matrices are used.
struct Settings<'a> {
    rank: usize,
    alpha: f64,
    /// True if the scale is `alpha / √rank` in the place of `alpha / rank`.
    by_root: bool,
    ranks: Option<Fields<'a>>,
    alphas: Option<Fields<'a>>,
}

impl<'a> Settings<'a> {
    fn read(f: &Fields<'a>) -> Result<Self, AdapterError> {
        match f.text("peft_type")? {
            Some("LORA") => {}
            Some(other) => return Err(f.refuse("peft_type", format!("is \"{other}\"; only LORA is served"))),
            None => return Err(f.missing("peft_type")),
        }
        refuse_unsupported(f)?;
        let patterns = |name| {
            let object = f.object(name)?;
            let is_plain = |key: &str| {
                let key = key.strip_prefix('^').unwrap_or(key);
                !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.'))
            };
            match object.as_ref().and_then(|object| object.names().find(|key| !is_plain(key))) {
                Some(key) => {
                    let reason = "is a regular expression; only names of modules are read";
                    Err(object.expect("has the key").refuse(key, reason).help("name each module with its own value"))
                }
                None => Ok(object),
            }
        };
        Ok(Self {
            rank: f.required("r", 1, ADAPTER_RANK_MAX)?,
            alpha: f.number("lora_alpha", -ALPHA_MAX, ALPHA_MAX)?.ok_or_else(|| f.missing("lora_alpha"))?,
            by_root: f.flag("use_rslora", false)?,
            ranks: patterns("rank_pattern")?,
            alphas: patterns("alpha_pattern")?,
        })
    }

    /// Rank and scale of a module, by its full name.
    fn of(&self, module: &str) -> Result<(usize, f32), AdapterError> {
        let own = |fields: &Option<Fields<'a>>| match fields {
            Some(fields) => own_key(fields, module),
            None => Ok(None),
        };
        let rank = match (own(&self.ranks)?, &self.ranks) {
            (Some(key), Some(fields)) => fields.required(&key, 1, ADAPTER_RANK_MAX)?,
            _ => self.rank,
        };
        let alpha = match (own(&self.alphas)?, &self.alphas) {
            (Some(key), Some(fields)) => fields.number(&key, -ALPHA_MAX, ALPHA_MAX)?.unwrap_or(self.alpha),
            _ => self.alpha,
        };
        let divisor = if self.by_root { (rank as f64).sqrt() } else { rank as f64 };
        Ok((rank, (alpha / divisor) as f32))
    }
}

/// Key of a pattern that names `module`: by its full name, or by its last parts.
fn own_key(fields: &Fields<'_>, module: &str) -> Result<Option<String>, AdapterError> {
    let starts = module.match_indices('.').map(|(dot, _)| dot + 1);
    let suffixes = std::iter::once(0).chain(starts).map(|start| module[start..].to_owned());
    let mut keys = std::iter::once(format!("^{module}")).chain(suffixes).filter(|key| fields.has(key));
    let Some(key) = keys.next() else { return Ok(None) };
    if let Some(other) = keys.find(|other| fields.value(other) != fields.value(&key)) {
        let reason = format!("also names {module}, with another value than {key}: which of them counts is not defined");
        return Err(fields.refuse(&other, reason));
    }
    Ok(Some(key))
}

/// Refuses settings by which an adapter is more than low-rank additions to projections.
fn refuse_unsupported(f: &Fields<'_>) -> Result<(), AdapterError> {
    let flags = [
        ("use_dora", "weights are normalised (DoRA), which is not served"),
        ("use_qalora", "inputs are pooled (QALoRA), which is not served"),
        ("lora_bias", "the second matrices have biases, which are not served"),
        ("fan_in_fan_out", "matrices are stored transposed, as no served model has them"),
    ];
    for (name, reason) in flags {
        if f.flag(name, false)? {
            return Err(f.refuse(name, reason).help("train the adapter without it"));
        }
    }
    if let Some(bias) = f.text("bias")?.filter(|bias| *bias != "none") {
        return Err(f.refuse("bias", format!("is \"{bias}\"; adapters that change biases are not served")));
    }
    let empty = [
        ("modules_to_save", "whole modules are stored beside the low-rank matrices"),
        ("trainable_token_indices", "rows of the embedding are stored beside the low-rank matrices"),
        ("target_parameters", "parameters of experts are changed"),
        ("layer_replication", "layers are repeated"),
        ("alora_invocation_tokens", "the adapter begins at some tokens of a prompt (aLoRA)"),
        ("use_bdlora", "matrices are block-diagonal (BD-LoRA)"),
        ("arrow_config", "adapters are mixed by a router (Arrow)"),
        ("kasa_config", "matrices are those of a decomposition (KaSA)"),
        ("monteclora_config", "matrices are drawn at random (MonteCLoRA)"),
        ("velora_config", "inputs are projected (VeLoRA)"),
    ];
    for (name, reason) in empty {
        let is_empty = |value: &serde_json::Value| match value {
            serde_json::Value::Array(list) => list.is_empty(),
            serde_json::Value::Object(map) => map.is_empty(),
            other => other == false,
        };
        if f.value(name).is_some_and(|value| !is_empty(value)) {
            return Err(f.refuse(name, format!("{reason}, which is not served")));
        }
    }
    // These change the weights that they start from, and the matrices are right beside the changed ones alone.
    let begun = f.value("init_lora_weights").and_then(serde_json::Value::as_str).unwrap_or_default();
    if ["pissa", "olora", "corda", "loftq", "lora_ga"].iter().any(|kind| begun.starts_with(kind)) {
        let help = "save it with path_initial_model_for_weight_conversion, which makes it one for the plain model";
        let reason = format!("is \"{begun}\": the adapter is for a changed copy of the model");
        return Err(f.refuse("init_lora_weights", reason).help(help));
    }
    Ok(())
}

/// Side of a low-rank product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    A,
    B,
}

/// Module of a tensor: its full name, its layer, its name in the layer; and the side.
fn parse(name: &str) -> Option<(&str, usize, &str, Side)> {
    let (module, side) = [("lora_A", Side::A), ("lora_B", Side::B)].into_iter().find_map(|(part, side)| {
        let plain = name.strip_suffix(".weight")?;
        let plain = plain.strip_suffix(".default").unwrap_or(plain);
        Some((plain.strip_suffix(part)?.strip_suffix('.')?, side))
    })?;
    let module = module.strip_prefix(PREFIX)?;
    let (layer, part) = LAYERS.iter().find_map(|prefix| module.strip_prefix(prefix))?.split_once('.')?;
    let is_number = layer.len() <= 4 && layer.bytes().all(|c| c.is_ascii_digit());
    let layer = layer.parse().ok().filter(|_| is_number)?;
    Some((module, layer, part, side))
}

/// Refusal of a tensor that is none of a served projection's matrices.
fn stray(file: &str, name: &str, config: &ModelConfig) -> AdapterError {
    let reason = match parse(name) {
        Some((_, layer, ..)) if layer >= config.num_hidden_layers => {
            let count = config.num_hidden_layers;
            return CheckpointError::tensor(file, name, format!("is of layer {layer}, the model has {count}"))
                .help("the adapter is for another model");
        }
        Some((_, layer, part, _)) if !part.starts_with("self_attn.") && config.is_sparse(layer) => {
            "changes a mixture of experts, which is not served"
        }
        Some((_, _, part, _)) if part.starts_with("self_attn.") && config.latent.is_some() => {
            "changes attention over latents (MLA), which is not served"
        }
        Some(_) => "changes a matrix that the model does not have",
        None if name.contains("lora_magnitude_vector") => "is of DoRA, which is not served",
        None if name.contains("embed") || name.contains("lm_head") => {
            "changes the embedding or the head, which is not served"
        }
        None if name.ends_with(".bias") => "is a bias, which adapters may not change here",
        None => "is no matrix of a LoRA adapter",
    };
    CheckpointError::tensor(file, name, reason)
        .help("served are adapters of the projections of attention and of the MLP: q, k, v, o, gate, up and down")
}

/// Matrices of one projection, as far as they have been met in the file.
struct Pair {
    projection: Projection,
    /// Full name of the module.
    module: String,
    /// Matrices by [`Side`].
    sides: [Option<Found>; 2],
}

/// Both matrices of every projection that the file changes, in the order of layers and names.
fn targets(
    file: &str,
    entries: &[Entry],
    settings: &Settings<'_>,
    config: &ModelConfig,
) -> Result<Vec<Target>, AdapterError> {
    let mut pairs: BTreeMap<(usize, &str), Pair> = BTreeMap::new();
    for entry in entries {
        let refused = |reason: String| CheckpointError::tensor(file, &entry.name, reason);
        let own = parse(&entry.name).filter(|(_, layer, ..)| *layer < config.num_hidden_layers);
        let projection = own.and_then(|(_, layer, part, _)| {
            projections(config, layer).into_iter().find(|projection| projection.name == part)
        });
        let Some((projection, (module, layer, part, side))) = projection.zip(own) else {
            return Err(stray(file, &entry.name, config));
        };
        if config.paired && ["self_attn.q_proj", "self_attn.k_proj"].contains(&part) {
            let reason = "adapters of queries and keys are not supported in this architecture, which has the values of rotations side by side";
            return Err(refused(reason.to_owned()));
        }
        let dtype =
            entry.dtype.clone().map_err(|other| refused(format!("has type {other}, needs F32, BF16 or F16")))?;
        let empty = || Pair { projection, module: module.to_owned(), sides: [None, None] };
        let place = &mut pairs.entry((layer, part)).or_insert_with(empty).sides[side as usize];
        if place.is_some() {
            return Err(refused("is there twice, under two names".to_owned()));
        }
        let (name, shape, range) = (entry.name.clone(), entry.shape.clone(), entry.range.clone());
        *place = Some(Found { name, dtype, shape, range });
    }
    if pairs.is_empty() {
        return Err(CheckpointError::file(file, "has no tensors"));
    }
    let target = |((layer, _), Pair { projection, module, sides })| {
        let (a, b) = match sides {
            [Some(a), Some(b)] => (a, b),
            [only, other] => {
                let name = only.or(other).map(|found| found.name).unwrap_or_default();
                return Err(CheckpointError::tensor(file, name, "comes without the other matrix of its product"));
            }
        };
        let (rank, scale) = settings.of(&module)?;
        for (found, want) in [(&a, [rank, projection.inputs]), (&b, [projection.outputs, rank])] {
            if found.shape != want {
                let reason =
                    format!("has shape {:?}, needs {want:?} for this model and the rank in {CONFIG}", found.shape);
                return Err(CheckpointError::tensor(file, &found.name, reason));
            }
        }
        Ok(Target { layer, matrix: projection.matrix, first: projection.first, scale, a, b })
    };
    pairs.into_iter().map(target).collect()
}

/// Name of the content: scales, places, types, shapes and bytes of all matrices.
fn id(targets: &[Target], file: &[u8]) -> AdapterId {
    let mut hasher = blake3::Hasher::new_derive_key("penstock 2026-11-27 adapter v1");
    let number = |n: usize, hasher: &mut blake3::Hasher| _ = hasher.update(&(n as u64).to_le_bytes());
    number(targets.len(), &mut hasher);
    for Target { layer, matrix, first, scale, a, b } in targets {
        for n in [*layer, *matrix as usize, *first, scale.to_bits() as usize] {
            number(n, &mut hasher);
        }
        for Found { dtype, shape, range, .. } in [a, b] {
            number(dtype.name().len(), &mut hasher);
            hasher.update(dtype.name().as_bytes());
            shape.iter().for_each(|n| number(*n, &mut hasher));
            hasher.update(&file[range.clone()]);
        }
    }
    let mut head = [0; 16];
    head.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    AdapterId(u128::from_le_bytes(head))
}
