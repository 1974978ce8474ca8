//! The encoder that the families share: layers of attention over the whole text, or a window of it, and MLP around one residual stream, with a layer
//! norm before or behind each.
//!
//! Papers: Vaswani et al. 2017 (arXiv:1706.03762), Devlin et al. 2018 (arXiv:1810.04805), Warner et al. 2024 (arXiv:2412.13663). Follows
//! transformers `modeling_bert.py` and `modeling_modernbert.py`. A text is computed whole in one step, since each token sees later ones; so all
//! layers share one layer of KV pages, which each fills before it reads it.

use penstock_kernels::{
    Activation, AttentionSpec, Buffer, BufferSpec, Device, HeadNorms, Held, HostTensor, KernelError, KvFormat, KvSpec,
    LogitsSpec, OffsetBias, RopeSpec, Rows, StepBatch, TableIndex, Weight, WeightSpec,
};

use super::chain::Chain;
use super::loader::{Loader, Refused};
use super::rope::Ropes;
use crate::model_config::{EncoderConfig, EncoderNames, HeadConfig, ModelConfig, NormPlaces, Rotation};

/// The layer of KV pages that all layers use.
const KV_LAYER: usize = 0;

/// An encoder on a device, as handles of its weights and buffers.
#[derive(Debug)]
pub(super) struct Encoder {
    eps: f32,
    embedding: Weight,
    /// Tables of positions and of token types, in models that have them.
    tables: Vec<Weight>,
    norm: Norm,
    layers: Vec<Layer>,
    /// Norm behind the last layer.
    last_norm: Option<Norm>,
    activation: Activation,
    head: Option<Head>,
    /// Steps behind the pooling of a model without a head.
    chain: Chain,
    buffers: Buffers,
}

/// A layer norm.
#[derive(Clone, Copy, Debug)]
struct Norm {
    weight: Weight,
    bias: Option<Weight>,
}

#[derive(Debug)]
struct Layer {
    input_norm: Option<Norm>,
    qkv: Weight,
    attention: AttentionSpec,
    output: Weight,
    /// Norm of the residual once attention is added.
    attention_norm: Option<Norm>,
    mlp_input_norm: Option<Norm>,
    up: Up,
    down: Weight,
    /// Norm of the residual once the MLP is added.
    mlp_norm: Option<Norm>,
}

/// First matrix of an MLP.
#[derive(Clone, Copy, Debug)]
enum Up {
    Plain(Weight),
    Gated(Weight),
}

/// Classification head of one output.
#[derive(Debug)]
struct Head {
    dense: Weight,
    activation: Activation,
    norm: Option<Norm>,
    out: Weight,
}

/// Activations of a step.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    /// Residual stream of the step's rows, `[batch, hidden]`.
    residual: Buffer,
    /// Normed residual, `[batch, hidden]`: input of attention and MLP where norms are before them.
    normed: Buffer,
    /// Queries, `[batch, hidden]`.
    queries: Buffer,
    /// Output of attention, `[batch, hidden]`.
    attended: Buffer,
    /// Activations of the MLP, `[batch, intermediate]`.
    activated: Buffer,
    /// States of the sampled rows, as they are pooled, `[sampled, hidden]`.
    pooled: Buffer,
    /// Values between the two layers of the head, before and behind its norm, `[sampled, hidden]`.
    headed: [Buffer; 2],
}

impl Loader<'_> {
    fn layer_norm(&mut self, name: &str, biased: bool) -> Result<Norm, Refused> {
        let mut load = |part: &str| self.vector(format!("{name}.{part}"), 0.0);
        Ok(Norm { weight: load("weight")?, bias: biased.then(|| load("bias")).transpose()? })
    }

    /// Linear layer of matrices by their names before `.weight`.
    fn stacked(&mut self, parts: &[String], held: Held, biased: bool) -> Result<Weight, Refused> {
        let matrices: Vec<String> = parts.iter().map(|part| format!("{part}.weight")).collect();
        self.linear(&matrices, held, biased)
    }

    fn table(&mut self, name: &str, index: TableIndex) -> Result<Weight, Refused> {
        self.load(&[name.to_owned()], Held::Stored, |mut parts| WeightSpec::Table { tensor: parts.remove(0), index })
    }

    /// Bias of each head by relative positions, from that of each bucket `[buckets, heads]`.
    fn offsets(&mut self, name: &str, heads: usize) -> Result<OffsetBias, Refused> {
        let reach = EncoderNames::REACH;
        let values = self.load_with(&[name.to_owned()], |device, tensors| {
            let tensor = &tensors[0];
            let size = tensor.dtype.block().1;
            let buckets = (0..=2 * reach).map(|index| EncoderNames::bucket(index as isize - reach as isize));
            let buckets: Vec<usize> = buckets.collect();
            let cells = (0..heads).flat_map(|head| buckets.iter().map(move |bucket| bucket * heads + head));
            let bytes: Vec<u8> = cells.flat_map(|cell| &tensor.bytes[cell * size..][..size]).copied().collect();
            let shape = [heads * buckets.len()];
            let tensor = HostTensor { shape: &shape, bytes: &bytes, ..tensor.clone() };
            device.load(&WeightSpec::Vector { tensor, offset: 0.0 }, Held::Stored)
        })?;
        Ok(OffsetBias { values, reach })
    }

    fn encoder_layer(
        &mut self,
        c: &ModelConfig,
        e: &EncoderConfig,
        layer: usize,
        ropes: Option<&Ropes>,
        offsets: Option<OffsetBias>,
    ) -> Result<Layer, Refused> {
        let (names, held) = (e.names, self.held);
        let part = |part: &str| names.layer_part(layer, part);
        let mut norm =
            |name: &str, is_there: bool| is_there.then(|| self.layer_norm(&part(name), e.norm_bias)).transpose();
        let (before, after) = (c.norms.before(), c.norms.after());
        let has_attention_norm = e.has_attention_norm(layer);
        let input_norm = norm(names.attention_norm, before && has_attention_norm)?;
        let attention_norm = norm(names.attention_norm, after && has_attention_norm)?;
        let (mlp_input_norm, mlp_norm) = (norm(names.mlp_norm, before)?, norm(names.mlp_norm, after)?);
        let qkv: Vec<String> = names.qkv.iter().map(|name| part(name)).collect();
        let up = match e.gated {
            false => Up::Plain(self.stacked(&[part(names.up)], held, c.mlp_bias)?),
            true => Up::Gated(self.gated(&names.halves(layer), c.mlp_bias)?),
        };
        Ok(Layer {
            input_norm,
            qkv: self.stacked(&qkv, held, c.qkv_bias)?,
            attention: AttentionSpec {
                heads: c.num_attention_heads,
                kv_heads: c.num_key_value_heads,
                head_dim: c.head_dim,
                latent: None,
                scale: c.query_scale as f32,
                causal: false,
                window: c.windows[layer],
                soft_cap: None,
                offsets,
                sinks: None,
                rope: ropes.and_then(|ropes| ropes.of(c.rotations[layer])),
                norms: HeadNorms::None,
                norm_eps: 0.0,
            },
            output: self.stacked(&[part(names.output)], held, c.output_bias)?,
            attention_norm,
            mlp_input_norm,
            up,
            down: self.stacked(&[part(names.down)], held, c.mlp_bias)?,
            mlp_norm,
        })
    }

    /// Gate and up of an MLP by their names before `.weight`.
    fn gated(&mut self, halves: &[String; 2], biased: bool) -> Result<Weight, Refused> {
        let kinds = if biased { &["weight", "bias"][..] } else { &["weight"] };
        let names: Vec<String> =
            kinds.iter().flat_map(|kind| halves.iter().map(move |half| format!("{half}.{kind}"))).collect();
        self.load(&names, self.held, |mut parts| {
            let biases = <[HostTensor<'_>; 2]>::try_from(parts.split_off(2)).ok();
            let up = parts.remove(1);
            WeightSpec::GateUp { gate: parts.remove(0), up, biases }
        })
    }

    fn head(&mut self, head: &HeadConfig, norm_bias: bool) -> Result<Head, Refused> {
        let mut load = |name: &str, biased| self.stacked(&[name.to_owned()], Held::Stored, biased);
        let (dense, out) = (load(head.dense, head.dense_bias)?, load(head.out, true)?);
        let norm = head.norm.map(|norm| self.layer_norm(norm, norm_bias)).transpose()?;
        Ok(Head { dense, activation: head.activation, norm, out })
    }
}

impl Encoder {
    /// Loads all weights and allocates activations and KV pages. `ropes`: rotations of the model and of its layers with a window, for models whose layers
    /// rotate.
    pub(super) fn load(
        loader: &mut Loader<'_>,
        e: &EncoderConfig,
        ropes: (&RopeSpec, Option<&RopeSpec>),
        pages: usize,
    ) -> Result<Self, Refused> {
        let c = loader.checkpoint.config();
        let refused = |what: &str| {
            let tensor = what.to_owned();
            move |source| Refused { tensor, source }
        };
        // The KV pages come first: theirs is the one allocation that fails with a wrong budget.
        let (kv_heads, head_dim) = (c.num_key_value_heads, c.head_dim);
        let kv = KvSpec { layers: c.kv_layers(), kv_heads, head_dim, latent: None, format: KvFormat::Own, pages };
        loader.device.kv(kv).map_err(refused("KV pages"))?;
        let rotates = c.rotations.iter().any(|rotation| *rotation != Rotation::None);
        let ropes = rotates.then(|| Ropes::load(loader.device, ropes)).transpose().map_err(refused("rotations"))?;
        let buffers = Buffers::new(loader.device, c).map_err(refused("activations"))?;
        let words = [e.names.words.to_owned()];
        let embedding = loader.load(&words, Held::Stored, |mut parts| WeightSpec::Embedding(parts.remove(0)))?;
        let offsets = e.names.offsets.map(|name| loader.offsets(name, c.num_attention_heads)).transpose()?;
        let positions = TableIndex::Position { first: e.first_position };
        let tables = [(e.names.positions, positions), (e.names.types, TableIndex::Type)];
        let tables = tables.into_iter().filter_map(|(name, index)| Some((name?, index)));
        Ok(Self {
            eps: c.rms_norm_eps,
            embedding,
            tables: tables.map(|(name, index)| loader.table(name, index)).collect::<Result<_, _>>()?,
            norm: loader.layer_norm(e.names.norm, e.norm_bias)?,
            layers: (0..c.num_hidden_layers)
                .map(|layer| loader.encoder_layer(c, e, layer, ropes.as_ref(), offsets))
                .collect::<Result<_, _>>()?,
            last_norm: e.names.last_norm.map(|norm| loader.layer_norm(norm, e.norm_bias)).transpose()?,
            activation: c.hidden_act,
            head: e.head.map(|head| loader.head(&head, e.norm_bias)).transpose()?,
            chain: Chain::load(loader, c.hidden_size)?,
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
        let Buffers { residual, queries, attended, activated, pooled, headed: [headed, normed], .. } = self.buffers;
        device.begin(batch)?;
        device.embed(residual, self.embedding, 1.0);
        self.tables.iter().for_each(|table| device.add_table(residual, *table));
        self.norm(device, residual, residual, self.norm);
        for layer in &self.layers {
            let input = self.input(device, layer.input_norm);
            device.qkv(queries, input, layer.qkv, &layer.attention, KV_LAYER);
            device.attention(attended, queries, &layer.attention, KV_LAYER);
            device.linear_add(residual, attended, layer.output, 1.0);
            self.norm_residual(device, layer.attention_norm);

            let input = self.input(device, layer.mlp_input_norm);
            match layer.up {
                Up::Plain(up) => device.activated(activated, input, up, self.activation),
                Up::Gated(up) => device.gate_up(activated, input, up, self.activation),
            }
            device.linear_add(residual, activated, layer.down, 1.0);
            self.norm_residual(device, layer.mlp_norm);
        }
        self.norm_residual(device, self.last_norm);
        device.pool(pooled, residual);
        match &self.head {
            None => {
                let vectors = self.chain.run(device, pooled);
                out.extend(device.read_sampled(vectors)?);
            }
            Some(head) => {
                device.activated(headed, pooled, head.dense, head.activation);
                let last = head.norm.map_or(headed, |norm| {
                    self.norm(device, normed, headed, norm);
                    normed
                });
                out.extend(device.logits(last, head.out, LogitsSpec::PLAIN)?);
            }
        }
        Ok(())
    }

    /// Input of attention or MLP: the residual, through a norm where the layer has one before it.
    fn input(&self, device: &mut dyn Device, norm: Option<Norm>) -> Buffer {
        let Buffers { residual, normed, .. } = self.buffers;
        let Some(norm) = norm else { return residual };
        self.norm(device, normed, residual, norm);
        normed
    }

    /// Norm of the residual in place, where the layer has one.
    fn norm_residual(&self, device: &mut dyn Device, norm: Option<Norm>) {
        let residual = self.buffers.residual;
        if let Some(norm) = norm {
            self.norm(device, residual, residual, norm);
        }
    }

    fn norm(&self, device: &mut dyn Device, out: Buffer, x: Buffer, norm: Norm) {
        device.layer_norm(out, x, norm.weight, norm.bias, self.eps);
    }
}

impl Buffers {
    fn new(device: &mut dyn Device, c: &ModelConfig) -> Result<Self, KernelError> {
        // A buffer that this model has no use for is one column.
        let mut buffer = |rows, columns: usize| device.buffer(BufferSpec { rows, columns });
        let normed = if c.norms == NormPlaces::After { 1 } else { c.hidden_size };
        Ok(Self {
            residual: buffer(Rows::Batch, c.hidden_size)?,
            normed: buffer(Rows::Batch, normed)?,
            queries: buffer(Rows::Batch, c.hidden_size)?,
            attended: buffer(Rows::Batch, c.hidden_size)?,
            activated: buffer(Rows::Batch, c.intermediate_size)?,
            pooled: buffer(Rows::Sampled, c.hidden_size)?,
            headed: [buffer(Rows::Sampled, c.hidden_size)?, buffer(Rows::Sampled, c.hidden_size)?],
        })
    }
}
