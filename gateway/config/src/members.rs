//! Members of the providers whose host name stands for several servers (`resolve = true`): each address is a provider
//! and a target of its own.
//!
//! The snapshot keeps what the operator wrote; pods that come and go change [`Members`] alone. A name that has not been
//! looked up yet, or has no address, stays one provider without KV events.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use penstock_http::client::{Place, Target};
use penstock_kv_feed::KvEventsConfig;
use penstock_provider::ProviderConfig;
use penstock_relay::{ModelConfig, TARGETS_MAX, TargetConfig};

/// Addresses of each provider with `resolve`, by the provider's id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members(BTreeMap<String, Vec<SocketAddr>>);

impl Members {
    /// Sets the addresses of a provider, in ascending order; the first [`TARGETS_MAX`] count. Returns the number of
    /// those that do not.
    pub fn set(&mut self, provider: &str, mut addresses: Vec<SocketAddr>) -> usize {
        addresses.sort_unstable();
        addresses.dedup();
        let over = addresses.len().saturating_sub(TARGETS_MAX);
        addresses.truncate(TARGETS_MAX);
        self.0.insert(provider.to_owned(), addresses);
        over
    }

    /// Forgets providers that are none of these any more.
    pub fn keep(&mut self, providers: &[ProviderConfig]) {
        self.0.retain(|id, _| providers.iter().any(|provider| provider.resolve && provider.id == *id));
    }

    /// Addresses of a provider; empty: none are known.
    pub fn of(&self, provider: &str) -> &[SocketAddr] {
        self.0.get(provider).map_or(&[], Vec::as_slice)
    }

    /// Providers to create: one per address where a name stands for several servers.
    pub fn providers(&self, config: &[ProviderConfig]) -> Vec<ProviderConfig> {
        let each = |provider: &ProviderConfig| match self.of(&provider.id) {
            _ if !provider.resolve => vec![provider.clone()],
            [] => vec![ProviderConfig { kv_events: None, ..provider.clone() }],
            addresses => addresses.iter().map(|address| member(provider, *address)).collect(),
        };
        config.iter().flat_map(each).collect()
    }

    /// Models with a target per address. Targets beyond [`TARGETS_MAX`] are left out, those of `to` last.
    pub fn models(&self, config: &[ModelConfig]) -> Vec<ModelConfig> {
        if self.0.is_empty() {
            return config.to_vec();
        }
        let each = |model: &ModelConfig| {
            let mut to: Vec<_> = model
                .to
                .iter()
                .flat_map(|(target, weight)| self.targets(target).into_iter().map(|target| (target, *weight)))
                .collect();
            to.truncate(TARGETS_MAX);
            let mut fallback: Vec<_> = model.fallback.iter().flat_map(|target| self.targets(target)).collect();
            fallback.truncate(TARGETS_MAX - to.len());
            let mut mirror = model.mirror.clone();
            if let Some(mirror) = &mut mirror
                && let Some(first) = self.targets(&mirror.target).into_iter().next()
            {
                mirror.target = first;
            }
            ModelConfig { to, fallback, mirror, ..model.clone() }
        };
        config.iter().map(each).collect()
    }

    fn targets(&self, target: &TargetConfig) -> Vec<TargetConfig> {
        match target {
            TargetConfig::Provider(id, model) if !self.of(id).is_empty() => {
                let member = |address| TargetConfig::Provider(member_id(id, address), model.clone());
                self.of(id).iter().map(member).collect()
            }
            other => vec![other.clone()],
        }
    }
}

/// Id of a member: the provider's, and the address.
fn member_id(provider: &str, address: &SocketAddr) -> String {
    format!("{provider}@{address}")
}

fn member(provider: &ProviderConfig, address: SocketAddr) -> ProviderConfig {
    let place = Place::Tcp { host: address.ip().to_string(), port: address.port(), tls: false };
    let kv_events = provider.kv_events.as_ref().map(|events| KvEventsConfig {
        endpoint: events.endpoint.at(address.ip()),
        replay: events.replay.as_ref().map(|replay| replay.at(address.ip())),
        tokenizer: events.tokenizer.clone(),
    });
    ProviderConfig {
        id: member_id(&provider.id, &address),
        target: Target { place, ..provider.target.clone() },
        resolve: false,
        kv_events,
        ..provider.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Overrides, Snapshot, load};

    fn read(text: &str) -> Result<Snapshot, String> {
        load(Some(("p.toml", text)), &Overrides::default(), &|_| None).map_err(|faults| faults.to_string())
    }

    const TEXT: &str = "[[providers]]\nid = \"gpu\"\nbase_url = \"http://vllm.ai.svc:8000/v1\"\nresolve = true\n\
        kv_events = \"tcp://vllm.ai.svc:5557\"\ntokenizer = \"/m\"\n\
        [[providers]]\nid = \"far\"\nbase_url = \"https://far.example/v1\"\n\
        [[models]]\nname = \"m\"\nto = [{ provider = \"gpu\", weight = 2 }]\nfallback = [{ provider = \"far\" }]\n";

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 8000))
    }

    #[test]
    fn each_address_is_a_provider_and_a_target() {
        let config = read(TEXT).expect("valid");
        let mut members = Members::default();
        assert_eq!(members.set("gpu", vec![address(9), address(7), address(9)]), 0);
        let providers = members.providers(&config.providers);
        let ids: Vec<_> = providers.iter().map(|provider| provider.id.as_str()).collect();
        assert_eq!(ids, ["gpu@10.0.0.7:8000", "gpu@10.0.0.9:8000", "far"]);
        assert_eq!(providers[1].target.to_string(), "http://vllm.ai.svc:8000/v1", "the Host header stays the name");
        let place = Place::Tcp { host: "10.0.0.9".into(), port: 8000, tls: false };
        assert_eq!(providers[1].target.place, place);
        let events = providers[1].kv_events.as_ref().expect("events");
        assert_eq!(events.endpoint.to_string(), "tcp://10.0.0.9:5557");
        let models = members.models(&config.models);
        let to: Vec<_> = models[0].to.iter().map(|(target, weight)| (target.id(), *weight)).collect();
        assert_eq!(to, [("gpu@10.0.0.7:8000/m".to_owned(), 2), ("gpu@10.0.0.9:8000/m".to_owned(), 2)]);
        assert_eq!(models[0].fallback[0].id(), "far/m");
    }

    #[test]
    fn without_addresses_the_name_stays() {
        let config = read(TEXT).expect("valid");
        let mut members = Members::default();
        for _ in 0..2 {
            let providers = members.providers(&config.providers);
            assert_eq!((providers[0].id.as_str(), &providers[0].kv_events), ("gpu", &None));
            assert_eq!(members.models(&config.models), config.models);
            members.set("gpu", Vec::new());
        }
    }

    #[test]
    fn there_is_a_bound() {
        let config = read(TEXT).expect("valid");
        let mut members = Members::default();
        assert_eq!(members.set("gpu", (0..40).map(address).collect()), 40 - TARGETS_MAX);
        let models = members.models(&config.models);
        assert_eq!((models[0].to.len(), models[0].fallback.len()), (TARGETS_MAX, 0));
        members.keep(&config.providers[1..]);
        assert_eq!(members, Members::default());
    }

    #[test]
    fn a_name_that_cannot_be_followed_is_refused() {
        for (keys, part) in [
            ("base_url = \"https://a.svc/v1\"", "resolve: goes with a base_url of http://HOST"),
            ("base_url = \"unix:///x\"", "resolve: goes with a base_url of http://HOST"),
            ("base_url = \"http://a.svc/v1\"\nmodels = [\"x\"]", "resolve: the models go into [[models]]"),
            ("base_url = \"http://a.svc/v1\"\ndiscover = true", "resolve: the models go into [[models]]"),
            (
                "base_url = \"http://a.svc/v1\"\nkv_events = \"tcp://b.svc:5557\"\ntokenizer = \"/m\"",
                "kv_events: must have the host of base_url",
            ),
        ] {
            let faults = read(&format!("[[providers]]\nid = \"a\"\nresolve = true\n{keys}\n")).expect_err(keys);
            assert!(faults.contains(part), "{part:?} in {faults}");
        }
    }
}
