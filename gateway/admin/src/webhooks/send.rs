//! Delivery of messages to one webhook: signed, one after another, again after a failure with exponential backoff and jitter.
//!
//! Signatures follow Standard Webhooks: `webhook-signature: v1,BASE64(HMAC-SHA256(secret, "ID.TIMESTAMP.BODY"))`. The id stays the same over all attempts,
//! so a receiver can tell a message that it has; the timestamp is that of the attempt, so it can refuse old ones.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hmac::{Hmac, Mac};
use http::{HeaderName, HeaderValue, Method, header};
use penstock_base::clock;
use penstock_config::WebhookConfig;
use penstock_http::client::{Client, Deadlines, Outgoing, Sent};
use penstock_telemetry::{Metric, Metrics};
use serde_json::json;
use sha2::Sha256;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::edges::Event;

/// Attempts at one message, the first included: the last comes some eight minutes after the first.
const ATTEMPTS_MAX: u32 = 10;
/// Longest pause before the second attempt; each further one is twice as long, up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(120);
/// Most bytes of an answer that are read.
const ANSWER_BYTES_MAX: usize = 16 * 1024;
/// Prefix of a secret that is written in base64.
const BASE64_SECRET: &str = "whsec_";

/// Message to one webhook.
pub(super) struct Message {
    id: String,
    event: &'static str,
    body: Bytes,
}

impl Message {
    /// Message about an event that was seen at that time.
    pub(super) fn new(event: &Event, unix: u64) -> Self {
        let body = json!({ "type": event.kind.name(), "timestamp": clock::format(unix), "data": event.data });
        Self { id: penstock_store::random_id("msg_"), event: event.kind.name(), body: body.to_string().into() }
    }
}

/// Counts a message by its outcome.
pub(super) fn count(metrics: &Metrics, webhook: &str, outcome: &str) {
    metrics.count(Metric::WebhookMessages, &[("webhook", webhook), ("outcome", outcome)]);
}

/// Messages of a webhook that are not sent yet. Those that are left when its task ends are counted as dropped: a reload has taken
/// the webhook away or changed its entry, or the process ends.
struct Waiting {
    queue: mpsc::Receiver<Message>,
    /// True while a message is being sent.
    is_sending: bool,
    webhook: String,
    metrics: Arc<Metrics>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.queue.close();
        let mut dropped = usize::from(self.is_sending);
        while self.queue.try_recv().is_ok() {
            dropped += 1;
        }
        if dropped > 0 {
            let webhook = &self.webhook;
            tracing::warn!(
                webhook,
                dropped,
                "webhook messages dropped: the webhook's config has changed, or the gateway ends"
            );
            (0..dropped).for_each(|_| count(&self.metrics, webhook, "dropped"));
        }
    }
}

/// Sends the messages of a queue until it is closed.
pub(super) async fn run(config: WebhookConfig, queue: mpsc::Receiver<Message>, metrics: Arc<Metrics>) {
    let mut waiting = Waiting { queue, is_sending: false, webhook: config.name.clone(), metrics: metrics.clone() };
    let client = match Client::new(config.target.clone(), config.ca_file.as_deref()) {
        Ok(client) => client,
        Err(error) => {
            return tracing::error!(webhook = config.name, error, "webhook is off: it cannot be connected to");
        }
    };
    while let Some(message) = waiting.queue.recv().await {
        waiting.is_sending = true;
        let outcome = if deliver(&config, &client, &message).await { "sent" } else { "failed" };
        waiting.is_sending = false;
        count(&metrics, &config.name, outcome);
    }
}

/// Attempts at one message; false: given up.
async fn deliver(config: &WebhookConfig, client: &Client, message: &Message) -> bool {
    let (webhook, event, id) = (&config.name, message.event, &message.id);
    for attempt in 1..=ATTEMPTS_MAX {
        let failure = match tokio::time::timeout(config.timeout, post(config, client, message)).await {
            Ok(Ok(())) => {
                tracing::debug!(webhook, event, id, attempt, "webhook message sent");
                return true;
            }
            Ok(Err(failure)) => failure,
            Err(_) => Failure { why: "no answer in time".into(), is_final: false },
        };
        if failure.is_final || attempt == ATTEMPTS_MAX {
            tracing::error!(webhook, event, id, attempt, error = failure.why, "webhook message given up");
            return false;
        }
        tracing::debug!(webhook, event, id, attempt, error = failure.why, "webhook message is sent again later");
        tokio::time::sleep(pause(attempt, chance())).await;
    }
    false
}

/// Pause after that attempt; `chance`: 0 to 1, so that many gateways do not come back at once.
fn pause(attempt: u32, chance: f64) -> Duration {
    let longest = PAUSE.saturating_mul(1 << (attempt - 1).min(16)).min(PAUSE_MAX);
    longest.mul_f64(0.5 + chance.clamp(0.0, 1.0) / 2.0)
}

fn chance() -> f64 {
    let mut bytes = [0; 4];
    // Without randomness the pause is its longest.
    getrandom::fill(&mut bytes).map_or(1.0, |()| f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX))
}

/// Reason why an attempt failed.
struct Failure {
    why: String,
    /// True where the receiver wants no further message: 410.
    is_final: bool,
}

async fn post(config: &WebhookConfig, client: &Client, message: &Message) -> Result<(), Failure> {
    let failed = |why: String| Failure { why, is_final: false };
    let now = clock::unix_seconds().to_string();
    let signature = signature(config.secret.expose(), &message.id, &now, &message.body).map_err(failed)?;
    let value = |text: &str| HeaderValue::from_str(text).map_err(|error| failed(error.to_string()));
    let headers = vec![
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::USER_AGENT, HeaderValue::from_static(concat!("penstock/", env!("CARGO_PKG_VERSION")))),
        (HeaderName::from_static("webhook-id"), value(&message.id)?),
        (HeaderName::from_static("webhook-timestamp"), value(&now)?),
        (HeaderName::from_static("webhook-signature"), value(&signature)?),
    ];
    let (path, body) = (config.path.expose().to_owned(), vec![message.body.clone()]);
    let outgoing = Outgoing { method: Method::POST, path, headers, body, sent: Sent::default() };
    let timeout = config.timeout;
    let deadlines =
        Deadlines { connect: timeout, head: timeout, silence: timeout, whole: Some(Instant::now() + timeout) };
    let mut answer = client.send(&outgoing, &deadlines).await.map_err(|error| failed(error.to_string()))?;
    if !(200..300).contains(&answer.status) {
        // A redirect is none of the places that the config names.
        return Err(Failure { why: format!("answered {}", answer.status), is_final: answer.status == 410 });
    }
    let mut bytes = Vec::new();
    // The rest of an answer is of no use; one that is too long costs the connection.
    while bytes.len() <= ANSWER_BYTES_MAX {
        match poll_fn(|context| answer.body.poll_chunk(context, &mut bytes)).await {
            Ok(true) => {}
            Ok(false) | Err(_) => break,
        }
    }
    Ok(())
}

/// Value of `webhook-signature`.
fn signature(secret: &str, id: &str, timestamp: &str, body: &[u8]) -> Result<String, String> {
    let key = match secret.strip_prefix(BASE64_SECRET) {
        Some(text) => STANDARD.decode(text).map_err(|_| format!("the secret behind {BASE64_SECRET} is not base64"))?,
        None => secret.as_bytes().to_vec(),
    };
    let mut mac = Hmac::<Sha256>::new_from_slice(&key).map_err(|error| error.to_string())?;
    for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
        mac.update(part);
    }
    Ok(format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vector of the Standard Webhooks libraries.
    #[test]
    fn the_signature_is_that_of_standard_webhooks() {
        let made = signature(
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            "1614265330",
            br#"{"test": 2432232314}"#,
        );
        assert_eq!(made.as_deref(), Ok("v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="));
        assert!(signature("whsec_%", "a", "1", b"").is_err());
    }

    #[test]
    fn messages_that_are_left_are_counted() {
        let metrics = Arc::<Metrics>::default();
        let (send, queue) = mpsc::channel(8);
        for id in 0..3 {
            let message = Message { id: id.to_string(), event: "provider.down", body: Bytes::new() };
            send.try_send(message).map_err(|_| "full").expect("room");
        }
        drop(Waiting { queue, is_sending: true, webhook: "ops".into(), metrics: metrics.clone() });
        let dropped = metrics.read(Metric::WebhookMessages, &[("webhook", "ops"), ("outcome", "dropped")]);
        assert_eq!(dropped.sum as u64, 4);
    }

    #[test]
    fn pauses_grow_and_end() {
        assert_eq!((pause(1, 1.0), pause(1, 0.0)), (PAUSE, PAUSE / 2));
        assert_eq!(pause(4, 1.0), PAUSE * 8);
        assert_eq!(pause(ATTEMPTS_MAX, 1.0), PAUSE_MAX);
    }
}
