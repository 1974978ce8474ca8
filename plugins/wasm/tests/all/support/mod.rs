//! Modules written as text, and requests for them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use penstock_plugins::testing::FakeHost;
use penstock_plugins::{Host, HttpAnswer, HttpAsk};
use penstock_wasm::host::{Facts, Fields, Identity, LogLevel, Machine, Map, Program, Runtime, Stream};
use penstock_wasm::{Limits, WasmError};

/// Every function of the ABI with its parameters: `i` is an i32, `l` an i64.
pub(crate) const FUNCTIONS: &[(&str, &str)] = &[
    ("proxy_log", "iii"),
    ("proxy_get_log_level", "i"),
    ("proxy_get_current_time_nanoseconds", "i"),
    ("proxy_set_tick_period_milliseconds", "i"),
    ("proxy_get_property", "iiii"),
    ("proxy_set_property", "iiii"),
    ("proxy_define_metric", "iiii"),
    ("proxy_increment_metric", "il"),
    ("proxy_record_metric", "il"),
    ("proxy_get_metric", "ii"),
    ("proxy_call_foreign_function", "iiiiii"),
    ("proxy_get_buffer_bytes", "iiiii"),
    ("proxy_get_buffer_status", "iii"),
    ("proxy_set_buffer_bytes", "iiiii"),
    ("proxy_get_header_map_size", "ii"),
    ("proxy_get_header_map_pairs", "iii"),
    ("proxy_set_header_map_pairs", "iii"),
    ("proxy_get_header_map_value", "iiiii"),
    ("proxy_add_header_map_value", "iiiii"),
    ("proxy_replace_header_map_value", "iiiii"),
    ("proxy_remove_header_map_value", "iii"),
    ("proxy_continue_stream", "i"),
    ("proxy_close_stream", "i"),
    ("proxy_send_local_response", "iiiiiiii"),
    ("proxy_get_status", "iii"),
    ("proxy_http_call", "iiiiiiiiii"),
    ("proxy_done", ""),
    ("proxy_set_effective_context", "i"),
    ("proxy_clear_route_cache", ""),
    ("proxy_set_shared_data", "iiiii"),
    ("proxy_get_shared_data", "iiiii"),
    ("proxy_register_shared_queue", "iii"),
    ("proxy_resolve_shared_queue", "iiiii"),
    ("proxy_enqueue_shared_queue", "iii"),
    ("proxy_dequeue_shared_queue", "iii"),
    ("proxy_grpc_call", "iiiiiiiiiiii"),
    ("proxy_grpc_stream", "iiiiiiiii"),
    ("proxy_grpc_send", "iiii"),
    ("proxy_grpc_cancel", "i"),
    ("proxy_grpc_close", "i"),
];

/// Every function of WASI that is used, with its parameters.
pub(crate) const WASI: &[(&str, &str)] = &[
    ("args_sizes_get", "ii"),
    ("args_get", "ii"),
    ("environ_sizes_get", "ii"),
    ("environ_get", "ii"),
    ("clock_time_get", "ili"),
    ("clock_res_get", "ii"),
    ("random_get", "ii"),
    ("fd_write", "iiii"),
    ("fd_read", "iiii"),
    ("path_open", "iiiiillii"),
    ("sched_yield", ""),
];

/// Imports of all these functions, each under its own name.
pub(crate) fn imports() -> String {
    let line = |module: &str, (name, parameters): &(&str, &str)| {
        let types: Vec<_> = parameters.chars().map(|kind| if kind == 'l' { "i64" } else { "i32" }).collect();
        format!("(import \"{module}\" \"{name}\" (func ${name} (param {}) (result i32)))\n", types.join(" "))
    };
    let env = FUNCTIONS.iter().map(|function| line("env", function));
    let wasi = WASI.iter().map(|function| line("wasi_snapshot_preview1", function));
    env.chain(wasi).collect::<String>()
        + "(import \"wasi_snapshot_preview1\" \"proc_exit\" (func $proc_exit (param i32)))\n"
}

/// Module with two pages of memory, an allocator that only goes up, and `code`. `$report` notes a number, `$tell` some
/// bytes; `$answer` sends the notes as a local response, by which a test sees them.
pub(crate) fn module(code: &str) -> Vec<u8> {
    let text = format!(
        r#"(module
        {imports}
        (memory (export "memory") 2)
        (global $heap (mut i32) (i32.const 65536))
        (global $at (mut i32) (i32.const 32768))
        (func (export "proxy_abi_version_0_2_1"))
        (func $allocate (export "malloc") (param $size i32) (result i32)
            (global.get $heap)
            (global.set $heap (i32.add (global.get $heap) (local.get $size))))
        (func $report (param $number i32)
            (i32.store (global.get $at) (local.get $number))
            (global.set $at (i32.add (global.get $at) (i32.const 4))))
        (func $tell (param $from i32) (param $size i32)
            (memory.copy (global.get $at) (local.get $from) (local.get $size))
            (global.set $at (i32.add (global.get $at) (local.get $size))))
        (func $told_bytes (param $out i32)
            (call $tell (i32.load (local.get $out)) (i32.load offset=4 (local.get $out))))
        (func $answer
            (drop (call $proxy_send_local_response (i32.const 200) (i32.const 0) (i32.const 0) (i32.const 32768)
                (i32.sub (global.get $at) (i32.const 32768)) (i32.const 0) (i32.const 0) (i32.const -1))))
        {code})"#,
        imports = imports()
    );
    wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// Settings of a plugin that may call `auth`.
pub(crate) fn identity() -> Identity {
    Identity {
        name: "test".into(),
        root_id: "root".into(),
        vm_id: "vm".into(),
        vm_config: Bytes::from_static(b"vm config"),
        plugin_config: Bytes::from_static(b"plugin config"),
        upstreams: vec!["auth".into()],
        limits: Limits::default(),
        log: LogLevel::Info,
    }
}

pub(crate) fn host() -> Arc<dyn Host> {
    let host = FakeHost { now: Mutex::new(Duration::from_nanos(1_234_567_890)), ..FakeHost::default() };
    Arc::new(host)
}

/// A host whose endpoints answer by `http`.
pub(crate) fn host_with(http: impl Fn(&str, &HttpAsk) -> HttpAnswer + Send + Sync + 'static) -> Arc<FakeHost> {
    Arc::new(FakeHost { http: Some(Box::new(move |url, ask| Ok(http(url, ask)))), ..FakeHost::default() })
}

pub(crate) fn compile(bytes: &[u8]) -> Result<Arc<Program>, WasmError> {
    Runtime::new()?.compile(bytes, identity())
}

/// A plugin of a kit that registers its root context without a name.
pub(crate) fn compile_sdk(bytes: &[u8]) -> Result<Arc<Program>, WasmError> {
    Runtime::new()?.compile(bytes, Identity { root_id: String::new(), ..identity() })
}

pub(crate) fn start(bytes: &[u8]) -> Result<Machine, WasmError> {
    Machine::start(&*compile(bytes)?, Some(host()))
}

/// Request as the gateway shows it.
pub(crate) fn stream() -> Stream {
    let mut fields = Fields::default();
    for (name, value) in [(":method", "POST"), (":path", "/v1/chat/completions"), ("x-a", "1"), ("x-a", "2")] {
        fields.push(name, value);
    }
    let info = penstock_plugins::testing::request(
        penstock_types::Surface::Chat,
        &serde_json::json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        host(),
    )
    .info;
    let facts = Facts { info: Some(info), model: "m".into(), ..Facts::default() };
    Stream { facts, request_headers: Map { fields, open: true, changed: false }, ..Stream::default() }
}

/// Runs `code` as `proxy_on_request_headers` and returns its notes.
#[track_caller]
pub(crate) fn noted(data: &str, code: &str) -> Vec<u8> {
    let text = format!(
        "{data} (func (export \"proxy_on_request_headers\") (param $context i32) (param $count i32) (param $end i32) (result i32)
         (local $i i32) {code} (call $answer) (i32.const 1))"
    );
    let mut machine = start(&module(&text)).unwrap();
    let context = machine.create(stream()).unwrap();
    machine.request_headers(context, true).unwrap();
    machine.stream(context).unwrap().local.take().expect("an answer").body.to_vec()
}

/// Numbers and bytes as `$report` and `$tell` note them.
pub(crate) fn expected(items: &[Item]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for item in items {
        match item {
            Item::Number(number) => bytes.extend_from_slice(&number.to_le_bytes()),
            Item::Text(text) => bytes.extend_from_slice(text),
        }
    }
    bytes
}

#[derive(Clone, Copy)]
pub(crate) enum Item {
    Number(u32),
    Text(&'static [u8]),
}
