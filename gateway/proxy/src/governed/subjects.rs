//! Who and what entries of the ledger are about, each kept once: almost every request is about what another was about a moment ago, and
//! then costs a look-up here, no copies, and nothing that another thread has to free.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use penstock_govern::Limit;
use penstock_store::{ENTRY_TAGS_MAX, Subject};

use super::restore;
use super::rules::Who;

/// Subjects that are kept; clients choose tags, so there may be any number.
const KEPT_MAX: usize = 4096;

/// A request, as far as its subject goes.
pub(super) struct Seen<'a> {
    pub(super) who: &'a Who<'a>,
    pub(super) route: &'a str,
    pub(super) limits: &'a [&'a Arc<Limit>],
    pub(super) tags: &'a [(String, String)],
}

/// Subjects by the hash of what they are made from.
#[derive(Default)]
pub(super) struct Subjects {
    hasher: RandomState,
    kept: Mutex<HashMap<u64, Kept>>,
}

struct Kept {
    subject: Arc<Subject>,
    /// What its tags are made from.
    limits: Vec<Arc<str>>,
    tags: Vec<(String, String)>,
}

impl Subjects {
    /// The subject of a request.
    pub(super) fn of(&self, seen: &Seen<'_>) -> Arc<Subject> {
        let mut hash = self.hasher.build_hasher();
        seen.hash(&mut hash);
        let hash = hash.finish();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kept.get(&hash).filter(|known| seen.is(known)) {
            return known.subject.clone();
        }
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        let subject = Arc::new(seen.subject());
        let limits = seen.limits.iter().map(|limit| limit.id.clone()).collect();
        kept.insert(hash, Kept { subject: subject.clone(), limits, tags: seen.tags.to_vec() });
        subject
    }
}

impl Seen<'_> {
    /// Names, with the empty one for nobody.
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

    fn hash(&self, into: &mut impl Hasher) {
        self.names().hash(into);
        self.limits.iter().for_each(|limit| limit.id.hash(into));
        self.tags.hash(into);
    }

    fn is(&self, kept: &Kept) -> bool {
        let Subject { key, team, user, model, provider, route, .. } = &*kept.subject;
        self.names() == [key, team, user, model, provider, route].map(String::as_str)
            && self.limits.iter().map(|limit| &limit.id).eq(&kept.limits)
            && self.tags == kept.tags
    }

    fn subject(&self) -> Subject {
        let [key, team, user, model, provider, route] = self.names().map(str::to_owned);
        let own = self.tags.iter().map(|(name, value)| format!("{name}:{value}"));
        // Limits first: only so many are kept.
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
    use crate::auth::Principal;

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
        assert!(subjects.kept.lock().expect("no panic").len() <= KEPT_MAX);
        assert_eq!(of(&keys[0], "m", &tags[0]), first, "made again");
    }
}
