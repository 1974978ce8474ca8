//! Order in force for one worker: held, leaving, restarting, or none.

use std::time::Instant;

/// Order in force for a worker, from an operator or from the planner of replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Steering {
    /// No order: the router may bind requests to the worker.
    #[default]
    Free,
    /// An operator holds the worker: it keeps its requests and gets no new ones.
    Held,
    /// Nothing new is bound to the worker, because the load needs fewer workers.
    Leaving,
    /// An operator restarts the worker: it gets no new requests, and its life with this epoch ends by `until`.
    Restarting { epoch: u64, asked: Instant, until: Instant },
}
