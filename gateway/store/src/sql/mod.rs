//! Code shared by the SQL stores.

pub(crate) mod ledger;

use crate::{Listing, Order};

/// Page from the rows of a query, which reads one row more than the limit to tell whether there are more.
pub(crate) fn listing<T>(mut items: Vec<T>, limit: u32) -> Listing<T> {
    let more = items.len() > limit as usize;
    items.truncate(limit as usize);
    Listing { items, more }
}

/// The page without the items at its end that do not fit into `bytes_max` beside those before them; the first always
/// does.
pub(crate) fn fitting<T>(mut page: Listing<T>, bytes_max: u64, bytes: impl Fn(&T) -> u64) -> Listing<T> {
    let mut sum = 0_u64;
    let fits = |item: &T| {
        sum = sum.saturating_add(bytes(item));
        sum <= bytes_max
    };
    let count = page.items.iter().map(fits).take_while(|fits| *fits).count().max(1);
    page.more |= count < page.items.len();
    page.items.truncate(count);
    page
}

/// `ORDER BY` direction, and the comparison with the position of the item before the page.
pub(crate) fn direction(order: Order) -> (&'static str, &'static str) {
    match order {
        Order::Ascending => ("ASC", ">"),
        Order::Descending => ("DESC", "<"),
    }
}
