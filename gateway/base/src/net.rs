//! Addresses of clients.

use std::net::IpAddr;

/// What counts as one address; all of a Unix socket's clients are one.
pub fn network_of(address: Option<IpAddr>) -> u128 {
    match address.map(|address| address.to_canonical()) {
        None => 0,
        Some(IpAddr::V4(address)) => address.to_ipv6_mapped().to_bits(),
        Some(IpAddr::V6(address)) => (address.to_bits() >> 64 << 64) | 1,
    }
}
