//! Limits of a config, and the choice of those that apply to a request.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use penstock_govern::{By, For, Limit};
use penstock_proto::ErrorKind;

use penstock_auth::Principal;
use penstock_base::error::Failure;

/// All limits of a config, with the choice of those that apply to a request.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    limits: Vec<Arc<Limit>>,
    /// True if every limit applies by name only, so that a principal that names none is under none.
    all_named: bool,
}

impl Rules {
    /// The rules made of the limits of a config, in its order.
    pub fn new(limits: &[Arc<Limit>]) -> Self {
        Self { limits: limits.to_vec(), all_named: limits.iter().all(|limit| limit.applies == For::Named) }
    }

    /// All limits in the order of the config.
    pub fn limits(&self) -> &[Arc<Limit>] {
        &self.limits
    }

    /// Limits that apply to a request of this principal to this model, each once.
    ///
    /// # Errors
    /// The principal names a limit that does not exist: the request is refused, since its bound is unknown.
    pub(crate) fn of(&self, principal: &Principal, model: &str) -> Result<Vec<&Arc<Limit>>, Failure> {
        let mut out: Vec<&Arc<Limit>> = Vec::new();
        if self.all_named && principal.limits.is_empty() {
            return Ok(out);
        }
        for id in &principal.limits {
            let Some(limit) = self.limits.iter().find(|limit| *limit.id == **id) else {
                let message = format!("This key is under the limit {id:?}, which is not configured here.");
                return Err(Failure::new(ErrorKind::Forbidden, message));
            };
            if limit.covers(model) && !out.iter().any(|have| Arc::ptr_eq(have, limit)) {
                out.push(limit);
            }
        }
        let anonymous = principal.key.is_none();
        for limit in &self.limits {
            let applies = limit.applies == For::Everyone || (limit.applies == For::Anonymous && anonymous);
            if applies && limit.covers(model) && !out.iter().any(|have| Arc::ptr_eq(have, limit)) {
                out.push(limit);
            }
        }
        Ok(out)
    }
}

/// Subject of all our pools together in limits by provider.
pub(super) const POOLS: &str = "pools";

/// Principal, model, providers and address of a request, for choosing the subjects of its limits.
pub(super) struct Who<'a> {
    pub(super) principal: &'a Principal,
    pub(super) model: &'a str,
    pub(super) providers: &'a [Arc<str>],
    pub(super) from: Option<IpAddr>,
}

/// Subjects in whose counters a request is counted, limit by limit; the request's own subject is a limit's last.
pub(super) fn subjects<'a>(limits: &[&'a Arc<Limit>], who: &Who<'a>) -> Vec<(&'a Arc<Limit>, Cow<'a, str>)> {
    let mut out = Vec::with_capacity(limits.len());
    for &limit in limits {
        out.extend(above(limit, who).into_iter().map(|subject| (limit, Cow::Borrowed(subject))));
        match limit.by {
            By::Provider if !who.providers.is_empty() => {
                out.extend(who.providers.iter().map(|provider| (limit, Cow::Borrowed(&**provider))));
            }
            by => out.push((limit, subject(by, who))),
        }
    }
    out
}

/// Subjects above the request's own in a limit: its key's parents, or their users or teams, as far as they are under the
/// limit. Each is named once.
fn above<'a>(limit: &Limit, who: &Who<'a>) -> Vec<&'a str> {
    let principal = who.principal;
    let own = match limit.by {
        By::Key => principal.key.as_deref(),
        By::User => principal.user.as_deref(),
        By::Team => principal.team.as_deref(),
        By::All | By::Model | By::Provider | By::Address => return Vec::new(),
    };
    let mut out = Vec::new();
    for parent in principal.parents.iter().filter(|parent| covers_parent(limit, &parent.limits)) {
        let subject = match limit.by {
            By::User => parent.user.as_deref(),
            By::Team => parent.team.as_deref(),
            _ => Some(&*parent.id),
        };
        out.extend(subject.filter(|subject| own != Some(*subject) && !out.contains(subject)));
    }
    out
}

/// Returns true if the parent of a key is under a limit, by the limits that name it.
pub(super) fn covers_parent(limit: &Limit, named: &[String]) -> bool {
    limit.applies == For::Everyone || named.iter().any(|have| **have == *limit.id)
}

/// Subject of a request in a limit. Where the request has none of that kind, its key counts, and without a key its address.
fn subject<'a>(by: By, who: &Who<'a>) -> Cow<'a, str> {
    let principal = who.principal;
    let own = match by {
        By::All => return Cow::Borrowed("all"),
        By::Model => return Cow::Borrowed(who.model),
        By::Provider => return Cow::Borrowed(POOLS),
        By::Address => who.from.map(|from| Cow::Owned(address(Some(from)))),
        By::Team => principal.team.as_ref().map(|team| Cow::Borrowed(team.as_str())),
        By::User => principal.user.as_ref().map(|user| Cow::Borrowed(user.as_str())),
        By::Key => None,
    };
    own.or_else(|| principal.key.as_ref().map(|key| Cow::Borrowed(key.as_str())))
        .unwrap_or_else(|| Cow::Owned(address(who.from)))
}

/// An address as subject; of IPv6 its /64, which is what one subscriber has.
fn address(from: Option<IpAddr>) -> String {
    match from.map(|from| from.to_canonical()) {
        None => "local".to_owned(),
        Some(IpAddr::V4(address)) => address.to_string(),
        Some(IpAddr::V6(address)) => {
            let [first, second, third, fourth, ..] = address.segments();
            std::net::Ipv6Addr::new(first, second, third, fourth, 0, 0, 0, 0).to_string() + "/64"
        }
    }
}

#[cfg(test)]
mod tests {
    use penstock_auth::Parent;
    use penstock_govern::{OnStoreFailure, Reserve, Unmetered};

    use super::*;

    /// Use of a key counts for its parents, or for their users or teams, and for each of them once.
    #[test]
    fn what_a_key_uses_counts_above_it() {
        let parent = |id: &str, user: &str, limits: &[&str]| Parent {
            id: id.into(),
            user: Some(user.into()),
            team: Some("t".into()),
            limits: limits.iter().map(|id| (*id).to_owned()).collect(),
        };
        let mut principal = Principal::default();
        (principal.key, principal.user, principal.team) = (Some("k".into()), Some("bob".into()), Some("t".into()));
        principal.parents = vec![parent("p", "alice", &["l"]), parent("q", "alice", &["l"]), parent("r", "carol", &[])];
        let check = |by: By, applies: For, expected: &[&str]| {
            let limit = Arc::new(Limit {
                id: "l".into(),
                measures: Vec::new(),
                by,
                applies,
                models: Vec::new(),
                reserve: Reserve::default(),
                unmetered: Unmetered::default(),
                on_store_failure: OnStoreFailure::default(),
                max_tokens_default: None,
                max_tokens_max: None,
                surge: None,
            });
            let who = Who { principal: &principal, model: "m", providers: &[], from: None };
            let found: Vec<_> =
                subjects(&[&limit], &who).into_iter().map(|(_, subject)| subject.into_owned()).collect();
            assert_eq!(found, expected, "{by:?} {applies:?}");
        };
        check(By::Key, For::Named, &["p", "q", "k"]);
        check(By::Key, For::Everyone, &["p", "q", "r", "k"]);
        check(By::User, For::Named, &["alice", "bob"]);
        check(By::User, For::Everyone, &["alice", "carol", "bob"]);
        check(By::Team, For::Everyone, &["t"]);
        check(By::All, For::Everyone, &["all"]);
    }

    #[test]
    fn a_subscriber_of_ipv6_is_one_address() {
        let of = |text: &str| address(Some(text.parse().expect("an address")));
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2:ffff::1"));
        assert_ne!(of("2001:db8:1:2::"), of("2001:db8:1:3::"));
        assert_eq!((of("::ffff:10.0.0.1"), address(None)), ("10.0.0.1".to_owned(), "local".to_owned()));
    }

    /// Batches have no address: those of different keys are counted apart.
    #[test]
    fn who_has_no_address_counts_by_key() {
        let of = |key: Option<&str>, from: Option<&str>| {
            let mut principal = Principal::default();
            principal.key = key.map(Into::into);
            let from = from.map(|from| from.parse().expect("an address"));
            subject(By::Address, &Who { principal: &principal, model: "m", providers: &[], from }).into_owned()
        };
        assert_eq!(of(Some("a"), Some("10.0.0.1")), "10.0.0.1");
        assert_eq!(
            (of(Some("a"), None), of(Some("b"), None), of(None, None)),
            ("a".into(), "b".into(), "local".into())
        );
    }
}
