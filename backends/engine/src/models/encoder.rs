//! The encoder that the families share: layers of attention over the whole text and MLP around one residual stream, with a layer norm behind each.
//!
//! Papers: Vaswani et al. 2017 (arXiv:1706.03762), Devlin et al. 2018 (arXiv:1810.04805). Follows transformers `modeling_bert.py`, whose names the
//! tensors have. A text is computed whole in one step, since each token sees the later ones; so all layers share one layer of KV pages, which each
//! fills before it reads it.

use penstock_kernels::{
    Activation, AttentionSpec, Buffer, BufferSpec, Device, HeadNorms, Held, KernelError, KvSpec, Rows, StepBatch,
    TableIndex, Weight, WeightSpec,
};

use super::decoder::{Loader, Refused};
use crate::families::encoder as names;
use crate::model_config::{EncoderConfig, HeadNames, ModelConfig};

/// The layer of KV pages that all layers use.
const KV_LAYER: usize = 0;

/// An encoder on a device, as handles of its weights and buffers.
#[derive(Debug)]
pub(super) struct Encoder {
    eps: f32,
    embedding: Weight,
    /// Tables of positions and of token types.
    tables: [Weight; 2],
    norm: Norm,
    attention: AttentionSpec,
    layers: Vec<Layer>,
    activation: Activation,
    head: Option<Head>,
    buffers: Buffers,
}

/// A layer norm.
#[derive(Clone, Copy, Debug)]
struct Norm {
    weight: Weight,
    bias: Weight,
}

#[derive(Debug)]
struct Layer {
    qkv: Weight,
    output: Weight,
    attention_norm: Norm,
    up: Weight,
    down: Weight,
    mlp_norm: Norm,
}

/// Classification head of one output.
#[derive(Debug)]
struct Head {
    dense: Weight,
    out: Weight,
}

/// Activations of a step.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    /// Residual stream of the step's rows, `[batch, hidden]`.
    residual: Buffer,
    /// Queries, `[batch, hidden]`.
    queries: Buffer,
    /// Output of attention, `[batch, hidden]`.
    attended: Buffer,
    /// Activations of the MLP, `[batch, intermediate]`.
    activated: Buffer,
    /// States of the sampled rows, as they are pooled, `[sampled, hidden]`.
    pooled: Buffer,
    /// Values between the two layers of the head, `[sampled, hidden]`.
    headed: Buffer,
}

impl Loader<'_> {
    fn layer_norm(&mut self, name: &str) -> Result<Norm, Refused> {
        let mut load = |part: &str| self.vector(format!("{name}.{part}"), 0.0);
        Ok(Norm { weight: load("weight")?, bias: load("bias")? })
    }

    /// Linear layer with its bias.
    fn biased(&mut self, parts: &[String], held: Held) -> Result<Weight, Refused> {
        let matrices: Vec<String> = parts.iter().map(|part| format!("{part}.weight")).collect();
        self.linear(&matrices, held, true)
    }

    fn table(&mut self, name: &str, index: TableIndex) -> Result<Weight, Refused> {
        self.load(&[name.to_owned()], Held::Stored, |mut parts| WeightSpec::Table { tensor: parts.remove(0), index })
    }

    fn encoder_layer(&mut self, layer: usize) -> Result<Layer, Refused> {
        let part = |part: &str| names::layer_part(layer, part);
        let held = self.held;
        Ok(Layer {
            qkv: self.biased(&names::QKV.map(part), held)?,
            output: self.biased(&[part(names::OUTPUT)], held)?,
            attention_norm: self.layer_norm(&part(names::ATTENTION_NORM))?,
            up: self.biased(&[part(names::UP)], held)?,
            down: self.biased(&[part(names::DOWN)], held)?,
            mlp_norm: self.layer_norm(&part(names::MLP_NORM))?,
        })
    }

    fn head(&mut self, HeadNames { dense, out }: HeadNames) -> Result<Head, Refused> {
        let mut load = |name: &str| self.biased(&[name.to_owned()], Held::Stored);
        Ok(Head { dense: load(dense)?, out: load(out)? })
    }
}

impl Encoder {
    /// Loads all weights and allocates activations and KV pages.
    pub(super) fn load(loader: &mut Loader<'_>, e: &EncoderConfig, pages: usize) -> Result<Self, Refused> {
        let c = loader.checkpoint.config();
        let refused = |what: &str| {
            let tensor = what.to_owned();
            move |source| Refused { tensor, source }
        };
        // The KV pages come first: theirs is the one allocation that fails with a wrong budget.
        let (kv_heads, head_dim) = (c.num_key_value_heads, c.head_dim);
        let kv = KvSpec { layers: c.kv_layers(), kv_heads, head_dim, latent: None, pages };
        loader.device.kv(kv).map_err(refused("KV pages"))?;
        let buffers = Buffers::new(loader.device, c).map_err(refused("activations"))?;
        let words = [names::WORDS.to_owned()];
        let embedding = loader.load(&words, Held::Stored, |mut parts| WeightSpec::Embedding(parts.remove(0)))?;
        let positions = loader.table(names::POSITIONS, TableIndex::Position { first: e.first_position })?;
        let types = loader.table(names::TYPES, TableIndex::Type)?;
        let attention = AttentionSpec {
            heads: c.num_attention_heads,
            kv_heads,
            head_dim,
            latent: None,
            scale: c.query_scale as f32,
            causal: false,
            window: None,
            soft_cap: None,
            sinks: None,
            rope: None,
            norms: HeadNorms::None,
            norm_eps: 0.0,
        };
        Ok(Self {
            eps: c.rms_norm_eps,
            embedding,
            tables: [positions, types],
            norm: loader.layer_norm(names::NORM)?,
            attention,
            layers: (0..c.num_hidden_layers).map(|layer| loader.encoder_layer(layer)).collect::<Result<_, _>>()?,
            activation: c.hidden_act,
            head: e.head.map(|head| loader.head(head)).transpose()?,
            buffers,
        })
    }

    /// Runs one step, and appends what is pooled of its sampled rows to `out`: states `[sampled, hidden]`, or the head's values `[sampled, 1]`.
    pub(super) fn states(
        &self,
        device: &mut dyn Device,
        batch: &StepBatch<'_>,
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        let Buffers { residual, queries, attended, activated, pooled, headed } = self.buffers;
        device.begin(batch)?;
        device.embed(residual, self.embedding, 1.0);
        self.tables.iter().for_each(|table| device.add_table(residual, *table));
        self.normed(device, self.norm);
        for layer in &self.layers {
            device.qkv(queries, residual, layer.qkv, &self.attention, KV_LAYER);
            device.attention(attended, queries, &self.attention, KV_LAYER);
            device.linear_add(residual, attended, layer.output);
            self.normed(device, layer.attention_norm);
            device.activated(activated, residual, layer.up, self.activation);
            device.linear_add(residual, activated, layer.down);
            self.normed(device, layer.mlp_norm);
        }
        device.pool(pooled, residual);
        match &self.head {
            None => out.extend(device.read_sampled(pooled)?),
            Some(head) => {
                device.activated(headed, pooled, head.dense, Activation::Tanh);
                out.extend(device.logits(headed, head.out, None)?);
            }
        }
        Ok(())
    }

    fn normed(&self, device: &mut dyn Device, norm: Norm) {
        device.layer_norm(self.buffers.residual, norm.weight, norm.bias, self.eps);
    }
}

impl Buffers {
    fn new(device: &mut dyn Device, c: &ModelConfig) -> Result<Self, KernelError> {
        let mut buffer = |rows, columns| device.buffer(BufferSpec { rows, columns });
        Ok(Self {
            residual: buffer(Rows::Batch, c.hidden_size)?,
            queries: buffer(Rows::Batch, c.hidden_size)?,
            attended: buffer(Rows::Batch, c.hidden_size)?,
            activated: buffer(Rows::Batch, c.intermediate_size)?,
            pooled: buffer(Rows::Sampled, c.hidden_size)?,
            headed: buffer(Rows::Sampled, c.hidden_size)?,
        })
    }
}
