//! Code shared by the SQL stores.

pub(crate) mod ledger;

use crate::{Listing, Order};

/// Page from the rows of a query, which reads one row more than the limit to tell whether there are more.
pub(crate) fn listing<T>(mut items: Vec<T>, limit: u32) -> Listing<T> {
    let more = items.len() > limit as usize;
    items.truncate(limit as usize);
    Listing { items, more }
}

/// `ORDER BY` direction, and the comparison with the position of the item before the page.
pub(crate) fn direction(order: Order) -> (&'static str, &'static str) {
    match order {
        Order::Ascending => ("ASC", ">"),
        Order::Descending => ("DESC", "<"),
    }
}
