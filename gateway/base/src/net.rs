//! Addresses of clients: normal forms for comparing and grouping them.

use std::net::IpAddr;

/// Encodes an address as a number: an IPv4 address, or the /64 of an IPv6 one. All clients of a Unix socket are 0.
pub fn network_of(address: Option<IpAddr>) -> u128 {
    match address.map(|address| address.to_canonical()) {
        None => 0,
        Some(IpAddr::V4(address)) => address.to_ipv6_mapped().to_bits(),
        Some(IpAddr::V6(address)) => (address.to_bits() >> 64 << 64) | 1,
    }
}
