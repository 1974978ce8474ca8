//! Host functions that act on requests: resuming, answering, calling upstreams meanwhile.

use bytes::Bytes;

use crate::host::abi::{Answer, Fail, Status};
use crate::host::fields::Fields;
use crate::host::memory::Guest;
use crate::host::state::{Call, LocalResponse, ROOT};

pub(super) fn go_on(guest: &mut Guest<'_, '_>, kind: u32) -> Answer {
    match kind {
        0 => guest.state().stream().ok_or(Status::BadArgument)?.request_paused = false,
        1 => guest.state().stream().ok_or(Status::BadArgument)?.response_paused = false,
        2 | 3 => return Err(Status::Unimplemented.into()),
        _ => return Err(Status::BadArgument.into()),
    }
    Ok(())
}

pub(super) fn close(guest: &mut Guest<'_, '_>, kind: u32) -> Answer {
    match kind {
        0 | 1 => guest.state().stream().ok_or(Status::BadArgument)?.closed = true,
        2 | 3 => return Err(Status::Unimplemented.into()),
        _ => return Err(Status::BadArgument.into()),
    }
    Ok(())
}

#[expect(clippy::too_many_arguments, reason = "the ABI's")]
pub(super) fn answer(
    guest: &mut Guest<'_, '_>,
    status: u32,
    details: u32,
    details_size: u32,
    body: u32,
    body_size: u32,
    pairs: u32,
    pairs_size: u32,
    _grpc: u32,
) -> Answer {
    let details = String::from_utf8_lossy(&guest.read(details, details_size.min(1 << 10))?).into_owned();
    let body: Bytes = guest.read(body, body_size)?.into();
    let headers = Fields::decode(&guest.read(pairs, pairs_size)?)?;
    let status = u16::try_from(status).ok().filter(|status| (200..=599).contains(status)).ok_or(Status::BadArgument)?;
    let stream = guest.state().stream().ok_or(Status::BadArgument)?;
    if stream.committed || stream.local.is_some() {
        return Err(Status::BadArgument.into());
    }
    stream.local = Some(LocalResponse { status, details, headers, body });
    Ok(())
}

/// Status of an answered call, 0 where the call failed; the text is always empty.
pub(super) fn status(guest: &mut Guest<'_, '_>, out_code: u32, out: u32, out_size: u32) -> Answer {
    let answer = guest.state().call_answer.as_ref();
    let status = answer.and_then(|answer| answer.headers.get(":status"));
    let code = status.and_then(|status| std::str::from_utf8(&status).ok()?.parse().ok());
    guest.write_word(out_code, code.unwrap_or(0))?;
    guest.give(b"", out, out_size)
}

#[expect(clippy::too_many_arguments, reason = "the ABI's")]
pub(super) fn http_call(
    guest: &mut Guest<'_, '_>,
    upstream: u32,
    upstream_size: u32,
    pairs: u32,
    pairs_size: u32,
    body: u32,
    body_size: u32,
    trailers: u32,
    trailers_size: u32,
    timeout_ms: u32,
    out: u32,
) -> Answer {
    let upstream = guest.read_text(upstream, upstream_size.min(1 << 10))?;
    let headers = Fields::decode(&guest.read(pairs, pairs_size)?)?;
    let body: Bytes = guest.read(body, body_size)?.into();
    // HTTP/1.1 requests of the gateway have no trailers; what is given is checked and left out.
    Fields::decode(&guest.read(trailers, trailers_size)?)?;
    guest.write_word(out, 0)?;
    let known = guest.state().identity.upstreams.contains(&upstream);
    let complete = [":method", ":path", ":authority"].iter().all(|name| headers.get(name).is_some());
    if !known || !complete {
        return Err(Status::BadArgument.into());
    }
    let call = guest.state().ask(Call { id: 0, origin: 0, upstream, headers, body, timeout_ms })?;
    guest.write_word(out, call)
}

pub(super) fn done(guest: &mut Guest<'_, '_>) -> Answer {
    let state = guest.state();
    let on_root = state.effective == ROOT;
    match state.stream() {
        Some(stream) if stream.lingering => stream.done = true,
        None if on_root => state.root_done = true,
        _ => return Err(Status::NotFound.into()),
    }
    Ok(())
}

pub(super) fn set_effective(guest: &mut Guest<'_, '_>, context: u32) -> Answer {
    let state = guest.state();
    if context != ROOT && !state.streams.contains_key(&context) {
        return Err(Status::BadArgument.into());
    }
    state.effective = context;
    Ok(())
}

/// Does nothing: there is no such cache, since a model is looked up after the plugins have run.
#[expect(clippy::unnecessary_wraps, reason = "the table's")]
pub(super) fn clear_route_cache(_: &mut Guest<'_, '_>) -> Result<(), Fail> {
    Ok(())
}
