//! Keys of a provider, used in rotation; a key that is rate limited or refused rests for the use that met it.
//!
//! A refusal can depend on the model, the path, or the size of the request. A rest therefore applies to one key, model
//! and path, and at first only to the client key whose request was refused: [`Lane`] has the rules. While no other key
//! is available, one request at a time probes whether a rest can end.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use penstock_types::{FaultClass, ProviderFault};

use crate::config::keys_in;
use penstock_base::Secret;
use penstock_base::error::Failure;
use penstock_upstream::Asker;
use penstock_upstream::breaker::{Admission, Rules};
use penstock_upstream::debounce::{Line, Logs};
use penstock_upstream::lane::{Change, Lane, Pass, Why};

/// Rest of a key after a 429 without `Retry-After`.
const LIMITED: Duration = Duration::from_secs(10);
/// Longest rest that `Retry-After` can cause.
const LIMITED_MAX: Duration = Duration::from_secs(600);
/// Rest of a key after a 401, 402 or 403.
const REFUSED: Duration = Duration::from_secs(300);
/// Most uses (model and path) that one key keeps apart; beyond, idle ones and then the newest are forgotten.
const USES_MAX: usize = 256;

/// Period at which a key file is read again.
const LOOK: Duration = Duration::from_secs(5);

/// Keys of one provider, with the times for which each rests after refusals.
pub struct Keys {
    all: Vec<Key>,
    next: AtomicUsize,
    file: Option<KeyFile>,
    logs: Logs<Subject>,
}

/// Breaker of a key of the provider, as the log tells its changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    /// Index of the key in the provider's list.
    pub(crate) index: usize,
    uses: Use,
    /// Client key of the breaker; `None`: everybody.
    asker: Option<Asker>,
}

/// File that the keys came from; another program may replace expiring tokens in it.
struct KeyFile {
    path: PathBuf,
    looked: Mutex<Instant>,
}

struct Key {
    secret: ArcSwap<Secret>,
    /// Rests by use; a use without an entry was never refused.
    lanes: Mutex<Vec<(Use, Lane)>>,
}

/// Use of a key, for which the key may rest: a hash of model and path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use(u64);

impl Use {
    /// Use for a model and a path; the query of the path does not count.
    pub fn new(model: &str, path: &str) -> Self {
        let path = path.split('?').next().unwrap_or_default();
        Self(penstock_base::hash::stable(&[model.as_bytes(), b"\0", path.as_bytes()].concat()))
    }
}

/// Pacing would delay the request longer than allowed; the value is the predicted wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLate(pub Duration);

impl TooLate {
    /// Failure for the client; nothing was sent.
    pub fn failure(self) -> Failure {
        let message = "The upstream is used at the rate that it allows. Try again later.";
        unsent(ProviderFault::new(FaultClass::RateLimited, message)).retry_after(self.0)
    }
}

/// Failure of a provider that was not contacted.
fn unsent(fault: ProviderFault) -> Failure {
    let mut failure = Failure::provider(fault);
    failure.upstream.iter_mut().for_each(|upstream| upstream.sent = false);
    failure
}

/// Turn of a key that may be used now. Dropping it without an outcome says nothing about the key.
pub struct Turn<'k> {
    keys: &'k Keys,
    at: usize,
    asker: Asker,
    uses: Use,
    /// Admission of this request as a probe, if the key rests.
    trial: Option<Pass>,
}

/// Error that no key may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllRest {
    /// Time until the first key's rest ends.
    pub(crate) wait: Duration,
    /// Reason of the rest that ends first.
    pub(crate) why: Why,
}

impl AllRest {
    /// Failure for the client; nothing was sent.
    pub fn failure(self) -> Failure {
        let (class, message) = match self.why {
            Why::Limited => (FaultClass::RateLimited, "All keys for the upstream are at their limit.".to_owned()),
            why => (FaultClass::Overloaded, format!("The upstream {}. Try again shortly.", why.says())),
        };
        unsent(ProviderFault::new(class, message)).retry_after(self.wait)
    }
}

impl Key {
    fn lanes(&self) -> MutexGuard<'_, Vec<(Use, Lane)>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keys {
    /// Creates the keys; `file`: the file they came from, which is read again.
    pub fn new(secrets: &[Secret], file: Option<&Path>) -> Self {
        let key = |secret: &Secret| Key { secret: ArcSwap::from_pointee(secret.clone()), lanes: Mutex::default() };
        let file = file.map(|path| KeyFile { path: path.to_owned(), looked: Mutex::new(Instant::now()) });
        Self { all: secrets.iter().map(key).collect(), next: AtomicUsize::new(0), file, logs: Logs::default() }
    }

    /// Reads the key file again if it is due. An unreadable or empty file changes nothing. Keys are replaced line by
    /// line; lines beyond the number of keys at start are ignored.
    pub(crate) fn refresh(&self, now: Instant) {
        let Some(file) = &self.file else { return };
        {
            let mut looked = file.looked.lock().unwrap_or_else(PoisonError::into_inner);
            if now.saturating_duration_since(*looked) < LOOK {
                return;
            }
            *looked = now;
        }
        let Ok(text) = std::fs::read_to_string(&file.path) else { return };
        for (key, new) in self.all.iter().zip(keys_in(&text)) {
            if **key.secret.load() != new {
                key.secret.store(Arc::new(new));
                key.lanes().clear();
            }
        }
    }

    /// Number of keys that the provider has.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Takes the next key in rotation that does not rest for this use; while all rest, one whose rest may be probed.
    /// `Ok(None)`: the provider has no keys.
    ///
    /// # Errors
    /// Every key rests and none may be probed.
    pub fn take(&self, asker: Asker, uses: Use, now: Instant) -> Result<Option<Turn<'_>>, AllRest> {
        match self.awake(asker, uses, now) {
            Err(_) => self.trial(asker, uses, now).map(Some),
            awake => awake,
        }
    }

    /// Takes the next key in rotation that does not rest for this use. `Ok(None)`: the provider has no keys.
    ///
    /// # Errors
    /// Every key rests.
    pub(crate) fn awake(&self, asker: Asker, uses: Use, now: Instant) -> Result<Option<Turn<'_>>, AllRest> {
        let count = self.all.len();
        if count == 0 {
            return Ok(None);
        }
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut rest = AllRest { wait: LIMITED_MAX, why: Why::Limited };
        for step in 0..count {
            let at = first.wrapping_add(step) % count;
            let lanes = self.all[at].lanes();
            let Some((_, lane)) = lanes.iter().find(|(other, _)| *other == uses) else {
                return Ok(Some(self.turn(at, asker, uses)));
            };
            match lane.look(asker, now) {
                Admission::Yes | Admission::Last => return Ok(Some(self.turn(at, asker, uses))),
                Admission::Trial(until) | Admission::No(until) => {
                    let wait = until.saturating_duration_since(now);
                    if wait < rest.wait || step == 0 {
                        rest = AllRest { wait, why: lane.why(asker, now) };
                    }
                }
            }
        }
        Err(rest)
    }

    /// Turn of the key `at` (an index, modulo the number of keys), independent of the rotation; `None`: the key rests
    /// for this use, or the provider has no keys.
    pub(crate) fn awake_at(&self, at: usize, asker: Asker, uses: Use, now: Instant) -> Option<Turn<'_>> {
        let at = at.checked_rem(self.all.len())?;
        let lanes = self.all[at].lanes();
        let lane = lanes.iter().find(|(other, _)| *other == uses).map(|(_, lane)| lane);
        let is_awake = lane.is_none_or(|lane| matches!(lane.look(asker, now), Admission::Yes | Admission::Last));
        is_awake.then(|| self.turn(at, asker, uses))
    }

    fn turn(&self, at: usize, asker: Asker, uses: Use) -> Turn<'_> {
        Turn { keys: self, at, asker, uses, trial: None }
    }

    /// Takes the first key whose rest this request may probe.
    fn trial(&self, asker: Asker, uses: Use, now: Instant) -> Result<Turn<'_>, AllRest> {
        let mut rest = AllRest { wait: LIMITED_MAX, why: Why::Limited };
        for (at, key) in self.all.iter().enumerate() {
            let mut lanes = key.lanes();
            let Some((_, lane)) = lanes.iter_mut().find(|(other, _)| *other == uses) else {
                return Ok(self.turn(at, asker, uses));
            };
            let until = match lane.look(asker, now) {
                Admission::Yes | Admission::Last => return Ok(self.turn(at, asker, uses)),
                Admission::Trial(_) => {
                    let pass = lane.enter(asker, true, now);
                    return Ok(Turn { trial: Some(pass), ..self.turn(at, asker, uses) });
                }
                Admission::No(until) => until,
            };
            let wait = until.saturating_duration_since(now);
            if wait < rest.wait || at == 0 {
                rest = AllRest { wait, why: lane.why(asker, now) };
            }
        }
        Err(rest)
    }

    /// Logs that a key rests or is used again: at most once a second, or once in ten seconds for changes that concern one
    /// client key, with one line for each breaker that has changed.
    pub(crate) fn log(&self, provider: &str, subject: Subject, change: Option<Change>, now: Instant) {
        let Some(change) = change else { return };
        let asker = subject.asker.filter(|_| !change.everybody);
        self.logs.note(provider, Subject { asker, ..subject }, change, now, write);
    }

    /// Number of keys that rest for at least one use.
    pub(crate) fn resting(&self, now: Instant) -> usize {
        let rests = |key: &&Key| key.lanes().iter().any(|(_, lane)| lane.is_cooling(now));
        self.all.iter().filter(rests).count()
    }

    /// Text with every key replaced by `[key]`.
    pub(crate) fn filtered(&self, mut text: String) -> String {
        for key in &self.all {
            let secret = key.secret.load();
            if text.contains(secret.expose()) {
                text = text.replace(secret.expose(), "[key]");
            }
        }
        text
    }

    /// Returns true if the bytes hold one of the keys.
    pub(crate) fn are_in(&self, bytes: &[u8]) -> bool {
        self.all.iter().any(|key| memchr::memmem::find(bytes, key.secret.load().expose().as_bytes()).is_some())
    }
}

fn write(provider: &str, line: &Line<Subject>) {
    let Line { subject, change, unlogged } = line;
    let (key_index, everybody) = (subject.index, subject.asker.is_none());
    match change.level {
        0 => tracing::info!(provider, key_index, everybody, unlogged, "a key of a provider is used again"),
        _ => {
            let why = change.why.name();
            tracing::warn!(provider, key_index, everybody, why, unlogged, "a key of a provider is paused");
        }
    }
}

impl Turn<'_> {
    /// Secret text of the key, as it is put into the request.
    pub(crate) fn secret(&self) -> Arc<Secret> {
        self.keys.all[self.at].secret.load_full()
    }

    /// Notes that the provider rate limits the key.
    pub(crate) fn limited(self, now: Instant, retry_after: Option<Duration>) -> Option<Change> {
        self.rest(retry_after.unwrap_or(LIMITED).min(LIMITED_MAX), Why::Limited, now)
    }

    /// Notes that the provider refuses the key for the given reason.
    pub(crate) fn refused(self, why: Why, now: Instant) -> Option<Change> {
        self.rest(REFUSED, why, now)
    }

    /// Notes that the provider accepted the key, whatever its answer.
    pub fn worked(mut self, now: Instant) -> Option<Change> {
        let mut lanes = self.keys.all[self.at].lanes();
        let (_, lane) = lanes.iter_mut().find(|(uses, _)| *uses == self.uses)?;
        let pass = self.trial.take().unwrap_or_else(|| lane.enter(self.asker, false, now));
        lane.succeed(pass, now)
    }

    /// Index of the key in the provider's list.
    pub(crate) fn index(&self) -> usize {
        self.at
    }

    /// Returns true if the key has been paused since it was taken. A request that probes a paused key goes on.
    pub(crate) fn is_paused(&self, now: Instant) -> bool {
        self.trial.is_none() && self.keys.awake_at(self.at, self.asker, self.uses, now).is_none()
    }

    /// Breaker that an outcome of the turn may change, for the log.
    pub(crate) fn subject(&self) -> Subject {
        Subject { index: self.at, uses: self.uses, asker: Some(self.asker) }
    }

    /// Notes the consequence of a failed request for the key.
    pub fn answered(self, class: FaultClass, retry_after: Option<Duration>, now: Instant) -> Option<Change> {
        match class {
            FaultClass::Quota => self.refused(Why::Credit, now),
            FaultClass::Unauthorized | FaultClass::Forbidden => self.refused(Why::Refused, now),
            FaultClass::RateLimited => self.limited(now, retry_after),
            // A failing provider may not have checked the key.
            FaultClass::Server | FaultClass::Overloaded | FaultClass::Timeout => None,
            _ => self.worked(now),
        }
    }

    fn rest(mut self, time: Duration, why: Why, now: Instant) -> Option<Change> {
        let mut lanes = self.keys.all[self.at].lanes();
        let at = lanes.iter().position(|(uses, _)| *uses == self.uses).unwrap_or_else(|| {
            if lanes.len() >= USES_MAX {
                lanes.retain(|(_, lane)| !lane.is_idle(now));
                lanes.truncate(USES_MAX - 1);
            }
            lanes.push((self.uses, Lane::new(Rules::DEFAULT)));
            lanes.len() - 1
        });
        let lane = &mut lanes[at].1;
        if let Some(pass) = self.trial.take() {
            lane.abandon(pass, now);
        }
        lane.cool(self.asker, now + time, why, now)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(pass) = self.trial.take() else { return };
        let mut lanes = self.keys.all[self.at].lanes();
        if let Some((_, lane)) = lanes.iter_mut().find(|(uses, _)| *uses == self.uses) {
            lane.abandon(pass, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::testing::logged;
    use penstock_upstream::debounce::LOG_APART;

    fn subject(index: usize) -> Subject {
        Subject { index, uses: CHAT(), asker: Some(asker("t")) }
    }

    const CHAT: fn() -> Use = || Use::new("m", "/chat/completions");

    fn asker(name: &str) -> Asker {
        Asker::new(name, None)
    }

    fn take(keys: &Keys, name: &str, uses: Use, now: Instant) -> Result<String, AllRest> {
        keys.take(asker(name), uses, now).map(|turn| turn.expect("there are keys").secret().expose().to_owned())
    }

    fn turn<'k>(keys: &'k Keys, name: &str, uses: Use, now: Instant) -> Turn<'k> {
        keys.take(asker(name), uses, now).expect("one is awake").expect("there are keys")
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_key_that_rests_is_logged_and_a_storm_is_a_line_a_second() {
        let keys = Keys::new(&[Secret::new("aa")], None);
        let now = Instant::now();
        let change = Change { everybody: true, level: 3, why: Why::Limited };
        let log = logged(|| {
            for milliseconds in 0..2500 {
                keys.log("openai", subject(0), Some(change), now + Duration::from_millis(milliseconds));
            }
            keys.log("openai", subject(0), None, now + seconds(9));
            keys.log("openai", subject(0), Some(Change { level: 0, ..change }), now + seconds(9));
        });
        assert_eq!(log.lines().count(), 4, "{log}");
        let first = log.lines().next().expect("four");
        for part in ["WARN", "provider=\"openai\"", "key_index=0", "why=", "a key of a provider is paused"] {
            assert!(first.contains(part), "{part} is not in: {first}");
        }
        assert!(log.lines().last().is_some_and(|last| last.contains("INFO") && last.contains("is used again")));
        assert!(!log.contains("aa"), "no key is in the log");
    }

    /// A pause and a recovery within a second of another line are told when the second is over, although nothing happens
    /// then.
    #[test]
    fn the_last_state_of_each_key_is_told_in_the_end() {
        let (keys, now) = (Keys::new(&[Secret::new("aa"), Secret::new("bb")], None), Instant::now());
        let change = |level| Some(Change { everybody: true, level, why: Why::Limited });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let log = logged(|| {
            runtime.block_on(async {
                keys.log("openai", subject(0), change(3), now);
                keys.log("openai", subject(1), change(3), now);
                keys.log("openai", subject(0), change(0), now);
                tokio::time::sleep(LOG_APART[0] + Duration::from_millis(100)).await;
                // Tasks that are due have their turn.
                for _ in 0..100 {
                    tokio::task::yield_now().await;
                }
            });
        });
        let lines: Vec<_> = log.lines().map(|line| (line.contains("key_index=0"), line.contains("INFO"))).collect();
        assert_eq!(lines, [(true, false), (false, false), (true, true)], "{log}");
    }

    /// Each breaker of one key has its own line: a recovery of one does not stand for another that is open.
    #[test]
    fn the_log_keeps_uses_and_client_keys_apart() {
        let (keys, now) = (Keys::new(&[Secret::new("aa")], None), Instant::now());
        let tell = |name, uses, level, everybody, milliseconds| {
            let subject = Subject { index: 0, uses, asker: Some(asker(name)) };
            let change = Change { everybody, level, why: Why::Limited };
            keys.log("openai", subject, Some(change), now + Duration::from_millis(milliseconds));
        };
        let embed = Use::new("m", "/embeddings");
        let log = logged(|| {
            // Of each pair, the second breaker opens while the first has closed again.
            for (at, everybody, (one, uses), (two, other)) in [
                (0, false, ("a", CHAT()), ("a", embed)),
                (50_000, false, ("a", CHAT()), ("b", CHAT())),
                (100_000, true, ("a", CHAT()), ("b", embed)),
            ] {
                tell(one, uses, 3, everybody, at);
                tell(two, other, 3, everybody, at + 1);
                tell(one, uses, 0, everybody, at + 2);
                // What has waited is told with the next line.
                tell("z", Use::new("n", "/x"), 3, false, at + 20_000);
            }
        });
        let lines: Vec<_> = log.lines().map(|line| line.contains("INFO")).collect();
        assert_eq!(lines, [false, false, true, false].repeat(3), "{log}");
    }

    #[test]
    fn keys_take_turns_and_rest() {
        let keys = Keys::new(&[Secret::new("aa"), Secret::new("bb")], None);
        let now = Instant::now();
        let take = |at| take(&keys, "t", CHAT(), at);
        assert_eq!([take(now), take(now)], [Ok("aa".into()), Ok("bb".into())]);
        turn(&keys, "t", CHAT(), now).limited(now, Some(seconds(3)));
        assert_eq!([take(now), take(now)], [Ok("bb".into()), Ok("bb".into())]);
        turn(&keys, "t", CHAT(), now).refused(Why::Refused, now);
        assert_eq!((take(now), keys.resting(now)), (Err(AllRest { wait: seconds(3), why: Why::Limited }), 2));
        let later = now + seconds(4);
        assert_eq!([take(later), take(later)], [Ok("aa".into()), Ok("aa".into())]);
        assert_eq!(keys.filtered("x aa y bb".into()), "x [key] y [key]");
    }

    #[test]
    fn a_rest_is_one_of_a_key_a_model_and_a_path() {
        let keys = Keys::new(&[Secret::new("aa")], None);
        let now = Instant::now();
        turn(&keys, "t", Use::new("m", "/embeddings"), now).refused(Why::Refused, now);
        assert_eq!(
            take(&keys, "t", Use::new("m", "/embeddings?x=1"), now),
            Err(AllRest { wait: REFUSED, why: Why::Refused })
        );
        for other in [CHAT(), Use::new("n", "/embeddings")] {
            assert_eq!(take(&keys, "t", other, now), Ok("aa".into()));
        }
    }

    #[test]
    fn what_one_client_was_told_is_no_rest_for_the_others_until_another_is_told_it() {
        let keys = Keys::new(&[Secret::new("aa")], None);
        let now = Instant::now();
        turn(&keys, "a", CHAT(), now).limited(now, Some(seconds(60)));
        assert!(take(&keys, "a", CHAT(), now).is_err());
        turn(&keys, "b", CHAT(), now).worked(now);
        for second in 0..20 {
            // The number of refusals for one client key does not matter.
            let now = now + seconds(second);
            if let Ok(Some(turn)) = keys.take(asker("a"), CHAT(), now) {
                turn.limited(now, Some(seconds(60)));
            }
            assert_eq!(take(&keys, "b", CHAT(), now), Ok("aa".into()));
        }
        turn(&keys, "b", CHAT(), now).limited(now, Some(seconds(60)));
        assert_eq!(take(&keys, "c", CHAT(), now), Err(AllRest { wait: seconds(60), why: Why::Limited }));
    }

    #[test]
    fn one_request_at_a_time_finds_out_whether_a_rest_is_over() {
        let keys = Keys::new(&[Secret::new("aa")], None);
        let now = Instant::now();
        turn(&keys, "t", CHAT(), now).limited(now, Some(seconds(60)));
        assert!(take(&keys, "t", CHAT(), now + seconds(5)).is_err(), "not at once");
        let later = now + seconds(7);
        let trial = turn(&keys, "t", CHAT(), later);
        assert!(take(&keys, "t", CHAT(), later).is_err(), "one at a time");
        trial.limited(later, Some(seconds(60)));
        assert!(take(&keys, "t", CHAT(), later + seconds(5)).is_err());
        drop(turn(&keys, "t", CHAT(), later + seconds(7)));
        turn(&keys, "t", CHAT(), later + seconds(7)).worked(later + seconds(7));
        assert_eq!(take(&keys, "t", CHAT(), later + seconds(7)), Ok("aa".into()));
        assert_eq!(keys.resting(later + seconds(7)), 0);
    }

    #[test]
    fn a_file_is_read_again() {
        let path = std::env::temp_dir().join(format!("penstock-keys-{}", std::process::id()));
        std::fs::write(&path, "old\n").expect("written");
        let keys = Keys::new(&[Secret::new("old")], Some(&path));
        let now = Instant::now();
        turn(&keys, "t", CHAT(), now).refused(Why::Refused, now);
        let use_at = |at: Instant| {
            keys.refresh(at);
            take(&keys, "t", CHAT(), at).ok()
        };
        std::fs::write(&path, "new\n").expect("written");
        assert_eq!((use_at(now), use_at(now + LOOK)), (None, Some("new".into())));
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(use_at(now + 2 * LOOK), Some("new".into()));
    }

    #[test]
    fn without_keys_none_is_sent() {
        assert!(matches!(Keys::new(&[], None).take(asker("t"), CHAT(), Instant::now()), Ok(None)));
    }
}
