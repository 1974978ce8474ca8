//! Who changed what: events that are only ever added, and swept when they are old.

use async_trait::async_trait;

use crate::{AuditId, Listing, Page, StoreError};

/// Longest [`AuditEvent::detail`].
pub const AUDIT_DETAIL_BYTES_MAX: usize = 64 * 1024;

/// Somebody did something, or tried to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEvent {
    /// Its id; made by who notes it ([`AuditId::random`]).
    pub id: AuditId,
    /// Unix seconds.
    pub at: u64,
    /// Who: id of an admin key, of a certificate, of the process itself.
    pub actor: String,
    /// Where from; empty where there is none.
    pub address: String,
    /// What: `key.create`, `config.apply`.
    pub action: String,
    /// On what: an id.
    pub target: String,
    /// What came of it: `done`, `denied`, `failed`.
    pub outcome: String,
    /// JSON: what was before and after, without secrets; or empty.
    pub detail: String,
}

/// Which events. `None`: all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Unix seconds, included.
    pub from: Option<u64>,
    /// Unix seconds, not included.
    pub until: Option<u64>,
    /// By whom.
    pub actor: Option<String>,
    /// What; one that ends in `*` is a prefix: `key.*`.
    pub action: Option<String>,
    /// On what.
    pub target: Option<String>,
    /// What came of it.
    pub outcome: Option<String>,
}

/// Keeps the audit log.
#[async_trait]
pub trait Audit: Send + Sync + 'static {
    /// Adds an event. One with an id that is there already changes nothing, so it can be sent again.
    ///
    /// # Errors
    /// [`StoreError::Misuse`] when its detail is longer than [`AUDIT_DETAIL_BYTES_MAX`].
    async fn note(&self, event: AuditEvent) -> Result<(), StoreError>;

    /// Events, in the order in which they were added.
    async fn audit(&self, filter: &AuditFilter, page: &Page) -> Result<Listing<AuditEvent>, StoreError>;

    /// Deletes events before that time. How many; call again until 0.
    async fn sweep_audit(&self, before: u64) -> Result<u64, StoreError>;
}

impl AuditFilter {
    /// The action that is wanted, or how it begins.
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

/// Refuses what no store keeps.
pub(crate) fn check_event(event: &AuditEvent) -> Result<(), StoreError> {
    if event.detail.len() > AUDIT_DETAIL_BYTES_MAX {
        return Err(StoreError::Misuse("an audit event that is too long"));
    }
    Ok(())
}
