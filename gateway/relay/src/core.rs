//! State that all requests of one model share: its targets, and the choices among them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::Policy;
use super::balance::{self, Smooth, View};
use super::budget::Budgets;
use super::config::{ModelConfig, Sticky, TARGETS_MAX};
use super::mirror::Mirror;
use super::models::Context;
use super::prefix::{Prefix, Sent, Share};
use super::target::{Size, Target, Who};
use super::verdict::Reason;
use penstock_govern::prices::Price;
use penstock_telemetry::{Metric, Metrics};
use penstock_upstream::Asker;
use penstock_upstream::Origin;
use penstock_upstream::breaker::Admission;
use penstock_upstream::call::Call;
use penstock_upstream::lane::Why;

/// Output tokens assumed for a request without a limit, for an estimate of its price.
const COMPLETION_TOKENS: u64 = 500;
/// Bytes of a request's body assumed per prompt token, for estimates.
const BYTES_PER_TOKEN: usize = 4;

/// One `[[models]]` entry in service: its rules, targets, retry budget and index of sent prompts.
pub(crate) struct Core {
    pub(crate) rules: ModelConfig,
    /// Targets of `to`, then those of `fallback`.
    pub(crate) targets: Vec<Arc<Target>>,
    pub(crate) mirror: Option<Mirror>,
    /// Index of the prompts sent to each target, for `cache_aware`.
    pub(crate) sent: Arc<Sent>,
    smooth: Arc<Mutex<Smooth>>,
    budgets: Arc<Mutex<Budgets>>,
    pub(crate) metrics: Arc<Metrics>,
    /// True if every answer names its target; otherwise only where several were asked.
    pub(crate) explain: bool,
}

/// Outcome of a choice among the targets of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Index of the chosen target in [`Core::targets`].
    Target(usize),
    /// No target; the earliest instant at which one may be asked, if known.
    None(Option<Instant>),
}

/// Health that a choice accepts, in ascending order of leniency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reach {
    /// Only targets in good health, with a closed breaker.
    Good,
    /// Also targets that are only used when no better one is left.
    Last,
    /// Also targets behind an open breaker, for one of the few trials that find out whether they have recovered.
    Trial,
}

impl Reach {
    const ALL: [Reach; 3] = [Reach::Good, Reach::Last, Reach::Trial];

    fn has(self, admission: Admission) -> bool {
        match admission {
            Admission::Yes => true,
            Admission::Last => self >= Reach::Last,
            Admission::Trial(_) => self == Reach::Trial,
            Admission::No(_) => false,
        }
    }
}

/// Properties of a request that are equal for all its attempts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) who: Who,
    pub(crate) size: Size,
    pub(crate) sticky: Option<u64>,
    /// Prompt tokens that each target would have to compute, where known.
    pub(crate) own_tokens: Option<[u32; TARGETS_MAX]>,
}

impl Asked {
    /// Prompt tokens that this target would have to compute.
    pub(crate) fn own_tokens(&self, index: usize) -> u64 {
        self.own_tokens.map_or(self.size.prompt_tokens, |own| own[index].into())
    }
}

impl Core {
    pub(crate) fn new(
        rules: ModelConfig,
        targets: Vec<Arc<Target>>,
        mirror: Option<Arc<Target>>,
        context: &Context,
    ) -> Self {
        let percent = rules.mirror.as_ref().map_or(0, |mirror| mirror.percent);
        Self {
            sent: Arc::new(Sent::new(targets.len())),
            smooth: Arc::new(Mutex::new(Smooth::new(targets.len()))),
            budgets: Arc::new(Mutex::new(Budgets::new(rules.retry_budget_percent))),
            mirror: mirror.map(|target| Mirror::new(target, percent)),
            metrics: context.metrics.clone(),
            explain: context.explain,
            targets,
            rules,
        }
    }

    /// Takes over the round-robin state, the prefix index and the retry budget of the entry before a reload, if its rules are equal;
    /// under other targets, the prefix index of those that are still there, and the retry budget.
    pub(crate) fn after(self, before: &Self) -> Self {
        if before.rules != self.rules {
            let place = |target: &Arc<Target>| before.targets.iter().position(|known| known.is_same(target));
            let kept: Vec<Option<usize>> = self.targets.iter().map(place).collect();
            let is_equal = before.rules.retry_budget_percent == self.rules.retry_budget_percent;
            let budgets = if is_equal { before.budgets.clone() } else { self.budgets.clone() };
            return Self { sent: Arc::new(before.sent.after(&kept)), budgets, ..self };
        }
        Self { sent: before.sent.clone(), smooth: before.smooth.clone(), budgets: before.budgets.clone(), ..self }
    }

    /// Indices in `targets` of the targets in `to`.
    pub(crate) fn tier(&self) -> std::ops::Range<usize> {
        0..self.rules.to.len()
    }

    /// Indices in `targets` of the targets in `fallback`.
    pub(crate) fn fallback(&self) -> std::ops::Range<usize> {
        self.rules.to.len()..self.targets.len()
    }

    /// Price of a request at a target: the model's own or the price table's.
    pub(crate) fn price(&self, index: usize) -> Option<Price> {
        self.rules.price.or(self.targets[index].facts.map(|facts| facts.price))
    }

    /// Chooses a target of `to` that has not been tried.
    pub(crate) fn choose(&self, tried: u32, asked: Asked, reach: Reach, now: Instant) -> Choice {
        let mut smooth = self.smooth.lock().unwrap_or_else(PoisonError::into_inner);
        self.choose_with(&mut smooth, tried, asked, reach, now)
    }

    /// Targets that would be asked next if those of `tried` failed, in order, at most `most`; says nothing to the
    /// round-robin.
    pub(crate) fn next_in_line(&self, mut tried: u32, asked: Asked, most: usize, now: Instant) -> Vec<usize> {
        let mut smooth = self.smooth.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut out = Vec::new();
        while out.len() < most {
            let choice = match self.choose_with(&mut smooth, tried, asked, Reach::Good, now) {
                Choice::None(_) => self.next_fallback(tried, asked, Reach::Good, now),
                choice => choice,
            };
            let Choice::Target(index) = choice else { break };
            tried |= 1 << index;
            out.push(index);
        }
        out
    }

    fn choose_with(&self, smooth: &mut Smooth, tried: u32, asked: Asked, reach: Reach, now: Instant) -> Choice {
        let mut soonest: Option<Instant> = None;
        let mut views: Vec<View> = Vec::with_capacity(self.targets.len());
        for index in self.tier().filter(|index| tried & (1 << index) == 0) {
            let target = &self.targets[index];
            let admission = target.look(asked.who, now);
            if !reach.has(admission) {
                soonest = soonest.into_iter().chain(not_before(admission)).min();
                continue;
            }
            let view = target.view(index, self.rules.to[index].1, self.price(index), asked.size, now);
            views.push(View { own_tokens: asked.own_tokens(index), ..view });
        }
        balance::choose(self.rules.policy, asked.sticky, &views, smooth).map_or(Choice::None(soonest), Choice::Target)
    }

    /// The next target of `fallback`, in order, that has not been tried.
    pub(crate) fn next_fallback(&self, tried: u32, asked: Asked, reach: Reach, now: Instant) -> Choice {
        let mut soonest: Option<Instant> = None;
        for index in self.fallback().filter(|index| tried & (1 << index) == 0) {
            let admission = self.targets[index].look(asked.who, now);
            if reach.has(admission) {
                return Choice::Target(index);
            }
            soonest = soonest.into_iter().chain(not_before(admission)).min();
        }
        Choice::None(soonest)
    }

    /// The next target of `fallback` after a failure, in order; those behind an open breaker come last, as a trial.
    pub(crate) fn any_fallback(&self, tried: u32, asked: Asked, now: Instant) -> Choice {
        match self.next_fallback(tried, asked, Reach::Last, now) {
            Choice::None(_) => self.next_fallback(tried, asked, Reach::Trial, now),
            choice => choice,
        }
    }

    /// Returns true if the target at `index` admits an ordinary request now, without a trial.
    pub(crate) fn is_open(&self, index: usize, asked: Asked, now: Instant) -> bool {
        Reach::Last.has(self.targets[index].look(asked.who, now))
    }

    /// Reason that no target is asked, by the first target's breaker.
    pub(crate) fn why(&self, asked: Asked, now: Instant) -> Option<Why> {
        self.targets.first().map(|target| target.why(asked.who, now))
    }

    /// Instant at which a streamed attempt that began at `began` exceeds `first_token_timeout`; `None` for whole answers.
    pub(crate) fn silent_at(&self, began: Instant, asked: Asked) -> Option<Instant> {
        self.rules.first_token_timeout.filter(|_| asked.size.stream).map(|limit| began + limit)
    }

    /// First target to ask, of those not in `tried`: a healthy target, a healthy fallback, then one of last resort, then a trial behind
    /// an open breaker.
    pub(crate) fn first(&self, tried: u32, asked: Asked, now: Instant) -> Choice {
        let fallback = self.rules.fallback_on.contains(&Reason::Error);
        let mut soonest: Option<Instant> = None;
        for reach in Reach::ALL {
            for choice in [
                Some(self.choose(tried, asked, reach, now)),
                fallback.then(|| self.next_fallback(tried, asked, reach, now)),
            ] {
                match choice {
                    Some(Choice::Target(index)) => return Choice::Target(index),
                    Some(Choice::None(until)) => soonest = soonest.into_iter().chain(until).min(),
                    None => {}
                }
            }
        }
        Choice::None(soonest)
    }

    /// Adds what a request of this client key earns to the retry budgets.
    pub(crate) fn earn(&self, asker: Asker, now: Instant) {
        self.budgets.lock().unwrap_or_else(PoisonError::into_inner).earn(asker, now);
    }

    /// Takes one retry of this client key; false when a budget is used up.
    pub(crate) fn spend(&self, asker: Asker, now: Instant) -> bool {
        self.budgets.lock().unwrap_or_else(PoisonError::into_inner).spend(asker, now)
    }

    pub(crate) fn count(&self, metric: Metric, labels: &[(&'static str, &str)]) {
        let mut all = vec![("model", self.rules.name.as_str())];
        all.extend_from_slice(labels);
        self.metrics.count(metric, &all);
    }

    pub(crate) fn asked(&self, call: &Call, origin: &Origin, prefix: Option<&Prefix>) -> Asked {
        let sticky = match &self.rules.sticky {
            Sticky::None => None,
            Sticky::Key => Some(origin.tenant.as_bytes()).filter(|tenant| !tenant.is_empty()),
            Sticky::User => call.peek.user.as_deref().map(str::as_bytes),
            Sticky::Header(name) => call.headers.get(name).map(http::HeaderValue::as_bytes),
        };
        let size = Size {
            stream: call.stream,
            prompt_tokens: (call.body.len() / BYTES_PER_TOKEN) as u64,
            completion_tokens: call.peek.max_tokens.map_or(COMPLETION_TOKENS, u64::from),
        };
        let own = |prefix: &Prefix| {
            std::array::from_fn(|index| {
                let tokens = prefix.share(index).map_or(size.prompt_tokens, Share::own_tokens);
                u32::try_from(tokens).unwrap_or(u32::MAX)
            })
        };
        let who = Who { asker: origin.asker(call), surface: call.ask.surface };
        Asked { who, size, sticky: sticky.map(penstock_base::hash::stable), own_tokens: prefix.map(own) }
    }
}

impl Core {
    /// Estimates of the prompt's cached part at each target, where the policy counts on them.
    pub(crate) async fn prefix(&self, call: &Call) -> Option<Prefix> {
        match self.rules.policy {
            Policy::CacheAware => Some(Prefix::of(self, call, Instant::now()).await),
            _ => None,
        }
    }

    /// Observes the predicted cached tokens of an answered prompt, and those that its target has reported.
    pub(crate) fn tally(&self, target: &str, share: Share, cached_tokens: u64) {
        let labels = [("model", self.rules.name.as_str()), ("target", target), ("layer", share.layer.name())];
        let add = |metric, tokens: u64| self.metrics.observe(metric, &labels, tokens as f64);
        add(Metric::RoutedTokens, share.prompt_tokens);
        add(Metric::RoutedTokensPredicted, share.cached_tokens.min(share.prompt_tokens));
        add(Metric::RoutedTokensCached, cached_tokens);
    }
}

/// Instant from which a target may be asked, if not now.
fn not_before(admission: Admission) -> Option<Instant> {
    match admission {
        Admission::Trial(until) | Admission::No(until) => Some(until),
        Admission::Yes | Admission::Last => None,
    }
}
