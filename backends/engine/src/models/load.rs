//! Loading of a checked checkpoint onto a device.

use std::fmt;

use penstock_kernels::{AdapterSlot, Device, Held, KernelError, KvFormat, PAGE_TOKENS, Pick, SampledRows, StepBatch};

use super::decoder::Decoder;
use super::encoder::Encoder;
use super::loader::{Loader, Refused};
use super::rope;
use crate::adapter::Adapter;
use crate::checkpoint::Checkpoint;
use crate::forward::{AfterLayer, EncoderGeometry, Forward, Geometry, Pages};
use crate::model_config::{ModelConfig, QkNorm};

/// Share of the machine that a model may use.
#[derive(Clone, Copy, Debug)]
pub struct ModelLimits {
    /// Longest sequence in tokens; `None` takes the config's value.
    pub context_tokens: Option<usize>,
    /// Memory for the KV cache, as a number of pages or of bytes.
    pub kv: KvBudget,
    /// Most rows of one step; the same as in the device's limits.
    pub rows_max: usize,
    /// Most sampled rows of one step; the same as in the device's limits.
    pub sampled_max: usize,
    /// Form in which the device holds the matrices that products read.
    pub held: Held,
    /// Form in which the device keeps keys and values; models of whole texts, which keep none between steps, have the device's own.
    pub kv_format: KvFormat,
}

/// Size of the KV cache, fixed at load.
#[derive(Clone, Copy, Debug)]
pub enum KvBudget {
    /// Number of pages of [`PAGE_TOKENS`] tokens.
    Pages(usize),
    /// Number of bytes, filled with as many pages as fit; see [`Model::page_bytes`].
    Bytes(u64),
}

/// Progress of loading, reported after each weight.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Name of the tensor just loaded.
    pub tensor: &'a str,
    /// Bytes of the checkpoint loaded so far.
    pub bytes_done: u64,
    /// Bytes to load in total.
    pub bytes_total: u64,
}

/// Reason why a checked checkpoint could not be loaded.
#[derive(Debug)]
pub enum LoadError {
    /// The limits are too small to serve anything.
    Limits(String),
    /// The device refused a tensor or an allocation.
    Device {
        /// The file of the tensor; empty for allocations.
        file: String,
        /// Name of the tensor, or purpose of the memory.
        what: String,
        /// Error of the device, with the reason of the refusal.
        source: KernelError,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::Limits(reason) => write!(out, "{reason}"),
            LoadError::Device { file, what, source } if file.is_empty() => write!(out, "{what}: {source}"),
            LoadError::Device { file, what, source } => write!(out, "{file}: tensor {what}: {source}"),
        }
    }
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            LoadError::Limits(_) => None,
            LoadError::Device { source, .. } => Some(source),
        }
    }
}

/// Model loaded on a device: weights, KV cache and rotations, ready for steps.
pub struct Model {
    device: Box<dyn Device>,
    network: Network,
    geometry: Geometry,
}

/// Layers of a model, as handles of the device.
enum Network {
    Decoder(Decoder),
    Encoder(Encoder),
}

impl Model {
    /// Loads `checkpoint` onto `device`, whose own limits must be those of `limits`.
    ///
    /// The context is the one in the limits or in the config, at most what the rope scaling allows and what the KV
    /// cache holds.
    pub fn load(
        checkpoint: &Checkpoint,
        mut device: Box<dyn Device>,
        limits: ModelLimits,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Self, LoadError> {
        let config = checkpoint.config();
        let kv_format = config.kv_format(limits.kv_format);
        let pages = pages(config, kv_format, limits.kv)?;
        let served = context(config, limits.context_tokens)?;
        // Positions beyond the pages cannot occur, whatever a config claims: the rope table is no larger than the
        // cache.
        let context_tokens = served.min(pages.saturating_mul(PAGE_TOKENS));
        let (rope, local_rope) = rope::tables(config, served, context_tokens);
        let (mut bytes_done, bytes_total) = (0, checkpoint.weights_bytes());
        let mut done = |tensor: &str, bytes: u64| {
            bytes_done += bytes;
            progress(Progress { tensor, bytes_done, bytes_total });
        };
        let mut loader = Loader { checkpoint, device: &mut *device, held: limits.held, done: &mut done };
        let loaded = loader.check_features().and_then(|()| match config.encoder {
            None => Decoder::load(&mut loader, &rope, local_rope.as_ref(), (pages, kv_format)).map(Network::Decoder),
            Some(encoder) => {
                Encoder::load(&mut loader, &encoder, (&rope, local_rope.as_ref()), pages).map(Network::Encoder)
            }
        });
        let network = loaded.map_err(|Refused { tensor, source }| LoadError::Device {
            file: checkpoint.file_of(&tensor).to_owned(),
            what: tensor,
            source,
        })?;
        let encoder = config.encoder.map(|encoder| EncoderGeometry {
            token_types: encoder.type_vocab_size,
            has_head: encoder.head.is_some(),
            head_of_mean: encoder.head.is_some_and(|head| head.of_mean),
        });
        let of_decoder = EncoderGeometry { token_types: 1, has_head: false, head_of_mean: false };
        let encoder = encoder.or(config.is_whole().then_some(of_decoder));
        let geometry = Geometry {
            vocab_size: config.vocab_size,
            context_tokens,
            pages,
            rows_max: limits.rows_max,
            sampled_max: limits.sampled_max,
            numerics: numerics(checkpoint, &*device, (limits.held, kv_format), served),
            layers: config.kv_layers(),
            // What a model of whole texts keeps of one is of no use to another.
            page_bytes: if encoder.is_some() { 0 } else { device.page_bytes() },
            state_width: if encoder.is_some_and(|encoder| encoder.has_head) { 1 } else { config.vector_width() },
            dense_layers: config.dense_layers().count(),
            headless: config.headless,
            encoder,
        };
        Ok(Self { device, network, geometry })
    }

    /// Bytes of one KV page of all layers, as devices other than the reference keep it if `kv_format` is asked for.
    pub fn page_bytes(config: &ModelConfig, kv_format: KvFormat) -> u64 {
        (config.kv_layers() * PAGE_TOKENS * config.kv_bytes(kv_format)) as u64
    }

    /// Bytes of the activations of steps with at most `rows` rows and `sampled` sampled ones, on a CPU.
    pub fn activation_bytes(config: &ModelConfig, rows: usize, sampled: usize) -> u64 {
        let heads = config.num_attention_heads * config.head_dim;
        let dense = config.dense_width();
        // With experts a row has weights, and for each expert that it chooses a copy of its input and of its activations.
        let (experts, copied) = config.experts.as_ref().map_or((0, 0), |experts| {
            let (chosen, width) = (experts.num_experts_per_tok, experts.moe_intermediate_size);
            // A gated MLP beside them is a mixture of one expert.
            let beside = if experts.shared_gated { config.hidden_size.max(experts.shared_size) } else { 0 };
            let copied = (chosen * config.hidden_size.max(width)).max(beside);
            (experts.num_experts + experts.shared_size + chosen * width, copied)
        });
        // Norms behind blocks need what the blocks give, those over all heads the whole projection.
        let outputs = if config.norms.after() { config.hidden_size } else { 0 };
        let projected = match config.qk_norm {
            QkNorm::Together => heads + 2 * config.num_key_value_heads * config.head_dim,
            QkNorm::None | QkNorm::Each => 0,
        };
        // Latents have queries and outputs as wide as their keys and values, and both before and behind the products of heads.
        let (attended, latent) = (
            config.attended_dim(),
            config.latent.map_or(0, |latent| {
                let of_heads = config.num_attention_heads * (latent.query_dim() + latent.kv_lora_rank);
                of_heads + 2 * latent.q_lora_rank.unwrap_or(0) + latent.key_dim()
            }),
        );
        let row = 2 * config.hidden_size + outputs + heads + attended + latent + projected + dense + experts;
        // Rounded or converted copies of the widest operand come on top, and the logits of the sampled rows.
        let widest = dense.max(heads).max(config.hidden_size).max(copied);
        let logits = if config.is_whole() { 1 } else { config.vocab_size };
        // A head with a norm has its values before and behind it.
        let states = if config.encoder.is_some() { 3 } else { 2 } * config.hidden_size;
        let states = states + config.dense_layers().map(|dense| dense.in_features + dense.out_features).sum::<usize>();
        // A decoder's states of all rows are normed in place, by way of a copy.
        let copied_states = if config.is_whole() && config.encoder.is_none() { config.hidden_size } else { 0 };
        4 * (rows * (row + copied_states + widest / 2) + sampled * (states + logits)) as u64
    }

    /// Context that would be served if `asked` were asked for, regardless of the KV cache.
    pub fn context_tokens(config: &ModelConfig, asked: Option<usize>) -> usize {
        asked.unwrap_or_else(|| rope::context_default(config)).min(rope::context_max(config))
    }

    /// Device of the model, for tests and transfer.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }
}

impl Forward for Model {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn forward(&mut self, batch: &StepBatch<'_>, after_layer: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        match &self.network {
            Network::Decoder(_) if self.geometry.encoder.is_some() => Err(no_logits()),
            Network::Decoder(decoder) => decoder.forward(&mut *self.device, batch, after_layer),
            Network::Encoder(_) => Err(no_logits()),
        }
    }

    fn sample(
        &mut self,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        picks: &[Pick],
    ) -> Result<SampledRows<'_>, KernelError> {
        match &self.network {
            Network::Decoder(_) if self.geometry.encoder.is_some() => Err(no_logits()),
            Network::Decoder(decoder) => decoder.sample(&mut *self.device, batch, after_layer, picks),
            Network::Encoder(_) => Err(no_logits()),
        }
    }

    fn states(
        &mut self,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        out: &mut Vec<f32>,
        logits: bool,
    ) -> Result<&[f32], KernelError> {
        match &self.network {
            Network::Decoder(_) if logits && self.geometry.encoder.is_some() => Err(no_logits()),
            Network::Decoder(decoder) => decoder.states(&mut *self.device, batch, after_layer, out, logits),
            Network::Encoder(_) if logits => Err(no_logits()),
            Network::Encoder(encoder) => encoder.states(&mut *self.device, batch, out).map(|()| &[][..]),
        }
    }

    fn adapt_layer(&mut self, layer: usize, slot: AdapterSlot, adapter: &Adapter) -> Result<(), KernelError> {
        match &self.network {
            Network::Decoder(decoder) if self.geometry.encoder.is_none() => {
                decoder.adapt(&mut *self.device, layer, slot, adapter)
            }
            Network::Decoder(_) | Network::Encoder(_) => {
                let (what, why) =
                    ("a LoRA adapter".to_owned(), "LoRA adapters of encoders are not supported".to_owned());
                Err(KernelError::Unavailable { what, why })
            }
        }
    }

    fn drop_adapter(&mut self, slot: AdapterSlot) {
        self.device.unadapt(slot);
    }

    fn pages(&self) -> &dyn Pages {
        self
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        self.device.write_page(layer, page, bytes);
    }
}

impl Pages for Model {
    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]) {
        self.device.read_page(layer, page, out);
    }
}

/// Refusal of logits by a model without tokens to draw.
fn no_logits() -> KernelError {
    let (what, why) =
        ("a logit".to_owned(), "the model is an encoder, which makes vectors or scores and has no logits".to_owned());
    KernelError::Unavailable { what, why }
}

fn pages(config: &ModelConfig, kv_format: KvFormat, budget: KvBudget) -> Result<usize, LoadError> {
    let page = Model::page_bytes(config, kv_format);
    let pages = match budget {
        KvBudget::Pages(pages) => pages,
        KvBudget::Bytes(bytes) => usize::try_from(bytes / page).unwrap_or(usize::MAX),
    };
    // Pages are numbered with u32.
    if pages == 0 || pages > u32::MAX as usize {
        let reason = format!("{budget:?} makes {pages} KV pages; one page of {PAGE_TOKENS} tokens takes {page} bytes");
        return Err(LoadError::Limits(reason));
    }
    Ok(pages)
}

fn context(config: &ModelConfig, asked: Option<usize>) -> Result<usize, LoadError> {
    if asked == Some(0) {
        return Err(LoadError::Limits("a context of 0 tokens was asked for".into()));
    }
    Ok(Model::context_tokens(config, asked))
}

/// Numerics id: the device's numerics, the weights' stored format, the form in which they are held if that is another, that of keys and values
/// likewise, and the served context where the rotations depend on it.
fn numerics(
    checkpoint: &Checkpoint,
    device: &dyn Device,
    (held, kv_format): (Held, KvFormat),
    context: usize,
) -> String {
    // Version 1 expanded MXFP4 to bf16, under the plain name.
    let stored = checkpoint.weight_format().replace("mxfp4", "mxfp4-v2");
    let mut id = format!("{}/{stored}", device.info().numerics);
    if let Some(name) = held.name() {
        id.push_str(&format!("/{name}"));
    }
    if kv_format != KvFormat::Own {
        id.push_str(&format!("/kv-{}", kv_format.name()));
    }
    if let Some(served) = rope::served(checkpoint.config(), context) {
        id.push_str(&format!("/{served}"));
    }
    id
}
