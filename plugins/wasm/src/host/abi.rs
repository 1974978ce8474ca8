//! Numbers of the proxy-wasm ABI, 0.2.0 and 0.2.1, with their meanings. Follows `abi-versions/v0.2.1/README.md` of the
//! specification, section "Types".

use crate::WasmError;

/// Status that a host function returns (`proxy_status_t`).
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

/// Failure of a host function: the plugin is told, or the plugin ends.
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

/// Result of a host function's body.
pub(super) type Answer = Result<(), Fail>;

/// Action that a callback returns (`proxy_action_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The request goes on.
    Continue,
    /// The request waits until the plugin resumes it. Every value but 0 means this: hosts and kits have four ways of
    /// stopping (`StopIteration`, `StopAllIterationAndBuffer`, …), which are one here, because bodies are held anyway.
    Pause,
}

impl Action {
    /// Reads a callback's result.
    pub fn from_wire(value: u32) -> Self {
        if value == 0 { Action::Continue } else { Action::Pause }
    }
}

/// Map of headers or trailers (`proxy_map_type_t`).
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
    /// Headers of the answer to the plugin's own call.
    CallHeaders,
    /// Trailers of the answer to the plugin's own call.
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

/// Buffer of bytes (`proxy_buffer_type_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BufferKind {
    /// Body of the client's request.
    RequestBody,
    /// Current piece of the answer, with the pieces held back before it.
    ResponseBody,
    /// Body of the answer to the plugin's own call.
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

/// Level of a plugin's log line (`proxy_log_level_t`).
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

/// Versions of the ABI that the host speaks.
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
