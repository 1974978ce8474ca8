//! Functions that a plugin may call, and the one table that names them.
//!
//! Each function returns a status and writes its other results where the plugin points. A pointer out of the plugin's
//! memory is answered `INVALID_MEMORY_ACCESS`.

mod buffers;
mod headers;
mod shared;
mod streams;
mod system;
pub(super) mod wasi;

use wasmtime::{Caller, ExternType, FuncType, Linker, Module, Val, ValType};

use super::abi::{Answer, Fail, Status};
use super::memory::Guest;
use super::state::State;
use crate::WasmError;

/// Runs a host function's body and returns its status.
fn told(caller: &mut Caller<'_, State>, body: impl FnOnce(&mut Guest<'_, '_>) -> Answer) -> wasmtime::Result<u32> {
    match Guest::enter(caller).and_then(|mut guest| body(&mut guest)) {
        Ok(()) => Ok(Status::Ok as u32),
        Err(Fail::Told(status)) => Ok(status as u32),
        Err(Fail::Trap(error)) => Err(error),
    }
}

/// Table of functions, a line each: name in the plugin's imports, arguments, body.
macro_rules! functions {
    ($linker:ident, $module:expr, $told:path, { $($name:literal ($($argument:ident: $type:ty),*) => $body:path;)* }) => {
        $($linker.func_wrap($module, $name, |mut caller: Caller<'_, State>, $($argument: $type),*| -> wasmtime::Result<u32> {
            $told(&mut caller, |guest| $body(guest, $($argument),*))
        })?;)*
    };
}
use functions;

/// Defines all functions of the ABI and of WASI that exist here.
///
/// # Errors
/// Two functions have one name, which cannot happen for a fresh linker.
pub(super) fn define(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    functions!(linker, "env", told, {
        "proxy_log" (level: u32, text: u32, size: u32) => system::log;
        "proxy_get_log_level" (out: u32) => system::log_level;
        "proxy_get_current_time_nanoseconds" (out: u32) => system::time;
        "proxy_set_tick_period_milliseconds" (period: u32) => system::set_tick_period;
        "proxy_get_property" (path: u32, size: u32, out: u32, out_size: u32) => system::get_property;
        "proxy_set_property" (path: u32, size: u32, value: u32, value_size: u32) => system::set_property;
        "proxy_define_metric" (kind: u32, name: u32, size: u32, out: u32) => system::define_metric;
        "proxy_increment_metric" (metric: u32, delta: i64) => system::increment_metric;
        "proxy_record_metric" (metric: u32, value: u64) => system::record_metric;
        "proxy_get_metric" (metric: u32, out: u32) => system::get_metric;
        "proxy_call_foreign_function" (name: u32, size: u32, value: u32, value_size: u32, out: u32, out_size: u32) => system::foreign;

        "proxy_get_buffer_bytes" (buffer: u32, start: u32, size: u32, out: u32, out_size: u32) => buffers::get;
        "proxy_get_buffer_status" (buffer: u32, out_size: u32, out_flags: u32) => buffers::status;
        "proxy_set_buffer_bytes" (buffer: u32, start: u32, size: u32, value: u32, value_size: u32) => buffers::set;

        "proxy_get_header_map_size" (map: u32, out_size: u32) => headers::size;
        "proxy_get_header_map_pairs" (map: u32, out: u32, out_size: u32) => headers::get_all;
        "proxy_set_header_map_pairs" (map: u32, pairs: u32, size: u32) => headers::set_all;
        "proxy_get_header_map_value" (map: u32, name: u32, size: u32, out: u32, out_size: u32) => headers::get;
        "proxy_add_header_map_value" (map: u32, name: u32, size: u32, value: u32, value_size: u32) => headers::add;
        "proxy_replace_header_map_value" (map: u32, name: u32, size: u32, value: u32, value_size: u32) => headers::replace;
        "proxy_remove_header_map_value" (map: u32, name: u32, size: u32) => headers::remove;

        "proxy_continue_stream" (stream: u32) => streams::go_on;
        "proxy_close_stream" (stream: u32) => streams::close;
        "proxy_send_local_response" (status: u32, details: u32, details_size: u32, body: u32, body_size: u32, pairs: u32, pairs_size: u32, grpc: u32) => streams::answer;
        "proxy_get_status" (out_code: u32, out: u32, out_size: u32) => streams::status;
        "proxy_http_call" (upstream: u32, upstream_size: u32, pairs: u32, pairs_size: u32, body: u32, body_size: u32, trailers: u32, trailers_size: u32, timeout: u32, out: u32) => streams::http_call;
        "proxy_done" () => streams::done;
        "proxy_set_effective_context" (context: u32) => streams::set_effective;
        "proxy_clear_route_cache" () => streams::clear_route_cache;

        "proxy_set_shared_data" (key: u32, size: u32, value: u32, value_size: u32, cas: u32) => shared::set;
        "proxy_get_shared_data" (key: u32, size: u32, out: u32, out_size: u32, out_cas: u32) => shared::get;
        "proxy_register_shared_queue" (name: u32, size: u32, out: u32) => shared::register;
        "proxy_resolve_shared_queue" (vm: u32, vm_size: u32, name: u32, size: u32, out: u32) => shared::resolve;
        "proxy_enqueue_shared_queue" (queue: u32, value: u32, value_size: u32) => shared::enqueue;
        "proxy_dequeue_shared_queue" (queue: u32, out: u32, out_size: u32) => shared::dequeue;
    });
    for module in wasi::MODULES {
        wasi::define(linker, module)?;
    }
    Ok(())
}

/// Defines stubs for unknown imports where their type allows it: a function that returns one `i32` answers
/// `UNIMPLEMENTED` (`ENOSYS` or `EBADF` in WASI). Kits import more than a plugin uses, above all gRPC and other hosts'
/// additions.
///
/// # Errors
/// The name of an import whose type allows no stub.
pub(super) fn define_unknown(linker: &mut Linker<State>, module: &Module) -> Result<Vec<String>, WasmError> {
    let mut unknown = Vec::new();
    for import in module.imports() {
        let (from, name) = (import.module(), import.name());
        let ExternType::Func(kind) = import.ty() else { return Err(import_error(from, name)) };
        let Some(answer) = unknown_answer(from, name, &kind) else {
            if name == "proc_exit" && wasi::MODULES.contains(&from) {
                continue;
            }
            return Err(import_error(from, name));
        };
        let defined = linker.func_new(from, name, kind, move |_, _, results| {
            results[0] = Val::I32(answer);
            Ok(())
        });
        // The linker refuses a second definition: then it is a function that exists.
        if defined.is_ok() {
            unknown.push(format!("{from}.{name}"));
        }
    }
    Ok(unknown)
}

fn unknown_answer(module: &str, name: &str, kind: &FuncType) -> Option<i32> {
    let one = kind.results().len() == 1 && matches!(kind.result(0), Some(ValType::I32));
    match module {
        "env" if one && name.starts_with("proxy_") => Some(Status::Unimplemented as i32),
        _ if one && wasi::MODULES.contains(&module) => Some(wasi::unknown(name)),
        _ => None,
    }
}

fn import_error(module: &str, name: &str) -> WasmError {
    WasmError::Import { module: module.to_owned(), name: name.to_owned() }
}
