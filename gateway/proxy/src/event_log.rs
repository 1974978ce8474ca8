//! Events of one response that is streamed in the background: a bounded log that one task writes and clients read at
//! their own pace, and the replay of a log that was stored.
//!
//! Events are server-sent events as text, numbered from 0 by their `sequence_number`. Nobody who reads holds the writer
//! up: beyond the bound the oldest events are dropped, and a reader that needs one of them is told.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::{Bytes, BytesMut};
use penstock_store::ResponseId;
use tokio::sync::watch;

/// Most bytes of events that are taken from a log at once.
const READ_BYTES: usize = 64 * 1024;

/// Events of one response while it is answered.
pub(crate) struct Log {
    state: Mutex<State>,
    /// Number of changes; followers wake when it rises.
    changed: watch::Sender<u64>,
    bytes_max: usize,
}

struct State {
    /// Number of the first event that is kept.
    first: u64,
    events: VecDeque<Bytes>,
    bytes: usize,
    behind: Behind,
    /// Number of tasks that hold further events back.
    holders: usize,
    /// Events that are held back.
    later: Vec<Bytes>,
    /// Bytes of the events that are held back.
    later_bytes: usize,
}

/// State of the response behind the last event that a reader of the log has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behind {
    /// More events.
    More,
    /// Nothing: the last event of the response is there.
    Nothing,
    /// Whatever the store says: the response goes on without this log, or is gone.
    Store,
}

/// Events read from a log at once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Read {
    /// Text of the events.
    pub(crate) bytes: Bytes,
    /// Number of the event behind those that were read.
    pub(crate) next: u64,
    /// What comes behind them.
    pub(crate) behind: Behind,
}

impl State {
    /// Number of the next event that readers get.
    fn next(&self) -> u64 {
        self.first + self.events.len() as u64
    }

    /// Adds what was held back.
    fn release(&mut self, bytes_max: usize) {
        self.later_bytes = 0;
        for event in std::mem::take(&mut self.later) {
            self.append(event);
        }
        self.drop_oldest(bytes_max);
    }

    fn drop_later(&mut self) {
        self.later.clear();
        self.later_bytes = 0;
    }

    fn append(&mut self, event: Bytes) {
        self.bytes += event.len();
        self.events.push_back(event);
    }

    fn drop_oldest(&mut self, bytes_max: usize) {
        while self.bytes > bytes_max && self.events.len() > 1 {
            let dropped = self.events.pop_front().map_or(0, |event| event.len());
            (self.bytes, self.first) = (self.bytes - dropped, self.first + 1);
        }
    }
}

/// Hold on a log: as long as one is there, readers get no further events, so that what is stored meanwhile is what they have got.
pub(crate) struct HeldBack<'a>(&'a Log);

impl Drop for HeldBack<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.holders -= 1;
        if state.holders > 0 || state.behind != Behind::More {
            return;
        }
        state.release(self.0.bytes_max);
        drop(state);
        self.0.changed.send_modify(|changes| *changes += 1);
    }
}

impl Log {
    /// Log that begins with these events, numbered from 0, and keeps up to `bytes_max` bytes.
    pub(crate) fn new(begin: &Bytes, bytes_max: usize) -> Arc<Self> {
        let (events, later) = (VecDeque::new(), Vec::new());
        let state = State { first: 0, events, bytes: 0, behind: Behind::More, holders: 0, later, later_bytes: 0 };
        let log = Self { state: Mutex::new(state), changed: watch::Sender::new(0), bytes_max };
        log.push(begin);
        Arc::new(log)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds events, whole ones; the oldest are dropped beyond the bound.
    pub(crate) fn push(&self, events: &Bytes) {
        if !events.is_empty() {
            self.add(events, Behind::More);
        }
    }

    /// Adds the last event of the response.
    pub(crate) fn end(&self, last: &Bytes) {
        self.add(last, Behind::Nothing);
    }

    /// Holds back what is added from now on.
    pub(crate) fn hold_back(&self) -> HeldBack<'_> {
        self.state().holders += 1;
        HeldBack(self)
    }

    /// Adds the last event of the response, made for its number, behind what readers have got: what another task has added
    /// since the log was held back is dropped.
    pub(crate) fn end_with(&self, last: impl FnOnce(u64) -> Bytes) {
        let mut state = self.state();
        state.drop_later();
        let last = last(state.next());
        self.add_to(&mut state, &last, Behind::Nothing);
        drop(state);
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// Says that no more events come here: the response was deleted, or ended elsewhere.
    pub(crate) fn close(&self) {
        self.add(&Bytes::new(), Behind::Store);
    }

    /// Adds events and what comes behind them in one step, so that nobody reads the one without the other.
    fn add(&self, events: &Bytes, behind: Behind) {
        let mut state = self.state();
        self.add_to(&mut state, events, behind);
        drop(state);
        self.changed.send_modify(|changes| *changes += 1);
    }

    fn add_to(&self, state: &mut State, events: &Bytes, behind: Behind) {
        if state.behind != Behind::More {
            return;
        }
        state.behind = behind;
        // A copy: a piece would keep all events of one write in memory.
        let copies = split(events).map(|event| Bytes::copy_from_slice(&event));
        if behind == Behind::More && state.holders > 0 {
            for event in copies {
                state.later_bytes += event.len();
                state.later.push(event);
            }
            // A store that hangs does not keep a log from its bound: readers are then told more than it may have.
            if state.later_bytes > self.bytes_max {
                state.release(self.bytes_max);
            }
            return;
        }
        match behind {
            // The store has the end, without what was held back.
            Behind::Store => state.drop_later(),
            Behind::More | Behind::Nothing => state.release(self.bytes_max),
        }
        copies.for_each(|event| state.append(event));
        state.drop_oldest(self.bytes_max);
    }

    /// Receiver that is notified of every change.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Number of the next event, those that are held back included.
    pub(crate) fn next(&self) -> u64 {
        let state = self.state();
        state.next() + state.later.len() as u64
    }

    /// Bytes of the events that are kept, those that are held back included.
    pub(crate) fn bytes(&self) -> usize {
        let state = self.state();
        state.bytes + state.later_bytes
    }

    /// All events that are kept, those that are held back included, and `last` behind them, for the store.
    pub(crate) fn document(&self, last: &Bytes) -> Bytes {
        let state = self.state();
        let all = state.events.iter().chain(&state.later).chain([last]);
        all.flat_map(|event| event.iter().copied()).collect::<Vec<u8>>().into()
    }

    /// All events that readers get, and the last one, made for its number, behind them.
    pub(crate) fn document_with(&self, last: impl FnOnce(u64) -> Bytes) -> Bytes {
        let state = self.state();
        let last = last(state.next());
        let mut out = BytesMut::with_capacity(state.bytes + last.len());
        state.events.iter().for_each(|event| out.extend_from_slice(event));
        out.extend_from_slice(&last);
        out.freeze()
    }

    /// Events from number `next` on; `None`: it is not kept any more.
    pub(crate) fn read(&self, next: u64) -> Option<Read> {
        let state = self.state();
        let from = next.checked_sub(state.first)? as usize;
        let (mut out, mut count) = (BytesMut::new(), 0);
        for event in state.events.iter().skip(from) {
            if count > 0 && out.len() + event.len() > READ_BYTES {
                break;
            }
            out.extend_from_slice(event);
            count += 1;
        }
        let behind = if from + count < state.events.len() { Behind::More } else { state.behind };
        Some(Read { bytes: out.freeze(), next: next + count as u64, behind })
    }
}

/// Logs of the responses that this process answers, or whose clients follow here.
#[derive(Default)]
pub(crate) struct Logs(Mutex<HashMap<ResponseId, Weak<Log>>>);

impl Logs {
    /// Log of a response; `None`: this process has none.
    pub(crate) fn find(&self, id: &ResponseId) -> Option<Arc<Log>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(id).and_then(Weak::upgrade)
    }

    /// Log of a response, made by `make` where there is none.
    pub(crate) fn of(&self, id: &ResponseId, make: impl FnOnce() -> Arc<Log>) -> Arc<Log> {
        let mut logs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(log) = logs.get(id).and_then(Weak::upgrade) {
            return log;
        }
        logs.retain(|_, log| log.strong_count() > 0);
        let log = make();
        logs.insert(id.clone(), Arc::downgrade(&log));
        log
    }
}

/// Pieces of server-sent events, one each.
fn split(events: &Bytes) -> impl Iterator<Item = Bytes> {
    let mut rest = events.clone();
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        // JSON has no line ends, so an empty line ends an event.
        let end = rest.windows(2).position(|two| two == b"\n\n").map_or(rest.len(), |at| at + 2);
        Some(rest.split_to(end))
    })
}

const NUMBER: &[u8] = b"\"sequence_number\":";

/// Place of an event's number in its text: the first of that name, since nothing of the answer stands before it.
fn number_at(event: &[u8]) -> Option<std::ops::Range<usize>> {
    let from = event.windows(NUMBER.len()).position(|name| name == NUMBER)? + NUMBER.len();
    let digits = event[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    Some(from..from + digits)
}

fn number(event: &[u8]) -> Option<u64> {
    std::str::from_utf8(&event[number_at(event)?]).ok()?.parse().ok()
}

/// The event under another number.
fn numbered(event: &Bytes, number: u64) -> Bytes {
    let Some(at) = number_at(event) else { return event.clone() };
    [&event[..at.start], number.to_string().as_bytes(), &event[at.end..]].concat().into()
}

/// Events of an ended response from number `next` on. The last is told in every case, under a number that is not below
/// `next`: a client that has seen more than was kept learns the end too. `None`: events before the last are missing.
pub(crate) fn rest(document: &Bytes, next: u64) -> Option<Bytes> {
    let events: Vec<(u64, Bytes)> = split(document).filter_map(|event| Some((number(&event)?, event))).collect();
    let (last, first) = (events.last()?, events.first()?.0);
    if last.0 < next || events.len() == 1 {
        return Some(numbered(&last.1, last.0.max(next)));
    }
    if next < first {
        return None;
    }
    let after = events.iter().filter(|(number, _)| *number >= next);
    Some(after.flat_map(|(_, event)| event.iter().copied()).collect::<Vec<u8>>().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: u64) -> String {
        let kind = if number == 9 { "response.completed" } else { "response.output_text.delta" };
        format!(
            "event: {kind}\ndata: {{\"type\":\"{kind}\",\"sequence_number\":{number},\"delta\":\"\\\"sequence_number\\\":77\"}}\n\n"
        )
    }

    fn events(numbers: std::ops::Range<u64>) -> Bytes {
        numbers.map(event).collect::<String>().into()
    }

    fn numbers(text: &Bytes) -> Vec<u64> {
        split(text).filter_map(|event| number(&event)).collect()
    }

    #[test]
    fn a_log_is_read_from_any_number() {
        let log = Log::new(&events(0..2), 1 << 20);
        log.push(&events(2..5));
        for next in 0..6 {
            let read = log.read(next).expect("kept");
            assert_eq!(numbers(&read.bytes), (next..5).collect::<Vec<_>>());
            assert_eq!((read.next, read.behind), (next.max(5), Behind::More));
        }
        assert_eq!(numbers(&log.document(&events(5..6))), [0, 1, 2, 3, 4, 5]);
        log.end(&events(9..10));
        log.push(&events(10..11));
        log.close();
        let read = log.read(4).expect("kept");
        assert_eq!((numbers(&read.bytes), read.behind), (vec![4, 9], Behind::Nothing));
        let log = Log::new(&events(0..2), 1 << 20);
        log.close();
        log.end(&events(9..10));
        assert_eq!(log.read(2).map(|read| (read.bytes.len(), read.behind)), Some((0, Behind::Store)));
    }

    #[test]
    fn what_is_stored_at_a_cancellation_is_what_readers_have() {
        let told = |log: &Log| numbers(&log.read(0).expect("kept").bytes);
        let last = |number| event(number).into();
        let log = Log::new(&events(0..2), 1 << 20);
        let held = log.hold_back();
        log.push(&events(2..4));
        assert_eq!((told(&log), numbers(&log.document_with(last))), (vec![0, 1], vec![0, 1, 2]));
        log.end_with(last);
        drop(held);
        log.push(&events(4..5));
        assert_eq!(told(&log), [0, 1, 2]);
        // A cancellation that comes too late holds nothing back, and neither does one of two that is over.
        let log = Log::new(&events(0..2), 1 << 20);
        let (one, other) = (log.hold_back(), log.hold_back());
        log.push(&events(2..4));
        drop(one);
        assert_eq!((told(&log), log.next()), (vec![0, 1], 4));
        assert_eq!(numbers(&log.document(&events(4..5))), [0, 1, 2, 3, 4]);
        log.end(&events(4..5));
        drop(other);
        assert_eq!(told(&log), [0, 1, 2, 3, 4]);
        let log = Log::new(&events(0..2), 1 << 20);
        let held = log.hold_back();
        log.push(&events(2..4));
        drop(held);
        assert_eq!(told(&log), [0, 1, 2, 3]);
        let held = log.hold_back();
        log.push(&events(4..5));
        log.close();
        drop(held);
        assert_eq!(told(&log), [0, 1, 2, 3]);
    }

    #[test]
    fn a_log_is_bounded_and_says_what_is_missing() {
        let one = event(1).len();
        let log = Log::new(&events(0..2), 3 * one);
        log.push(&events(2..9));
        assert!(log.bytes() <= 3 * one);
        assert_eq!((log.read(2), log.next()), (None, 9));
        assert_eq!(numbers(&log.read(7).expect("kept").bytes), [7, 8]);
        // One event larger than the bound is kept all the same.
        let log = Log::new(&events(0..1), 1);
        assert_eq!(numbers(&log.read(0).expect("kept").bytes), [0]);
    }

    #[test]
    fn large_logs_are_read_in_pieces() {
        let log = Log::new(&events(0..2000), 1 << 20);
        let (mut next, mut reads, mut seen) = (0, 0, Vec::new());
        while next < 2000 {
            let read = log.read(next).expect("kept");
            assert!(read.bytes.len() <= READ_BYTES);
            seen.extend(numbers(&read.bytes));
            (next, reads) = (read.next, reads + 1);
        }
        assert!(reads > 1 && seen == (0..2000).collect::<Vec<_>>());
    }

    #[test]
    fn the_end_is_told_in_every_case() {
        let all = events(0..10);
        assert_eq!(numbers(&rest(&all, 0).expect("kept")), (0..10).collect::<Vec<_>>());
        assert_eq!(numbers(&rest(&all, 7).expect("kept")), [7, 8, 9]);
        assert_eq!(numbers(&rest(&all, 10).expect("kept")), [10], "the last event again, under the next number");
        assert_eq!(numbers(&rest(&events(9..10), 3).expect("kept")), [9], "only the end was kept");
        assert_eq!(numbers(&rest(&events(9..10), 40).expect("kept")), [40]);
        assert_eq!(rest(&events(5..10), 3), None, "a gap");
        assert_eq!(rest(&Bytes::new(), 0), None);
    }

    #[test]
    fn logs_are_found_while_somebody_has_them() {
        let (logs, id) = (Logs::default(), ResponseId::random());
        assert!(logs.find(&id).is_none());
        let log = logs.of(&id, || Log::new(&events(0..2), 100));
        assert!(Arc::ptr_eq(&log, &logs.of(&id, || Log::new(&events(0..1), 100))));
        drop(log);
        assert!(logs.find(&id).is_none());
    }
}
