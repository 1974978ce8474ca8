//! Bodies and settings.

use bytes::Bytes;

use crate::host::abi::{Answer, BufferKind, Status};
use crate::host::memory::Guest;
use crate::host::state::State;

fn find(state: &mut State, kind: BufferKind) -> Result<Bytes, Status> {
    let body = match kind {
        BufferKind::RequestBody => {
            state.stream().and_then(|stream| stream.request_body.as_ref()).map(|body| &body.bytes)
        }
        BufferKind::ResponseBody => {
            state.stream().and_then(|stream| stream.response_body.as_ref()).map(|body| &body.bytes)
        }
        BufferKind::CallBody => state.call_answer.as_ref().map(|answer| &answer.body),
        BufferKind::VmConfig => Some(&state.identity.vm_config),
        BufferKind::PluginConfig => Some(&state.identity.plugin_config),
    };
    body.cloned().ok_or(Status::NotFound)
}

pub(super) fn get(guest: &mut Guest<'_, '_>, kind: u32, start: u32, size: u32, out: u32, out_size: u32) -> Answer {
    let bytes = find(guest.state(), BufferKind::from_wire(kind)?)?;
    let start = start as usize;
    if start > bytes.len() {
        return Err(Status::BadArgument.into());
    }
    let end = start.saturating_add(size as usize).min(bytes.len());
    guest.give(&bytes[start..end], out, out_size)
}

pub(super) fn status(guest: &mut Guest<'_, '_>, kind: u32, out_size: u32, out_flags: u32) -> Answer {
    let bytes = find(guest.state(), BufferKind::from_wire(kind)?)?;
    guest.write_word(out_size, u32::try_from(bytes.len()).unwrap_or(u32::MAX))?;
    guest.write_word(out_flags, 0)
}

pub(super) fn set(guest: &mut Guest<'_, '_>, kind: u32, start: u32, size: u32, value: u32, value_size: u32) -> Answer {
    let kind = BufferKind::from_wire(kind)?;
    let value = guest.read(value, value_size)?;
    let state = guest.state();
    let bytes_max = state.identity.limits.body_bytes_max;
    let buffer = match (kind, state.stream()) {
        (BufferKind::RequestBody, Some(stream)) => stream.request_body.as_mut(),
        (BufferKind::ResponseBody, Some(stream)) => stream.response_body.as_mut(),
        (BufferKind::RequestBody | BufferKind::ResponseBody, None) => None,
        _ => return Err(Status::BadArgument.into()),
    };
    Ok(buffer.ok_or(Status::NotFound)?.splice(start, size, &value, bytes_max)?)
}
