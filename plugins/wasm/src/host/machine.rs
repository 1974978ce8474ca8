//! One virtual machine: the callbacks in their order, each with its own fuel. A machine is of no use after an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use penstock_plugins::Host;
use wasmtime::{Instance, Store, Trap, TypedFunc, WasmParams, WasmResults};

use super::abi::Action;
use super::calls::wasi::Exit;
use super::fields::Fields;
use super::program::{Program, plain};
use super::state::{Buffer, Call, CallAnswer, Map, ROOT, State, Stream};
use crate::WasmError;

/// Fuel for the start as a multiple of a callback's: languages with a runtime of their own set it up there.
const START_FUEL: u64 = 20;
/// Fuel per byte of a body that a callback is shown: the cost of reading JSON.
const FUEL_PER_BYTE: u64 = 32;
/// Most contexts that a plugin may keep after their requests ended.
const LINGERING_MAX: usize = 256;

/// Virtual machine with its contexts.
pub struct Machine {
    store: Store<State>,
    callbacks: Callbacks,
    fuel: u64,
    next_context: u32,
    /// Contexts whose requests have ended and which the plugin still wants, oldest first.
    lingering: Vec<u32>,
    // Counted as long as it lives.
    _counted: Counted,
}

struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Table of callbacks, a line each: field, name, parameters, result.
macro_rules! callbacks {
    ($($field:ident $name:literal $parameters:ty => $result:ty;)*) => {
        struct Callbacks { $($field: Option<TypedFunc<$parameters, $result>>,)* }

        impl Callbacks {
            fn of(instance: &Instance, store: &mut Store<State>) -> Result<Self, WasmError> {
                Ok(Self { $($field: find(instance, store, $name)?,)* })
            }
        }
    };
}

callbacks! {
    initialize "_initialize" () => ();
    start "_start" () => ();
    main "main" (u32, u32) => u32;
    memory_allocate "proxy_on_memory_allocate" u32 => u32;
    malloc "malloc" u32 => u32;
    context_create "proxy_on_context_create" (u32, u32) => ();
    vm_start "proxy_on_vm_start" (u32, u32) => u32;
    configure "proxy_on_configure" (u32, u32) => u32;
    tick "proxy_on_tick" u32 => ();
    queue_ready "proxy_on_queue_ready" (u32, u32) => ();
    request_headers "proxy_on_request_headers" (u32, u32, u32) => u32;
    request_body "proxy_on_request_body" (u32, u32, u32) => u32;
    request_trailers "proxy_on_request_trailers" (u32, u32) => u32;
    response_headers "proxy_on_response_headers" (u32, u32, u32) => u32;
    response_body "proxy_on_response_body" (u32, u32, u32) => u32;
    response_trailers "proxy_on_response_trailers" (u32, u32) => u32;
    call_response "proxy_on_http_call_response" (u32, u32, u32, u32, u32) => ();
    done "proxy_on_done" u32 => u32;
    log "proxy_on_log" u32 => ();
    delete "proxy_on_delete" u32 => ();
}

fn find<P: WasmParams, R: WasmResults>(
    instance: &Instance,
    store: &mut Store<State>,
    name: &'static str,
) -> Result<Option<TypedFunc<P, R>>, WasmError> {
    let Some(function) = instance.get_func(&mut *store, name) else { return Ok(None) };
    // A program's `main` that is not the ABI's is nobody's to call.
    match function.typed(&*store) {
        Ok(function) => Ok(Some(function)),
        Err(_) if name == "main" => Ok(None),
        Err(_) => Err(WasmError::Export { name }),
    }
}

impl Machine {
    /// Makes a machine and has the plugin read its settings. Without a host this is a trial: no clock, no calls, and shared
    /// state of its own, so that what it does is thrown away.
    ///
    /// # Errors
    /// The plugin breaks, or refuses its settings.
    pub fn start(program: &Program, host: Option<Arc<dyn Host>>) -> Result<Self, WasmError> {
        let identity = program.identity.clone();
        let fuel = identity.limits.fuel;
        let shared = if host.is_some() { program.shared.clone() } else { Arc::default() };
        let state = State::new(identity, shared, host);
        let mut store = Store::new(program.pre.module().engine(), state);
        store.limiter(|state| &mut state.limiter);
        store.set_fuel(fuel.saturating_mul(START_FUEL)).map_err(|error| broken("start", &error))?;
        let instance = program.pre.instantiate(&mut store).map_err(|error| broken("start", &error))?;
        let callbacks = Callbacks::of(&instance, &mut store)?;
        store.data_mut().memory = instance.get_memory(&mut store, "memory");
        store.data_mut().allocate = callbacks.memory_allocate.clone().or(callbacks.malloc.clone());
        program.machines.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(program.machines.clone());
        let mut machine = Self { store, callbacks, fuel, next_context: ROOT, lingering: Vec::new(), _counted: counted };
        machine.initialize()?;
        machine.configure()?;
        Ok(machine)
    }

    fn initialize(&mut self) -> Result<(), WasmError> {
        let extra = self.fuel.saturating_mul(START_FUEL);
        if let Some(initialize) = self.callbacks.initialize.clone() {
            self.call("_initialize", Some(initialize), ROOT, (), extra)?;
            self.call("main", self.callbacks.main.clone(), ROOT, (0, 0), extra)?;
        } else if let Err(error) = self.call("_start", self.callbacks.start.clone(), ROOT, (), extra) {
            // A command that has ended well has also started.
            if !matches!(error, WasmError::Exit { code: 0, .. }) {
                return Err(error);
            }
        }
        self.call("proxy_on_context_create", self.callbacks.context_create.clone(), ROOT, (ROOT, 0), extra).map(drop)
    }

    fn configure(&mut self) -> Result<(), WasmError> {
        let extra = self.fuel.saturating_mul(START_FUEL);
        let identity = self.store.data().identity.clone();
        let sizes = [identity.vm_config.len(), identity.plugin_config.len()];
        let [vm, plugin] = sizes.map(|size| u32::try_from(size).unwrap_or(u32::MAX));
        let started = self.call("proxy_on_vm_start", self.callbacks.vm_start.clone(), ROOT, (ROOT, vm), extra)?;
        if started == Some(0) {
            return Err(WasmError::Refused { callback: "proxy_on_vm_start" });
        }
        let configured =
            self.call("proxy_on_configure", self.callbacks.configure.clone(), ROOT, (ROOT, plugin), extra)?;
        if configured == Some(0) {
            return Err(WasmError::Refused { callback: "proxy_on_configure" });
        }
        Ok(())
    }

    /// Runs one callback, if the module has it.
    fn call<P: WasmParams, R: WasmResults>(
        &mut self,
        name: &'static str,
        function: Option<TypedFunc<P, R>>,
        context: u32,
        parameters: P,
        extra_fuel: u64,
    ) -> Result<Option<R>, WasmError> {
        let Some(function) = function else { return Ok(None) };
        let fuel = self.fuel.saturating_add(extra_fuel);
        self.store.set_fuel(fuel).map_err(|error| broken(name, &error))?;
        self.store.data_mut().begin(context);
        function.call(&mut self.store, parameters).map(Some).map_err(|error| broken(name, &error))
    }

    /// Sets the host that gives clock and random bits.
    pub fn attend(&mut self, host: Option<Arc<dyn Host>>) {
        self.store.data_mut().host = host;
    }

    /// Creates the context of a request.
    ///
    /// # Errors
    /// The plugin broke, as in every callback.
    pub fn create(&mut self, stream: Stream) -> Result<u32, WasmError> {
        let streams = &self.store.data().streams;
        let mut context = self.next_context;
        loop {
            context = context.wrapping_add(1).max(ROOT + 1);
            if !streams.contains_key(&context) {
                break;
            }
        }
        self.next_context = context;
        self.store.data_mut().streams.insert(context, stream);
        self.call("proxy_on_context_create", self.callbacks.context_create.clone(), context, (context, ROOT), 0)?;
        Ok(context)
    }

    /// State that is kept of a request.
    pub fn stream(&mut self, context: u32) -> Option<&mut Stream> {
        self.store.data_mut().streams.get_mut(&context)
    }

    fn known(&mut self, context: u32) -> Result<&mut Stream, WasmError> {
        self.stream(context).ok_or(WasmError::Gone)
    }

    /// Shows the request's headers.
    pub fn request_headers(&mut self, context: u32, end: bool) -> Result<Action, WasmError> {
        let count = self.known(context)?.request_headers.fields.len() as u32;
        let function = self.callbacks.request_headers.clone();
        let action = self.call("proxy_on_request_headers", function, context, (context, count, end.into()), 0)?;
        self.acted(context, action, |stream| &mut stream.request_paused)
    }

    /// Shows a piece of the request's body, behind the pieces that were held.
    pub fn request_body(&mut self, context: u32, bytes: Bytes, end: bool) -> Result<Action, WasmError> {
        let size = bytes.len();
        let stream = self.known(context)?;
        stream.facts.request_bytes += size as u64;
        let size = join(&mut stream.request_body, bytes);
        let function = self.callbacks.request_body.clone();
        let extra = fuel_of(size);
        let action = self.call("proxy_on_request_body", function, context, (context, size, end.into()), extra)?;
        self.acted(context, action, |stream| &mut stream.request_paused)
    }

    /// Shows the request's trailers.
    pub fn request_trailers(&mut self, context: u32, trailers: Fields) -> Result<Action, WasmError> {
        let count = trailers.len() as u32;
        self.known(context)?.request_trailers = Some(Map { fields: trailers, open: true, changed: false });
        let function = self.callbacks.request_trailers.clone();
        let action = self.call("proxy_on_request_trailers", function, context, (context, count), 0)?;
        self.acted(context, action, |stream| &mut stream.request_paused)
    }

    /// Shows the answer's headers. `open`: changing them still has an effect.
    pub fn response_headers(&mut self, context: u32, fields: Fields, open: bool) -> Result<Action, WasmError> {
        let count = fields.len() as u32;
        let stream = self.known(context)?;
        stream.request_headers.open = false;
        stream.response_headers = Some(Map { fields, open, changed: false });
        let function = self.callbacks.response_headers.clone();
        let action = self.call("proxy_on_response_headers", function, context, (context, count, 0), 0)?;
        self.acted(context, action, |stream| &mut stream.response_paused)
    }

    /// Shows a piece of the answer, behind the pieces that were held.
    pub fn response_body(&mut self, context: u32, bytes: Bytes, end: bool) -> Result<Action, WasmError> {
        let stream = self.known(context)?;
        stream.facts.response_bytes += bytes.len() as u64;
        let size = join(&mut stream.response_body, bytes);
        let extra = fuel_of(size);
        let function = self.callbacks.response_body.clone();
        let action = self.call("proxy_on_response_body", function, context, (context, size, end.into()), extra)?;
        self.acted(context, action, |stream| &mut stream.response_paused)
    }

    /// Shows the answer's trailers.
    pub fn response_trailers(&mut self, context: u32, trailers: Fields) -> Result<Action, WasmError> {
        let count = trailers.len() as u32;
        self.known(context)?.response_trailers = Some(Map { fields: trailers, open: true, changed: false });
        let function = self.callbacks.response_trailers.clone();
        let action = self.call("proxy_on_response_trailers", function, context, (context, count), 0)?;
        self.acted(context, action, |stream| &mut stream.response_paused)
    }

    /// Notes whether the stream waits: the callback's result decides, whatever was resumed within it.
    fn acted(
        &mut self,
        context: u32,
        action: Option<u32>,
        paused: impl FnOnce(&mut Stream) -> &mut bool,
    ) -> Result<Action, WasmError> {
        let action = action.map_or(Action::Continue, Action::from_wire);
        *paused(self.known(context)?) = action == Action::Pause;
        Ok(action)
    }

    /// Shows the answer to a call of the plugin's own.
    pub fn call_answered(&mut self, call: u32, answer: CallAnswer) -> Result<(), WasmError> {
        let sizes = [answer.headers.len(), answer.body.len(), answer.trailers.len()];
        let [headers, body, trailers] = sizes.map(|size| u32::try_from(size).unwrap_or(u32::MAX));
        let state = self.store.data_mut();
        state.calls_open = state.calls_open.saturating_sub(1);
        state.call_answer = Some(answer);
        let function = self.callbacks.call_response.clone();
        let parameters = (ROOT, call, headers, body, trailers);
        let told = self.call("proxy_on_http_call_response", function, ROOT, parameters, fuel_of(body));
        self.store.data_mut().call_answer = None;
        told.map(drop)
    }

    /// Takes the calls that the plugin has asked for since.
    pub fn take_calls(&mut self) -> Vec<Call> {
        let state = self.store.data_mut();
        state.calls_open += state.asked.len();
        state.asked.drain(..).collect()
    }

    /// Returns true if something can still resume a waiting request: the timer, or an answer to any call.
    pub fn may_wake(&self) -> bool {
        let state = self.store.data();
        state.tick_period_ms > 0 || state.calls_open > 0 || !state.asked.is_empty()
    }

    /// Period of the plugin's timer, in milliseconds; 0: no timer.
    pub fn tick_period_ms(&self) -> u32 {
        self.store.data().tick_period_ms
    }

    /// Runs the timer's callback.
    pub fn tick(&mut self) -> Result<(), WasmError> {
        self.call("proxy_on_tick", self.callbacks.tick.clone(), ROOT, ROOT, 0).map(drop)
    }

    /// Notifies of queues with new items, and removes contexts that the plugin is done with.
    pub fn settle(&mut self) -> Result<(), WasmError> {
        let state = self.store.data();
        for queue in state.shared.take_ready(&state.queues) {
            self.call("proxy_on_queue_ready", self.callbacks.queue_ready.clone(), ROOT, (ROOT, queue), 0)?;
        }
        self.reap()
    }

    /// Ends the context of a request.
    pub fn finish(&mut self, context: u32) -> Result<(), WasmError> {
        if self.stream(context).is_none() {
            return Ok(());
        }
        let done = self.call("proxy_on_done", self.callbacks.done.clone(), context, context, 0)?;
        if done == Some(0) {
            self.known(context)?.lingering = true;
            self.lingering.push(context);
            return self.reap();
        }
        self.delete(context)
    }

    fn delete(&mut self, context: u32) -> Result<(), WasmError> {
        self.call("proxy_on_log", self.callbacks.log.clone(), context, context, 0)?;
        self.call("proxy_on_delete", self.callbacks.delete.clone(), context, context, 0)?;
        self.store.data_mut().streams.remove(&context);
        Ok(())
    }

    /// Removes contexts that lingered and are done, and the oldest where too many linger.
    fn reap(&mut self) -> Result<(), WasmError> {
        let mut at = 0;
        while at < self.lingering.len() {
            let context = self.lingering[at];
            let done = self.stream(context).is_none_or(|stream| stream.done);
            if done || self.lingering.len() > LINGERING_MAX {
                self.lingering.remove(at);
                self.delete(context)?;
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Returns true if memory was refused: a machine's memory never shrinks, so it should get no new requests.
    pub fn worn_out(&self) -> bool {
        self.store.data().limiter.refused
    }

    /// Bytes of the plugin's memory.
    pub fn memory_bytes(&self) -> usize {
        self.store.data().memory.map_or(0, |memory| memory.data_size(&self.store))
    }

    /// Number of contexts.
    pub fn contexts(&self) -> usize {
        self.store.data().streams.len()
    }
}

/// Appends to the held bytes; returns their number.
fn join(buffer: &mut Option<Buffer>, bytes: Bytes) -> u32 {
    let buffer = buffer.get_or_insert_default();
    if buffer.bytes.is_empty() {
        buffer.bytes = bytes;
    } else if !bytes.is_empty() {
        let mut all = Vec::with_capacity(buffer.bytes.len() + bytes.len());
        all.extend_from_slice(&buffer.bytes);
        all.extend_from_slice(&bytes);
        buffer.bytes = all.into();
    }
    u32::try_from(buffer.bytes.len()).unwrap_or(u32::MAX)
}

fn fuel_of(bytes: u32) -> u64 {
    u64::from(bytes) * FUEL_PER_BYTE
}

fn broken(callback: &'static str, error: &wasmtime::Error) -> WasmError {
    if let Some(Exit(code)) = error.downcast_ref::<Exit>() {
        return WasmError::Exit { callback, code: *code };
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::OutOfFuel) => WasmError::Fuel { callback },
        Some(trap) => WasmError::Trap { callback, reason: trap.to_string() },
        None => WasmError::Trap { callback, reason: plain(error) },
    }
}
