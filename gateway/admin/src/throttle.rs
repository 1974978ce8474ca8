//! Throttle against guessed keys: per address (a /64 of IPv6, which one client owns), a burst of wrong keys, then one a second.
//!
//! While an address is throttled, keys that have been good before are let in all the same, so that guesses of others do
//! not keep the operator out. A right key that was never used is refused: an answer that told it apart would be what
//! the guesser wants. The key that a machine made for itself counts as used: 256 random bits are not guessed.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use penstock_base::net::network_of;

/// Burst: wrong keys in a row before an address is throttled.
const BURST: u32 = 20;
/// Interval after which one more wrong key is allowed.
const EACH: Duration = Duration::from_secs(1);
/// Interval of audit events for an address that goes on guessing.
const NOTE_EACH: Duration = Duration::from_secs(60);
/// Most addresses that are remembered.
const ADDRESSES_MAX: usize = 4096;

/// Wrong keys of late, by network ([`network_of`]); all peers on a Unix socket are one.
#[derive(Debug, Default)]
pub(crate) struct Throttle(Mutex<HashMap<u128, Guesses>>);

#[derive(Clone, Copy, Debug)]
struct Guesses {
    wrong: u32,
    since: Instant,
    /// Time of the last audit event.
    noted: Option<Instant>,
}

impl Guesses {
    /// Forgets one wrong key for each interval that has passed.
    fn decay(&mut self, now: Instant) {
        let passed = (now.saturating_duration_since(self.since).as_millis() / EACH.as_millis()) as u32;
        self.wrong = self.wrong.saturating_sub(passed);
        self.since += EACH * passed;
    }

    /// Returns true if the audit log has had an event of the address lately.
    fn is_noted(&self, now: Instant) -> bool {
        self.noted.is_some_and(|noted| now.saturating_duration_since(noted) < NOTE_EACH)
    }
}

impl Throttle {
    /// Whether a key from `address` is compared at all.
    pub(crate) fn admits(&self, address: Option<IpAddr>, now: Instant) -> bool {
        let network = network_of(address);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(guesses) = all.get_mut(&network) else { return true };
        guesses.decay(now);
        // The time of the last audit event outlives the count: one guess a second would be an event each.
        if guesses.wrong == 0 && !guesses.is_noted(now) {
            all.remove(&network);
            return true;
        }
        guesses.wrong < BURST
    }

    /// Counts a wrong key from `address`. Returns whether the audit log should have it: a guesser must not fill the
    /// log.
    pub(crate) fn wrong(&self, address: Option<IpAddr>, now: Instant) -> bool {
        let network = network_of(address);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= ADDRESSES_MAX && !all.contains_key(&network) {
            all.retain(|_, guesses| {
                guesses.decay(now);
                guesses.wrong > 0
            });
            if all.len() >= ADDRESSES_MAX {
                return false;
            }
        }
        let guesses = all.entry(network).or_insert(Guesses { wrong: 0, since: now, noted: None });
        guesses.decay(now);
        guesses.wrong = (guesses.wrong + 1).min(BURST);
        let is_due = !guesses.is_noted(now);
        if is_due {
            guesses.noted = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guessing_becomes_slow_and_is_forgiven() {
        let (throttle, now) = (Throttle::default(), Instant::now());
        let (guesser, other) = (Some(IpAddr::from([10, 0, 0, 1])), None);
        let mut noted = 0;
        for _ in 0..BURST {
            assert!(throttle.admits(guesser, now));
            noted += u32::from(throttle.wrong(guesser, now));
        }
        assert!(!throttle.admits(guesser, now) && throttle.admits(other, now));
        assert_eq!(noted, 1, "one entry for many guesses");
        assert!(throttle.admits(guesser, now + EACH), "one more");
        throttle.wrong(guesser, now + EACH);
        assert!(!throttle.admits(guesser, now + EACH));
        assert!(throttle.admits(guesser, now + EACH * (BURST + 2)));
        assert!(!throttle.wrong(guesser, now + EACH * (BURST + 2)), "one entry a minute, however slow the guesses are");
        assert!(throttle.admits(guesser, now + NOTE_EACH));
        assert!(throttle.0.lock().expect("not poisoned").is_empty(), "forgotten");
    }

    #[test]
    fn a_network_of_ipv6_is_one_guesser() {
        let (throttle, now) = (Throttle::default(), Instant::now());
        let of = |text: &str| Some(text.parse().expect("an address"));
        let noted = (0..BURST).filter(|at| throttle.wrong(of(&format!("2001:db8:1:2::{at:x}")), now)).count();
        assert_eq!(noted, 1, "one entry for one subscriber");
        assert!(!throttle.admits(of("2001:db8:1:2:ffff::1"), now) && throttle.admits(of("2001:db8:1:3::1"), now));
        assert!(throttle.wrong(of("::ffff:10.0.0.1"), now) && !throttle.wrong(of("10.0.0.1"), now));
    }

    #[test]
    fn the_memory_of_addresses_is_bounded() {
        let (throttle, now) = (Throttle::default(), Instant::now());
        for at in 0..2 * ADDRESSES_MAX as u32 {
            throttle.wrong(Some(IpAddr::from(at.to_be_bytes())), now);
        }
        assert_eq!(throttle.0.lock().expect("not poisoned").len(), ADDRESSES_MAX);
        throttle.wrong(Some(IpAddr::from([255, 0, 0, 1])), now + EACH * 2);
        assert_eq!(throttle.0.lock().expect("not poisoned").len(), 1);
    }
}
