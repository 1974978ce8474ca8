//! What the host keeps for one virtual machine: its contexts, the one that host functions act on, and what the plugin has asked for
//! and nobody has done yet.

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

/// The context that is no request: settings, timers, queues. Every virtual machine has one.
pub const ROOT: u32 = 1;

/// Calls that one virtual machine may have under way.
const CALLS_MAX: usize = 64;
/// Bytes of properties that a plugin may set per request.
const PROPERTY_BYTES_MAX: usize = 64 << 10;
/// Lines that one callback may log.
const LOG_LINES_MAX: u32 = 100;

/// What is the same for all virtual machines of a plugin.
#[derive(Debug)]
pub struct Identity {
    /// Name in the config.
    pub name: String,
    /// Which of a module's plugins this is.
    pub root_id: String,
    /// Whose shared data it sees.
    pub vm_id: String,
    /// What `VM_CONFIGURATION` holds.
    pub vm_config: Bytes,
    /// What `PLUGIN_CONFIGURATION` holds.
    pub plugin_config: Bytes,
    /// Names of upstreams that may be called.
    pub upstreams: Vec<String>,
    /// Bounds.
    pub limits: Limits,
    /// Quietest line that is logged.
    pub log: LogLevel,
}

/// One virtual machine's side of the host.
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
    /// Answer that `proxy_on_http_call_response` is being told.
    pub(super) call_answer: Option<CallAnswer>,
    /// Calls that were asked for and not taken yet.
    pub(super) asked: VecDeque<Call>,
    /// Calls that were taken and not answered yet.
    pub(super) calls_open: usize,
    pub(super) next_call: u32,
    /// Queues that this machine wants to hear of.
    pub(super) queues: Vec<u32>,
    pub(super) log_lines: u32,
    /// The settings are only being checked: nobody is there to ask anything of.
    pub(super) trial: bool,
}

impl State {
    /// Before anything has run.
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

    /// A callback for this context begins.
    pub(super) fn begin(&mut self, context: u32) {
        self.effective = context;
        self.log_lines = 0;
    }

    /// The request that host functions act on.
    pub(super) fn stream(&mut self) -> Option<&mut Stream> {
        self.streams.get_mut(&self.effective)
    }

    /// Whether one more line may be logged.
    pub(super) fn may_log(&mut self) -> bool {
        self.log_lines += 1;
        self.log_lines <= LOG_LINES_MAX
    }

    /// Takes a call note.
    pub(super) fn ask(&mut self, mut call: Call) -> Result<u32, Status> {
        if self.asked.len() + self.calls_open >= CALLS_MAX {
            return Err(Status::InternalFailure);
        }
        self.next_call = self.next_call.wrapping_add(1);
        (call.id, call.origin) = (self.next_call, self.effective);
        self.asked.push_back(call);
        Ok(self.next_call)
    }

    /// A map as a plugin may read it now. `None`: it is not there.
    pub(super) fn fields(&mut self, kind: MapKind) -> Option<&Fields> {
        match kind {
            MapKind::CallHeaders => self.call_answer.as_ref().map(|answer| &answer.headers),
            MapKind::CallTrailers => self.call_answer.as_ref().map(|answer| &answer.trailers),
            _ => self.stream().and_then(|stream| stream.map(kind)).map(|map| &map.fields),
        }
    }

    /// A map as a plugin may change it now.
    pub(super) fn fields_mut(&mut self, kind: MapKind) -> Result<&mut Fields, Status> {
        let map = self.stream().and_then(|stream| stream.map_mut(kind)).ok_or(Status::BadArgument)?;
        if !map.open {
            return Err(Status::BadArgument);
        }
        map.changed = true;
        Ok(&mut map.fields)
    }
}

/// Entries of all tables of a module.
const TABLE_ELEMENTS_MAX: usize = 20_000;

/// Bounds what a machine may hold; growing beyond is refused, which the plugin sees as an allocation that fails.
#[derive(Debug)]
pub(super) struct Limiter {
    memory_bytes_max: usize,
    /// Memory was refused: the machine is worn out.
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

    /// Sets it.
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
    /// What is in it.
    pub fields: Fields,
    /// A change still has an effect.
    pub open: bool,
    /// A plugin has changed it.
    pub changed: bool,
}

/// A body, or the piece of it that is at hand.
#[derive(Debug, Default)]
pub struct Buffer {
    /// What is in it.
    pub bytes: Bytes,
    /// A plugin has changed it.
    pub changed: bool,
}

impl Buffer {
    /// Puts `value` in the place of `size` bytes from `start`: at the end if `start` is behind it, in front if both are 0.
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
    /// What properties are read from.
    pub facts: Facts,
    /// What the plugin has set.
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
    /// What is at hand of the answer's body.
    pub response_body: Option<Buffer>,
    /// The plugin has the request wait.
    pub request_paused: bool,
    /// The plugin has the answer wait.
    pub response_paused: bool,
    /// The plugin wants the stream closed.
    pub closed: bool,
    /// The plugin's own answer.
    pub local: Option<LocalResponse>,
    /// Nobody takes a local response any more.
    pub committed: bool,
    /// `proxy_on_done` said "not yet".
    pub lingering: bool,
    /// `proxy_done` was called after that.
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

/// An answer that a plugin gives in place of an upstream's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalResponse {
    /// Status code.
    pub status: u16,
    /// Why, for the log.
    pub details: String,
    /// Headers besides those of framing.
    pub headers: Fields,
    /// Body.
    pub body: Bytes,
}

/// A request that a plugin wants sent.
#[derive(Clone, Debug)]
pub struct Call {
    /// By which it is answered.
    pub id: u32,
    /// Context that asked.
    pub origin: u32,
    /// Name of the upstream, as in the plugin's settings.
    pub upstream: String,
    /// Headers, pseudo headers included.
    pub headers: Fields,
    /// Body.
    pub body: Bytes,
    /// When it must have been answered.
    pub timeout_ms: u32,
}

/// What came of a call. No headers: it failed.
#[derive(Clone, Debug, Default)]
pub struct CallAnswer {
    /// `:status` and the rest.
    pub headers: Fields,
    /// Trailers.
    pub trailers: Fields,
    /// Body.
    pub body: Bytes,
}
