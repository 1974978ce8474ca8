//! Amounts of every unit that a request holds while it runs and has used at its end: on pools, on providers, and through relays of either.

mod fallback;
mod operations;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use http::HeaderMap;
use penstock_auth::Principal;
use penstock_base::error::Failure;
use penstock_proto::ErrorKind;
use penstock_types::{ChatEvent, FaultClass, ProviderFault, ServiceTier, Surface};
use penstock_types::{DetokenizeRequest, TokenizeRequest};

use super::*;
use penstock_govern::prices::{Price, Prices, Tiers};
use penstock_govern::{By, For, NAMES, NANO, OnStoreFailure, Reserve, Span, Surge, Unmetered};
use penstock_http::{Body, BodyBudget};
use penstock_kv_feed::Feed;
use penstock_relay::models::{Entry, Models, Sources};
use penstock_relay::{Billing, ModelConfig, Policy, RelayConfig, Sticky, TargetConfig};
use penstock_store::MemoryCounters;
use penstock_types::ask::Ask;
use penstock_upstream::Forward;
use penstock_upstream::Forwarded;
use penstock_upstream::call::Call;
use penstock_upstream::{Card, Events, Facts, Measured, Origin, Prepared, Sent, Upstream, not_forwarded};

/// Tokens of every prompt, and of the context.
const PROMPT: u64 = 15;
const CONTEXT: u64 = 1000;
/// Output tokens of every answer of the double.
const ANSWER: u64 = 5;
/// Price of the double's target, in dollars per million tokens.
const PRICE: Price = Price { input: 1.0, cached_input: 1.0, cache_write: 1.0, output: 2.0, tiers: NO_TIERS };
const NO_TIERS: Tiers = Tiers { flex: 0.0, priority: 0.0 };

/// Behaviour of the upstream for a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    /// The request is answered with a complete answer.
    Answer,
    /// The answer begins without any text, and nothing follows.
    Begin,
    /// The answer begins without any text, and breaks.
    Break,
    /// The request is never sent.
    Wait,
    /// The request is sent and never answered.
    Silence,
    /// Output has arrived, and nobody polls it.
    Arrived,
    /// The request is sent and fails with a timeout.
    Timeout,
    /// The request is answered, and the answer finds no memory here.
    Unheld,
    /// The request is refused by the upstream.
    Refuse,
}

/// Upstream double with this behaviour.
struct Double {
    name: &'static str,
    /// True if the double is a pool: prompts are counted before the answer, and requests wait in our queue.
    is_pool: bool,
    act: Act,
    /// Service tier that its answers name.
    tier: Option<ServiceTier>,
}

#[async_trait]
impl Upstream for Double {
    fn card(&self) -> Card {
        Card { id: self.name.into(), created: 0, context_tokens: CONTEXT as u32, task: None, parent: None }
    }

    fn unready(&self) -> Option<String> {
        None
    }

    async fn open(&self, _: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        let answer = Answer {
            act: self.act,
            is_pool: self.is_pool,
            tier: self.tier,
            sent: origin.sent.clone(),
            is_begun: false,
        };
        if self.act != Act::Wait {
            origin.sent.set();
        }
        match self.act {
            Act::Wait | Act::Silence if !self.is_pool => std::future::pending().await,
            Act::Timeout => Err(Failure::provider(ProviderFault::new(FaultClass::Timeout, "too slow"))),
            Act::Unheld => Err(Failure::new(ErrorKind::Overloaded, "no memory").unheld()),
            Act::Refuse => Err(Failure::new(ErrorKind::InvalidRequest, "no")),
            _ => Ok(Box::new(answer)),
        }
    }

    async fn count(&self, _: Arc<Call>) -> Result<Option<u64>, Failure> {
        Ok(None)
    }

    async fn measure(self: Arc<Self>, call: &Call) -> Result<Prepared, Failure> {
        let room = CONTEXT - PROMPT;
        let each = call.output_bound().map_or(room, |bound| room.min(bound.into()));
        let completion_tokens_max = each * u64::from(call.peek.choices.max(1));
        let measured = self.is_pool.then_some(Measured { prompt_tokens: PROMPT, completion_tokens_max });
        Ok(Prepared { measured, opener: None })
    }

    async fn forward(&self, _: Arc<Forward>) -> Result<Forwarded, Failure> {
        Err(not_forwarded())
    }

    async fn tokenize(&self, _: TokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(not_forwarded())
    }

    async fn detokenize(&self, _: DetokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(not_forwarded())
    }

    fn feed(&self) -> Option<Arc<Feed>> {
        None
    }

    fn gauges(&self, _: &mut dyn FnMut(Gauge, f64)) {}
}

struct Answer {
    act: Act,
    is_pool: bool,
    tier: Option<ServiceTier>,
    sent: Sent,
    is_begun: bool,
}

impl Events for Answer {
    fn poll_events(&mut self, _: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        match self.act {
            Act::Answer => {}
            Act::Begin | Act::Break if !self.is_begun => {
                self.is_begun = true;
                let role = r#"data: {"choices":[{"delta":{"role":"assistant"}}]}"#;
                out.push(ChatEvent::Raw(role.into()));
                return Poll::Ready(Ok(true));
            }
            Act::Break => {
                let fault = ProviderFault::new(FaultClass::Truncated, "cut");
                return Poll::Ready(Err(Failure::provider(fault)));
            }
            _ => return Poll::Pending,
        }
        out.push(ChatEvent::Text { choice: 0, text: "word".into(), logprobs: vec![], tokens: vec![] });
        Poll::Ready(Ok(false))
    }

    fn facts(&self) -> Facts {
        let has_begun = self.act == Act::Answer;
        Facts {
            prompt_tokens: if has_begun || (self.is_pool && self.sent.get()) { PROMPT } else { 0 },
            completion_tokens: if has_begun { ANSWER } else { 0 },
            tier: self.tier,
            ..Facts::default()
        }
    }

    fn facts_at_end(&self) -> Facts {
        let facts = self.facts();
        if self.act == Act::Arrived { Facts { completion_tokens: ANSWER, ..facts } } else { facts }
    }
}

/// Kind of the model that a request goes to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Pool,
    RelayedPool,
    Provider,
    RelayedProvider,
}

struct Bed {
    governor: Arc<Governor>,
    rules: Rules,
    entry: Entry,
}

/// All units that a limit can count.
const UNITS: [&str; 6] =
    ["requests_per_day", "tokens_per_day", "input_tokens_per_day", "output_tokens_per_day", "usd_per_day", "in_flight"];

/// A limit of everybody's requests together in every unit.
fn limit() -> Limit {
    let units = NAMES.iter().filter(|(_, _, name)| UNITS.contains(name));
    let max = |unit| if unit == Unit::NanoUsd { 2000 * NANO } else { 2000 };
    Limit {
        id: "it".into(),
        measures: units.map(|(unit, span, _)| Measure { unit: *unit, span: *span, max: max(*unit) }).collect(),
        by: By::All,
        applies: For::Everyone,
        models: Vec::new(),
        reserve: Reserve::Likely,
        unmetered: Unmetered::Refuse,
        on_store_failure: OnStoreFailure::Open,
        max_tokens_default: None,
        max_tokens_max: None,
        surge: None,
    }
}

/// [`limit`], which reserves the upper bound.
fn most() -> Limit {
    Limit { reserve: Reserve::Most, ..limit() }
}

/// A model of one pool, with a price.
fn model() -> ModelConfig {
    ModelConfig {
        name: "m".into(),
        aliases: vec!["alias".into()],
        to: vec![(TargetConfig::Pool("a".into()), 1)],
        fallback: Vec::new(),
        fallback_on: Vec::new(),
        policy: Policy::Weighted,
        sticky: Sticky::None,
        retries: 0,
        retry_budget_percent: 20,
        hedge_after: None,
        first_token_timeout: None,
        idle_timeout: None,
        timeout: None,
        mirror: None,
        context_tokens: 0,
        price: Some(PRICE),
    }
}

impl Bed {
    fn new(way: Way, act: Act, limit: &Limit) -> Self {
        let is_pool = matches!(way, Way::Pool | Way::RelayedPool);
        let double: Arc<dyn Upstream> = Arc::new(Double { name: "a", is_pool, act, tier: None });
        let metrics = Arc::<Metrics>::default();
        let (models, prices) = ([model()], Prices::default());
        let config = RelayConfig { models: &models, prices: &prices, providers: &[], explain: false };
        let sources = Sources { pools: std::slice::from_ref(&double), providers: &[], before: None };
        let entry = Models::build(&config, &sources, &metrics, None).find("alias").expect("served").clone();
        let several = |own| Billing::several(Vec::new(), vec![("a".into(), Some(PRICE), own)], 1, false);
        let entry = match way {
            Way::RelayedPool => entry,
            Way::RelayedProvider => Entry { billing: Arc::new(several(false)), ..entry },
            Way::Pool => Entry { upstream: double, billing: Arc::new(Billing::single(None, Some(PRICE))), ..entry },
            Way::Provider => {
                Entry { upstream: double, billing: Arc::new(Billing::single(Some("acme"), Some(PRICE))), ..entry }
            }
        };
        Self { governor: Arc::new(Governor::new(metrics)), rules: Rules::new(&[Arc::new(limit.clone())]), entry }
    }

    async fn call(body: &str) -> Result<Call, Failure> {
        let lease = BodyBudget::new(1 << 20, 1 << 20).lease();
        let body = Body { bytes: body.to_owned().into(), lease };
        Call::new(Ask::new(Surface::Chat), body, "req_1".into(), HeaderMap::new(), penstock_dialects::decode).await
    }

    /// Sends a request and polls it until nothing more happens; returns the events, if any.
    async fn ask(&self, body: &str) -> Result<Option<Box<dyn Events>>, Failure> {
        let (mut call, entry) = (Self::call(body).await?, &self.entry);
        let (held, opener) = admit(&self.governor, &self.rules, &Principal::default(), &mut call, entry, false).await?;
        let mut opening = Box::pin(open(entry, Arc::new(call), Origin::default(), held, opener));
        let Poll::Ready(opened) = poll_fn(|context| Poll::Ready(opening.as_mut().poll(context))).await else {
            return Ok(None);
        };
        let mut events = opened?;
        let mut said = Vec::new();
        loop {
            match poll_fn(|context| Poll::Ready(events.poll_events(context, &mut said))).await {
                Poll::Ready(Err(failure)) => return Err(failure),
                Poll::Ready(Ok(true)) => {}
                Poll::Ready(Ok(false)) | Poll::Pending => return Ok(Some(events)),
            }
        }
    }

    /// Reserved and used amounts of every unit; money in nano-dollars.
    fn counted(&self) -> [(u64, u64); 6] {
        let counters = self.governor.counters(&self.rules.limits()[0]);
        UNITS.map(|unit| {
            let one = counters.iter().find(|counter| counter.measure == unit);
            let scale = if unit == "usd_per_day" { 1e9 } else { 1.0 };
            one.map_or((0, 0), |one| ((one.reserved * scale).round() as u64, (one.used * scale).round() as u64))
        })
    }

    fn reserved(&self) -> [u64; 6] {
        self.counted().map(|(reserved, _)| reserved)
    }

    fn used(&self) -> [u64; 6] {
        let counted = self.counted();
        assert!(counted.iter().all(|(reserved, _)| *reserved == 0), "{counted:?}");
        counted.map(|(_, used)| used)
    }
}

fn body(more: &str) -> String {
    format!(r#"{{"model":"alias","messages":[{{"role":"user","content":"What is it like?"}}]{more}}}"#)
}

/// Requests, tokens, prompt tokens, output tokens, nano-dollars, in flight.
fn units(input: u64, output: u64, in_flight: u64) -> [u64; 6] {
    [1, input + output, input, output, input * 1000 + output * 2000, in_flight]
}

/// A request to a pool holds its prompt and `output` tokens, and has used what the pool reports.
async fn check_pool(limit: &Limit, more: &str, output: u64) {
    for way in [Way::Pool, Way::RelayedPool] {
        for stream in ["", r#","stream":true"#] {
            let told = format!("{way:?} {limit:?} {more} {stream}");
            let bed = Bed::new(way, Act::Silence, limit);
            let events = bed.ask(&body(&format!("{more}{stream}"))).await.expect(&told);
            assert_eq!(bed.reserved(), units(PROMPT, output, 1), "{told}");
            drop(events);
            let bed = Bed::new(way, Act::Answer, limit);
            drop(bed.ask(&body(&format!("{more}{stream}"))).await.expect(&told));
            assert_eq!(bed.used(), units(PROMPT, ANSWER, 0), "{told}");
        }
    }
}

#[tokio::test]
async fn a_pool_reserves_the_prompt_that_it_has_counted() {
    let most = &most();
    let room = CONTEXT - PROMPT;
    check_pool(&limit(), r#","max_tokens":100"#, 100).await;
    check_pool(&limit(), r#","max_tokens":100,"n":3"#, 300).await;
    check_pool(most, r#","max_tokens":100"#, 100).await;
    check_pool(&Limit { max_tokens_max: Some(40), ..limit() }, r#","max_tokens":100"#, 40).await;
    check_pool(&Limit { max_tokens_default: Some(30), ..limit() }, "", 30).await;
    // The rest of the context is the bound, whatever is asked for: the limit of 2000 tokens admits it.
    check_pool(&limit(), "", room).await;
    check_pool(most, "", room).await;
    check_pool(&limit(), r#","max_tokens":30000"#, room).await;
    check_pool(most, r#","max_tokens":100000"#, room).await;
}

/// Access log and ledger show the held amounts.
#[tokio::test]
async fn what_is_held_is_said() {
    for (limit, tokens) in [(limit(), 1024), (most(), 1024)] {
        let bed = Bed::new(Way::Provider, Act::Answer, &limit);
        let events = bed.ask(&body("")).await.expect("let in").expect("begun");
        let account = events.course().account.expect("counted");
        assert_eq!(account.reserved_tokens, body("").len() as u64 + tokens);
    }
    let bed = Bed::new(Way::Pool, Act::Answer, &most());
    let events = bed.ask(&body("")).await.expect("let in").expect("begun");
    assert_eq!(events.course().account.expect("counted").reserved_tokens, CONTEXT);
}

#[tokio::test]
async fn who_is_over_a_limit_is_refused_before_the_prompt_is_counted() {
    let mut once = limit();
    once.measures.push(Measure { unit: Unit::Requests, span: Span::Minute, max: 1 });
    let bed = Bed::new(Way::Pool, Act::Answer, &once);
    drop(bed.ask(&body("")).await.expect("let in"));
    let failure = bed.ask(&body("")).await.err().expect("refused");
    assert_eq!(failure.status(), 429);
    assert!(failure.message.contains("requests_per_minute"), "{}", failure.message);
    assert_eq!(bed.used(), units(PROMPT, ANSWER, 0), "nothing of it counts");
}

/// Use of a request that ended before its first token. `None`: all that was reserved; else prompt tokens.
async fn check_left(way: Way, act: Act, limit: &Limit, prompt: Option<u64>) {
    let bed = Bed::new(way, act, limit);
    let text = body(r#","max_tokens":100"#);
    // Dropped: the client has left.
    let ended = bed.ask(&text).await;
    assert_eq!(ended.is_err(), matches!(act, Act::Timeout | Act::Unheld | Act::Refuse | Act::Break), "{way:?} {act:?}");
    drop(ended);
    let expected = match prompt {
        Some(prompt) => units(prompt, 0, 0),
        None => units(text.len() as u64, 100, 0),
    };
    assert_eq!(bed.used(), expected, "{way:?} {act:?} {limit:?}");
}

#[tokio::test]
async fn a_prompt_that_was_sent_and_not_waited_for_counts() {
    // Without a history of the model four bytes count as a token.
    let guessed = body(r#","max_tokens":100"#).len().div_ceil(4) as u64;
    for limit in &[limit(), Limit { max_tokens_max: Some(100), ..limit() }, most()] {
        let is_most = limit.reserve == Reserve::Most;
        for way in [Way::Pool, Way::RelayedPool] {
            check_left(way, Act::Wait, limit, Some(0)).await;
            check_left(way, Act::Silence, limit, Some(PROMPT)).await;
            check_left(way, Act::Begin, limit, Some(PROMPT)).await;
            check_left(way, Act::Refuse, limit, Some(0)).await;
        }
        for way in [Way::Provider, Way::RelayedProvider] {
            check_left(way, Act::Wait, limit, Some(0)).await;
            check_left(way, Act::Silence, limit, Some(guessed).filter(|_| !is_most)).await;
            check_left(way, Act::Timeout, limit, Some(guessed).filter(|_| !is_most)).await;
            check_left(way, Act::Unheld, limit, Some(guessed).filter(|_| !is_most)).await;
            check_left(way, Act::Begin, limit, Some(guessed).filter(|_| !is_most)).await;
            check_left(way, Act::Break, limit, Some(guessed).filter(|_| !is_most)).await;
            check_left(way, Act::Refuse, limit, Some(0)).await;
        }
    }
}

/// Budget of two gateways, each of which has used nearly half of it.
#[tokio::test]
async fn counters_that_gateways_share_show_what_all_of_them_have_used() {
    let store: Arc<dyn Counters> = Arc::new(MemoryCounters::default());
    let money = Measure { unit: Unit::NanoUsd, span: Span::Month, max: 10_000_000 };
    let limit = Limit { measures: vec![money], ..limit() };
    let beds = ["a", "b"].map(|holder| {
        let bed = Bed::new(Way::Provider, Act::Answer, &limit);
        let _ = bed.governor.shared.set(Arc::new(Shared::with_store(store.clone(), holder)));
        bed
    });
    for bed in beds.iter().cycle().take(2 * 180) {
        drop(bed.ask(&body(r#","max_tokens":1"#)).await.expect("room"));
    }
    // Beside the used amount the other gateway's lease counts: a hundredth of the budget or the need of a request.
    let is_both = |used: f64| (0.009..0.0095).contains(&used);
    for Bed { governor, rules, entry } in &beds {
        let (limit, used) = (&rules.limits()[0], |counters: Vec<CounterState>| counters[0].used);
        assert_eq!(used(governor.counters(limit)), 0.0045);
        let together = used(governor.counters_together(limit).await);
        assert!(is_both(together), "{together}");
        let effect = Effect { rules, models: std::slice::from_ref(entry), named: vec![] };
        let status = status(governor, &effect, &Principal::default(), None).await;
        let used = &status["limits"][0]["measures"][0]["used"];
        assert!(used.as_f64().is_some_and(is_both), "{status}");
    }
}

/// A key that another gateway serves already is new at this one, whose bound on its rise is no bound on all of its requests.
#[tokio::test]
async fn each_gateway_counts_rises_alone() {
    let store: Arc<dyn Counters> = Arc::new(MemoryCounters::default());
    let minute = Measure { unit: Unit::Requests, span: Span::Minute, max: 1000 };
    let [first, second] = [("a", None), ("b", Some(Surge { times: 10, above: 60 }))].map(|(holder, surge)| {
        let bed = Bed::new(Way::Provider, Act::Answer, &Limit { measures: vec![minute], surge, ..limit() });
        let _ = bed.governor.shared.set(Arc::new(Shared::with_store(store.clone(), holder)));
        bed
    });
    for _ in 0..100 {
        drop(first.ask(&body("")).await.expect("room"));
    }
    for _ in 0..60 {
        drop(second.ask(&body("")).await.expect("no rise yet"));
    }
    let Err(failure) = second.ask(&body("")).await else { panic!("it rises") };
    assert_eq!(failure.status(), 429);
}

/// Work in the background tells by it that it waits for its own limit, and does not give up after some attempts.
#[tokio::test]
async fn a_limit_that_cannot_be_counted_is_what_refuses() {
    let bed = Bed::new(Way::Provider, Act::Answer, &Limit { on_store_failure: OnStoreFailure::Closed, ..limit() });
    // It has not begun: the store has not answered yet.
    let away = Shared::new(Arc::new(MemoryCounters::default()), "a".into(), None);
    let _ = bed.governor.shared.set(Arc::new(away));
    let Err(failure) = bed.ask(&body("")).await else { panic!("nobody counts it") };
    assert_eq!((failure.status(), failure.should_retry(), failure.retry_after_seconds()), (503, true, Some(5)));
    assert_eq!(failure.refusal.map(|refusal| refusal.rule), Some("it: not counted".to_owned()));
}

/// Number of a metric's samples with `unit`, as `/metrics` shows them.
fn metric(bed: &Bed, name: &str, label: &str) -> f64 {
    let text = bed.governor.metrics.render(&[]);
    let of = |line: &str| line.strip_prefix(name)?.strip_prefix(label)?.trim().parse::<f64>().ok();
    text.lines().find_map(of).unwrap_or(0.0)
}

#[tokio::test]
async fn only_requests_whose_tokens_a_limit_counts_are_measured_as_reserved_and_settled() {
    let requests = Limit { measures: vec![Measure { unit: Unit::Requests, span: Span::Minute, max: 9 }], ..limit() };
    for (limit, settled) in [(limit(), (PROMPT + ANSWER) as f64), (requests, 0.0)] {
        let bed = Bed::new(Way::Provider, Act::Answer, &limit);
        drop(bed.ask(&body(r#","max_tokens":1"#)).await.expect("room"));
        assert_eq!(metric(&bed, "penstock_limit_settled_total", "{unit=\"tokens\"}"), settled, "{limit:?}");
        let exceeded = metric(&bed, "penstock_limit_exceeded_total", "{unit=\"usd\"}");
        assert_eq!(exceeded, 0.0, "{limit:?}");
    }
}

#[tokio::test]
async fn a_request_is_counted_as_allowed_once() {
    let bed = Bed::new(Way::Provider, Act::Answer, &limit());
    let mut call = Bed::call(&body("")).await.expect("a call");
    would_admit(&bed.governor, &bed.rules, &Principal::default(), &mut call, &bed.entry).await.expect("room");
    let allowed = |bed: &Bed| metric(bed, "penstock_limit_decisions_total", "{limit=\"it\",decision=\"allowed\"}");
    assert_eq!(allowed(&bed), 0.0);
    drop(bed.ask(&body("")).await.expect("room"));
    assert_eq!(allowed(&bed), 1.0);
}

/// Output tokens that a worker has sent were computed, also where the answer is dropped before anybody takes them.
#[tokio::test]
async fn output_that_has_arrived_counts_though_nobody_takes_it() {
    for limit in &[limit(), most()] {
        for way in [Way::Pool, Way::RelayedPool] {
            let bed = Bed::new(way, Act::Arrived, limit);
            let events = bed.ask(&body(r#","max_tokens":100"#)).await.expect("let in").expect("begun");
            let account = events.course().account.expect("counted");
            assert_eq!((account.tokens, events.facts().completion_tokens), (PROMPT + ANSWER, 0), "{way:?}");
            drop(events);
            assert_eq!(bed.used(), units(PROMPT, ANSWER, 0), "{way:?} {limit:?}");
        }
    }
}

/// Counters of this process and of the one that it hands over to, after `act` in this one.
async fn check_hand_over(way: Way, limit: &Limit, act: impl AsyncFn(&Bed)) {
    let (bed, next) = (Bed::new(way, Act::Answer, limit), Governor::new(Arc::default()));
    let (give, told) = std::sync::mpsc::sync_channel(64);
    next.import(bed.governor.give_away(give));
    act(&bed).await;
    for given in told.try_iter() {
        match given {
            Given::Held { id, claims } => next.adopt(id, &claims),
            Given::Settled { id, amounts } => next.settle_adopted(id, &amounts),
        }
    }
    // Holds that were not settled before the hand-over count with their reserved amounts.
    next.end_adopted();
    let counted = |governor: &Governor| {
        let counters = governor.counters(&bed.rules.limits()[0]).into_iter();
        let mut all: Vec<_> = counters.map(|one| (one.subject, one.measure, one.used, one.reserved)).collect();
        all.retain(|(_, _, used, reserved)| *used + *reserved > 0.0);
        all.sort_by(|one, other| (&one.0, one.1).cmp(&(&other.0, other.1)));
        all
    };
    assert_eq!(counted(&next), counted(&bed.governor), "{way:?} {limit:?}");
}

#[tokio::test]
async fn the_process_that_goes_on_counts_what_this_one_does() {
    let asks = async |bed: &Bed| drop(bed.ask(&body(r#","max_tokens":100"#)).await.expect("room"));
    let only_checks = async |bed: &Bed| {
        let mut call = Bed::call(&body(r#","max_tokens":100"#)).await.expect("a call");
        let Bed { governor, rules, entry } = bed;
        would_admit(governor, rules, &Principal::default(), &mut call, entry).await.expect("room");
    };
    let by_provider = Limit { by: By::Provider, ..limit() };
    for way in [Way::Provider, Way::RelayedProvider] {
        check_hand_over(way, &limit(), asks).await;
        check_hand_over(way, &limit(), only_checks).await;
        // The answering provider is none of those that the request was reserved for.
        check_hand_over(way, &by_provider, asks).await;
    }
}

/// Money that a request for this tier holds and has used, relative to the price without a tier; an error: the request is refused.
async fn check_tier(tier: &str, tiers: Tiers, answered: Option<ServiceTier>, expected: Result<(u64, u64), u16>) {
    let price = Price { tiers, ..PRICE };
    let text = body(&format!(r#","max_tokens":100,"service_tier":"{tier}""#));
    let bed = |act| {
        let bed = Bed::new(Way::Provider, act, &limit());
        let entry = Entry { billing: Arc::new(Billing::single(Some("acme"), Some(price))), ..bed.entry.clone() };
        let upstream = Arc::new(Double { name: "a", is_pool: false, act, tier: answered });
        Bed { entry: Entry { upstream, ..entry }, ..bed }
    };
    let waiting = bed(Act::Silence);
    let lease = BodyBudget::new(1 << 20, 1 << 20).lease();
    let given = Body { bytes: text.clone().into(), lease };
    let mut call =
        Call::new(Ask::new(Surface::Chat), given, "req_1".into(), HeaderMap::new(), penstock_dialects::decode)
            .await
            .expect("a call");
    let Bed { governor, rules, entry } = &waiting;
    let held = admit(governor, rules, &Principal::default(), &mut call, entry, false).await;
    let (held, _) = match (held, expected) {
        (Err(failure), Err(status)) => return assert_eq!(failure.status(), status, "{tier}: {}", failure.message),
        (held, _) => held.expect(tier),
    };
    let plain = (text.len() as u64 * 1000 + 100 * 2000, PROMPT * 1000 + ANSWER * 2000);
    let expected = expected.expect("let in");
    assert_eq!(waiting.reserved()[4], plain.0 * expected.0 / 100, "{tier} {tiers:?}");
    drop(held);
    let answering = bed(Act::Answer);
    drop(answering.ask(&text).await.expect(tier));
    assert_eq!(answering.used()[4], plain.1 * expected.1 / 100, "{tier} {tiers:?} {answered:?}");
}

#[tokio::test]
async fn a_service_tier_has_its_price() {
    let known = Tiers { flex: 0.5, priority: 2.0 };
    let said = Some(ServiceTier::Standard);
    for tier in ["auto", "default", "standard_only"] {
        check_tier(tier, NO_TIERS, None, Ok((100, 100))).await;
        check_tier(tier, known, Some(ServiceTier::Priority), Ok((100, 200))).await;
    }
    check_tier("flex", known, None, Ok((50, 50))).await;
    check_tier("flex", NO_TIERS, None, Ok((100, 100))).await;
    check_tier("priority", known, None, Ok((200, 200))).await;
    check_tier("priority", known, said, Ok((200, 100))).await;
    for tier in ["priority", "fast", "gold"] {
        check_tier(tier, NO_TIERS, said, Err(403)).await;
    }
}
