//! Any bytes as a WebAssembly module, started on trial as in a config check: it runs within its bounds or is refused.
//! The first line of the input is its configuration.

use std::sync::OnceLock;

use penstock_wasm::Limits;
use penstock_wasm::host::{Identity, LogLevel, Machine, Runtime};

use crate::split_line;

pub(crate) fn run(bytes: &[u8]) {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| Runtime::new().expect("a compiler for this processor"));
    let (config, module) = split_line(bytes);
    let identity = Identity {
        name: "fuzz".into(),
        root_id: String::new(),
        vm_id: String::new(),
        vm_config: Default::default(),
        plugin_config: config.to_vec().into(),
        upstreams: Vec::new(),
        log: LogLevel::Critical,
        limits: Limits::default(),
    };
    if let Ok(program) = runtime.compile(module, identity) {
        let _ = Machine::start(&program, None);
    }
}
