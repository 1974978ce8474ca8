//! Query of a list: `?limit=20&after=file-…&order=asc&purpose=batch`. Unknown names are ignored, as the API does.

use penstock_store::{Listing, Order, Page};
use penstock_types::ApiError;

/// Longest value of a query parameter that is read, in bytes.
const VALUE_BYTES_MAX: usize = 256;
/// Longest entry of an object in the query, in bytes: 64 and 512 characters, each up to four bytes of three digits.
const ENTRY_BYTES_MAX: usize = 8192;

/// Value of `name`, decoded.
///
/// # Errors
/// The value is no text, or too long.
pub(crate) fn value(target: &str, name: &str) -> Result<Option<String>, ApiError> {
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

/// Values of `name[key]` for every key, decoded: `metadata[a]=1`.
///
/// # Errors
/// A key or value is no text, or too long.
pub(crate) fn under(target: &str, name: &str) -> Result<Vec<(String, String)>, ApiError> {
    let query = target.split_once('?').map_or("", |(_, query)| query);
    let mut found = Vec::new();
    for (raw_name, raw) in query.split('&').filter_map(|pair| pair.split_once('=')) {
        let bad = || ApiError::invalid(name, format!("{name}: not a value of at most {ENTRY_BYTES_MAX} bytes"));
        let Some(whole) = decoded(raw_name) else { continue };
        let key = whole.strip_prefix(name).and_then(|rest| rest.strip_prefix('[')?.strip_suffix(']'));
        let Some(key) = key else { continue };
        if raw_name.len() + raw.len() > ENTRY_BYTES_MAX {
            return Err(bad());
        }
        found.push((key.to_owned(), decoded(raw).ok_or_else(bad)?));
    }
    Ok(found)
}

/// Page that is asked for, newest first where nothing else is.
///
/// # Errors
/// `limit` is no number in range, or `order` is neither `asc` nor `desc`.
pub(crate) fn page(target: &str, default: u32, max: u32) -> Result<Page, ApiError> {
    page_in(target, default, max, Order::Descending)
}

/// Page that is asked for, in the order `usual` where none is.
///
/// # Errors
/// `limit` is no number in range, or `order` is neither `asc` nor `desc`.
pub(crate) fn page_in(target: &str, default: u32, max: u32, usual: Order) -> Result<Page, ApiError> {
    let limit = match value(target, "limit")? {
        None => default,
        Some(text) => {
            let given = text.parse().ok().filter(|limit| (1..=max).contains(limit));
            given.ok_or_else(|| ApiError::invalid("limit", format!("limit: must be a whole number from 1 to {max}")))?
        }
    };
    let order = match value(target, "order")?.as_deref() {
        None => usual,
        Some("desc") => Order::Descending,
        Some("asc") => Order::Ascending,
        Some(_) => return Err(ApiError::invalid("order", "order: must be asc or desc")),
    };
    Ok(Page { after: value(target, "after")?, limit, order })
}

/// Page of a whole list in its first order, which is ascending.
pub(crate) fn cut<T>(mut items: Vec<T>, page: &Page, id: impl Fn(&T) -> &str) -> Listing<T> {
    if page.order == Order::Descending {
        items.reverse();
    }
    let from = match &page.after {
        None => 0,
        Some(after) => items.iter().position(|item| id(item) == after).map_or(items.len(), |at| at + 1),
    };
    let mut items = items.split_off(from);
    let more = items.len() > page.limit as usize;
    items.truncate(page.limit as usize);
    Listing { items, more }
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
