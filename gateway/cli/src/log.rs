//! Log of a process: standard error, one line per event. The filter can be changed while the process runs.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use penstock_admin::LogFilter;
use tracing_subscriber::EnvFilter;

/// Crates of a gateway and a worker, to which a bare level applies; libraries log from `warn` on unless the filter
/// names them.
const OURS: [&str; 4] = ["penstock", "penstock_proxy", "penstock_admin", "penstock_worker"];

/// Function that puts a filter into the subscriber.
type Apply = Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>;

/// Filter in force.
pub(crate) struct Filter {
    text: Mutex<String>,
    apply: Apply,
}

impl LogFilter for Filter {
    fn get(&self) -> String {
        self.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, filter: &str) -> Result<(), String> {
        let parsed = parse(filter).map_err(|error| format!("{error:#}"))?;
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        (self.apply)(parsed)?;
        filter.clone_into(&mut text);
        Ok(())
    }
}

/// Starts logging with a filter in tracing's syntax.
pub(crate) fn start(filter: &str) -> anyhow::Result<Filter> {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(parse(filter)?)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // Where the log cannot be written (its disk is full), the message about that would panic in the logging thread.
        .log_internal_errors(false)
        .with_filter_reloading();
    let handle = builder.reload_handle();
    builder.try_init().map_err(|error| anyhow::anyhow!("logging: {error}"))?;
    let apply = move |new: EnvFilter| handle.reload(new).map_err(|error| error.to_string());
    Ok(Filter { text: Mutex::new(filter.to_owned()), apply: Box::new(apply) })
}

/// Checks that a filter can be used.
pub(crate) fn check(filter: &str) -> anyhow::Result<()> {
    parse(filter).map(drop)
}

/// Filter of a text; a bare level applies to our own crates only.
fn parse(filter: &str) -> anyhow::Result<EnvFilter> {
    if filter.trim().is_empty() || filter.split(',').any(|directive| directive.trim_end().ends_with('=')) {
        anyhow::bail!("log level {filter:?}: a directive has no level (error, warn, info, debug, trace, off)");
    }
    let full = if filter.contains(['=', ',']) {
        filter.to_owned()
    } else {
        OURS.iter().fold("warn".to_owned(), |full, name| format!("{full},{name}={filter}"))
    };
    EnvFilter::try_new(&full).with_context(|| format!("log level {filter:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_directives_are_filters() {
        for good in ["info", "debug", "warn,penstock_proxy=trace", "off"] {
            assert!(parse(good).is_ok(), "{good}");
        }
        for bad in ["loud", "penstock=loud", "=,=", "nonsense=", "info,x= ", ""] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_bad_filter_changes_nothing() {
        let filter = Filter { text: Mutex::new("info".into()), apply: Box::new(|_| Ok(())) };
        assert!(filter.set("loud").is_err());
        assert_eq!(filter.get(), "info");
        assert_eq!(filter.set("debug").map(|()| filter.get()), Ok("debug".into()));
    }
}
