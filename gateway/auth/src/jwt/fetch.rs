//! Fetching of issuers' signing keys: at start, every [`EVERY`], and on a token's demand. Bounded in time and size;
//! redirects are not followed.

use std::future::poll_fn;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use http::{HeaderName, HeaderValue, Method, header};
use serde::Deserialize;
use tokio::time::{Instant, timeout};

use super::issuer::{IssuerConfig, KeySource};
use super::jwks::SET_BYTES_MAX;
use super::ring::Ring;
use penstock_http::client::{Client, Deadlines, Outgoing, Sent};
use penstock_telemetry::{Metric, Metrics};

/// Period between two fetches: a key that was added or dropped takes effect within a minute.
const EVERY: Duration = Duration::from_secs(50);
/// Period between two reads of a key file, which cost next to nothing.
const FILE_EVERY: Duration = Duration::from_secs(5);
/// Pause after a fetch of an issuer's keys has failed, before the next attempt.
const AGAIN: Duration = Duration::from_secs(5);
/// Time limit of each part of a fetch (connect, head, silence).
const PART_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of one fetch as a whole, discovery document and key set together.
const WHOLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest single wait of a fetch task, after which it checks that the ring is still in use.
const STEP: Duration = Duration::from_secs(1);

/// Fetch task of a key ring: runs until the ring is dropped.
pub(crate) async fn keep(ring: Weak<Ring>, metrics: Arc<Metrics>) {
    let mut failing = false;
    loop {
        let (wake, pause) = {
            let Some(ring) = ring.upgrade() else { return };
            ring.note_begin();
            let fetched = fetch(&ring).await.and_then(|bytes| ring.take(&bytes));
            let outcome = if fetched.is_ok() { "ok" } else { "failed" };
            metrics.count(Metric::KeySetFetches, &[("issuer", &ring.id), ("outcome", outcome)]);
            let is_ok = fetched.is_ok();
            let pause = match (&fetched, &ring.origin.source) {
                (Err(_), _) => AGAIN,
                (Ok(_), KeySource::File(_)) => FILE_EVERY,
                (Ok(_), _) => EVERY,
            };
            match fetched {
                Ok(is_new) => {
                    let keys = ring.held().map_or(0, |held| held.keys.len());
                    if is_new || failing {
                        tracing::info!(issuer = ring.id, keys, "signing keys fetched");
                    }
                    failing = false;
                }
                Err(reason) => {
                    let age_s = ring.age().map(|age| age.as_secs());
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(
                            issuer = ring.id,
                            reason,
                            age_s,
                            "signing keys could not be fetched: keys in memory stay in use"
                        );
                    }
                }
            }
            ring.note_end(is_ok);
            (ring.wake.clone(), pause)
        };
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if timeout(STEP.min(until - Instant::now()), wake.notified()).await.is_ok() {
                break;
            }
            if ring.strong_count() == 0 {
                return;
            }
        }
    }
}

async fn fetch(ring: &Ring) -> Result<Vec<u8>, String> {
    let origin = &ring.origin;
    match &origin.source {
        KeySource::File(path) => {
            let path = path.clone();
            let read = tokio::task::spawn_blocking(move || file(&path));
            read.await.map_err(|error| error.to_string())?
        }
        KeySource::Url(url) => get(url, origin.ca_file.as_deref()).await,
        KeySource::Discovery(url) => {
            let bytes = get(url, origin.ca_file.as_deref()).await.map_err(|reason| format!("discovery: {reason}"))?;
            let document: Document =
                serde_json::from_slice(&bytes).map_err(|_| "the discovery document is not readable".to_owned())?;
            if document.issuer != origin.issuer {
                return Err("the discovery document is another issuer's".into());
            }
            get(&document.jwks_uri, origin.ca_file.as_deref()).await
        }
    }
}

/// Reads a key file, at most one byte beyond the size limit of a set.
pub fn file(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    file.take(SET_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

#[derive(Deserialize)]
struct Document {
    issuer: String,
    jwks_uri: String,
}

/// Fetches a document over HTTPS, within bounds of time and size.
pub(super) async fn get(url: &str, ca: Option<&Path>) -> Result<Vec<u8>, String> {
    let headers = vec![(header::ACCEPT, HeaderValue::from_static("application/json"))];
    match send(Method::GET, url, ca, headers, Vec::new()).await? {
        (200, bytes) => Ok(bytes),
        (status, _) => Err(format!("status {status}")),
    }
}

/// Status and body of the answer to one request over HTTPS, within bounds of time and size.
pub(super) async fn send(
    method: Method,
    url: &str,
    ca: Option<&Path>,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Vec<u8>,
) -> Result<(u16, Vec<u8>), String> {
    let (target, path) = IssuerConfig::place(url)?;
    // A client per fetch: fetches are a minute apart, and connections belong to the runtime that they were made in.
    let client = Client::new(target, ca)?;
    let body = (!body.is_empty()).then(|| body.into()).into_iter().collect();
    let request = Outgoing { method, path, headers, body, sent: Sent::default() };
    let deadlines = Deadlines {
        connect: PART_TIMEOUT,
        head: PART_TIMEOUT,
        silence: PART_TIMEOUT,
        whole: Some(Instant::now() + WHOLE_TIMEOUT),
    };
    let mut response = client.send(&request, &deadlines).await.map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    while poll_fn(|context| response.body.poll_chunk(context, &mut bytes)).await.map_err(|error| error.to_string())? {
        if bytes.len() > SET_BYTES_MAX {
            return Err(format!("the answer is larger than {SET_BYTES_MAX} bytes"));
        }
    }
    Ok((response.status, bytes))
}
