//! The numbers of the proxy-wasm ABI, 0.2.0 and 0.2.1: what both sides mean by them.
//! Follows `abi-versions/v0.2.1/README.md` of the specification, section "Types".

use crate::WasmError;

/// What a host function answers (`proxy_status_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// No such key, queue, header, property, or the thing is not there in this callback.
    NotFound = 1,
    /// An argument outside its range, or a change that is not allowed now.
    BadArgument = 2,
    /// A map that breaks off or lies about its lengths.
    ParseFailure = 4,
    /// A pointer or a length that leaves the plugin's memory.
    InvalidMemoryAccess = 6,
    /// The queue holds nothing.
    Empty = 7,
    /// Somebody else has changed the value meanwhile.
    CasMismatch = 8,
    /// A bound of the host was reached, or the plugin's allocator failed.
    InternalFailure = 10,
    /// The host does not have this.
    Unimplemented = 12,
}

/// Why a host function did not do what it was asked: the plugin is told, or the plugin ends.
#[derive(Debug)]
pub(super) enum Fail {
    /// The plugin reads this status.
    Told(Status),
    /// The plugin is stopped.
    Trap(wasmtime::Error),
}

impl From<Status> for Fail {
    fn from(status: Status) -> Self {
        Fail::Told(status)
    }
}

impl From<wasmtime::Error> for Fail {
    fn from(error: wasmtime::Error) -> Self {
        Fail::Trap(error)
    }
}

/// What the body of a host function answers.
pub(super) type Answer = Result<(), Fail>;

/// What a plugin wants done with what it was shown (`proxy_action_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Go on.
    Continue,
    /// Wait until it says so. Every value but 0 means this: hosts and kits have four ways of stopping
    /// (`StopIteration`, `StopAllIterationAndBuffer`, …), which here are one, because bodies are held anyway.
    Pause,
}

impl Action {
    /// Reads a callback's result.
    pub fn from_wire(value: u32) -> Self {
        if value == 0 { Action::Continue } else { Action::Pause }
    }
}

/// Which headers (`proxy_map_type_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapKind {
    /// Headers of the client's request.
    RequestHeaders,
    /// Trailers of the client's request.
    RequestTrailers,
    /// Headers of the answer.
    ResponseHeaders,
    /// Trailers of the answer.
    ResponseTrailers,
    /// Headers that answer a call of the plugin's own.
    CallHeaders,
    /// Trailers that answer a call of the plugin's own.
    CallTrailers,
}

impl MapKind {
    /// Reads an argument. The two maps of gRPC are known and never there.
    pub(super) fn from_wire(value: u32) -> Result<Self, Status> {
        Ok(match value {
            0 => MapKind::RequestHeaders,
            1 => MapKind::RequestTrailers,
            2 => MapKind::ResponseHeaders,
            3 => MapKind::ResponseTrailers,
            4 | 5 => return Err(Status::NotFound),
            6 => MapKind::CallHeaders,
            7 => MapKind::CallTrailers,
            _ => return Err(Status::BadArgument),
        })
    }
}

/// Which bytes (`proxy_buffer_type_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BufferKind {
    /// Body of the client's request.
    RequestBody,
    /// The piece of the answer that is at hand, with what was held back before it.
    ResponseBody,
    /// Body that answers a call of the plugin's own.
    CallBody,
    /// `vm_config` of the plugin's settings.
    VmConfig,
    /// `config` of the plugin's settings.
    PluginConfig,
}

impl BufferKind {
    /// Reads an argument. The buffers of TCP, gRPC and foreign functions are known and never there.
    pub(super) fn from_wire(value: u32) -> Result<Self, Status> {
        Ok(match value {
            0 => BufferKind::RequestBody,
            1 => BufferKind::ResponseBody,
            2 | 3 | 5 | 8 => return Err(Status::NotFound),
            4 => BufferKind::CallBody,
            6 => BufferKind::VmConfig,
            7 => BufferKind::PluginConfig,
            _ => return Err(Status::BadArgument),
        })
    }
}

/// How loud a plugin speaks (`proxy_log_level_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names say it")]
pub enum LogLevel {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
    Critical,
}

impl LogLevel {
    /// Reads an argument.
    pub fn from_wire(value: u32) -> Result<Self, Status> {
        use LogLevel::{Critical, Debug, Error, Info, Trace, Warn};
        [Trace, Debug, Info, Warn, Error, Critical].get(value as usize).copied().ok_or(Status::BadArgument)
    }
}

/// Versions that are spoken here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbiVersion {
    /// `proxy_abi_version_0_2_0`
    V0_2_0,
    /// `proxy_abi_version_0_2_1`
    V0_2_1,
}

impl AbiVersion {
    /// Finds the marker among a module's exports. The newer one wins where there are both.
    pub fn of<'a>(exports: impl Iterator<Item = &'a str>) -> Result<Self, WasmError> {
        let mut found = None;
        let mut other = None;
        for name in exports.filter(|name| name.starts_with("proxy_abi_version_")) {
            match name {
                "proxy_abi_version_0_2_1" => found = Some(AbiVersion::V0_2_1),
                "proxy_abi_version_0_2_0" => found = found.or(Some(AbiVersion::V0_2_0)),
                _ => other = Some(name.to_owned()),
            }
        }
        found.ok_or(WasmError::Abi { found: other })
    }
}
