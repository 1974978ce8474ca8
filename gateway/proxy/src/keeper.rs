//! What a gateway keeps: its store, answers that are being saved, and counts of background work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use penstock_store::Store;
use penstock_telemetry::Gauge;
use tokio::sync::Notify;

use crate::event_log::Logs;
use crate::saving::Saving;

/// Gauges of the batch work in this process, for `/metrics`.
#[derive(Debug, Default)]
pub(crate) struct Running {
    /// Number of batches whose task runs in this process.
    pub(crate) batches: AtomicU64,
    /// Number of batch lines in flight at a model.
    pub(crate) lines: AtomicU64,
}

/// Handle of the gateway on its store, with the state of saving and of background work.
pub struct Keeper {
    /// Store of files, batches, responses, keys and the ledger.
    pub(crate) store: Arc<dyn Store>,
    /// Notification of new batches, for the task that runs them.
    pub(crate) wake: Notify,
    /// Notification of new work for the runner of background responses.
    pub(crate) wake_responses: Notify,
    /// Responses that were answered and are being saved.
    pub(crate) saving: Saving,
    /// Events of responses that are streamed in the background.
    pub(crate) logs: Logs,
    /// Number of responses that could not be saved.
    pub(crate) unsaved: AtomicU64,
    /// Bytes of all stored responses, as last counted, for the gauge.
    pub(crate) response_bytes: AtomicU64,
    /// Number of responses that are being answered in the background.
    pub(crate) responses_running: AtomicU64,
    /// Counts of the batches and lines that run, for the gauges.
    pub(crate) running: Running,
}

impl Keeper {
    /// Handle on `store`, with nothing running and nothing being saved.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            wake: Notify::new(),
            wake_responses: Notify::new(),
            saving: Saving::default(),
            logs: Logs::default(),
            unsaved: AtomicU64::new(0),
            response_bytes: AtomicU64::new(0),
            responses_running: AtomicU64::new(0),
            running: Running::default(),
        }
    }

    /// Counts and logs an answer that its client has and the store, or its conversation, lacks.
    pub(crate) fn unsaved(&self, id: &str, why: &str) {
        self.unsaved.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(object = id, why, "an answer was sent to its client and is not kept in the store as asked");
    }

    /// Adds the gauges of the store and its background work for `/metrics`.
    pub(crate) fn gauges(&self, out: &mut Vec<(Gauge, String, f64)>) {
        let stats = self.store.stats();
        out.push((Gauge::StoreUp, "store".to_owned(), f64::from(u8::from(!stats.down))));
        out.extend(
            [
                (Gauge::StoreCommits, stats.commits as f64),
                (Gauge::StoreWrites, stats.writes as f64),
                (Gauge::StoreCommitSeconds, stats.commit_seconds),
                (Gauge::StoreErrors, stats.errors as f64),
                (Gauge::ResponsesUnsaved, self.unsaved.load(Ordering::Relaxed) as f64),
                (Gauge::ResponseBytes, self.response_bytes.load(Ordering::Relaxed) as f64),
                (Gauge::ResponsesRunning, self.responses_running.load(Ordering::Relaxed) as f64),
                (Gauge::BatchesRunning, self.running.batches.load(Ordering::Relaxed) as f64),
                (Gauge::BatchLinesRunning, self.running.lines.load(Ordering::Relaxed) as f64),
            ]
            .map(|(gauge, value)| (gauge, String::new(), value)),
        );
    }
}
