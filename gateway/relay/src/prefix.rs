//! Estimate of each target's cached part of a prompt, for `cache_aware`.
//!
//! Where a target publishes its prefix cache ([`penstock_kv_feed`]), the prompt is tokenized as the server will see it,
//! and the target's index is asked. Elsewhere the estimate comes from the prompts sent there: their text, in the order
//! in which prompts are built from it, in pieces of 128 bytes, which are about 32 tokens.

use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher};
use penstock_router::WorkerId;
use penstock_router::approximate::{Approximate, Trust};
use penstock_text::TextModel;
use penstock_types::{Decoded, Prompt, Request};
use tokio::sync::Semaphore;

use super::config::TARGETS_MAX;
use super::core::Core;
use penstock_base::clock::unix_seconds;
use penstock_upstream::call::Call;

/// Most bytes of text that are looked at: about a million tokens.
const TEXT_BYTES_MAX: usize = 4 << 20;

/// Most bytes of text tokenized on the calling thread: a fraction of a millisecond.
const INLINE_BYTES_MAX: usize = 4096;

/// Bytes of text counted as one token.
const TOKEN_BYTES: usize = 4;

/// Permits for prompts tokenized at the same time, one per core; a prompt without a permit is routed by its text.
static TOKENIZING: LazyLock<Arc<Semaphore>> =
    LazyLock::new(|| Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(2, usize::from))));

/// Index of the prompts sent to each target, for one model. Each target has a place in the index, which it keeps when
/// others come and go.
pub(crate) struct Sent {
    view: Arc<Mutex<Approximate>>,
    /// Place of each target in the index, by the target's index.
    places: Vec<WorkerId>,
    began: Instant,
}

impl Sent {
    pub(crate) fn new(targets: usize) -> Self {
        let places = (0..TARGETS_MAX as u8).map(WorkerId).take(targets).collect();
        let view = Approximate::new(TARGETS_MAX as u8, Trust::default());
        Self { view: Arc::new(Mutex::new(view)), places, began: Instant::now() }
    }

    /// The index under other targets. `kept`: for each target its index before, where it was there; the others begin
    /// without blocks.
    pub(crate) fn after(&self, kept: &[Option<usize>]) -> Self {
        let known: Vec<Option<WorkerId>> = kept.iter().map(|before| self.places.get((*before)?).copied()).collect();
        let mut free = (0..TARGETS_MAX as u8).map(WorkerId).filter(|place| !known.contains(&Some(*place)));
        let (mut view, age) = (self.view(), self.began.elapsed());
        let mut place = |known: &Option<WorkerId>| {
            known.or_else(|| free.next().inspect(|place| view.renew(*place, age))).unwrap_or_default()
        };
        let places = known.iter().map(&mut place).collect();
        Self { view: self.view.clone(), places, began: self.began }
    }

    fn view(&self) -> std::sync::MutexGuard<'_, Approximate> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of prompt blocks believed to be cached at some target.
    pub(crate) fn blocks(&self) -> usize {
        self.view().len()
    }
}

/// Source of an estimate of cached tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layer {
    /// Cache events that the target's server publishes.
    Events,
    /// Prompts that this gateway has sent to the target.
    Approximate,
}

impl Layer {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Layer::Events => "events",
            Layer::Approximate => "approximate",
        }
    }
}

/// Estimate of the part of a prompt that one target has in its prefix cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) layer: Layer,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
}

impl Share {
    /// Prompt tokens that the target would have to compute: at least the last one, whose logits are needed.
    pub(crate) fn own_tokens(self) -> u64 {
        self.prompt_tokens.saturating_sub(self.cached_tokens).max(1)
    }
}

/// A prompt's block hashes, with the estimate for each target.
pub(crate) struct Prefix {
    text: Vec<BlockHash>,
    shares: Vec<Share>,
}

impl Prefix {
    /// Estimates from the prompts sent to each target.
    pub(crate) fn of_text(core: &Core, call: &Call, now: Instant) -> Self {
        let mut words: Vec<u32> = Vec::with_capacity(call.body.len().min(TEXT_BYTES_MAX) / TOKEN_BYTES);
        for part in &call.peek.prompt_at {
            let piece = call.body.get(part.clone()).unwrap_or_default();
            // Without the array's end: the next turn of the same conversation continues there.
            let piece = piece.strip_suffix(b"]").unwrap_or(piece);
            let room = (TEXT_BYTES_MAX / TOKEN_BYTES).saturating_sub(words.len());
            let whole = piece.chunks_exact(TOKEN_BYTES).take(room);
            words.extend(whole.map(|four| four.iter().fold(0, |word, byte| word << 8 | u32::from(*byte))));
        }
        // Two models may share a name at a server, but never a target here: the hashes need no salt.
        let text = BlockHasher::new(b"text").chain(&words);
        let age = now.saturating_duration_since(core.sent.began);
        let hits = core.sent.view().hits_of(&text, &core.sent.places, age);
        let prompt_tokens = words.len() as u64;
        let share = |blocks: u32| Share {
            layer: Layer::Approximate,
            prompt_tokens,
            cached_tokens: u64::from(blocks) * BLOCK_TOKENS as u64,
        };
        Self { text, shares: hits.into_iter().map(share).collect() }
    }

    /// Estimates from the targets' own events where they publish them, else from the prompts sent.
    pub(crate) async fn of(core: &Core, call: &Call, now: Instant) -> Self {
        let mut prefix = Self::of_text(core, call, now);
        let mut made: Vec<Made> = Vec::new();
        for (index, target) in core.targets.iter().enumerate() {
            let Some(feed) = target.upstream.feed() else { continue };
            let Some(text) = feed.text() else { continue };
            if !made.iter().any(|made| Arc::ptr_eq(&made.text, &text)) {
                let tokens = tokens(call, &text).await;
                made.push(Made { text: text.clone(), tokens });
            }
            let known = made.iter().find(|made| Arc::ptr_eq(&made.text, &text)).and_then(|made| made.tokens.as_ref());
            if let (Some((count, hashes)), Some(share)) = (known, prefix.shares.get_mut(index)) {
                let Some((on_device, anywhere)) = feed.hits(hashes) else { continue };
                // Blocks below the device have to be loaded: they count half.
                let blocks = f64::from(on_device) + f64::from(anywhere.saturating_sub(on_device)) / 2.0;
                *share = Share {
                    layer: Layer::Events,
                    prompt_tokens: *count as u64,
                    cached_tokens: (blocks * BLOCK_TOKENS as f64) as u64,
                };
            }
        }
        prefix
    }

    /// Estimate for the target at `index`; `None`: nothing is known of it.
    pub(crate) fn share(&self, index: usize) -> Option<Share> {
        self.shares.get(index).copied()
    }

    /// Records that the prompt is sent to this target.
    pub(crate) fn goes_to(&self, core: &Core, index: usize, now: Instant) {
        if let Some(place) = core.sent.places.get(index) {
            let age = now.saturating_duration_since(core.sent.began);
            core.sent.view().sent(*place, &self.text, age);
        }
    }
}

/// A prompt tokenized for the servers of one tokenizer.
struct Made {
    text: Arc<TextModel>,
    /// Number of tokens, and the hashes of the prompt's blocks.
    tokens: Option<(usize, Vec<BlockHash>)>,
}

/// Tokenizes the prompt as the server will see it; `None` if that fails or no permit is free.
async fn tokens(call: &Call, text: &Arc<TextModel>) -> Option<(usize, Vec<BlockHash>)> {
    let decoded = call.decoded().await.ok()?;
    if call.body.len() <= INLINE_BYTES_MAX {
        return tokenized(&decoded, text);
    }
    let place = TOKENIZING.clone().try_acquire_owned().ok()?;
    let text = text.clone();
    let task = tokio::task::spawn_blocking(move || {
        let _place = place;
        tokenized(&decoded, &text)
    });
    task.await.ok()?
}

fn tokenized(decoded: &Decoded, text: &TextModel) -> Option<(usize, Vec<BlockHash>)> {
    let tokens = match &decoded.request {
        Request::Chat(chat) => text.chat_prompt(chat, unix_seconds() as i64).ok().map(|prompt| prompt.tokens),
        Request::Complete(complete) => match complete.prompts.as_slice() {
            [Prompt::Text(prompt)] => text.encode(prompt, true).ok(),
            [Prompt::Tokens(tokens)] => Some(tokens.clone()),
            _ => None,
        },
        Request::Embed(_) | Request::Rerank(_) => None,
    }?;
    Some((tokens.len(), penstock_kv_feed::chain(&tokens)))
}
