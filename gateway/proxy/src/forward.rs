//! Operations that no dialect here reads (audio, images, moderations, realtime), passed on to the provider of the model
//! that they name.
//!
//! The gateway understands only the model's name in them, so nothing is translated, retried or counted in tokens: the
//! model's provider must offer the operation itself.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use penstock_proto::ErrorKind;
use penstock_types::{ApiError, Bounds, Dialect, peek};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout};

use crate::gateway::Gateway;
use crate::handler::{End, watched};
use crate::request_headers;
use crate::request_log::Trail;
use crate::serving::Serving;
use crate::web::Content;
use penstock_auth::Principal;
use penstock_base::error::Failure;
use penstock_governed::{Plain, Reservation, Uses};
use penstock_http::multipart::{self, Part};
use penstock_http::{Body, Exchange};
use penstock_upstream::{Forward, Forwarded};

/// Largest number of parts in a form: an edit of images can have many.
const PARTS_MAX: usize = 64;
/// Longest model name in a multipart form, in bytes.
const MODEL_BYTES_MAX: usize = 256;
/// Buffer of one direction of a tunnel, in bytes.
const TUNNEL_BYTES: usize = 16 * 1024;
/// Idle timeout of a tunnel in which neither side sends anything; WebSocket clients send pings.
const TUNNEL_SILENCE: Duration = Duration::from_secs(300);
/// Interval between two checks of a tunnel's credential: a revoked one ends within a second.
const LAPSE_LOOK: Duration = Duration::from_millis(500);
/// Path of the operation that need not name a model.
const MODERATIONS: &str = "/v1/moderations";
/// Route label of WebSocket tunnels, as scopes name it.
const REALTIME: &str = "/v1/realtime";
/// Longest wait for one side to take the other's bytes.
const TUNNEL_STALL: Duration = Duration::from_secs(30);

/// Forwards the operation at URL `path` to a provider without parsing it.
pub(crate) async fn serve(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    trail: &mut Trail,
    path: &str,
    principal: &Principal,
) -> Result<(), End> {
    let mut headers = std::mem::take(&mut exchange.head.headers);
    let started = exchange.started.into_std();
    let own = serving.config.request_timeout.map(|limit| started + limit);
    let deadline = request_headers::deadline(own, &headers, started)?;
    let mut body = exchange.read_body(&gateway.bodies).await?;
    if path == MODERATIONS {
        body.bytes = with_model(&headers, body.bytes, serving.config.moderation_model.as_deref())?;
    }
    let (model, at, others) = named(&headers, &body)?;
    principal.check_other_models(others)?;
    if at.1 {
        // The body was read as JSON, whatever type the client named.
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    let entry = serving.entry(&model, principal)?;
    trail.model = Some(entry.name.to_string());
    trail.live.iter().for_each(|live| live.asks(&entry.name, false));
    let Body { bytes, lease } = body;
    let forward = Forward {
        path: path.trim_start_matches("/v1").to_owned(),
        headers,
        body: Some(bytes),
        model_at: Some(at),
        trace: trail.trace.clone(),
        asker: exchange.asker(),
        deadline,
    };
    let plain = plain(exchange, trail);
    let held = penstock_governed::admit_plain(&gateway.governor, &serving.rules, principal, &entry, &plain).await?;
    let sent = async {
        let answered = watched(exchange, entry.upstream.forward(Arc::new(forward))).await??;
        drop(lease);
        send(exchange, answered).await
    };
    closed(held, sent.await)
}

fn plain(exchange: &Exchange, trail: &Trail) -> Plain<'static> {
    Plain { uses: Uses::Unknown, dialect: Dialect::OpenAi, from: exchange.client(), route: trail.route }
}

/// Settles a reservation by the request's end: an answer or a failure by its outcome, a client that left by the amount
/// held.
fn closed(held: Option<Reservation>, ended: Result<(), End>) -> Result<(), End> {
    match &ended {
        Ok(()) => penstock_governed::close(held, None),
        Err(End::Failed(failure)) => penstock_governed::close(held, Some(failure)),
        Err(End::Gone) => drop(held),
    }
    ended
}

/// The body, with the config's default model in it where the body names none, as clients of OpenAI may leave it out.
fn with_model(headers: &HeaderMap, body: Bytes, name: Option<&str>) -> Result<Bytes, Failure> {
    if !Content::of(headers).is_json() {
        return Ok(body);
    }
    let seen = peek(&body, None, &Bounds::default())?;
    if seen.model.is_some() {
        return Ok(body);
    }
    let Some(name) = name else {
        let message = "model: required, but missing; no server.moderation_model is configured here.";
        return Err(Failure::new(ErrorKind::ModelNotFound, message).param("model"));
    };
    let name = serde_json::Value::from(name).to_string();
    let (at, text) = match seen.model_at {
        Some(null) => (null, name),
        None => {
            // A body that was read is an object.
            let from = body.iter().position(|byte| *byte == b'{').map_or(0, |brace| brace + 1);
            let is_empty = body[from..].trim_ascii_start().first() == Some(&b'}');
            (from..from, format!("\"model\":{name}{}", if is_empty { "" } else { "," }))
        }
    };
    Ok([&body[..at.start], text.as_bytes(), &body[at.end..]].concat().into())
}

/// Model's name, its byte range and whether the body is JSON, and the field that names further models.
type Named = (String, (Range<usize>, bool), Option<&'static str>);

/// Model that a JSON body or a form names, its place, and the field that names further models.
fn named(headers: &HeaderMap, body: &Body) -> Result<Named, Failure> {
    let missing = || ApiError::invalid("model", "model: required, but missing");
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let Some(boundary) = multipart::boundary(kind) else {
        if !Content::of(headers).is_json() {
            let message = "The body must be JSON or multipart/form-data.";
            return Err(Failure::new(ErrorKind::UnsupportedMedia, message));
        }
        let seen = peek(&body.bytes, None, &Bounds::default())?;
        let at = seen.model_at.ok_or_else(missing)?;
        return Ok((seen.model.ok_or_else(missing)?, (at, true), seen.other_models));
    };
    let (at, others) = model_part(&body.bytes, &boundary)?;
    let at = at.ok_or_else(missing)?;
    let name = std::str::from_utf8(&body.bytes[at.clone()])
        .ok()
        .filter(|name| (1..=MODEL_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control));
    let name = name.ok_or_else(|| ApiError::invalid("model", "model: not the name of a model"))?;
    Ok((name.to_owned(), (at, false), others))
}

/// Byte range of the model's name in a form (`None`: the form names none), and the field that names further models. A
/// name given twice is refused, since readers could differ about it.
fn model_part(body: &Bytes, boundary: &str) -> Result<(Option<Range<usize>>, Option<&'static str>), ApiError> {
    let parts = multipart::parts(body, boundary, PARTS_MAX);
    let parts = parts.map_err(|why| ApiError::malformed(format!("The form cannot be read: {why}.")))?;
    if parts.iter().any(|part| part.name.contains('\\')) {
        // Some readers drop it: then this, too, would be the model.
        return Err(ApiError::malformed("The form cannot be read: a name holds a backslash."));
    }
    if let Some(part) = parts.iter().find(|part| part.name != "model" && peek::folds(&part.name, "model", false)) {
        let why = "some servers read this field as \"model\" and others do not: write \"model\"";
        return Err(ApiError::invalid(part.name.clone(), format!("{}: {why}", part.name)));
    }
    // Forms name lists as `models[]`, `models[0]`.
    let others = parts.iter().find_map(|part| peek::other_models(part.name.split('[').next().unwrap_or_default()));
    let mut models = parts.into_iter().filter(|part| part.name == "model");
    match (models.next(), models.next()) {
        (Some(_), Some(_)) => Err(ApiError::invalid("model", "model: given twice")),
        (Some(Part { file_name: None, at, .. }), None) => Ok((Some(at), others)),
        _ => Ok((None, others)),
    }
}

/// Sends the provider's answer to the client as it comes.
async fn send(exchange: &mut Exchange, mut answered: Forwarded) -> Result<(), End> {
    let kind = answered.response.headers.get(header::CONTENT_TYPE).cloned();
    let kind = kind.unwrap_or(HeaderValue::from_static("application/octet-stream"));
    let length = answered.response.headers.get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
    let mut fields = vec![(header::CONTENT_TYPE, kind)];
    fields.append(&mut answered.fields);
    exchange.begin(answered.response.status, &fields, length).await?;
    loop {
        let mut bytes = Vec::new();
        let more = tokio::select! {
            biased;
            more = poll_fn(|context| answered.response.body.poll_chunk(context, &mut bytes)) => more,
            _ = exchange.gone() => return Err(End::Gone),
        };
        let more = more.map_err(|error| answered.passage.cut(&error))?;
        if !more {
            answered.passage.complete();
        }
        exchange.write(bytes.into(), !more).await?;
        if !more {
            return Ok(());
        }
    }
}

/// Serves `/v1/realtime?model=…`: a tunnel between the client's WebSocket and the provider's.
pub(crate) async fn realtime(
    gateway: &Gateway,
    serving: &Serving,
    exchange: &mut Exchange,
    trail: &mut Trail,
    principal: &Principal,
) -> Result<(), End> {
    if !exchange.head.upgrade {
        let message = "This URL is a WebSocket: send \"Upgrade: websocket\".";
        return Err(Failure::new(ErrorKind::InvalidRequest, message).with_status(426).into());
    }
    let target = exchange.head.target.clone();
    let query = target.split_once('?').map_or("", |(_, query)| query);
    let model = query.split('&').find_map(|pair| pair.strip_prefix("model=")).and_then(penstock_auth::route::model_id);
    let model = model.ok_or_else(|| Failure::from(ApiError::invalid("model", "model: required in the query")))?;
    let entry = serving.entry(&model, principal)?;
    trail.model = Some(entry.name.to_string());
    trail.live.iter().for_each(|live| live.asks(&entry.name, true));
    let headers = std::mem::take(&mut exchange.head.headers);
    let (asker, trace) = (exchange.asker(), trail.trace.clone());
    // No whole answer to wait for: a tunnel lasts for as long as both sides have something to say.
    let deadline = None;
    let forward = Forward { path: "/realtime".into(), headers, body: None, model_at: None, trace, asker, deadline };
    let plain = plain(exchange, trail);
    let held = penstock_governed::admit_plain(&gateway.governor, &serving.rules, principal, &entry, &plain).await?;
    let ended = async {
        let answered = watched(exchange, entry.upstream.forward(Arc::new(forward))).await??;
        tunnel(gateway, exchange, answered, principal).await
    };
    closed(held, ended.await)
}

/// Carries the tunnel's bytes until it is cancelled or its credential is revoked.
async fn tunnel(
    gateway: &Gateway,
    exchange: &mut Exchange,
    mut answered: Forwarded,
    principal: &Principal,
) -> Result<(), End> {
    let Some((stream, early)) = answered.response.upgraded.take() else {
        return send(exchange, answered).await;
    };
    let mut fields = std::mem::take(&mut answered.fields);
    // All that both sides agreed on: frames of an extension that the client was not told of are errors to it.
    for name in [header::SEC_WEBSOCKET_ACCEPT, header::SEC_WEBSOCKET_PROTOCOL, header::SEC_WEBSOCKET_EXTENSIONS] {
        let value = answered.response.headers.get(&name).cloned();
        fields.extend(value.map(|value| (name, value)));
    }
    let tunnel = exchange.upgrade(&fields).await?;
    let whole = tokio::select! {
        whole = both_ways(tunnel.stream, &tunnel.early, stream, &early) => whole,
        () = exchange.cancelled() => return Err(End::Gone),
        failure = lapsed(gateway, principal) => return Err(failure.into()),
    };
    if whole {
        answered.passage.complete();
    }
    Ok(())
}

/// Ends when the tunnel's principal may not have it any more: a tunnel can last for hours, and its credential is not
/// checked elsewhere.
async fn lapsed(gateway: &Gateway, principal: &Principal) -> Failure {
    loop {
        tokio::time::sleep(LAPSE_LOOK).await;
        if let Err(failure) = gateway.guard.still(&gateway.serving().identity, principal, REALTIME) {
            return failure;
        }
    }
}

/// Carries bytes until one side closes or both are silent; true if a close ended it.
async fn both_ways(
    client: impl AsyncRead + AsyncWrite + Unpin,
    client_early: &Bytes,
    provider: impl AsyncRead + AsyncWrite + Unpin,
    provider_early: &[u8],
) -> bool {
    let (client_read, client_write) = tokio::io::split(client);
    let (provider_read, provider_write) = tokio::io::split(provider);
    let heard = std::sync::Mutex::new(Instant::now());
    let up = carry(client_early, client_read, provider_write, &heard);
    let down = carry(provider_early, provider_read, client_write, &heard);
    let silence = async {
        loop {
            let since = *heard.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if since.elapsed() >= TUNNEL_SILENCE {
                return;
            }
            tokio::time::sleep_until(since + TUNNEL_SILENCE).await;
        }
    };
    // The side that is closed first has said its last frame; what the other still says has no reader.
    tokio::select! {
        ended = up => ended,
        ended = down => ended,
        () = silence => false,
    }
}

/// Carries the bytes of one direction of a tunnel until that side closes.
async fn carry(
    early: &[u8],
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    heard: &std::sync::Mutex<Instant>,
) -> bool {
    let mut buffer = vec![0; TUNNEL_BYTES];
    let mut bytes = early;
    loop {
        if !bytes.is_empty() {
            let written = timeout(TUNNEL_STALL, async {
                to.write_all(bytes).await?;
                to.flush().await
            });
            if !matches!(written.await, Ok(Ok(()))) {
                return false;
            }
            *heard.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Instant::now();
        }
        match from.read(&mut buffer).await {
            Ok(0) => {
                let _ = timeout(TUNNEL_STALL, to.shutdown()).await;
                return true;
            }
            Ok(count) => bytes = &buffer[..count],
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_close_is_carried_and_nothing_is_lost() {
        let (mut client, near) = tokio::io::duplex(64);
        let (mut provider, far) = tokio::io::duplex(64);
        let tunnel = tokio::spawn(async move { both_ways(near, &Bytes::from_static(b"early "), far, b"hello ").await });
        let said = "x".repeat(1000);
        let (read, _) = tokio::join!(
            async {
                let mut text = String::new();
                provider.read_to_string(&mut text).await.map(|_| text)
            },
            async {
                let mut hello = [0; 6];
                client.read_exact(&mut hello).await.expect("read");
                assert_eq!(&hello, b"hello ");
                client.write_all(said.as_bytes()).await.expect("written");
                client.shutdown().await.expect("closed");
            }
        );
        assert_eq!(read.expect("read"), format!("early {said}"));
        assert!(tunnel.await.expect("no panic"));
    }

    #[test]
    fn moderations_without_a_model_ask_the_one_of_the_config() {
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        let asked = |body: &'static str, name| with_model(&headers, Bytes::from_static(body.as_bytes()), name);
        for (body, expected) in [
            (r#"{"input":"x"}"#, r#"{"model":"a\"b","input":"x"}"#),
            (r#" { "input" : "x" }"#, r#" {"model":"a\"b", "input" : "x" }"#),
            ("{}", r#"{"model":"a\"b"}"#),
            (r#"{"input":"x","model": null}"#, r#"{"input":"x","model": "a\"b"}"#),
            (r#"{"input":"x","model":"m"}"#, r#"{"input":"x","model":"m"}"#),
        ] {
            assert_eq!(asked(body, Some("a\"b")).expect(body), expected.as_bytes());
        }
        let failure = asked(r#"{"input":"x"}"#, None).expect_err("no model");
        assert_eq!((failure.status(), failure.param.as_deref()), (404, Some("model")));
        assert_eq!(asked(r#"{"model":"m"}"#, None).expect("named"), r#"{"model":"m"}"#.as_bytes());
        assert_eq!(asked("[1]", Some("m")).expect_err("no object").status(), 400);
    }

    fn form(names: &[&str]) -> Bytes {
        let part = |name: &&str| format!("--B\r\nContent-Disposition: form-data; {name}\r\n\r\nv\r\n");
        Bytes::from(names.iter().map(part).collect::<String>() + "--B--\r\n")
    }

    #[test]
    fn a_form_names_one_model_or_none() {
        let found =
            |names: &[&str]| model_part(&form(names), "B").map(|at| at.0.is_some()).map_err(|error| error.message);
        assert_eq!(found(&["name=\"file\"; filename=\"model\"", "name=\"model\""]), Ok(true));
        assert_eq!(found(&["name=\"file\"", "name=\"model\"; filename=\"x\""]), Ok(false));
        for twice in ["name=\"model\"", "NAME=model", "name=\"model\"; filename=\"x\""] {
            assert_eq!(found(&["name=\"model\"", twice]), Err("model: given twice".into()), "{twice}");
        }
        assert!(found(&["name=\"model\"", "name=\"mod\\el\""]).is_err());
        for alike in ["name=\"Model\"", "name=MODEL", "name=\"Model\"; filename=\"x\""] {
            assert!(found(&[alike]).is_err() && found(&["name=\"model\"", alike]).is_err(), "{alike}");
        }
        for (name, expected) in
            [("name=\"models[]\"", Some("models")), ("name=prompt", None), ("name=fallbacks", Some("fallbacks"))]
        {
            let others = model_part(&form(&["name=\"model\"", name]), "B").map(|found| found.1);
            assert_eq!(others.ok().flatten(), expected, "{name}");
        }
    }
}
