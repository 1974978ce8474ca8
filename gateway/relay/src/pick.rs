//! Choice of an endpoint for a request that another proxy forwards: the first choice of a relay, without its attempts.
//!
//! [`Models::pick`] weighs the targets of a model as a request of this gateway's own would (`core.rs`): policy, prefix caches, load, breakers.
//! The [`Pick`] counts as a request in flight until it is dropped, and takes in what the proxy says of the answer, so
//! that both kinds of requests share one view of load and health.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_base::error::Failure;
use penstock_proto::ErrorKind;
use penstock_telemetry::access_log::millis;
use penstock_telemetry::{Attempt, Metric};
use penstock_types::{FaultClass, ProviderFault, ServiceTier, Surface};
use penstock_upstream::call::Call;
use penstock_upstream::lane::Why;
use penstock_upstream::{Asker, Facts, Origin};
use tokio::sync::OwnedSemaphorePermit;

use super::config::TargetConfig;
use super::core::{Asked, Choice, Core};
use super::cost::cost;
use super::models::Models;
use super::prefix::{Prefix, Share};
use super::race::settle;
use super::target::{Permit, Size, Target, Who};
use super::verdict::{Reason, judge};

/// Delay after which a request may come again that found every endpoint full.
const FULL_AGAIN: Duration = Duration::from_secs(1);

/// Bounds that the proxy sets to a choice.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Client of the request, as far as the proxy names it.
    pub origin: &'a Origin,
    /// Endpoints that may be chosen; `None`: all of the model.
    pub among: Option<&'a [SocketAddr]>,
    /// Most endpoints to name: the chosen one, and those to ask after it.
    pub endpoints_max: usize,
}

/// Endpoint chosen for one request that another proxy forwards. It counts as in flight until it is dropped.
pub struct Pick {
    core: Arc<Core>,
    asked: Asked,
    prefix: Option<Prefix>,
    /// Id of the client's key (its tenant), for the log.
    key: Arc<str>,
    index: usize,
    permit: Permit,
    _place: Option<OwnedSemaphorePermit>,
    /// Targets to ask after the chosen one, in order.
    others: Vec<usize>,
    reason: &'static str,
    /// True if the answer says something of the target's health: the request is of a known operation.
    is_judged: bool,
    is_noted: bool,
    /// Time at which the present target was asked.
    entered: Instant,
    /// Targets whose outcome is known, in the order of their outcome.
    attempts: Vec<Attempt>,
}

impl Models {
    /// Number of `[[models]]` entries with a target that another proxy can reach.
    pub fn pickable(&self) -> usize {
        self.relays().iter().filter(|core| core.targets.iter().any(|target| target.endpoint.is_some())).count()
    }

    /// Chooses an endpoint of the `[[models]]` entry `model` for a call.
    ///
    /// # Errors
    /// The model has no entry ([`ErrorKind::ModelNotFound`]), no endpoint can be asked now ([`ErrorKind::Unavailable`]),
    /// or each has as many requests in flight as it may ([`ErrorKind::RateLimited`]).
    pub async fn pick(&self, model: &str, call: &Call, wanted: &Wanted<'_>) -> Result<Pick, Failure> {
        let core = self.entry_of(model)?;
        let prefix = core.prefix(call).await;
        let asked = core.asked(call, wanted.origin, prefix.as_ref());
        Pick::new(core, asked, prefix, wanted, Instant::now())
    }

    /// Chooses an endpoint for a request without a prompt, such as `GET /v1/models`: of the only entry that has some.
    /// Its answer is not judged.
    ///
    /// # Errors
    /// As [`Models::pick`]; [`ErrorKind::InvalidRequest`] where several entries have endpoints.
    pub fn pick_any(&self, wanted: &Wanted<'_>) -> Result<Pick, Failure> {
        let reachable = |core: &&Arc<Core>| core.targets.iter().any(|target| target.endpoint.is_some());
        let mut cores = self.relays().iter().filter(reachable);
        let core = match (cores.next(), cores.next()) {
            (Some(core), None) => core,
            (None, _) => return Err(Failure::new(ErrorKind::Unavailable, "No endpoint of any model is known.")),
            (Some(_), Some(_)) => {
                let message = "Several models are served: the request must name one in a JSON body.";
                return Err(Failure::new(ErrorKind::InvalidRequest, message).param("model"));
            }
        };
        Pick::unread(core, wanted)
    }

    /// Chooses an endpoint of the entry `model` for a request whose operation is not known: by load and health alone.
    /// Its answer is not judged.
    ///
    /// # Errors
    /// As [`Models::pick`].
    pub fn pick_unread(&self, model: &str, wanted: &Wanted<'_>) -> Result<Pick, Failure> {
        Pick::unread(self.entry_of(model)?, wanted)
    }

    fn entry_of(&self, model: &str) -> Result<&Arc<Core>, Failure> {
        self.relays().iter().find(|core| core.rules.name == model).ok_or_else(|| {
            let message = format!("The model {model:?} has no [[models]] entry, so no endpoint can be picked for it.");
            Failure::new(ErrorKind::ModelNotFound, message).param("model")
        })
    }
}

impl Pick {
    fn unread(core: &Arc<Core>, wanted: &Wanted<'_>) -> Result<Self, Failure> {
        let who = Who { asker: Asker::default(), surface: Surface::Chat };
        let size = Size { stream: false, prompt_tokens: 1, completion_tokens: 1 };
        let asked = Asked { who, size, sticky: None, own_tokens: None };
        let mut pick = Self::new(core, asked, None, wanted, Instant::now())?;
        pick.is_judged = false;
        Ok(pick)
    }

    fn new(
        core: &Arc<Core>,
        asked: Asked,
        prefix: Option<Prefix>,
        wanted: &Wanted<'_>,
        now: Instant,
    ) -> Result<Self, Failure> {
        let outside = outside(core, wanted.among);
        let suitable = core.targets.len() - outside.count_ones() as usize;
        if suitable == 0 {
            return Err(nobody(core, wanted));
        }
        let (mut tried, mut is_full) = (outside, false);
        let (index, place) = loop {
            match core.first(tried, asked, now) {
                Choice::Target(index) => {
                    let endpoint = core.targets[index].endpoint.as_ref();
                    match endpoint.and_then(|endpoint| endpoint.places.clone().try_acquire_owned().ok()) {
                        Some(place) => break (index, place),
                        None => (tried, is_full) = (tried | 1 << index, true),
                    }
                }
                Choice::None(_) if is_full => return Err(full()),
                Choice::None(until) => return Err(closed(core, asked, until, now)),
            }
        };
        let reason = reason(core, index, asked, prefix.as_ref(), suitable, now);
        let same = |other: &usize| model_at(core, *other) == model_at(core, index);
        let more = wanted.endpoints_max.saturating_sub(1);
        let line = core.next_in_line(tried | 1 << index, asked, more, now);
        let key: Arc<str> = wanted.origin.tenant.as_str().into();
        let permit = enter(core, index, asked, &key, prefix.as_ref(), now);
        Ok(Self {
            core: core.clone(),
            asked,
            prefix,
            key,
            index,
            permit,
            _place: Some(place),
            others: line.into_iter().filter(same).collect(),
            reason,
            is_judged: true,
            is_noted: false,
            entered: now,
            attempts: Vec::new(),
        })
    }

    /// Endpoints in the order in which the proxy shall ask them: at least one.
    pub fn endpoints(&self) -> Vec<SocketAddr> {
        let all = std::iter::once(&self.index).chain(&self.others);
        all.filter_map(|index| Some(self.core.targets[*index].endpoint.as_ref()?.address)).collect()
    }

    /// Name of the model at the endpoints.
    pub fn model(&self) -> &str {
        model_at(&self.core, self.index)
    }

    /// Name of the `[[models]]` entry.
    pub fn entry(&self) -> &str {
        &self.core.rules.name
    }

    /// Id of the target that is asked; after [`Pick::served`], of the one that has answered.
    pub fn target(&self) -> Arc<str> {
        self.permit.target.id.clone()
    }

    /// Reason of the choice, from a bounded set: `only`, `fallback`, `trial`, `sticky`, `cached` or `policy`.
    pub fn reason(&self) -> &'static str {
        self.reason
    }

    /// Predicted prompt tokens and cached ones among them, where the policy counts on caches.
    pub fn predicted(&self) -> Option<(u64, u64)> {
        let share = self.share()?;
        Some((share.prompt_tokens, share.cached_tokens.min(share.prompt_tokens)))
    }

    fn share(&self) -> Option<Share> {
        self.prefix.as_ref()?.share(self.index)
    }

    /// Takes in which endpoint has answered. Another one than the first: the proxy could not reach that one.
    pub fn served(&mut self, address: SocketAddr, now: Instant) {
        let is_at = |index: &usize| {
            self.core.targets[*index].endpoint.as_ref().is_some_and(|endpoint| endpoint.address == address)
        };
        if is_at(&self.index) {
            return;
        }
        let Some(index) = self.others.iter().copied().find(is_at) else { return };
        self.permit.failed(Why::Errors, now, None);
        self.note(Reason::Error.name(), 0, now);
        self.permit = enter(&self.core, index, self.asked, &self.key, self.prefix.as_ref(), now);
        self._place =
            self.core.targets[index].endpoint.as_ref().and_then(|at| at.places.clone().try_acquire_owned().ok());
        (self.index, self.is_noted, self.entered) = (index, false, now);
    }

    /// Takes in the first part of a good answer.
    pub fn answered(&mut self, now: Instant) {
        if self.is_judged && !self.is_noted {
            self.permit.answered(now);
            self.note("answered", 0, now);
        }
    }

    /// Takes in an answer with another status than 2xx.
    pub fn refused(&mut self, status: u16, retry_after: Option<Duration>, now: Instant) {
        if !self.is_judged || self.is_noted {
            return;
        }
        let class = match status {
            // The endpoint answers, as far as routing goes.
            300..=399 => FaultClass::Invalid,
            other => ProviderFault::class_of(other),
        };
        let mut failure = Failure::provider(ProviderFault::new(class, ""));
        failure.retry_after = retry_after;
        let verdict = judge(&failure);
        settle(&mut self.permit, &failure, verdict, now);
        self.note(verdict.reason.map_or("refused", Reason::name), status, now);
    }

    /// Takes in the end of a complete answer, with the cached tokens that it reports; `None`: it reports no usage.
    pub fn ended(&mut self, cached_tokens: Option<u64>) {
        if let (Some(share), Some(cached)) = (self.share(), cached_tokens) {
            self.core.tally(&self.permit.target.id, share, cached);
        }
    }

    /// Cost of an answer in dollars at the target that is asked; `None`: its price is not known, or no tokens were
    /// counted.
    pub fn cost(&self, facts: Facts) -> Option<f64> {
        cost(facts, self.core.price(self.index)?, ServiceTier::Standard)
    }

    /// Ends the pick, and takes out the targets that were asked, in the order of their outcome. A target without an
    /// outcome so far was abandoned. The list is empty where the answer is not judged.
    pub fn attempts(&mut self, now: Instant) -> Vec<Attempt> {
        if self.is_judged && !self.is_noted {
            self.note("abandoned", 0, now);
        }
        std::mem::take(&mut self.attempts)
    }

    fn note(&mut self, outcome: &'static str, status: u16, now: Instant) {
        self.is_noted = true;
        let target = self.permit.target.id.clone();
        self.core.count(Metric::Attempts, &[("target", &target), ("outcome", outcome)]);
        let ms = millis(now.saturating_duration_since(self.entered).as_secs_f64());
        self.attempts.push(Attempt { target, outcome, status, ms, sent: true });
    }
}

impl Drop for Pick {
    fn drop(&mut self) {
        self.attempts(Instant::now());
    }
}

fn enter(
    core: &Arc<Core>,
    index: usize,
    asked: Asked,
    key: &Arc<str>,
    prefix: Option<&Prefix>,
    now: Instant,
) -> Permit {
    if let Some(prefix) = prefix {
        prefix.goes_to(core, index, now);
    }
    core.targets[index].enter(asked.who, key, now, (asked.size.stream, asked.own_tokens(index)))
}

/// Bitmask of the targets that the proxy cannot or may not reach.
fn outside(core: &Core, among: Option<&[SocketAddr]>) -> u32 {
    let may = |target: &Target| {
        let Some(endpoint) = &target.endpoint else { return false };
        among.is_none_or(|among| among.contains(&endpoint.address))
    };
    let bits = core.targets.iter().enumerate().filter(|(_, target)| !may(target)).map(|(index, _)| 1 << index);
    bits.fold(0, |all, bit: u32| all | bit)
}

fn reason(
    core: &Core,
    index: usize,
    asked: Asked,
    prefix: Option<&Prefix>,
    suitable: usize,
    now: Instant,
) -> &'static str {
    let is_cached =
        || prefix.and_then(|prefix| prefix.share(index)).is_some_and(|at| at.cached_tokens * 2 > at.prompt_tokens);
    if !core.is_open(index, asked, now) {
        "trial"
    } else if core.fallback().contains(&index) {
        "fallback"
    } else if suitable == 1 {
        "only"
    } else if asked.sticky.is_some() {
        "sticky"
    } else if is_cached() {
        "cached"
    } else {
        "policy"
    }
}

fn model_at(core: &Core, index: usize) -> &str {
    let to = core.rules.to.iter().map(|(target, _)| target);
    match to.chain(&core.rules.fallback).nth(index) {
        Some(TargetConfig::Provider(_, model)) => model,
        Some(TargetConfig::Pool(id)) => id,
        None => &core.rules.name,
    }
}

fn nobody(core: &Core, wanted: &Wanted<'_>) -> Failure {
    let name = &core.rules.name;
    let message = match wanted.among {
        Some(_) => format!("None of the endpoints that the proxy offers serves the model {name:?}."),
        None => format!("No endpoint of the model {name:?} is known."),
    };
    Failure::new(ErrorKind::Unavailable, message)
}

fn full() -> Failure {
    let message = "Every endpoint of this model has as many requests in flight as it may. Try again shortly.";
    Failure::new(ErrorKind::RateLimited, message).retry_after(FULL_AGAIN)
}

fn closed(core: &Core, asked: Asked, until: Option<Instant>, now: Instant) -> Failure {
    let why = core.why(asked, now).unwrap_or(Why::Errors);
    let message =
        format!("No endpoint of this model can be asked now: the first of them {}. Try again shortly.", why.says());
    let failure = Failure::new(ErrorKind::Unavailable, message);
    match until {
        Some(until) => failure.retry_after(until.saturating_duration_since(now)),
        None => failure,
    }
}
