//! Old side of the hand-over: the process that hands over.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use super::wire::{Ask, Offer, Tell, UpgradeError, VERSION, Wire};
use super::{READY_MAX, StateLock};
use crate::gateway::{Beside, Gateway};
use crate::reload::Live;
use crate::server::Listeners;
use penstock_governed::Given;

/// Longest time from the next process's `Prepared` to its `Accepting`.
const ACCEPT_MAX: Duration = Duration::from_secs(60);
/// Time from the signal to stop accepting to the last connection that is accepted all the same.
const ACCEPTED_LAST: Duration = Duration::from_millis(200);
/// Longest time from `Done` to the socket of the next upgrade.
const SUCCEEDED_MAX: Duration = Duration::from_secs(2);
/// Interval of checks that the new process lives.
const LOOK: Duration = Duration::from_millis(50);
/// Most settlements that wait for the new process; beyond that, they count as they were reserved.
const SETTLED_MAX: usize = 65_536;

/// State of the running gateway that an upgrade hands over.
struct Old {
    gateway: Arc<Gateway>,
    live: Arc<Live>,
    listeners: Arc<Listeners>,
    state_lock: Arc<StateLock>,
    workers: String,
    /// Callback for the moment when the new process serves.
    leave: Box<dyn Fn() + Send + Sync>,
    /// Path of the socket for upgrades; `file` is the inode of the socket file at that path.
    place: PathBuf,
    file: Option<u64>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// True while a hand-over goes on, and after it is done.
    busy: bool,
    /// Channel to the `penstock upgrade` client that waits for the outcome.
    asked: Option<Sender<Tell>>,
    /// Id of the started process: no other may take over then.
    child: Option<u32>,
}

/// Waits for a process that wants to take over. `workers`: digest of the workers' build; `leave`: lets this process end
/// when its answers have.
///
/// # Errors
/// The socket cannot be made.
pub fn listen(
    state_dir: &Path,
    (gateway, live): (Arc<Gateway>, Arc<Live>),
    (listeners, state_lock): (Arc<Listeners>, Arc<StateLock>),
    workers: String,
    leave: impl Fn() + Send + Sync + 'static,
) -> io::Result<()> {
    let place = super::socket(state_dir);
    let listener = bind(&place)?;
    let (leave, file, state) = (Box::new(leave), file(&place), Mutex::default());
    let old = Arc::new(Old { gateway, live, listeners, state_lock, workers, leave, place, file, state });
    std::thread::Builder::new().name("penstock-upgrade".into()).spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { continue };
            let served = old.clone();
            let spawned = std::thread::Builder::new().name("penstock-upgrade".into()).spawn(move || {
                if let Err(error) = serve(&served, stream) {
                    tracing::warn!(%error, "upgrade");
                }
            });
            if let Err(error) = spawned {
                tracing::warn!(%error, "upgrade");
            }
            if lock(&old).busy && old.gateway.is_leaving() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Socket in the place of the last gateway's, which needs it no more, or is gone.
fn bind(place: &Path) -> io::Result<UnixListener> {
    let new = place.with_extension(format!("{}", std::process::id()));
    // Left behind by a process of the same number.
    let _ = fs::remove_file(&new);
    let listener = UnixListener::bind(&new)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
    fs::rename(&new, place)?;
    Ok(listener)
}

fn file(place: &Path) -> Option<u64> {
    fs::metadata(place).ok().map(|file| file.ino())
}

/// Waits until the next process listens at the socket in place of this process, at most [`SUCCEEDED_MAX`].
fn succeeded(old: &Old) {
    let until = Instant::now() + SUCCEEDED_MAX;
    while file(&old.place) == old.file && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn lock(old: &Old) -> std::sync::MutexGuard<'_, State> {
    old.state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(old: &Old, stream: UnixStream) -> Result<(), UpgradeError> {
    let mut wire = Wire::new(stream)?;
    wire.patience(Some(Duration::from_secs(10)))?;
    match wire.receive()? {
        Ask::Upgrade { program } => upgrade(old, wire, program),
        Ask::TakeOver { version, .. } if version != VERSION => {
            wire.send(&Tell::Failed("the running gateway speaks another version of the hand-over".into()))
        }
        Ask::TakeOver { pid, takes_holds, .. } => {
            {
                let mut state = lock(old);
                let mine = state.child.is_none_or(|child| child == pid);
                if state.busy || !mine {
                    return wire.send(&Tell::Failed("the running gateway hands over to another process".into()));
                }
                state.busy = true;
            }
            // Until the new process serves, or does not come.
            let (withheld, beside) = old.live.withhold_changes();
            let done = hand_over(old, &mut wire, beside, takes_holds);
            drop(withheld);
            let mut state = lock(old);
            state.busy = done.is_ok();
            let asked = state.asked.take();
            drop(state);
            // Err: it does not wait any more.
            let tell = |told| _ = asked.map(|asked| asked.send(told));
            match done {
                Ok(settled) => {
                    // Err: it has ended, and this process cannot go on any more.
                    let _ = wire.send(&Tell::Done { pid });
                    // A client that sees the end may ask for the next upgrade at once.
                    succeeded(old);
                    tell(Tell::Done { pid });
                    forward(&mut wire, &settled);
                    old.gateway.rest(Beside::Settling, true);
                }
                Err(error) => {
                    tell(Tell::Failed(error.to_string()));
                    old.gateway.governor.keep();
                    old.gateway.rest(Beside::Settling, true);
                    tracing::error!(pid, %error, "upgrade failed: this process goes on serving");
                    // The new process may be gone.
                    let _ = wire.send(&Tell::Failed(error.to_string()));
                }
            }
            Ok(())
        }
        Ask::Prepared | Ask::Accepting => Err(UpgradeError::Version),
    }
}

fn hand_over(
    old: &Old,
    wire: &mut Wire,
    beside: Option<(String, String)>,
    takes_holds: bool,
) -> Result<Receiver<Given>, UpgradeError> {
    if old.gateway.governor.is_reading() {
        let why = "the use of limits is not read from the ledger yet, and the new process would count without the rest";
        return Err(UpgradeError::Refused(why.into()));
    }
    let (mut names, mut sockets) = old.listeners.copies()?;
    if let Some(lock) = old.state_lock.copy()? {
        names.push(super::lock::NAME.to_owned());
        sockets.push(lock);
    }
    let (config, file) = beside.unzip();
    let offer = Offer { sockets: names, workers: old.workers.clone(), config, file, held: old.live.fleet().held() };
    wire.send_with(&Tell::Offer(offer), &sockets)?;
    drop(sockets);
    wire.patience(Some(READY_MAX))?;
    expect(wire, |ask| matches!(ask, Ask::Prepared))?;
    if takes_holds {
        // An operator may have drained workers since.
        wire.send(&Tell::Holds(old.live.fleet().held()))?;
    }
    let (give, settled) = sync_channel(SETTLED_MAX);
    let book = old.gateway.governor.give_away(give);
    old.gateway.rest(Beside::Settling, false);
    wire.send(&Tell::Book(Box::new(Some(book))))?;
    wire.patience(Some(ACCEPT_MAX))?;
    expect(wire, |ask| matches!(ask, Ask::Accepting))?;
    tracing::info!("another process serves from now on: this process ends when its open answers have ended");
    old.gateway.leave();
    old.state_lock.leave();
    (old.leave)();
    // The loops that accept end a moment after they are told; only then does the other one get every connection.
    std::thread::sleep(ACCEPTED_LAST);
    Ok(settled)
}

fn expect(wire: &mut Wire, wanted: impl Fn(&Ask) -> bool) -> Result<(), UpgradeError> {
    match wire.receive::<Ask>() {
        Ok(ask) if wanted(&ask) => Ok(()),
        Ok(_) => Err(UpgradeError::Version),
        Err(UpgradeError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(UpgradeError::Refused("the new process ended before it served".into()))
        }
        Err(UpgradeError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(UpgradeError::Refused("the new process was not ready in time".into()))
        }
        Err(error) => Err(error),
    }
}

/// Forwards settlements until this process ends, or the other does.
fn forward(wire: &mut Wire, settled: &Receiver<Given>) {
    while let Ok(given) = settled.recv() {
        let told = match given {
            Given::Held { id, claims } => Tell::Held { id, claims },
            Given::Settled { id, amounts } => Tell::Settled { id, amounts },
        };
        if let Err(error) = wire.send(&told) {
            tracing::warn!(%error, "usage settled by this process no longer reaches the new process");
            return;
        }
    }
}

/// Starts the next process with this one's arguments, and reports the outcome to the client.
fn upgrade(old: &Old, mut wire: Wire, program: Option<PathBuf>) -> Result<(), UpgradeError> {
    let (tell, told) = channel();
    let refused = if std::process::id() == 1 {
        Some("this gateway is process 1 of its container, which ends with it: replace the container")
    } else {
        let mut state = lock(old);
        let refused = (state.busy || state.asked.is_some()).then_some("an upgrade goes on already");
        if refused.is_none() {
            state.asked = Some(tell);
        }
        refused
    };
    if let Some(why) = refused {
        return wire.send(&Tell::Failed(why.into()));
    }
    // Once the next process serves, this one may end at any moment; the client hears the outcome first.
    old.gateway.rest(Beside::Upgrade, false);
    let outcome = start(old, &mut wire, program, &told);
    let mut state = lock(old);
    (state.asked, state.child) = (None, None);
    drop(state);
    let sent = wire.send(&outcome);
    old.gateway.rest(Beside::Upgrade, true);
    sent
}

fn start(old: &Old, wire: &mut Wire, program: Option<PathBuf>, told: &Receiver<Tell>) -> Tell {
    let program = program.unwrap_or_else(|| old.listeners.program().to_owned());
    let mut args: Vec<OsString> = std::env::args_os().skip(1).filter(|arg| arg != "--upgrade").collect();
    args.push("--upgrade".into());
    let child = Command::new(&program).args(args).stdin(Stdio::null()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return Tell::Failed(format!("{} cannot be started: {error}", program.display())),
    };
    lock(old).child = Some(child.id());
    tracing::info!(pid = child.id(), program = %program.display(), "upgrade: the new process starts");
    // The client may have left; the upgrade goes on.
    let _ = wire.send(&Tell::Progress(format!("process {} starts", child.id())));
    let outcome = watch(old, &mut child, told);
    if let Tell::Failed(_) = outcome {
        // The child may have ended by itself.
        let _ = child.kill();
        let _ = child.wait();
    }
    outcome
}

fn watch(old: &Old, child: &mut Child, told: &Receiver<Tell>) -> Tell {
    let until = Instant::now() + READY_MAX + ACCEPT_MAX;
    loop {
        match told.recv_timeout(LOOK) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Disconnected) => return Tell::Failed("nobody hands over".into()),
            // The new process serves: the outcome follows, and an end of the child from now on is not the upgrade's
            // failure.
            Err(RecvTimeoutError::Timeout) if old.gateway.is_leaving() => continue,
            Err(RecvTimeoutError::Timeout) => {}
        }
        match child.try_wait() {
            Ok(Some(status)) => {
                let why = "the new process ended before it served: the log has its error";
                return Tell::Failed(format!("{why} ({status})"));
            }
            Ok(None) if Instant::now() < until => {}
            Ok(None) => return Tell::Failed("the new process was not ready in time".into()),
            Err(error) => return Tell::Failed(format!("the new process: {error}")),
        }
    }
}

/// Message about an upgrade for the client that asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Started {
    /// Text about the progress, for the operator.
    Progress(String),
    /// Process id of the gateway that serves now.
    Done(u32),
}

/// Asks the gateway of that state folder to hand over to a new process. `say` hears of the progress.
///
/// # Errors
/// [`UpgradeError`]: the running gateway goes on.
pub fn ask(state_dir: &Path, program: Option<PathBuf>, mut say: impl FnMut(Started)) -> Result<(), UpgradeError> {
    let mut wire = super::connect(state_dir)?;
    wire.send(&Ask::Upgrade { program })?;
    wire.patience(Some(READY_MAX + 2 * ACCEPT_MAX))?;
    loop {
        match wire.receive()? {
            Tell::Progress(text) => say(Started::Progress(text)),
            Tell::Done { pid } => {
                say(Started::Done(pid));
                return Ok(());
            }
            Tell::Failed(why) => return Err(UpgradeError::Refused(why)),
            Tell::Offer(_) | Tell::Holds(_) | Tell::Book(_) | Tell::Held { .. } | Tell::Settled { .. } => {
                return Err(UpgradeError::Version);
            }
        }
    }
}

/// Names and descriptors of the listeners and of the lock.
pub(crate) type Copies = (Vec<String>, Vec<OwnedFd>);
