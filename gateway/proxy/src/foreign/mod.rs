//! Prefix caches of servers that are not ours, followed live: one feed per provider with `kv_events`.
//!
//! A feed subscribes to the server's KV events and keeps an index of its own. It is *whole* when every event since the server's start was
//! seen (there, or in the replay that was asked for), *partial* when it came later: what it says is true then, but not all. After a gap
//! it asks for a replay; where there is none it forgets everything and begins anew. A connection that is lost makes it forget too: the
//! server may be another one when it comes back.
//!
//! Requests never wait for what a server says, however much that is: its events are taken in one by one, the index is locked for one
//! block of 32 tokens at a time, and who finds it locked all the same is routed by what was sent there (`Feed::hits`).

mod client;
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
pub(crate) use follow::start;
use held::Held;
use texts::text_of;

use crate::config::KvEventsConfig;

/// The one worker of a feed's index.
const SERVER: WorkerId = WorkerId(0);

/// Separates these hashes from those of our own workers.
const SALT: &[u8] = b"foreign engines";

/// Hashes of a prompt as every feed hashes it.
pub(crate) fn chain(tokens: &[u32]) -> Vec<BlockHash> {
    BlockHasher::new(SALT).chain(tokens)
}

/// What one server holds.
pub struct Feed {
    /// Of the provider.
    id: String,
    config: KvEventsConfig,
    held: Held,
    /// For its task alone: it is locked for as long as a message takes.
    followed_by: Mutex<Follower>,
    text: OnceLock<Arc<TextModel>>,
    connected: AtomicBool,
    /// It has its task.
    followed: AtomicBool,
    counts: Counts,
}

struct Follower {
    rehasher: Rehasher,
    order: Order,
}

/// Counts since the start.
#[derive(Default)]
struct Counts {
    batches: AtomicU64,
    gaps: AtomicU64,
    replayed: AtomicU64,
    malformed: AtomicU64,
    skipped: AtomicU64,
    orphans: AtomicU64,
}

/// A feed at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeedState {
    /// Events come.
    pub connected: bool,
    /// Blocks of 32 tokens that the server holds, as far as it is known.
    pub blocks: usize,
    /// Batches of events that were applied.
    pub batches: u64,
    /// Times that batches were missing.
    pub gaps: u64,
    /// Of the batches, those that came by replay.
    pub replayed: u64,
    /// Messages that could not be read.
    pub malformed: u64,
    /// Blocks that could not be placed, and events of no use.
    pub skipped: u64,
}

/// What a batch led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    /// It was applied, or was known.
    Fine,
    /// Batches from that one on are missing; nothing was applied.
    Missing(u64),
}

impl Feed {
    /// A feed that follows nobody yet.
    pub(crate) fn new(id: &str, config: &KvEventsConfig) -> Arc<Self> {
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

    /// Id of the provider.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What turns requests into the tokens that the server sees; `None`: it is not loaded, or the server is not followed now.
    pub(crate) fn text(&self) -> Option<Arc<TextModel>> {
        self.text.get().filter(|_| self.connected.load(Ordering::Relaxed)).cloned()
    }

    /// Leading blocks of a prompt that the server holds: on its device, anywhere. Waits for nobody; `None`: something is being noted, and
    /// nobody knows just now.
    pub(crate) fn hits(&self, hashes: &[BlockHash]) -> Option<(u32, u32)> {
        let hits = self.held.hits(hashes)?;
        Some((hits.on_device(SERVER), hits.any(SERVER)))
    }

    /// For people and metrics.
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

    /// Forgets what the server held.
    fn forget(&self) {
        let Follower { rehasher, order } = &mut *self.lock();
        rehasher.clear(&mut &self.held, SERVER);
        order.forget();
    }

    /// Takes one message: topic, sequence number, payload.
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
            // What it would have said is unknown: as good as a gap that nobody can fill.
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

    /// Goes on with batch `next`: what was before it cannot be had.
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
