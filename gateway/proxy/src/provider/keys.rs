//! A provider's keys: they take turns; one that is limited or refused rests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use crate::config::{Secret, keys_in};

/// Rest of a key after a 429 that does not say how long.
const LIMITED: Duration = Duration::from_secs(10);
/// Longest rest that a provider can ask for.
const LIMITED_MAX: Duration = Duration::from_secs(600);
/// Rest of a key that was refused.
const REFUSED: Duration = Duration::from_secs(300);

/// How often a file of keys is looked at.
const LOOK: Duration = Duration::from_secs(5);

/// The keys of one provider.
pub(super) struct Keys {
    all: Vec<Key>,
    next: AtomicUsize,
    file: Option<KeyFile>,
}

/// Where the keys came from: tokens that expire are written anew by somebody else.
struct KeyFile {
    path: PathBuf,
    looked: Mutex<Instant>,
}

struct Key {
    secret: ArcSwap<Secret>,
    rests_until: Mutex<Option<Instant>>,
}

/// A key that may be used now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn(usize);

impl Keys {
    /// `file`: where they came from, to be read again.
    pub(super) fn new(secrets: &[Secret], file: Option<&Path>) -> Self {
        let key =
            |secret: &Secret| Key { secret: ArcSwap::from_pointee(secret.clone()), rests_until: Mutex::default() };
        let file = file.map(|path| KeyFile { path: path.to_owned(), looked: Mutex::new(Instant::now()) });
        Self { all: secrets.iter().map(key).collect(), next: AtomicUsize::new(0), file }
    }

    /// Reads the file again, if it is time. A file that cannot be read, or has no key, changes nothing; as many lines count as there were
    /// at start.
    pub(super) fn refresh(&self, now: Instant) {
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
                *key.rests_until.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
        }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// The next key in turn that does not rest; `Ok(None)`: the provider has no keys.
    ///
    /// # Errors
    /// All rest; the first comes back after this.
    pub(super) fn take(&self, now: Instant) -> Result<Option<Turn>, Duration> {
        let count = self.all.len();
        if count == 0 {
            return Ok(None);
        }
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut soonest = LIMITED_MAX;
        for step in 0..count {
            let at = first.wrapping_add(step) % count;
            let rests_until = *self.all[at].rests_until.lock().unwrap_or_else(PoisonError::into_inner);
            match rests_until.map(|until| until.saturating_duration_since(now)).filter(|left| !left.is_zero()) {
                None => return Ok(Some(Turn(at))),
                Some(left) => soonest = soonest.min(left),
            }
        }
        Err(soonest)
    }

    /// Its text.
    pub(super) fn secret(&self, turn: Turn) -> Arc<Secret> {
        self.all[turn.0].secret.load_full()
    }

    /// The provider limits it.
    pub(super) fn limited(&self, turn: Turn, now: Instant, retry_after: Option<Duration>) {
        self.rest(turn, now + retry_after.unwrap_or(LIMITED).min(LIMITED_MAX));
    }

    /// The provider refuses it.
    pub(super) fn refused(&self, turn: Turn, now: Instant) {
        self.rest(turn, now + REFUSED);
    }

    fn rest(&self, turn: Turn, until: Instant) {
        let mut rests_until = self.all[turn.0].rests_until.lock().unwrap_or_else(PoisonError::into_inner);
        *rests_until = Some(rests_until.map_or(until, |before| before.max(until)));
    }

    /// Keys that rest.
    pub(super) fn resting(&self, now: Instant) -> usize {
        let rests =
            |key: &Key| key.rests_until.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|at| at > now);
        self.all.iter().filter(|key| rests(key)).count()
    }

    /// The text without any of the keys.
    pub(super) fn filtered(&self, mut text: String) -> String {
        for key in &self.all {
            let secret = key.secret.load();
            if text.contains(secret.expose()) {
                text = text.replace(secret.expose(), "[key]");
            }
        }
        text
    }

    /// Whether the bytes hold one of the keys.
    pub(super) fn are_in(&self, bytes: &[u8]) -> bool {
        self.all.iter().any(|key| memchr::memmem::find(bytes, key.secret.load().expose().as_bytes()).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_take_turns_and_rest() {
        let keys = Keys::new(&[Secret::new("aa"), Secret::new("bb")], None);
        let now = Instant::now();
        let take =
            |at: Instant| keys.take(at).map(|turn| keys.secret(turn.expect("there are keys")).expose().to_owned());
        assert_eq!([take(now), take(now), take(now)], [Ok("aa".into()), Ok("bb".into()), Ok("aa".into())]);
        keys.limited(Turn(0), now, Some(Duration::from_secs(3)));
        assert_eq!([take(now), take(now)], [Ok("bb".into()), Ok("bb".into())]);
        keys.refused(Turn(1), now);
        assert_eq!((take(now), keys.resting(now)), (Err(Duration::from_secs(3)), 2));
        let later = now + Duration::from_secs(4);
        assert_eq!([take(later), take(later)], [Ok("aa".into()), Ok("aa".into())]);
        assert_eq!(keys.filtered("x aa y bb".into()), "x [key] y [key]");
    }

    #[test]
    fn a_file_is_read_again() {
        let path = std::env::temp_dir().join(format!("penstock-keys-{}", std::process::id()));
        std::fs::write(&path, "old\n").expect("written");
        let keys = Keys::new(&[Secret::new("old")], Some(&path));
        let now = Instant::now();
        keys.refused(Turn(0), now);
        let use_at = |at: Instant| {
            keys.refresh(at);
            keys.take(at).map(|turn| keys.secret(turn.expect("there is one")).expose().to_owned()).ok()
        };
        std::fs::write(&path, "new\n").expect("written");
        assert_eq!((use_at(now), use_at(now + LOOK)), (None, Some("new".into())));
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(use_at(now + 2 * LOOK), Some("new".into()));
    }

    #[test]
    fn without_keys_none_is_sent() {
        assert_eq!(Keys::new(&[], None).take(Instant::now()), Ok(None));
    }
}
