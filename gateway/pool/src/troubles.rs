//! Troubles that a worker reports of itself: failing transfers of KV, tiers that are off. They cost time but no
//! request, so no other status shows them.

use penstock_proto::frames::{Notice, NoticeKind};
use std::collections::BTreeMap;

/// Most troubles kept per worker, so that a worker cannot fill the gateway's memory.
const KEPT_MAX: usize = 64;

/// Most characters kept of a subject or a reason.
const TEXT_MAX: usize = 300;

/// Troubles that one worker has reported and that may persist.
#[derive(Clone, Debug, Default)]
pub(super) struct Troubles {
    kept: BTreeMap<(NoticeKind, String), String>,
}

impl Troubles {
    /// Keeps a reported trouble, or removes it when its reason is empty: the trouble is over.
    pub(super) fn note(&mut self, kind: NoticeKind, notice: Notice) {
        let short = |text: String| text.chars().take(TEXT_MAX).collect::<String>();
        let key = (kind, short(notice.subject));
        if notice.why.is_empty() {
            self.kept.remove(&key);
        } else if self.kept.len() < KEPT_MAX || self.kept.contains_key(&key) {
            self.kept.insert(key, short(notice.why));
        }
    }

    /// The troubles as text for a person, one line each.
    pub(super) fn lines(&self) -> Vec<Trouble> {
        let line = |((kind, subject), why): (&(NoticeKind, String), &String)| Trouble {
            kind: *kind,
            text: match kind {
                NoticeKind::Transfer => format!("KV from {subject} does not come: {why}"),
                NoticeKind::Tier => format!("KV tier {subject} is off: {why}"),
            },
        };
        self.kept.iter().map(line).collect()
    }
}

/// One trouble that a worker reported: a fault that costs time but no request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Kind of the trouble, as the worker protocol names it.
    pub kind: NoticeKind,
    /// Description of the trouble, for a person.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(subject: &str, why: &str) -> Notice {
        Notice { subject: subject.into(), why: why.into(), ..Notice::default() }
    }

    #[test]
    fn a_trouble_is_shown_until_it_is_over() {
        let mut troubles = Troubles::default();
        troubles.note(NoticeKind::Transfer, notice("tcp://b:7", "refused"));
        troubles.note(NoticeKind::Tier, notice("disk", "3 writes failed"));
        troubles.note(NoticeKind::Transfer, notice("tcp://b:7", "no route"));
        let texts = |troubles: &Troubles| troubles.lines().into_iter().map(|line| line.text).collect::<Vec<_>>();
        let both = ["KV from tcp://b:7 does not come: no route", "KV tier disk is off: 3 writes failed"];
        assert_eq!(texts(&troubles), both);
        troubles.note(NoticeKind::Transfer, notice("tcp://b:7", ""));
        assert_eq!(texts(&troubles), both[1..]);
    }

    #[test]
    fn a_worker_cannot_fill_the_memory_of_its_gateway() {
        let mut troubles = Troubles::default();
        for n in 0..1000 {
            troubles.note(NoticeKind::Transfer, notice(&format!("{n}"), &"x".repeat(100_000)));
        }
        assert!(troubles.lines().len() == KEPT_MAX && troubles.lines().iter().all(|line| line.text.len() < 700));
    }
}
