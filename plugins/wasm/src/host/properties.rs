//! Properties: facts that a plugin reads by path (`request` `path`). The paths and the forms of the values are Envoy's
//! where Envoy has such a property, so that plugins written for Envoy work; facts that only a gateway of models knows
//! are below `penstock`.
//!
//! A path is its parts with a zero byte between them. Text is as it is; numbers are eight bytes, little-endian and signed; times are
//! nanoseconds since 1970; truth is one byte; headers are a map as everywhere else.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use penstock_plugins::{EndFacts, RequestInfo};

use super::state::{ROOT, State, Stream};

/// Facts of a request.
#[derive(Debug, Default)]
pub struct Facts {
    /// Facts that do not change.
    pub info: Option<Arc<RequestInfo>>,
    /// Model that is asked.
    pub model: String,
    /// Time when the request came, since 1970.
    pub begun: Duration,
    /// Bytes of the request's body.
    pub request_bytes: u64,
    /// Bytes of the answer so far.
    pub response_bytes: u64,
    /// Facts of the end, once the request has ended.
    pub end: Option<EndFacts>,
}

/// Value of a property, or `None` where there is none.
pub(super) fn read(state: &State, path: &[u8]) -> Option<Bytes> {
    let stream = state.streams.get(&state.effective);
    let own = match stream {
        Some(stream) => Some(&stream.properties),
        None => (state.effective == ROOT).then_some(&state.root_properties),
    };
    if let Some(value) = own.and_then(|own| own.get(path)) {
        return Some(value.clone());
    }
    let mut parts = path.split(|byte| *byte == 0).map(|part| std::str::from_utf8(part).unwrap_or_default());
    let (first, second) = (parts.next()?, parts.next());
    let third = parts.next();
    let identity = &state.identity;
    match (first, second) {
        ("plugin_name", None) => Some(text(&identity.name)),
        ("plugin_root_id", None) => Some(text(&identity.root_id)),
        ("plugin_vm_id", None) => Some(text(&identity.vm_id)),
        _ => of_stream(stream?, first, second, third),
    }
}

fn of_stream(stream: &Stream, first: &str, second: Option<&str>, third: Option<&str>) -> Option<Bytes> {
    let info = stream.facts.info.as_deref()?;
    match (first, second) {
        ("cluster_name", None) | ("xds", Some("cluster_name")) => Some(text(target(stream))),
        ("route_name", None) | ("xds", Some("route_name")) => Some(text(info.route)),
        ("source", Some("address")) => Some(text(&info.client?.to_string())),
        ("request", Some(name)) => of_request(stream, info, name, third),
        ("response", Some(name)) => of_response(stream, name, third),
        ("penstock", Some(name)) => of_gateway(stream, info, name),
        _ => None,
    }
}

fn of_request(stream: &Stream, info: &RequestInfo, name: &str, third: Option<&str>) -> Option<Bytes> {
    let headers = &stream.request_headers.fields;
    match name {
        "id" => Some(text(&info.request_id)),
        "path" | "url_path" => headers.get(":path").or_else(|| Some(text(info.route))),
        "host" => headers.get(":authority"),
        "scheme" => headers.get(":scheme"),
        "method" => headers.get(":method"),
        "protocol" => Some(text("HTTP/1.1")),
        "query" => Some(Bytes::new()),
        "referer" => headers.get("referer"),
        "useragent" => headers.get("user-agent"),
        "time" => Some(time(stream.facts.begun)),
        "size" | "total_size" => Some(number(stream.facts.request_bytes)),
        "headers" => match third {
            Some(header) => headers.get(header),
            None => Some(headers.encode().into()),
        },
        _ => None,
    }
}

fn of_response(stream: &Stream, name: &str, third: Option<&str>) -> Option<Bytes> {
    let headers = stream.response_headers.as_ref().map(|map| &map.fields);
    match name {
        "code" => {
            let status = headers?.get(":status")?;
            Some(number(std::str::from_utf8(&status).ok()?.parse().ok()?))
        }
        "size" | "total_size" => Some(number(stream.facts.response_bytes)),
        "headers" => match third {
            Some(header) => headers?.get(header),
            None => Some(headers?.encode().into()),
        },
        _ => None,
    }
}

fn of_gateway(stream: &Stream, info: &RequestInfo, name: &str) -> Option<Bytes> {
    let end = stream.facts.end.as_ref();
    Some(match name {
        "model" => text(&info.model),
        "upstream_model" => text(&stream.facts.model),
        "key" => text(info.key.as_deref()?),
        "team" => text(info.team.as_deref()?),
        "user" => text(info.user.as_deref()?),
        "tenant" => text(&info.tenant),
        "stream" => truth(info.stream),
        "background" => truth(info.background),
        "target" => text(end?.target.as_deref()?),
        "outcome" => text(end?.outcome.name()),
        "duration" => time(end?.duration),
        "prompt_tokens" => number(end?.usage.prompt_tokens),
        "cached_tokens" => number(end?.usage.cached_tokens),
        "completion_tokens" => number(end?.usage.completion_tokens),
        "reasoning_tokens" => number(end?.usage.reasoning_tokens),
        _ => return None,
    })
}

/// Target that answers, as far as it is known.
fn target(stream: &Stream) -> &str {
    let target = stream.facts.end.as_ref().and_then(|end| end.target.as_deref());
    target.unwrap_or(&stream.facts.model)
}

fn text(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn number(number: u64) -> Bytes {
    Bytes::copy_from_slice(&i64::try_from(number).unwrap_or(i64::MAX).to_le_bytes())
}

fn time(time: Duration) -> Bytes {
    number(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

fn truth(truth: bool) -> Bytes {
    Bytes::copy_from_slice(&[u8::from(truth)])
}
