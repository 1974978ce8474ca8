//! Places for connections: how many there are at once, how many of them one address has, how fast it opens them, and who gives way.
//!
//! A connection that waits for a head costs a file descriptor and brings nothing, and whoever opens enough of them would keep everybody
//! else out. So where all places are taken, the connection that has waited longest gives way to the new one: first among those that have
//! said nothing since their last answer, then among those whose head is incomplete. One that has a request in progress never does.
//!
//! What changes with every request is one atomic word of the connection's own. The table is locked when connections come and go.

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

/// Connections that were told to give way and are still there, at most: so many there may be above the bound for a moment.
pub(crate) const LEAVING_MAX: usize = 64;
/// Connections that are being told that there is no place, at most; the rest is closed without a word.
pub(crate) const REFUSALS_MAX: usize = 64;
/// One look through the table finds so many that may give way.
const CANDIDATES_MAX: usize = 256;
/// Seconds of its rate that an address may use at once.
const BURST_SECONDS: u32 = 10;

/// Bounds that a connection is held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at once.
    pub connections_max: usize,
    /// Connections of one address at once; 0: no limit.
    pub address_max: usize,
    /// New connections of one address in a second, over ten seconds; 0: no limit.
    pub address_rate: u32,
}

/// The reason why a connection was closed without being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// All places are taken, and nobody could give way.
    Full,
    /// Its address has as many as it may have.
    Address,
    /// Its address opens them too fast.
    Rate,
    /// It waited for a request, and gave way to a newer one.
    GaveWay,
    /// Its TLS handshake failed or took too long.
    Handshake,
}

impl Refused {
    /// As metrics say it.
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

/// A seat's word: a request is in progress.
const BUSY: u64 = 0;
/// It was told to give way.
const TOLD: u64 = u64::MAX;
/// Set while a head has begun and is incomplete: those give way after all that are silent.
const BEGUN: u64 = 1 << 62;

/// The state of one connection, for those who look for one that may go. Waiting: microseconds, at least 1, since the table was made.
#[derive(Debug, Default)]
struct Seat {
    word: AtomicU64,
    told: Notify,
}

#[derive(Debug, Default)]
struct Table {
    seats: HashMap<u64, Arc<Seat>>,
    next: u64,
    /// Of the seats, those that were told to give way.
    leaving: usize,
    /// Seats that had waited longest when somebody looked, with what their words said then.
    candidates: VecDeque<(u64, Arc<Seat>)>,
    by_address: HashMap<u128, usize>,
}

/// All places of a server.
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
    /// A place for a connection of `peer`; `None`: of a Unix socket.
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

    /// True if an address opens connections no faster than it may.
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

    /// Leave to tell a connection that there is no place for it.
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
    /// Tells whoever has waited longest to go; false: nobody waits, or too many are on their way out.
    fn make_way(&mut self) -> bool {
        if self.leaving >= LEAVING_MAX {
            return false;
        }
        for looked in [false, true] {
            if looked {
                self.look();
            }
            while let Some((word, seat)) = self.candidates.pop_front() {
                // Whoever has been served since is another word, or none.
                if seat.word.compare_exchange(word, TOLD, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    seat.told.notify_one();
                    self.leaving += 1;
                    return true;
                }
            }
        }
        false
    }

    /// Finds those that have waited longest.
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

/// The place of one connection, which it has until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    number: u64,
    address: Option<u128>,
    seat: Arc<Seat>,
    told: bool,
}

impl Place {
    /// The connection waits for its client: from now on, unless it waits already. `begun`: a head is incomplete.
    pub(crate) fn waits(&mut self, begun: bool) {
        let now = self.seat.word.load(Ordering::Relaxed);
        let is_waiting = now != BUSY && (now & BEGUN != 0) == begun;
        if self.told || now == TOLD || is_waiting {
            return;
        }
        let since = (self.places.began.elapsed().as_micros() as u64).clamp(1, BEGUN - 1);
        let word = if begun { since | BEGUN } else { since };
        // Err: it was told to go meanwhile.
        let _ = self.seat.word.compare_exchange(now, word, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// A request has come. True: the connection was told to give way, and goes when it is answered.
    pub(crate) fn serves(&mut self) -> bool {
        let is_told = self.seat.word.swap(BUSY, Ordering::AcqRel) == TOLD;
        self.told |= is_told;
        self.told
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
        // Only under the lock is anybody told.
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

/// Leave to tell one connection that there is no place for it.
#[derive(Debug)]
pub(crate) struct Refusal(Arc<AtomicUsize>);

impl Drop for Refusal {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sets of slots; an address belongs to one.
const SETS: usize = 512;
/// Slots of a set: 4,096 addresses in all, 130 kB.
const WAYS: usize = 8;

/// Addresses with the time that governor keeps for each.
type Slots = [Option<(u128, Nanos)>; WAYS];

/// The time at which each address may open its next connection, in constant memory: where an address is new to a full set, the one that owes least
/// makes room, which loses least.
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

    /// True if a place was told to give way.
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
        // Its request was faster: it is answered, and the connection goes. The others were candidates, but are served since.
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
