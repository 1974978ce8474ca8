//! Identity of whoever is behind a request, for everything that is shared out: upstreams, memory, turns.

use std::net::IpAddr;

/// Hash of the key or address behind a request: keys that share an upstream, or memory, do not trust each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Asker(u64);

impl Asker {
    /// Hash of the key's tenant; without one, of the address (of its /64 for IPv6). The default: neither is known.
    pub fn new(tenant: &str, address: Option<IpAddr>) -> Self {
        let hash = |kind: u8, bytes: &[u8]| Self(crate::hash::stable(&[&[kind], bytes].concat()));
        match address.map(|address| address.to_canonical()) {
            _ if !tenant.is_empty() => hash(0, tenant.as_bytes()),
            Some(IpAddr::V4(address)) => hash(1, &address.octets()),
            Some(IpAddr::V6(address)) => hash(2, &address.octets()[..8]),
            None => Self::default(),
        }
    }

    /// Returns true if neither a key nor an address is known.
    pub fn is_nobody(self) -> bool {
        self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_before_addresses_and_a_network_of_ipv6_is_one() {
        let at = |address: &str| Asker::new("", address.parse().ok());
        assert_eq!(Asker::new("a", "10.0.0.1".parse().ok()), Asker::new("a", None));
        assert_ne!(Asker::new("a", None), Asker::new("b", None));
        assert_ne!(at("10.0.0.1"), at("10.0.0.2"));
        assert_eq!(at("10.0.0.1"), at("::ffff:10.0.0.1"));
        assert_eq!(at("2001:db8::1"), at("2001:db8::2"));
        assert_ne!(at("2001:db8::1"), at("2001:db8:0:1::1"));
        assert!(at("").is_nobody() && !at("10.0.0.1").is_nobody() && !Asker::new("a", None).is_nobody());
    }
}
