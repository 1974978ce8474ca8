//! Any bytes as a module with its configuration, started on trial as for a config that is checked: it runs within its bounds or is refused.
#![no_main]

use std::sync::OnceLock;

use penstock_wasm::Limits;
use penstock_wasm::host::{Identity, LogLevel, Machine, Runtime};

libfuzzer_sys::fuzz_target!(|input: (&[u8], &[u8])| {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| Runtime::new().expect("a compiler for this processor"));
    let identity = Identity {
        name: "fuzz".into(),
        root_id: String::new(),
        vm_id: String::new(),
        vm_config: Default::default(),
        plugin_config: input.1.to_vec().into(),
        upstreams: Vec::new(),
        log: LogLevel::Critical,
        limits: Limits::default(),
    };
    if let Ok(program) = runtime.compile(input.0, identity) {
        let _ = Machine::start(&program, None);
    }
});
