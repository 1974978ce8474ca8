//! State that the routes see.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use penstock_auth::jwt::RecentKeys;
use penstock_console::{Logins, Sessions};
use penstock_proxy::Gateway;
use penstock_proxy::fleet::Fleet;
use penstock_proxy::reload::Live;
use penstock_store::Store;
use tokio::sync::Semaphore;

use crate::dry_runs::DryRuns;
use crate::keys::AdminKeys;
use crate::pulse::Pulse;
use crate::renewals::Renewals;
use crate::roles::Routes;
use crate::sign_on::Directions;
use crate::throttle::Throttle;

/// Filter of the log, which can be changed while the process runs.
pub trait LogFilter: Send + Sync + 'static {
    /// Filter as it was last set.
    fn get(&self) -> String;

    /// Sets the filter.
    ///
    /// # Errors
    /// The fault of the filter, for people.
    fn set(&self, filter: &str) -> Result<(), String>;
}

/// State behind the routes.
pub(crate) struct State {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) live: Arc<Live>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) log: Arc<dyn LogFilter>,
    pub(crate) keys: AdminKeys,
    pub(crate) throttle: Throttle,
    /// People who have signed in at the console.
    pub(crate) sessions: Arc<Sessions>,
    /// People who have left for the identity provider, and its addresses.
    pub(crate) logins: Logins,
    pub(crate) directions: Directions,
    /// Tokens of people who are signed in, with which their groups are read again.
    pub(crate) renewals: Renewals,
    /// State as the console shows it, made once for all who look.
    pub(crate) pulse: Pulse,
    /// Dry runs of plugins, which leave the thread that serves.
    pub(crate) dry_runs: DryRuns,
    /// Places of changes, which go on without their client.
    pub(crate) changes: Arc<Semaphore>,
    /// Keys of the provider and places of its logout tokens that are checked.
    pub(crate) provider_keys: RecentKeys,
    pub(crate) sign_offs: Semaphore,
    pub(crate) routes: Routes,
    pub(crate) document: Bytes,
    /// Lock of a change to a key or an owner, so that changes do not overlap.
    pub(crate) turn: tokio::sync::Mutex<()>,
    /// Key of the tags of config entries.
    pub(crate) seal: [u8; 32],
    pub(crate) began: Instant,
    pub(crate) began_ms: u64,
}

/// State as all requests share it.
pub(crate) type Admin = Arc<State>;
