//! Parts of models that not every device computes, and the functions of MLPs.

#[cfg(doc)]
use crate::device::{AttentionSpec, Device, ExpertSpec, HeadNorms, LogitsSpec, RoutingSpec};

/// Function on the gate of a gated MLP, on its gate and up together, or on a projection by itself ([`Device::activated`]).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    #[default]
    Silu,
    /// GELU in its approximation by tanh: `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
    GeluTanh,
    /// GELU by the error function (Hendrycks & Gimpel 2016, arXiv:1606.08415): `x/2 · (1 + erf(x/√2))` ([`Feature::Encoders`]).
    GeluErf,
    /// Hyperbolic tangent, in the heads of encoders ([`Feature::Encoders`]).
    Tanh,
    /// GPT-OSS's SwiGLU, of both: `g · sigmoid(alpha · g) · (u + 1)` with the gate `g` at most `limit`, and `u` within `±limit`.
    ClampedSwiglu {
        /// Largest value of the gate, and largest magnitude of the other factor.
        limit: f32,
        /// Factor in the sigmoid; at 1.702 it comes near GELU.
        alpha: f32,
    },
}

/// Parts of a model that not every device computes. A device that lacks one refuses a model that needs it when it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Factor of [`Device::embed`] other than 1.
    EmbeddingScale,
    /// [`Activation::GeluTanh`].
    GeluTanh,
    /// Norms behind attention and MLP: [`Device::linear`] and [`Device::norm_add`].
    PostNorms,
    /// Soft caps of attention scores and of logits.
    SoftCaps,
    /// Norms over all query heads and over all key heads of a row: [`HeadNorms::Together`].
    JointHeadNorms,
    /// Scale of [`Device::linear_add`] other than 1.
    ResidualScale,
    /// Divisor of logits other than 1: [`LogitsSpec::divisor`].
    LogitsScale,
    /// Rotation of a part of each head.
    PartialRotation,
    /// Layers without rotation.
    NoRotation,
    /// [`Activation::ClampedSwiglu`].
    ClampedSwiglu,
    /// Attention sinks: [`AttentionSpec::sinks`].
    Sinks,
    /// Biases of experts ([`ExpertSpec::biases`]) and of their router.
    ExpertBiases,
    /// Attention over latents: [`Device::latent_keys`], [`Device::latent_queries`], [`Device::per_head`], and [`Device::linear`] before them.
    Latents,
    /// Scores, groups, correction or scale of [`RoutingSpec`] other than those of [`RoutingSpec::softmax`].
    GroupedRouting,
    /// Encoders: attention to later tokens ([`AttentionSpec::causal`]) and by relative positions ([`AttentionSpec::offsets`]), [`Device::add_table`], [`Device::layer_norm`],
    /// [`Device::activated`], [`Device::pool`], [`Activation::GeluErf`] and [`Activation::Tanh`].
    Encoders,
    /// Keys and values of 8 bits: [`KvFormat::Int8`](crate::KvFormat::Int8).
    IntegerKv,
    /// Low-rank additions to weights: [`Device::adapt`], and spans with an adapter.
    Adapters,
}

impl Feature {
    /// Name of the feature, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Feature::EmbeddingScale => "a scale of embeddings",
            Feature::GeluTanh => "GELU in the MLP",
            Feature::PostNorms => "norms behind attention and MLP",
            Feature::SoftCaps => "soft caps of scores or logits",
            Feature::JointHeadNorms => "a norm over all heads together",
            Feature::ResidualScale => "a scale of what layers add",
            Feature::LogitsScale => "a scale of logits",
            Feature::PartialRotation => "rotation of a part of each head",
            Feature::NoRotation => "layers without rotation",
            Feature::ClampedSwiglu => "a clamped SwiGLU in the MLP",
            Feature::Sinks => "attention sinks",
            Feature::ExpertBiases => "biases of experts",
            Feature::Latents => "attention over latents (MLA)",
            Feature::GroupedRouting => "a choice of experts by groups or sigmoids",
            Feature::Encoders => "attention to later tokens (an encoder)",
            Feature::IntegerKv => "KV of 8 bits",
            Feature::Adapters => "a LoRA adapter",
        }
    }
}
