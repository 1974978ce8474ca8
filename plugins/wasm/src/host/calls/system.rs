//! Host functions of log, clock, timer, properties and metrics.

use crate::host::abi::{Answer, LogLevel, Status};
use crate::host::memory::Guest;
use crate::host::properties;
use crate::host::shared::MetricKind;
use crate::host::state::{ROOT, State};

/// Longest log line, in bytes; the rest is cut off.
pub(super) const LINE_BYTES_MAX: u32 = 4 << 10;
/// Longest path of a property, in bytes.
const PATH_BYTES_MAX: u32 = 1 << 10;

pub(super) fn log(guest: &mut Guest<'_, '_>, level: u32, text: u32, size: u32) -> Answer {
    let level = LogLevel::from_wire(level)?;
    guest.check(text, size)?;
    let text = guest.read(text, size.min(LINE_BYTES_MAX))?;
    say(guest.state(), level, &text);
    Ok(())
}

/// Writes a line of the plugin into the log, within the bound of lines per callback.
pub(super) fn say(state: &mut State, level: LogLevel, text: &[u8]) {
    if level < state.identity.log || (state.trial && level < LogLevel::Warn) || !state.may_log() {
        return;
    }
    let text = String::from_utf8_lossy(text);
    let text = text.trim_end().escape_debug();
    let plugin = state.identity.name.as_str();
    match level {
        LogLevel::Trace => tracing::trace!(plugin, "{text}"),
        LogLevel::Debug => tracing::debug!(plugin, "{text}"),
        LogLevel::Info => tracing::info!(plugin, "{text}"),
        LogLevel::Warn => tracing::warn!(plugin, "{text}"),
        LogLevel::Error | LogLevel::Critical => tracing::error!(plugin, "{text}"),
    }
}

pub(super) fn log_level(guest: &mut Guest<'_, '_>, out: u32) -> Answer {
    let level = guest.state().identity.log as u32;
    guest.write_word(out, level)
}

/// Nanoseconds since 1970; 0 while settings are only checked, since there is no host and no clock.
pub(super) fn now_ns(state: &State) -> u64 {
    let now = state.host.as_ref().map(|host| host.since_epoch()).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

pub(super) fn time(guest: &mut Guest<'_, '_>, out: u32) -> Answer {
    let now = now_ns(guest.state());
    guest.write(out, &now.to_le_bytes())
}

#[expect(clippy::unnecessary_wraps, reason = "the table's")]
pub(super) fn set_tick_period(guest: &mut Guest<'_, '_>, period: u32) -> Answer {
    guest.state().tick_period_ms = period;
    Ok(())
}

pub(super) fn get_property(guest: &mut Guest<'_, '_>, path: u32, size: u32, out: u32, out_size: u32) -> Answer {
    if size > PATH_BYTES_MAX {
        return Err(Status::BadArgument.into());
    }
    let path = guest.read(path, size)?;
    let value = properties::read(guest.state(), &path).ok_or(Status::NotFound)?;
    guest.give(&value, out, out_size)
}

pub(super) fn set_property(guest: &mut Guest<'_, '_>, path: u32, size: u32, value: u32, value_size: u32) -> Answer {
    if size > PATH_BYTES_MAX {
        return Err(Status::BadArgument.into());
    }
    let path = guest.read(path, size)?;
    let value = guest.read(value, value_size)?;
    let state = guest.state();
    if state.effective == ROOT {
        return Ok(state.root_properties.set(path, value)?);
    }
    Ok(state.stream().ok_or(Status::NotFound)?.properties.set(path, value)?)
}

pub(super) fn define_metric(guest: &mut Guest<'_, '_>, kind: u32, name: u32, size: u32, out: u32) -> Answer {
    let kind = MetricKind::from_wire(kind)?;
    if size > PATH_BYTES_MAX {
        return Err(Status::BadArgument.into());
    }
    let name = guest.read_text(name, size)?;
    guest.write_word(out, 0)?;
    let metric = guest.state().shared.define_metric(kind, name)?;
    guest.write_word(out, metric)
}

pub(super) fn increment_metric(guest: &mut Guest<'_, '_>, metric: u32, delta: i64) -> Answer {
    Ok(guest.state().shared.increment_metric(metric, delta)?)
}

pub(super) fn record_metric(guest: &mut Guest<'_, '_>, metric: u32, value: u64) -> Answer {
    Ok(guest.state().shared.record_metric(metric, value)?)
}

pub(super) fn get_metric(guest: &mut Guest<'_, '_>, metric: u32, out: u32) -> Answer {
    let value = guest.state().shared.get_metric(metric)?;
    guest.write(out, &value.to_le_bytes())
}

/// No foreign function is registered here.
pub(super) fn foreign(
    guest: &mut Guest<'_, '_>,
    name: u32,
    size: u32,
    _value: u32,
    _value_size: u32,
    _out: u32,
    _out_size: u32,
) -> Answer {
    guest.read(name, size)?;
    Err(Status::NotFound.into())
}
