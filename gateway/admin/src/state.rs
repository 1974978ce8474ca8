//! What the routes see.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use penstock_proxy::Gateway;
use penstock_proxy::fleet::Fleet;
use penstock_proxy::live::Live;
use penstock_store::Store;

use crate::keys::AdminKeys;
use crate::roles::Routes;
use crate::throttle::Throttle;

/// The log's filter, which can be changed while the process runs.
pub trait LogFilter: Send + Sync + 'static {
    /// As it was last set.
    fn get(&self) -> String;

    /// Sets it.
    ///
    /// # Errors
    /// What is wrong with it, for a person.
    fn set(&self, filter: &str) -> Result<(), String>;
}

/// Everything behind the routes.
pub(crate) struct State {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) live: Arc<Live>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) log: Arc<dyn LogFilter>,
    pub(crate) keys: AdminKeys,
    pub(crate) throttle: Throttle,
    pub(crate) routes: Routes,
    pub(crate) document: Bytes,
    /// Held by whoever changes a key or an owner.
    pub(crate) turn: tokio::sync::Mutex<()>,
    pub(crate) began: Instant,
    pub(crate) began_ms: u64,
}

/// Shared by all requests.
pub(crate) type Admin = Arc<State>;
