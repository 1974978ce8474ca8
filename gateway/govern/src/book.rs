//! The book of all counters, and the one decision over everything that a request would use: taken whole or not at all.
//!
//! [`Book::reserve`] checks every claim of a request first and counts them only if all fit: a refused request has used
//! nothing. The result is a [`Hold`], which cannot be copied; [`Book::settle`] consumes it and replaces the reserved
//! amounts by those really used. So at any moment a counter holds what was used and what may yet be used. It exceeds
//! its limit by no more than answers have used beyond their reservations: by nothing, where reservations are upper
//! bounds.
//!
//! Rules are not kept here: a claim carries its measure, so that a changed limit continues with the present counts.
//! Nothing blocks and no clock is read; a book shared between threads is locked for the time of a few look-ups.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::counter::{Counter, Mark};
use crate::limit::{Measure, Span, Unit};
use crate::time::Now;

/// Most counters of one limit; further subjects share one.
const SUBJECTS_MAX: usize = 100_000;
/// Subject of the counter that is shared once a limit has [`SUBJECTS_MAX`] counters.
const OTHERS: &str = "*";
/// Time in ms before a limit full of counters in use is searched again for idle ones.
const FULL_MS: u64 = 1000;

/// Amount of one measure that a request would use.
#[derive(Clone, Copy, Debug)]
pub struct Claim<'a> {
    /// Id of the limit that the claim is made on.
    pub limit: &'a Arc<str>,
    /// Subject (a key, team, user, model, …) whose counter is meant.
    pub subject: &'a str,
    /// Unit, span and bound of the counter.
    pub measure: Measure,
    /// Amount to reserve, in the measure's unit.
    pub amount: u64,
    /// Tag by which the caller recognises the claim at settlement.
    pub tag: u16,
}

/// Refusal of a reservation: the claim that does not fit, so that nothing was reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denied {
    /// Index of the claim that blocks the request longest.
    pub claim: usize,
    /// Amount that the claim's counter has in use already, reservations included.
    pub used: u64,
    /// Milliseconds until the claim can fit; `None`: when other requests end, or never.
    pub wait_ms: Option<u64>,
}

/// Handle of the amounts that a request has reserved, ended by [`Book::settle`]. A hold that is only dropped stays counted.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is held stays counted until it is settled"]
pub struct Hold(u64);

impl Hold {
    /// Number of the hold, by which another process can settle it.
    pub fn id(&self) -> u64 {
        self.0
    }
}

/// Standing of a counter: used and reserved amounts, and the time of its reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Used amount, reservations included.
    pub used: u64,
    /// Part of `used` that is reserved by requests in progress.
    pub reserved: u64,
    /// Milliseconds until the counter is back at zero, if nothing more is used.
    pub reset_ms: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Gauge {
    unit: Unit,
    span: Span,
    counter: Counter,
    reserved: u64,
}

#[derive(Debug)]
struct Cell {
    limit: Arc<str>,
    subject: Box<str>,
    gauges: Vec<Gauge>,
    holds: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Taken {
    cell: u32,
    unit: Unit,
    span: Span,
    mark: Mark,
    amount: u64,
    tag: u16,
}

#[derive(Debug, Default)]
struct Subjects {
    cells: HashMap<Box<str>, u32>,
    full_until_ms: u64,
}

/// Book of all counters of this process, with the holds of requests in progress.
#[derive(Debug, Default)]
pub struct Book {
    limits: HashMap<Arc<str>, Subjects>,
    cells: Vec<Option<Cell>>,
    free: Vec<u32>,
    /// Index of the cell looked up last: the claims of a request mostly share one.
    last: u32,
    open: HashMap<u64, Vec<Taken>>,
    /// Numbers of the open holds that another process made.
    adopted: Vec<u64>,
    next: u64,
}

impl Book {
    /// A book without counters and holds.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reserves all claims, or nothing. Cost: two look-ups per claim.
    ///
    /// # Errors
    /// The claim that does not fit, and when it could.
    pub fn reserve(&mut self, claims: &[Claim<'_>], now: Now) -> Result<Hold, Denied> {
        self.check(claims, now)?;
        Ok(self.take(claims, now))
    }

    /// Whether all claims would fit; nothing is counted.
    ///
    /// # Errors
    /// As for [`Book::reserve`].
    pub fn check(&mut self, claims: &[Claim<'_>], now: Now) -> Result<(), Denied> {
        let mut denied: Option<Denied> = None;
        for (at, claim) in claims.iter().enumerate() {
            let cell = self.cell(claim.limit, claim.subject, now);
            let gauge = self.gauge(cell, claim.measure.unit, claim.measure.span, now);
            let used = gauge.counter.used();
            if used.saturating_add(claim.amount) > claim.measure.max && claim.amount > 0 {
                let wait_ms = gauge.counter.wait_ms(claim.amount, claim.measure.max, now);
                let never = claim.amount > claim.measure.max;
                let rank = |wait: Option<u64>, never: bool| (never, wait.unwrap_or(0));
                let worse = denied.is_none_or(|other| {
                    let other_never = claims[other.claim].amount > claims[other.claim].measure.max;
                    rank(wait_ms, never) > rank(other.wait_ms, other_never)
                });
                if worse {
                    denied = Some(Denied { claim: at, used, wait_ms });
                }
            }
        }
        denied.map_or(Ok(()), Err)
    }

    fn take(&mut self, claims: &[Claim<'_>], now: Now) -> Hold {
        let id = self.next;
        self.next += 1;
        self.hold_as(id, claims, now);
        Hold(id)
    }

    /// Adopts a hold that another process has made after its book was exported: its request is already admitted, so
    /// nothing is checked. The hold is settled like that process's others. A known number is ignored.
    pub fn adopt(&mut self, id: u64, claims: &[Claim<'_>], now: Now) {
        if self.open.contains_key(&id) {
            return;
        }
        self.hold_as(id, claims, now);
        self.adopted.push(id);
    }

    fn hold_as(&mut self, id: u64, claims: &[Claim<'_>], now: Now) {
        let mut taken = Vec::with_capacity(claims.len());
        for claim in claims {
            let cell = self.cell(claim.limit, claim.subject, now);
            let Measure { unit, span, .. } = claim.measure;
            let gauge = self.gauge(cell, unit, span, now);
            let mark = gauge.counter.add(claim.amount, now);
            gauge.reserved += claim.amount;
            taken.push(Taken { cell, unit, span, mark, amount: claim.amount, tag: claim.tag });
            if let Some(Some(cell)) = self.cells.get_mut(cell as usize) {
                cell.holds += 1;
            }
        }
        self.open.insert(id, taken);
    }

    /// Replaces the reserved amounts by those used. `spent` gives the used amount by the claim's tag and unit; `None`:
    /// unknown, the reserved amount counts.
    #[expect(clippy::needless_pass_by_value, reason = "a hold ends here")]
    pub fn settle(&mut self, hold: Hold, now: Now, spent: impl FnMut(u16, Unit) -> Option<u64>) {
        self.settle_id(hold.0, now, spent);
    }

    /// Settles a hold by its number, for one of another process. True if the hold was open.
    pub fn settle_id(&mut self, id: u64, now: Now, mut spent: impl FnMut(u16, Unit) -> Option<u64>) -> bool {
        let Some(taken) = self.open.remove(&id) else { return false };
        for one in taken {
            let to = if one.unit == Unit::InFlight { 0 } else { spent(one.tag, one.unit).unwrap_or(one.amount) };
            let Some(Some(cell)) = self.cells.get_mut(one.cell as usize) else { continue };
            cell.holds -= 1;
            let found = cell.gauges.iter_mut().find(|gauge| (gauge.unit, gauge.span) == (one.unit, one.span));
            if let Some(gauge) = found {
                gauge.reserved -= one.amount;
                gauge.counter.correct(one.mark, one.amount, to, now);
            }
        }
        true
    }

    /// Adds a use from before this process, from records kept elsewhere. Only calendar spans have such records.
    pub fn restore(&mut self, claim: &Claim<'_>, now: Now) {
        let cell = self.cell(claim.limit, claim.subject, now);
        self.gauge(cell, claim.measure.unit, claim.measure.span, now).counter.add(claim.amount, now);
    }

    /// Standing of a counter; a counter that does not exist is not created.
    pub fn standing(&mut self, limit: &str, subject: &str, measure: Measure, now: Now) -> Standing {
        let Some(cell) = self.find(limit, subject) else { return Standing::default() };
        let gauge = self.gauge(cell, measure.unit, measure.span, now);
        Standing { used: gauge.counter.used(), reserved: gauge.reserved, reset_ms: gauge.counter.reset_ms(now) }
    }

    /// Standings of all counters of a limit that are in use, with their subjects.
    pub fn standings(&mut self, limit: &str, measure: Measure, now: Now, out: &mut dyn FnMut(&str, Standing)) {
        let cells: Vec<u32> =
            self.limits.get(limit).map(|subjects| subjects.cells.values().copied().collect()).unwrap_or_default();
        for cell in cells {
            let gauge = self.gauge(cell, measure.unit, measure.span, now);
            let standing = Standing {
                used: gauge.counter.used(),
                reserved: gauge.reserved,
                reset_ms: gauge.counter.reset_ms(now),
            };
            if let Some(Some(cell)) = self.cells.get(cell as usize) {
                out(&cell.subject, standing);
            }
        }
    }

    /// Number of holds that have not been settled.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Number of subjects with a cell of counters, over all limits.
    pub fn len(&self) -> usize {
        self.cells.len() - self.free.len()
    }

    /// Returns true if the book has no counters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops the counters that are back at zero and hold nothing. Cost: O(counters).
    pub fn sweep(&mut self, now: Now) {
        let limits: Vec<_> = self.limits.keys().cloned().collect();
        limits.iter().for_each(|limit| self.sweep_limit(limit, now));
        self.limits.retain(|_, subjects| !subjects.cells.is_empty());
    }

    fn sweep_limit(&mut self, limit: &str, now: Now) {
        let Some(subjects) = self.limits.get_mut(limit) else { return };
        subjects.cells.retain(|_, at| {
            let Some(slot) = self.cells.get_mut(*at as usize) else { return false };
            let idle = slot.as_mut().is_none_or(|cell| {
                cell.holds == 0
                    && cell.gauges.iter_mut().all(|gauge| {
                        gauge.counter.advance(now);
                        gauge.counter.is_idle(now)
                    })
            });
            if idle {
                *slot = None;
                self.free.push(*at);
            }
            !idle
        });
    }

    /// Index of the cell with a subject's counters under a limit; `None`: no cell.
    fn find(&mut self, limit: &str, subject: &str) -> Option<u32> {
        let last = self.cells.get(self.last as usize).and_then(Option::as_ref);
        if last.is_some_and(|cell| *cell.subject == *subject && *cell.limit == *limit) {
            return Some(self.last);
        }
        self.last = *self.limits.get(limit)?.cells.get(subject)?;
        Some(self.last)
    }

    /// Index of the cell with a subject's counters under a limit, created if there is none.
    fn cell(&mut self, limit: &Arc<str>, subject: &str, now: Now) -> u32 {
        if let Some(at) = self.find(limit, subject) {
            return at;
        }
        let mut subject = subject;
        let count = self.limits.get(&**limit).map_or(0, |subjects| subjects.cells.len());
        if count >= SUBJECTS_MAX && subject != OTHERS {
            if self.limits.get(&**limit).is_some_and(|subjects| now.mono_ms >= subjects.full_until_ms) {
                self.sweep_limit(limit, now);
            }
            let subjects = self.limits.entry(limit.clone()).or_default();
            if subjects.cells.len() >= SUBJECTS_MAX {
                subjects.full_until_ms = now.mono_ms + FULL_MS;
                subject = OTHERS;
                if let Some(at) = subjects.cells.get(subject) {
                    return *at;
                }
            }
        }
        let cell = Cell { limit: limit.clone(), subject: subject.into(), gauges: Vec::new(), holds: 0 };
        let at = match self.free.pop() {
            Some(at) => {
                self.cells[at as usize] = Some(cell);
                at
            }
            None => {
                self.cells.push(Some(cell));
                (self.cells.len() - 1) as u32
            }
        };
        self.limits.entry(limit.clone()).or_default().cells.insert(subject.into(), at);
        at
    }

    /// Counter of an existing cell, advanced to now.
    fn gauge(&mut self, cell: u32, unit: Unit, span: Span, now: Now) -> &mut Gauge {
        let cell = self.cells[cell as usize].as_mut().expect("cells with a number in `limits` exist");
        let at = match cell.gauges.iter().position(|gauge| (gauge.unit, gauge.span) == (unit, span)) {
            Some(at) => at,
            None => {
                cell.gauges.push(Gauge { unit, span, counter: Counter::new(span), reserved: 0 });
                cell.gauges.len() - 1
            }
        };
        let gauge = &mut cell.gauges[at];
        gauge.counter.advance(now);
        gauge
    }
}

/// Counts and holds of a book, in a form that another process can import.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BookState {
    mono_ms: u64,
    cells: Vec<CellState>,
    open: Vec<(u64, Vec<Taken>)>,
    next: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct CellState {
    limit: String,
    subject: String,
    gauges: Vec<Gauge>,
}

impl Book {
    /// Exports all counts and holds, for a process that continues with them. The exporting process must count no more
    /// itself: its holds are settled there, by their numbers.
    pub fn export(&self, now: Now) -> BookState {
        let mut places = HashMap::new();
        let mut cells = Vec::new();
        for (at, cell) in self.cells.iter().enumerate() {
            let Some(cell) = cell else { continue };
            places.insert(at as u32, cells.len() as u32);
            let (limit, subject) = (cell.limit.to_string(), cell.subject.to_string());
            cells.push(CellState { limit, subject, gauges: cell.gauges.clone() });
        }
        let moved = |one: &Taken| places.get(&one.cell).map(|cell| Taken { cell: *cell, ..one.clone() });
        let open = self.open.iter().map(|(id, taken)| (*id, taken.iter().filter_map(moved).collect())).collect();
        BookState { mono_ms: now.mono_ms, cells, open, next: self.next }
    }

    /// Imports another process's counts and adds the local ones. The imported holds are settled by number
    /// ([`Book::settle_id`]), or all at once when that process has ended ([`Book::end_adopted`]).
    pub fn import(&mut self, state: BookState, now: Now) {
        let mut places = Vec::with_capacity(state.cells.len());
        for cell in state.cells {
            let at = self.cell(&cell.limit.as_str().into(), &cell.subject, now);
            places.push(at);
            for mut theirs in cell.gauges {
                theirs.counter.moved(state.mono_ms, now.mono_ms);
                theirs.counter.advance(now);
                let ours = self.gauge(at, theirs.unit, theirs.span, now);
                let used = ours.counter.used();
                ours.counter = theirs.counter;
                ours.reserved += theirs.reserved;
                if used > 0 {
                    ours.counter.add(used, now);
                }
            }
        }
        self.next = self.next.max(state.next.saturating_add(HOLDS_APART));
        for (id, mut taken) in state.open {
            taken.retain_mut(|one| {
                let Some(at) = places.get(one.cell as usize) else { return false };
                one.cell = *at;
                let gauge = self.gauge(*at, one.unit, one.span, now);
                one.mark = gauge.counter.moved_mark(one.mark, state.mono_ms, now.mono_ms);
                if let Some(Some(cell)) = self.cells.get_mut(*at as usize) {
                    cell.holds += 1;
                }
                true
            });
            self.open.insert(id, taken);
            self.adopted.push(id);
        }
    }

    /// Settles the adopted holds left by a process that has ended, with their reserved amounts.
    pub fn end_adopted(&mut self, now: Now) {
        for id in std::mem::take(&mut self.adopted) {
            self.settle_id(id, now, |_, _| None);
        }
    }
}

/// Distance between the hold numbers of the two processes: the old one may go on numbering for a while.
const HOLDS_APART: u64 = 1 << 40;
