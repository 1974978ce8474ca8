//! Scopes of credentials: models, routes, dialects, addresses and expiry.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Permissions of a credential. An empty list allows everything of its kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scope {
    /// Models: names, or prefixes that end in `*`.
    pub models: Vec<String>,
    /// Routes by their labels (`/v1/chat/completions`), or prefixes that end in `*`.
    pub routes: Vec<String>,
    /// Dialects that are allowed: `openai`, `anthropic`, `gemini`.
    pub dialects: Vec<String>,
    /// Networks from which requests may come.
    pub addresses: Vec<IpNet>,
    /// Unix seconds from which on the credential is expired.
    pub expires: Option<u64>,
}

impl Scope {
    /// Returns true if the scope admits requests for this model.
    pub fn has_model(&self, model: &str) -> bool {
        admits(&self.models, model)
    }

    /// Returns true if the scope names models, so that others are refused.
    pub fn is_held_to_models(&self) -> bool {
        !self.models.iter().any(|model| model == "*") && !self.models.is_empty()
    }

    /// Returns true if the scope admits requests to the route of this label.
    pub fn has_route(&self, label: &str) -> bool {
        admits(&self.routes, label)
    }

    /// Returns true if the scope admits requests in this dialect.
    pub fn has_dialect(&self, dialect: &str) -> bool {
        admits(&self.dialects, dialect)
    }

    /// Returns true if the scope admits this address; a missing one (a Unix socket) only where no networks are named.
    pub fn has_address(&self, address: Option<IpAddr>) -> bool {
        // An IPv4 client of a dual-stack listener has a mapped IPv6 address.
        let address = address.map(|address| address.to_canonical());
        self.addresses.is_empty()
            || address.is_some_and(|address| self.addresses.iter().any(|net| net.contains(&address)))
    }

    /// Returns true if the scope has expired at `now` (Unix seconds).
    pub fn is_expired(&self, now: u64) -> bool {
        self.expires.is_some_and(|end| now >= end)
    }

    /// Returns true if the scope allows nothing that `parent` does not: the rule for keys derived from keys.
    pub fn is_within(&self, parent: &Scope) -> bool {
        narrower(&self.models, &parent.models)
            && narrower(&self.routes, &parent.routes)
            && narrower(&self.dialects, &parent.dialects)
            && (parent.addresses.is_empty()
                || (!self.addresses.is_empty()
                    && self.addresses.iter().all(|own| parent.addresses.iter().any(|net| net.contains(own)))))
            && parent.expires.is_none_or(|end| self.expires.is_some_and(|own| own <= end))
    }
}

/// Returns true if a list of names and prefixes covers a name; an empty list covers all.
fn admits(rules: &[String], name: &str) -> bool {
    rules.is_empty() || rules.iter().any(|rule| covers(rule, name))
}

/// Returns true if `rule`, a name or prefix, covers `name`. If `name` is a prefix itself, all its continuations must be covered.
pub(crate) fn covers(rule: &str, name: &str) -> bool {
    match rule.strip_suffix('*') {
        Some(prefix) => name.strip_suffix('*').unwrap_or(name).starts_with(prefix),
        None => rule == name,
    }
}

fn narrower(own: &[String], parent: &[String]) -> bool {
    parent.is_empty() || (!own.is_empty() && own.iter().all(|rule| admits(parent, rule)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_are_names_or_prefixes_and_empty_is_all() {
        let scope = Scope { models: vec!["chat-*".into(), "x".into()], ..Scope::default() };
        for (model, expected) in [("chat-1", true), ("chat-", true), ("x", true), ("xy", false), ("", false)] {
            assert_eq!(scope.has_model(model), expected, "{model}");
        }
        assert!(Scope::default().has_model("anything") && Scope::default().has_route("/v1/models"));
    }

    #[test]
    fn addresses_are_networks() {
        let scope = Scope { addresses: vec!["10.0.0.0/8".parse().expect("a network")], ..Scope::default() };
        let from = |text: &str| scope.has_address(Some(text.parse().expect("an address")));
        assert!(from("10.1.2.3") && from("::ffff:10.1.2.3") && !from("11.0.0.1") && !from("::1"));
        assert!(!scope.has_address(None) && Scope::default().has_address(None));
    }

    #[test]
    fn time_ends_a_scope() {
        let scope = Scope { expires: Some(100), ..Scope::default() };
        assert!(!scope.is_expired(99) && scope.is_expired(100) && !Scope::default().is_expired(u64::MAX));
        assert!(!Scope::default().is_within(&scope), "a child without an end outlives its parent");
    }

    proptest! {
        /// A child's scope admits nothing beyond its parent's.
        #[test]
        fn a_child_is_never_wider(own in rules(), parent in rules(), name in "[ab]{0,3}") {
            let child = Scope { models: own, ..Scope::default() };
            let parent = Scope { models: parent, ..Scope::default() };
            if child.is_within(&parent) && child.has_model(&name) {
                prop_assert!(parent.has_model(&name));
            }
        }
    }

    fn rules() -> impl Strategy<Value = Vec<String>> {
        proptest::collection::vec("[ab]{0,2}\\*?", 0..3)
    }
}
