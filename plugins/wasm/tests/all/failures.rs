//! Plugins that break, lie, or want too much: the host goes on, and reports the failure.

use crate::support;

use penstock_wasm::WasmError;
use penstock_wasm::host::{AbiVersion, Machine, Runtime};
use support::{compile, host, identity, module, noted, start, stream};

/// Runs `code` as `proxy_on_request_headers`.
#[track_caller]
fn broken(code: &str) -> WasmError {
    let text = format!(
        "(func $recurse (param i32) (call $recurse (i32.add (local.get 0) (i32.const 1))))
         (func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32) (local $i i32) {code} (i32.const 0))"
    );
    let mut machine = start(&module(&text)).unwrap();
    let context = machine.create(stream()).unwrap();
    machine.request_headers(context, true).expect_err("it breaks")
}

#[track_caller]
fn trapped(code: &str, word: &str) {
    let error = broken(code);
    assert!(matches!(&error, WasmError::Trap { callback: "proxy_on_request_headers", .. }), "{error:?}");
    assert!(error.to_string().contains(word), "{error}");
}

const OUT_OF_FUEL: WasmError = WasmError::Fuel { callback: "proxy_on_request_headers" };

#[test]
fn traps_are_told_apart() {
    trapped("unreachable", "unreachable");
    trapped("(drop (i32.load (i32.const -1)))", "out of bounds memory");
    trapped("(drop (i32.div_u (i32.const 1) (i32.const 0)))", "divide by zero");
    trapped("(call $recurse (i32.const 0))", "call stack exhausted");
}

#[test]
fn a_plugin_that_ends_itself_has_broken() {
    let error = broken("(call $proc_exit (i32.const 3))");
    assert_eq!(error, WasmError::Exit { callback: "proxy_on_request_headers", code: 3 });
}

#[test]
fn loops_end() {
    assert_eq!(broken("(loop $again (br $again))"), OUT_OF_FUEL);
    // Loops of calls to the host, of large copies, of refused growth.
    assert_eq!(broken("(loop $again (drop (call $proxy_clear_route_cache)) (br $again))"), OUT_OF_FUEL);
    assert_eq!(
        broken("(loop $again (memory.fill (i32.const 0) (i32.const 0) (i32.const 131072)) (br $again))"),
        OUT_OF_FUEL
    );
    assert_eq!(broken("(loop $again (drop (memory.grow (i32.const 1000))) (br $again))"), OUT_OF_FUEL);
    let log = "(loop $again (drop (call $proxy_log (i32.const 2) (i32.const 0) (i32.const 60000))) (br $again))";
    assert_eq!(broken(log), OUT_OF_FUEL);
}

#[test]
fn a_loop_at_the_start_is_a_fault_of_the_config() {
    let start_function = "(func $run (loop $again (br $again))) (start $run)";
    assert!(matches!(start(&module(start_function)), Err(WasmError::Fuel { callback: "start" })));
    let initialize = "(func (export \"_initialize\") (loop $again (br $again)))";
    assert!(matches!(start(&module(initialize)), Err(WasmError::Fuel { callback: "_initialize" })));
}

#[test]
fn memory_has_a_bound_that_the_plugin_sees() {
    // 15 MiB more are given, 16 MiB are not.
    let grow = "(call $report (memory.grow (i32.const 240))) (call $report (memory.grow (i32.const 256)))";
    let expected = [2_u32.to_le_bytes(), u32::MAX.to_le_bytes()].concat();
    assert_eq!(noted("", grow), expected);
}

#[test]
fn a_machine_whose_memory_ran_out_is_worn_out() {
    let text = "(func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32)
        (drop (memory.grow (i32.const 4096))) (i32.const 0))";
    let mut machine = start(&module(text)).unwrap();
    let context = machine.create(stream()).unwrap();
    assert!(!machine.worn_out());
    machine.request_headers(context, true).unwrap();
    assert!(machine.worn_out());
}

#[test]
fn a_module_that_needs_more_memory_than_there_is_does_not_start() {
    let bytes =
        wat::parse_str("(module (memory (export \"memory\") 1000) (func (export \"proxy_abi_version_0_2_1\")))")
            .unwrap();
    assert!(matches!(start(&bytes), Err(WasmError::Trap { callback: "start", .. })));
}

#[test]
fn an_allocator_that_lies_harms_nobody() {
    let allocators = [("(i32.const -1)", 6_u32), ("(i32.const 0)", 10), ("(i32.const 131071)", 6)];
    for (pointer, status) in allocators {
        let text = format!(
            "(module (import \"env\" \"proxy_get_buffer_bytes\" (func $get (param i32 i32 i32 i32 i32) (result i32)))
             (import \"env\" \"proxy_send_local_response\" (func $respond (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
             (memory (export \"memory\") 2) (func (export \"proxy_abi_version_0_2_0\"))
             (func (export \"proxy_on_memory_allocate\") (param i32) (result i32) {pointer})
             (func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32)
                (i32.store (i32.const 0) (call $get (i32.const 7) (i32.const 0) (i32.const 99) (i32.const 16) (i32.const 20)))
                (drop (call $respond (i32.const 200) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 4) (i32.const 0) (i32.const 0) (i32.const 0)))
                (i32.const 0)))"
        );
        let mut machine = start(&wat::parse_str(text).unwrap()).unwrap();
        let context = machine.create(stream()).unwrap();
        machine.request_headers(context, true).unwrap();
        let body = machine.stream(context).unwrap().local.take().unwrap().body;
        assert_eq!(&body[..], status.to_le_bytes(), "{pointer}");
    }
}

#[test]
fn an_allocator_that_never_ends_runs_out_of_fuel() {
    let text =
        "(module (import \"env\" \"proxy_get_buffer_bytes\" (func $get (param i32 i32 i32 i32 i32) (result i32)))
        (memory (export \"memory\") 1) (func (export \"proxy_abi_version_0_2_0\"))
        (func (export \"malloc\") (param i32) (result i32) (loop $again (br $again)) unreachable)
        (func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32)
            (call $get (i32.const 7) (i32.const 0) (i32.const 99) (i32.const 16) (i32.const 20))))";
    let mut machine = start(&wat::parse_str(text).unwrap()).unwrap();
    let context = machine.create(stream()).unwrap();
    assert_eq!(machine.request_headers(context, true), Err(OUT_OF_FUEL));
}

#[track_caller]
fn refused(text: &str) -> WasmError {
    compile(&wat::parse_str(text).unwrap()).err().expect("it is refused")
}

const MARK: &str = "(func (export \"proxy_abi_version_0_2_1\")) (memory (export \"memory\") 1)";

#[test]
fn modules_that_cannot_run_are_refused_before_they_do() {
    assert_eq!(refused("(module (memory (export \"memory\") 1))"), WasmError::Abi { found: None });
    let old = "(module (memory (export \"memory\") 1) (func (export \"proxy_abi_version_0_1_0\")))";
    assert_eq!(refused(old), WasmError::Abi { found: Some("proxy_abi_version_0_1_0".into()) });
    assert_eq!(refused("(module (func (export \"proxy_abi_version_0_2_0\")))"), WasmError::Export { name: "memory" });
    let import = |module: &str, name: &str| WasmError::Import { module: module.into(), name: name.into() };
    assert_eq!(
        refused(&format!("(module (import \"env\" \"system\" (func (param i32) (result i32))) {MARK})")),
        import("env", "system")
    );
    assert_eq!(
        refused(&format!("(module (import \"env\" \"proxy_new\" (func (param i32))) {MARK})")),
        import("env", "proxy_new")
    );
    assert_eq!(refused(&format!("(module (import \"env\" \"g\" (global i32)) {MARK})")), import("env", "g"));
    let signature = refused(&format!("(module (import \"env\" \"proxy_log\" (func (param i64) (result i32))) {MARK})"));
    assert!(matches!(signature, WasmError::Invalid { .. }), "{signature:?}");
    assert!(matches!(compile(b"not a module"), Err(WasmError::Invalid { .. })));
    assert!(matches!(compile(b"\0asm\x01\0\0\0garbage"), Err(WasmError::Invalid { .. })));
    assert!(matches!(compile(b"(module)"), Err(WasmError::Invalid { .. })));
    let component = b"\0asm\x0d\0\x01\0";
    assert!(matches!(compile(component), Err(WasmError::Invalid { .. })));
    let memory64 = format!("(module (memory i64 1) {MARK})");
    assert!(matches!(refused(&memory64), WasmError::Invalid { .. }));
}

#[test]
fn a_module_has_a_largest_size() {
    let mut identity = identity();
    identity.limits.module_bytes_max = 100;
    let error = Runtime::new().unwrap().compile(&[0; 101], identity).err();
    assert_eq!(error, Some(WasmError::TooLarge { bytes: 101, bytes_max: 100 }));
}

#[test]
fn a_callback_with_other_parameters_is_refused() {
    let bytes = wat::parse_str(format!("(module {MARK} (func (export \"proxy_on_tick\") (param i64)))")).unwrap();
    assert!(matches!(start(&bytes), Err(WasmError::Export { name: "proxy_on_tick" })));
}

#[test]
fn a_module_without_any_callback_does_nothing() {
    let program = compile(&wat::parse_str(format!("(module {MARK})")).unwrap()).unwrap();
    assert_eq!(program.version(), AbiVersion::V0_2_1);
    let mut machine = Machine::start(&program, Some(host())).unwrap();
    let context = machine.create(stream()).unwrap();
    machine.request_headers(context, false).unwrap();
    machine.request_body(context, "x".into(), true).unwrap();
    machine.finish(context).unwrap();
    assert_eq!(machine.contexts(), 0);
}

#[test]
fn a_plugin_that_refuses_its_settings_is_not_started() {
    for callback in ["proxy_on_vm_start", "proxy_on_configure"] {
        let text = format!("(module {MARK} (func (export \"{callback}\") (param i32 i32) (result i32) (i32.const 0)))");
        let error = start(&wat::parse_str(text).unwrap()).err().unwrap();
        assert_eq!(error, WasmError::Refused { callback });
    }
}

#[test]
fn a_command_that_has_ended_well_has_started() {
    let run = |code: u32| {
        let text = format!("(func (export \"_start\") (call $proc_exit (i32.const {code})))");
        start(&module(&text)).map(drop)
    };
    assert_eq!(run(0), Ok(()));
    assert_eq!(run(1), Err(WasmError::Exit { callback: "_start", code: 1 }));
}

#[test]
fn machines_are_counted_and_gone_when_dropped() {
    let runtime = Runtime::new().unwrap();
    let program = runtime.compile(&module(""), identity()).unwrap();
    let machines: Vec<_> = (0..3).map(|_| Machine::start(&program, Some(host())).unwrap()).collect();
    assert_eq!(runtime.machines(), 3);
    drop(machines);
    assert_eq!(runtime.machines(), 0);
}
