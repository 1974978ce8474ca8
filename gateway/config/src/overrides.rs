//! Options of the command line that stand above the config file.

use std::path::PathBuf;

use super::AdapterConfig;

/// Command line options; each takes precedence over the file.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Address and port of the listener (`--listen`), for `server.listen`.
    pub listen: Option<String>,
    /// Checkpoint folder, GGUF file or name of a stored model of the pool (`--model`), for `pools.model`.
    pub model: Option<PathBuf>,
    /// Adapters of the pool's model (`--adapter`), for `pools.adapters`: each wins over the file's of the same name.
    pub adapters: Vec<AdapterConfig>,
    /// Model name in requests (`--name`).
    pub name: Option<String>,
    /// Number of worker processes of the pool (`--workers`).
    pub workers: Option<usize>,
    /// Threads per worker (`--threads`).
    pub threads: Option<usize>,
    /// Device of the workers (`--device`): auto, cpu, cuda or reference.
    pub device: Option<String>,
    /// Format to which matrices are rounded (`--quantize`), for `pools.quantize`.
    pub quantize: Option<String>,
    /// Form of keys and values (`--kv-format`), for `pools.kv_format`.
    pub kv_format: Option<String>,
    /// CPU instruction set of the workers (`--path`).
    pub path: Option<String>,
    /// Longest sequence in tokens (`--context`).
    pub context_tokens: Option<u32>,
    /// Folder for sockets, leases and logs (`--state-dir`), for `server.state_dir`.
    pub state_dir: Option<PathBuf>,
    /// Folder of pulled models (`--models-dir`), for `hub.folder`.
    pub models_dir: Option<PathBuf>,
    /// Log level or filter directives (`--log`), for `log.level`.
    pub log_level: Option<String>,
    /// Destination of the access log (`--access-log`), for `log.access`.
    pub access_log: Option<String>,
    /// Address of the admin API (`--admin`), for `admin.listen`.
    pub admin: Option<String>,
}
