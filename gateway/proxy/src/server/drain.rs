//! End of the process: by a signal, or because another process serves.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use pingora_core::server::{ShutdownSignal, ShutdownSignalWatch};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::Listeners;
use crate::gateway::{Beside, Gateway};
use crate::upgrade;

/// Polling interval for the end of the answers in progress.
const LOOK: Duration = Duration::from_millis(20);
/// Longest time for error replies to requests whose grace time is over.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);
/// Longest time in which background work is settled and handed on: the store may be away.
const HAND_ON_MAX: Duration = Duration::from_secs(2);
/// Longest time in which the entries of requests that were ended are saved.
const SAVE_MAX: Duration = Duration::from_secs(2);
/// Longest time in which claims on work that was not ended are released.
const RELEASE_MAX: Duration = Duration::from_secs(1);
/// Longest time for the last settled reservations to reach the next process.
const TELL_MAX: Duration = Duration::from_secs(10);

/// Signals that end the server: SIGTERM, SIGQUIT and the first SIGINT drain, a second SIGINT ends at once. A call of
/// [`Leave::now`] drains too.
pub(super) struct Signals {
    pub(super) gateway: Arc<Gateway>,
    pub(super) listeners: Arc<Listeners>,
    pub(super) socket: Option<PathBuf>,
    pub(super) leave: Leave,
    /// Signal streams; `None`: a task listens to them already.
    pub(super) stops: Mutex<Option<Stops>>,
    /// Callback for the moment when a signal asks for the end: [`super::Hooks::ending`].
    pub(super) ending: Arc<dyn Fn() + Send + Sync>,
    pub(super) drained: Arc<dyn Fn() + Send + Sync>,
}

impl Signals {
    /// Stops accepting, and tells the manager and whatever serves beside the listeners. True if a signal has ended the server, and
    /// no other process serves.
    fn begin(&self) -> bool {
        let is_signal = !self.gateway.is_leaving();
        self.listeners.close();
        if is_signal {
            (self.ending)();
            upgrade::notify_manager("STOPPING=1");
            if let Some(path) = &self.socket {
                // A client that connects from now on gets an error at once. The socket's file may be gone already.
                let _ = std::fs::remove_file(path);
            }
        }
        is_signal
    }
}

/// Streams of SIGTERM, SIGQUIT and SIGINT. Before they are made, these signals end the process at once; from then on
/// they wait to be read. SIGUSR1 and SIGUSR2, on which other servers rotate their logs, end nothing.
pub struct Stops {
    terminate: Signal,
    quit: Signal,
    interrupt: Signal,
    users: [Signal; 2],
}

impl Stops {
    /// Catches the signals; to be called before anybody is told that something is served here.
    ///
    /// # Errors
    /// The system does not let the signals be caught.
    pub fn catch() -> std::io::Result<Self> {
        // The streams are only registered on this runtime; any runtime can await them.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let _inside = runtime.enter();
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            quit: signal(SignalKind::quit())?,
            interrupt: signal(SignalKind::interrupt())?,
            users: [signal(SignalKind::user_defined1())?, signal(SignalKind::user_defined2())?],
        })
    }

    /// Waits for the next signal that ends the server; others are logged and ignored.
    async fn next(&mut self) -> Stop {
        let [first, second] = &mut self.users;
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return Stop::Drain,
                _ = self.quit.recv() => return Stop::Drain,
                _ = self.interrupt.recv() => return Stop::Interrupt,
                _ = first.recv() => tracing::warn!(signal = "SIGUSR1", "signal ignored"),
                _ = second.recv() => tracing::warn!(signal = "SIGUSR2", "signal ignored"),
            }
        }
    }
}

/// Kind of end that a signal asks for.
enum Stop {
    /// Drain: nothing more is accepted, and answers in progress may end.
    Drain,
    /// Drain, from the terminal; the second such signal ends the process at once.
    Interrupt,
}

/// Switch that lets the process end when its answers have, because another one serves.
#[derive(Clone, Default)]
pub struct Leave(Arc<Notify>);

impl Leave {
    /// Lets the process end: accepting stops, and answers in progress go on to their end.
    pub fn now(&self) {
        self.0.notify_one();
    }
}

#[async_trait]
impl ShutdownSignalWatch for Signals {
    async fn recv(&self) -> ShutdownSignal {
        let stops = self.stops.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut stops) = stops else { return std::future::pending().await };
        tokio::select! {
            _ = stops.next() => {}
            () = self.leave.0.notified() => {}
        }
        let hurry = Arc::new(AtomicBool::new(self.begin()));
        let drain = Drain { gateway: self.gateway.clone(), hurry: hurry.clone(), drained: self.drained.clone() };
        // Pingora sleeps through the whole grace time on this thread; this one leaves as soon as nothing is in flight.
        std::thread::spawn(move || drain.run());
        let (gateway, ending) = (self.gateway.clone(), self.ending.clone());
        tokio::spawn(async move { impatience(&mut stops, &hurry, &gateway, &*ending).await });
        ShutdownSignal::GracefulTerminate
    }
}

/// Handles signals during a drain: hurries it, and whatever serves beside the listeners, or ends the process.
async fn impatience(stops: &mut Stops, hurry: &AtomicBool, gateway: &Gateway, ending: &(dyn Fn() + Send + Sync)) {
    loop {
        match stops.next().await {
            Stop::Drain => {
                hurry.store(true, Ordering::Relaxed);
                ending();
            }
            Stop::Interrupt => {
                gateway.flush_logs();
                std::process::exit(130);
            }
        }
    }
}

/// Waits until something is done, for at most `max`; false if it is not.
fn wait(max: Duration, mut is_done: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + max;
    loop {
        if is_done() {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::park_timeout(LOOK);
    }
}

struct Drain {
    gateway: Arc<Gateway>,
    /// True once a signal has asked for the end: `server.grace_ms` counts from then on.
    hurry: Arc<AtomicBool>,
    drained: Arc<dyn Fn() + Send + Sync>,
}

impl Drain {
    fn run(&self) {
        let (gateway, began) = (&self.gateway, Instant::now());
        tracing::info!(
            in_flight = gateway.metrics.in_flight_now(),
            leaving = gateway.is_leaving(),
            "gateway is draining: no new connections are accepted"
        );
        // What waits is another gateway's, or the next process's; what runs may end for as long as clients are answered.
        gateway.begin_no_work();
        // Connections accepted a moment ago get their first request answered.
        let settle = Duration::from_millis(200).min(gateway.serving().config.grace);
        let mut hurried = None;
        loop {
            let (grace, since) = if self.hurry.load(Ordering::Relaxed) {
                (gateway.serving().config.grace, *hurried.get_or_insert_with(Instant::now))
            } else {
                (gateway.serving().config.upgrade_grace, began)
            };
            if since.elapsed() >= grace || began.elapsed() >= settle && self.is_done() {
                break;
            }
            std::thread::park_timeout(LOOK);
        }
        self.last_words();
        self.end_background();
        self.save();
        gateway.governor.keep();
        wait(TELL_MAX, || gateway.is_rested(Beside::Settling) && gateway.is_rested(Beside::Upgrade));
        self.release_claims();
        (self.drained)();
        std::process::exit(0);
    }

    /// Lets another process begin the batches and background responses that did not end here at once.
    fn release_claims(&self) {
        let Some(keeper) = self.gateway.keeper() else { return };
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        if !matches!(runtime.block_on(async { timeout(RELEASE_MAX, keeper.claims.close()).await }), Ok(Ok(()))) {
            tracing::debug!("claims on batches and background responses could not be released: they lapse");
        }
    }

    /// Ends the answers that are left with an error that says why; each leaves its line in the log.
    fn last_words(&self) {
        wait(LAST_WORDS_MAX, || {
            let is_done = self.gateway.metrics.in_flight_now() == 0;
            if !is_done {
                self.gateway.live.stop();
            }
            is_done
        });
    }

    /// Ends the batches and background responses that run here. Each settles its reservation with what it has used; what
    /// was answered is stored, and the rest is begun again by whoever serves next.
    fn end_background(&self) {
        if !wait(HAND_ON_MAX, || self.gateway.stop_work()) {
            tracing::warn!(
                "batches or background responses did not end in time: another gateway, or the next start, begins them again, and what they used may be charged as the amount reserved"
            );
        }
    }

    /// Waits for the last entries and objects to be saved: an entry that is lost counts with the whole amount reserved.
    fn save(&self) {
        if !wait(SAVE_MAX, || self.gateway.is_saved()) {
            tracing::warn!(
                "the store does not answer: ledger entries or stored objects of the last requests are not saved, and usage without its entry is charged as the amount reserved"
            );
        }
    }

    /// Returns true if the drain is complete. After an upgrade the process waits for its connections too: their clients may
    /// send another request, and are told to connect elsewhere next.
    fn is_done(&self) -> bool {
        let gateway = &self.gateway;
        let alone =
            !gateway.is_leaving() || gateway.metrics.connections_now() == 0 && gateway.is_rested(Beside::Batches);
        // Asked last: from then on nothing is kept back for requests that may still come.
        gateway.metrics.in_flight_now() == 0 && alone && gateway.is_saved()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use penstock_config::{Overrides, load};
    use penstock_telemetry::AccessLog;

    use super::*;

    /// A server at its begin, and the number of times that those beside it were told of the end.
    fn signals() -> (Signals, Arc<AtomicUsize>) {
        let overrides = Overrides { listen: Some("127.0.0.1:0".into()), ..Overrides::default() };
        let mut config = load(None, &overrides, &|_| None).expect("the default");
        let listeners = Arc::new(Listeners::bind(&mut config, PathBuf::new(), None).expect("a free port"));
        let log = AccessLog::open("off").expect("nothing is opened");
        let gateway = Arc::new(Gateway::new(config, log, Vec::new(), Vec::new()));
        let told = Arc::new(AtomicUsize::new(0));
        let count = told.clone();
        let ending = Arc::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        let (leave, stops, drained) = (Leave::default(), Mutex::default(), Arc::new(|| {}));
        (Signals { gateway, listeners, socket: None, leave, stops, ending, drained }, told)
    }

    #[test]
    fn whoever_serves_beside_the_listeners_hears_of_a_signal_before_the_answers_have_ended() {
        let (signals, told) = signals();
        signals.gateway.metrics.in_flight(1);
        assert!(signals.begin());
        assert_eq!(told.load(Ordering::SeqCst), 1, "an answer is in progress");
        let (signals, told) = self::signals();
        signals.gateway.leave();
        assert!(!signals.begin());
        assert_eq!(told.load(Ordering::SeqCst), 0, "another process serves: there is more time");
    }
}
