//! [`Counters`] in PostgreSQL: each call is one statement, a function of the database (`schema`). Rows are locked in
//! the order of their names, so two gateways that ask for the same counters cannot deadlock.
//!
//! A statement whose caller has given up may still be under way or wait for a row, and take effect much later. Asks
//! therefore carry the number of their holder's last lease call (`Words`), and settlements carry their own numbers.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;

use super::Postgres;
use super::held::{int, number, odd};
use crate::counters::{AMOUNT_MAX, check_asks, check_kept, check_settlements};
use crate::json::to_json;
use crate::{Ask, Begun, Counters, Grant, Kept, Settlement, StoreError};

/// Longest wait for a server's word that it can count, as for any other report.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(2);

#[async_trait]
impl Counters for Postgres {
    async fn take(&self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError> {
        check_asks(holder, asks)?;
        if asks.is_empty() {
            return Ok(vec![]);
        }
        let ask = |ask: &Ask| {
            let (before, part) = ask
                .window
                .before(now)
                .filter(|_| ask.sliding)
                .map_or((-1, 0), |(window, part, _)| (int(window.start), part));
            json!({
                "name": ask.counter, "start": int(ask.window.start), "seconds": int(ask.window.seconds),
                "before": before, "part": part, "most": ask.max.min(AMOUNT_MAX), "want": ask.want,
                "fewest": ask.least, "until": int(ask.until),
            })
        };
        let asks = to_json(&asks.iter().map(ask).collect::<Vec<_>>())?;
        let sql = "SELECT granted, leased, used FROM penstock.take_3($1, $2, $3::text::jsonb, $4, $5) ORDER BY nth";
        let word = int(self.words.of(holder));
        let rows = self.held().await?.change(sql, &[&holder, &word, &asks, &whole, &int(now)]).await?;
        let grant = |row| Ok(Grant { granted: number(row, 0)?, leased: number(row, 1)?, used: number(row, 2)? });
        rows.iter().map(grant).collect()
    }

    async fn begin(&self) -> Result<Begun, StoreError> {
        // The counts are not lost, but a server that is away, or a former primary that only reads, cannot count.
        let sql = "SELECT current_setting('transaction_read_only') = 'off'";
        // A connection that is silent after a failover is given up soon, and closed: another one may reach the new primary.
        let asked = async { self.held().await?.is(sql, &[]).await };
        match StoreError::in_time(BEGIN_TIMEOUT, asked).await? {
            true => Ok(Begun::Whole),
            false => Err(StoreError::Broken("PostgreSQL: the server only reads: another one is the primary".into())),
        }
    }

    async fn lease(&self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        check_kept(holder, kept)?;
        if kept.is_empty() {
            return Ok(());
        }
        let one = |one: &Kept| {
            json!({
                "name": one.counter, "start": int(one.window.start), "seconds": int(one.window.seconds),
                "amount": one.amount.min(AMOUNT_MAX), "until": int(one.until),
            })
        };
        let kept = to_json(&kept.iter().map(one).collect::<Vec<_>>())?;
        let sql = "SELECT penstock.lease_1($1, $2::text::jsonb, $3)";
        let rows = self.held().await?.change(sql, &[&holder, &kept, &int(now)]).await?;
        self.words.said(holder, number(rows.first().ok_or_else(odd)?, 0)?);
        Ok(())
    }

    async fn settle(&self, holder: &str, nth: u64, settlements: &[Settlement], now: u64) -> Result<(), StoreError> {
        check_settlements(holder, nth, settlements)?;
        if settlements.is_empty() {
            return Ok(());
        }
        let one = |one: &Settlement| {
            json!({
                "name": one.counter, "start": int(one.window.start), "seconds": int(one.window.seconds),
                "leased": one.leased, "spent": one.spent,
            })
        };
        let settlements = to_json(&settlements.iter().map(one).collect::<Vec<_>>())?;
        let sql = "SELECT penstock.settle_3($1, $2, $3::text::jsonb, $4)::text";
        self.held().await?.change(sql, &[&holder, &int(nth), &settlements, &int(now)]).await.map(drop)
    }
}
