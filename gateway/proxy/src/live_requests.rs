//! Requests in flight: principal, model, start, progress, and a way to cancel each.
//!
//! ```text
//! begin ─▶ Entry (in the request's own task; its Drop takes the request off the list)
//!      ╰─▶ Cancelled (awaited beside the client; a one-shot, so looking at it takes no lock)
//! ```
//!
//! A request costs two short locks of one shard in sixteen, at its begin and its end. Tokens are two relaxed stores into the request's
//! own memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use penstock_auth::Principal;
use penstock_base::clock;
use penstock_http::cancel::{Cancelled, Ender};
use penstock_upstream::Facts;

/// Number of shards, a power of two: a request's shard is the low bits of its id.
const SHARDS: usize = 16;

/// Registry of the requests in flight, in 16 shards; the admin API lists and cancels them.
#[derive(Debug, Default)]
pub struct LiveRequests {
    last: AtomicU64,
    /// True once background requests are cancelled, also those that begin later, because the process ends.
    background_over: AtomicBool,
    shards: [Mutex<HashMap<u64, Arc<Live>>>; SHARDS],
}

/// Facts about a request that are known when it begins.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// Id in headers and logs. A client may choose it, so it need not be unique.
    pub request_id: String,
    /// Bounded name of the request's route.
    pub route: &'static str,
    /// Address of the client; `None`: a Unix socket, or nobody is connected.
    pub client: Option<String>,
    /// True where no client waits for the answer: a line of a batch, a response in the background.
    pub background: bool,
}

/// One request in flight, as the admin API lists it.
#[derive(Debug)]
pub struct Live {
    /// Id of the request, unique in this process.
    pub id: u64,
    /// Facts known at the begin: request id, route and client.
    pub about: About,
    /// Id of the API key; `None`: anonymous or a token's user.
    pub key: Option<String>,
    /// Id of the team of the key; `None`: no team.
    pub team: Option<String>,
    /// Person or service behind the key or token.
    pub user: Option<String>,
    /// Time of the request's begin, in Unix milliseconds.
    pub started_ms: u64,
    began: Instant,
    model: OnceLock<(String, bool)>,
    target: OnceLock<Arc<str>>,
    prompt_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    answering: AtomicBool,
    cancel: Mutex<Option<oneshot::Sender<Ender>>>,
}

impl Live {
    /// Model asked for; `None` until it is known.
    pub fn model(&self) -> Option<&str> {
        self.model.get().map(|(model, _)| model.as_str())
    }

    /// Whether the answer is streamed; `None` until it is known.
    pub fn stream(&self) -> Option<bool> {
        self.model.get().map(|(_, stream)| *stream)
    }

    /// Target that answers, where the model has several.
    pub fn target(&self) -> Option<&str> {
        self.target.get().map(|target| &**target)
    }

    /// Prompt tokens of the request, and output tokens so far.
    pub fn tokens(&self) -> (u64, u64) {
        (self.prompt_tokens.load(Ordering::Relaxed), self.completion_tokens.load(Ordering::Relaxed))
    }

    /// Returns true if the first event of the answer has come.
    pub fn is_answering(&self) -> bool {
        self.answering.load(Ordering::Relaxed)
    }

    /// Time since the request's begin, on the monotonic clock.
    pub fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Cancels the request; false if it was cancelled before.
    fn end(&self, by: Ender) -> bool {
        let sender = self.cancel.lock().unwrap_or_else(PoisonError::into_inner).take();
        sender.is_some_and(|sender| sender.send(by).is_ok())
    }
}

impl LiveRequests {
    /// Registers a request; the entry unregisters it on drop.
    pub fn begin(self: &Arc<Self>, about: About, principal: &Principal) -> (Entry, Cancelled) {
        let (cancel, cancelled) = oneshot::channel();
        let live = Arc::new(Live {
            id: self.last.fetch_add(1, Ordering::Relaxed) + 1,
            about,
            key: principal.key.clone(),
            team: principal.team.clone(),
            user: principal.user.clone(),
            started_ms: clock::since_epoch().as_millis() as u64,
            began: Instant::now(),
            model: OnceLock::new(),
            target: OnceLock::new(),
            prompt_tokens: AtomicU64::new(0),
            completion_tokens: AtomicU64::new(0),
            answering: AtomicBool::new(false),
            cancel: Mutex::new(Some(cancel)),
        });
        self.shard(live.id).insert(live.id, live.clone());
        // Looked at behind the insert: whoever is not listed yet when the others are cancelled sees the flag.
        if live.about.background && self.is_background_over() {
            live.end(Ender::Process);
        }
        (Entry { live, all: self.clone() }, Cancelled::by(cancelled))
    }

    /// All requests in flight over all shards, oldest first.
    pub fn list(&self) -> Vec<Arc<Live>> {
        let mut all = Vec::new();
        for at in 0..SHARDS {
            all.extend(self.shard(at as u64).values().cloned());
        }
        all.sort_unstable_by_key(|live| live.id);
        all
    }

    /// Request in flight with that id; `None`: it has ended.
    pub fn find(&self, id: u64) -> Option<Arc<Live>> {
        self.shard(id).get(&id).cloned()
    }

    /// Cancels the request of that id; false if there is none, or it was cancelled before.
    pub fn cancel(&self, id: u64) -> bool {
        self.find(id).is_some_and(|live| live.end(Ender::Operator))
    }

    /// Cancels all requests that a client waits for, because the process ends.
    pub(crate) fn stop(&self) {
        for live in self.list().iter().filter(|live| !live.about.background) {
            live.end(Ender::Process);
        }
    }

    /// Cancels all background requests, and from now on each that begins, because the process ends. Returns true if none
    /// is left: the reservations of all of them are settled then.
    pub(crate) fn stop_background(&self) -> bool {
        self.background_over.store(true, Ordering::SeqCst);
        let mut left = self.list();
        left.retain(|live| live.about.background);
        left.iter().for_each(|live| _ = live.end(Ender::Process));
        left.is_empty()
    }

    /// Returns true if background requests are cancelled because the process ends: their failures say nothing about them.
    pub(crate) fn is_background_over(&self) -> bool {
        self.background_over.load(Ordering::SeqCst)
    }

    fn shard(&self, id: u64) -> MutexGuard<'_, HashMap<u64, Arc<Live>>> {
        self.shards[id as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Registration of a request in the registry, held by its task; removed on drop.
#[derive(Debug)]
pub struct Entry {
    live: Arc<Live>,
    all: Arc<LiveRequests>,
}

impl Entry {
    /// Notes the model, and whether the answer is streamed.
    pub fn asks(&self, model: &str, stream: bool) {
        // Set once: a model router may look again, and the first name is the one that was asked for.
        let _ = self.live.model.set((model.to_owned(), stream));
    }

    /// Marks that the answer has begun; true on the first call.
    pub fn answers(&self) -> bool {
        !self.live.answering.load(Ordering::Relaxed) && !self.live.answering.swap(true, Ordering::Relaxed)
    }

    /// Notes the target that answers; without effect for `None`.
    pub fn answered_by(&self, target: Option<Arc<str>>) {
        target.into_iter().for_each(|target| _ = self.live.target.set(target));
    }

    /// Notes the token counts of the answer so far.
    pub fn progress(&self, facts: Facts) {
        self.live.prompt_tokens.store(facts.prompt_tokens, Ordering::Relaxed);
        self.live.completion_tokens.store(facts.completion_tokens, Ordering::Relaxed);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.all.shard(self.live.id).remove(&self.live.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(all: &Arc<LiveRequests>, id: &str) -> (Entry, Cancelled) {
        all.begin(
            About { request_id: id.into(), route: "/v1/chat/completions", ..About::default() },
            &Principal::default(),
        )
    }

    #[test]
    fn a_request_is_listed_while_it_lives() {
        let all = Arc::new(LiveRequests::default());
        let entries: Vec<_> = (0..40).map(|at| begin(&all, &format!("req_{at}"))).collect();
        let ids: Vec<u64> = all.list().iter().map(|live| live.id).collect();
        assert_eq!(ids, (1..=40).collect::<Vec<_>>(), "oldest first");
        entries[3].0.asks("m", true);
        entries[3].0.progress(Facts { prompt_tokens: 7, completion_tokens: 2, ..Facts::default() });
        assert!(entries[3].0.answers() && !entries[3].0.answers());
        entries[3].0.answered_by(Some("acme/m".into()));
        let live = all.find(4).expect("it lives");
        let seen = (live.model(), live.stream(), live.target(), live.tokens(), live.is_answering());
        assert_eq!(seen, (Some("m"), Some(true), Some("acme/m"), (7, 2), true));
        drop(entries);
        assert!(all.list().is_empty() && all.find(4).is_none() && !all.cancel(4));
    }

    #[tokio::test]
    async fn cancelling_reaches_the_request_once() {
        let all = Arc::new(LiveRequests::default());
        let ((entry, mut cancelled), (other, mut untouched)) = (begin(&all, "a"), begin(&all, "b"));
        assert!(all.cancel(1));
        assert!(!all.cancel(1), "told once");
        assert_eq!((&mut cancelled).await, Ender::Operator);
        tokio::select! {
            biased;
            _ = &mut cancelled => panic!("told twice"),
            _ = &mut untouched => panic!("another request was cancelled"),
            () = std::future::ready(()) => {}
        }
        drop((entry, other));
    }

    #[tokio::test]
    async fn at_the_end_of_the_process_those_who_wait_are_told() {
        let all = Arc::new(LiveRequests::default());
        let (waited_for, cancelled) = begin(&all, "a");
        let about = About { background: true, ..About::default() };
        let (background, mut untouched) = all.begin(about, &Principal::default());
        all.stop();
        all.stop();
        assert_eq!(cancelled.await, Ender::Process);
        tokio::select! {
            biased;
            _ = &mut untouched => panic!("what nobody waits for goes on elsewhere"),
            () = std::future::ready(()) => {}
        }
        drop((waited_for, background));
    }

    #[tokio::test]
    async fn at_the_end_of_the_process_background_requests_end_too() {
        let all = Arc::new(LiveRequests::default());
        let background = || {
            let about = About { background: true, ..About::default() };
            all.begin(about, &Principal::default())
        };
        let (running, cancelled) = background();
        let (waited_for, mut untouched) = begin(&all, "a");
        assert!(!all.is_background_over() && !all.stop_background(), "one is left");
        assert_eq!(cancelled.await, Ender::Process);
        drop(running);
        assert!(all.is_background_over() && all.stop_background());
        let (late, cancelled) = background();
        assert_eq!(cancelled.await, Ender::Process, "as it begins");
        drop(late);
        tokio::select! {
            biased;
            _ = &mut untouched => panic!("it is no background request"),
            () = std::future::ready(()) => {}
        }
        drop(waited_for);
    }

    #[test]
    fn many_threads_leave_nothing_behind() {
        let all = Arc::new(LiveRequests::default());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| drop(begin(&all, "x"))));
            }
            scope.spawn(|| (0..4000).for_each(|id| _ = all.cancel(id)));
        });
        assert!(all.list().is_empty());
    }
}
