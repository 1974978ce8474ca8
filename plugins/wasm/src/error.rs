//! Errors of plugins that are WebAssembly. The texts are for logs and for the author of the config: nothing of requests
//! or answers is in them.

/// Reason why a plugin cannot be used, or has stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WasmError {
    /// This build has no host.
    #[error("this penstock was built without WebAssembly; build it with --features wasm")]
    Absent,
    /// The compiler does not work here.
    #[error("WebAssembly cannot be compiled here: {reason}")]
    Engine {
        /// Message of the compiler.
        reason: String,
    },
    /// The module is larger than allowed.
    #[error("the module has {bytes} bytes, of {bytes_max} allowed (module_bytes_max)")]
    TooLarge {
        /// Size of the module.
        bytes: usize,
        /// Bound of the size.
        bytes_max: usize,
    },
    /// The module is not the one that was pinned.
    #[error("the module's SHA-256 is {found}, not the one that is pinned")]
    Digest {
        /// Digest of the module in hexadecimal.
        found: String,
    },
    /// The bytes are no module that can run here.
    #[error("not a module that can run here: {reason}")]
    Invalid {
        /// Message of the compiler.
        reason: String,
    },
    /// The module does not speak a version of the ABI that is spoken here.
    #[error("the module does not declare proxy-wasm 0.2.0 or 0.2.1{}", .found.as_ref().map(|found| format!(" but {found}")).unwrap_or_default())]
    Abi {
        /// Versions that the module speaks.
        found: Option<String>,
    },
    /// An export is missing, or has other parameters than the ABI says.
    #[error("the module's export {name} is missing or has other parameters than the ABI says")]
    Export {
        /// Name of the export.
        name: &'static str,
    },
    /// The module needs something that is not here.
    #[error("the module imports {module}.{name}, which does not exist here")]
    Import {
        /// Module name of the import.
        module: String,
        /// Name of the import.
        name: String,
    },
    /// The plugin says that its settings are wrong.
    #[error("the plugin refused its settings ({callback} returned false; its log may say why)")]
    Refused {
        /// Callback that returned false.
        callback: &'static str,
    },
    /// The plugin used up its instructions.
    #[error("the plugin used up its fuel in {callback}")]
    Fuel {
        /// Callback in which the fuel ran out.
        callback: &'static str,
    },
    /// The plugin broke.
    #[error("the plugin broke in {callback}: {reason}")]
    Trap {
        /// Callback that broke.
        callback: &'static str,
        /// Reason of the trap.
        reason: String,
    },
    /// The plugin ended itself.
    #[error("the plugin ended itself in {callback} with code {code}")]
    Exit {
        /// Callback in which the plugin ended itself.
        callback: &'static str,
        /// Exit code.
        code: u32,
    },
    /// All machines have as many requests as they may.
    #[error("all instances of the plugin serve {streams_max} requests already (streams_max)")]
    Busy {
        /// Bound of requests per instance.
        streams_max: usize,
    },
    /// The plugin broke again and again.
    #[error("the plugin broke so often that it is not started for some seconds")]
    Crashing,
    /// The machine in which the request was is no more.
    #[error("the instance of the plugin in which the request was has broken")]
    Gone,
    /// The plugin has a request wait, and nothing is under way that could resume it.
    #[error("the plugin paused and nothing is under way that could resume it")]
    Stuck,
    /// The plugin has an answer wait at its headers, and is shown nothing more of it.
    #[error(
        "the plugin paused an answer at its headers, but is not shown the body: nothing could resume the answer later"
    )]
    PausedHead,
    /// The plugin had a request wait too long.
    #[error("the plugin paused for longer than pause_ms_max")]
    Paused,
}
