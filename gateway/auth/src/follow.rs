//! Background refresh of authentication data: the directory of issued keys, and the signing keys of token issuers.
//!
//! One thread (`identity`) with its own runtime, so that refreshing does not depend on how busy the request threads
//! are. It long-polls the store for the directory's version (a change made elsewhere is seen within 300 ms) and reads
//! the changes. While the store is down, the directory in memory stays in use, for as long as the config allows
//! (`stale`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use penstock_base::panics::supervised;
use penstock_store::{Changes, Store, StoreError};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::directory::Directory;
use super::guard::Guard;
use super::identity::{AuthSettings, Identity};
use super::jwt::keep;
use super::pepper::{Pepper, PepperSource};

/// Longest wait of one long poll for a new directory version.
const ASK: Duration = Duration::from_millis(400);
/// Time limit for the store's answer, beyond the wait of the poll.
const ANSWER: Duration = Duration::from_secs(5);
/// Pause after the store failed to answer a poll; the directory in memory stays in use meanwhile.
const AGAIN: Duration = Duration::from_millis(250);
/// Pause after a panic.
const ANEW: Duration = Duration::from_secs(1);
/// Last changes whose marks the store keeps.
const MARKS: u64 = 10_000;
/// Keys, or teams and users, that are read from the store per call.
const PIECE: u32 = 2000;
/// Period at which the issuers of the current config are compared with those being fetched.
const ISSUERS: Duration = Duration::from_millis(250);
/// Longest time that startup waits for the first read of the directory.
const FIRST: Duration = Duration::from_secs(10);
/// Least time in ms between two polls that requests demand.
const DEMAND_MS: u64 = 100;
/// Longest time that a request waits for a poll that it demanded.
const DEMAND_WAIT: Duration = Duration::from_millis(600);

/// Gateway whose authentication data a thread refreshes until the gateway is dropped.
pub trait Guarded: Send + Sync {
    /// Authentication state of the gateway.
    fn guard(&self) -> &Guard;

    /// Identities of the config in force.
    fn identity(&self) -> Arc<Identity>;

    /// Store of issued keys; `None`: the gateway has none.
    fn store(&self) -> Option<Arc<dyn Store>>;
}

/// Freshness of the directory, and demands by requests for a refresh.
#[derive(Debug)]
pub(super) struct Follow {
    began: Instant,
    /// True if a store is configured; without one the directory stays empty and is never stale.
    is_kept: AtomicBool,
    /// Last time that the directory equalled the store's, in milliseconds since `began`, plus one; 0: never.
    current_ms: AtomicU64,
    /// Earliest time of the next demanded poll, in milliseconds since `began`.
    demanded_ms: AtomicU64,
    wake: Notify,
    /// Number of polls of the store that were begun; numbers the next one.
    asked: AtomicU64,
    /// Number of the last poll that the store answered.
    answers: watch::Sender<u64>,
}

impl Default for Follow {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            is_kept: AtomicBool::new(false),
            current_ms: AtomicU64::new(0),
            demanded_ms: AtomicU64::new(0),
            wake: Notify::new(),
            asked: AtomicU64::new(0),
            answers: watch::Sender::new(0),
        }
    }
}

impl Follow {
    /// Upper bound of the directory's age; `None` if it was never read. Without a store the age is always zero.
    pub(super) fn age(&self) -> Option<Duration> {
        if !self.is_kept.load(Ordering::Acquire) {
            return Some(Duration::ZERO);
        }
        let current = self.current_ms.load(Ordering::Acquire).checked_sub(1)?;
        Some(self.began.elapsed().saturating_sub(Duration::from_millis(current)))
    }

    /// Demands a poll for a key that may be too new to be in the directory, and waits for its answer, for at most
    /// `DEMAND_WAIT`. Demands of all requests together cause one poll per `DEMAND_MS`.
    pub(super) async fn renewed(&self) {
        if !self.is_kept.load(Ordering::Acquire) {
            return;
        }
        let mut answers = self.answers.subscribe();
        // A poll that is under way may have been sent before the key was made: wait for the next one.
        let next = self.asked.load(Ordering::Acquire) + 1;
        let answered = async {
            let due = self.demanded_ms.load(Ordering::Acquire);
            sleep(Duration::from_millis(due).saturating_sub(self.began.elapsed())).await;
            let now = self.began.elapsed().as_millis() as u64;
            let mine = self.demanded_ms.compare_exchange(due, now + DEMAND_MS, Ordering::AcqRel, Ordering::Acquire);
            if mine.is_ok() {
                self.wake.notify_one();
            }
            answers.wait_for(|answered| *answered >= next).await.is_ok()
        };
        // A timeout is no error: the key then stays unknown.
        let _ = timeout(DEMAND_WAIT, answered).await;
    }

    /// Number of the poll that is about to be sent.
    fn ask(&self) -> u64 {
        self.asked.fetch_add(1, Ordering::AcqRel) + 1
    }

    fn note_answer(&self, question: u64) {
        self.current_ms.store(self.began.elapsed().as_millis() as u64 + 1, Ordering::Release);
        self.answers.send_replace(question);
    }
}

/// Starts the thread; returns when the directory has been read, or after 10 s without it (then issued keys are refused
/// until it is read).
///
/// # Errors
/// The thread cannot be started.
pub fn start<G: Guarded + 'static>(gateway: &Arc<G>, settings: &AuthSettings<'_>) -> std::io::Result<()> {
    let store = gateway.store();
    gateway.guard().follow.is_kept.store(store.is_some(), Ordering::Release);
    if let Ok(state_dir) = &settings.state_dir {
        gateway.guard().marker.look(state_dir);
    }
    let (ready, wait) = mpsc::sync_channel(1);
    let started = gateway.guard();
    let gateway: Weak<dyn Guarded> = Arc::<G>::downgrade(gateway);
    std::thread::Builder::new().name("identity".into()).spawn(move || {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return tracing::error!(%error, "the thread that reads keys from the store could not start"),
        };
        runtime.block_on(async {
            let directory = async {
                match store {
                    Some(store) => {
                        let follow = || directory(&gateway, store.as_ref(), &ready);
                        supervised("directory of issued keys", follow, || sleep(ANEW)).await;
                    }
                    None => drop(ready.try_send(())),
                }
            };
            tokio::join!(directory, supervised("issuers of tokens", || issuers(&gateway), || sleep(ANEW)));
        });
    })?;
    if wait.recv_timeout(FIRST).is_err() {
        tracing::error!("the store did not answer at start: issued keys are refused until the store answers");
    }
    warn(started, settings);
    Ok(())
}

/// Logs warnings about settings that an operator may not have intended.
fn warn(guard: &Guard, settings: &AuthSettings<'_>) {
    let is_local = settings.listen.ip().is_loopback();
    let has_keys = !settings.auth.knows_nobody() || !guard.directory.load().is_virgin();
    if settings.is_shared && settings.auth.pepper == PepperSource::State {
        let help = "give all of them one auth.pepper_file or auth.pepper_env";
        tracing::warn!(
            help,
            "keys issued by this gateway work at no other gateway of this store: the pepper is in the state folder"
        );
    }
    if settings.is_open() && !is_local {
        tracing::warn!(listen = %settings.listen, "requests without credentials are served beyond loopback: auth.anonymous is \"allow\"");
    } else if !settings.is_open() && !has_keys {
        let help = "issue a key (penstock keys create), or say so in the config (auth.anonymous)";
        tracing::warn!(listen = %settings.listen, help, "there are no keys: every request is refused");
    }
}

/// Polls the store for the directory until the gateway is dropped.
async fn directory(gateway: &Weak<dyn Guarded>, store: &dyn Store, ready: &mpsc::SyncSender<()>) {
    let mut failing = false;
    while let Some(held) = gateway.upgrade() {
        let question = held.guard().follow.ask();
        match read(held.as_ref(), store).await {
            Ok(()) => {
                held.guard().follow.note_answer(question);
                // The starter may have stopped waiting.
                let _ = ready.try_send(());
                if std::mem::take(&mut failing) {
                    tracing::info!("the store answers again: issued keys are up to date");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::error!(%error, "the store does not answer: issued keys in memory stay in use");
                }
                drop(held);
                sleep(AGAIN).await;
                continue;
            }
        }
        let seen = held.guard().directory.load().version;
        tokio::select! {
            _ = timeout(ASK + ANSWER, store.directory_changed(seen, ASK)) => {}
            () = held.guard().follow.wake.notified() => {}
        }
    }
}

/// Reads the directory's changes, compares them with the marker in the state folder, and reads the pepper once there is a key.
async fn read(gateway: &dyn Guarded, store: &dyn Store) -> Result<(), StoreError> {
    let (guard, identity) = (gateway.guard(), gateway.identity());
    let state_dir = identity.pepper().state_dir.as_deref();
    // Before the store: the marker is made after the key is stored, so a marker that is there now means a key that the store must have.
    if let Ok(state_dir) = state_dir {
        guard.marker.look(state_dir);
    }
    let read = read_changes(&guard.directory, store).await;
    let directory = guard.directory.load_full();
    if let Ok(state_dir) = state_dir {
        // Also after a read that broke off: what it found is known.
        if !directory.is_virgin() {
            guard.marker.keep(state_dir);
        }
        if read.is_ok() {
            guard.marker.compare(state_dir, !directory.is_empty(), identity.config.anonymous);
        }
    }
    read?;
    if guard.pepper.load().is_none() && !directory.is_virgin() {
        match Pepper::of(identity.pepper(), false) {
            Ok(pepper) => guard.pepper.store(Some(Arc::new(pepper))),
            Err(error) if !guard.pepperless.swap(true, Ordering::Relaxed) => {
                tracing::error!(error, "issued keys cannot be checked: their pepper is missing");
            }
            Err(_) => {}
        }
    }
    Ok(())
}

/// Reads the changes since the version in memory. A store of a lower version, or with another mark of that version, has lost
/// changes (a failover to a server that lacked the last ones, a backup): the directory is then read anew and replaced as a
/// whole, since keys of lost changes would otherwise be good here, and unknown to whoever wants to revoke them.
async fn read_changes(directory: &ArcSwap<Directory>, store: &dyn Store) -> Result<(), StoreError> {
    let (known, version) = (directory.load_full(), StoreError::in_time(ANSWER, store.directory_version()).await?);
    let mark = StoreError::in_time(ANSWER, store.directory_mark(known.version)).await?;
    let is_anew = version < known.version || known.mark.is_some() && mark != known.mark;
    if version == known.version && !is_anew {
        return Ok(());
    }
    let mut next = if is_anew { Arc::new(known.anew()) } else { known.clone() };
    loop {
        let changes = StoreError::in_time(ANSWER, store.directory_since(next.version, PIECE)).await?;
        let more = changes.more;
        next = Arc::new(followed(&next, changes, &known)?);
        if !is_anew || !more {
            directory.store(next.clone());
        }
        if !more {
            break;
        }
    }
    if is_anew {
        let (keys, before) = (next.keys(), known.keys());
        if version >= known.version + MARKS {
            tracing::info!(
                version,
                known = known.version,
                keys,
                before,
                "all keys were read anew after a long time without the store"
            );
        } else {
            tracing::warn!(
                version,
                known = known.version,
                keys,
                before,
                "the store has lost changes of keys (a failover, a backup): all keys were read anew, and those that it lacks are refused"
            );
        }
    }
    Ok(())
}

/// Snapshot with more changes.
///
/// # Errors
/// [`StoreError::Busy`] if they end before the version of the snapshot: a server that lacks changes has taken over between two
/// questions. The next turn notices it by the version.
fn followed(snapshot: &Directory, changes: Changes, known: &Directory) -> Result<Directory, StoreError> {
    if changes.version < snapshot.version { Err(StoreError::Busy) } else { Ok(snapshot.with(changes, known)) }
}

/// Starts a fetch task for the key ring of each issuer in the current config, until the gateway is dropped.
async fn issuers(gateway: &Weak<dyn Guarded>) {
    let mut tasks = tokio::task::JoinSet::new();
    while let Some(held) = gateway.upgrade() {
        let identity = held.identity();
        held.guard().drop_rings(&identity);
        for issuer in &identity.issuers {
            let ring = held.guard().ring(issuer);
            if let Some(keeper) = ring.claim() {
                let (ring, metrics) = (Arc::downgrade(&ring), held.guard().metrics.clone());
                let fetch = move || keep(ring.clone(), metrics.clone());
                tasks.spawn(async move {
                    // If this function panics, its tasks end, and it claims the rings anew.
                    let _keeper = keeper;
                    supervised("signing keys of an issuer", fetch, || sleep(ANEW)).await;
                });
            }
        }
        drop((identity, held));
        sleep(ISSUERS).await;
        while tasks.try_join_next().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use http::HeaderMap;
    use penstock_base::testing::logged;
    use penstock_store::{KeyId, Keys, OwnerKind, Sqlite, SqliteOptions};

    use super::super::directory::tests::{owner, record};
    use super::super::identity::{Anonymous, AuthConfig};
    use super::super::jwt::token::tests::{config, set};
    use super::super::jwt::{IssuerConfig, KeySource};
    use super::super::key_issuing::{Desk, NewKey};
    use super::super::marker;
    use super::*;

    async fn store(keys: &[&str]) -> Sqlite {
        let store = Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("opens");
        for key in keys {
            store.create_key(record(key)).await.expect("stored").expect("new");
        }
        store
    }

    /// A server that lacks the last changes takes over, and other changes follow.
    #[tokio::test]
    async fn what_the_store_has_lost_is_not_good_here() {
        let directory = ArcSwap::default();
        let before = store(&["key_a", "key_b", "key_c"]).await;
        before.create_owner(owner(OwnerKind::Team, "t")).await.expect("stored").expect("new");
        read_changes(&directory, &before).await.expect("read");
        assert_eq!((directory.load().keys(), directory.load().version), (3, 4));
        let owners_version = directory.load().owners_version;

        let after = store(&["key_a", "key_b"]).await;
        read_changes(&directory, &after).await.expect("read");
        let now = directory.load_full();
        assert!(now.by_id("key_b").is_some() && now.by_id("key_c").is_none());
        assert_ne!(now.owners_version, owners_version, "tokens of the lost team are judged anew");

        let key = KeyId::parse("key_a").expect("an id");
        after.revoke_key(&key, 1).await.expect("revoked").expect("there");
        read_changes(&directory, &after).await.expect("read");
        assert_eq!((directory.load().keys(), directory.load().version), (1, 3), "a later change is seen");
    }

    /// The version was told by a server with all changes, and the changes by one that lacks the last of them.
    #[tokio::test]
    async fn changes_of_a_server_that_took_over_meanwhile_are_not_followed() {
        let directory = ArcSwap::default();
        read_changes(&directory, &store(&["key_a", "key_b", "key_c"]).await).await.expect("read");
        let (known, behind) = (directory.load_full(), store(&["key_a", "key_b"]).await);
        let changes = behind.directory_since(known.version, PIECE).await.expect("read");
        assert!(changes.keys.is_empty() && !changes.more, "as if nothing had happened");
        assert!(matches!(followed(&known, changes, &known), Err(StoreError::Busy)));
        let changes = behind.directory_since(0, PIECE).await.expect("read");
        let anew = followed(&known.anew(), changes, &known).expect("all that this server has");
        assert_eq!((anew.keys(), anew.version), (2, 2));
    }

    /// A server that lacks the last changes takes over and has as many others, or more, before it is asked.
    #[tokio::test]
    async fn lost_changes_are_noticed_behind_as_many_new_ones() {
        let directory = ArcSwap::default();
        let before = store(&["key_a", "key_b", "key_c"]).await;
        before.create_owner(owner(OwnerKind::Team, "t")).await.expect("stored").expect("new");
        for others in [&["key_a", "key_d", "key_e"][..], &["key_a", "key_d", "key_e", "key_f", "key_g"]] {
            directory.store(Arc::default());
            read_changes(&directory, &before).await.expect("read");
            let known = directory.load_full();
            let after = store(others).await;
            after.create_owner(owner(OwnerKind::Team, "t")).await.expect("stored").expect("new");
            read_changes(&directory, &after).await.expect("read");
            let now = directory.load_full();
            assert!(now.by_id("key_b").is_none() && now.by_id("key_c").is_none(), "what is lost is refused");
            assert!(others.iter().all(|id| now.by_id(id).is_some()), "what is new is known");
            assert_ne!(now.owners_version, known.owners_version, "tokens are judged anew");
            read_changes(&directory, &after).await.expect("read");
            assert!(Arc::ptr_eq(&directory.load_full(), &now), "and read once");
        }
    }

    /// An empty directory opens a gateway without keys of its own to everybody.
    #[tokio::test]
    async fn a_store_that_has_lost_every_key_opens_nothing() {
        let directory = ArcSwap::default();
        read_changes(&directory, &store(&[]).await).await.expect("read");
        assert!(directory.load().is_virgin());
        read_changes(&directory, &store(&["key_a"]).await).await.expect("read");
        for _ in 0..2 {
            read_changes(&directory, &store(&[]).await).await.expect("read");
            assert!(directory.load().by_id("key_a").is_none() && !directory.load().is_virgin());
        }
    }

    /// A process with a state folder; what it knows ends with it.
    struct Process {
        guard: Guard,
        identity: Arc<Identity>,
    }

    impl Guarded for Process {
        fn guard(&self) -> &Guard {
            &self.guard
        }

        fn identity(&self) -> Arc<Identity> {
            self.identity.clone()
        }

        fn store(&self) -> Option<Arc<dyn Store>> {
            None
        }
    }

    /// Settings of a gateway on loopback without keys in the config.
    fn settings<'a>(auth: &'a AuthConfig, state_dir: &Path) -> AuthSettings<'a> {
        let listen = "127.0.0.1:0".parse().expect("an address");
        AuthSettings { auth, listen, state_dir: Ok(state_dir.to_owned()), is_shared: false, limits: &[] }
    }

    impl Process {
        fn new(state_dir: &Path, anonymous: Anonymous) -> Self {
            let auth = AuthConfig { anonymous, ..AuthConfig::default() };
            let identity = Arc::new(Identity::new(&settings(&auth, state_dir)));
            let guard = Guard::new(Arc::default());
            guard.follow.is_kept.store(true, Ordering::Release);
            guard.follow.note_answer(0);
            Self { guard, identity }
        }

        /// Reads the store once, as the thread that follows it does.
        async fn follow(&self, store: &dyn Store) {
            read(self, store).await.expect("read");
        }

        fn is_open(&self) -> bool {
            self.guard.is_open(&self.identity)
        }

        /// Status and text of the refusal of a request without a credential.
        async fn refusal(&self) -> (u16, Box<str>) {
            let done = self.guard.identify(&self.identity, "/v1/models", &HeaderMap::new()).await;
            let failure = done.expect_err("refused");
            (failure.status(), failure.message)
        }
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("penstock-known-{name}-{}", std::process::id()));
        // Left behind by a process of the same number.
        let _ = std::fs::remove_dir_all(&folder);
        folder
    }

    /// Lines that are logged while `run` runs on one thread.
    fn logged_by(run: impl Future<Output = ()>) -> String {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        logged(|| runtime.block_on(run))
    }

    const ODD: &str = "the store has no issued key although this gateway has known one";

    #[test]
    fn a_restart_with_a_store_that_has_lost_every_key_opens_nothing() {
        let state_dir = folder("restart");
        let lines = logged_by(async {
            let first = Process::new(&state_dir, Anonymous::Auto);
            first.follow(&store(&[]).await).await;
            assert!(first.is_open() && !marker::counts(&state_dir));
            let kept = store(&["key_a"]).await;
            kept.revoke_key(&KeyId::parse("key_a").expect("an id"), 1).await.expect("revoked").expect("there");
            first.follow(&kept).await;
            assert!(!first.is_open() && marker::counts(&state_dir), "a revoked key was issued, too");
            let usual = first.refusal().await;

            let again = Process::new(&state_dir, Anonymous::Auto);
            for _ in 0..2 {
                again.follow(&store(&[]).await).await;
                assert!(!again.is_open());
            }
            assert_eq!(again.refusal().await, usual);
            assert_eq!(usual.0, 401);
        });
        assert_eq!(lines.matches(ODD).count(), 1, "{lines}");
        let file = marker::path(&state_dir);
        let words = ["nobody is served without a credential", file.to_str().expect("plain"), "check the store"];
        assert!(words.iter().all(|words| lines.contains(words)), "{lines}");

        let lines = logged_by(async {
            let allows = Process::new(&state_dir, Anonymous::Allow);
            allows.follow(&store(&[]).await).await;
            assert!(allows.is_open());
        });
        assert!(lines.contains(ODD) && !lines.contains("nobody is served"), "{lines}");

        std::fs::remove_file(file).expect("removed");
        let lines = logged_by(async {
            let anew = Process::new(&state_dir, Anonymous::Auto);
            anew.follow(&store(&[]).await).await;
            assert!(anew.is_open() && !marker::counts(&state_dir));
        });
        assert_eq!(lines, "");
        std::fs::remove_dir_all(&state_dir).expect("removed");
    }

    /// A store that is empty is told again after it had keys in between.
    #[test]
    fn a_store_that_was_mended_and_lost_again_is_told_twice() {
        let state_dir = folder("twice");
        assert!(marker::make(&state_dir));
        let lines = logged_by(async {
            let process = Process::new(&state_dir, Anonymous::Auto);
            for keys in [&[][..], &[], &["key_a"], &[], &[]] {
                process.follow(&store(keys).await).await;
                assert!(!process.is_open());
            }
        });
        assert_eq!(lines.matches(ODD).count(), 2, "{lines}");
        std::fs::remove_dir_all(&state_dir).expect("removed");
    }

    /// The caller has the key, and the store loses it before this gateway has read it there.
    #[tokio::test]
    async fn a_key_that_the_desk_has_issued_is_known_before_its_caller_has_it() {
        let (state_dir, auth) = (folder("desk"), AuthConfig::default());
        let settings = settings(&auth, &state_dir);
        let shared = AuthSettings { is_shared: true, ..settings.clone() };
        let kept: Arc<dyn Store> = Arc::new(store(&[]).await);
        let process = Process::new(&state_dir, Anonymous::Auto);
        let wrong = NewKey { limits: vec!["none".into()], ..NewKey::default() };
        Desk::new(kept.clone(), &settings).create(wrong, 1).await.expect_err("no such limit");
        Desk::beside(kept.clone(), &shared).create(NewKey::default(), 1).await.expect("issued");
        process.follow(&store(&[]).await).await;
        assert!(process.is_open(), "nothing was issued here");
        for make in [Desk::new, Desk::beside] {
            let desk = make(kept.clone(), &settings);
            let issued = desk.create(NewKey::default(), 1).await.expect("issued");
            assert!(marker::counts(&state_dir));
            std::fs::remove_file(marker::path(&state_dir)).expect("removed");
            desk.rotate(&issued.record.id, Duration::ZERO, 1).await.expect("rotated");
            process.follow(&store(&[]).await).await;
            assert!(marker::counts(&state_dir) && !process.is_open());
            std::fs::remove_file(marker::path(&state_dir)).expect("removed");
        }
        std::fs::remove_dir_all(&state_dir).expect("removed");
    }

    /// Gateway that panics while the tasks for its issuers are looked after; their keys are there from then on.
    struct Panicking {
        process: Process,
        keys: PathBuf,
        asked: AtomicU64,
    }

    impl Guarded for Panicking {
        fn guard(&self) -> &Guard {
            &self.process.guard
        }

        fn identity(&self) -> Arc<Identity> {
            if self.asked.fetch_add(1, Ordering::AcqRel) == 1 {
                std::fs::write(&self.keys, set()).expect("written");
                panic!("as a test");
            }
            self.process.identity.clone()
        }

        fn store(&self) -> Option<Arc<dyn Store>> {
            None
        }
    }

    #[tokio::test]
    async fn keys_of_issuers_are_fetched_after_a_panic() {
        let state_dir = folder("panic");
        std::fs::create_dir_all(&state_dir).expect("a folder");
        let keys = state_dir.join("keys.json");
        let issuer = IssuerConfig { source: KeySource::File(keys.clone()), ..config() };
        let auth = AuthConfig { issuers: vec![issuer], ..AuthConfig::default() };
        let identity = Arc::new(Identity::new(&settings(&auth, &state_dir)));
        let process = Process { guard: Guard::new(Arc::default()), identity };
        let gateway = Arc::new(Panicking { process, keys, asked: AtomicU64::new(0) });
        let weak: Weak<dyn Guarded> = Arc::<Panicking>::downgrade(&gateway);
        let ring = gateway.process.guard.ring(&gateway.process.identity.issuers[0]);
        let fetched = async {
            while ring.held().is_none() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let either = async {
            tokio::select! {
                () = supervised("issuers of tokens", || issuers(&weak), || sleep(AGAIN)) => panic!("they have ended"),
                () = fetched => {}
            }
        };
        assert!(timeout(Duration::from_secs(30), either).await.is_ok(), "nobody fetches keys");
        assert!(gateway.asked.load(Ordering::Acquire) > 2);
        std::fs::remove_dir_all(&state_dir).expect("removed");
    }

    #[tokio::test]
    async fn a_marker_that_is_made_meanwhile_is_found() {
        let state_dir = folder("meanwhile");
        let process = Process::new(&state_dir, Anonymous::Auto);
        let empty = store(&[]).await;
        process.follow(&empty).await;
        assert!(process.is_open());
        // By another process, in an upgrade.
        assert!(marker::make(&state_dir));
        process.follow(&empty).await;
        assert!(!process.is_open());
        std::fs::remove_dir_all(&state_dir).expect("removed");
    }
}
