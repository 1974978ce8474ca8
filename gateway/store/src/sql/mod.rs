//! What all stores that speak SQL share.

pub(crate) mod ledger;

use crate::{Listing, Order};

/// Rows of a list: one more than asked for tells whether there are more.
pub(crate) fn listing<T>(mut items: Vec<T>, limit: u32) -> Listing<T> {
    let more = items.len() > limit as usize;
    items.truncate(limit as usize);
    Listing { items, more }
}

/// `ORDER BY`, and the comparison with the place of the item before the page.
pub(crate) fn direction(order: Order) -> (&'static str, &'static str) {
    match order {
        Order::Ascending => ("ASC", ">"),
        Order::Descending => ("DESC", "<"),
    }
}
