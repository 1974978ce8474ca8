//! Fields of encoders: models whose tokens see all others of their text.

use penstock_kernels::Activation;

use super::error::{CheckpointError, Shown};
use super::fields::Fields;
use super::{
    HEADS_MAX, HIDDEN_MAX, LAYERS_MAX, ModelConfig, NormPlaces, POSITIONS_MAX, QkNorm, RopeParameters, RopeScaling,
    Rotation, THETA, VOCAB_MAX,
};

/// Most types of tokens; two are usual.
const TYPES_MAX: usize = 1 << 16;

/// Values that an encoder has beyond those of [`ModelConfig`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderConfig {
    /// Rows of the table of positions before that of position 0.
    pub first_position: usize,
    /// Types of tokens, which tell two texts apart.
    pub type_vocab_size: usize,
    /// Head that makes one value of a text; `None` gives the states of tokens.
    pub head: Option<HeadNames>,
}

/// Names of the two layers of a classification head, before `.weight` and `.bias`: one with tanh, and one of a single output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadNames {
    /// Layer from the first token's state to as many values.
    pub dense: &'static str,
    /// Layer from these to the result.
    pub out: &'static str,
}

impl ModelConfig {
    /// Reads an encoder of BERT's kind whose positions begin behind `first_position` rows of their table.
    pub(crate) fn read_encoder(
        f: &Fields<'_>,
        first_position: usize,
        head: Option<HeadNames>,
    ) -> Result<Self, CheckpointError> {
        refuse_unsupported(f)?;
        if head.is_some() {
            one_label(f)?;
        }
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
        let positions = f.required("max_position_embeddings", first_position + 1, POSITIONS_MAX)?;
        let type_vocab_size = f.integer("type_vocab_size", 1, TYPES_MAX)?.unwrap_or(2);
        Ok(Self {
            vocab_size: f.required("vocab_size", 1, VOCAB_MAX)?,
            hidden_size,
            intermediate_size: f.required("intermediate_size", 1, HIDDEN_MAX)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: num_attention_heads,
            head_dim,
            rms_norm_eps: f.number("layer_norm_eps", 0.0, 1.0)?.unwrap_or(1e-12) as f32,
            max_position_embeddings: positions - first_position,
            tie_word_embeddings: false,
            headless: true,
            rope: RopeParameters { rope_theta: THETA, scaling: RopeScaling::Default },
            local_rope: None,
            rotations: vec![Rotation::None; num_hidden_layers],
            rotary_dim: head_dim,
            qkv_bias: true,
            output_bias: true,
            mlp_bias: true,
            qk_norm: QkNorm::None,
            norms: NormPlaces::After,
            norm_offset: 0.0,
            hidden_act: activation(f)?,
            embedding_scale: None,
            query_scale: (head_dim as f64).powf(-0.5),
            attn_logit_softcapping: None,
            final_logit_softcapping: None,
            fused: false,
            sinks: false,
            windows: vec![None; num_hidden_layers],
            latent: None,
            experts: None,
            quantization: None,
            eos_token_id: Vec::new(),
            encoder: Some(EncoderConfig { first_position, type_vocab_size, head }),
        })
    }
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
    match f.text("position_embedding_type")? {
        Some(other) if other != "absolute" => {
            let reason = format!("\"{}\" is not supported, only \"absolute\" is", Shown(other));
            Err(f.refuse("position_embedding_type", reason))
        }
        _ => Ok(()),
    }
}

/// Activation of the MLP; GELU by the error function where the config names none.
fn activation(f: &Fields<'_>) -> Result<Activation, CheckpointError> {
    match f.text("hidden_act")?.unwrap_or("gelu") {
        "gelu" => Ok(Activation::GeluErf),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => {
            let reason = format!("\"{}\" is not supported", Shown(other));
            Err(f.refuse("hidden_act", reason).help("supported: gelu, gelu_new, gelu_pytorch_tanh"))
        }
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
