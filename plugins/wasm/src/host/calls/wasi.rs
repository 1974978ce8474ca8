//! Subset of WASI (preview 1) that programs need to start: no arguments, no environment, a clock, randomness, and a
//! place to print to. No files and no network, not even empty ones.

use wasmtime::{Caller, Linker};

use super::functions;
use super::system::{LINE_BYTES_MAX, now_ns, say};
use crate::host::abi::{Fail, LogLevel, Status};
use crate::host::memory::Guest;
use crate::host::state::State;

/// Module names under which it is imported; AssemblyScript's kit has the older one.
pub(super) const MODULES: [&str; 2] = ["wasi_snapshot_preview1", "wasi_unstable"];

const BADF: u32 = 8;
const FAULT: u32 = 21;
const INVAL: u32 = 28;
const NOSYS: i32 = 52;
const NOTSUP: u32 = 58;

/// Most pieces of one write.
const PIECES_MAX: u32 = 64;
/// Most random bytes of one call.
const RANDOM_BYTES_MAX: u32 = 64 << 10;

/// Error of a program that ended itself.
#[derive(Debug, thiserror::Error)]
#[error("the plugin ended itself with code {0}")]
pub(crate) struct Exit(pub u32);

/// Runs a function's body and returns its status in WASI's numbers, as [`super::told`] does in the ABI's.
fn told(caller: &mut Caller<'_, State>, body: impl FnOnce(&mut Guest<'_, '_>) -> Outcome) -> wasmtime::Result<u32> {
    match Guest::enter(caller).map_err(Stop::from).and_then(|mut guest| body(&mut guest)) {
        Ok(()) => Ok(0),
        Err(Stop::Told(errno)) => Ok(errno),
        Err(Stop::Trap(error)) => Err(error),
    }
}

enum Stop {
    Told(u32),
    Trap(wasmtime::Error),
}

type Outcome = Result<(), Stop>;

impl From<Fail> for Stop {
    fn from(fail: Fail) -> Self {
        match fail {
            Fail::Told(Status::InvalidMemoryAccess) => Stop::Told(FAULT),
            Fail::Told(_) => Stop::Told(INVAL),
            Fail::Trap(error) => Stop::Trap(error),
        }
    }
}

pub(super) fn define(linker: &mut Linker<State>, module: &str) -> wasmtime::Result<()> {
    functions!(linker, module, told, {
        "args_sizes_get" (count: u32, size: u32) => nothing_sizes;
        "args_get" (list: u32, bytes: u32) => nothing;
        "environ_sizes_get" (count: u32, size: u32) => nothing_sizes;
        "environ_get" (list: u32, bytes: u32) => nothing;
        "clock_time_get" (clock: u32, precision: u64, out: u32) => clock_time;
        "clock_res_get" (clock: u32, out: u32) => clock_resolution;
        "random_get" (out: u32, size: u32) => random;
        "fd_write" (file: u32, pieces: u32, count: u32, out: u32) => write;
        "sched_yield" () => rest;
    });
    linker.func_wrap(module, "proc_exit", |code: u32| -> wasmtime::Result<()> {
        Err(wasmtime::Error::new(Exit(code)))
    })?;
    Ok(())
}

/// Status of functions that do not exist here.
pub(super) fn unknown(name: &str) -> i32 {
    if name.starts_with("fd_") { BADF as i32 } else { NOSYS }
}

fn nothing_sizes(guest: &mut Guest<'_, '_>, count: u32, size: u32) -> Outcome {
    guest.write_word(count, 0)?;
    Ok(guest.write_word(size, 0)?)
}

#[expect(clippy::unnecessary_wraps, reason = "the table's")]
fn nothing(_: &mut Guest<'_, '_>, _list: u32, _bytes: u32) -> Outcome {
    Ok(())
}

#[expect(clippy::unnecessary_wraps, reason = "the table's")]
fn rest(_: &mut Guest<'_, '_>) -> Outcome {
    Ok(())
}

/// Writes the wall clock for both clocks: a plugin sees no other.
fn clock_time(guest: &mut Guest<'_, '_>, clock: u32, _precision: u64, out: u32) -> Outcome {
    if clock > 1 {
        return Err(Stop::Told(NOTSUP));
    }
    let now = now_ns(guest.state());
    Ok(guest.write(out, &now.to_le_bytes())?)
}

fn clock_resolution(guest: &mut Guest<'_, '_>, clock: u32, out: u32) -> Outcome {
    if clock > 1 {
        return Err(Stop::Told(NOTSUP));
    }
    Ok(guest.write(out, &1_000_u64.to_le_bytes())?)
}

/// Writes random bytes. While settings are only checked, there is no host, and the bytes are always the same.
fn random(guest: &mut Guest<'_, '_>, out: u32, size: u32) -> Outcome {
    if size > RANDOM_BYTES_MAX {
        return Err(Stop::Told(INVAL));
    }
    let host = guest.state().host.clone();
    let mut bytes = Vec::with_capacity(size as usize + 8);
    while bytes.len() < size as usize {
        let bits = host.as_ref().map_or(0x9e37_79b9_7f4a_7c15, |host| host.random());
        bytes.extend_from_slice(&bits.to_le_bytes());
    }
    bytes.truncate(size as usize);
    Ok(guest.write(out, &bytes)?)
}

/// Writes printed text into the log: file 1 as information, 2 as an error.
fn write(guest: &mut Guest<'_, '_>, file: u32, pieces: u32, count: u32, out: u32) -> Outcome {
    let level = match file {
        1 => LogLevel::Info,
        2 => LogLevel::Error,
        _ => return Err(Stop::Told(BADF)),
    };
    if count > PIECES_MAX {
        return Err(Stop::Told(INVAL));
    }
    let mut text = Vec::new();
    let written = gather(guest, pieces, count, &mut text)?;
    guest.write_word(out, written)?;
    say(guest.state(), level, &text);
    Ok(())
}

fn gather(guest: &mut Guest<'_, '_>, pieces: u32, count: u32, text: &mut Vec<u8>) -> Result<u32, Fail> {
    let mut written = 0_u32;
    for index in 0..count {
        let at = pieces.checked_add(index * 8).ok_or(Status::InvalidMemoryAccess)?;
        let size_at = at.checked_add(4).ok_or(Status::InvalidMemoryAccess)?;
        let (pointer, size) = (guest.read_word(at)?, guest.read_word(size_at)?);
        guest.check(pointer, size)?;
        let room = LINE_BYTES_MAX - text.len() as u32;
        text.extend_from_slice(&guest.read(pointer, size.min(room))?);
        written = written.checked_add(size).ok_or(Status::BadArgument)?;
    }
    Ok(written)
}
