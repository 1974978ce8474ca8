//! Admission of connections: a place per connection, bounds per address, an accept rate, and eviction of waiting
//! connections.
//!
//! A connection that waits for a head costs a file descriptor and brings nothing, and a client that opens enough of
//! them would keep everybody else out. So when all places are taken, the connection that has waited longest gives way
//! to the new one: first those that have sent nothing since their last answer, then those with an incomplete head. A
//! connection with a request in progress is never evicted.
//!
//! Per-request changes are one atomic word of the connection's own. The table is locked only when connections come and
//! go.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use governor::clock::{Clock, DefaultClock};
use governor::middleware::NoOpMiddleware;
use governor::nanos::Nanos;
use governor::state::StateStore;
use governor::{Quota, RateLimiter};
use tokio::sync::Notify;

use penstock_base::net::network_of;

/// Most connections that were told to give way and are still open: the bound may be exceeded by so many for a moment.
pub const LEAVING_MAX: usize = 64;
/// Most connections that are being sent a refusal; the others are closed without an answer.
pub const REFUSALS_MAX: usize = 64;
/// Eviction candidates that one scan of the table collects.
const CANDIDATES_MAX: usize = 256;
/// Burst of the accept rate per address, in seconds of the rate.
const BURST_SECONDS: u32 = 10;

/// Bounds by which a new connection is admitted or refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Most client connections open at once, over all listeners.
    pub connections_max: usize,
    /// Most client connections of one address (of IPv6: one /64) at once; 0: no limit.
    pub address_max: usize,
    /// New connections of one address per second, with a burst of ten seconds' worth; 0: no limit.
    pub address_rate: u32,
}

/// Reason why a connection was closed without being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// All places are taken, and no connection could give way.
    Full,
    /// The address already has as many connections as one address may have.
    Address,
    /// The address opens connections faster than the accept rate per address allows.
    Rate,
    /// The connection waited for a request and gave way to a newer one.
    GaveWay,
    /// The TLS handshake failed or took too long.
    Handshake,
}

impl Refused {
    /// Value of the label `reason` in the metric of refused connections.
    pub fn name(self) -> &'static str {
        match self {
            Refused::Full => "full",
            Refused::Address => "address",
            Refused::Rate => "rate",
            Refused::GaveWay => "gave_way",
            Refused::Handshake => "handshake",
        }
    }
}

/// Seat word: a request is in progress.
const BUSY: u64 = 0;
/// Seat word: the connection was told to give way.
const TOLD: u64 = u64::MAX;
/// Flag in the seat word: a head has begun and is incomplete. As the highest bit in use, it sorts such seats behind all
/// silent ones.
const BEGUN: u64 = 1 << 62;

/// State of one connection, for the search for candidates. While it waits, the word is the time since when, in
/// microseconds (at least 1) since the table was made.
#[derive(Debug, Default)]
struct Seat {
    word: AtomicU64,
    told: Notify,
}

#[derive(Debug, Default)]
struct Table {
    seats: HashMap<u64, Arc<Seat>>,
    next: u64,
    /// Number of seats that were told to give way.
    leaving: usize,
    /// Seats that had waited longest at the last scan, each with its word at that time.
    candidates: VecDeque<(u64, Arc<Seat>)>,
    by_address: HashMap<u128, usize>,
}

/// Table of the places of a server, one per client connection: admission, and who gives way.
#[derive(Debug)]
pub(crate) struct Places {
    table: Mutex<Table>,
    rates: Mutex<Option<(u32, Arc<Rates>)>>,
    refusals: Arc<AtomicUsize>,
    began: Instant,
}

type Rates = RateLimiter<u128, Recent, DefaultClock>;

impl Default for Places {
    fn default() -> Self {
        Self { table: Mutex::default(), rates: Mutex::default(), refusals: Arc::default(), began: Instant::now() }
    }
}

impl Places {
    /// Takes a place for a connection of `peer`; `None`: a Unix socket. Never waits.
    pub(crate) fn take(self: &Arc<Self>, peer: Option<IpAddr>, bounds: Bounds) -> Result<Place, Refused> {
        let address = peer.map(|peer| network_of(Some(peer)));
        if let Some(address) = address
            && !self.is_slow_enough(address, bounds.address_rate)
        {
            return Err(Refused::Rate);
        }
        let table = &mut *self.table();
        let of_address = address.and_then(|address| table.by_address.get(&address)).copied().unwrap_or(0);
        if bounds.address_max > 0 && of_address >= bounds.address_max {
            return Err(Refused::Address);
        }
        if table.seats.len() - table.leaving >= bounds.connections_max && !table.make_way() {
            return Err(Refused::Full);
        }
        let (seat, number) = (Arc::new(Seat::default()), table.next);
        table.next += 1;
        table.seats.insert(number, seat.clone());
        address.into_iter().for_each(|address| *table.by_address.entry(address).or_default() += 1);
        Ok(Place { places: self.clone(), number, address, seat, told: false })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if an address stays within its rate of new connections; counts this one.
    fn is_slow_enough(&self, address: u128, rate: u32) -> bool {
        let Some(each) = NonZeroU32::new(rate) else { return true };
        let rates = {
            let mut rates = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
            match &*rates {
                Some((of, rates)) if *of == rate => rates.clone(),
                _ => {
                    let new = Arc::new(limiter(each, DefaultClock::default()));
                    *rates = Some((rate, new.clone()));
                    new
                }
            }
        };
        rates.check_key(&address).is_ok()
    }

    /// Permission to send a refusal to a connection; `None`: too many are being sent.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        let refusal = Refusal(self.refusals.clone());
        (self.refusals.fetch_add(1, Ordering::Relaxed) < REFUSALS_MAX).then_some(refusal)
    }
}

fn limiter<C: Clock>(rate: NonZeroU32, clock: C) -> RateLimiter<u128, Recent, C, NoOpMiddleware<C::Instant>> {
    let burst = NonZeroU32::new(rate.get().saturating_mul(BURST_SECONDS)).unwrap_or(rate);
    RateLimiter::new(Quota::per_second(rate).allow_burst(burst), Recent::default(), clock)
}

impl Table {
    /// Tells the connection that has waited longest to give way; false: none waits, or too many are on their way out.
    fn make_way(&mut self) -> bool {
        if self.leaving >= LEAVING_MAX {
            return false;
        }
        for looked in [false, true] {
            if looked {
                self.look();
            }
            while let Some((word, seat)) = self.candidates.pop_front() {
                // A seat that was served since then has another word, and stays.
                if seat.word.compare_exchange(word, TOLD, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    seat.told.notify_one();
                    self.leaving += 1;
                    return true;
                }
            }
        }
        false
    }

    /// Scans the table for the connections that have waited longest.
    fn look(&mut self) {
        let words = self.seats.values().map(|seat| (seat.word.load(Ordering::Acquire), seat));
        let mut waiting: Vec<_> = words.filter(|(word, _)| *word != BUSY && *word != TOLD).collect();
        if waiting.len() > CANDIDATES_MAX {
            waiting.select_nth_unstable_by_key(CANDIDATES_MAX, |(word, _)| *word);
            waiting.truncate(CANDIDATES_MAX);
        }
        waiting.sort_unstable_by_key(|(word, _)| *word);
        self.candidates = waiting.into_iter().map(|(word, seat)| (word, seat.clone())).collect();
    }
}

/// Place of one connection, held until dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    number: u64,
    address: Option<u128>,
    seat: Arc<Seat>,
    told: bool,
}

impl Place {
    /// Marks the connection as waiting for its client, since now unless it waits already. `begun`: a head is
    /// incomplete.
    pub(crate) fn waits(&mut self, begun: bool) {
        let now = self.seat.word.load(Ordering::Relaxed);
        let is_waiting = now != BUSY && (now & BEGUN != 0) == begun;
        if self.told || now == TOLD || is_waiting {
            return;
        }
        let since = (self.places.began.elapsed().as_micros() as u64).clamp(1, BEGUN - 1);
        let word = if begun { since | BEGUN } else { since };
        // Err: the connection was told to give way meanwhile.
        let _ = self.seat.word.compare_exchange(now, word, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Marks the connection as busy with a request. Returns true if it was told to give way: it closes after the
    /// answer.
    pub(crate) fn serves(&mut self) -> bool {
        let is_told = self.seat.word.swap(BUSY, Ordering::AcqRel) == TOLD;
        self.told |= is_told;
        self.told
    }

    /// Returns true if this connection knows that another one needs its place.
    pub(crate) fn is_told(&self) -> bool {
        self.told
    }

    /// Number of client connections that are open.
    pub(crate) fn open(&self) -> usize {
        self.places.table().seats.len()
    }

    /// Waits until another connection needs the place. Cancel-safe.
    pub(crate) async fn told(&mut self) {
        if !self.told {
            self.seat.told.notified().await;
            self.told = true;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let table = &mut *self.places.table();
        table.seats.remove(&self.number);
        // Connections are told under the lock only, so the count is exact.
        if self.told || self.seat.word.load(Ordering::Acquire) == TOLD {
            table.leaving -= 1;
        }
        self.seat.word.store(BUSY, Ordering::Release);
        if let Some(address) = self.address
            && let Some(count) = table.by_address.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                table.by_address.remove(&address);
            }
        }
    }
}

/// Permission to send a refusal to one connection.
#[derive(Debug)]
pub(crate) struct Refusal(Arc<AtomicUsize>);

impl Drop for Refusal {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sets of slots; an address hashes to one of them.
const SETS: usize = 512;
/// Slots per set: 4,096 addresses in all, 130 kB.
const WAYS: usize = 8;

/// Slots of a set: addresses, each with the time that the limiter keeps for it.
type Slots = [Option<(u128, Nanos)>; WAYS];

/// State of the accept rate (GCRA) per address, in constant memory: in a full set a new address evicts the one with the
/// least debt, which loses the least.
#[derive(Debug)]
struct Recent {
    sets: Box<[Mutex<Slots>]>,
    hasher: RandomState,
}

impl Default for Recent {
    fn default() -> Self {
        Self { sets: (0..SETS).map(|_| Mutex::default()).collect(), hasher: RandomState::new() }
    }
}

impl StateStore for Recent {
    type Key = u128;

    fn measure_and_replace<T, F, E>(&self, key: &u128, decide: F) -> Result<T, E>
    where
        F: Fn(Option<Nanos>) -> Result<(T, Nanos), E>,
    {
        let set = &self.sets[self.hasher.hash_one(key) as usize % SETS];
        let mut set = set.lock().unwrap_or_else(PoisonError::into_inner);
        let known = set.iter_mut().flatten().find(|(address, _)| address == key);
        if let Some((_, at)) = known {
            let (decision, next) = decide(Some(*at))?;
            *at = next;
            return Ok(decision);
        }
        let (decision, next) = decide(None)?;
        if let Some(slot) = set.iter_mut().min_by_key(|slot| slot.map(|(_, at)| at)) {
            *slot = Some((*key, next));
        }
        Ok(decision)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use governor::clock::FakeRelativeClock;

    use super::*;

    const FOUR: Bounds = Bounds { connections_max: 4, address_max: 0, address_rate: 0 };

    fn take(places: &Arc<Places>, bounds: Bounds) -> Result<Place, Refused> {
        places.take(Some([192, 0, 2, 1].into()), bounds)
    }

    /// Returns true if a place was told to give way.
    async fn is_told(place: &mut Place) -> bool {
        tokio::time::timeout(Duration::ZERO, place.told()).await.is_ok()
    }

    #[tokio::test]
    async fn who_has_waited_longest_gives_way() {
        let places = Arc::new(Places::default());
        let mut held: Vec<_> = (0..4).map(|_| take(&places, FOUR).expect("a place")).collect();
        assert_eq!(take(&places, FOUR).err(), Some(Refused::Full), "all are busy");
        held[2].waits(true);
        held[1].waits(false);
        let later = places.began.elapsed();
        while places.began.elapsed() <= later + Duration::from_micros(2) {}
        held[3].waits(false);
        let first = take(&places, FOUR).expect("the first silent one's");
        assert_eq!((is_told(&mut held[1]).await, is_told(&mut held[3]).await), (true, false));
        let second = take(&places, FOUR).expect("the second's");
        assert!(is_told(&mut held[3]).await && !is_told(&mut held[2]).await);
        let third = take(&places, FOUR).expect("that of an incomplete head");
        assert!(is_told(&mut held[2]).await && !is_told(&mut held[0]).await);
        assert_eq!(take(&places, FOUR).err(), Some(Refused::Full), "the rest is busy");
        drop((held, first, second, third));
        let table = places.table();
        assert!(table.seats.is_empty() && table.leaving == 0 && table.by_address.is_empty(), "{table:?}");
    }

    #[tokio::test]
    async fn who_is_served_again_stays() {
        let places = Arc::new(Places::default());
        let mut held: Vec<_> = (0..4).map(|_| take(&places, FOUR).expect("a place")).collect();
        held.iter_mut().for_each(|place| place.waits(false));
        let new = take(&places, FOUR).expect("another's place");
        // Its request came first: it is answered, then the connection closes. The other candidates are busy by now, and stay.
        let told: Vec<_> = held.iter_mut().map(Place::serves).collect();
        assert_eq!(told.iter().filter(|is_told| **is_told).count(), 1, "{told:?}");
        assert_eq!(take(&places, FOUR).err(), Some(Refused::Full));
        held.retain(|place| !place.told);
        assert_eq!(take(&places, FOUR).err(), Some(Refused::Full), "its place is the new one's");
        drop(new);
        assert!(take(&places, FOUR).is_ok());
    }

    #[test]
    fn those_on_their_way_out_are_bounded() {
        let places = Arc::new(Places::default());
        let bounds = Bounds { connections_max: 2 * LEAVING_MAX, ..FOUR };
        let mut held: Vec<_> = (0..2 * LEAVING_MAX).map(|_| take(&places, bounds).expect("a place")).collect();
        held.iter_mut().for_each(|place| place.waits(false));
        let new: Vec<_> = (0..LEAVING_MAX).map(|_| take(&places, bounds).expect("a place")).collect();
        assert_eq!(take(&places, bounds).err(), Some(Refused::Full), "nobody has gone yet");
        let gone = held.iter().position(|place| place.seat.word.load(Ordering::Relaxed) == TOLD).expect("one of them");
        held.remove(gone);
        assert!(take(&places, bounds).is_ok());
        drop((held, new));
        assert_eq!(places.table().leaving, 0);
        let refusals: Vec<_> = (0..REFUSALS_MAX).filter_map(|_| places.refusal()).collect();
        assert!(refusals.len() == REFUSALS_MAX && places.refusal().is_none());
        drop(refusals);
        assert!(places.refusal().is_some());
    }

    #[test]
    fn an_address_has_its_share() {
        let places = Arc::new(Places::default());
        let bounds = Bounds { connections_max: 100, address_max: 2, address_rate: 0 };
        let of = |address: &str| places.take(Some(address.parse().expect("an address")), bounds);
        let held = [of("2001:db8::1").expect("one"), of("2001:db8::2").expect("two")];
        assert_eq!(of("2001:db8::3").err(), Some(Refused::Address), "a network of IPv6 is one client");
        assert!(of("2001:db8:1::1").is_ok() && of("192.0.2.1").is_ok());
        assert!(places.take(None, bounds).is_ok(), "a Unix socket has no address");
        drop(held);
        assert!(of("2001:db8::3").is_ok());
    }

    #[test]
    fn an_address_opens_them_at_its_rate() {
        let clock = FakeRelativeClock::default();
        let limiter = limiter(NonZeroU32::new(5).expect("not 0"), clock.clone());
        let opened = |address| (0..1000).filter(|_| limiter.check_key(&address).is_ok()).count();
        assert_eq!((opened(1), opened(1), opened(2)), (50, 0, 50));
        clock.advance(Duration::from_secs(2));
        assert_eq!(opened(1), 10);
        clock.advance(Duration::from_secs(3600));
        assert_eq!(opened(1), 50);
    }

    #[test]
    fn the_memory_of_addresses_does_not_grow_and_the_worst_stay() {
        let limiter = limiter(NonZeroU32::new(5).expect("not 0"), FakeRelativeClock::default());
        let worst = 7;
        while limiter.check_key(&worst).is_ok() {}
        for address in 100..100_000 {
            assert!(limiter.check_key(&address).is_ok(), "each is new");
        }
        assert!(limiter.check_key(&worst).is_err());
    }
}
