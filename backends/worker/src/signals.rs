//! Signals of a worker: those that end it, and those meant for the gateway.
//!
//! A worker lives as long as a gateway wants it, and its memory is lost with it. SIGTERM, SIGINT and SIGQUIT ask for
//! its end; SIGHUP, SIGUSR1 and SIGUSR2, whose default is the end of the process, are ignored: people send them to
//! reload a config or to rotate logs, and mean the gateway. Rust's runtime ignores SIGPIPE.

use crate::WorkerError;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::warn;

/// Handlers of the signals that end a worker and of those it ignores.
pub(crate) struct Signals {
    ends: [Signal; 3],
    ignored: [Signal; 3],
}

/// Names of the ignored signals, in the order of [`Signals::ignored`].
const IGNORED: [&str; 3] = ["SIGHUP", "SIGUSR1", "SIGUSR2"];

impl Signals {
    /// Catches the signals from now on; called inside a runtime.
    ///
    /// # Errors
    /// The operating system refuses to let them be caught.
    pub(crate) fn catch() -> Result<Self, WorkerError> {
        let catch = |kind: SignalKind| {
            signal(kind).map_err(|source| WorkerError::Os { what: "catching signals".into(), source })
        };
        let ends = [catch(SignalKind::terminate())?, catch(SignalKind::interrupt())?, catch(SignalKind::quit())?];
        let ignored =
            [catch(SignalKind::hangup())?, catch(SignalKind::user_defined1())?, catch(SignalKind::user_defined2())?];
        Ok(Self { ends, ignored })
    }

    /// Resolves when a signal asks for the end. Cancel-safe: a signal that comes between two calls is heard by the second.
    pub(crate) async fn end(&mut self) {
        let ([term, interrupt, quit], [hangup, first, second]) = (&mut self.ends, &mut self.ignored);
        loop {
            let ignored = tokio::select! {
                _ = term.recv() => return,
                _ = interrupt.recv() => return,
                _ = quit.recv() => return,
                _ = hangup.recv() => 0,
                _ = first.recv() => 1,
                _ = second.recv() => 2,
            };
            warn!(signal = IGNORED[ignored], "signal ignored: a worker has no config file; reload the gateway instead");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal as Which, getpid, kill_process};
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_signal_for_the_gateway_does_not_end_a_worker() {
        let mut signals = Signals::catch().expect("signals can be caught");
        // An uncaught one would end the process of this test here.
        for which in [Which::HUP, Which::USR1, Which::USR2] {
            kill_process(getpid(), which).expect("own process");
        }
        let heard = timeout(Duration::from_millis(50), signals.end()).await;
        assert!(heard.is_err(), "none of these asks for the end");
        kill_process(getpid(), Which::QUIT).expect("own process");
        timeout(Duration::from_secs(60), signals.end()).await.expect("SIGQUIT asks for the end");
    }
}
