//! Pool of a few machines for one plugin. A request stays with its machine, since its context is there; requests of
//! different machines run side by side. A callback waits for others of its machine, at most as many as there are
//! threads, each bounded by its fuel.
//!
//! A machine that broke is dropped at once with everything in it, and its requests get an error at their next callback.
//! A machine whose memory has run out takes no new requests and goes with its last one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_plugins::Host;

use super::machine::Machine;
use super::program::Program;
use crate::WasmError;

/// Most machines that may be started within [`STARTS_WINDOW`]: a plugin that breaks on every request is not started for
/// each of them.
const STARTS_MAX: usize = 100;
const STARTS_WINDOW: Duration = Duration::from_secs(10);

/// Machines of one plugin.
pub struct Pool {
    program: Arc<Program>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    members: Vec<Arc<Member>>,
    starts: VecDeque<Duration>,
}

/// Machine with its load.
pub struct Member {
    machine: Mutex<Option<Machine>>,
    streams: AtomicUsize,
    retired: AtomicBool,
    ticked: Mutex<Duration>,
}

impl Pool {
    /// Pool without machines: the first request starts one.
    pub fn new(program: Arc<Program>) -> Self {
        Self { program, inner: Mutex::default() }
    }

    /// Program that the machines run.
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Machine for one more request: the one with the fewest, or a new one while there may be more.
    ///
    /// # Errors
    /// All machines are full, or none could be started.
    pub fn join(&self, host: &Arc<dyn Host>) -> Result<Arc<Member>, WasmError> {
        let limits = &self.program.identity().limits;
        let mut inner = self.inner();
        inner.members.retain(|member| !member.retired.load(Ordering::Acquire));
        let least = inner.members.iter().min_by_key(|member| member.streams()).cloned();
        match least {
            Some(member) if member.streams() == 0 || inner.members.len() >= limits.instances => {
                if member.streams() >= limits.streams_max {
                    return Err(WasmError::Busy { streams_max: limits.streams_max });
                }
                member.streams.fetch_add(1, Ordering::Relaxed);
                Ok(member)
            }
            _ => {
                let member = self.start(&mut inner, host)?;
                member.streams.fetch_add(1, Ordering::Relaxed);
                Ok(member)
            }
        }
    }

    /// Starts a machine if there is none: a timer may have work before the first request.
    pub fn wake(&self, host: &Arc<dyn Host>) -> Result<(), WasmError> {
        let mut inner = self.inner();
        inner.members.retain(|member| !member.retired.load(Ordering::Acquire));
        if inner.members.is_empty() {
            self.start(&mut inner, host)?;
        }
        Ok(())
    }

    fn start(&self, inner: &mut Inner, host: &Arc<dyn Host>) -> Result<Arc<Member>, WasmError> {
        let now = host.since_epoch();
        // A clock that was set back makes none of them recent for ever.
        let recent = |at: &Duration| now.checked_sub(*at).is_some_and(|age| age < STARTS_WINDOW);
        inner.starts.retain(recent);
        if inner.starts.len() >= STARTS_MAX {
            return Err(WasmError::Crashing);
        }
        inner.starts.push_back(now);
        let mut machine = Machine::start(&self.program, Some(host.clone()))?;
        machine.attend(None);
        let member = Arc::new(Member {
            machine: Mutex::new(Some(machine)),
            streams: AtomicUsize::new(0),
            retired: AtomicBool::new(false),
            ticked: Mutex::new(now),
        });
        inner.members.push(member.clone());
        Ok(member)
    }

    /// All machines.
    pub fn members(&self) -> Vec<Arc<Member>> {
        self.inner().members.clone()
    }
}

impl Member {
    /// Runs `act` on the machine, alone. An error ends the machine.
    ///
    /// # Errors
    /// The machine broke, now or before.
    pub fn with<T>(
        &self,
        host: &Arc<dyn Host>,
        act: impl FnOnce(&mut Machine) -> Result<T, WasmError>,
    ) -> Result<T, WasmError> {
        let mut slot = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        let machine = slot.as_mut().ok_or(WasmError::Gone)?;
        machine.attend(Some(host.clone()));
        let done = act(machine).and_then(|done| machine.settle().map(|()| done));
        // A host may hold the config that holds this plugin: kept here, it would keep both for ever.
        machine.attend(None);
        if done.is_err() {
            *slot = None;
            self.retired.store(true, Ordering::Release);
        } else if machine.worn_out() {
            self.retired.store(true, Ordering::Release);
        }
        done
    }

    /// Returns true if the machine's timer is due.
    pub fn due(&self, now: Duration, period: Duration) -> bool {
        let mut ticked = self.ticked.lock().unwrap_or_else(PoisonError::into_inner);
        // A clock that was set back has rung.
        let due = now.checked_sub(*ticked).is_none_or(|passed| passed >= period);
        if due {
            *ticked = now;
        }
        due
    }

    /// Notes that a request has left.
    pub fn leave(&self) {
        self.streams.fetch_sub(1, Ordering::Relaxed);
    }

    /// Number of requests in the machine.
    pub fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }
}
