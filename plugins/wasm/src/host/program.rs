//! Compilation of a module into a program that machines run.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use wasmtime::{Config, Engine, InstancePre, Linker, Module, OptLevel, Strategy};

use super::abi::AbiVersion;
use super::calls;
use super::shared::{Shared, SharedById};
use super::state::{Identity, State};
use crate::WasmError;

/// Stack of a plugin, in bytes. It lies on the calling thread's stack, which has two megabytes.
const STACK_BYTES: usize = 256 << 10;

/// Compiler, and the state that all plugins of a process share.
pub struct Runtime {
    engine: Engine,
    linker: Linker<State>,
    shared: SharedById,
    machines: Arc<AtomicUsize>,
}

impl Runtime {
    /// Makes the compiler, which takes less than a millisecond.
    ///
    /// # Errors
    /// The compiler cannot make code for this processor.
    pub fn new() -> Result<Self, WasmError> {
        let engine = Engine::new(&config()).map_err(|error| WasmError::Engine { reason: plain(&error) })?;
        let mut linker = Linker::new(&engine);
        calls::define(&mut linker).map_err(|error| WasmError::Engine { reason: plain(&error) })?;
        Ok(Self { engine, linker, shared: SharedById::default(), machines: Arc::default() })
    }

    /// Number of machines of all plugins, with those of replaced plugins that have not finished.
    pub fn machines(&self) -> usize {
        self.machines.load(Ordering::Relaxed)
    }

    /// Compiles a module. A development build takes 8 ms per kB of it.
    ///
    /// # Errors
    /// The bytes are no module, or the module needs an import that does not exist here.
    pub fn compile(&self, bytes: &[u8], identity: Identity) -> Result<Arc<Program>, WasmError> {
        let bytes_max = identity.limits.module_bytes_max;
        if bytes.len() > bytes_max {
            return Err(WasmError::TooLarge { bytes: bytes.len(), bytes_max });
        }
        // A text would be compiled too if the feature were on anywhere in the build.
        if !bytes.starts_with(b"\0asm") {
            return Err(WasmError::Invalid { reason: "it does not begin as a WebAssembly module does".into() });
        }
        let module =
            Module::from_binary(&self.engine, bytes).map_err(|error| WasmError::Invalid { reason: plain(&error) })?;
        let version = AbiVersion::of(module.exports().map(|export| export.name()))?;
        if module.get_export("memory").and_then(|export| export.memory().cloned()).is_none() {
            return Err(WasmError::Export { name: "memory" });
        }
        let mut linker = self.linker.clone();
        let unknown = calls::define_unknown(&mut linker, &module)?;
        let pre = linker.instantiate_pre(&module).map_err(|error| WasmError::Invalid { reason: plain(&error) })?;
        let shared = self.shared.of(&identity.vm_id);
        let machines = self.machines.clone();
        Ok(Arc::new(Program { pre, version, unknown, identity: Arc::new(identity), shared, machines }))
    }
}

/// Compiled module with the settings that it is started with.
pub struct Program {
    pub(super) pre: InstancePre<State>,
    pub(super) identity: Arc<Identity>,
    pub(super) shared: Arc<Shared>,
    pub(super) machines: Arc<AtomicUsize>,
    version: AbiVersion,
    unknown: Vec<String>,
}

impl Program {
    /// ABI version that the module speaks.
    pub fn version(&self) -> AbiVersion {
        self.version
    }

    /// Imported functions that do not exist here and only answer so.
    pub fn unknown(&self) -> &[String] {
        &self.unknown
    }

    /// Settings of the plugin.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Values of the plugin's own metrics.
    pub fn metrics(&self) -> Vec<super::Metric> {
        self.shared.metrics()
    }

    /// Returns true if the module has this callback.
    pub fn has(&self, callback: &str) -> bool {
        self.pre.module().get_export(callback).is_some_and(|export| export.func().is_some())
    }
}

fn config() -> Config {
    let mut config = Config::new();
    config.strategy(Strategy::Cranelift);
    config.cranelift_opt_level(OptLevel::Speed);
    config.consume_fuel(true);
    config.max_wasm_stack(STACK_BYTES);
    // No backtrace: collecting one would cost time at every trap.
    config.wasm_backtrace_max_frames(None);
    config.wasm_memory64(false);
    config.wasm_multi_memory(false);
    config.wasm_relaxed_simd(false);
    config.wasm_tail_call(false);
    config
}

/// Message of a compiler or a linker as one line.
pub(super) fn plain(error: &wasmtime::Error) -> String {
    let text = format!("{error:#}");
    let line = text.lines().next().unwrap_or_default();
    line.chars().take(300).collect()
}
