//! Kind `wasm`: reads settings and starts the module on trial, so that a module that cannot run, and settings that the
//! plugin itself refuses, are faults of the config and not of the first request.

use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use penstock_plugins::{Kind, Plugin, Settings};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::abi::LogLevel;
use super::machine::Machine;
use super::plugin::{WasmPlugin, Wishes};
use super::program::{Program, Runtime};
use super::state::Identity;
use crate::{Limits, WasmError};

/// Largest settings of the plugin itself, in bytes.
const CONFIG_BYTES_MAX: usize = 1 << 20;

/// Instance of the kind in this process.
pub static KIND: WasmKind = WasmKind::new();

/// Kind `wasm`, with the compiler.
pub struct WasmKind {
    runtime: OnceLock<Result<Runtime, WasmError>>,
}

impl WasmKind {
    /// Kind whose compiler is made at its first use.
    pub const fn new() -> Self {
        Self { runtime: OnceLock::new() }
    }

    /// Compiler and shared state, made at the first use.
    ///
    /// # Errors
    /// The compiler does not support this processor.
    pub fn runtime(&self) -> Result<&Runtime, WasmError> {
        self.runtime.get_or_init(Runtime::new).as_ref().map_err(Clone::clone)
    }

    fn load(&self, module: &[u8], pin: Option<&str>, identity: Identity) -> Result<(Arc<Program>, u32), WasmError> {
        if let Some(pin) = pin {
            check_digest(module, pin)?;
        }
        let program = self.runtime()?.compile(module, identity)?;
        // On trial: what it does is thrown away.
        let machine = Machine::start(&program, None)?;
        let period = machine.tick_period_ms();
        Ok((program, period))
    }
}

impl Default for WasmKind {
    fn default() -> Self {
        Self::new()
    }
}

impl Kind for WasmKind {
    fn name(&self) -> &'static str {
        crate::NAME
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let limits = read_limits(settings);
        let pin = settings.text("sha256");
        let upstreams = settings.endpoints("upstreams");
        let wishes = Wishes { request_body: settings.flag("request_body", true), answer: read_answer(settings) };
        let identity = Identity {
            name: settings.text("name").unwrap_or_else(|| crate::NAME.into()),
            root_id: settings.text("root_id").unwrap_or_default(),
            vm_id: settings.text("vm_id").unwrap_or_default(),
            vm_config: read_config(settings, "vm_config"),
            plugin_config: read_config(settings, "config"),
            upstreams: upstreams.iter().map(|(name, _)| name.clone()).collect(),
            log: read_log(settings),
            limits,
        };
        let bytes_max = identity.limits.module_bytes_max;
        let module = settings.needed_file("file", bytes_max)?;
        match self.load(&module, pin.as_deref(), identity) {
            Ok((program, period)) => {
                if !program.unknown().is_empty() {
                    let unknown = program.unknown().join(" ");
                    tracing::debug!(
                        plugin = program.identity().name,
                        unknown,
                        "plugin imports functions that are stubs here: every call of them fails"
                    );
                }
                let period = Duration::from_millis(period.into());
                Some(Arc::new(WasmPlugin::new(program, upstreams, wishes, period, revision(&module))))
            }
            Err(error) => {
                let key = if matches!(error, WasmError::Digest { .. }) { "sha256" } else { "file" };
                settings.fault(key, error.to_string());
                None
            }
        }
    }
}

fn read_limits(settings: &Settings<'_>) -> Limits {
    let default = Limits::default();
    let size = |name, range, default: usize| settings.number(name, range, default as u64) as usize;
    Limits {
        module_bytes_max: size("module_bytes_max", 8..=256 << 20, default.module_bytes_max),
        memory_bytes_max: size("memory_bytes_max", 64 << 10..=4 << 30, default.memory_bytes_max),
        fuel: settings.number("fuel", 10_000..=10_000_000_000, default.fuel),
        instances: size("instances", 1..=64, default.instances),
        streams_max: size("streams_max", 1..=1_000_000, default.streams_max),
        body_bytes_max: size("body_bytes_max", 1..=256 << 20, default.body_bytes_max),
        pause: settings.millis("pause_ms_max", 1..=600_000, default.pause.as_millis() as u64),
    }
}

/// Setting of the part of an answer that the plugin sees.
fn read_answer(settings: &Settings<'_>) -> super::plugin::Shown {
    use super::plugin::Shown;
    settings.word("answer", &[("body", Shown::Body), ("headers", Shown::Headers), ("none", Shown::Nothing)])
}

fn read_log(settings: &Settings<'_>) -> LogLevel {
    let levels = [
        ("info", LogLevel::Info),
        ("trace", LogLevel::Trace),
        ("debug", LogLevel::Debug),
        ("warn", LogLevel::Warn),
        ("error", LogLevel::Error),
        ("critical", LogLevel::Critical),
    ];
    settings.word("log", &levels)
}

/// Settings of the plugin as bytes: text as it is, anything else as JSON.
fn read_config(settings: &Settings<'_>, name: &str) -> Bytes {
    let bytes = match settings.json(name) {
        None => return Bytes::new(),
        Some(Value::String(text)) => Bytes::copy_from_slice(text.as_bytes()),
        Some(value) => value.to_string().into(),
    };
    if bytes.len() > CONFIG_BYTES_MAX {
        settings.fault(name, format!("has {} bytes, of {CONFIG_BYTES_MAX} allowed", bytes.len()));
    }
    bytes
}

fn check_digest(module: &[u8], pin: &str) -> Result<(), WasmError> {
    let mut found = String::with_capacity(64);
    for byte in Sha256::digest(module) {
        // Writing to a String cannot fail.
        let _ = write!(found, "{byte:02x}");
    }
    if found.eq_ignore_ascii_case(pin) { Ok(()) } else { Err(WasmError::Digest { found }) }
}

/// Number that tells modules apart: the first 8 bytes of the digest.
fn revision(module: &[u8]) -> u64 {
    Sha256::digest(module).iter().take(8).fold(0, |revision, byte| revision << 8 | u64::from(*byte))
}
