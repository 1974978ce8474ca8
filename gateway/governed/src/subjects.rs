//! Interned subjects of ledger entries (key, team, user, model, provider, route, tags).
//!
//! Almost every request has the same subject as one a moment ago and then costs a single look-up: no copies, and no
//! memory for another thread to free. Shards per thread avoid false sharing between cores, and a request is compared as
//! one text.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_govern::Limit;
use penstock_store::{ENTRY_TAGS_MAX, Subject};

use super::restore;
use super::rules::Who;
use penstock_base::per_thread;

/// Most subjects kept per shard; a full shard is cleared, since clients choose tags without bound.
const KEPT_MAX: usize = 1024;

/// Parts of a request from which its ledger subject is made.
pub(super) struct Seen<'a> {
    pub(super) who: &'a Who<'a>,
    pub(super) route: &'a str,
    pub(super) limits: &'a [&'a Arc<Limit>],
    pub(super) tags: &'a [(String, String)],
}

/// Interned ledger subjects, in one shard per thread against lock contention.
#[derive(Default)]
pub(super) struct Subjects([Mutex<Shard>; per_thread::COUNT]);

#[derive(Default)]
struct Shard {
    kept: HashMap<Box<str>, Arc<Subject>>,
    /// Buffer for the look-up text: a known subject costs no allocation.
    said: String,
}

impl Subjects {
    /// Ledger subject of a request: the interned one, or a new one that is kept.
    pub(super) fn of(&self, seen: &Seen<'_>) -> Arc<Subject> {
        let mut shard = self.0[per_thread::of_thread()].lock().unwrap_or_else(PoisonError::into_inner);
        let Shard { kept, said } = &mut *shard;
        said.clear();
        seen.say(said);
        if let Some(known) = kept.get(said.as_str()) {
            return known.clone();
        }
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        let subject = Arc::new(seen.subject());
        kept.insert(said.as_str().into(), subject.clone());
        subject
    }
}

impl Seen<'_> {
    /// Names of key, team, user, model, provider and route, in this order; empty where the request has none.
    fn names(&self) -> [&str; 6] {
        let principal = self.who.principal;
        [
            principal.key.as_deref().unwrap_or_default(),
            principal.team.as_deref().unwrap_or_default(),
            principal.user.as_deref().unwrap_or_default(),
            self.who.model,
            self.who.providers.first().map_or("", |provider| provider),
            self.route,
        ]
    }

    /// Writes the subject as one text, each part after its length: different subjects give different texts.
    fn say(&self, out: &mut String) {
        let limits = self.limits.iter().map(|limit| &*limit.id);
        let tags = self.tags.iter().flat_map(|(name, value)| [name.as_str(), value]);
        let mut digits = itoa::Buffer::new();
        *out += digits.format(self.limits.len());
        for part in self.names().into_iter().chain(limits).chain(tags) {
            out.push(':');
            *out += digits.format(part.len());
            out.push(':');
            *out += part;
        }
    }

    fn subject(&self) -> Subject {
        let [key, team, user, model, provider, route] = self.names().map(str::to_owned);
        let own = self.tags.iter().map(|(name, value)| format!("{name}:{value}"));
        // Limits first, since the number of tags is bounded.
        let limits = self.limits.iter().map(|limit| restore::tag(&limit.id));
        let mut tags: Vec<_> = limits.chain(own).take(ENTRY_TAGS_MAX).collect();
        tags.sort();
        tags.dedup();
        Subject { key, team, user, model, provider, route, tags }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_auth::Principal;

    #[test]
    fn requests_alike_share_a_subject() {
        let subjects = Subjects::default();
        let mut keys = [Principal::default(), Principal::default()];
        keys.iter_mut().zip(["a", "b"]).for_each(|(principal, key)| principal.key = Some(key.into()));
        let tags = [vec![], vec![("env".to_owned(), "x".to_owned())]];
        let providers = [Arc::from("acme")];
        let of = |principal: &Principal, model: &str, tags: &[(String, String)]| {
            let who = Who { principal, model, providers: &providers, from: None };
            subjects.of(&Seen { who: &who, route: "/v1/x", limits: &[], tags })
        };
        let first = of(&keys[0], "m", &tags[0]);
        assert!(Arc::ptr_eq(&first, &of(&keys[0], "m", &tags[0])));
        assert_eq!((first.key.as_str(), first.provider.as_str(), first.tags.len()), ("a", "acme", 0));
        let others = [of(&keys[1], "m", &tags[0]), of(&keys[0], "n", &tags[0]), of(&keys[0], "m", &tags[1])];
        assert_eq!(others[0].key, "b");
        assert_eq!(others[1].model, "n");
        assert_eq!(others[2].tags, ["env:x"]);
        for number in 0..2 * KEPT_MAX {
            of(&keys[0], &number.to_string(), &tags[0]);
        }
        let kept = subjects.0.iter().map(|shard| shard.lock().expect("no panic").kept.len());
        assert_eq!(kept.clone().filter(|kept| *kept > 0).count(), 1, "a thread has one shard");
        assert!(kept.max() <= Some(KEPT_MAX));
        assert_eq!(of(&keys[0], "m", &tags[0]), first, "made again");
    }
}
