//! Plugin `cache`: repeats an answer where the same request was answered before.
//!
//! Two requests are the same with the same JSON (in whatever order, streamed or not), of the same dialect, for the same
//! model, by the same key (or team, or anybody, as the config says). A field that this gateway does not know is part of
//! the request. A hit is encoded in the form that the client wants, costs nothing in the ledger, and is marked
//! (`x-penstock-cache`). Only complete answers are kept, in the memory of this process or in the cache that gateways
//! share.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_plugins::{
    Answer, AnswerHead, Flow, Hooks, Host, HostError, Kind, Needs, Plugin, PluginError, Rejection, RequestContext,
    Sees, Settings, Verdict,
};
use penstock_types::ChatEvent;
use serde_json::Value;

use crate::recorder::{Recorder, read, written};

/// Plugin kind `cache`: builds plugins that repeat the answers to equal requests.
pub(crate) struct Cache;

/// Header field of answers that tells `hit` or `miss`.
pub(crate) const CACHE: HeaderName = HeaderName::from_static("x-penstock-cache");
/// Header field with the seconds since the answer was made.
const AGE: HeaderName = HeaderName::from_static("age");

/// Callers that share answers: those with one key, those of one team, or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    Key,
    Team,
    All,
}

/// Value of the setting `share`; `key` where it is missing.
pub(crate) fn share(settings: &Settings<'_>) -> Share {
    settings.word("share", &[("key", Share::Key), ("team", Share::Team), ("all", Share::All)])
}

impl Share {
    /// Tenant that separates callers. A key without a team shares answers with no other key.
    pub(crate) fn tenant(self, request: &RequestContext) -> String {
        let info = &request.info;
        match (self, &info.team) {
            (Share::All, _) => "*".into(),
            (Share::Team, Some(team)) => format!("team {team}"),
            _ => format!("key {}", info.tenant),
        }
    }

    /// Returns true if other callers get the answer to a request.
    pub(crate) fn has_others(self, request: &RequestContext) -> bool {
        match self {
            Share::Key => false,
            Share::Team => request.info.team.is_some(),
            Share::All => true,
        }
    }
}

/// Client's wishes (RFC 9111, section 5.2.1): whether to look into the cache, and whether to keep the answer.
pub(crate) fn wishes(request: &RequestContext) -> (bool, bool) {
    let values = request.headers.get_all(http::header::CACHE_CONTROL).iter().filter_map(|value| value.to_str().ok());
    let words: Vec<_> =
        values.flat_map(|value| value.split(',')).map(|word| word.trim().to_ascii_lowercase()).collect();
    let says = |word: &str| words.iter().any(|have| have == word);
    (!says("no-cache") && !says("no-store"), !says("no-store"))
}

struct Config {
    keep: Duration,
    entry_bytes_max: usize,
    share: Share,
    /// Answers in memory; `None`: the shared cache is used.
    memory: Option<Mutex<Memory>>,
}

impl Kind for Cache {
    fn name(&self) -> &'static str {
        "cache"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let bytes_max = settings.number("bytes_max", 1024..=1 << 40, 64 << 20) as usize;
        let shared = settings.word("store", &[("memory", false), ("shared", true)]);
        let config = Config {
            keep: Duration::from_secs(settings.number("ttl_seconds", 1..=31_536_000, 3600)),
            entry_bytes_max: settings.number("entry_bytes_max", 256..=8 << 20, 1 << 20) as usize,
            share: share(settings),
            memory: (!shared).then(|| Mutex::new(Memory::new(bytes_max))),
        };
        Some(Arc::new(Cached(Arc::new(config))))
    }
}

/// Answers in memory, evicted in LRU order.
struct Memory {
    entries: HashMap<String, Entry>,
    /// Keys of the entries by the number of their last use, least recent first.
    order: BTreeMap<u64, String>,
    next: u64,
    bytes: usize,
    bytes_max: usize,
}

struct Entry {
    events: Arc<Vec<ChatEvent>>,
    bytes: usize,
    made: Duration,
    used: u64,
}

impl Memory {
    fn new(bytes_max: usize) -> Self {
        Self { entries: HashMap::new(), order: BTreeMap::new(), next: 0, bytes: 0, bytes_max }
    }

    fn get(&mut self, key: &str, now: Duration, keep: Duration) -> Option<(Arc<Vec<ChatEvent>>, Duration)> {
        let entry = self.entries.get_mut(key)?;
        if entry.made + keep <= now {
            self.remove(key);
            return None;
        }
        self.order.remove(&entry.used);
        self.next += 1;
        entry.used = self.next;
        self.order.insert(entry.used, key.to_owned());
        Some((entry.events.clone(), now.saturating_sub(entry.made)))
    }

    /// Entry as [`Memory::get`] would return it, without marking it as used.
    fn peek(&self, key: &str, now: Duration, keep: Duration) -> Option<(Arc<Vec<ChatEvent>>, Duration)> {
        let entry = self.entries.get(key).filter(|entry| entry.made + keep > now)?;
        Some((entry.events.clone(), now.saturating_sub(entry.made)))
    }

    fn put(&mut self, key: String, events: Vec<ChatEvent>, bytes: usize, now: Duration) {
        self.remove(&key);
        // The key stands there twice.
        let bytes = bytes + 2 * key.len() + 128;
        if bytes > self.bytes_max {
            return;
        }
        while self.bytes + bytes > self.bytes_max {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            self.remove(&oldest);
        }
        self.next += 1;
        self.bytes += bytes;
        self.order.insert(self.next, key.clone());
        self.entries.insert(key, Entry { events: Arc::new(events), bytes, made: now, used: self.next });
    }

    fn remove(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.used);
            self.bytes -= entry.bytes;
        }
    }
}

struct Cached(Arc<Config>);

impl Plugin for Cached {
    fn needs(&self) -> Needs {
        Needs::Body
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Caching { config: self.0.clone(), miss: None })
    }
}

struct Caching {
    config: Arc<Config>,
    /// Key and recorder of an answer that is to be kept.
    miss: Option<Miss>,
}

struct Miss {
    key: String,
    host: Arc<dyn Host>,
    recorder: Recorder,
}

/// Fields that change how an answer is sent, or who asks, and not its content.
const APART: [&str; 6] = ["metadata", "safety_identifier", "store", "stream", "stream_options", "user"];

/// Cache key of a request: equal requests have equal keys. `None`: an equal request may ask for something else.
fn key(mut share: Share, request: &RequestContext) -> Result<Option<String>, PluginError> {
    let read = serde_json::from_slice(request.body()?);
    let mut body: Value = read.map_err(|_| PluginError::new("the body is no JSON"))?;
    if let Some(table) = body.as_object_mut() {
        let names = |name: &str| table.get(name).is_some_and(|value| !value.is_null());
        if names("conversation") {
            // Each answer becomes a part of the conversation that the next one goes on with.
            return Ok(None);
        }
        if names("previous_response_id") {
            // A response belongs to one key: for others the request is an error.
            share = Share::Key;
        }
        APART.iter().for_each(|name| drop(table.shift_remove(*name)));
        table.shift_remove("model");
    }
    let mut hasher = blake3::Hasher::new();
    let tenant = share.tenant(request);
    let beta = request.headers.get_all("anthropic-beta").iter().filter_map(|value| value.to_str().ok());
    let beta: Vec<_> = beta.collect();
    for part in [request.info.route, &request.model, &tenant, &beta.join(",")] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    canonical(&body, &mut hasher);
    Ok(Some(format!("answer:{}", hasher.finalize().to_hex())))
}

/// Hashes JSON with its names in order.
fn canonical(value: &Value, hasher: &mut blake3::Hasher) {
    match value {
        Value::Object(table) => {
            let mut names: Vec<_> = table.keys().collect();
            names.sort_unstable();
            hasher.update(b"{");
            for name in names {
                hasher.update(Value::from(name.as_str()).to_string().as_bytes());
                hasher.update(b":");
                canonical(&table[name], hasher);
                hasher.update(b",");
            }
            hasher.update(b"}");
        }
        Value::Array(items) => {
            hasher.update(b"[");
            for item in items {
                canonical(item, hasher);
                hasher.update(b",");
            }
            hasher.update(b"]");
        }
        plain => {
            hasher.update(plain.to_string().as_bytes());
        }
    }
}

/// Verdict that repeats a kept answer, with the header fields of a hit.
pub(crate) fn hit(events: Vec<ChatEvent>, age: Option<Duration>) -> Verdict {
    let mut headers = vec![(CACHE, HeaderValue::from_static("hit"))];
    headers.extend(age.map(|age| (AGE, HeaderValue::from(age.as_secs()))));
    Verdict::Answer(Answer { events, headers })
}

#[async_trait]
impl Hooks for Caching {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        let (looks, keeps) = wishes(request);
        if !looks && !keeps {
            return Ok(Verdict::Pass);
        }
        let Some(key) = key(self.config.share, request)? else { return Ok(Verdict::Pass) };
        let host = request.host.clone();
        if looks {
            let found = match &self.config.memory {
                Some(memory) => {
                    let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                    let (now, keep) = (host.since_epoch(), self.config.keep);
                    let found =
                        if request.info.dry_run { memory.peek(&key, now, keep) } else { memory.get(&key, now, keep) };
                    found.map(|(events, age)| (events.as_ref().clone(), Some(age)))
                }
                None => match host.cache_get(&key).await {
                    Ok(bytes) => bytes.and_then(|bytes| Some((read(&bytes)?, None))),
                    // A missing shared cache is a fault of the setup; a slow or failing one counts as a miss.
                    Err(error @ HostError::Unavailable(_)) => return Err(error.into()),
                    Err(_) => None,
                },
            };
            if let Some((events, age)) = found {
                return Ok(hit(events, age));
            }
        }
        let recorder = Recorder::new(self.config.entry_bytes_max, self.config.share.has_others(request));
        self.miss = keeps.then_some(Miss { key, host, recorder });
        Ok(Verdict::Pass)
    }

    fn sees(&self) -> Sees {
        if self.miss.is_some() { Sees::Events } else { Sees::Nothing }
    }

    fn on_head(&mut self, head: &mut AnswerHead) -> Result<Option<Rejection>, PluginError> {
        head.set(CACHE, HeaderValue::from_static("miss"));
        Ok(None)
    }

    fn held_bytes(&self) -> usize {
        self.miss.as_ref().map_or(0, |miss| miss.recorder.bytes())
    }

    fn on_event(&mut self, events: &mut Vec<ChatEvent>, end: bool) -> Result<Flow, PluginError> {
        let Some(miss) = &mut self.miss else { return Ok(Flow::Go) };
        miss.recorder.events(events);
        if !end {
            return Ok(Flow::Go);
        }
        let Some(Miss { key, host, mut recorder }) = self.miss.take() else { return Ok(Flow::Go) };
        let Some((kept, bytes)) = recorder.end() else { return Ok(Flow::Go) };
        match &self.config.memory {
            Some(memory) => {
                let now = host.since_epoch();
                memory.lock().unwrap_or_else(PoisonError::into_inner).put(key, kept, bytes, now);
            }
            None => {
                let Some(text) = written(&kept) else { return Ok(Flow::Go) };
                let (shared, keep) = (host.clone(), self.config.keep);
                // Written in the background; an answer that is not kept is asked for again.
                host.spawn(Box::pin(async move { drop(shared.cache_put(&key, Bytes::from(text), keep).await) }));
            }
        }
        Ok(Flow::Go)
    }
}

#[cfg(test)]
mod tests {
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::{FinishReason, Surface};
    use serde_json::json;

    use super::*;
    use crate::testing::text;

    fn ask(
        plugin: &Arc<dyn Plugin>,
        host: &Arc<FakeHost>,
        body: &Value,
        control: Option<&'static str>,
    ) -> (Verdict, Box<dyn Hooks>) {
        let mut context = request(Surface::Chat, body, host.clone());
        if let Some(control) = control {
            context.headers.insert("cache-control", HeaderValue::from_static(control));
        }
        let mut hooks = plugin.begin();
        (now(hooks.on_request(&mut context)).expect("no failure"), hooks)
    }

    fn answer(mut hooks: Box<dyn Hooks>, host: &Arc<FakeHost>) {
        assert_eq!(hooks.sees(), Sees::Events);
        hooks.on_event(&mut vec![text("hel")], false).expect("no failure");
        let finish = ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None };
        hooks.on_event(&mut vec![text("lo"), finish], true).expect("no failure");
        for work in host.spawned.lock().expect("a test").drain(..) {
            now(work);
        }
    }

    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn body(extra: Value) -> Value {
        let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
        body.as_object_mut().expect("a table").extend(extra.as_object().expect("a table").clone());
        body
    }

    fn is_hit(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Answer(answer) if answer.events[0] == text("hello") && answer.headers[0].1 == "hit")
    }

    fn check_store(settings: &Value) {
        let (plugin, host) = (build(&Cache, settings).expect("valid"), Arc::<FakeHost>::default());
        let (verdict, hooks) = ask(&plugin, &host, &body(json!({ "seed": 1, "top_p": 0.5 })), None);
        assert!(matches!(verdict, Verdict::Pass));
        answer(hooks, &host);
        let hits = |extra: Value, control| is_hit(&ask(&plugin, &host, &body(extra), control).0);
        assert!(hits(json!({ "top_p": 0.5, "seed": 1 }), None));
        assert!(hits(json!({ "top_p": 0.5, "seed": 1, "stream": true, "user": "u" }), None));
        assert!(!hits(json!({ "top_p": 0.5, "seed": 2 }), None));
        assert!(!hits(json!({ "top_p": 0.5, "seed": 1, "unknown": 1 }), None));
        assert!(!hits(json!({ "top_p": 0.5, "seed": 1 }), Some("no-cache")));
        assert_eq!(ask(&plugin, &host, &body(json!({})), Some("no-store")).1.sees(), Sees::Nothing);
    }

    #[test]
    fn the_same_question_has_the_same_answer() {
        check_store(&json!({}));
        check_store(&json!({ "store": "shared" }));
    }

    fn check_named(settings: &Value, names: &Value, expected: [bool; 2]) {
        let (plugin, host) = (build(&Cache, settings).expect("valid"), Arc::<FakeHost>::default());
        let asks = |tenant: &str| {
            let mut context = request(Surface::Responses, &json!({ "model": "m", "input": "go on" }), host.clone());
            context.info = Arc::new(penstock_plugins::RequestInfo { tenant: tenant.into(), ..(*context.info).clone() });
            // The double decodes a body as a gateway without a store does, so the names come behind.
            let mut body = json!({ "model": "m", "input": "go on" });
            body.as_object_mut().expect("a table").extend(names.as_object().expect("a table").clone());
            context.set_body(Bytes::from(body.to_string()));
            let mut hooks = plugin.begin();
            let verdict = now(hooks.on_request(&mut context)).expect("no failure");
            let is_hit = is_hit(&verdict);
            if hooks.sees() == Sees::Events {
                answer(hooks, &host);
            }
            is_hit
        };
        assert!(!asks("a"));
        assert_eq!([asks("a"), asks("b")], expected, "{settings} {names}");
    }

    #[test]
    fn what_is_kept_by_the_gateway_is_part_of_the_question() {
        let (own, all) = (json!({}), json!({ "share": "all" }));
        check_named(&own, &json!({}), [true, false]);
        check_named(&all, &json!({}), [true, true]);
        check_named(&own, &json!({ "conversation": null }), [true, false]);
        for conversation in [json!("conv_1"), json!({ "id": "conv_1" })] {
            check_named(&own, &json!({ "conversation": conversation }), [false, false]);
        }
        check_named(&all, &json!({ "previous_response_id": "resp_1" }), [true, false]);
    }

    #[test]
    fn a_dry_run_finds_answers_and_keeps_their_order() {
        let mut memory = Memory::new(1 << 20);
        for key in ["a", "b"] {
            memory.put(key.into(), vec![text(key)], 1, Duration::ZERO);
        }
        let found = memory.peek("a", Duration::from_secs(9), Duration::from_secs(10)).expect("is kept");
        assert_eq!((found.0[0].clone(), found.1), (text("a"), Duration::from_secs(9)));
        assert!(memory.peek("a", Duration::from_secs(10), Duration::from_secs(10)).is_none(), "is too old");
        assert_eq!(memory.order.values().collect::<Vec<_>>(), ["a", "b"], "no look counts, and nothing is removed");
    }

    #[test]
    fn answers_grow_old() {
        let (plugin, host) = (build(&Cache, &json!({ "ttl_seconds": 10 })).expect("valid"), Arc::<FakeHost>::default());
        answer(ask(&plugin, &host, &body(json!({})), None).1, &host);
        *host.now.lock().expect("a test") = Duration::from_secs(9);
        let (verdict, _) = ask(&plugin, &host, &body(json!({})), None);
        let Verdict::Answer(given) = &verdict else { panic!("{verdict:?}") };
        assert_eq!(given.headers[1], (AGE, HeaderValue::from(9)));
        *host.now.lock().expect("a test") = Duration::from_secs(10);
        assert!(matches!(ask(&plugin, &host, &body(json!({})), None).0, Verdict::Pass));
    }

    #[test]
    fn an_answer_that_broke_off_is_not_kept() {
        let (plugin, host) = (build(&Cache, &json!({})).expect("valid"), Arc::<FakeHost>::default());
        let (_, mut hooks) = ask(&plugin, &host, &body(json!({})), None);
        hooks.on_event(&mut vec![text("hel")], false).expect("no failure");
        drop(hooks);
        assert!(matches!(ask(&plugin, &host, &body(json!({})), None).0, Verdict::Pass));
    }

    #[test]
    fn memory_is_bounded_and_the_least_used_goes() {
        let mut memory = Memory::new(1000);
        let (at, keep) = (Duration::from_secs(1), Duration::from_secs(60));
        for name in ["a", "b", "c"] {
            memory.put(name.into(), vec![text(name)], 100, at);
        }
        assert!(memory.get("a", at, keep).is_some());
        memory.put("d".into(), Vec::new(), 400, at);
        assert!(memory.get("b", at, keep).is_none() && memory.get("a", at, keep).is_some());
        assert!(memory.bytes <= 1000 && memory.entries.len() == memory.order.len());
        memory.put("e".into(), Vec::new(), 4000, at);
        assert!(memory.get("e", at, keep).is_none() && memory.get("d", at, keep).is_some());
    }
}
