//! Audit log: events of administration, append-only, deleted when they are old.

use async_trait::async_trait;

use crate::{AuditId, Listing, Page, StoreError};

/// Longest [`AuditEvent::detail`] in bytes.
pub const AUDIT_DETAIL_BYTES_MAX: usize = 64 * 1024;

/// Event of the audit log: an action that somebody took or tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEvent {
    /// Id, chosen by the caller ([`AuditId::random`]) so that a retry is recognized.
    pub id: AuditId,
    /// Time of the action in Unix seconds.
    pub at: u64,
    /// Actor: id of an admin key, of a certificate, or of the process itself.
    pub actor: String,
    /// Network address of the actor; empty if there is none.
    pub address: String,
    /// Name of the action, such as `key.create` or `config.apply`.
    pub action: String,
    /// Id of the object that the action changed or was to change.
    pub target: String,
    /// Outcome of the action: `done`, `denied` or `failed`.
    pub outcome: String,
    /// State before and after as JSON, without secrets; or empty.
    pub detail: String,
}

/// Filter of the audit log's events. `None`: no restriction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Earliest time of an event in Unix seconds, inclusive.
    pub from: Option<u64>,
    /// Latest time of an event in Unix seconds, exclusive.
    pub until: Option<u64>,
    /// Actor of the event, compared as a whole.
    pub actor: Option<String>,
    /// Action of the event; a trailing `*` makes it a prefix: `key.*`.
    pub action: Option<String>,
    /// Id of the object of the action, compared as a whole.
    pub target: Option<String>,
    /// Outcome of the event: `done`, `denied` or `failed`.
    pub outcome: Option<String>,
}

/// Store of the audit log: events are added and read in their order, and deleted by age.
#[async_trait]
pub trait Audit: Send + Sync + 'static {
    /// Adds an event. An event whose id exists already changes nothing, so a retry is safe.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] if its detail is longer than [`AUDIT_DETAIL_BYTES_MAX`].
    async fn note(&self, event: AuditEvent) -> Result<(), StoreError>;

    /// Lists events in the order in which they were added.
    async fn audit(&self, filter: &AuditFilter, page: &Page) -> Result<Listing<AuditEvent>, StoreError>;

    /// Deletes some events before that time; returns their number. Call again until 0.
    async fn sweep_audit(&self, before: u64) -> Result<u64, StoreError>;
}

impl AuditFilter {
    /// Exact action, or prefix of the action, that the filter asks for.
    pub(crate) fn action_rule(&self) -> (Option<&str>, Option<&str>) {
        match self.action.as_deref() {
            Some(action) => match action.strip_suffix('*') {
                Some(prefix) => (None, Some(prefix)),
                None => (Some(action), None),
            },
            None => (None, None),
        }
    }
}

/// Checks the length of an event's detail before the event is written.
pub(crate) fn check_event(event: &AuditEvent) -> Result<(), StoreError> {
    if event.detail.len() > AUDIT_DETAIL_BYTES_MAX {
        return Err(StoreError::Misuse("an audit event that is too long"));
    }
    Ok(())
}
