//! Objects that clients keep here: files, batches, stored responses.
//!
//! `route` maps URLs, `serve` answers them; `Keeper` is the gateway's handle on the store. Every operation runs as the
//! tenant of the request's key: another key's objects are as absent as those that never were.

pub(crate) mod background;
mod batches;
mod failure;
mod files;
mod json;
mod keeping;
mod open;
mod places;
mod query;
mod responses;
pub mod route;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::{HeaderValue, header};
use penstock_store::{ResponseId, Store, Tenant};
use serde::Serialize;
use tokio::sync::Notify;

use crate::auth::Principal;
use crate::gateway::Gateway;
use crate::phases::End;
use penstock_base::error::Failure;
use penstock_http::Exchange;
use penstock_telemetry::Gauge;
use penstock_types::Surface;
use penstock_upstream::call::Call;
use responses::Prepared;
use route::StoredRoute;

pub(crate) use failure::{absent, failed};
pub(crate) use json::{BatchFault, batch_error, error_line, result_line};
pub(crate) use keeping::Keeping;
pub use open::{OpenError, Shared, open, shared};

/// Handle of the gateway on its store, with the state of saving and of background work.
pub struct Keeper {
    /// Store of files, batches, responses, keys and the ledger.
    pub(crate) store: Arc<dyn Store>,
    /// Notification of new batches, for the task that runs them.
    pub(crate) wake: Notify,
    /// Notification of new work for the runner of background responses.
    pub(crate) wake_responses: Notify,
    /// Responses that were answered and are being saved.
    pub(crate) saving: keeping::Saving,
    /// Number of responses that could not be saved.
    unsaved: AtomicU64,
    /// Bytes of all stored responses, as last counted, for the gauge.
    response_bytes: AtomicU64,
    /// Number of responses that are being answered in the background.
    responses_running: AtomicU64,
    /// Counts of the batches and lines that run, for the gauges.
    pub(crate) running: crate::batches::Running,
}

impl Keeper {
    /// Handle on `store`, with nothing running and nothing being saved.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            wake: Notify::new(),
            wake_responses: Notify::new(),
            saving: keeping::Saving::default(),
            unsaved: AtomicU64::new(0),
            response_bytes: AtomicU64::new(0),
            responses_running: AtomicU64::new(0),
            running: crate::batches::Running::default(),
        }
    }

    /// Counts and logs a response that its client has and the store lacks.
    fn unsaved(&self, id: &ResponseId, why: &str) {
        self.unsaved.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(response = %id, why, "a response was answered and could not be stored");
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

/// One request for a stored object, with all that its handler needs.
struct Visit<'a> {
    gateway: &'a Gateway,
    keeper: &'a Keeper,
    exchange: &'a mut Exchange,
    principal: &'a Principal,
    tenant: Tenant,
}

/// Answers a request for files, batches or stored responses.
pub(crate) async fn serve(
    gateway: &Gateway,
    exchange: &mut Exchange,
    route: StoredRoute,
    principal: &Principal,
) -> Result<(), End> {
    let none = || Failure::new(penstock_proto::ErrorKind::Unavailable, "This gateway has no store.");
    let keeper = gateway.keeper().ok_or_else(none)?;
    let mut visit = Visit { gateway, keeper, exchange, principal, tenant: Tenant::new(principal.tenant()) };
    match route {
        StoredRoute::UploadFile => files::upload(&mut visit).await,
        StoredRoute::ListFiles => files::list(&mut visit).await,
        StoredRoute::File(id) => files::show(&mut visit, &id).await,
        StoredRoute::FileContent(id) => files::content(&mut visit, &id).await,
        StoredRoute::DeleteFile(id) => files::delete(&mut visit, &id).await,
        StoredRoute::CreateBatch => batches::create(&mut visit).await,
        StoredRoute::ListBatches => batches::list(&mut visit).await,
        StoredRoute::Batch(id) => batches::show(&mut visit, &id).await,
        StoredRoute::CancelBatch(id) => batches::cancel(&mut visit, &id).await,
        StoredRoute::Response(id) => responses::show(&mut visit, &id).await,
        StoredRoute::DeleteResponse(id) => responses::delete(&mut visit, &id).await,
        StoredRoute::CancelResponse(id) => responses::cancel(&mut visit, &id).await,
        StoredRoute::InputItems(id) => responses::input_items(&mut visit, &id).await,
    }
}

/// Adds stored turns to a call that needs them, and returns the collector that stores its answer; `None`: the answer
/// comes later, and the client has been told.
pub(crate) async fn recall(
    gateway: &Gateway,
    exchange: &mut Exchange,
    principal: &Arc<Principal>,
    call: Call,
) -> Result<Option<(Call, Option<Box<Keeping>>)>, End> {
    if call.ask.surface != Surface::Responses {
        return Ok(Some((call, None)));
    }
    match responses::prepare(gateway, principal, call).await? {
        Prepared::Ask(call, keeping) => Ok(Some((*call, keeping))),
        Prepared::Queued(body) => {
            let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
            exchange.respond(200, &json, body).await?;
            Ok(None)
        }
    }
}

/// Answers 200 with `document` as JSON.
async fn answer(exchange: &mut Exchange, document: &impl Serialize) -> Result<(), End> {
    let body = serde_json::to_vec(document).map_err(|error| Failure::internal(error.to_string()))?;
    let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok(exchange.respond(200, &json, Bytes::from(body)).await?)
}
