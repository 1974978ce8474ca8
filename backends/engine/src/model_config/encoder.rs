//! Fields of encoders: models whose tokens see all others of their text.

use penstock_kernels::Activation;
use serde_json::{Map, Value};

use super::error::{CheckpointError, Shown};
use super::fields::Fields;
use super::{
    HEADS_MAX, HIDDEN_MAX, LAYERS_MAX, LayerNames, ModelConfig, NormPlaces, POSITIONS_MAX, QkNorm, RopeParameters,
    RopeScaling, Rotation, THETA, THETA_MAX, VOCAB_MAX, layer_types,
};

/// Base of the rotations of ModernBERT's layers without a window, where the config has none.
const GLOBAL_THETA: f64 = 160_000.0;

/// Most types of tokens; two are usual.
const TYPES_MAX: usize = 1 << 16;

/// Values that an encoder has beyond those of [`ModelConfig`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderConfig {
    /// Names of the tensors.
    pub names: &'static EncoderNames,
    /// Rows of the table of positions before that of position 0.
    pub first_position: usize,
    /// Types of tokens, which tell two texts apart.
    pub type_vocab_size: usize,
    /// True if layer norms have a bias.
    pub norm_bias: bool,
    /// True if the first layer has no norm before its attention, behind that of the embeddings.
    pub skips_first_norm: bool,
    /// True if the MLP has a gate.
    pub gated: bool,
    /// Head that makes one value of a text; `None` gives the states of tokens.
    pub head: Option<HeadConfig>,
}

impl EncoderConfig {
    /// Returns true if `layer` has a norm before or behind its attention.
    pub(crate) fn has_attention_norm(&self, layer: usize) -> bool {
        layer > 0 || !self.skips_first_norm
    }
}

/// Names of an encoder's tensors; those of matrices and norms are before `.weight` and `.bias`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderNames {
    /// Embedding of tokens.
    pub words: &'static str,
    /// Table of positions; `None` in models with rotations.
    pub positions: Option<&'static str>,
    /// Table of token types; `None` in models without them.
    pub types: Option<&'static str>,
    /// Bias of attention by buckets of relative positions, `[buckets, heads]`, which all layers share; `None` in models without it.
    pub offsets: Option<&'static str>,
    /// Norm of the embeddings' sum.
    pub norm: &'static str,
    /// List of the layers.
    pub layers: &'static str,
    /// Norm before or behind a layer's attention, as the names below in the layer.
    pub attention_norm: &'static str,
    /// Projections to queries, keys and values: three matrices, or one of all.
    pub qkv: &'static [&'static str],
    /// Output projection of attention.
    pub output: &'static str,
    /// Norm before or behind the MLP.
    pub mlp_norm: &'static str,
    /// First matrix of the MLP; with a gate, both of them, that of the activation first.
    pub up: &'static str,
    /// Matrix of the activation where it is not stored with the other one.
    pub gate: Option<&'static str>,
    /// Last matrix of the MLP.
    pub down: &'static str,
    /// Norm behind the last layer.
    pub last_norm: Option<&'static str>,
}

/// Classification head: a dense layer with an activation, in some models a norm, and a layer of a single output with a bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadConfig {
    /// Name of the layer from the pooled state to as many values, before `.weight` and `.bias`.
    pub dense: &'static str,
    /// True if that layer has a bias.
    pub dense_bias: bool,
    /// Function behind that layer.
    pub activation: Activation,
    /// Name of the norm behind the function.
    pub norm: Option<&'static str>,
    /// Name of the layer to the result.
    pub out: &'static str,
    /// True if the pooled state is the mean of all tokens; false takes that of the first.
    pub of_mean: bool,
}

impl HeadConfig {
    /// Head with a hyperbolic tangent over the first token's state, as BERT and RoBERTa have it.
    pub(crate) const fn tanh(dense: &'static str, out: &'static str) -> Self {
        Self { dense, dense_bias: true, activation: Activation::Tanh, norm: None, out, of_mean: false }
    }
}

impl ModelConfig {
    /// Reads an encoder of BERT's kind whose positions begin behind `first_position` rows of their table.
    pub(crate) fn read_encoder(
        f: &Fields<'_>,
        names: &'static EncoderNames,
        first_position: usize,
        head: Option<HeadConfig>,
    ) -> Result<Self, CheckpointError> {
        refuse_unsupported(f)?;
        only_absolute(f)?;
        if head.is_some() {
            one_label(f)?;
        }
        let positions = f.required("max_position_embeddings", first_position + 1, POSITIONS_MAX)?;
        let type_vocab_size =
            if names.types.is_none() { 1 } else { f.integer("type_vocab_size", 1, TYPES_MAX)?.unwrap_or(2) };
        if names.offsets.is_some() {
            buckets(f)?;
        }
        let encoder = EncoderConfig {
            names,
            first_position,
            type_vocab_size,
            norm_bias: true,
            skips_first_norm: false,
            gated: false,
            head,
        };
        Ok(Self {
            rms_norm_eps: f.number("layer_norm_eps", 0.0, 1.0)?.unwrap_or(1e-12) as f32,
            max_position_embeddings: positions - first_position,
            qkv_bias: true,
            output_bias: true,
            mlp_bias: true,
            hidden_act: activation(f, "hidden_act")?,
            ..Self::read_sizes(f, encoder)?
        })
    }

    /// Reads an encoder of ModernBERT's kind, with the activation and the pooling of `head` as the config has them.
    pub(crate) fn read_modern_encoder(
        f: &Fields<'_>,
        names: &'static EncoderNames,
        head: Option<HeadConfig>,
    ) -> Result<Self, CheckpointError> {
        refuse_unsupported(f)?;
        let head = match head {
            None => None,
            Some(head) => {
                one_label(f)?;
                let activation = activation(f, "classifier_activation")?;
                Some(HeadConfig { activation, of_mean: is_of_mean(f)?, ..head })
            }
        };
        let norm_bias = f.flag("norm_bias", false)?;
        let encoder = EncoderConfig {
            names,
            first_position: 0,
            type_vocab_size: 1,
            norm_bias,
            skips_first_norm: true,
            gated: true,
            head,
        };
        let config = Self::read_sizes(f, encoder)?;
        let layers = config.num_hidden_layers;
        let attention_bias = f.flag("attention_bias", false)?;
        let window = f.integer("local_attention", 2, POSITIONS_MAX)?.unwrap_or(128) / 2 + 1;
        let every = f.integer("global_attn_every_n_layers", 1, usize::MAX)?.unwrap_or(3);
        let slides =
            layer_types(f, layers)?.unwrap_or_else(|| (0..layers).map(|layer| !layer.is_multiple_of(every)).collect());
        let [rope, local_rope] = modern_ropes(f)?;
        Ok(Self {
            rms_norm_eps: f.number("norm_eps", 0.0, 1.0)?.unwrap_or(1e-5) as f32,
            max_position_embeddings: f.required("max_position_embeddings", 1, POSITIONS_MAX)?,
            rope,
            local_rope: Some(local_rope),
            rotations: slides.iter().map(|slides| if *slides { Rotation::Local } else { Rotation::Model }).collect(),
            windows: slides.iter().map(|slides| slides.then_some(window)).collect(),
            qkv_bias: attention_bias,
            output_bias: attention_bias,
            mlp_bias: f.flag("mlp_bias", false)?,
            norms: NormPlaces::Before,
            hidden_act: activation(f, "hidden_activation")?,
            ..config
        })
    }

    /// Reads an encoder of NomicBERT's kind: norms behind the blocks, rotations of base `theta`, and a gated MLP without biases.
    pub(crate) fn read_rotated_encoder(
        f: &Fields<'_>,
        names: &'static EncoderNames,
        theta: f64,
        positions: usize,
    ) -> Result<Self, CheckpointError> {
        refuse_unsupported(f)?;
        let encoder = EncoderConfig {
            names,
            first_position: 0,
            type_vocab_size: f.integer("type_vocab_size", 1, TYPES_MAX)?.unwrap_or(2),
            norm_bias: true,
            skips_first_norm: false,
            gated: true,
            head: None,
        };
        let config = Self::read_sizes(f, encoder)?;
        Ok(Self {
            rms_norm_eps: f.number("layer_norm_eps", 0.0, 1.0)?.unwrap_or(1e-12) as f32,
            max_position_embeddings: positions,
            rope: RopeParameters { rope_theta: theta, scaling: RopeScaling::Default },
            rotations: vec![Rotation::Model; config.num_hidden_layers],
            hidden_act: Activation::Silu,
            ..config
        })
    }

    /// Reads the sizes that all encoders have; what differs is that of BERT, without biases.
    fn read_sizes(f: &Fields<'_>, encoder: EncoderConfig) -> Result<Self, CheckpointError> {
        let hidden_size = f.required("hidden_size", 1, HIDDEN_MAX)?;
        let num_attention_heads = f.required("num_attention_heads", 1, HEADS_MAX)?;
        if !hidden_size.is_multiple_of(2 * num_attention_heads) {
            let reason = format!(
                "is {num_attention_heads}: hidden_size ({hidden_size}) must be a multiple of twice the number of heads"
            );
            return Err(f.refuse("num_attention_heads", reason));
        }
        let head_dim = hidden_size / num_attention_heads;
        let num_hidden_layers = f.required("num_hidden_layers", 1, LAYERS_MAX)?;
        Ok(Self {
            vocab_size: f.required("vocab_size", 1, VOCAB_MAX)?,
            hidden_size,
            intermediate_size: f.required("intermediate_size", 1, HIDDEN_MAX)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: num_attention_heads,
            head_dim,
            rms_norm_eps: 0.0,
            max_position_embeddings: 1,
            tie_word_embeddings: false,
            headless: true,
            rope: RopeParameters { rope_theta: THETA, scaling: RopeScaling::Default },
            local_rope: None,
            rotations: vec![Rotation::None; num_hidden_layers],
            rotary_dim: head_dim,
            paired: false,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: QkNorm::None,
            norms: NormPlaces::After,
            norm_offset: 0.0,
            hidden_act: Activation::GeluErf,
            embedding_scale: None,
            query_scale: (head_dim as f64).powf(-0.5),
            residual_multiplier: None,
            logits_scaling: None,
            attn_logit_softcapping: None,
            final_logit_softcapping: None,
            layer_names: LayerNames::PLAIN,
            sinks: false,
            windows: vec![None; num_hidden_layers],
            latent: None,
            experts: None,
            quantization: None,
            causal: false,
            pools_all: false,
            chain: Vec::new(),
            eos_token_id: Vec::new(),
            encoder: Some(encoder),
        })
    }
}

/// Values of fields under the names that transformers has, for configs that have them under others: pairs of ours and theirs.
pub(crate) fn renamed(f: &Fields<'_>, names: &[(&str, &str)]) -> Map<String, Value> {
    names.iter().filter_map(|(ours, theirs)| Some(((*ours).to_owned(), f.value(theirs)?.clone()))).collect()
}

/// Refuses fields that change the computation.
fn refuse_unsupported(f: &Fields<'_>) -> Result<(), CheckpointError> {
    if f.value("quantization_config").is_some() {
        let help = "serve the original bf16, f16 or f32 checkpoint";
        return Err(f.refuse("quantization_config", "quantized weights are not supported").help(help));
    }
    for name in ["is_decoder", "add_cross_attention"] {
        if f.flag(name, false)? {
            return Err(f.refuse(name, "is true; models of this architecture are served only as encoders"));
        }
    }
    Ok(())
}

/// Refuses positions that are no table. Encoders with rotations have the field, too, and never read it: mmBERT's says "sans_pos".
fn only_absolute(f: &Fields<'_>) -> Result<(), CheckpointError> {
    match f.text("position_embedding_type")? {
        Some(other) if other != "absolute" => {
            let reason = format!("\"{}\" is not supported, only \"absolute\" is", Shown(other));
            Err(f.refuse("position_embedding_type", reason))
        }
        _ => Ok(()),
    }
}

/// Activation that a field names; GELU by the error function where the config names none.
pub(crate) fn activation(f: &Fields<'_>, name: &str) -> Result<Activation, CheckpointError> {
    match f.text(name)?.unwrap_or("gelu") {
        "gelu" => Ok(Activation::GeluErf),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => {
            let reason = format!("\"{}\" is not supported", Shown(other));
            Err(f.refuse(name, reason).help("supported: gelu, gelu_new, gelu_pytorch_tanh"))
        }
    }
}

/// Returns true if a classification head is over the mean of all tokens, false if over the first.
fn is_of_mean(f: &Fields<'_>) -> Result<bool, CheckpointError> {
    match f.text("classifier_pooling")?.unwrap_or("cls") {
        "cls" => Ok(false),
        "mean" => Ok(true),
        other => {
            let reason = format!("\"{}\" is not supported, only \"cls\" and \"mean\" are", Shown(other));
            Err(f.refuse("classifier_pooling", reason))
        }
    }
}

/// Rotations of ModernBERT's layers without and with a window: `rope_parameters` by kind of layer, or the older `global_rope_theta` and
/// `local_rope_theta`; a null `local_rope_theta` is the global one.
fn modern_ropes(f: &Fields<'_>) -> Result<[RopeParameters; 2], CheckpointError> {
    if f.value("rope_scaling").is_some() {
        return Err(f.refuse("rope_scaling", "scaled rotations are not supported in this architecture"));
    }
    let inner = f.object("rope_parameters")?;
    for name in ["rope_type", "rope_theta"] {
        if let Some(inner) = inner.as_ref().filter(|inner| inner.value(name).is_some()) {
            let reason = "is not inside of full_attention or sliding_attention, as this architecture has it";
            return Err(inner.refuse(name, reason));
        }
    }
    let rope = |kind: &str, outer: &str, default: f64| {
        let own = inner.as_ref().map_or(Ok(None), |inner| inner.object(kind))?;
        if let Some(own) = &own {
            match own.text("rope_type")? {
                Some(other) if other != "default" => {
                    let reason = format!("\"{}\" is not supported, only \"default\" is", Shown(other));
                    return Err(own.refuse("rope_type", reason));
                }
                _ => {}
            }
        }
        let theta = own.map_or(Ok(None), |own| own.number("rope_theta", 2.0, THETA_MAX))?;
        let theta = theta.map_or_else(|| f.number(outer, 2.0, THETA_MAX), |theta| Ok(Some(theta)))?;
        Ok(RopeParameters { rope_theta: theta.unwrap_or(default), scaling: RopeScaling::Default })
    };
    let global = rope("full_attention", "global_rope_theta", GLOBAL_THETA)?;
    let of_local = if f.has("local_rope_theta") { global.rope_theta } else { THETA };
    let local = rope("sliding_attention", "local_rope_theta", of_local)?;
    Ok([global, local])
}

/// Refuses other numbers of buckets than those into which transformers sorts relative positions, whatever the config says.
fn buckets(f: &Fields<'_>) -> Result<(), CheckpointError> {
    const NAME: &str = "relative_attention_num_buckets";
    match f.integer(NAME, 0, usize::MAX)? {
        None | Some(EncoderNames::BUCKETS) => Ok(()),
        Some(other) => Err(f.refuse(NAME, format!("is {other}, only {} are supported", EncoderNames::BUCKETS))),
    }
}

/// Refuses heads of several labels: `id2label` has one entry each, and two are the default.
fn one_label(f: &Fields<'_>) -> Result<(), CheckpointError> {
    let listed = f.value("id2label").and_then(serde_json::Value::as_object).map(serde_json::Map::len);
    let labels = match listed {
        Some(count) => count,
        None => f.integer("num_labels", 0, usize::MAX)?.unwrap_or(2),
    };
    if labels == 1 {
        return Ok(());
    }
    let name = if listed.is_some() { "id2label" } else { "num_labels" };
    Err(f.refuse(name, format!("has {labels} labels: only rerankers, which have 1 label, are served")))
}
