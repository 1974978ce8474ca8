//! Index of foreign servers' prefix caches (vLLM, SGLang), followed live: one feed per provider with `kv_events`.
//!
//! A feed subscribes to the server's KV events and keeps its own index of block hashes. The index is *whole* if every
//! event since the server's start was seen (live, or in a replay), and *partial* if the feed came later: then each
//! entry is true, but some are missing. After a gap the feed requests a replay; without one it clears the index and
//! begins anew. A lost connection clears the index too: another server may answer next time.
//!
//! Requests never wait for a server's events, however many there are: events are applied one by one, the index is
//! locked for one block of 32 tokens at a time, and a request that still finds it locked is routed by the requests sent
//! there before (`Feed::hits`).
#![forbid(unsafe_code)]

mod client;
mod config;
mod follow;
mod held;
#[cfg(test)]
mod tests;
mod texts;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use penstock_proto::{BlockHash, BlockHasher};
use penstock_router::WorkerId;
use penstock_router::foreign::{Events, ForeignError, Order, Rehasher, Turn};
use penstock_text::TextModel;

pub use client::Endpoint;
pub use config::KvEventsConfig;
pub use follow::start;
use held::Held;
use texts::text_of;

/// Id of the single worker in a feed's index.
const SERVER: WorkerId = WorkerId(0);

/// Salt that separates these block hashes from those of our own workers.
const SALT: &[u8] = b"foreign engines";

/// Chained block hashes of a prompt, as every feed computes them.
pub fn chain(tokens: &[u32]) -> Vec<BlockHash> {
    BlockHasher::new(SALT).chain(tokens)
}

/// Feed of one server's KV cache events: state of the subscription, index of blocks, counters.
pub struct Feed {
    /// Id of the provider whose cache the feed follows.
    id: String,
    config: KvEventsConfig,
    held: Held,
    /// State of the feed's task; locked for as long as a message takes, so requests never touch it.
    followed_by: Mutex<Follower>,
    text: OnceLock<Arc<TextModel>>,
    connected: AtomicBool,
    /// True if the feed has a task.
    followed: AtomicBool,
    counts: Counts,
}

struct Follower {
    rehasher: Rehasher,
    order: Order,
}

/// Counters of batches, gaps and blocks since the feed was created.
#[derive(Default)]
struct Counts {
    batches: AtomicU64,
    gaps: AtomicU64,
    replayed: AtomicU64,
    malformed: AtomicU64,
    skipped: AtomicU64,
    orphans: AtomicU64,
}

/// State of a feed at one moment, for the admin API and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeedState {
    /// True if the feed is connected and events arrive.
    pub connected: bool,
    /// Blocks of 32 tokens that the server is known to hold.
    pub blocks: usize,
    /// Batches of events that were applied to the index.
    pub batches: u64,
    /// Number of times that the sequence showed missing batches.
    pub gaps: u64,
    /// Batches that the server's replay socket repeated.
    pub replayed: u64,
    /// Messages from the server that could not be parsed.
    pub malformed: u64,
    /// Blocks that could not be placed, and events of other kinds.
    pub skipped: u64,
}

/// Result of offering one batch to the feed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    /// The batch was applied, or had been before.
    Fine,
    /// Batches from that number on are missing; nothing of the offered one was applied.
    Missing(u64),
}

impl Feed {
    /// Creates a feed that follows nothing until its task is started.
    pub fn new(id: &str, config: &KvEventsConfig) -> Arc<Self> {
        let rehasher = Rehasher::new(BlockHasher::new(SALT));
        Arc::new(Self {
            id: id.to_owned(),
            config: config.clone(),
            held: Held::default(),
            followed_by: Mutex::new(Follower { rehasher, order: Order::default() }),
            text: OnceLock::new(),
            connected: AtomicBool::new(false),
            followed: AtomicBool::new(false),
            counts: Counts::default(),
        })
    }

    /// Id of the provider whose cache the feed follows.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Tokenizer and chat template that turn requests into the server's tokens; `None`: not loaded, or the feed is not
    /// connected.
    pub fn text(&self) -> Option<Arc<TextModel>> {
        self.text.get().filter(|_| self.connected.load(Ordering::Relaxed)).cloned()
    }

    /// Leading blocks of a prompt that the server holds: on its device, and in any tier. Never waits; `None`: a write
    /// is in progress.
    pub fn hits(&self, hashes: &[BlockHash]) -> Option<(u32, u32)> {
        let hits = self.held.hits(hashes)?;
        Some((hits.on_device(SERVER), hits.any(SERVER)))
    }

    /// State for the admin API and metrics.
    pub fn state(&self) -> FeedState {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FeedState {
            connected: self.connected.load(Ordering::Relaxed),
            blocks: self.held.blocks(),
            batches: count(&self.counts.batches),
            gaps: count(&self.counts.gaps),
            replayed: count(&self.counts.replayed),
            malformed: count(&self.counts.malformed),
            skipped: count(&self.counts.skipped) + count(&self.counts.orphans),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Follower> {
        self.followed_by.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Clears the index and the sequence state.
    fn forget(&self) {
        let Follower { rehasher, order } = &mut *self.lock();
        rehasher.clear(&mut &self.held, SERVER);
        order.forget();
    }

    /// Processes one message: topic, sequence number, payload.
    fn hear(&self, parts: &[Vec<u8>]) -> Heard {
        let Some((sequence, payload)) = numbered(parts) else {
            self.counts.malformed.fetch_add(1, Ordering::Relaxed);
            return Heard::Fine;
        };
        let Follower { rehasher, order } = &mut *self.lock();
        match order.look(sequence) {
            Turn::Next => {}
            Turn::Old => return Heard::Fine,
            Turn::Gap(from) => return Heard::Missing(from),
            Turn::Restart => {
                rehasher.clear(&mut &self.held, SERVER);
                order.forget();
                return Heard::Missing(0);
            }
        }
        order.took(sequence);
        if self.take_in(payload, rehasher).is_ok() {
            self.counts.batches.fetch_add(1, Ordering::Relaxed);
        } else {
            // The content of a malformed batch is unknown, as after a gap that no replay fills.
            rehasher.clear(&mut &self.held, SERVER);
            self.counts.malformed.fetch_add(1, Ordering::Relaxed);
        }
        self.counts.orphans.store(rehasher.followed().orphans, Ordering::Relaxed);
        Heard::Fine
    }

    fn take_in(&self, payload: &[u8], rehasher: &mut Rehasher) -> Result<(), ForeignError> {
        for event in Events::new(payload)? {
            match event? {
                Some(event) => rehasher.apply(&event, &mut &self.held, SERVER),
                None => drop(self.counts.skipped.fetch_add(1, Ordering::Relaxed)),
            }
        }
        Ok(())
    }

    /// Continues with batch `next`; earlier ones are lost, so the index is cleared.
    fn skip_to(&self, next: u64) {
        let Follower { rehasher, order } = &mut *self.lock();
        rehasher.clear(&mut &self.held, SERVER);
        order.forget();
        match next.checked_sub(1) {
            Some(last) => order.took(last),
            None => order.forget(),
        }
    }

    fn load_text(&self) -> bool {
        match text_of(&self.config.tokenizer) {
            Ok(text) => drop(self.text.set(text)),
            Err(error) => {
                let path = self.config.tokenizer.display();
                tracing::error!(provider = self.id, tokenizer = %path, %error, "KV events of this provider are ignored: the tokenizer cannot be read");
            }
        }
        self.text.get().is_some()
    }
}

/// Sequence number and payload of a message; the topic in front may be missing.
fn numbered(parts: &[Vec<u8>]) -> Option<(u64, &[u8])> {
    let [.., sequence, payload] = parts else { return None };
    Some((u64::from_be_bytes(sequence.as_slice().try_into().ok()?), payload))
}
