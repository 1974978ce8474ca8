//! Query of a list: `?limit=20&after=file-…&order=asc&purpose=batch`. Unknown names are ignored, as the API does.

use penstock_store::{Order, Page};
use penstock_types::ApiError;

/// Longest value of a query parameter that is read, in bytes.
const VALUE_BYTES_MAX: usize = 256;

/// Value of `name`, decoded.
///
/// # Errors
/// The value is no text, or too long.
pub(super) fn value(target: &str, name: &str) -> Result<Option<String>, ApiError> {
    let query = target.split_once('?').map_or("", |(_, query)| query);
    let found = query.split('&').filter_map(|pair| pair.split_once('=')).find(|(have, _)| *have == name);
    let Some((_, raw)) = found.filter(|(_, raw)| !raw.is_empty()) else { return Ok(None) };
    let bad = || ApiError::invalid(name, format!("{name}: not a value of at most {VALUE_BYTES_MAX} bytes"));
    if raw.len() > VALUE_BYTES_MAX {
        return Err(bad());
    }
    decoded(raw).map(Some).ok_or_else(bad)
}

fn decoded(raw: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::with_capacity(raw.len()), raw.as_bytes());
    while let [first, tail @ ..] = rest {
        rest = tail;
        match (first, tail) {
            (b'%', [high, low, tail @ ..]) => {
                let digit = |hex: &u8| char::from(*hex).to_digit(16);
                bytes.push((digit(high)? * 16 + digit(low)?) as u8);
                rest = tail;
            }
            (b'%', _) => return None,
            (b'+', _) => bytes.push(b' '),
            (byte, _) => bytes.push(*byte),
        }
    }
    String::from_utf8(bytes).ok()
}

/// Page that is asked for.
///
/// # Errors
/// `limit` is no number in range, or `order` is neither `asc` nor `desc`.
pub(super) fn page(target: &str, default: u32, max: u32) -> Result<Page, ApiError> {
    let limit = match value(target, "limit")? {
        None => default,
        Some(text) => {
            let given = text.parse().ok().filter(|limit| (1..=max).contains(limit));
            given.ok_or_else(|| ApiError::invalid("limit", format!("limit: must be a whole number from 1 to {max}")))?
        }
    };
    let order = match value(target, "order")?.as_deref() {
        None | Some("desc") => Order::Descending,
        Some("asc") => Order::Ascending,
        Some(_) => return Err(ApiError::invalid("order", "order: must be asc or desc")),
    };
    Ok(Page { after: value(target, "after")?, limit, order })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_read_or_refused() {
        let read = page("/v1/files?limit=3&order=asc&after=file%2D1&x=%zz", 20, 100).expect("a page");
        assert_eq!(read, Page { after: Some("file-1".into()), limit: 3, order: Order::Ascending });
        assert_eq!(page("/v1/files", 20, 100).expect("a page").limit, 20);
        for query in ["limit=0", "limit=101", "limit=x", "order=up", "after=%ff", "after=%2"] {
            assert!(page(&format!("/v1/files?{query}"), 20, 100).is_err(), "{query}");
        }
        assert!(value(&format!("/?after={}", "a".repeat(300)), "after").is_err());
    }
}
