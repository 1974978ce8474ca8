//! Operations that no dialect here reads, on their way to the provider of the model that they name, and the answers.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use penstock_base::Failure;
use penstock_http::client::{ClientError, Response};
use penstock_telemetry::Trace;

use crate::Asker;

/// Request that goes to a provider unread, because no dialect here parses the operation.
#[derive(Clone)]
pub struct Forward {
    /// Path behind the API's base, with its query: `/audio/speech`.
    pub path: String,
    /// Header fields of the client, of which few go on.
    pub headers: HeaderMap,
    /// Body in pieces; `None`: a WebSocket is asked for.
    pub body: Option<Bytes>,
    /// Byte range of the model's name in the body, and whether the body is JSON.
    pub model_at: Option<(Range<usize>, bool)>,
    /// Trace that the request's spans belong to; `None`: no trace is kept for the request.
    pub trace: Option<Arc<Trace>>,
    /// Hash of the key or address that asks.
    pub asker: Asker,
    /// Instant by which the whole answer must have ended; `None`: no limit, as for a WebSocket.
    pub deadline: Option<Instant>,
}

/// Provider's answer to a forwarded operation, with its body still arriving.
pub struct Forwarded {
    /// Response of the provider: status, header fields and the body to be polled.
    pub response: Response,
    /// Header fields for the client, besides those that describe the body.
    pub fields: Vec<(HeaderName, HeaderValue)>,
    /// Account at the provider, told how the answer ended: its breaker learns from it.
    pub passage: Box<dyn Passage>,
}

/// Account that a provider keeps of an answer that passes through.
pub trait Passage: Send + Sync {
    /// Counts the answer as complete, a success of the provider.
    fn complete(&mut self);

    /// Counts the answer as cut off, and returns the failure for the client.
    fn cut(&mut self, error: &ClientError) -> Failure;
}

/// Header fields of a WebSocket's opening handshake that go on (RFC 6455, section 4.1). A subprotocol that carries a
/// key does not.
pub fn handshake(client: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
    let mut out = vec![
        (header::CONNECTION, HeaderValue::from_static("Upgrade")),
        (header::UPGRADE, HeaderValue::from_static("websocket")),
    ];
    for name in [header::SEC_WEBSOCKET_KEY, header::SEC_WEBSOCKET_VERSION, header::SEC_WEBSOCKET_EXTENSIONS] {
        out.extend(client.get(&name).map(|value| (name.clone(), value.clone())));
    }
    let protocols = client.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    let kept: Vec<_> = protocols
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|protocol| !protocol.contains("api-key") && !protocol.is_empty())
        .collect();
    let kept = (!kept.is_empty()).then(|| HeaderValue::from_str(&kept.join(", ")).ok()).flatten();
    out.extend(kept.map(|value| (header::SEC_WEBSOCKET_PROTOCOL, value)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_in_subprotocols_stay_here() {
        let mut client = HeaderMap::new();
        let protocols = "realtime, openai-insecure-api-key.sk-1, openai-beta.realtime-v1";
        client.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocols));
        client.insert(header::SEC_WEBSOCKET_KEY, HeaderValue::from_static("abc"));
        client.insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer sk-1"));
        let out = handshake(&client);
        let protocol = out.iter().find(|(name, _)| name == header::SEC_WEBSOCKET_PROTOCOL);
        assert_eq!(protocol.map(|(_, value)| value.as_bytes()), Some(&b"realtime, openai-beta.realtime-v1"[..]));
        assert!(!format!("{out:?}").contains("sk-1"));
    }
}
