//! Thread that follows SIGHUP, the config file, and the config in force.
//!
//! One thread with a small runtime runs from the start of the process: a SIGHUP that comes while models load waits, and
//! does not end the process. A reload can take long (a tokenizer is read), so it runs beside the thread, one at a time;
//! signals and changes that come meanwhile, however many, cause one more reload after it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

use super::{By, Live, members};
use penstock_base::panics::supervised;
use penstock_relay::Asker;

/// Debounce of file changes: editors write in steps, so a change is taken up when it has been quiet for this long.
const QUIET: Duration = Duration::from_millis(250);
/// Longest wait for quiet, and for a writer to close the file.
const QUIET_MAX: Duration = Duration::from_secs(60);
/// Interval at which folders are watched anew, since a replaced folder sends no events; the file is read then, too.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// Handle on the thread that follows the config, before the config is known.
pub struct Follower(oneshot::Sender<Arc<Live>>);

impl Follower {
    /// Starts to reload `live` on signals and changes.
    pub fn begin(self, live: Arc<Live>) {
        // Err: the thread could not take signals and said so.
        let _ = self.0.send(live);
    }
}

/// Starts the thread; signals that come before [`Follower::begin`] wait.
///
/// # Errors
/// The system has no thread for it.
pub fn follow() -> std::io::Result<Follower> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(4).build()?;
    let hups = {
        let _guard = runtime.enter();
        signal(SignalKind::hangup())?
    };
    let (give, given) = oneshot::channel::<Arc<Live>>();
    std::thread::Builder::new().name("penstock-live".into()).spawn(move || {
        runtime.block_on(async {
            // Err: the process ends before it has begun.
            if let Ok(live) = given.await {
                let pause = || sleep(LOOK_AGAIN);
                tokio::join!(
                    hang_ups(live.clone(), hups),
                    supervised("config file", || file(live.clone()), pause),
                    supervised("certificate", || certificate(live.clone()), pause),
                    supervised("members", || members::follow(live.clone()), pause),
                    supervised("health checks", || chores(live.clone()), pause)
                );
            }
        });
    })?;
    Ok(Follower(give))
}

pub(super) async fn reload(live: &Arc<Live>, how: impl FnOnce(&Live) + Send + 'static) {
    let live = live.clone();
    if let Err(error) = tokio::task::spawn_blocking(move || how(&live)).await {
        tracing::error!(%error, "a reload panicked: the config in force stays");
    }
}

async fn hang_ups(live: Arc<Live>, mut hups: Signal) {
    while hups.recv().await.is_some() {
        reload(&live, |live| drop(live.reload(&By::new("signal")))).await;
    }
}

/// Reloads the certificate when its files have changed.
async fn certificate(live: Arc<Live>) {
    loop {
        sleep(LOOK_AGAIN).await;
        reload(&live, |live| live.gateway.refresh_certificate()).await;
    }
}

/// Keeps health checks in step with the config in force.
async fn chores(live: Arc<Live>) {
    let mut asker = Asker::default();
    let mut swaps = live.gateway.swaps();
    loop {
        asker.follow(live.gateway.serving().checks());
        if swaps.changed().await.is_err() {
            return;
        }
    }
}

/// Watches the folders of the file rather than the file: editors and ConfigMaps put another file in its place.
async fn file(live: Arc<Live>) {
    let Some(path) = live.source.path().map(Path::to_owned) else { return };
    if !live.gateway.serving().config.watch {
        // What the file has become since this process read it: while an upgrade prepares, the process before takes no change of it.
        reload(&live, |live| live.reload_changed(&By::new("file"))).await;
        return;
    }
    let seen = Arc::new(Seen::default());
    let watch = || {
        watcher(&path, &seen).inspect_err(
            |error| tracing::warn!(%error, "the config file cannot be watched: the gateway reads it every 30 s instead"),
        )
    };
    let mut watching = watch();
    loop {
        reload(&live, |live| live.reload_changed(&By::new("file"))).await;
        tokio::select! {
            () = seen.changed.notified() => seen.quiet().await,
            () = sleep(LOOK_AGAIN) => {}
        }
        // Before the file is read, so that nothing falls between: the links may lead elsewhere now.
        let next = watch();
        drop(std::mem::replace(&mut watching, next));
    }
}

/// State that the file watcher shares with the reload task.
#[derive(Default)]
struct Seen {
    changed: Notify,
    /// True while a writer has the file open.
    is_open: AtomicBool,
}

impl Seen {
    /// Waits until nothing has changed for a moment and no writer has the file open.
    async fn quiet(&self) {
        let settle = async {
            loop {
                match timeout(QUIET, self.changed.notified()).await {
                    Err(_) if !self.is_open.load(Ordering::Relaxed) => return,
                    _ => {}
                }
            }
        };
        // Err: it never gets quiet; what is there now is looked at.
        let _ = timeout(QUIET_MAX, settle).await;
    }

    fn event(&self, event: &notify::Event, names: &[PathBuf]) {
        let is_file = event.paths.iter().any(|path| names.contains(path));
        match event.kind {
            // Writes to other files of the folder, such as a database beside the config, do not count: it would never
            // get quiet.
            EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Metadata(_)) if !is_file => return,
            EventKind::Modify(ModifyKind::Data(_)) if is_file => self.is_open.store(true, Ordering::Relaxed),
            EventKind::Access(AccessKind::Close(AccessMode::Write)) if is_file => {
                self.is_open.store(false, Ordering::Relaxed);
            }
            EventKind::Access(_) => return,
            EventKind::Modify(ModifyKind::Name(_)) | EventKind::Remove(_) if is_file => {
                self.is_open.store(false, Ordering::Relaxed);
            }
            _ => {}
        }
        self.changed.notify_one();
    }
}

fn watcher(path: &Path, seen: &Arc<Seen>) -> notify::Result<RecommendedWatcher> {
    let (files, seen) = (links(path), seen.clone());
    let names = files.clone();
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| match event {
        Ok(event) => seen.event(&event, &names),
        // A lost event may have been ours, and reading is none.
        Err(_) => seen.changed.notify_one(),
    })?;
    let mut folders: Vec<_> = files.iter().filter_map(|file| file.parent()).collect();
    folders.sort();
    folders.dedup();
    for folder in folders {
        watcher.watch(folder, RecursiveMode::NonRecursive)?;
    }
    Ok(watcher)
}

/// Paths of the file and of every link on the way to it.
fn links(path: &Path) -> Vec<PathBuf> {
    let (mut out, mut next) = (Vec::new(), Some(path.to_owned()));
    // Links may form a circle.
    for _ in 0..16 {
        let Some(path) = next.take() else { break };
        next = std::fs::read_link(&path).ok().and_then(|target| Some(path.parent()?.join(target)));
        out.push(path);
    }
    out.extend(path.canonicalize());
    out.sort();
    out.dedup();
    out
}
