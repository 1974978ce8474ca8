//! Ledger: usage and cost of every request, counted once.
//!
//! ```text
//!           open ─────────► Open ── settle ──► Settled          (again: no change)
//!     (before dispatch)      │                   ▲
//!                            └─ settle(assumed) ─┤              (its gateway died: the reservation stands in)
//!     settle without open ───────────────────────┘
//! ```
//!
//! Gateways report regularly that they are alive; entries that a silent one left open are found by the others
//! ([`Ledger::left`]).
//!
//! The key of an entry is the request's arrival time and id, so a batch of entries can be retried after any failure. An
//! assumed entry is replaced by the real one if that arrives after all; nothing else is ever changed. Stores order
//! entries by that key and have no other index on settled ones: almost every insert is at the end of one tree, which
//! keeps writes cheap, and every query names a time range.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::{Listing, Page, StoreError};

/// Most entries of one [`Ledger::open_entries`] or [`Ledger::settle_entries`].
pub const LEDGER_BATCH_MAX: usize = 4000;
/// Most dimensions that one [`UsageQuery`] may group by.
pub const USAGE_GROUPS_MAX: usize = 4;
/// Most rows of one page of usage.
pub const USAGE_ROWS_MAX: u32 = 10_000;
/// Most tags of an entry that are stored.
pub const ENTRY_TAGS_MAX: usize = 16;

/// Numbers of tokens of one request, or of several, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// All tokens of the prompt, cached ones included.
    pub input: u64,
    /// Prompt tokens read from a cache.
    pub input_cached: u64,
    /// Prompt tokens written to a cache that bills writes.
    pub input_written: u64,
    /// All tokens of the answer, reasoning included.
    pub output: u64,
    /// Part of the answer's tokens that was spent on reasoning.
    pub reasoning: u64,
}

/// Dimensions of an entry, by which usage is grouped. Empty: none or unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// Id of the API key that sent the request.
    pub key: String,
    /// Id of the team that the key belongs to.
    pub team: String,
    /// Id of the user that the key belongs to.
    pub user: String,
    /// Name of the model that the request asked for.
    pub model: String,
    /// Name of the pool or provider that answered.
    pub provider: String,
    /// Label of the URL's route: `/v1/chat/completions`.
    pub route: String,
    /// Tags of the key and of the request, at most [`ENTRY_TAGS_MAX`].
    pub tags: Vec<String>,
}

/// Tokens and cost that were reserved before the request was dispatched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Reserved number of prompt tokens.
    pub input: u64,
    /// Reserved number of answer tokens.
    pub output: u64,
    /// Reserved cost in millionths of a dollar.
    pub micro_usd: u64,
}

/// Entry of a request in progress: who asks for what, and the reservation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenEntry {
    /// Arrival of the request in Unix seconds.
    pub at: u64,
    /// Id of the request, unique across gateways and time. Entries are ordered by it within a second, so ids are best
    /// generated in ascending order.
    pub request: String,
    /// Id of the gateway's life that has the request; a restart begins a new life.
    pub gateway: Arc<str>,
    /// Dimensions of the entry; shared by many similar requests.
    pub subject: Arc<Subject>,
    /// Tokens and cost reserved for the request.
    pub held: Held,
}

impl OpenEntry {
    /// Position in the order of entries, for [`Page::after`].
    pub fn place(&self) -> String {
        format!("{}.{}", self.at, self.request)
    }
}

/// Entry of a request that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The entry's part that was written before the request was dispatched.
    pub opened: OpenEntry,
    /// Tokens that the request used.
    pub tokens: Tokens,
    /// Cost of the request in millionths of a dollar.
    pub micro_usd: u64,
    /// HTTP status of the answer; 0: none was sent.
    pub status: u16,
    /// Reason of the end, as in the access log: `stop`, `length`, `client_gone`, `error`…
    pub outcome: Cow<'static, str>,
    /// Number of upstreams that were tried for the request.
    pub attempts: u32,
    /// Milliseconds to the first token; 0: there was none.
    pub first_ms: u64,
    /// Milliseconds from the arrival to the end of the request.
    pub total_ms: u64,
    /// True if the reservation stands in for unknown usage, because the gateway died.
    pub assumed: bool,
}

/// Dimension that usage is grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// Id of the API key.
    Key,
    /// Id of the team that the key belongs to.
    Team,
    /// Id of the user that the key belongs to.
    User,
    /// Name of the requested model.
    Model,
    /// Name of the pool or provider that answered.
    Provider,
    /// Label of the URL's route.
    Route,
    /// Day in UTC; the value is the Unix second of its begin.
    Day,
    /// Hour; the value is the Unix second of its begin.
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

    /// Name of the dimension in APIs.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(group, _)| *group == self).map_or("key", |(_, name)| name)
    }

    /// Dimension with that name; `None` for an unknown one.
    pub fn parse(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(group, _)| *group)
    }
}

/// Filter of entries. `None`: no restriction; `Some("")`: entries without that dimension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EntryFilter {
    /// Begin of the time range in Unix seconds, inclusive.
    pub from: u64,
    /// End of the time range in Unix seconds, exclusive.
    pub until: u64,
    /// Id of the API key that sent the request.
    pub key: Option<String>,
    /// Id of the team that the key belongs to.
    pub team: Option<String>,
    /// Id of the user that the key belongs to.
    pub user: Option<String>,
    /// Name of the requested model.
    pub model: Option<String>,
    /// Name of the pool or provider that answered.
    pub provider: Option<String>,
    /// Label of the URL's route.
    pub route: Option<String>,
    /// Tag that the entry has, among others.
    pub tag: Option<String>,
}

/// Query of usage sums: a filter, dimensions to group by, and a page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageQuery {
    /// Filter of the entries to sum.
    pub filter: EntryFilter,
    /// Dimensions to group by, at most [`USAGE_GROUPS_MAX`], each once; empty: one sum of all.
    pub groups: Vec<Group>,
    /// Group values of the last row of the previous page; as many as there are groups.
    pub after: Option<Vec<String>>,
    /// Most rows of the page, up to [`USAGE_ROWS_MAX`].
    pub limit: u32,
}

/// Sums of settled entries of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageRow {
    /// Group values, in the order of the query's groups. Rows are sorted by them, byte by byte.
    pub values: Vec<String>,
    /// Number of settled entries in the group.
    pub requests: u64,
    /// Entries with a status of 400 or above, or none.
    pub failed: u64,
    /// Sums of the entries' tokens, by kind.
    pub tokens: Tokens,
    /// Sum of the cost in millionths of a dollar.
    pub micro_usd: u64,
}

/// Store of the ledger: one entry per request, opened before dispatch and settled at the end.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Records requests before they are dispatched, all or none. A request that is recorded already is unchanged.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] beyond [`LEDGER_BATCH_MAX`].
    async fn open_entries(&self, entries: Arc<[OpenEntry]>) -> Result<(), StoreError>;

    /// Records the end of requests, opened before or not; returns for each whether it counts: `false` for one that was
    /// settled before.
    ///
    /// # Errors
    /// As [`Ledger::open_entries`].
    async fn settle_entries(&self, entries: Arc<[Entry]>) -> Result<Vec<bool>, StoreError>;

    /// Lists open entries from before `before`, oldest first; of one gateway's life, or of all.
    async fn orphans(&self, before: u64, gateway: Option<&str>, limit: u32) -> Result<Vec<OpenEntry>, StoreError>;

    /// Reports that a gateway's life goes on.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] for an invalid name.
    async fn alive(&self, gateway: &str, now: u64) -> Result<(), StoreError>;

    /// Lists open entries of dead gateways, oldest first: those of lives that reported once and are silent since before
    /// `before`, and those from before `ancient` of lives that never reported.
    async fn left(&self, before: u64, ancient: u64, limit: u32) -> Result<Vec<OpenEntry>, StoreError>;

    /// Reads the settled entry of a request that arrived at `at`.
    async fn entry(&self, at: u64, request: &str) -> Result<Option<Entry>, StoreError>;

    /// Lists settled entries in the order of arrival; `page.after` is an entry's [`OpenEntry::place`].
    async fn entries(&self, filter: &EntryFilter, page: &Page) -> Result<Listing<Entry>, StoreError>;

    /// Sums settled entries by groups.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] for an invalid query: too many groups, one twice, `after` of another length.
    async fn usage(&self, query: &UsageQuery) -> Result<Listing<UsageRow>, StoreError>;

    /// Sums as [`Self::usage`] does, for a caller that waits for `patience`: a sum of millions of entries takes longer than
    /// other reads may.
    async fn usage_within(&self, query: &UsageQuery, patience: Duration) -> Result<Listing<UsageRow>, StoreError> {
        let _ = patience;
        self.usage(query).await
    }

    /// Deletes some settled entries that arrived before `before`; returns their number. Call again until 0.
    async fn sweep_entries(&self, before: u64) -> Result<u64, StoreError>;
}

/// Longest name in an entry, in bytes; clients choose some of them.
const NAME_BYTES_MAX: usize = 256;

impl Subject {
    /// Subject as it is stored: names cut to 256 bytes, tags sorted, unique and bounded in number.
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

/// Cuts a name to [`NAME_BYTES_MAX`] and replaces NUL, which PostgreSQL does not accept.
fn bound(name: &mut String) {
    if name.len() > NAME_BYTES_MAX {
        name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
    }
    if name.contains('\0') {
        *name = name.replace('\0', "\u{fffd}");
    }
}

/// Checks a usage query: bounds of groups and rows, and a fitting `after`.
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

/// Time after which a silent life is forgotten: within a day, [`Ledger::left`] has shown what it left open.
pub(crate) const SILENT_SECONDS_MAX: u64 = 86_400;

/// Validates the size of a batch and the ids of its entries.
pub(crate) fn check_batch<'a>(mut entries: impl ExactSizeIterator<Item = &'a OpenEntry>) -> Result<(), StoreError> {
    if entries.len() > LEDGER_BATCH_MAX {
        return Err(StoreError::Misuse("too many entries at once"));
    }
    entries.try_for_each(|entry| check_id(&entry.request))
}

/// Validates the id of a request or of a gateway's life.
pub(crate) fn check_id(id: &str) -> Result<(), StoreError> {
    match id.is_empty() || id.len() > NAME_BYTES_MAX || id.contains('\0') {
        true => Err(StoreError::Misuse("an id that cannot be")),
        false => Ok(()),
    }
}
