//! Value of each part of the router: the same run with one part off.

use super::audit::WEIGHTS;
use super::run::Setup;
use super::trace::Trace;
use std::fmt;
use std::str::FromStr;

/// Switches of the router's parts, beside the terms of its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Promised blocks, which a worker was asked to compute, count as cached there.
    pub promises: bool,
    /// Speeds are fitted to the reported steps; otherwise only the worker's own mean prefill speed is known.
    pub fit: bool,
    /// Requests wait in the gateway until a worker grants a credit; otherwise every worker always grants.
    pub credits: bool,
    /// A request is not sent to a worker where it would break the objective for time between tokens.
    pub tpot: bool,
    /// Tenants share the engines fairly; otherwise all requests belong to one tenant.
    pub fairness: bool,
    /// Blocks of waiting requests are prefetched from disk or the shared store.
    pub prefetch: bool,
}

impl Default for Parts {
    fn default() -> Self {
        Self { promises: true, fit: true, credits: true, tpot: true, fairness: true, prefetch: true }
    }
}

/// One of the router's [`Parts`], to be switched off in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Promised blocks count as cached; see [`Parts::promises`].
    Promises,
    /// Speeds fitted to the reported steps; see [`Parts::fit`].
    Fit,
    /// Late binding by the workers' credits; see [`Parts::credits`].
    Credits,
    /// Admission by the time between tokens.
    Tpot,
    /// Fairness between tenants; see [`Parts::fairness`].
    Fairness,
    /// Prefetch of the blocks of waiting requests; see [`Parts::prefetch`].
    Prefetch,
}

impl Part {
    /// All parts, for an audit that switches them off one after the other.
    pub const ALL: [Part; 6] = [Part::Promises, Part::Fit, Part::Credits, Part::Tpot, Part::Fairness, Part::Prefetch];

    /// Switches this part off in `parts`.
    pub fn take_from(self, parts: &mut Parts) {
        match self {
            Self::Promises => parts.promises = false,
            Self::Fit => parts.fit = false,
            Self::Credits => parts.credits = false,
            Self::Tpot => parts.tpot = false,
            Self::Fairness => parts.fairness = false,
            Self::Prefetch => parts.prefetch = false,
        }
    }

    /// Returns true if the part has any effect in a run.
    fn is_there(self, trace: &Trace, setup: &Setup) -> bool {
        match self {
            Self::Promises | Self::Fit | Self::Credits | Self::Tpot => true,
            Self::Fairness => trace.requests.iter().any(|request| request.tenant != trace.requests[0].tenant),
            Self::Prefetch => setup.sizes.has_slow_tiers(),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Promises => "promises",
            Self::Fit => "fit",
            Self::Credits => "credits",
            Self::Tpot => "tpot",
            Self::Fairness => "fairness",
            Self::Prefetch => "prefetch",
        })
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|part| part.to_string() == text);
        found
            .ok_or_else(|| format!("no part {text:?}; there are {}", Self::ALL.map(|part| part.to_string()).join(", ")))
    }
}

/// Setups: the whole router, then one without each part that has an effect on `trace`.
pub fn ablations(trace: &Trace, setup: &Setup) -> Vec<(String, Setup)> {
    let mut all = vec![("everything".to_owned(), setup.clone())];
    for (name, weight) in WEIGHTS {
        let mut changed = setup.clone();
        *weight(&mut changed.weights) = 0.0;
        if changed.weights != setup.weights {
            all.push((format!("without {name}"), changed));
        }
    }
    for part in Part::ALL.into_iter().filter(|part| part.is_there(trace, setup)) {
        let mut changed = setup.clone();
        part.take_from(&mut changed.parts);
        all.push((format!("without {part}"), changed));
    }
    all
}
