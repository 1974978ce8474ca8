//! The ledger: what every request used and cost, counted once.
//!
//! ```text
//!           open ─────────► Open ── settle ──► Settled          (again: no change)
//!     (before dispatch)      │                   ▲
//!                            └─ settle(assumed) ─┤              (its gateway died: the reservation stands in)
//!     settle without open ───────────────────────┘
//! ```
//!
//! Gateways say now and then that they live; what one that has fallen silent left open is found by the others ([`Ledger::left`]).
//!
//! When a request came and its id are the key, so a batch of entries can be sent again after any failure. An assumed entry gives way to
//! the real one if that comes after all; nothing else is ever changed. Stores keep entries in the order of that key and by nothing else:
//! almost every entry is put at the end of one tree, which is what makes writing it cheap, and questions name a time.

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;

use crate::{Listing, Page, StoreError};

/// Entries of one [`Ledger::open_entries`] or [`Ledger::settle_entries`].
pub const LEDGER_BATCH_MAX: usize = 4000;
/// Most groups of one [`UsageQuery`].
pub const USAGE_GROUPS_MAX: usize = 4;
/// Most rows of one page of usage.
pub const USAGE_ROWS_MAX: u32 = 10_000;
/// Tags of an entry that are kept.
pub const ENTRY_TAGS_MAX: usize = 16;

/// Tokens by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Of the prompt, all.
    pub input: u64,
    /// Of these, read from a cache.
    pub input_cached: u64,
    /// Of these, written to a cache that is billed.
    pub input_written: u64,
    /// Of the answer, all.
    pub output: u64,
    /// Of these, reasoning.
    pub reasoning: u64,
}

/// Who and what an entry is about: what usage is grouped by. Empty: nobody, unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// Id of the key.
    pub key: String,
    /// Id of the team.
    pub team: String,
    /// Id of the user.
    pub user: String,
    /// Name of the model that was asked for.
    pub model: String,
    /// Pool or provider that answered.
    pub provider: String,
    /// Label of the URL's route: `/v1/chat/completions`.
    pub route: String,
    /// Tags of the key and of the request; more than [`ENTRY_TAGS_MAX`] are cut off.
    pub tags: Vec<String>,
}

/// What was held for a request before it was dispatched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Tokens of the prompt.
    pub input: u64,
    /// Tokens of the answer.
    pub output: u64,
    /// Millionths of a dollar.
    pub micro_usd: u64,
}

/// A request that is under way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenEntry {
    /// Unix seconds when it came.
    pub at: u64,
    /// Id of the request, unique for all gateways and times. Ids of one second are best made in their order: entries are kept by it.
    pub request: String,
    /// Which life of which gateway has it.
    pub gateway: Arc<str>,
    /// Who asks for what: one of many requests alike.
    pub subject: Arc<Subject>,
    /// What is held.
    pub held: Held,
}

impl OpenEntry {
    /// Where it stands in the order of entries, for [`Page::after`].
    pub fn place(&self) -> String {
        format!("{}.{}", self.at, self.request)
    }
}

/// A request that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// As it began.
    pub opened: OpenEntry,
    /// What it used.
    pub tokens: Tokens,
    /// What it cost, in millionths of a dollar.
    pub micro_usd: u64,
    /// HTTP status; 0: none was sent.
    pub status: u16,
    /// Why it ended, as the access log says it: `stop`, `length`, `client_gone`, `error`…
    pub outcome: Cow<'static, str>,
    /// Upstreams that were asked.
    pub attempts: u32,
    /// Milliseconds to the first token; 0: there was none.
    pub first_ms: u64,
    /// Milliseconds to its end.
    pub total_ms: u64,
    /// Nobody knows: its gateway died, and what was held stands in.
    pub assumed: bool,
}

/// What usage is grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// Key.
    Key,
    /// Team.
    Team,
    /// User.
    User,
    /// Model that was asked for.
    Model,
    /// Pool or provider.
    Provider,
    /// Route.
    Route,
    /// Day, in UTC; its value is the Unix second of its beginning.
    Day,
    /// Hour; its value is the Unix second of its beginning.
    Hour,
    /// Tag: an entry counts in each of its tags, and in the empty one if it has none.
    Tag,
}

impl Group {
    /// Every group, with its name in APIs.
    pub const NAMES: [(Group, &'static str); 9] = [
        (Group::Key, "key"),
        (Group::Team, "team"),
        (Group::User, "user"),
        (Group::Model, "model"),
        (Group::Provider, "provider"),
        (Group::Route, "route"),
        (Group::Day, "day"),
        (Group::Hour, "hour"),
        (Group::Tag, "tag"),
    ];

    /// As APIs say it.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(group, _)| *group == self).map_or("key", |(_, name)| name)
    }

    /// The group of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(group, _)| *group)
    }
}

/// Which entries. `None`: all; `Some("")`: those of nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EntryFilter {
    /// Unix seconds, included.
    pub from: u64,
    /// Unix seconds, not included.
    pub until: u64,
    /// Of that key.
    pub key: Option<String>,
    /// Of that team.
    pub team: Option<String>,
    /// Of that user.
    pub user: Option<String>,
    /// For that model.
    pub model: Option<String>,
    /// Answered by that pool or provider.
    pub provider: Option<String>,
    /// On that route.
    pub route: Option<String>,
    /// With that tag.
    pub tag: Option<String>,
}

/// A question for sums.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageQuery {
    /// Of which entries.
    pub filter: EntryFilter,
    /// By what, at most [`USAGE_GROUPS_MAX`], each once; none: one sum of all.
    pub groups: Vec<Group>,
    /// Behind the row with these values; as many as there are groups.
    pub after: Option<Vec<String>>,
    /// Rows at most, up to [`USAGE_ROWS_MAX`].
    pub limit: u32,
}

/// Sums of settled entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageRow {
    /// Values of the groups, in the order of the question. Rows are in the order of these, byte by byte.
    pub values: Vec<String>,
    /// Entries.
    pub requests: u64,
    /// Of these, with a status of 400 and above, or none.
    pub failed: u64,
    /// Tokens.
    pub tokens: Tokens,
    /// Millionths of a dollar.
    pub micro_usd: u64,
}

/// Keeps the ledger.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Notes requests before they are dispatched. One that is there already stays as it is.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] beyond [`LEDGER_BATCH_MAX`]. All are kept or none.
    async fn open_entries(&self, entries: Arc<[OpenEntry]>) -> Result<(), StoreError>;

    /// Notes how requests ended, opened before or not; for each whether it counts: `false` is one that was settled before.
    ///
    /// # Errors
    /// As [`Ledger::open_entries`].
    async fn settle_entries(&self, entries: Arc<[Entry]>) -> Result<Vec<bool>, StoreError>;

    /// Requests opened before `before` that were never settled, oldest first; of one gateway's life, or of all.
    async fn orphans(&self, before: u64, gateway: Option<&str>, limit: u32) -> Result<Vec<OpenEntry>, StoreError>;

    /// A gateway's life says that it goes on.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] for a name that cannot be.
    async fn alive(&self, gateway: &str, now: u64) -> Result<(), StoreError>;

    /// Requests that were never settled, of lives that once said that they go on and have been silent since before `before`; and those
    /// opened before `ancient` by lives that never said anything. Oldest first.
    async fn left(&self, before: u64, ancient: u64, limit: u32) -> Result<Vec<OpenEntry>, StoreError>;

    /// A settled entry of a request that came then.
    async fn entry(&self, at: u64, request: &str) -> Result<Option<Entry>, StoreError>;

    /// Settled entries, in the order in which they came; `page.after` is the [`OpenEntry::place`] of one.
    async fn entries(&self, filter: &EntryFilter, page: &Page) -> Result<Listing<Entry>, StoreError>;

    /// Sums of settled entries.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] for a question that cannot be: too many groups, one twice, `after` of another length.
    async fn usage(&self, query: &UsageQuery) -> Result<Listing<UsageRow>, StoreError>;

    /// Deletes settled entries that came before `before`. How many; call again until 0.
    async fn sweep_entries(&self, before: u64) -> Result<u64, StoreError>;
}

/// Longest name in an entry; a client chose some of them.
const NAME_BYTES_MAX: usize = 256;

impl Subject {
    /// As it is kept: names cut to 256 bytes, each tag once, not too many.
    pub(crate) fn bounded(&self) -> Cow<'_, Self> {
        if self.is_bounded() {
            return Cow::Borrowed(self);
        }
        let mut own = self.clone();
        for name in [&mut own.key, &mut own.team, &mut own.user, &mut own.model, &mut own.provider, &mut own.route] {
            bound(name);
        }
        own.tags.truncate(ENTRY_TAGS_MAX);
        own.tags.iter_mut().for_each(bound);
        own.tags.sort();
        own.tags.dedup();
        Cow::Owned(own)
    }

    fn is_bounded(&self) -> bool {
        let names = [&self.key, &self.team, &self.user, &self.model, &self.provider, &self.route];
        let fits = |name: &String| name.len() <= NAME_BYTES_MAX && !name.contains('\0');
        self.tags.len() <= ENTRY_TAGS_MAX
            && names.into_iter().chain(&self.tags).all(fits)
            && self.tags.windows(2).all(|pair| pair[0] < pair[1])
    }
}

/// Cut to [`NAME_BYTES_MAX`]; without NUL, which PostgreSQL does not take.
fn bound(name: &mut String) {
    if name.len() > NAME_BYTES_MAX {
        name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
    }
    if name.contains('\0') {
        *name = name.replace('\0', "\u{fffd}");
    }
}

/// Refuses what no store answers.
pub(crate) fn check_usage(query: &UsageQuery) -> Result<(), StoreError> {
    let groups = &query.groups;
    if groups.len() > USAGE_GROUPS_MAX {
        return Err(StoreError::Misuse("too many groups"));
    }
    if (1..groups.len()).any(|at| groups[..at].contains(&groups[at])) {
        return Err(StoreError::Misuse("a group that is asked for twice"));
    }
    if query.after.as_ref().is_some_and(|after| after.len() != groups.len()) {
        return Err(StoreError::Misuse("a place with other groups"));
    }
    if query.limit == 0 || query.limit > USAGE_ROWS_MAX {
        return Err(StoreError::Misuse("a page of that size"));
    }
    Ok(())
}

/// Lives that have been silent for a day left nothing that [`Ledger::left`] has not shown.
pub(crate) const SILENT_SECONDS_MAX: u64 = 86_400;

/// Refuses batches that are too large, and ids that cannot be.
pub(crate) fn check_batch<'a>(mut entries: impl ExactSizeIterator<Item = &'a OpenEntry>) -> Result<(), StoreError> {
    if entries.len() > LEDGER_BATCH_MAX {
        return Err(StoreError::Misuse("too many entries at once"));
    }
    entries.try_for_each(|entry| check_id(&entry.request))
}

/// Refuses what cannot be the id of a request, or of a gateway's life.
pub(crate) fn check_id(id: &str) -> Result<(), StoreError> {
    match id.is_empty() || id.len() > NAME_BYTES_MAX || id.contains('\0') {
        true => Err(StoreError::Misuse("an id that cannot be")),
        false => Ok(()),
    }
}
