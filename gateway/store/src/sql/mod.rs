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

/// Tenant of a file that its own has deleted, while its content is being deleted in pieces. Such a file is unsealed and
/// has expired, so it is found by the sweeper, also by that of the version before.
pub(crate) const GONE: &str = "\u{1}deleted";
/// Most lines of a batch deleted in one transaction, which delays other writes: a result may have megabytes.
pub(crate) const LINES_PIECE: u32 = 128;
/// Most chunks of a file deleted in one transaction: 8 MiB.
pub(crate) const CHUNKS_PIECE: u32 = 32;
/// Most batches deleted in one transaction.
pub(crate) const BATCHES_PIECE: u32 = 100;

/// Query for the row number of a batch that has ended and has left lines. Cost: one look-up per batch with lines.
pub(crate) fn left_lines(schema: &str) -> String {
    format!(
        "WITH RECURSIVE those (batch) AS (
           SELECT min(batch) FROM {schema}batch_lines
           UNION ALL
           SELECT (SELECT min(batch) FROM {schema}batch_lines WHERE batch > those.batch) FROM those WHERE batch IS NOT NULL)
         SELECT batch FROM those WHERE batch IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM {schema}batches WHERE seq = those.batch AND is_open) LIMIT 1"
    )
}

/// Condition that a batch has ended (`ended`, in the words of the index of such batches), and that its files of results
/// are gone.
pub(crate) fn is_spent(schema: &str, ended: &str) -> String {
    format!(
        "{ended} AND NOT EXISTS (SELECT 1 FROM {schema}files
         WHERE files.id IN (batches.output, batches.errors) AND files.tenant = batches.tenant)"
    )
}
