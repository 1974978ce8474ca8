//! `config.json` and `generation_config.json` as checked values, under the checkpoint's own names.

mod chain;
mod encoder;
pub(crate) mod error;
mod experts;
pub(crate) mod fields;
mod quantization;
mod rope;
mod sides;
mod windows;
mod work;

pub use chain::{ChainStep, DenseConfig};
pub use encoder::{EncoderConfig, EncoderNames, HeadConfig};
pub(crate) use encoder::{activation, renamed};
use error::CheckpointError;
pub(crate) use experts::ExpertCounts;
pub use experts::{ExpertNames, ExpertsConfig, RoutingConfig};
use fields::Fields;
use penstock_kernels::{Activation, Feature, KvFormat};
pub(crate) use quantization::GROUP_STEP;
pub use quantization::{Quantization, Scales};
pub(crate) use rope::longrope_attention_factor;
pub use rope::{RopeParameters, RopeScaling};
use rope::{rope_object, yarn_all_dim};
pub(crate) use sides::BIDIRECTIONAL;
pub(crate) use windows::layer_types;
pub use work::Work;

/// Bounds on sizes, well above the largest dense checkpoints (vocabulary 262 K, hidden 16 K, 126 layers), so that no
/// product of them overflows.
const VOCAB_MAX: usize = 1 << 22;
const HIDDEN_MAX: usize = 1 << 20;
pub(crate) const LAYERS_MAX: usize = 1024;
const HEADS_MAX: usize = 4096;
const HEAD_DIM_MAX: usize = 1024;
pub(crate) const POSITIONS_MAX: usize = 1 << 27;
/// Bounds of soft caps; 30 and 50 are usual.
const CAP_MIN: f64 = 1e-3;
const CAP_MAX: f64 = 1e6;
/// Largest base of the rotary frequencies.
pub(crate) const THETA_MAX: f64 = 1e15;
/// Base of the rotary frequencies where a config has none, in most families.
const THETA: f64 = 10_000.0;

/// A decoder with rotary positions, grouped-query attention, RMS norm, and in each layer a gated MLP or a mixture of them; or an encoder.
///
/// The families differ in these values only. Names are those of `config.json` where it has one.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP between its gate/up and down projections, in values.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads; a multiple of `num_key_value_heads`.
    pub num_attention_heads: usize,
    /// KV heads; each is shared by an equal group of query heads.
    pub num_key_value_heads: usize,
    /// Values per attention head; even, for the rotation in pairs.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Positions that the model was trained for, before any scaling of the rope.
    pub max_position_embeddings: usize,
    /// True if the output head uses the embedding's matrix instead of one of its own.
    pub tie_word_embeddings: bool,
    /// True if the checkpoint has no head of its own and none is tied: an embedding model that was saved without it.
    pub headless: bool,
    /// Parameters of the rotary position embedding.
    pub rope: RopeParameters,
    /// Parameters of the layers with [`Rotation::Local`].
    pub local_rope: Option<RopeParameters>,
    /// Rotation of each layer, `[num_hidden_layers]`.
    pub rotations: Vec<Rotation>,
    /// Values of each head that are rotated, the first ones; even.
    pub rotary_dim: usize,
    /// True if a folder has the two values of each rotation side by side in queries and keys (ERNIE 4.5, GLM-4).
    pub paired: bool,
    /// Bias on the query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the output projection of attention.
    pub output_bias: bool,
    /// Bias on the three projections of the MLP.
    pub mlp_bias: bool,
    /// RMS norms over queries and keys.
    pub qk_norm: QkNorm,
    /// Places of the norms in a layer.
    pub norms: NormPlaces,
    /// Number that is added to the stored weights of every norm.
    pub norm_offset: f32,
    /// Function on the gate of the MLP.
    pub hidden_act: Activation,
    /// Factor on the embeddings; `None` is 1.
    pub embedding_scale: Option<EmbeddingScale>,
    /// Factor on the products of queries and keys.
    pub query_scale: f64,
    /// Factor on what attention and MLP add to the residual; `None` is 1.
    pub residual_multiplier: Option<f32>,
    /// Number by which the logits are divided; `None` is 1.
    pub logits_scaling: Option<f32>,
    /// Soft cap of attention's scores.
    pub attn_logit_softcapping: Option<f32>,
    /// Soft cap of the logits.
    pub final_logit_softcapping: Option<f32>,
    /// Names of a layer's matrices that differ between families.
    pub layer_names: LayerNames,
    /// True if each head has a sink, one more score in its softmax.
    pub sinks: bool,
    /// Window of each layer, `[num_hidden_layers]`: tokens that a position sees, itself included, and in an encoder so many on both sides; `None`
    /// sees all.
    pub windows: Vec<Option<usize>>,
    /// Attention over latents; `None` has keys and values of their own. With latents there is one KV head, whose `head_dim` values are the
    /// latent and the rotated ones.
    pub latent: Option<LatentConfig>,
    /// Experts of the layers that have some; `None` in a dense model.
    pub experts: Option<ExpertsConfig>,
    /// Values of an encoder, which has layer norms in the place of RMS norms, and in most families tables of positions in that of rotations and
    /// MLPs without gates; `None` in a decoder.
    pub encoder: Option<EncoderConfig>,
    /// True if a token sees no later ones, as in all decoders but those that are embedding models by training.
    pub causal: bool,
    /// True if vectors are made of the states of all tokens, or of the first, so that a decoder's texts are computed whole, too.
    pub pools_all: bool,
    /// Steps behind the pooling of an embedding model, but for a last scaling.
    pub chain: Vec<ChainStep>,
    /// Stored form of the matrices whose scales lie in tensors of their own; `None` in a checkpoint that has none.
    pub quantization: Option<Quantization>,
    /// Token ids that end a text; the engine stops at any of them.
    pub eos_token_id: Vec<u32>,
}

/// Places of the RMS norms in a layer, around attention and around the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlaces {
    /// Norm of the input alone.
    Before,
    /// Norm of the output alone, before it is added to the residual (OLMo 2).
    After,
    /// Norms of input and output (Gemma 2 and 3).
    Both,
    /// Norms of input and output under other names: the norm before the MLP has the one that it has in a model without norms behind (GLM-4 of 2025).
    BothGlm,
}

impl NormPlaces {
    /// Returns true if inputs are normed.
    pub fn before(self) -> bool {
        self != NormPlaces::After
    }

    /// Returns true if outputs are normed.
    pub fn after(self) -> bool {
        self != NormPlaces::Before
    }
}

/// Factor on the embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EmbeddingScale {
    /// Factor that is rounded to the stored type of the embeddings, as in training (Gemma).
    Rounded(f64),
    /// Factor that is not rounded (Granite).
    Exact(f64),
}

/// Names of a layer's matrices in a checkpoint, before `.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerNames {
    /// Queries, keys and values in one matrix; `None` has each by itself.
    pub qkv: Option<&'static str>,
    /// Gate and up of the MLP in one matrix; `None` has each by itself.
    pub gate_up: Option<&'static str>,
    /// Last matrix of the MLP.
    pub down: &'static str,
}

impl LayerNames {
    /// Every matrix by itself, under the names of Llama.
    pub const PLAIN: LayerNames = LayerNames { qkv: None, gate_up: None, down: "mlp.down_proj" };
}

/// RMS norms over queries and keys, before the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// No norm.
    None,
    /// Norm over each head (Qwen3, Gemma 3).
    Each,
    /// Norm over all heads together (OLMo 2).
    Together,
}

/// Rotation of a layer's queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// The model's rotation.
    Model,
    /// The rotation of layers with a window, where they have one of their own (Gemma 3).
    Local,
    /// No rotation (SmolLM3).
    None,
}

/// Attention over latents (MLA): keys and values of all heads are made of one latent per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Width between the two projections of queries; `None` has one projection.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent.
    pub kv_lora_rank: usize,
    /// Values of a head's query and key that are not rotated.
    pub qk_nope_head_dim: usize,
    /// Values of a head's query that are rotated, and of the key that all heads share.
    pub qk_rope_head_dim: usize,
    /// Values of a head's output.
    pub v_head_dim: usize,
    /// True if the checkpoint has the two values of each rotation side by side.
    pub interleaved: bool,
}

impl LatentConfig {
    /// Most values of a cached key, and of each part of a head.
    pub(crate) const KEY_MAX: usize = 1024;

    /// Values of a cached key: the latent and the rotated ones.
    pub fn key_dim(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }

    /// Values of a head's query, as it is projected.
    pub fn query_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }
}

/// A tensor that an architecture needs, by name and shape; a missing one refuses the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needed {
    /// Name of the tensor in the checkpoint's files.
    pub name: String,
    /// Exact shape, outermost dimension first; another shape is refused.
    pub shape: Vec<usize>,
    /// Stored tensor that this one is some rows of; `None` if it is stored by itself.
    pub part: Option<Part>,
}

/// Rows of a stored tensor that holds several needed ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name of the stored tensor.
    pub tensor: String,
    /// Index of the first row.
    pub first: usize,
    /// Rows of the stored tensor.
    pub rows: usize,
}

/// Config fields that a family reads beyond the common ones. A config that sets another field that would change the computation is refused.
#[derive(Clone, Copy)]
pub(crate) struct Traits {
    /// Base of the rotary frequencies where the config has none.
    pub(crate) theta: f64,
    /// Epsilon of the RMS norms where the config has none.
    pub(crate) eps: f64,
    /// Base of the frequencies of layers with a window, for families whose layers differ in their rotations.
    pub(crate) local_theta: Option<f64>,
    /// Activation of the MLP, the only one that is accepted.
    pub(crate) activation: Activation,
    /// True if scores and logits may have soft caps.
    pub(crate) soft_caps: bool,
    /// True if a part of each head may be rotated.
    pub(crate) partial_rotation: bool,
    /// Attention over latents.
    pub(crate) latent: Option<LatentConfig>,
    /// True if the checkpoint's experts may be stored as MXFP4, which its config then says in `quantization_config`.
    pub(crate) mxfp4: bool,
}

/// A plain decoder: SiLU, one full rotation, no soft caps.
pub(crate) const PLAIN: Traits = Traits {
    theta: THETA,
    eps: 1e-6,
    local_theta: None,
    activation: Activation::Silu,
    soft_caps: false,
    partial_rotation: false,
    latent: None,
    mxfp4: false,
};

impl ModelConfig {
    /// Reads the fields that all dense families share. The caller sets the family's own fields: biases, norms, windows.
    pub(crate) fn read(f: &Fields<'_>) -> Result<Self, CheckpointError> {
        Self::read_dense(f, PLAIN)
    }

    /// Reads the fields that all dense families share, and those that `traits` says.
    pub(crate) fn read_dense(f: &Fields<'_>, traits: Traits) -> Result<Self, CheckpointError> {
        for name in ["num_experts", "num_local_experts", "n_routed_experts"] {
            if f.integer(name, 0, usize::MAX)?.unwrap_or(0) > 0 {
                return Err(f.refuse(name, "this architecture has no mixture of experts here"));
            }
        }
        Self::read_any(f, &traits)
    }

    /// Reads the fields that all families share; those with experts set them.
    pub(crate) fn read_any(f: &Fields<'_>, traits: &Traits) -> Result<Self, CheckpointError> {
        refuse_unsupported(f, traits)?;
        let hidden_size = f.required("hidden_size", 1, HIDDEN_MAX)?;
        let num_attention_heads = f.required("num_attention_heads", 1, HEADS_MAX)?;
        let num_key_value_heads = match traits.latent {
            None => f.integer("num_key_value_heads", 1, HEADS_MAX)?.unwrap_or(num_attention_heads),
            Some(_) => 1,
        };
        if num_attention_heads % num_key_value_heads != 0 {
            let reason =
                format!("is {num_key_value_heads}, needs a divisor of num_attention_heads {num_attention_heads}");
            return Err(f.refuse("num_key_value_heads", reason));
        }
        let num_hidden_layers = f.required("num_hidden_layers", 1, LAYERS_MAX)?;
        let max_position_embeddings = f.required("max_position_embeddings", 1, POSITIONS_MAX)?;
        let (head_dim, rotary_dim) = match traits.latent {
            None => {
                let head_dim = head_dim(f, hidden_size, num_attention_heads)?;
                (head_dim, rotary_dim(f, head_dim)?)
            }
            Some(latent) => (latent.key_dim(), latent.qk_rope_head_dim),
        };
        let query_scale = match traits.latent {
            None => (head_dim as f64).powf(-0.5),
            Some(latent) => (latent.query_dim() as f64).powf(-0.5) * yarn_all_dim(f)?.powi(2),
        };
        let [rope, local_rope] = RopeParameters::read(f, max_position_embeddings, rotary_dim, traits)?;
        Ok(Self {
            vocab_size: f.required("vocab_size", 1, VOCAB_MAX)?,
            hidden_size,
            intermediate_size: f.required("intermediate_size", 1, HIDDEN_MAX)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: f.number("rms_norm_eps", 0.0, 1.0)?.unwrap_or(traits.eps) as f32,
            max_position_embeddings,
            tie_word_embeddings: f.flag("tie_word_embeddings", false)?,
            headless: false,
            rope: rope.expect("the model's own rotations are always read"),
            local_rope,
            rotations: vec![Rotation::Model; num_hidden_layers],
            rotary_dim,
            paired: false,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: QkNorm::None,
            norms: NormPlaces::Before,
            norm_offset: 0.0,
            hidden_act: traits.activation,
            embedding_scale: None,
            query_scale,
            residual_multiplier: None,
            logits_scaling: None,
            attn_logit_softcapping: f.number("attn_logit_softcapping", CAP_MIN, CAP_MAX)?.map(|cap| cap as f32),
            final_logit_softcapping: f.number("final_logit_softcapping", CAP_MIN, CAP_MAX)?.map(|cap| cap as f32),
            layer_names: LayerNames::PLAIN,
            sinks: false,
            windows: vec![None; num_hidden_layers],
            latent: traits.latent,
            experts: None,
            encoder: None,
            causal: true,
            pools_all: false,
            chain: Vec::new(),
            quantization: if traits.mxfp4 { None } else { Quantization::read(f)? },
            eos_token_id: f.token_ids("eos_token_id")?,
        })
    }

    /// Sets the width of a head, all of which is rotated.
    pub(crate) fn set_head_dim(&mut self, head_dim: usize) {
        (self.head_dim, self.rotary_dim) = (head_dim, head_dim);
        self.query_scale = (head_dim as f64).powf(-0.5);
    }

    /// Returns true if a text is computed whole in one step, for a vector or a score and never for text that goes on: that of an encoder, and of a
    /// decoder whose tokens see later ones or whose vectors are made of all states.
    pub fn is_whole(&self) -> bool {
        self.encoder.is_some() || !self.causal || self.pools_all
    }

    /// Leaves the head out of a decoder that makes no text.
    pub(crate) fn lose_head_if_whole(&mut self) {
        if self.is_whole() {
            (self.tie_word_embeddings, self.headless) = (false, true);
        }
    }

    /// The decoder alone, without the model around it that has a head.
    pub(crate) fn without_head(self) -> Self {
        Self { tie_word_embeddings: false, headless: true, ..self }
    }

    /// Dense layers behind the pooling.
    pub fn dense_layers(&self) -> impl Iterator<Item = &DenseConfig> {
        self.chain.iter().filter_map(|step| match step {
            ChainStep::Normalize => None,
            ChainStep::Dense(dense) => Some(dense),
        })
    }

    /// Values of a vector.
    pub fn vector_width(&self) -> usize {
        self.dense_layers().last().map_or(self.hidden_size, |dense| dense.out_features)
    }

    /// Device features that the model needs beyond the operations of a plain decoder.
    pub fn features(&self) -> impl Iterator<Item = Feature> {
        let is_encoder = self.encoder.is_some();
        let is_whole = self.is_whole() || !self.chain.is_empty();
        let has_caps = self.attn_logit_softcapping.is_some() || self.final_logit_softcapping.is_some();
        let needed = [
            (Feature::EmbeddingScale, self.embedding_scale.is_some()),
            (Feature::GeluTanh, self.hidden_act == Activation::GeluTanh),
            (Feature::PostNorms, self.norms.after() && !is_encoder),
            (Feature::SoftCaps, has_caps),
            (Feature::ResidualScale, self.residual_multiplier.is_some()),
            (Feature::LogitsScale, self.logits_scaling.is_some()),
            (Feature::JointHeadNorms, self.qk_norm == QkNorm::Together),
            (Feature::PartialRotation, self.rotary_dim < self.head_dim && self.latent.is_none()),
            (Feature::NoRotation, self.rotations.contains(&Rotation::None) && !is_encoder),
            (Feature::Encoders, is_whole),
            (Feature::ClampedSwiglu, matches!(self.hidden_act, Activation::ClampedSwiglu { .. })),
            (Feature::Sinks, self.sinks),
            (Feature::ExpertBiases, self.experts.as_ref().is_some_and(|experts| experts.bias)),
            (Feature::Latents, self.latent.is_some()),
            (
                Feature::GroupedRouting,
                self.experts
                    .as_ref()
                    .is_some_and(|experts| experts.routing != RoutingConfig::SOFTMAX || experts.shared_gated),
            ),
        ];
        needed.into_iter().filter(|(_, needed)| *needed).map(|(feature, _)| feature)
    }

    /// Values of KV per token and layer, as devices hold them: a latent is held as a part of its key, and as a value.
    pub(crate) fn kv_values(&self) -> usize {
        let values = self.latent.map_or(self.head_dim, |latent| latent.kv_lora_rank);
        self.num_key_value_heads * (self.head_dim + values)
    }

    /// Bytes of KV per token and layer, as devices other than the reference keep it if `asked` is asked for.
    pub(crate) fn kv_bytes(&self, asked: KvFormat) -> usize {
        match self.latent {
            Some(_) => 2 * self.kv_values(),
            None => 2 * self.num_key_value_heads * self.kv_format(asked).row_bytes(self.head_dim),
        }
    }

    /// Form of keys and values if `asked` is asked for: what a model of whole texts computes of one is of no use to another, and is not worth rounding.
    pub(crate) fn kv_format(&self, asked: KvFormat) -> KvFormat {
        if self.is_whole() { KvFormat::Own } else { asked }
    }

    /// Number of KV layers: one in a model of whole texts, which every layer overwrites with its own KV.
    pub(crate) fn kv_layers(&self) -> usize {
        if self.is_whole() { 1 } else { self.num_hidden_layers }
    }

    /// Values of a row of attention's output, over all heads.
    pub(crate) fn attended_dim(&self) -> usize {
        self.num_attention_heads * self.latent.map_or(self.head_dim, |latent| latent.v_head_dim)
    }

    /// Returns true if `layer` has experts in the place of its MLP.
    pub(crate) fn is_sparse(&self, layer: usize) -> bool {
        self.experts.as_ref().is_some_and(|experts| experts.layers[layer])
    }

    /// Width of the MLPs of layers without experts; 0 if all layers have experts.
    pub(crate) fn dense_width(&self) -> usize {
        let is_dense = (0..self.num_hidden_layers).any(|layer| !self.is_sparse(layer));
        if is_dense { self.intermediate_size } else { 0 }
    }
}

/// Width of a head: `head_dim`, or `hidden_size / num_attention_heads` where it is absent.
fn head_dim(f: &Fields<'_>, hidden: usize, heads: usize) -> Result<usize, CheckpointError> {
    let derived = |name| if hidden.is_multiple_of(heads) { Ok(hidden / heads) } else { Err(f.missing(name)) };
    let head_dim = f.integer("head_dim", 2, HEAD_DIM_MAX)?.map_or_else(|| derived("head_dim"), Ok)?;
    if head_dim % 2 != 0 || head_dim > HEAD_DIM_MAX {
        return Err(f.refuse("head_dim", format!("is {head_dim}, needs an even number up to {HEAD_DIM_MAX}")));
    }
    Ok(head_dim)
}

/// Values of each head that are rotated: `partial_rotary_factor` of them, which stands in the rope object or beside it.
fn rotary_dim(f: &Fields<'_>, head_dim: usize) -> Result<usize, CheckpointError> {
    const NAME: &str = "partial_rotary_factor";
    let inner = rope_object(f)?.map_or(Ok(None), |inner| inner.number(NAME, 0.0, 1.0))?;
    let factor = inner.map_or_else(|| f.number(NAME, 0.0, 1.0), |factor| Ok(Some(factor)))?;
    let Some(factor) = factor else { return Ok(head_dim) };
    let dim = (head_dim as f64 * factor) as usize;
    if dim < 2 || !dim.is_multiple_of(2) {
        return Err(f.refuse(NAME, format!("is {factor}: {dim} of {head_dim} values, needs an even number above 0")));
    }
    Ok(dim)
}

/// Refuses fields that change the computation and that the family does not have.
fn refuse_unsupported(f: &Fields<'_>, traits: &Traits) -> Result<(), CheckpointError> {
    // Other families read the field as a whole (`Quantization::read`).
    if let Some(quantized) = f.object("quantization_config")?.filter(|_| traits.mxfp4)
        && quantized.text("quant_method")? != Some("mxfp4")
    {
        let help = "serve the original bf16, f16 or f32 checkpoint";
        return Err(f.refuse("quantization_config", "quantized weights are not supported").help(help));
    }
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if !traits.soft_caps && f.value(name).is_some() {
            return Err(f.refuse(name, "soft-capping is not supported in this architecture"));
        }
    }
    for (object, name) in [(Some(f.clone()), "partial_rotary_factor"), (rope_object(f)?, "partial_rotary_factor")] {
        if let Some(fields) = object
            && let Some(factor) = fields.number(name, 0.0, 1.0)?
            && factor != 1.0
            && !traits.partial_rotation
        {
            let reason = format!("is {factor}; rotating part of a head is not supported in this architecture");
            return Err(fields.refuse(name, reason));
        }
    }
    let (name, known): (_, &[&str]) = match traits.activation {
        Activation::Silu | Activation::ClampedSwiglu { .. } => ("hidden_act", &["silu", "swish"]),
        // Gemma's checkpoints have both fields; the second one counts.
        Activation::GeluTanh => ("hidden_activation", &["gelu_pytorch_tanh"]),
        Activation::GeluErf | Activation::Tanh => ("hidden_act", &["gelu"]),
    };
    match f.text(name)? {
        Some(other) if !known.contains(&other) => {
            let reason = format!("\"{}\" is not supported, only \"{}\" is", error::Shown(other), known[0]);
            Err(f.refuse(name, reason))
        }
        _ => Ok(()),
    }
}

/// Values of `generation_config.json`: the sampling recommended by the model's makers. Absent fields are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Whether to sample; `false` means greedy.
    pub do_sample: Option<bool>,
    /// Temperature, at least 0; 0 is greedy.
    pub temperature: Option<f64>,
    /// Nucleus probability (top-p), in `0..=1`; 1 keeps all tokens.
    pub top_p: Option<f64>,
    /// Number of most probable tokens; 0 means all.
    pub top_k: Option<usize>,
    /// Least probability of a kept token relative to the best one's (min-p), in `0..=1`; 0 keeps all.
    pub min_p: Option<f64>,
    /// Repetition penalty, above 0; 1 means none.
    pub repetition_penalty: Option<f64>,
    /// End tokens, in addition to those of `config.json`.
    pub eos_token_id: Vec<u32>,
}

impl GenerationConfig {
    pub(crate) fn read(f: &Fields<'_>) -> Result<Self, CheckpointError> {
        // Some checkpoints write -1 for "all tokens".
        let top_k = match f.value("top_k").and_then(serde_json::Value::as_i64) {
            Some(-1) => Some(0),
            _ => f.integer("top_k", 0, usize::MAX)?,
        };
        Ok(Self {
            do_sample: f.value("do_sample").map(|_| f.flag("do_sample", false)).transpose()?,
            temperature: f.number("temperature", 0.0, 1e6)?,
            top_p: f.number("top_p", 0.0, 1.0)?,
            top_k,
            min_p: f.number("min_p", 0.0, 1.0)?,
            repetition_penalty: f.number("repetition_penalty", 1e-6, 1e6)?,
            eos_token_id: f.token_ids("eos_token_id")?,
        })
    }
}
