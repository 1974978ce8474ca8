//! Requests as the router sees them: tokens, tenant, priority and needs.

use penstock_proto::{AdapterId, Capabilities};
use std::sync::Arc;
use std::time::Duration;

/// Request as the router sees it: tokens, tenant, priority, deadline. Defaults describe an anonymous request.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Tokens that a worker must hold before it can emit: the prompt and, for a resumed request, the emitted tokens.
    pub tokens: Arc<[u32]>,
    /// Salt of the request's block hashes, so that only requests with an equal salt share blocks.
    pub salt: Arc<[u8]>,
    /// Lower runs first; 0 is normal.
    pub priority: i32,
    /// Sequences that the request needs (open choices), at least 1.
    pub sequences: u32,
    /// Numerics of the tokens emitted so far, for a resumed request.
    pub numerics_id: Option<Arc<str>>,
    /// Abilities that a worker must have for the request.
    pub needs: Needs,
    /// True if the request is resumed: it goes before all others, and is never refused.
    pub resumed: bool,
    /// Tenant of the request: waiting requests of several tenants share the workers fairly.
    pub tenant: Arc<str>,
    /// Weight of the tenant; 0 counts as 1.
    pub weight: u32,
    /// Hash that keeps the requests of one conversation together under [`crate::Policy::Session`].
    pub session: Option<u64>,
    /// True if the client named the conversation or a cache key: where nothing else decides, one worker gets all of it.
    pub keyed: bool,
    /// Time after which a waiting request is refused.
    pub deadline: Option<Duration>,
}

impl View {
    /// Weight of the tenant, at least 1.
    pub(crate) fn share(&self) -> f64 {
        f64::from(self.weight.max(1))
    }
}

/// Abilities that a request needs of its worker, and that not every worker of a model announces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Id of the grammars that a worker must have to follow the request's; `None`: the output is free.
    pub grammar: Option<Arc<str>>,
    /// Capabilities that the request's sampling needs.
    pub capabilities: Capabilities,
    /// Adapter that a worker must have loaded; `None`: the model runs alone, which every worker can.
    pub adapter: Option<AdapterId>,
}

impl Needs {
    /// Returns true if a worker with grammars of the id `grammar`, with `capabilities` and with `adapters` has every ability.
    pub fn are_met_by(
        &self,
        grammar: &str,
        capabilities: Capabilities,
        adapters: impl IntoIterator<Item = AdapterId>,
    ) -> bool {
        self.grammar.as_ref().is_none_or(|id| **id == *grammar)
            && capabilities.has(self.capabilities)
            && self.adapter.is_none_or(|id| adapters.into_iter().any(|loaded| loaded == id))
    }
}

/// Turn of a resumed request, which goes before all others of its priority.
pub const FIRST: i64 = i64::MIN;

/// Rank of a request among those that a worker computes, lower first: its priority, then its turn. The turn is the
/// tenant's service in microseconds of engine time by weight, or [`FIRST`].
pub(crate) type Rank = (i32, i64);
