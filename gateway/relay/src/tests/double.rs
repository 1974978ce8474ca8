//! Upstream double that follows a script, and a world with a clock of its own.

use std::collections::{HashMap, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use http::{HeaderMap, HeaderName, HeaderValue};
use penstock_proto::ErrorKind;
use penstock_types::{ChatEvent, FaultClass, FinishReason, ProviderFault, Surface, Usage};
use penstock_types::{DetokenizeRequest, TokenizeRequest};

use crate::core;
use crate::events::Relayed;
use crate::models::{Models, Targets};
use crate::prefix::Prefix;
use crate::race::RaceStart;
use crate::target::Target;
use crate::{ModelConfig, Policy, Reason, RelayConfig, Sticky, TargetConfig};
use penstock_base::Secret;
use penstock_base::error::Failure;
use penstock_govern::prices::Prices;
use penstock_http::{Body, BodyBudget};
use penstock_kv_feed::Feed;
use penstock_provider::PacingConfig;
use penstock_provider::keys::{AllRest, Keys, TooLate, Use};
use penstock_provider::pace::{self, Joined, Pace, Part, Step, patience};
use penstock_telemetry::{Gauge, Metrics};
use penstock_types::ask::Ask;
use penstock_upstream::Forward;
use penstock_upstream::Forwarded;
use penstock_upstream::Probe;
use penstock_upstream::call::Call;
use penstock_upstream::{
    Asker, Card, Course, Events, Facts, Measured, Open, Origin, Prepared, Upstream, not_forwarded,
};

/// Behaviour of a double for one request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Act {
    /// Emits this many words, one per this many ms, and ends.
    Say(usize, u64),
    /// Emits this many words at once, then fails.
    Break(usize),
    /// Emits this many words at once, then nothing.
    Stall(usize),
    /// Emits usage, then fails, in one poll: the status was 200.
    FailLate,
    /// Ends the answer without emitting a word.
    Empty,
    /// Refuses to open after this many ms, with this class and Retry-After.
    Refuse(FaultClass, u64, Option<Duration>),
    /// Makes an answer for which the gateway has no memory.
    Unheld,
    /// Refuses to open for a reason of the gateway's own.
    Own(ErrorKind),
    /// Never opens the call: no event ever comes.
    Hang,
}

/// Refusal of this class without a delay.
pub(super) const fn fail(class: FaultClass) -> Act {
    Act::Refuse(class, 0, None)
}

/// Act of a good answer: two words without a delay.
pub(super) const GOOD: Act = Act::Say(2, 0);
/// Act of the usual failure: a server error without a delay.
pub(super) const DOWN: Act = fail(FaultClass::Server);

/// Clock that the doubles and the test share, moved on by the test.
#[derive(Clone)]
pub(super) struct Clock(Arc<Mutex<Instant>>);

impl Clock {
    pub(super) fn now(&self) -> Instant {
        *self.0.lock().expect("clock")
    }

    pub(super) fn advance(&self, time: Duration) {
        *self.0.lock().expect("clock") += time;
    }
}

/// Upstream whose behaviour a test scripts, request by request.
pub(super) struct Double {
    pub(super) name: String,
    clock: Clock,
    /// Scripted acts of the next requests; `always` follows.
    acts: Mutex<VecDeque<Act>>,
    always: Mutex<Act>,
    /// Act for one tenant; takes precedence.
    acts_for: Mutex<HashMap<String, Act>>,
    /// Keys of the provider that the double plays.
    keys: Keys,
    /// Pace of the provider that the double plays, and the longest wait for it; `None`: it publishes no rate.
    pace: Option<(Mutex<Pace>, Duration)>,
    pub(super) opened: AtomicUsize,
    extras: AtomicUsize,
    started: AtomicUsize,
    open: Arc<AtomicUsize>,
    pub(super) unready: Mutex<Option<String>>,
}

impl Double {
    pub(super) fn act(&self, acts: &[Act]) {
        self.acts.lock().expect("acts").extend(acts);
    }

    /// Sets the act for one tenant from now on.
    pub(super) fn act_for(&self, tenant: &str, act: Act) {
        self.acts_for.lock().expect("acts").insert(tenant.to_owned(), act);
    }

    pub(super) fn always(&self, act: Act) {
        *self.always.lock().expect("act") = act;
    }

    /// Waits for a turn at the published rate, as a provider does.
    async fn turn_at_pace(&self, asker: Asker, origin: &Origin) -> Result<(), Failure> {
        let Some((pace, wait)) = &self.pace else { return Ok(()) };
        let now = self.clock.now();
        let limit = patience(*wait, origin.first_by, origin.deadline, now);
        let request = pace::Request { asker, tokens: 0, is_extra: origin.is_extra };
        let limit = pace.lock().expect("pace").longest_wait(request, limit, Part::Own);
        let joined = pace.lock().expect("pace").join(request, limit, Part::Own, now);
        let id = match joined {
            Joined::Go(_) => return Ok(()),
            Joined::Refused(wait) => return Err(TooLate(wait).failure()),
            Joined::Waits(id, _) => id,
        };
        let place = InLine(pace, id);
        origin.waited.begin();
        let turn = poll_fn(|_| {
            let now_at = self.clock.now();
            match pace.lock().expect("pace").step(place.1, Part::Own, now_at) {
                Step::Go(_) => Poll::Ready(Ok(())),
                Step::Out => Poll::Ready(Err(TooLate(limit).failure())),
                Step::Wait(wait) if now_at + wait > now + limit => Poll::Ready(Err(TooLate(wait).failure())),
                _ if now_at >= now + limit => Poll::Ready(Err(TooLate(limit).failure())),
                Step::Wait(_) | Step::Behind => Poll::Pending,
            }
        })
        .await;
        origin.waited.add(self.clock.now() - now);
        turn
    }

    /// Number of requests that came to the double.
    pub(super) fn opened(&self) -> usize {
        self.opened.load(SeqCst)
    }

    /// Number of requests that came to the double as retries or hedges.
    pub(super) fn extras(&self) -> usize {
        self.extras.load(SeqCst)
    }

    /// Requests that came over their measurement.
    pub(super) fn started(&self) -> usize {
        self.started.load(SeqCst)
    }

    /// Number of requests in flight at the double.
    pub(super) fn open(&self) -> usize {
        self.open.load(SeqCst)
    }
}

/// Place in the line of a pace, given up when dropped.
struct InLine<'p>(&'p Mutex<Pace>, u64);

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        self.0.lock().expect("pace").leave(self.1);
    }
}

/// Counts one request in flight for as long as it lives.
struct Held(Arc<AtomicUsize>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

pub(super) fn failure(class: FaultClass, after: Option<Duration>) -> Failure {
    let mut failure = Failure::provider(ProviderFault::new(class, format!("{class:?}")));
    failure.retry_after = after;
    failure
}

/// A call that the double has measured.
struct Started(Arc<Double>);

#[async_trait]
impl Open for Started {
    async fn open(self: Box<Self>, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        self.0.started.fetch_add(1, SeqCst);
        Upstream::open(&*self.0, call, origin).await
    }
}

#[async_trait]
impl Upstream for Double {
    fn card(&self) -> Card {
        Card { id: self.name.clone(), created: 0, context_tokens: 4096, task: None, parent: None }
    }

    fn unready(&self) -> Option<String> {
        self.unready.lock().expect("unready").clone()
    }

    async fn open(&self, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        let uses = Use::new(&self.name, call.ask.label());
        let turn = self.keys.take(origin.asker(&call), uses, self.clock.now()).map_err(AllRest::failure)?;
        self.turn_at_pace(origin.asker(&call), &origin).await?;
        self.opened.fetch_add(1, SeqCst);
        self.extras.fetch_add(usize::from(origin.is_extra), SeqCst);
        self.open.fetch_add(1, SeqCst);
        let held = Held(self.open.clone());
        let own = self.acts_for.lock().expect("acts").get(&origin.tenant).copied();
        let next = || self.acts.lock().expect("acts").pop_front().unwrap_or(*self.always.lock().expect("act"));
        let act = own.unwrap_or_else(next);
        let began = self.clock.now();
        origin.sent.set();
        match act {
            Act::Hang => std::future::pending().await,
            Act::Own(kind) => Err(Failure::new(kind, format!("{kind:?}"))),
            Act::Unheld => {
                let failure = Failure::new(ErrorKind::Overloaded, "no memory").retry_after(Duration::from_secs(1));
                Err(failure.unheld())
            }
            Act::Refuse(class, ms, after) => {
                let due = began + Duration::from_millis(ms);
                poll_fn(|_| if self.clock.now() >= due { Poll::Ready(()) } else { Poll::Pending }).await;
                if let Some(turn) = turn {
                    turn.answered(class, after, self.clock.now());
                }
                Err(failure(class, after))
            }
            act => {
                if let Some(turn) = turn {
                    turn.worked(self.clock.now());
                }
                let name = self.name.clone();
                Ok(Box::new(Words { name, act, said: 0, began, clock: self.clock.clone(), _held: held }))
            }
        }
    }

    async fn count(&self, _: Arc<Call>) -> Result<Option<u64>, Failure> {
        Ok(None)
    }

    async fn measure(self: Arc<Self>, _: &Call) -> Result<Prepared, Failure> {
        let measured = Some(Measured { prompt_tokens: 3, completion_tokens_max: self.name.len() as u64 });
        Ok(Prepared { measured, opener: Some(Box::new(Started(self))) })
    }

    async fn forward(&self, _: Arc<Forward>) -> Result<Forwarded, Failure> {
        Err(not_forwarded())
    }

    async fn tokenize(&self, _: TokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(Failure::new(ErrorKind::Unsupported, "no tokens"))
    }

    async fn detokenize(&self, _: DetokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(Failure::new(ErrorKind::Unsupported, "no tokens"))
    }

    fn feed(&self) -> Option<Arc<Feed>> {
        None
    }

    fn gauges(&self, _: &mut dyn FnMut(Gauge, f64)) {}
}

struct Words {
    name: String,
    act: Act,
    said: usize,
    began: Instant,
    clock: Clock,
    _held: Held,
}

impl Words {
    fn say(&mut self, out: &mut Vec<ChatEvent>) {
        self.said += 1;
        let text = format!("{} ", self.name);
        out.push(ChatEvent::Text { choice: 0, text, logprobs: Vec::new(), tokens: Vec::new() });
    }
}

impl Events for Words {
    fn poll_events(&mut self, _: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        let broken = || Poll::Ready(Err(failure(FaultClass::Truncated, None)));
        match self.act {
            Act::Say(words, ms) => {
                let due = self.began + Duration::from_millis(ms) * (self.said as u32 + 1);
                if self.clock.now() < due {
                    return Poll::Pending;
                }
                self.say(out);
                if self.said < words {
                    return Poll::Ready(Ok(true));
                }
                out.push(ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None });
                out.push(ChatEvent::Usage(Usage::default()));
                Poll::Ready(Ok(false))
            }
            Act::Break(words) if self.said >= words => broken(),
            Act::Stall(words) if self.said >= words => Poll::Pending,
            Act::Break(_) | Act::Stall(_) => {
                self.say(out);
                Poll::Ready(Ok(true))
            }
            Act::FailLate if self.said == 0 => {
                self.said = 1;
                out.push(ChatEvent::Usage(Usage::default()));
                Poll::Ready(Ok(true))
            }
            Act::FailLate => broken(),
            Act::Empty => Poll::Ready(Ok(false)),
            Act::Hang | Act::Own(_) | Act::Unheld | Act::Refuse(..) => Poll::Pending,
        }
    }

    fn facts(&self) -> Facts {
        Facts { prompt_tokens: 10, completion_tokens: self.said as u64, ..Facts::default() }
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &[]
    }
}

/// Doubles and a relay of some of them.
pub(super) struct World {
    pub(super) clock: Clock,
    pub(super) doubles: Vec<Arc<Double>>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) models: Models,
}

struct Pools(Vec<Arc<Double>>);

impl Targets for Pools {
    fn pools(&self) -> Vec<Arc<dyn Upstream>> {
        self.0.iter().map(|double| double.clone() as Arc<dyn Upstream>).collect()
    }

    fn provider(&self, _: &str, _: &str) -> Option<Arc<dyn Upstream>> {
        None
    }

    fn provided(&self) -> Vec<Arc<dyn Upstream>> {
        Vec::new()
    }

    fn probe(&self, _: &str) -> Option<Arc<dyn Probe>> {
        None
    }
}

/// Names of the pools that a test's rules can use.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Target of the pool with this name.
pub(super) fn pool(name: &str) -> TargetConfig {
    TargetConfig::Pool(name.to_owned())
}

/// Rules of a model `m` over pools that each letter names, with the config's default of every other key.
pub(super) fn over(to: &str, fallback: &str) -> ModelConfig {
    let pools = |names: &str| names.chars().map(|name| pool(&name.to_string())).collect::<Vec<_>>();
    ModelConfig {
        name: "m".into(),
        aliases: Vec::new(),
        to: pools(to).into_iter().map(|target| (target, 1)).collect(),
        fallback: pools(fallback),
        fallback_on: vec![Reason::Error, Reason::Timeout, Reason::RateLimit],
        policy: Policy::Weighted,
        sticky: Sticky::None,
        retries: 1,
        retry_budget_percent: 20,
        hedge_after: None,
        first_token_timeout: None,
        idle_timeout: None,
        timeout: None,
        mirror: None,
        context_tokens: 0,
        price: None,
    }
}

impl World {
    /// A world with a model of these rules.
    pub(super) fn new(rules: ModelConfig) -> Self {
        Self::build(rules, false, 0, None)
    }

    /// A world whose upstreams are providers with `count` keys each. `pace`: rate that the provider `a` publishes.
    pub(super) fn paced(count: usize, pace: Option<PacingConfig>, rules: ModelConfig) -> Self {
        Self::build(rules, false, count, pace)
    }

    /// A world in which every answer names its target.
    pub(super) fn explaining(rules: ModelConfig) -> Self {
        Self::build(rules, true, 0, None)
    }

    fn build(rules: ModelConfig, explain: bool, count: usize, pace: Option<PacingConfig>) -> Self {
        let secrets: Vec<Secret> = (0..count).map(|index| Secret::new(format!("sk-{index}"))).collect();
        let clock = Clock(Arc::new(Mutex::new(Instant::now())));
        let double = |name: &&str| {
            Arc::new(Double {
                name: (*name).to_owned(),
                clock: clock.clone(),
                acts: Mutex::default(),
                always: Mutex::new(GOOD),
                acts_for: Mutex::default(),
                keys: Keys::new(&secrets, None),
                pace: pace
                    .filter(|_| *name == "a")
                    .map(|config| (Mutex::new(Pace::new(&config, clock.now())), config.wait)),
                opened: AtomicUsize::new(0),
                extras: AtomicUsize::new(0),
                started: AtomicUsize::new(0),
                open: Arc::default(),
                unready: Mutex::default(),
            })
        };
        let doubles: Vec<_> = NAMES.iter().map(double).collect();
        let metrics = Arc::<Metrics>::default();
        let config = RelayConfig { explain, models: &[rules], prices: &Prices::default(), providers: &[] };
        let models = Models::build(&config, &Pools(doubles.clone()), &metrics, None);
        Self { clock, doubles, metrics, models }
    }

    pub(super) fn double(&self, name: &str) -> &Double {
        self.doubles.iter().find(|double| double.name == name).expect("a double")
    }

    fn core(&self) -> Arc<core::Core> {
        self.models.relays().first().expect("a relay").clone()
    }

    pub(super) fn target(&self, name: &str) -> Arc<Target> {
        let core = self.core();
        core.targets.iter().find(|target| &*target.id == name).expect("a target").clone()
    }

    /// A streamed request that has not been polled.
    pub(super) fn ask(&self, headers: &[(&'static str, &str)], body: &str) -> Asking<'_> {
        self.ask_for("team", call(headers, body))
    }

    /// A request of another tenant, for another operation.
    pub(super) fn ask_as(&self, tenant: &str, surface: Surface) -> Asking<'_> {
        let body = if surface == Surface::Embeddings { EMBED } else { STREAM };
        self.ask_for(tenant, call_for(surface, &[], body))
    }

    fn ask_for(&self, tenant: &str, call: Call) -> Asking<'_> {
        let call = Arc::new(call);
        let origin = Origin { tenant: tenant.into(), ..Origin::default() };
        let now = self.clock.now();
        let core = self.core();
        let prefix = (core.rules.policy == Policy::CacheAware).then(|| Prefix::of_text(&core, &call, now));
        let events = Relayed::new(core, call, origin, RaceStart { prefix, first: None }, now);
        Asking { world: self, events, said: Vec::new() }
    }

    /// Sends a streamed request and runs it to its end.
    pub(super) fn answer(&self) -> Outcome {
        self.ask(&[], STREAM).end()
    }

    /// Text of an answer that was measured before it was opened, by the real clock.
    pub(super) async fn serve_measured(&self) -> String {
        let upstream = self.models.find("m").expect("there").upstream.clone();
        let call = Arc::new(call(&[], STREAM));
        let opener = upstream.measure(&call).await.expect("measured").opener.expect("an opener");
        let mut events = opener.open(call, Origin::default()).await.expect("open");
        let mut said = Vec::new();
        while poll_fn(|context| events.poll_events(context, &mut said)).await.expect("an answer") {}
        text(&said)
    }

    /// Text of a streamed answer, served as the gateway serves it, by the real clock.
    pub(super) async fn serve(&self) -> String {
        let upstream = &self.models.find("m").expect("there").upstream;
        let origin = Origin::default();
        let mut events = upstream.open(Arc::new(call(&[], STREAM)), origin).await.expect("open");
        let mut said = Vec::new();
        while poll_fn(|context| events.poll_events(context, &mut said)).await.expect("an answer") {}
        text(&said)
    }

    /// Value of a metric's series whose labels contain all these pieces; 0 if there is none.
    pub(super) fn metric(&self, name: &str, pieces: &[&str]) -> f64 {
        let text = self.metrics.render(&[]);
        let lines = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        let found = lines.filter(|line| pieces.iter().all(|piece| line.contains(piece)));
        found.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }
}

/// Body of a streamed request.
pub(super) const STREAM: &str = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
/// Body of a request for a whole answer.
pub(super) const WHOLE: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;

/// Body of a request for embeddings.
const EMBED: &str = r#"{"model":"m","input":"hi"}"#;

pub(super) fn call(headers: &[(&'static str, &str)], body: &str) -> Call {
    call_for(Surface::Chat, headers, body)
}

fn call_for(surface: Surface, headers: &[(&'static str, &str)], body: &str) -> Call {
    let lease = BodyBudget::new(1 << 20, 1 << 20).lease();
    let body = Body { bytes: body.to_owned().into(), lease };
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.insert(*name, HeaderValue::from_str(value).expect("a value"));
    }
    now(Call::new(Ask::new(surface), body, "req_1".into(), map, penstock_dialects::decode)).expect("a call")
}

/// Output of a future that never waits.
pub(super) fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it waits"),
    }
}

/// Request of a test that is in progress, polled by hand.
pub(super) struct Asking<'w> {
    world: &'w World,
    events: Relayed,
    said: Vec<ChatEvent>,
}

/// Outcome of a test's request: its text, failure and attempts.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Words of the answer, marked with their double.
    pub(super) text: String,
    pub(super) failure: Option<Failure>,
    pub(super) course: Course,
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    pub(super) took: Duration,
    /// Number of usage events that the client got.
    pub(super) said_usages: usize,
}

impl Outcome {
    /// Attempts and their outcomes: `a:error b:answered`.
    pub(super) fn story(&self) -> String {
        let attempts = self.course.attempts.iter();
        attempts.map(|attempt| format!("{}:{}", attempt.target, attempt.outcome)).collect::<Vec<_>>().join(" ")
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(have, _)| have == name).and_then(|(_, value)| value.to_str().ok())
    }
}

impl Asking<'_> {
    /// Polls the answer once, without waiting.
    pub(super) fn poll(&mut self) -> Poll<Result<bool, Failure>> {
        let mut context = Context::from_waker(Waker::noop());
        self.events.poll_at(&mut context, self.world.clock.now(), &mut self.said)
    }

    /// Course of the answer so far.
    pub(super) fn events_course(&self) -> Course {
        self.events.course()
    }

    /// Runs to the end, at most a day of simulated time, in steps of a millisecond.
    pub(super) fn end(mut self) -> Outcome {
        let began = self.world.clock.now();
        let failure = loop {
            match self.poll() {
                Poll::Ready(Ok(true)) => {}
                Poll::Ready(Ok(false)) => break None,
                Poll::Ready(Err(failure)) => break Some(failure),
                Poll::Pending => {
                    assert!(self.world.clock.now() - began < Duration::from_secs(100), "it hangs");
                    self.world.clock.advance(Duration::from_millis(1));
                }
            }
        };
        let said_usages = self.said.iter().filter(|event| matches!(event, ChatEvent::Usage(_))).count();
        Outcome {
            text: text(&self.said),
            failure,
            course: self.events.course(),
            headers: self.events.headers().to_vec(),
            said_usages,
            took: self.world.clock.now() - began,
        }
    }
}

/// The words of these events.
fn text(said: &[ChatEvent]) -> String {
    let words = said.iter().filter_map(|event| match event {
        ChatEvent::Text { text, .. } => Some(text.as_str()),
        _ => None,
    });
    words.collect::<String>().trim_end().to_owned()
}

/// Pace with a burst of four requests, of which an extra attempt needs three. `wait`: longest wait for a turn, in seconds.
pub(super) fn four_at_once(wait: u64) -> Option<PacingConfig> {
    let wait = Duration::from_secs(wait);
    Some(PacingConfig { requests_per_minute: 40, tokens_per_minute: 0, gateways: 1, wait })
}
