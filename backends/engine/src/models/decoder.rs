//! The decoder that the families share: layers of attention and gated MLP, or of experts, around one residual stream, with norms before or
//! behind each.
//!
//! Papers: Vaswani et al. 2017 (arXiv:1706.03762), RMS norm of Zhang & Sennrich 2019 (arXiv:1910.07467), SwiGLU of
//! Shazeer 2020 (arXiv:2002.05202), grouped queries of Ainslie et al. 2023 (arXiv:2305.13245), mixtures of experts of Shazeer et al. 2017
//! (arXiv:1701.06538). Follows transformers
//! `modeling_llama.py`, whose names the tensors have. The differences of a family (bias, places of norms, windows, rotations, soft
//! caps, tied head) are values in [`ModelConfig`].

use std::ops::Range;

use penstock_kernels::{
    Activation, AdapterSlot, AttentionSpec, Buffer, BufferSpec, DType, Device, ExpertSpec, Feature, HeadNorms, Held,
    HostTensor, KernelError, KvFormat, KvSpec, LogitsSpec, Pick, RopeSpec, RoutingSpec, RowOrder, Rows, SampledRows,
    Scoring, StepBatch, Weight, WeightSpec,
};

use super::chain::Chain;
use super::loader::{Loader, Refused};
use super::rope::Ropes;
use crate::adapter::{Adapter, Matrix};
use crate::families::{
    CORRECTION, EMBEDDING, HEAD, MLP, MlpNames, NORM, NormNames, SHARED, SHARED_GATE, SHARED_GATED, SINKS, bias_of,
    latent, layer_tensor as name, norm_names,
};
use crate::forward::{AfterLayer, Pages};
use crate::model_config::{EmbeddingScale, ExpertsConfig, LatentConfig, ModelConfig, QkNorm};

/// A decoder on a device, as handles of its weights and buffers.
#[derive(Debug)]
pub(super) struct Decoder {
    eps: f32,
    embedding: Weight,
    embedding_scale: f32,
    layers: Vec<Layer>,
    activation: Activation,
    norm: Weight,
    /// Matrix of the logits; `None` in a checkpoint without one, which gives states only.
    head: Option<Weight>,
    /// Operations behind the product of the logits.
    logits: LogitsSpec,
    /// Factor on what attention and MLP add to the residual.
    residual_scale: f32,
    /// True if texts are computed whole, in which case all layers use one layer of KV and all states can be pooled.
    whole: bool,
    /// Steps behind the pooling of an embedding model.
    chain: Chain,
    buffers: Buffers,
}

#[derive(Debug)]
struct Layer {
    input_norm: Option<Weight>,
    queries: Queries,
    attention: AttentionSpec,
    output: Weight,
    /// Norm of attention's output, before it is added to the residual.
    attention_norm: Option<Weight>,
    mlp_input_norm: Option<Weight>,
    mlp: Mlp,
    /// Norm of the MLP's output, before it is added to the residual.
    mlp_norm: Option<Weight>,
}

/// Projections before attention.
#[derive(Debug)]
enum Queries {
    /// Queries, keys and values in one.
    Joint(Weight),
    /// Attention over latents.
    Latent(LatentWeights),
}

#[derive(Debug)]
struct LatentWeights {
    /// First projection of queries, and the norm behind it.
    queries_a: Option<(Weight, Weight)>,
    queries: Weight,
    keys: Weight,
    keys_norm: Weight,
    /// Matrices of each head, from its query to the latent.
    of_keys: Weight,
    /// Matrices of each head, from the latent to its output.
    of_values: Weight,
}

#[derive(Debug)]
enum Mlp {
    Dense(Dense),
    Sparse { router: Weight, experts: Weight, routing: RoutingSpec, shared: Option<Shared> },
}

/// MLP that every token goes through beside its experts.
#[derive(Clone, Copy, Debug)]
enum Shared {
    Plain(Dense),
    /// A mixture of one expert, which every token chooses by the sigmoid of the gate.
    Gated {
        gate: Weight,
        expert: Weight,
    },
}

/// Choice of the one expert of [`Shared::Gated`].
const GATE: RoutingSpec =
    RoutingSpec { chosen: 1, normalized: false, scores: Scoring::Sigmoid, correction: None, groups: None, scale: 1.0 };

/// A gated MLP.
#[derive(Clone, Copy, Debug)]
struct Dense {
    gate_up: Weight,
    down: Weight,
}

/// Activations of a step. `normed` and `attended` are reused for values that the layer before no longer needs.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    /// Residual stream of the step's rows, `[batch, hidden]`.
    residual: Buffer,
    /// RMS-normalized residual, `[batch, hidden]`: input of attention and of the MLP.
    normed: Buffer,
    /// Queries, `[batch, heads * head_dim]`.
    queries: Buffer,
    /// Output of attention, `[batch, heads * head_dim]`; of latents, `[batch, heads * v_head_dim]`.
    attended: Buffer,
    latent: LatentBuffers,
    /// Output of attention or MLP before its norm, `[batch, hidden]`.
    projected: Buffer,
    /// Activations of the MLP, `[batch, intermediate]`.
    activated: Buffer,
    /// Activations of the MLP beside experts, `[batch, shared_size]`.
    shared: Buffer,
    /// Weights of the experts, `[batch, experts]`.
    routes: Buffer,
    /// Weight of the gated MLP beside experts, `[batch, 1]`.
    gate: Buffer,
    /// Residual of the sampled rows, `[sampled, hidden]`.
    last: Buffer,
    /// Normalized residual of the sampled rows, `[sampled, hidden]`.
    last_normed: Buffer,
}

/// Activations of attention over latents.
#[derive(Clone, Copy, Debug)]
struct LatentBuffers {
    /// Queries between their two projections, before and behind the norm, `[batch, q_lora_rank]`.
    low: [Buffer; 2],
    /// Queries as projected, `[batch, heads * (qk_nope_head_dim + qk_rope_head_dim)]`.
    projected: Buffer,
    /// Latent and rotated values of a row, `[batch, kv_lora_rank + qk_rope_head_dim]`.
    keys: Buffer,
    /// Output of attention, `[batch, heads * kv_lora_rank]`.
    attended: Buffer,
}

/// Epsilon of the norms in attention over latents.
const LATENT_NORM_EPS: f32 = 1e-6;

impl Loader<'_> {
    /// Two weights of one tensor, which is reported once.
    fn halves(&mut self, tensor: String, specs: [HeadPart; 2], heads: usize) -> Result<[Weight; 2], Refused> {
        let mut first = None;
        let second = self.load_with(&[tensor], |device, tensors| {
            let [first_spec, second_spec] = specs.map(|HeadPart { rows, transposed }| WeightSpec::Heads {
                tensor: tensors[0].clone(),
                heads,
                rows,
                transposed,
            });
            first = Some(device.load(&first_spec, Held::Stored)?);
            device.load(&second_spec, Held::Stored)
        })?;
        Ok([first.expect("loaded before the second"), second])
    }

    fn dense(&mut self, layer: usize, names: MlpNames, biased: bool) -> Result<Dense, Refused> {
        let [gate, up, down] = ["gate", "up", "down"].map(|part| name(layer, &names.weight(part)));
        let biases = [&gate, &up].into_iter().filter(|_| biased).map(|name| bias_of(name));
        let all: Vec<String> = [gate.clone(), up.clone()].into_iter().chain(biases).collect();
        let gate_up = self.load(&all, self.held, |mut t| {
            let biases = <[HostTensor<'_>; 2]>::try_from(t.split_off(2)).ok();
            let up = t.remove(1);
            WeightSpec::GateUp { gate: t.remove(0), up, biases }
        })?;
        Ok(Dense { gate_up, down: self.linear(&[down], self.held, biased)? })
    }

    fn latents(&mut self, c: &ModelConfig, l: &LatentConfig, layer: usize) -> Result<LatentWeights, Refused> {
        let weight = |part: &str| name(layer, &format!("{part}.weight"));
        let order = |head_dim: usize, plain: usize| {
            let rotated = head_dim - plain;
            if l.interleaved { RowOrder::Pairs { head_dim, plain, rotated } } else { RowOrder::Plain }
        };
        let queries_a = match l.q_lora_rank {
            None => None,
            Some(_) => {
                let low = self.linear(&[weight(latent::QUERIES_A)], self.held, c.qkv_bias)?;
                Some((low, self.norm(weight(latent::QUERIES_NORM))?))
            }
        };
        let queries = if queries_a.is_some() { latent::QUERIES_B } else { latent::QUERIES };
        let of_queries = order(l.query_dim(), l.qk_nope_head_dim);
        let queries = self.ordered(&[weight(queries)], of_queries)?;
        let bias = name(layer, &format!("{}.bias", latent::KEYS));
        let names: Vec<String> = [weight(latent::KEYS)].into_iter().chain(c.qkv_bias.then_some(bias)).collect();
        let keys = self.ordered(&names, order(l.key_dim(), l.kv_lora_rank))?;
        let keys_norm = self.norm(weight(latent::KEYS_NORM))?;
        let plain = l.qk_nope_head_dim;
        let of_keys = HeadPart { rows: 0..plain, transposed: true };
        let of_values = HeadPart { rows: plain..plain + l.v_head_dim, transposed: false };
        let [of_keys, of_values] = self.halves(weight(latent::HEADS), [of_keys, of_values], c.num_attention_heads)?;
        Ok(LatentWeights { queries_a, queries, keys, keys_norm, of_keys, of_values })
    }

    /// Queries, keys and values in one, of which the first two may be stored with the values of rotations side by side.
    fn projections(&mut self, c: &ModelConfig, matrices: &[String; 3]) -> Result<Weight, Refused> {
        if !c.paired {
            return self.linear(matrices, self.held, c.qkv_bias);
        }
        let biases = matrices.iter().filter(|_| c.qkv_bias).map(|name| bias_of(name));
        let names: Vec<String> = matrices.iter().cloned().chain(biases).collect();
        self.load(&names, self.held, |mut parts| {
            let order = RowOrder::Pairs { head_dim: c.head_dim, plain: 0, rotated: c.rotary_dim };
            for rotated in parts.chunks_mut(matrices.len()).flat_map(|kind| &mut kind[..2]) {
                rotated.order = order;
            }
            let biases = parts.split_off(matrices.len());
            WeightSpec::Linear { parts, biases }
        })
    }

    /// Matrix, with its bias if that is named too, whose rows are stored in `order`.
    fn ordered(&mut self, names: &[String], order: RowOrder) -> Result<Weight, Refused> {
        self.load(names, self.held, |mut parts| {
            parts.iter_mut().for_each(|part| part.order = order);
            let biases = parts.split_off(1);
            WeightSpec::Linear { parts, biases }
        })
    }

    fn layer(&mut self, c: &ModelConfig, layer: usize, ropes: &Ropes) -> Result<Layer, Refused> {
        let named = |part: &str| name(layer, part);
        let NormNames { input, behind_attention, before_mlp, behind_mlp } = norm_names(c.norms);
        let mut norm = |part: Option<&str>| part.map(|part| self.norm(named(part))).transpose();
        let (input_norm, attention_norm) = (norm(input)?, norm(behind_attention)?);
        let (mlp_input_norm, mlp_norm) = (norm(before_mlp)?, norm(behind_mlp)?);
        let projections = ["q", "k", "v"].map(|part| named(&format!("self_attn.{part}_proj.weight")));
        let queries = match &c.latent {
            None => Queries::Joint(self.projections(c, &projections)?),
            Some(latent) => Queries::Latent(self.latents(c, latent, layer)?),
        };
        let sinks = if c.sinks { Some(self.vector(named(SINKS), 0.0)?) } else { None };
        let mut head_norm = |part: &str| self.norm(named(part));
        let (query, key) = ("self_attn.q_norm.weight", "self_attn.k_norm.weight");
        let attention = AttentionSpec {
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            latent: c.latent.map(|latent| latent.kv_lora_rank),
            scale: c.query_scale as f32,
            causal: c.causal,
            window: c.windows[layer],
            soft_cap: c.attn_logit_softcapping,
            offsets: None,
            sinks,
            rope: ropes.of(c.rotations[layer]),
            norms: match c.qk_norm {
                QkNorm::None => HeadNorms::None,
                QkNorm::Each => HeadNorms::Each { query: head_norm(query)?, key: head_norm(key)? },
                QkNorm::Together => HeadNorms::Together { query: head_norm(query)?, key: head_norm(key)? },
            },
            // The norms of latents have transformers' default, whatever the config says.
            norm_eps: if c.latent.is_some() { LATENT_NORM_EPS } else { c.rms_norm_eps },
        };
        let output = self.linear(&[named("self_attn.o_proj.weight")], self.held, c.output_bias)?;
        let mlp = match &c.experts {
            Some(experts) if experts.layers[layer] => self.sparse(layer, experts)?,
            _ => Mlp::Dense(self.dense(layer, MLP, c.mlp_bias)?),
        };
        Ok(Layer { input_norm, queries, attention, output, attention_norm, mlp_input_norm, mlp, mlp_norm })
    }

    fn gated_expert(&mut self, layer: usize) -> Result<Shared, Refused> {
        let gate = self.linear(&[name(layer, SHARED_GATE)], Held::Stored, false)?;
        let (names, held) = (["gate", "up", "down"].map(|part| name(layer, &SHARED_GATED.weight(part))), self.held);
        let expert = self.load_with(&names, |device, tensors| {
            let parts = <[HostTensor<'_>; 3]>::try_from(tensors).expect("one tensor of each name");
            device.load_experts(&[parts.into()], held)
        })?;
        Ok(Shared::Gated { gate, expert })
    }

    fn sparse(&mut self, layer: usize, c: &ExpertsConfig) -> Result<Mlp, Refused> {
        // Rounding the router would change the choice of experts, and saves nothing.
        let router = self.linear(&[name(layer, &c.names.router())], Held::Stored, c.bias)?;
        let matrices = (0..c.num_experts).flat_map(|expert| c.names.expert(expert));
        let mut names: Vec<String> = matrices.map(|part| name(layer, &part)).collect();
        let count = names.len();
        if c.bias {
            names.extend(names.clone().iter().map(|name| bias_of(name)));
        }
        let held = self.held;
        let experts = self.load_with(&names, |device, mut tensors| {
            let biases = tensors.split_off(count);
            let (biases, parts) = (biases.as_chunks::<3>().0, tensors.as_chunks::<3>().0);
            let experts = parts.iter().cloned().enumerate();
            let experts = experts.map(|(i, parts)| ExpertSpec { biases: biases.get(i).cloned(), ..parts.into() });
            device.load_experts(&experts.collect::<Vec<_>>(), held)
        })?;
        let correction = c.routing.correction.then(|| self.vector(name(layer, CORRECTION), 0.0)).transpose()?;
        let routing = RoutingSpec {
            chosen: c.num_experts_per_tok,
            normalized: c.norm_topk_prob,
            scores: c.routing.scores,
            correction,
            groups: c.routing.groups,
            scale: c.routing.scale,
        };
        let shared = match (c.shared_size, c.shared_gated) {
            (0, _) => None,
            (_, false) => Some(Shared::Plain(self.dense(layer, SHARED, false)?)),
            (_, true) => Some(self.gated_expert(layer)?),
        };
        Ok(Mlp::Sparse { router, experts, routing, shared })
    }
}

/// Rows of each head's matrix that are a weight of their own.
struct HeadPart {
    rows: Range<usize>,
    transposed: bool,
}

/// Factor of the embeddings. One that is rounded has the precision that the model was trained with: that of the stored table. Formats of blocks are made
/// of bf16 checkpoints.
fn embedding_scale(scale: Option<EmbeddingScale>, stored: DType) -> f32 {
    match (scale, stored) {
        (None, _) => 1.0,
        (Some(EmbeddingScale::Exact(scale)), _) | (Some(EmbeddingScale::Rounded(scale)), DType::F32) => scale as f32,
        (Some(EmbeddingScale::Rounded(scale)), DType::F16) => half::f16::from_f32(scale as f32).to_f32(),
        (Some(EmbeddingScale::Rounded(scale)), _) => half::bf16::from_f32(scale as f32).to_f32(),
    }
}

impl Decoder {
    /// Loads all weights and allocates activations and KV pages of a format.
    pub(super) fn load(
        loader: &mut Loader<'_>,
        rope: &RopeSpec,
        local_rope: Option<&RopeSpec>,
        (pages, format): (usize, KvFormat),
    ) -> Result<Self, Refused> {
        let c = loader.checkpoint.config();
        let refused = |what: &str| {
            let tensor = what.to_owned();
            move |source| Refused { tensor, source }
        };
        // The KV cache comes first: it is the one allocation that fails with a wrong budget.
        let kv = KvSpec {
            layers: c.kv_layers(),
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            latent: c.latent.map(|latent| latent.kv_lora_rank),
            format,
            pages,
        };
        loader.device.kv(kv).map_err(refused("KV cache"))?;
        let ropes = Ropes::load(loader.device, (rope, local_rope)).map_err(refused("rotations"))?;
        let buffers = Buffers::new(loader.device, c).map_err(refused("activations"))?;
        // A table that is looked up alone costs a row per token: rounding it would save memory and no time.
        let held = loader.checkpoint.held(EMBEDDING, loader.held);
        let embedding = loader.load(&[EMBEDDING.into()], held, |mut t| WeightSpec::Embedding(t.remove(0)))?;
        let layers = (0..c.num_hidden_layers).map(|layer| loader.layer(c, layer, &ropes)).collect::<Result<_, _>>()?;
        let norm = loader.norm(NORM.into())?;
        let head = match (c.tie_word_embeddings, c.headless) {
            (true, _) => Some(embedding),
            (false, true) => None,
            (false, false) => Some(loader.linear(&[HEAD.into()], loader.checkpoint.held(HEAD, loader.held), false)?),
        };
        Ok(Self {
            eps: c.rms_norm_eps,
            embedding,
            embedding_scale: embedding_scale(c.embedding_scale, loader.checkpoint.dtype(EMBEDDING)),
            layers,
            activation: c.hidden_act,
            norm,
            head,
            logits: LogitsSpec { divisor: c.logits_scaling.unwrap_or(1.0), soft_cap: c.final_logit_softcapping },
            residual_scale: c.residual_multiplier.unwrap_or(1.0),
            whole: c.is_whole(),
            chain: Chain::load(loader, c.hidden_size)?,
            buffers,
        })
    }

    /// Attaches the matrices of `adapter` to the weights of one layer.
    pub(super) fn adapt(
        &self,
        device: &mut dyn Device,
        index: usize,
        slot: AdapterSlot,
        adapter: &Adapter,
    ) -> Result<(), KernelError> {
        if !device.has(Feature::Adapters) {
            let (what, why) = (Feature::Adapters.name().to_owned(), device.info().name + " has no operation for it");
            return Err(KernelError::Unavailable { what, why });
        }
        let layer = &self.layers[index];
        // An adapter for this model has no matrices for the others.
        let queries = match layer.queries {
            Queries::Joint(qkv) => Some((Matrix::Qkv, qkv)),
            Queries::Latent(_) => None,
        };
        let mlp = match layer.mlp {
            Mlp::Dense(Dense { gate_up, down }) => vec![(Matrix::GateUp, gate_up), (Matrix::Down, down)],
            Mlp::Sparse { .. } => Vec::new(),
        };
        for (matrix, weight) in queries.into_iter().chain([(Matrix::Output, layer.output)]).chain(mlp) {
            let additions = adapter.additions(index, matrix);
            if !additions.is_empty() {
                device.adapt(weight, slot, &additions)?;
            }
        }
        Ok(())
    }

    /// Runs one step: logits of the sampled rows, `[sampled, vocab]`.
    pub(super) fn forward<'d>(
        &self,
        device: &'d mut dyn Device,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
    ) -> Result<&'d [f32], KernelError> {
        self.layers(device, batch, after_layer)?;
        self.logits(device)
    }

    /// Runs one step: tokens of the sampled rows, or their logits, as `picks` has it and the device can.
    pub(super) fn sample<'d>(
        &self,
        device: &'d mut dyn Device,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        picks: &[Pick],
    ) -> Result<SampledRows<'d>, KernelError> {
        self.layers(device, batch, after_layer)?;
        device.sample(self.buffers.last_normed, self.head()?, self.logits, picks)
    }

    /// Runs one step for the vectors of the sampled rows, `[sampled, hidden]` or what a chain makes of them, and for their logits if those are wanted.
    pub(super) fn states<'d>(
        &self,
        device: &'d mut dyn Device,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        out: &mut Vec<f32>,
        logits: bool,
    ) -> Result<&'d [f32], KernelError> {
        self.layers(device, batch, after_layer)?;
        let vectors = self.chain.run(device, self.buffers.last_normed);
        out.extend(device.read_sampled(vectors)?);
        if logits { self.logits(device) } else { Ok(&[]) }
    }

    fn logits<'d>(&self, device: &'d mut dyn Device) -> Result<&'d [f32], KernelError> {
        device.logits(self.buffers.last_normed, self.head()?, self.logits)
    }

    fn head(&self) -> Result<Weight, KernelError> {
        let lacking = || {
            let (what, why) = ("a logit".to_owned(), "the checkpoint has no lm_head.weight".to_owned());
            KernelError::Unavailable { what, why }
        };
        self.head.ok_or_else(lacking)
    }

    /// Runs all layers of a step, and the last norm over the sampled rows; over all rows, which are then pooled, where texts are whole.
    fn layers(
        &self,
        device: &mut dyn Device,
        batch: &StepBatch<'_>,
        mut after_layer: AfterLayer<'_>,
    ) -> Result<(), KernelError> {
        let Buffers { residual, attended, activated, routes, last, last_normed, .. } = self.buffers;
        device.begin(batch)?;
        device.embed(residual, self.embedding, self.embedding_scale);
        for (index, layer) in self.layers.iter().enumerate() {
            let input = self.input(device, layer.input_norm);
            self.attend(device, input, layer, if self.whole { 0 } else { index });
            self.add(device, attended, layer.output, layer.attention_norm);

            let input = self.input(device, layer.mlp_input_norm);
            match &layer.mlp {
                Mlp::Dense(mlp) => self.dense(device, input, activated, mlp, layer.mlp_norm),
                Mlp::Sparse { router, experts, routing, shared } => {
                    device.route(routes, input, *router, routing);
                    device.experts(residual, input, routes, *experts, self.activation);
                    match shared {
                        None => {}
                        Some(Shared::Plain(mlp)) => self.dense(device, input, self.buffers.shared, mlp, None),
                        Some(Shared::Gated { gate, expert }) => {
                            device.route(self.buffers.gate, input, *gate, &GATE);
                            device.experts(residual, input, self.buffers.gate, *expert, self.activation);
                        }
                    }
                }
            }
            if let Some(tell) = &mut after_layer {
                tell(index, &PagesOf(device));
            }
        }
        if self.whole {
            device.rmsnorm(residual, residual, self.norm, self.eps);
            device.pool(last_normed, residual);
        } else {
            device.select(last, residual);
            device.rmsnorm(last_normed, last, self.norm, self.eps);
        }
        Ok(())
    }

    /// Attention of a layer, up to its output projection.
    fn attend(&self, device: &mut dyn Device, input: Buffer, layer: &Layer, index: usize) {
        let Buffers { queries, attended, latent, .. } = self.buffers;
        let l = match &layer.queries {
            Queries::Joint(qkv) => {
                device.qkv(queries, input, *qkv, &layer.attention, index);
                return device.attention(attended, queries, &layer.attention, index);
            }
            Queries::Latent(weights) => weights,
        };
        device.linear(latent.keys, input, l.keys);
        device.latent_keys(latent.keys, l.keys_norm, &layer.attention, index);
        let input = l.queries_a.map_or(input, |(queries_a, norm)| {
            let [low, normed] = latent.low;
            device.linear(low, input, queries_a);
            device.rmsnorm(normed, low, norm, LATENT_NORM_EPS);
            normed
        });
        device.linear(latent.projected, input, l.queries);
        device.latent_queries(queries, latent.projected, l.of_keys, &layer.attention);
        device.attention(latent.attended, queries, &layer.attention, index);
        device.per_head(attended, latent.attended, l.of_values);
    }

    /// Gated MLP whose activations are in `activated`.
    fn dense(&self, device: &mut dyn Device, input: Buffer, activated: Buffer, mlp: &Dense, norm: Option<Weight>) {
        device.gate_up(activated, input, mlp.gate_up, self.activation);
        self.add(device, activated, mlp.down, norm);
    }

    /// Input of attention or MLP: the residual, through a norm where the layer has one before it.
    fn input(&self, device: &mut dyn Device, norm: Option<Weight>) -> Buffer {
        let Buffers { residual, normed, .. } = self.buffers;
        let Some(norm) = norm else { return residual };
        device.rmsnorm(normed, residual, norm, self.eps);
        normed
    }

    /// Adds a projection of `x` to the residual, through a norm where the layer has one behind it.
    fn add(&self, device: &mut dyn Device, x: Buffer, weight: Weight, norm: Option<Weight>) {
        let Buffers { residual, projected, .. } = self.buffers;
        let Some(norm) = norm else { return device.linear_add(residual, x, weight, self.residual_scale) };
        device.linear(projected, x, weight);
        device.norm_add(residual, projected, norm, self.eps);
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
            attended: buffer(Rows::Batch, c.attended_dim())?,
            latent: {
                let of = |width: fn(&LatentConfig) -> usize| c.latent.as_ref().map_or(0, width);
                let low = of(|latent| latent.q_lora_rank.unwrap_or(0));
                LatentBuffers {
                    low: [buffer(Rows::Batch, low)?, buffer(Rows::Batch, low)?],
                    projected: buffer(Rows::Batch, c.num_attention_heads * of(LatentConfig::query_dim))?,
                    keys: buffer(Rows::Batch, of(LatentConfig::key_dim))?,
                    attended: buffer(Rows::Batch, c.num_attention_heads * of(|latent| latent.kv_lora_rank))?,
                }
            },
            projected: buffer(Rows::Batch, if c.norms.after() { c.hidden_size } else { 0 })?,
            activated: buffer(Rows::Batch, c.dense_width())?,
            shared: buffer(Rows::Batch, c.experts.as_ref().map_or(0, |experts| experts.shared_size))?,
            routes: buffer(Rows::Batch, c.experts.as_ref().map_or(0, |experts| experts.num_experts))?,
            gate: buffer(Rows::Batch, 1)?,
            last: buffer(Rows::Sampled, c.hidden_size)?,
            last_normed: buffer(Rows::Sampled, c.hidden_size)?,
        })
    }
}
