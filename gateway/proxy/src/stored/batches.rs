//! Routes of `/v1/batches`.

use std::borrow::Cow;
use std::collections::BTreeMap;

use penstock_config::BatchesConfig;
use penstock_proto::ErrorKind;
use penstock_store::{BatchId, BatchRecord, Cancelled, FileId, Listed, NewBatch};
use penstock_types::{ApiError, Surface};
use serde::Deserialize;

use super::{Visit, absent, answer, failed, files::EXPIRY_SECONDS, json};
use crate::batch_text::{ENDPOINTS, MESSAGES};
use crate::handler::{End, decoded, read_body};
use crate::list_query as query;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;

/// Completion windows that a batch can ask for, with their seconds.
const WINDOWS: [(&str, u64); 1] = [("24h", 24 * 3600)];
/// Most batches of one key, in whatever state.
pub(super) const BATCHES_MAX: u64 = 10_000;
/// Most entries of a batch's `metadata`.
const METADATA_MAX: usize = 16;

#[derive(Deserialize)]
struct Form<'a> {
    #[serde(borrow)]
    input_file_id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    endpoint: Option<Cow<'a, str>>,
    #[serde(borrow)]
    completion_window: Option<Cow<'a, str>>,
    metadata: Option<BTreeMap<String, String>>,
    output_expires_after: Option<Expiry>,
}

#[derive(Deserialize)]
struct Expiry {
    anchor: String,
    seconds: u64,
}

pub(super) async fn create(visit: &mut Visit<'_>) -> Result<(), End> {
    let headers = std::mem::take(&mut visit.exchange.head.headers);
    let body = read_body(&visit.gateway.bodies, visit.exchange, &headers).await?;
    let config = visit.gateway.serving().config.clone();
    let now = unix_seconds();
    let (new, _lease) = decoded(body, move |bytes, _| read(bytes, now, &config.batches)).await?;
    let input = new.input.clone();
    // First: a batch of somebody whom nobody knows could not run.
    let store = visit.keeper.store.as_ref();
    visit.gateway.guard.keep_identity(store, visit.principal).await.map_err(failed)?;
    let made = visit.keeper.store.create_batch(&visit.tenant, new).await.map_err(failed)?;
    let batch = made.ok_or_else(|| absent("File", input.as_str()).param("input_file_id"))?;
    visit.keeper.wake.notify_one();
    answer(visit.exchange, &json::batch(&batch)).await
}

fn read(bytes: &[u8], created: u64, bounds: &BatchesConfig) -> Result<NewBatch, ApiError> {
    let form: Form<'_> = serde_json::from_slice(bytes)
        .map_err(|error| ApiError::malformed(format!("The body cannot be read: {error}.")))?;
    let needed = |name: &str| ApiError::invalid(name, format!("{name}: required, but missing"));
    let input = form.input_file_id.ok_or_else(|| needed("input_file_id"))?;
    let none = || ApiError::invalid("input_file_id", "input_file_id: must be the id of a file");
    let input = FileId::parse(&input).ok_or_else(none)?;
    let endpoint = form.endpoint.ok_or_else(|| needed("endpoint"))?;
    if !ENDPOINTS.iter().any(|(path, _)| *path == endpoint) {
        let known: Vec<_> = ENDPOINTS.iter().map(|(path, _): &(&str, Surface)| *path).collect();
        return Err(ApiError::invalid("endpoint", format!("endpoint: must be one of {}", known.join(", "))));
    }
    let window = form.completion_window.ok_or_else(|| needed("completion_window"))?;
    let seconds = WINDOWS.iter().find(|(name, _)| *name == window).map(|(_, seconds)| *seconds);
    let seconds = seconds.ok_or_else(|| ApiError::invalid("completion_window", "completion_window: must be 24h"))?;
    let metadata = form.metadata.map(|metadata| check_metadata(&metadata)).transpose()?;
    let output_expires_after = form.output_expires_after.map(|expiry| check_expiry(&expiry)).transpose()?;
    Ok(NewBatch {
        endpoint: endpoint.into_owned(),
        input,
        window: window.into_owned(),
        expires: created + seconds,
        metadata: metadata.unwrap_or_default(),
        output_expires_after,
        created,
        tenant_open_max: bounds.open_max,
        tenant_batches_max: BATCHES_MAX,
        tenant_output_bytes_max: bounds.key_output_bytes_max,
    })
}

fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<String, ApiError> {
    let fits = |(name, value): (&String, &String)| name.chars().count() <= 64 && value.chars().count() <= 512;
    if metadata.len() > METADATA_MAX || !metadata.iter().all(fits) {
        let message = "metadata: at most 16 entries, names of at most 64 and values of at most 512 characters";
        return Err(ApiError::invalid("metadata", message));
    }
    serde_json::to_string(metadata).map_err(|error| ApiError::invalid("metadata", error.to_string()))
}

fn check_expiry(expiry: &Expiry) -> Result<u64, ApiError> {
    let valid =
        matches!(expiry.anchor.as_str(), "created_at" | "file_created_at") && EXPIRY_SECONDS.contains(&expiry.seconds);
    let message = "output_expires_after: anchor must be created_at, seconds 3600 to 2592000";
    valid.then_some(expiry.seconds).ok_or_else(|| ApiError::invalid("output_expires_after", message))
}

pub(super) async fn list(visit: &mut Visit<'_>) -> Result<(), End> {
    let page = query::page(&visit.exchange.head.target, 20, 100).map_err(Failure::from)?;
    let listing = visit.keeper.store.batches(&visit.tenant, Listed::Except(MESSAGES), &page).await.map_err(failed)?;
    answer(visit.exchange, &json::list(&listing, |batch| batch.id.as_str(), json::batch)).await
}

async fn find(visit: &Visit<'_>, id: &str) -> Result<BatchRecord, Failure> {
    let known = BatchId::parse(id).ok_or_else(|| absent("Batch", id))?;
    let found = visit.keeper.store.batch(&visit.tenant, &known).await.map_err(failed)?;
    found.filter(|batch| batch.endpoint != MESSAGES).ok_or_else(|| absent("Batch", id))
}

pub(super) async fn show(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let batch = find(visit, id).await?;
    answer(visit.exchange, &json::batch(&batch)).await
}

pub(super) async fn cancel(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let known = find(visit, id).await?.id;
    match visit.keeper.store.cancel_batch(&visit.tenant, &known, unix_seconds()).await.map_err(failed)? {
        Cancelled::Yes(batch) => {
            visit.keeper.wake.notify_one();
            answer(visit.exchange, &json::batch(&batch)).await
        }
        Cancelled::TooLate(batch) => {
            let message = format!("Cannot cancel a batch with status '{}'.", batch.status.name());
            Err(Failure::new(ErrorKind::InvalidRequest, message).param("id").into())
        }
        Cancelled::Absent => Err(absent("Batch", id).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_read_or_refused() {
        let full = br#"{"input_file_id":"file-1","endpoint":"/v1/embeddings","completion_window":"24h","metadata":{"b":"2","a":"1"}}"#;
        let bounds =
            BatchesConfig { concurrency: 1, lines_max: 1, open_max: 9, key_output_bytes_max: 1024, attempts_max: 1 };
        let new = read(full, 100, &bounds).expect("complete");
        assert_eq!((new.expires, new.metadata.as_str()), (86_500, r#"{"a":"1","b":"2"}"#));
        for (body, param) in [
            (r#"{"endpoint":"/v1/embeddings","completion_window":"24h"}"#, Some("input_file_id")),
            (r#"{"input_file_id":"x","endpoint":"/v1/embeddings","completion_window":"24h"}"#, Some("input_file_id")),
            (r#"{"input_file_id":"file-1","endpoint":"/v1/models","completion_window":"24h"}"#, Some("endpoint")),
            (
                r#"{"input_file_id":"file-1","endpoint":"/v1/embeddings","completion_window":"1h"}"#,
                Some("completion_window"),
            ),
            (r#"{"input_file_id":"file-1","input_file_id":"file-2"}"#, None),
            ("[]", None),
        ] {
            let error = read(body.as_bytes(), 100, &bounds).expect_err(body);
            assert_eq!(error.param.as_deref(), param, "{body}");
        }
    }
}
