//! What days and months have used before this process: read from the ledger at start.
//!
//! What a process before this one left open has been settled before ([`orphans`](super::orphans)). The usage of the current day and month
//! is summed up, limit by limit: entries carry the limits that they were counted in as tags. Windows of hours and less begin anew,
//! and so do counters by address, which the ledger does not know.

use std::sync::Arc;

use penstock_govern::{By, Claim, Limit, Measure, Span, Unit, began};
use penstock_store::{EntryFilter, Group, Store, StoreError, UsageQuery, UsageRow};

use super::Governor;
use crate::clock;

/// Rows read at once.
const PAGE: u32 = 1000;

/// The tag of entries that a limit counts.
pub(super) fn tag(limit: &str) -> String {
    format!("limit:{limit}")
}

/// Counts what the ledger has of the current day and month.
pub(super) async fn restore(governor: &Governor, store: &dyn Store, limits: &[Arc<Limit>]) -> Result<(), StoreError> {
    let (day, month) = began(clock::since_epoch().as_millis() as u64);
    for limit in limits {
        for (span, from) in [(Span::Day, day), (Span::Month, month)] {
            let measures: Vec<_> = limit.measures.iter().filter(|measure| measure.span == span).copied().collect();
            if !measures.is_empty() && limit.by != By::Address {
                count(governor, store, limit, &measures, from / 1000).await?;
            }
        }
    }
    Ok(())
}

async fn count(
    governor: &Governor,
    store: &dyn Store,
    limit: &Arc<Limit>,
    measures: &[Measure],
    from: u64,
) -> Result<(), StoreError> {
    let groups = match limit.by {
        By::All => vec![],
        By::Model => vec![Group::Model],
        By::Provider => vec![Group::Provider],
        By::Team => vec![Group::Team, Group::Key],
        By::User => vec![Group::User, Group::Key],
        By::Key | By::Address => vec![Group::Key],
    };
    let filter = EntryFilter { from, until: u64::MAX >> 1, tag: Some(tag(&limit.id)), ..EntryFilter::default() };
    let mut after = None;
    loop {
        let query = UsageQuery { filter: filter.clone(), groups: groups.clone(), after: after.clone(), limit: PAGE };
        let rows = store.usage(&query).await?;
        for row in &rows.items {
            let subject = match limit.by {
                By::All => Some("all"),
                // The first that is known, as when it was counted.
                _ => row.values.iter().map(String::as_str).find(|value| !value.is_empty()),
            };
            let Some(subject) = subject else { continue };
            let (mut state, now) = governor.state();
            for measure in measures {
                let amount = used(row, measure.unit);
                state.book.restore(&Claim { limit: &limit.id, subject, measure: *measure, amount, tag: 0 }, now);
            }
        }
        after = rows.items.last().map(|row| row.values.clone());
        if !rows.more || after.is_none() {
            return Ok(());
        }
    }
}

fn used(row: &UsageRow, unit: Unit) -> u64 {
    match unit {
        Unit::Requests => row.requests,
        Unit::Tokens => row.tokens.input + row.tokens.output,
        Unit::InputTokens => row.tokens.input,
        Unit::OutputTokens => row.tokens.output,
        Unit::NanoUsd => row.micro_usd.saturating_mul(1000),
        Unit::InFlight => 0,
    }
}
