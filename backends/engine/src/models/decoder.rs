//! The decoder that the families share: pre-norm layers of attention and gated MLP, or of experts, around one residual stream.
//!
//! Papers: Vaswani et al. 2017 (arXiv:1706.03762), RMS norm of Zhang & Sennrich 2019 (arXiv:1910.07467), SwiGLU of
//! Shazeer 2020 (arXiv:2002.05202), grouped queries of Ainslie et al. 2023 (arXiv:2305.13245), mixtures of experts of Shazeer et al. 2017
//! (arXiv:1701.06538). Follows transformers
//! `modeling_llama.py`, whose names the tensors have. The differences of a family (bias, head norms, windows, tied
//! head) are values in [`ModelConfig`].

use penstock_kernels::{
    AttentionSpec, Buffer, BufferSpec, Device, ExpertSpec, Held, HostTensor, KernelError, KvSpec, RopeSpec,
    RoutingSpec, Rows, StepBatch, Weight, WeightSpec,
};

use crate::checkpoint::Checkpoint;
use crate::families::{EMBEDDING, HEAD, NORM, layer_tensor as name};
use crate::forward::{AfterLayer, Pages};
use crate::model_config::{ExpertsConfig, ModelConfig};

/// A decoder on a device, as handles of its weights and buffers.
#[derive(Debug)]
pub(super) struct Decoder {
    eps: f32,
    embedding: Weight,
    layers: Vec<Layer>,
    norm: Weight,
    head: Weight,
    buffers: Buffers,
}

#[derive(Debug)]
struct Layer {
    input_norm: Weight,
    qkv: Weight,
    attention: AttentionSpec,
    output: Weight,
    mlp_norm: Weight,
    mlp: Mlp,
}

#[derive(Debug)]
enum Mlp {
    Dense { gate_up: Weight, down: Weight },
    Sparse { router: Weight, experts: Weight, routing: RoutingSpec },
}

/// Activations of a step. `normed` and `attended` are reused for values that the layer before no longer needs.
#[derive(Debug)]
struct Buffers {
    /// Residual stream of the step's rows, `[batch, hidden]`.
    residual: Buffer,
    /// RMS-normalized residual, `[batch, hidden]`: input of attention and of the MLP.
    normed: Buffer,
    /// Queries, `[batch, heads * head_dim]`.
    queries: Buffer,
    /// Output of attention, `[batch, heads * head_dim]`.
    attended: Buffer,
    /// Activations of the MLP, `[batch, intermediate]`.
    activated: Buffer,
    /// Weights of the experts, `[batch, experts]`.
    routes: Buffer,
    /// Residual of the sampled rows, `[sampled, hidden]`.
    last: Buffer,
    /// Normalized residual of the sampled rows, `[sampled, hidden]`.
    last_normed: Buffer,
}

/// Moves weights from the checkpoint to the device, and reports each.
pub(super) struct Loader<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) device: &'a mut dyn Device,
    /// Form of the matrices that products read.
    pub(super) held: Held,
    /// Progress callback after each weight, with its name and its bytes in the checkpoint.
    pub(super) done: &'a mut dyn FnMut(&str, u64),
}

impl Loader<'_> {
    fn load(
        &mut self,
        names: &[String],
        held: Held,
        make: impl Fn(Vec<HostTensor<'_>>) -> Spec<'_>,
    ) -> Result<Weight, Refused> {
        self.load_with(names, |device, tensors| device.load(&make(tensors), held))
    }

    fn load_with(
        &mut self,
        names: &[String],
        load: impl FnOnce(&mut dyn Device, Vec<HostTensor<'_>>) -> Result<Weight, KernelError>,
    ) -> Result<Weight, Refused> {
        let tensors: Vec<_> = names.iter().map(|name| self.checkpoint.tensor(name)).collect();
        let bytes = tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum();
        let loaded = load(self.device, tensors);
        let weight = loaded.map_err(|source| Refused { tensor: names[0].clone(), source })?;
        names.iter().for_each(|name| self.checkpoint.forget(name));
        (self.done)(&names[0], bytes);
        Ok(weight)
    }

    fn vector(&mut self, name: String) -> Result<Weight, Refused> {
        self.load(&[name], Held::Stored, |mut t| WeightSpec::Vector(t.remove(0)))
    }

    fn linear(&mut self, matrices: &[String], biased: bool) -> Result<Weight, Refused> {
        let count = matrices.len();
        let biases = matrices.iter().filter(|_| biased).map(|name| name.replace(".weight", ".bias"));
        let names: Vec<String> = matrices.iter().cloned().chain(biases).collect();
        self.load(&names, self.held, |mut parts| {
            let biases = parts.split_off(count);
            WeightSpec::Linear { parts, biases }
        })
    }

    fn gate_up(&mut self, layer: usize, biased: bool) -> Result<Weight, Refused> {
        let kinds: &[&str] = if biased { &["weight", "bias"] } else { &["weight"] };
        let parts = kinds.iter().flat_map(|kind| ["gate", "up"].map(|part| format!("mlp.{part}_proj.{kind}")));
        let names: Vec<String> = parts.map(|part| name(layer, &part)).collect();
        self.load(&names, self.held, |mut t| {
            let biases = <[HostTensor<'_>; 2]>::try_from(t.split_off(2)).ok();
            let up = t.remove(1);
            WeightSpec::GateUp { gate: t.remove(0), up, biases }
        })
    }

    fn layer(&mut self, c: &ModelConfig, layer: usize, rope: penstock_kernels::Rope) -> Result<Layer, Refused> {
        let named = |part: &str| name(layer, part);
        let input_norm = self.vector(named("input_layernorm.weight"))?;
        let projections = ["q", "k", "v"].map(|part| named(&format!("self_attn.{part}_proj.weight")));
        let qkv = self.linear(&projections, c.qkv_bias)?;
        let mut head_norm = |part: &str| c.qk_norm.then(|| self.vector(named(part))).transpose();
        let attention = AttentionSpec {
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            scale: (c.head_dim as f64).powf(-0.5) as f32,
            window: c.windows[layer],
            rope,
            query_norm: head_norm("self_attn.q_norm.weight")?,
            key_norm: head_norm("self_attn.k_norm.weight")?,
            norm_eps: c.rms_norm_eps,
        };
        let output = self.linear(&[named("self_attn.o_proj.weight")], c.output_bias)?;
        let mlp_norm = self.vector(named("post_attention_layernorm.weight"))?;
        let mlp = match &c.experts {
            Some(experts) if experts.layers[layer] => self.sparse(layer, experts)?,
            _ => {
                let gate_up = self.gate_up(layer, c.mlp_bias)?;
                Mlp::Dense { gate_up, down: self.linear(&[named("mlp.down_proj.weight")], c.mlp_bias)? }
            }
        };
        Ok(Layer { input_norm, qkv, attention, output, mlp_norm, mlp })
    }

    fn sparse(&mut self, layer: usize, c: &ExpertsConfig) -> Result<Mlp, Refused> {
        // Rounding the router would change the choice of experts, and saves nothing.
        let router = self.load(&[name(layer, &c.names.router())], Held::Stored, |parts| WeightSpec::Linear {
            parts,
            biases: Vec::new(),
        })?;
        let parts = (0..c.num_experts).flat_map(|expert| c.names.expert(expert));
        let (names, held) = (parts.map(|part| name(layer, &part)).collect::<Vec<_>>(), self.held);
        let experts = self.load_with(&names, |device, tensors| {
            let (parts, _) = tensors.as_chunks::<3>();
            let experts: Vec<ExpertSpec<'_>> = parts.iter().cloned().map(ExpertSpec::from).collect();
            device.load_experts(&experts, held)
        })?;
        let routing = RoutingSpec { chosen: c.num_experts_per_tok, normalized: c.norm_topk_prob };
        Ok(Mlp::Sparse { router, experts, routing })
    }
}

type Spec<'a> = WeightSpec<'a>;

/// Refusal of a tensor or an allocation by the device.
#[derive(Debug)]
pub(super) struct Refused {
    /// Name of the tensor, or purpose of the memory.
    pub(super) tensor: String,
    pub(super) source: KernelError,
}

impl Decoder {
    /// Loads all weights and allocates activations and KV pages.
    pub(super) fn load(loader: &mut Loader<'_>, rope: &RopeSpec, pages: usize) -> Result<Self, Refused> {
        let c = loader.checkpoint.config();
        let refused = |what: &str| {
            let tensor = what.to_owned();
            move |source| Refused { tensor, source }
        };
        // The KV cache comes first: it is the one allocation that fails with a wrong budget.
        let kv = KvSpec { layers: c.num_hidden_layers, kv_heads: c.num_key_value_heads, head_dim: c.head_dim, pages };
        loader.device.kv(kv).map_err(refused("KV cache"))?;
        let rope = loader.device.rope(rope).map_err(refused("rotations"))?;
        let buffers = Buffers::new(loader.device, c).map_err(refused("activations"))?;
        // A table that is looked up alone costs a row per token: rounding it would save memory and no time.
        let held = if c.tie_word_embeddings { loader.held } else { Held::Stored };
        let embedding = loader.load(&[EMBEDDING.into()], held, |mut t| WeightSpec::Embedding(t.remove(0)))?;
        let layers = (0..c.num_hidden_layers).map(|layer| loader.layer(c, layer, rope)).collect::<Result<_, _>>()?;
        let norm = loader.vector(NORM.into())?;
        let head = if c.tie_word_embeddings { embedding } else { loader.linear(&[HEAD.into()], false)? };
        Ok(Self { eps: c.rms_norm_eps, embedding, layers, norm, head, buffers })
    }

    /// Runs one step: logits of the sampled rows, `[sampled, vocab]`.
    pub(super) fn forward<'d>(
        &self,
        device: &'d mut dyn Device,
        batch: &StepBatch<'_>,
        mut after_layer: AfterLayer<'_>,
    ) -> Result<&'d [f32], KernelError> {
        let Buffers { residual, normed, queries, attended, activated, routes, last, last_normed } = self.buffers;
        device.begin(batch)?;
        device.embed(residual, self.embedding);
        for (index, layer) in self.layers.iter().enumerate() {
            device.rmsnorm(normed, residual, layer.input_norm, self.eps);
            device.qkv(queries, normed, layer.qkv, &layer.attention, index);
            device.attention(attended, queries, &layer.attention, index);
            device.linear_add(residual, attended, layer.output);

            device.rmsnorm(normed, residual, layer.mlp_norm, self.eps);
            match &layer.mlp {
                Mlp::Dense { gate_up, down } => {
                    device.gate_up_silu(activated, normed, *gate_up);
                    device.linear_add(residual, activated, *down);
                }
                Mlp::Sparse { router, experts, routing } => {
                    device.route(routes, normed, *router, routing);
                    device.experts(residual, normed, routes, *experts);
                }
            }
            if let Some(tell) = &mut after_layer {
                tell(index, &PagesOf(device));
            }
        }
        device.select(last, residual);
        device.rmsnorm(last_normed, last, self.norm, self.eps);
        device.logits(last_normed, self.head)
    }
}

/// Device as the reader of its pages.
pub(super) struct PagesOf<'a>(pub(super) &'a dyn Device);

impl Pages for PagesOf<'_> {
    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]) {
        self.0.read_page(layer, page, out);
    }
}

impl Buffers {
    fn new(device: &mut dyn Device, c: &ModelConfig) -> Result<Self, KernelError> {
        let heads = c.num_attention_heads * c.head_dim;
        // A buffer that this model has no use for is one column.
        let mut buffer = |rows, columns: usize| device.buffer(BufferSpec { rows, columns: columns.max(1) });
        Ok(Self {
            residual: buffer(Rows::Batch, c.hidden_size)?,
            normed: buffer(Rows::Batch, c.hidden_size)?,
            queries: buffer(Rows::Batch, heads)?,
            attended: buffer(Rows::Batch, heads)?,
            activated: buffer(Rows::Batch, c.dense_width())?,
            routes: buffer(Rows::Batch, c.experts.as_ref().map_or(0, |experts| experts.num_experts))?,
            last: buffer(Rows::Sampled, c.hidden_size)?,
            last_normed: buffer(Rows::Sampled, c.hidden_size)?,
        })
    }
}
