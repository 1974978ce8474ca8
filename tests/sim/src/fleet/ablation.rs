//! What each part of the router is worth: the same run with one part off.

use super::audit::WEIGHTS;
use super::run::Setup;
use std::fmt;
use std::str::FromStr;

/// Parts of the router beside the terms of its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Blocks that a worker was asked to compute count as there.
    pub promises: bool,
    /// Speeds are fitted to what steps report; else only the worker's own mean speed of prefill is known.
    pub fit: bool,
    /// Requests wait in the gateway until a worker grants a credit; else every worker always grants.
    pub credits: bool,
    /// A request does not join a worker where it would break the promise of the time between tokens.
    pub tpot: bool,
}

impl Default for Parts {
    fn default() -> Self {
        Self { promises: true, fit: true, credits: true, tpot: true }
    }
}

/// One of [`Parts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Promised blocks.
    Promises,
    /// Fitted speeds.
    Fit,
    /// Late binding.
    Credits,
    /// Admission by the time between tokens.
    Tpot,
}

impl Part {
    /// All of them.
    pub const ALL: [Part; 4] = [Part::Promises, Part::Fit, Part::Credits, Part::Tpot];

    /// Leaves it out.
    pub fn take_from(self, parts: &mut Parts) {
        match self {
            Self::Promises => parts.promises = false,
            Self::Fit => parts.fit = false,
            Self::Credits => parts.credits = false,
            Self::Tpot => parts.tpot = false,
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
        })
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|part| part.to_string() == text);
        found.ok_or_else(|| format!("no part {text:?}; there are promises, fit, credits and tpot"))
    }
}

/// The whole router, then without each of its parts.
pub fn ablations(setup: &Setup) -> Vec<(String, Setup)> {
    let mut all = vec![("everything".to_owned(), setup.clone())];
    for (name, weight) in WEIGHTS {
        let mut changed = setup.clone();
        *weight(&mut changed.weights) = 0.0;
        if changed.weights != setup.weights {
            all.push((format!("without {name}"), changed));
        }
    }
    for part in Part::ALL {
        let mut changed = setup.clone();
        part.take_from(&mut changed.parts);
        all.push((format!("without {part}"), changed));
    }
    all
}
