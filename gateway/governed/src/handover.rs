//! Reports of holds and settlements to a process that goes on with the counters.

use std::sync::mpsc;

use penstock_govern::{Claim, Measure, Unit};
use serde::{Deserialize, Serialize};

/// Amount that a request holds of one counter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claimed {
    /// Id of the limit.
    pub limit: String,
    /// Subject of the counter: id of a key or a team, an address, …
    pub subject: String,
    /// Measure of the limit that the counter is of.
    pub measure: Measure,
    /// Amount held, in the measure's unit.
    pub amount: u64,
    /// Place of the limit among those of the request, with the way in which its claim is settled.
    pub tag: u16,
}

impl From<&Claim<'_>> for Claimed {
    fn from(claim: &Claim<'_>) -> Self {
        let (limit, subject) = (claim.limit.to_string(), claim.subject.to_owned());
        Self { limit, subject, measure: claim.measure, amount: claim.amount, tag: claim.tag }
    }
}

/// Event of a reservation in this process, for the process that goes on with the book.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Given {
    /// A request was let in with these holds, under this number.
    Held {
        /// Number of the hold.
        id: u64,
        /// Amounts held, counter by counter.
        claims: Vec<Claimed>,
    },
    /// The reservation with this number has ended; the amounts are what was used, by tag and unit.
    Settled {
        /// Number of the hold.
        id: u64,
        /// Amounts used: tag, unit and amount of each claim.
        amounts: Vec<(u16, Unit, u64)>,
    },
}

/// Channel on which the governor reports reservations and settlements.
pub type Give = mpsc::SyncSender<Given>;
