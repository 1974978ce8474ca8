//! Throttle of failed authentications per client address: a leaky bucket per address, in constant memory.
//!
//! Each failure raises an address's level by one; the level drains at the allowed number per minute. At the bound, only
//! credentials that were accepted before are looked at. One IPv6 client owns a /64, so a /64 counts as one address. The
//! table is a fixed set-associative one: when all slots of a set are taken, the slot with the lowest level is evicted.
//! An attacker with enough addresses to exploit that has no need to.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use penstock_base::net::network_of;

/// Sets of slots; an address hashes to one of them.
const SETS: usize = 256;
/// Slots per set: 4,096 addresses in all, 200 kB.
const WAYS: usize = 16;

/// Leaky buckets of failed attempts by client address, in a table of fixed size.
#[derive(Debug)]
pub(crate) struct Throttle {
    sets: Box<[Mutex<[Slot; WAYS]>]>,
    hasher: RandomState,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Address as [`number`] encodes it; `None`: a free slot.
    address: Option<u128>,
    level: f64,
    at: Option<Instant>,
}

impl Slot {
    /// Level at `now`, drained since the last failure.
    fn level_at(&self, now: Instant, per_minute: u32) -> f64 {
        let passed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        (self.level - passed.as_secs_f64() * f64::from(per_minute) / 60.0).max(0.0)
    }
}

impl Default for Throttle {
    fn default() -> Self {
        let sets = (0..SETS).map(|_| Mutex::new([Slot::default(); WAYS])).collect();
        Self { sets, hasher: RandomState::new() }
    }
}

impl Throttle {
    /// Time until an unproven credential from that address is looked at; `None`: at once. `per_minute` 0: no throttle.
    pub(crate) fn wait(&self, address: Option<IpAddr>, per_minute: u32, now: Instant) -> Option<Duration> {
        if per_minute == 0 {
            return None;
        }
        let number = network_of(address);
        let set = self.set(number).lock().unwrap_or_else(PoisonError::into_inner);
        let slot = set.iter().find(|slot| slot.address == Some(number))?;
        let above = slot.level_at(now, per_minute) + 1.0 - f64::from(per_minute);
        (above > 0.0).then(|| Duration::from_secs_f64(above * 60.0 / f64::from(per_minute)))
    }

    /// Counts one failed attempt of the client address; `None`: a Unix socket.
    pub(crate) fn failed(&self, address: Option<IpAddr>, per_minute: u32, now: Instant) {
        if per_minute == 0 {
            return;
        }
        let number = network_of(address);
        let mut set = self.set(number).lock().unwrap_or_else(PoisonError::into_inner);
        let at = set.iter().position(|slot| slot.address == Some(number)).unwrap_or_else(|| {
            let level = |slot: &Slot| slot.level_at(now, per_minute);
            (0..WAYS).min_by(|a, b| level(&set[*a]).total_cmp(&level(&set[*b]))).unwrap_or_default()
        });
        let had = if set[at].address == Some(number) { set[at].level_at(now, per_minute) } else { 0.0 };
        // The level is capped at one minute's drain: an address that stops is free a minute later.
        let level = (had + 1.0).min(f64::from(per_minute));
        set[at] = Slot { address: Some(number), level, at: Some(now) };
    }

    fn set(&self, number: u128) -> &Mutex<[Slot; WAYS]> {
        &self.sets[self.hasher.hash_one(number) as usize % SETS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> Option<IpAddr> {
        Some(text.parse().expect("an address"))
    }

    #[test]
    fn guessing_slows_down_and_is_forgiven() {
        let (throttle, began) = (Throttle::default(), Instant::now());
        let (bad, other) = (ip("192.0.2.1"), ip("192.0.2.2"));
        for _ in 0..9 {
            throttle.failed(bad, 10, began);
        }
        assert_eq!(throttle.wait(bad, 10, began), None, "ten may fail");
        for _ in 0..1000 {
            throttle.failed(bad, 10, began);
        }
        assert_eq!(throttle.wait(bad, 10, began), Some(Duration::from_secs(6)));
        assert_eq!(throttle.wait(ip("::ffff:192.0.2.1"), 10, began), Some(Duration::from_secs(6)));
        assert_eq!(throttle.wait(other, 10, began), None);
        assert_eq!(throttle.wait(bad, 0, began), None, "switched off");
        let later = began + Duration::from_secs(7);
        assert_eq!(throttle.wait(bad, 10, later), None, "one more after six seconds");
        throttle.failed(bad, 10, later);
        assert!(throttle.wait(bad, 10, later).is_some());
    }

    #[test]
    fn a_network_of_ipv6_is_one_client() {
        let (throttle, now) = (Throttle::default(), Instant::now());
        for last in 0..50 {
            throttle.failed(ip(&format!("2001:db8::{last:x}")), 10, now);
        }
        assert!(throttle.wait(ip("2001:db8::ffff"), 10, now).is_some());
        assert!(throttle.wait(ip("2001:db8:0:1::1"), 10, now).is_none());
    }

    #[test]
    fn memory_does_not_grow_and_the_worst_stay() {
        let (throttle, now) = (Throttle::default(), Instant::now());
        let worst = ip("198.51.100.1");
        (0..20).for_each(|_| throttle.failed(worst, 10, now));
        for number in 0..100_000_u32 {
            throttle.failed(Some(IpAddr::from(number.to_be_bytes())), 10, now);
        }
        assert!(throttle.wait(worst, 10, now).is_some());
        assert!(throttle.wait(None, 10, now).is_none());
    }
}
