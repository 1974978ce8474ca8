//! Request ids: the client's own where it is well-formed, else a new one that sorts by time.

use std::cell::RefCell;

use penstock_base::clock;

/// Request id of a request whose client gave `given`: this one if it is well-formed, else a new one.
pub fn request_id(given: Option<&str>) -> String {
    let is_well_formed = |id: &&str| {
        (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    given.filter(is_well_formed).map_or_else(new_request_id, str::to_owned)
}

/// Random bytes that are fetched from the system at once: enough for 32 ids.
const RANDOM_BYTES: usize = 512;

thread_local! {
    /// Random bytes, and the number of them that are used.
    static RANDOM: RefCell<([u8; RANDOM_BYTES], usize)> = const { RefCell::new(([0; RANDOM_BYTES], RANDOM_BYTES)) };
}

/// Generates a request id: `req_`, 48 bits of time in milliseconds and 80 unpredictable random bits, in hex. Ids sort
/// by time, so an index over them grows at its end instead of everywhere.
pub fn new_request_id() -> String {
    RANDOM.with_borrow_mut(|(bytes, used)| {
        if *used == RANDOM_BYTES {
            // Only the uniqueness of an id in a log depends on this; without system randomness the id is all zeros.
            let _ = getrandom::fill(bytes);
            *used = 0;
        }
        let random = &mut bytes[*used..*used + 16];
        *used += 16;
        random[..6].copy_from_slice(&(clock::since_epoch().as_millis() as u64).to_be_bytes()[2..]);
        let mut id = String::with_capacity(36);
        id.push_str("req_");
        for byte in random {
            for digit in [*byte >> 4, *byte & 15] {
                id.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
            }
            *byte = 0;
        }
        id
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_well_formed_and_their_own() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| new_request_id()).collect();
        let fine =
            |id: &String| id.len() == 36 && id.starts_with("req_") && id[4..].bytes().all(|b| b.is_ascii_hexdigit());
        assert!(ids.len() == 1000 && ids.iter().all(fine), "{ids:?}");
    }
}
