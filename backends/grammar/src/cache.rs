//! Compiled grammars by their text, bounded in number and in bytes; what was refused is remembered too.

use crate::error::GrammarError;
use crate::{Grammar, Source, Vocabulary};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that a refusal counts as.
const REFUSAL_BYTES: usize = 1024;

/// Bounds of [`Grammars`]. The least recently used grammars go first; a sequence keeps its own as long as it lives.
#[derive(Clone, Copy, Debug)]
pub struct CacheSizes {
    /// Most grammars, refused ones included.
    pub entries_max: usize,
    /// Most bytes of all grammars.
    pub bytes_max: usize,
}

impl Default for CacheSizes {
    fn default() -> Self {
        Self { entries_max: 256, bytes_max: 256 << 20 }
    }
}

type Outcome = Result<Grammar, GrammarError>;

struct Entry {
    outcome: Arc<OnceLock<Outcome>>,
    used: u64,
}

#[derive(Default)]
struct Entries {
    by_text: HashMap<[u8; 32], Entry>,
    clock: u64,
}

/// Compiled grammars of one vocabulary, shared by all threads of a process.
pub struct Grammars {
    vocabulary: Arc<Vocabulary>,
    sizes: CacheSizes,
    entries: Mutex<Entries>,
    compiled: AtomicU64,
    compile_micros: AtomicU64,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl Grammars {
    /// Creates an empty cache.
    pub fn new(vocabulary: Arc<Vocabulary>, sizes: CacheSizes) -> Self {
        Self {
            vocabulary,
            sizes,
            entries: Mutex::default(),
            compiled: AtomicU64::new(0),
            compile_micros: AtomicU64::new(0),
        }
    }

    /// Vocabulary of all grammars.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Grammar of a source: known, or compiled now. Threads that want the same text at once wait for one compilation.
    ///
    /// # Errors
    /// [`GrammarError`] of [`Grammar::compile`], remembered like a grammar.
    pub fn get(&self, source: &Source) -> Outcome {
        let outcome = self.entry(source);
        let mut is_new = false;
        let result = outcome.get_or_init(|| {
            is_new = true;
            let began = Instant::now();
            let outcome = Grammar::compile(source, &self.vocabulary);
            self.compiled.fetch_add(1, Ordering::Relaxed);
            self.compile_micros.fetch_add(began.elapsed().as_micros() as u64, Ordering::Relaxed);
            outcome
        });
        if is_new {
            self.shrink();
        }
        result.clone()
    }

    /// Outcome of a source that was compiled before; `None` if [`Self::get`] would compile or wait.
    pub fn peek(&self, source: &Source) -> Option<Outcome> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.by_text.get(&key(source))?.outcome.get().cloned()
    }

    /// Number of sources compiled so far, refused ones included, and the time that took in sum.
    pub fn spent(&self) -> (u64, Duration) {
        let micros = self.compile_micros.load(Ordering::Relaxed);
        (self.compiled.load(Ordering::Relaxed), Duration::from_micros(micros))
    }

    /// Number of entries, refused texts included.
    pub fn count(&self) -> usize {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).by_text.len()
    }

    fn entry(&self, source: &Source) -> Arc<OnceLock<Outcome>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.clock += 1;
        let used = entries.clock;
        let entry = entries.by_text.entry(key(source)).or_insert_with(|| Entry { outcome: Arc::default(), used });
        entry.used = used;
        Arc::clone(&entry.outcome)
    }

    /// Drops the entries that were not used for longest until the rest keeps the bounds. The newest stays.
    fn shrink(&self) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let mut by_age: Vec<(u64, [u8; 32], usize)> =
            entries.by_text.iter().map(|(key, entry)| (entry.used, *key, bytes(entry))).collect();
        by_age.sort_unstable();
        let (mut count, mut total) =
            (by_age.len(), by_age.iter().fold(0_usize, |sum, entry| sum.saturating_add(entry.2)));
        for (_, key, size) in by_age {
            if count <= 1 || (count <= self.sizes.entries_max && total <= self.sizes.bytes_max) {
                break;
            }
            entries.by_text.remove(&key);
            (count, total) = (count - 1, total.saturating_sub(size));
        }
    }
}

fn bytes(entry: &Entry) -> usize {
    match entry.outcome.get() {
        Some(Ok(grammar)) => grammar.bytes(),
        Some(Err(_)) | None => REFUSAL_BYTES,
    }
}

fn key(source: &Source) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    hash.update(source.kind.to_string().as_bytes());
    hash.update(&[0]);
    hash.update(source.text.as_bytes());
    *hash.finalize().as_bytes()
}
