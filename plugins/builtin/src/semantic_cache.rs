//! Plugin `semantic_cache`: repeats an answer where a similar request was answered before, by the similarity of the
//! person's last message.
//!
//! All else must be the same: earlier turns, instructions, tools, parameters, model, caller. Then the last message is
//! embedded (by any model of this gateway), and the nearest of the answers kept under the same circumstances is
//! repeated if its cosine reaches the threshold. Answers are kept in the memory of this process. An operator who uses
//! this accepts answers to questions that only look alike.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use http::HeaderValue;
use penstock_plugins::{
    AnswerHead, AskAs, Flow, Hooks, Host, HostError, Kind, Needs, Plugin, PluginError, Rejection, RequestContext, Sees,
    Settings, Verdict,
};
use penstock_types::{ChatEvent, ChatRequest, Request, Role};

use crate::cache::{CACHE, Share, hit, share, wishes};
use crate::recorder::Recorder;

/// Plugin kind `semantic_cache`: builds plugins that repeat the answers to similar requests.
pub(crate) struct SemanticCache;

struct Config {
    model: String,
    ask_as: AskAs,
    threshold: f32,
    keep: Duration,
    entry_bytes_max: usize,
    share: Share,
    memory: Mutex<Memory>,
}

impl Kind for SemanticCache {
    fn name(&self) -> &'static str {
        "semantic_cache"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let memory = Memory {
            places: HashMap::new(),
            order: VecDeque::new(),
            bytes: 0,
            bytes_max: settings.number("bytes_max", 1024..=1 << 40, 64 << 20) as usize,
            candidates_max: settings.number("candidates_max", 1..=100_000, 1000) as usize,
        };
        let config = Config {
            threshold: settings.decimal("threshold", 0.0..=1.0, 0.95) as f32,
            keep: Duration::from_secs(settings.number("ttl_seconds", 1..=31_536_000, 3600)),
            entry_bytes_max: settings.number("entry_bytes_max", 256..=8 << 20, 1 << 20) as usize,
            share: share(settings),
            ask_as: crate::ask_as(settings),
            memory: Mutex::new(memory),
            model: settings.needed_text("model")?,
        };
        Some(Arc::new(Cached(Arc::new(config))))
    }
}

/// Answers by their circumstances, evicted oldest first.
struct Memory {
    places: HashMap<[u8; 32], VecDeque<Kept>>,
    /// Circumstances of each answer, the oldest first.
    order: VecDeque<[u8; 32]>,
    bytes: usize,
    bytes_max: usize,
    /// Most answers under one set of circumstances: each is compared.
    candidates_max: usize,
}

struct Kept {
    /// Embedding of the last message, normalized to length 1, so that a dot product is the cosine.
    vector: Vec<f32>,
    events: Arc<Vec<ChatEvent>>,
    bytes: usize,
    made: Duration,
}

impl Memory {
    fn nearest(&self, place: &[u8; 32], vector: &[f32], oldest: Duration) -> Option<(f32, &Kept)> {
        let kept =
            self.places.get(place)?.iter().filter(|kept| kept.made > oldest && kept.vector.len() == vector.len());
        let near = kept.map(|kept| (kept.vector.iter().zip(vector).map(|(a, b)| a * b).sum::<f32>(), kept));
        near.max_by(|(one, _), (other, _)| one.total_cmp(other))
    }

    fn put(&mut self, place: [u8; 32], kept: Kept) {
        if kept.bytes > self.bytes_max {
            return;
        }
        while self.bytes + kept.bytes > self.bytes_max {
            let Some(oldest) = self.order.pop_front() else { break };
            self.forget(&oldest);
        }
        self.bytes += kept.bytes;
        self.order.push_back(place);
        let candidates = self.places.entry(place).or_default();
        candidates.push_back(kept);
        if candidates.len() > self.candidates_max {
            self.forget(&place);
            if let Some(at) = self.order.iter().position(|have| *have == place) {
                self.order.remove(at);
            }
        }
    }

    /// Drops the oldest answer that was kept under these circumstances.
    fn forget(&mut self, place: &[u8; 32]) {
        let Some(candidates) = self.places.get_mut(place) else { return };
        if let Some(oldest) = candidates.pop_front() {
            self.bytes -= oldest.bytes;
        }
        if candidates.is_empty() {
            self.places.remove(place);
        }
    }
}

/// Scales a vector to length 1; `None`: its length is 0 or not finite.
fn normal(mut vector: Vec<f32>) -> Option<Vec<f32>> {
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    (length.is_finite() && length > 0.0).then(|| {
        vector.iter_mut().for_each(|value| *value /= length);
        vector
    })
}

/// Last message of the person, and a digest of all else: the circumstances.
fn split(chat: &ChatRequest, request: &RequestContext, share: Share) -> Option<(String, [u8; 32])> {
    // Unknown fields may change the answer in any way.
    if !chat.ignored.is_empty() || chat.logprobs.is_some() || chat.prompt_logprobs.is_some() {
        return None;
    }
    let last = chat.messages.last().filter(|last| last.role == Role::User && last.parts.is_empty())?;
    let text = last.content.clone().filter(|text| !text.trim().is_empty())?;
    let mut rest = chat.clone();
    rest.messages.pop();
    (rest.stream, rest.user, rest.cache_salt, rest.priority) = (None, None, None, 0);
    rest.model.clone_from(&request.model);
    let circumstances = format!("{} {} {rest:?}", request.info.route, share.tenant(request));
    Some((text, *blake3::hash(circumstances.as_bytes()).as_bytes()))
}

struct Cached(Arc<Config>);

impl Plugin for Cached {
    fn needs(&self) -> Needs {
        Needs::Request
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
    miss: Option<Miss>,
}

struct Miss {
    place: [u8; 32],
    vector: Vec<f32>,
    host: Arc<dyn Host>,
    recorder: Recorder,
}

#[async_trait]
impl Hooks for Caching {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        let config = self.config.clone();
        if request.info.partial {
            // The turns before the message are not known, so nothing tells whether they are the same.
            return Ok(Verdict::Pass);
        }
        let (looks, keeps) = wishes(request);
        let Request::Chat(chat) = request.request()? else { return Ok(Verdict::Pass) };
        let Some((text, place)) = split(chat, request, config.share).filter(|_| looks || keeps) else {
            return Ok(Verdict::Pass);
        };
        let host = request.host.clone();
        let vectors = match host.embed(&config.model, vec![text], config.ask_as).await {
            // The limit is of the cache's own question; without the cache the request needs no answer to it.
            Err(HostError::Limited(_)) => return Ok(Verdict::Pass),
            vectors => vectors?,
        };
        let vector = vectors.into_iter().next().and_then(normal);
        let vector = vector.ok_or_else(|| PluginError::new("the model's vector has no length"))?;
        if looks {
            let oldest = host.since_epoch().saturating_sub(config.keep);
            let memory = config.memory.lock().unwrap_or_else(PoisonError::into_inner);
            let near = memory.nearest(&place, &vector, oldest);
            if let Some((_, kept)) = near.filter(|(likeness, _)| *likeness >= config.threshold) {
                let age = host.since_epoch().saturating_sub(kept.made);
                return Ok(hit(kept.events.as_ref().clone(), Some(age)));
            }
        }
        let recorder = Recorder::new(config.entry_bytes_max, config.share.has_others(request));
        self.miss = keeps.then_some(Miss { place, vector, host, recorder });
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
        if end
            && let Some(Miss { place, vector, host, mut recorder }) = self.miss.take()
            && let Some((events, bytes)) = recorder.end()
        {
            let bytes = bytes + 4 * vector.len() + 256;
            let kept = Kept { vector, events: Arc::new(events), bytes, made: host.since_epoch() };
            self.config.memory.lock().unwrap_or_else(PoisonError::into_inner).put(place, kept);
        }
        Ok(Flow::Go)
    }
}

#[cfg(test)]
mod tests {
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::{FinishReason, Surface};
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::text;

    fn host() -> Arc<FakeHost> {
        let vectors = [
            ("capital of France?", [1.0, 0.1]),
            ("France's capital?", [1.0, 0.12]),
            ("weather?", [0.0, 1.0]),
            ("zero", [0.0, 0.0]),
        ];
        let vectors = vectors.into_iter().map(|(text, vector)| (text.to_owned(), vector.to_vec())).collect();
        let host = FakeHost { vectors, ..FakeHost::default() };
        *host.now.lock().expect("a test") = Duration::from_secs(100_000);
        Arc::new(host)
    }

    #[expect(clippy::needless_pass_by_value, reason = "reads as data")]
    fn ask(plugin: &Arc<dyn Plugin>, host: &Arc<FakeHost>, said: &str, extra: Value) -> Result<Verdict, PluginError> {
        let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": said }] });
        body.as_object_mut().expect("a table").extend(extra.as_object().expect("a table").clone());
        let mut hooks = plugin.begin();
        let verdict = now(hooks.on_request(&mut request(Surface::Chat, &body, host.clone())))?;
        if matches!(verdict, Verdict::Pass) && hooks.sees() == Sees::Events {
            let finish = ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None };
            hooks.on_event(&mut vec![text(said), finish], true)?;
        }
        Ok(verdict)
    }

    fn given(verdict: &Verdict) -> Option<&ChatEvent> {
        match verdict {
            Verdict::Answer(answer) => answer.events.first(),
            _ => None,
        }
    }

    #[test]
    fn what_looks_alike_is_answered_alike() {
        let (plugin, host) = (build(&SemanticCache, &json!({ "model": "e" })).expect("valid"), host());
        let asked = |said: &str, extra: Value| ask(&plugin, &host, said, extra).expect("no failure");
        assert!(given(&asked("capital of France?", json!({}))).is_none());
        assert_eq!(given(&asked("France's capital?", json!({ "stream": true }))), Some(&text("capital of France?")));
        assert!(given(&asked("weather?", json!({}))).is_none());
        assert!(given(&asked("France's capital?", json!({ "temperature": 1 }))).is_none(), "all else must be the same");
        *host.now.lock().expect("a test") += Duration::from_secs(3601);
        assert!(given(&asked("France's capital?", json!({}))).is_none(), "and not too long ago");
        assert!(ask(&plugin, &host, "zero", json!({})).is_err());
        assert!(ask(&plugin, &host, "who knows", json!({})).is_err());
    }

    #[test]
    fn a_request_goes_on_where_a_limit_refuses_the_vector() {
        let (plugin, mut host) = (build(&SemanticCache, &json!({ "model": "e" })).expect("valid"), host());
        Arc::get_mut(&mut host).expect("the only one").limited = true;
        let verdict = ask(&plugin, &host, "capital of France?", json!({}));
        assert!(matches!(verdict, Ok(Verdict::Pass)), "{verdict:?}");
    }

    #[test]
    fn memory_is_bounded() {
        let mut memory =
            Memory { places: HashMap::new(), order: VecDeque::new(), bytes: 0, bytes_max: 1000, candidates_max: 3 };
        let kept = || Kept { vector: vec![1.0], events: Arc::default(), bytes: 200, made: Duration::from_secs(1) };
        for place in 0..4u8 {
            for _ in 0..5 {
                memory.put([place % 2; 32], kept());
                let held: usize = memory.places.values().map(VecDeque::len).sum();
                assert!(memory.bytes <= 1000 && memory.bytes == held * 200 && memory.order.len() == held);
                assert!(memory.places.values().all(|candidates| candidates.len() <= 3));
            }
        }
        memory.put([9; 32], Kept { bytes: 2000, ..kept() });
        assert!(!memory.places.contains_key(&[9; 32]));
    }
}
