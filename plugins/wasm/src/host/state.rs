//! Host's state of one virtual machine: its contexts, the one that host functions act on, and requests of the plugin
//! that are not done yet.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use penstock_plugins::Host;
use wasmtime::{Memory, ResourceLimiter, TypedFunc};

use super::abi::{LogLevel, MapKind, Status};
use super::fields::Fields;
use super::properties::Facts;
use super::shared::Shared;
use crate::Limits;

/// Id of the context that is no request: settings, timers, queues. Every virtual machine has one.
pub const ROOT: u32 = 1;

/// Most calls that one virtual machine may have under way.
const CALLS_MAX: usize = 64;
/// Most bytes of properties that a plugin may set per request.
const PROPERTY_BYTES_MAX: usize = 64 << 10;
/// Most lines that one callback may log.
const LOG_LINES_MAX: u32 = 100;

/// Settings that all virtual machines of a plugin share.
#[derive(Debug)]
pub struct Identity {
    /// Name in the config.
    pub name: String,
    /// Name of the plugin within its module.
    pub root_id: String,
    /// Name of the shared state that the plugin sees.
    pub vm_id: String,
    /// Content of `VM_CONFIGURATION`.
    pub vm_config: Bytes,
    /// Content of `PLUGIN_CONFIGURATION`.
    pub plugin_config: Bytes,
    /// Names of upstreams that may be called.
    pub upstreams: Vec<String>,
    /// Bounds.
    pub limits: Limits,
    /// Lowest level that is logged.
    pub log: LogLevel,
}

/// Host's side of one virtual machine.
pub(super) struct State {
    pub(super) identity: Arc<Identity>,
    pub(super) shared: Arc<Shared>,
    pub(super) host: Option<Arc<dyn Host>>,
    pub(super) limiter: Limiter,
    pub(super) memory: Option<Memory>,
    pub(super) allocate: Option<TypedFunc<u32, u32>>,
    pub(super) streams: HashMap<u32, Stream>,
    pub(super) root_properties: Properties,
    /// Context that host functions act on.
    pub(super) effective: u32,
    pub(super) tick_period_ms: u32,
    pub(super) root_done: bool,
    /// Answer that `proxy_on_http_call_response` is being shown.
    pub(super) call_answer: Option<CallAnswer>,
    /// Calls that were asked for and not taken yet.
    pub(super) asked: VecDeque<Call>,
    /// Number of calls that were taken and not answered yet.
    pub(super) calls_open: usize,
    pub(super) next_call: u32,
    /// Queues that this machine wants to be notified of.
    pub(super) queues: Vec<u32>,
    pub(super) log_lines: u32,
    /// True while the settings are only checked: there is no host.
    pub(super) trial: bool,
}

impl State {
    /// State before anything has run.
    pub(super) fn new(identity: Arc<Identity>, shared: Arc<Shared>, host: Option<Arc<dyn Host>>) -> Self {
        let limiter = Limiter { memory_bytes_max: identity.limits.memory_bytes_max, refused: false };
        Self {
            trial: host.is_none(),
            identity,
            shared,
            host,
            limiter,
            memory: None,
            allocate: None,
            streams: HashMap::new(),
            root_properties: Properties::default(),
            effective: ROOT,
            tick_period_ms: 0,
            root_done: false,
            call_answer: None,
            asked: VecDeque::new(),
            calls_open: 0,
            next_call: 0,
            queues: Vec::new(),
            log_lines: 0,
        }
    }

    /// Begins a callback for this context.
    pub(super) fn begin(&mut self, context: u32) {
        self.effective = context;
        self.log_lines = 0;
    }

    /// Request that host functions act on.
    pub(super) fn stream(&mut self) -> Option<&mut Stream> {
        self.streams.get_mut(&self.effective)
    }

    /// Counts a log line; true while the callback may log it.
    pub(super) fn may_log(&mut self) -> bool {
        self.log_lines += 1;
        self.log_lines <= LOG_LINES_MAX
    }

    /// Notes a call and returns its id.
    pub(super) fn ask(&mut self, mut call: Call) -> Result<u32, Status> {
        if self.asked.len() + self.calls_open >= CALLS_MAX {
            return Err(Status::InternalFailure);
        }
        self.next_call = self.next_call.wrapping_add(1);
        (call.id, call.origin) = (self.next_call, self.effective);
        self.asked.push_back(call);
        Ok(self.next_call)
    }

    /// Map that a plugin may read now; `None`: there is no such map.
    pub(super) fn fields(&mut self, kind: MapKind) -> Option<&Fields> {
        match kind {
            MapKind::CallHeaders => self.call_answer.as_ref().map(|answer| &answer.headers),
            MapKind::CallTrailers => self.call_answer.as_ref().map(|answer| &answer.trailers),
            _ => self.stream().and_then(|stream| stream.map(kind)).map(|map| &map.fields),
        }
    }

    /// Map that a plugin may change now.
    pub(super) fn fields_mut(&mut self, kind: MapKind) -> Result<&mut Fields, Status> {
        let map = self.stream().and_then(|stream| stream.map_mut(kind)).ok_or(Status::BadArgument)?;
        if !map.open {
            return Err(Status::BadArgument);
        }
        map.changed = true;
        Ok(&mut map.fields)
    }
}

/// Most entries of all tables of a module.
const TABLE_ELEMENTS_MAX: usize = 20_000;

/// Limiter of a machine's memory and tables; growth beyond the bounds is refused, which the plugin sees as a failed
/// allocation.
#[derive(Debug)]
pub(super) struct Limiter {
    memory_bytes_max: usize,
    /// True where memory was refused: the machine is worn out.
    pub refused: bool,
}

impl ResourceLimiter for Limiter {
    fn memory_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let fits = desired <= self.memory_bytes_max;
        self.refused |= !fits;
        Ok(fits)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        Ok(desired <= TABLE_ELEMENTS_MAX)
    }

    fn instances(&self) -> usize {
        1
    }

    fn tables(&self) -> usize {
        4
    }

    fn memories(&self) -> usize {
        1
    }
}

/// Values that a plugin has set by path.
#[derive(Debug, Default)]
pub struct Properties {
    values: BTreeMap<Vec<u8>, Bytes>,
    bytes: usize,
}

impl Properties {
    /// The value at this path.
    pub fn get(&self, path: &[u8]) -> Option<&Bytes> {
        self.values.get(path)
    }

    /// Sets the value at this path.
    pub fn set(&mut self, path: Vec<u8>, value: Vec<u8>) -> Result<(), Status> {
        let old = self.values.get(&path).map_or(0, |value| path.len() + value.len());
        let bytes = self.bytes - old + path.len() + value.len();
        if bytes > PROPERTY_BYTES_MAX {
            return Err(Status::InternalFailure);
        }
        self.bytes = bytes;
        self.values.insert(path, value.into());
        Ok(())
    }
}

/// Headers, and whether they can still be changed.
#[derive(Debug, Default)]
pub struct Map {
    /// Names and values.
    pub fields: Fields,
    /// True while a change still has an effect.
    pub open: bool,
    /// True where a plugin has changed them.
    pub changed: bool,
}

/// Body, or its current piece.
#[derive(Debug, Default)]
pub struct Buffer {
    /// Bytes of the body or piece.
    pub bytes: Bytes,
    /// True where a plugin has changed them.
    pub changed: bool,
}

impl Buffer {
    /// Puts `value` in the place of `size` bytes from `start`: at the end if `start` is behind it, in front if both are
    /// 0.
    pub fn splice(&mut self, start: u32, size: u32, value: &[u8], bytes_max: usize) -> Result<(), Status> {
        let length = self.bytes.len();
        let from = (start as usize).min(length);
        let to = from.saturating_add(size as usize).min(length);
        if from + value.len() + (length - to) > bytes_max {
            return Err(Status::InternalFailure);
        }
        self.changed = true;
        self.bytes = if to - from == length {
            Bytes::copy_from_slice(value)
        } else {
            let mut out = Vec::with_capacity(from + value.len() + length - to);
            out.extend_from_slice(&self.bytes[..from]);
            out.extend_from_slice(value);
            out.extend_from_slice(&self.bytes[to..]);
            out.into()
        };
        Ok(())
    }
}

/// One request and its answer.
#[derive(Debug, Default)]
pub struct Stream {
    /// Facts that properties are read from.
    pub facts: Facts,
    /// Properties that the plugin has set.
    pub properties: Properties,
    /// Headers of the request.
    pub request_headers: Map,
    /// Trailers of the request, where it has some.
    pub request_trailers: Option<Map>,
    /// Headers of the answer, once they are known.
    pub response_headers: Option<Map>,
    /// Trailers of the answer, where it has some.
    pub response_trailers: Option<Map>,
    /// Body of the request while it can be read.
    pub request_body: Option<Buffer>,
    /// Current piece of the answer's body.
    pub response_body: Option<Buffer>,
    /// True while the plugin has the request wait.
    pub request_paused: bool,
    /// True while the plugin has the answer wait.
    pub response_paused: bool,
    /// True where the plugin wants the stream closed.
    pub closed: bool,
    /// Answer of the plugin itself.
    pub local: Option<LocalResponse>,
    /// True once a local response comes too late.
    pub committed: bool,
    /// True where `proxy_on_done` said "not yet".
    pub lingering: bool,
    /// True where `proxy_done` was called after that.
    pub done: bool,
}

impl Stream {
    fn map(&self, kind: MapKind) -> Option<&Map> {
        match kind {
            MapKind::RequestHeaders => Some(&self.request_headers),
            MapKind::RequestTrailers => self.request_trailers.as_ref(),
            MapKind::ResponseHeaders => self.response_headers.as_ref(),
            MapKind::ResponseTrailers => self.response_trailers.as_ref(),
            MapKind::CallHeaders | MapKind::CallTrailers => None,
        }
    }

    fn map_mut(&mut self, kind: MapKind) -> Option<&mut Map> {
        match kind {
            MapKind::RequestHeaders => Some(&mut self.request_headers),
            MapKind::RequestTrailers => self.request_trailers.as_mut(),
            MapKind::ResponseHeaders => self.response_headers.as_mut(),
            MapKind::ResponseTrailers => self.response_trailers.as_mut(),
            MapKind::CallHeaders | MapKind::CallTrailers => None,
        }
    }
}

/// Answer that a plugin gives in place of an upstream's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalResponse {
    /// Status code.
    pub status: u16,
    /// Reason, for the log.
    pub details: String,
    /// Headers besides those of framing.
    pub headers: Fields,
    /// Body.
    pub body: Bytes,
}

/// Request that a plugin wants sent.
#[derive(Clone, Debug)]
pub struct Call {
    /// Id by which the call is answered.
    pub id: u32,
    /// Context that asked.
    pub origin: u32,
    /// Name of the upstream, as in the plugin's settings.
    pub upstream: String,
    /// Headers, pseudo headers included.
    pub headers: Fields,
    /// Body.
    pub body: Bytes,
    /// Timeout in milliseconds.
    pub timeout_ms: u32,
}

/// Answer to a call. Without headers the call failed.
#[derive(Clone, Debug, Default)]
pub struct CallAnswer {
    /// `:status` and the other headers.
    pub headers: Fields,
    /// Trailers.
    pub trailers: Fields,
    /// Body.
    pub body: Bytes,
}
