//! Debounced log of state changes: few lines in a storm, and in the end the last state of every subject.
//!
//! A change is logged at once if nothing was logged for one interval. Other changes wait. When the interval has ended, each
//! subject whose state differs from the one last logged gets a line; changes in between are only counted. A breaker that
//! was logged as open is therefore logged as closed, however soon it closes. A pause ends by time, without a change, so a
//! second pause in a row gets a line as well. `Debounce` is pure, with time as an argument; only [`Logs`] waits, for
//! subjects without further events.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::time::sleep_until;

use crate::lane::Change;

/// Most lines that are logged at once, and most waiting subjects whose bad state was not logged. Changes of further
/// subjects are only counted.
const SUBJECTS_MAX: usize = 64;
/// Most subjects whose bad states are remembered: eight lanes with 128 keys each. Beyond that, the state logged longest ago
/// is forgotten, and the recovery from it may not be logged.
const BAD_MAX: usize = 1024;

/// Debounced log of the states of several subjects, at one interval.
#[derive(Debug)]
struct Debounce<S> {
    apart: Duration,
    last: Option<Instant>,
    /// Subjects last told to be in a bad state, with that state.
    bad: Vec<(S, u8)>,
    /// Subjects with a change that is not told yet, oldest change first.
    waiting: Vec<Waiting<S>>,
    unlogged: u64,
    is_timed: bool,
}

/// Last change of a subject that is not told yet.
#[derive(Debug)]
struct Waiting<S> {
    subject: S,
    change: Change,
    /// True if the change before, which was not told either, was one to a good state.
    was_good: bool,
}

/// Line to be logged: a subject has changed its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line<S> {
    /// Subject of the change.
    pub subject: S,
    /// Change to the subject's present state.
    pub change: Change,
    /// Number of changes since the line before that are not told.
    pub unlogged: u64,
}

impl<S: Clone + PartialEq> Debounce<S> {
    /// A log that has told nothing yet; `apart`: its interval.
    fn new(apart: Duration) -> Self {
        Self { apart, last: None, bad: Vec::new(), waiting: Vec::new(), unlogged: 0, is_timed: false }
    }

    /// Takes a change in; returns the lines to be logged now.
    fn note(&mut self, subject: S, change: Change, now: Instant) -> Vec<Line<S>> {
        let at = self.waiting.iter().position(|other| other.subject == subject);
        let before = at.map(|at| self.waiting.remove(at).change);
        self.unlogged += u64::from(before.is_some());
        if self.is_quiet(now) {
            let mut lines = self.due(now);
            lines.push(self.line(subject, change));
            self.last = Some(now);
            return lines;
        }
        let was_told = self.bad.iter().any(|(other, _)| *other == subject);
        match was_told || self.waiting.len() < SUBJECTS_MAX {
            true => {
                let was_good = before.is_some_and(|before| before.level == 0);
                self.waiting.push(Waiting { subject, change, was_good });
            }
            false => self.unlogged += 1,
        }
        Vec::new()
    }

    /// Lines of the changes that have waited for the end of the interval.
    fn due(&mut self, now: Instant) -> Vec<Line<S>> {
        if self.waiting.is_empty() || !self.is_quiet(now) {
            return Vec::new();
        }
        let mut lines = Vec::new();
        let mut waiting = std::mem::take(&mut self.waiting).into_iter();
        while lines.len() < SUBJECTS_MAX
            && let Some(Waiting { subject, change, was_good }) = waiting.next()
        {
            let told = self.bad.iter().find(|(other, _)| *other == subject).map_or(0, |(_, level)| *level);
            // The bad state was logged, and no change ended it, so it ended by time: the present state is a new one.
            match told == change.level && (told == 0 || was_good) {
                true => self.unlogged += 1,
                false => lines.push(self.line(subject, change)),
            }
        }
        self.waiting = waiting.collect();
        if !lines.is_empty() {
            self.last = Some(now);
        }
        lines
    }

    /// Instant at which [`Self::due`] has to be called; `None`: nothing waits, or a timer is set for it already.
    fn due_at(&self) -> Option<Instant> {
        let at = self.last.map(|last| last + self.apart);
        at.filter(|_| !self.waiting.is_empty() && !self.is_timed)
    }

    /// Notes that a timer is set for [`Self::due_at`], or has run out.
    fn set_timed(&mut self, is_timed: bool) {
        self.is_timed = is_timed;
    }

    fn is_quiet(&self, now: Instant) -> bool {
        self.last.is_none_or(|last| now.saturating_duration_since(last) >= self.apart)
    }

    fn line(&mut self, subject: S, change: Change) -> Line<S> {
        self.bad.retain(|(other, _)| *other != subject);
        if change.level > 0 {
            if self.bad.len() >= BAD_MAX {
                self.bad.remove(0);
            }
            self.bad.push((subject.clone(), change.level));
        }
        Line { subject, change, unlogged: std::mem::take(&mut self.unlogged) }
    }
}

/// Intervals between log lines about one thing: for changes that concern every client key, and for changes that concern one.
pub const LOG_APART: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// Debounced logs of the breakers of one thing, such as a target, apart for changes that concern every client key and for
/// changes that concern one.
#[derive(Debug)]
pub struct Logs<S>(Arc<Mutex<[Debounce<S>; 2]>>);

impl<S: Clone + PartialEq> Default for Logs<S> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(LOG_APART.map(Debounce::new))))
    }
}

impl<S: Clone + PartialEq + Send + 'static> Logs<S> {
    /// Logs a change, or notes it for later; `write` writes a line about the thing `id`.
    pub fn note(&self, id: &str, subject: S, change: Change, now: Instant, write: fn(&str, &Line<S>)) {
        let mut logs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = usize::from(!change.everybody);
        logs[1 - own].due(now).iter().for_each(|line| write(id, line));
        logs[own].note(subject, change, now).iter().for_each(|line| write(id, line));
        self.later(id, &mut logs, write);
    }

    /// Writes the lines that wait and are due.
    pub fn due(&self, id: &str, now: Instant, write: fn(&str, &Line<S>)) {
        let mut logs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        logs.iter_mut().flat_map(|log| log.due(now)).for_each(|line| write(id, &line));
        self.later(id, &mut logs, write);
    }

    /// Sets a timer for the lines that wait, so that each is written when it is due, even if nothing happens any more.
    /// Without an async runtime there are no timers.
    fn later(&self, id: &str, logs: &mut [Debounce<S>; 2], write: fn(&str, &Line<S>)) {
        let Ok(runtime) = Handle::try_current() else { return };
        for (own, log) in logs.iter_mut().enumerate() {
            let Some(due) = log.due_at() else { continue };
            log.set_timed(true);
            let (id, logs) = (id.to_owned(), Arc::downgrade(&self.0));
            // The task ends by itself within the interval of a log.
            drop(runtime.spawn(async move {
                sleep_until(due.into()).await;
                let Some(logs) = logs.upgrade().map(Self) else { return };
                logs.0.lock().unwrap_or_else(PoisonError::into_inner)[own].set_timed(false);
                logs.due(&id, due.max(Instant::now()), write);
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::Why;
    use proptest::prelude::*;

    const APART: Duration = Duration::from_secs(10);

    fn change(level: u8) -> Change {
        Change { everybody: false, level, why: Why::Errors }
    }

    fn levels(lines: &[Line<u8>]) -> Vec<(u8, u8, u64)> {
        lines.iter().map(|line| (line.subject, line.change.level, line.unlogged)).collect()
    }

    #[test]
    fn a_recovery_within_the_interval_is_told_when_the_interval_ends() {
        let (mut log, now) = (Debounce::new(APART), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(levels(&log.note(1, change(3), now)), [(1, 3, 0)]);
        assert_eq!(log.note(1, change(0), at(3)), []);
        assert_eq!((log.due(at(9)), log.due_at()), (Vec::new(), Some(at(10))));
        assert_eq!(levels(&log.due(at(10))), [(1, 0, 0)]);
        assert_eq!(log.due_at(), None);
        // An opening and a closing within one interval give no line.
        assert_eq!(log.note(1, change(3), at(11)), []);
        assert_eq!(log.note(1, change(0), at(12)), []);
        assert_eq!(log.due(at(20)), []);
        assert_eq!(levels(&log.note(2, change(2), at(21))), [(2, 2, 2)]);
    }

    #[test]
    fn a_pause_after_one_that_ended_by_time_is_told() {
        let (mut log, now) = (Debounce::new(APART), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(levels(&log.note(1, change(3), now)), [(1, 3, 0)]);
        assert_eq!(levels(&log.note(2, change(3), at(10))), [(2, 3, 0)]);
        assert_eq!(log.note(1, change(3), at(11)), [], "it waits");
        assert_eq!(levels(&log.due(at(20))), [(1, 3, 0)], "the first has ended in between");
        // A bad state that a change ended, and that is back within the interval, gives no line.
        assert_eq!(log.note(1, change(0), at(21)), []);
        assert_eq!(log.note(1, change(3), at(22)), []);
        assert_eq!(log.due(at(30)), []);
    }

    #[test]
    fn every_key_of_a_lane_that_is_bad_is_told_to_be_good_again() {
        let (mut log, mut now) = (Debounce::new(APART), Instant::now());
        for subject in 0..128 {
            assert_eq!(levels(&log.note(subject, change(3), now)), [(subject, 3, 0)]);
            now += APART;
        }
        log.note(200, change(3), now);
        for subject in 0..128 {
            log.note(subject, change(0), now);
        }
        let told: Vec<_> = (1..4).flat_map(|at| log.due(now + at * APART)).map(|line| line.subject).collect();
        assert_eq!(told, Vec::from_iter(0..128), "64 an interval");
        assert_eq!(log.due_at(), None);
    }

    #[test]
    fn subjects_beyond_the_bound_are_counted() {
        let (mut log, now) = (Debounce::new(APART), Instant::now());
        for subject in 0..=100 {
            log.note(subject, change(3), now);
        }
        let lines = log.due(now + APART);
        assert_eq!((lines.len(), lines[0].unlogged), (SUBJECTS_MAX, 36));
    }

    proptest! {
        /// Property: whatever happens, the last line of each subject is its state, once the interval has ended.
        #[test]
        fn the_last_state_is_told_in_the_end(steps in prop::collection::vec((0_u8..6, 0_u8..4, 0_u64..8000), 1..60)) {
            let (mut log, mut now) = (Debounce::new(APART), Instant::now());
            let (mut state, mut told) = ([0_u8; 6], [0_u8; 6]);
            let mut lines = 0;
            let began = now;
            for (subject, level, ms) in steps {
                now += Duration::from_millis(ms);
                state[usize::from(subject)] = level;
                for line in log.note(subject, change(level), now) {
                    told[usize::from(line.subject)] = line.change.level;
                    lines += 1;
                }
            }
            for line in log.due(now + APART) {
                told[usize::from(line.subject)] = line.change.level;
            }
            prop_assert_eq!(state, told);
            let intervals = (now - began).as_secs() / APART.as_secs() + 1;
            prop_assert!(lines <= 6 * intervals, "{} lines in {} intervals", lines, intervals);
        }
    }
}
