//! Troubles that cost time but fail no request: KV transfers that fail, tiers that are off. The beginning and the end
//! of each are logged and reported to the gateways. Further failed transfers with the same peer are reported at most
//! once a minute, with their number. A tier is reported once each time it goes off, even within that minute, however
//! long it stays off.

use penstock_proto::frames::{Notice, NoticeKind};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Interval between reports of a trouble that goes on.
const AGAIN: Duration = Duration::from_secs(60);

/// Most troubles that are remembered; addresses of peers come from gateways.
const KNOWN_MAX: usize = 256;

struct Trouble {
    why: String,
    /// Time of the last report to log and gateways.
    said: Instant,
    /// Number of occurrences since the last report.
    unsaid: u64,
    is_over: bool,
}

/// Troubles that have occurred, by kind and subject; at most [`KNOWN_MAX`].
#[derive(Default)]
pub(crate) struct Troubles {
    known: HashMap<(NoticeKind, String), Trouble>,
}

impl Troubles {
    /// Records an occurrence. Returns the notice for gateways, if one is due.
    pub(crate) fn happened(&mut self, kind: NoticeKind, subject: &str, why: &str, now: Instant) -> Option<Notice> {
        let key = (kind, subject.to_owned());
        if self.known.len() >= KNOWN_MAX && !self.known.contains_key(&key) {
            let oldest = self.known.iter().min_by_key(|(_, trouble)| trouble.said).map(|(key, _)| key.clone());
            oldest.and_then(|oldest| self.known.remove(&oldest));
        }
        let count = match self.known.get_mut(&key) {
            Some(trouble)
                if now.saturating_duration_since(trouble.said) < AGAIN
                    && (kind == NoticeKind::Transfer || !trouble.is_over) =>
            {
                trouble.unsaid += 1;
                why.clone_into(&mut trouble.why);
                return None;
            }
            Some(trouble) => trouble.unsaid + 1,
            None => 1,
        };
        self.known.insert(key, Trouble { why: why.to_owned(), said: now, unsaid: 0, is_over: false });
        match kind {
            NoticeKind::Transfer => {
                warn!(
                    peer = subject,
                    why, count, "a transfer of KV from another worker failed: the missing blocks are computed here"
                );
            }
            NoticeKind::Tier => warn!(tier = subject, why, count, "a KV tier is off: the worker retries with backoff"),
        }
        Some(Notice { kind: kind as i32, subject: subject.to_owned(), why: why.to_owned(), count })
    }

    /// Records that the subject works. Returns the notice for gateways, if it did not work before.
    pub(crate) fn works(&mut self, kind: NoticeKind, subject: &str) -> Option<Notice> {
        if self.known.is_empty() {
            return None;
        }
        let trouble = self.known.get_mut(&(kind, subject.to_owned())).filter(|trouble| !trouble.is_over)?;
        trouble.is_over = true;
        match kind {
            NoticeKind::Transfer => info!(peer = subject, "transfers of KV from another worker work again"),
            NoticeKind::Tier => info!(tier = subject, "a KV tier is used again"),
        }
        Some(Notice { kind: kind as i32, subject: subject.to_owned(), ..Notice::default() })
    }

    /// Notices of the current troubles, for a gateway that connects now.
    pub(crate) fn current(&self) -> Vec<Notice> {
        let known = self.known.iter().filter(|(_, trouble)| !trouble.is_over);
        let notice = |((kind, subject), trouble): (&(NoticeKind, String), &Trouble)| Notice {
            kind: *kind as i32,
            subject: subject.clone(),
            why: trouble.why.clone(),
            count: trouble.unsaid + 1,
        };
        known.map(notice).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: &str = "tcp://localhost:7";

    #[test]
    fn a_trouble_is_said_when_it_begins_and_ends_and_seldom_between() {
        let (mut troubles, began) = (Troubles::default(), Instant::now());
        let fails = |troubles: &mut Troubles, seconds: u64| {
            let now = began + Duration::from_secs(seconds);
            troubles.happened(NoticeKind::Transfer, PEER, "refused", now).map(|notice| notice.count)
        };
        assert_eq!(troubles.works(NoticeKind::Transfer, PEER), None, "it always did");
        assert_eq!(fails(&mut troubles, 0), Some(1));
        assert_eq!([1, 2, 59].map(|at| fails(&mut troubles, at)), [None; 3]);
        assert_eq!(troubles.current()[0].count, 4, "a gateway that comes now is told");
        assert_eq!(fails(&mut troubles, 60), Some(4));
        assert_eq!(troubles.works(NoticeKind::Tier, PEER), None);
        let over = troubles.works(NoticeKind::Transfer, PEER).expect("it is over");
        assert_eq!((over.why.as_str(), over.subject.as_str(), troubles.current().len()), ("", PEER, 0));
        assert_eq!(troubles.works(NoticeKind::Transfer, PEER), None, "that was said");
        // A trouble that comes and goes is not reported each time.
        assert_eq!((fails(&mut troubles, 61), fails(&mut troubles, 121)), (None, Some(2)));
    }

    #[test]
    fn a_tier_is_said_to_be_off_each_time_it_goes_off() {
        let (mut troubles, began) = (Troubles::default(), Instant::now());
        let off = |troubles: &mut Troubles, seconds: u64, why: &str| {
            troubles.happened(NoticeKind::Tier, "disk", why, began + Duration::from_secs(seconds))
        };
        assert!(off(&mut troubles, 0, "torn out").is_some());
        assert!(troubles.works(NoticeKind::Tier, "disk").is_some() && troubles.current().is_empty());
        // The disk is never tried with success again, so nothing would tell a later time.
        let again = off(&mut troubles, 6, "no such folder").expect("it is off again");
        assert_eq!((again.why.as_str(), again.count), ("no such folder", 1));
        assert_eq!(troubles.current(), [again], "a gateway that comes now is told");
        assert!(troubles.works(NoticeKind::Tier, "disk").is_some());
    }

    #[test]
    fn no_more_troubles_are_remembered_than_there_is_room_for() {
        let (mut troubles, began) = (Troubles::default(), Instant::now());
        for n in 0..=KNOWN_MAX as u64 {
            let said = troubles.happened(NoticeKind::Transfer, &n.to_string(), "x", began + Duration::from_millis(n));
            assert!(said.is_some());
        }
        assert_eq!(troubles.current().len(), KNOWN_MAX);
        assert!(troubles.current().iter().all(|notice| notice.subject != "0"), "the oldest is forgotten");
    }
}
