//! The log of a process: standard error, one line per event.

use std::io::IsTerminal;

use anyhow::Context;
use tracing_subscriber::EnvFilter;

/// Starts logging with a filter in tracing's syntax. Libraries log from `warn` on unless the filter names them.
pub(crate) fn start(filter: &str) -> anyhow::Result<()> {
    let level_only = !filter.contains(['=', ',']);
    let full = if level_only {
        format!("warn,penstock={filter},penstock_proxy={filter},penstock_worker={filter}")
    } else {
        filter.to_owned()
    };
    let filter = EnvFilter::try_new(&full).with_context(|| format!("log level {filter:?}"))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .try_init()
        .map_err(|error| anyhow::anyhow!("logging: {error}"))
}
