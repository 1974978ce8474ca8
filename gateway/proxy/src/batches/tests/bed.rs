//! Gateway with a store and an upstream whose behavior each line's body chooses, for tests of batches.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use async_trait::async_trait;
use bytes::Bytes;
use penstock_proto::ErrorKind;
use penstock_store::{
    BatchRecord, CHUNK_BYTES_MAX, FileId, NewBatch, NewFile, ResponseId, ResponseRecord, ResponseStatus, Sqlite,
    SqliteOptions, Store, Tenant,
};
use penstock_types::{ChatEvent, DetokenizeRequest, FinishReason, TokenizeRequest};
use tokio::sync::Semaphore;

use super::super::*;
use crate::Failure;
use penstock_config::Overrides;
use penstock_kv_feed::Feed;
use penstock_telemetry::{AccessLog, Gauge};
use penstock_upstream::Forward;
use penstock_upstream::Forwarded;
use penstock_upstream::call::Call;
use penstock_upstream::{Card, Course, Events, Facts, Origin, Prepared, Upstream, not_forwarded};

/// Upstream for bodies `{"model":"m","do":"ok"}`: `ok` answers, `bad` refuses, `flaky` fails once, `later` asks for an hour's
/// pause, `panic`, `hang`; `gate` answers when the test lets it; `sign` answers with the signature of the text `thought`, or without one;
/// `large` answers with more than the smallest memory for answers holds, as a provider's model, `large pool` as a pool.
pub(super) struct Script {
    pub(super) opened: AtomicUsize,
    /// Permits of calls that wait at the gate.
    pub(super) gate: Semaphore,
    /// Calls that hang now.
    pub(super) hanging: AtomicUsize,
    seen: Mutex<HashMap<Bytes, u32>>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            opened: AtomicUsize::new(0),
            gate: Semaphore::new(0),
            hanging: AtomicUsize::new(0),
            seen: Mutex::default(),
        }
    }
}

#[async_trait]
impl Upstream for Script {
    fn card(&self) -> Card {
        Card { id: "m".into(), created: 0, context_tokens: 0, task: None, parent: None }
    }

    fn unready(&self) -> Option<String> {
        None
    }

    async fn open(&self, call: Arc<Call>, _: Origin) -> Result<Box<dyn Events>, Failure> {
        assert!(call.background, "live requests go first");
        self.opened.fetch_add(1, Ordering::SeqCst);
        let text = String::from_utf8_lossy(&call.body).into_owned();
        let times = {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let times = seen.entry(call.body.clone()).or_default();
            *times += 1;
            *times
        };
        if text.contains("bad") {
            return Err(Failure::new(ErrorKind::InvalidRequest, "It is bad.").param("do"));
        }
        if text.contains("later") {
            return Err(Failure::new(ErrorKind::Overloaded, "Not now.").retry_after(Duration::from_secs(3600)));
        }
        if text.contains("flaky") && times == 1 {
            return Err(Failure::new(ErrorKind::Overloaded, "Not now."));
        }
        assert!(!text.contains("panic"), "as asked");
        if text.contains("hang") {
            let _hanging = Hanging::new(&self.hanging);
            std::future::pending::<()>().await;
        }
        if text.contains("gate") {
            self.gate.acquire().await.expect("never closed").forget();
        }
        if text.contains("sign") {
            let signed = call.signer.as_ref().map(|signer| {
                let mut signing = signer.begin("m");
                signing.add("thought");
                signing.end()
            });
            let answer = serde_json::json!({ "signature": signed });
            return Ok(Box::new(Once(vec![ChatEvent::Raw(answer.to_string().into())], Course::default())));
        }
        if text.contains("large") {
            call.decoded().await?;
            let course = if text.contains("pool") {
                Course { worker: Some("w".into()), ..Course::default() }
            } else {
                Course { target: Some("one/m".into()), ..Course::default() }
            };
            let text = "x".repeat(40 << 20);
            let said = ChatEvent::Text { choice: 0, text, logprobs: Vec::new(), tokens: Vec::new() };
            let finish = ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None };
            return Ok(Box::new(Once(vec![said, finish], course)));
        }
        Ok(Box::new(Once(vec![ChatEvent::Raw(call.body.clone())], Course::default())))
    }

    async fn count(&self, _: Arc<Call>) -> Result<Option<u64>, Failure> {
        Ok(None)
    }

    async fn measure(self: Arc<Self>, _: &Call) -> Result<Prepared, Failure> {
        Ok(Prepared::default())
    }

    async fn forward(&self, _: Arc<Forward>) -> Result<Forwarded, Failure> {
        Err(not_forwarded())
    }

    async fn tokenize(&self, _: TokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(Failure::new(ErrorKind::Unsupported, "no"))
    }

    async fn detokenize(&self, _: DetokenizeRequest) -> Result<Vec<u8>, Failure> {
        Err(Failure::new(ErrorKind::Unsupported, "no"))
    }

    fn feed(&self) -> Option<Arc<Feed>> {
        None
    }

    fn gauges(&self, _: &mut dyn FnMut(Gauge, f64)) {}
}

/// Guard of a call that hangs: dropped when the call is cancelled.
struct Hanging<'a>(&'a AtomicUsize);

impl<'a> Hanging<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Events of an answer that comes at once.
struct Once(Vec<ChatEvent>, Course);

impl Events for Once {
    fn poll_events(&mut self, _: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        out.append(&mut self.0);
        Poll::Ready(Ok(false))
    }

    fn facts(&self) -> Facts {
        Facts::default()
    }

    fn course(&self) -> Course {
        self.1.clone()
    }
}

pub(super) struct Bed {
    pub(super) gateway: Arc<Gateway>,
    pub(super) store: Arc<dyn Store>,
    pub(super) script: Arc<Script>,
    pub(super) runner: tokio::task::JoinHandle<()>,
    /// Renewal of the claims on what runs.
    pub(super) renewal: tokio::task::JoinHandle<()>,
}

impl Bed {
    pub(super) fn new(store: Arc<dyn Store>, config: &str) -> Self {
        let config = penstock_config::load(Some(("test", config)), &Overrides::default(), &|name| {
            Some(format!("the secret {name}"))
        });
        let script = Arc::new(Script::default());
        let upstreams: Vec<Arc<dyn Upstream>> = vec![script.clone()];
        let gateway = Gateway::new(
            config.expect("a config"),
            AccessLog::open("off").expect("nothing is opened"),
            upstreams,
            Vec::new(),
        )
        .with_store(store.clone())
        .shared();
        let runner = tokio::spawn(run(gateway.clone()));
        let renewal = renewal(&gateway);
        Self { gateway, store, script, runner, renewal }
    }

    pub(super) async fn batch(&self, tenant: &Tenant, file: &str, expires: u64) -> BatchId {
        let input = put(self.store.as_ref(), tenant, file).await;
        let new = new_batch(input, expires);
        let made = self.store.create_batch(tenant, new).await.expect("made").expect("the file is there");
        self.gateway.keeper().expect("a store").wake.notify_one();
        made.id
    }

    /// Waits until the batch satisfies `what`.
    pub(super) async fn until(
        &self,
        tenant: &Tenant,
        id: &BatchId,
        what: impl Fn(&BatchRecord) -> bool,
    ) -> BatchRecord {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let batch = self.store.batch(tenant, id).await.expect("read").expect("there");
            if what(&batch) {
                return batch;
            }
            assert!(Instant::now() < deadline, "{batch:?}");
            // Polls the store; nothing tells a test that something was written.
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until the store has refused a write, as it does with a result that has no room.
    pub(super) async fn refuses(&self, before: u64) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.store.stats().errors <= before {
            assert!(Instant::now() < deadline, "nothing was refused");
            sleep(Duration::from_millis(5)).await;
        }
    }

    pub(super) async fn ended(&self, tenant: &Tenant, id: &BatchId) -> BatchRecord {
        self.until(tenant, id, |batch| batch.status.is_end()).await
    }

    /// Waits until so many calls were made.
    pub(super) async fn opened(&self, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.script.opened.load(Ordering::SeqCst) < count {
            assert!(Instant::now() < deadline, "{} calls", self.script.opened.load(Ordering::SeqCst));
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until so many calls hang.
    pub(super) async fn hangs(&self, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.script.hanging.load(Ordering::SeqCst) != count {
            assert!(Instant::now() < deadline, "{} calls hang", self.script.hanging.load(Ordering::SeqCst));
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until a runner has ended, as it does when another process serves and nothing runs in this one.
    pub(super) async fn rests(runner: &mut tokio::task::JoinHandle<()>) {
        tokio::time::timeout(Duration::from_secs(60), runner).await.expect("in time").expect("no panic");
    }

    pub(super) async fn lines(&self, tenant: &Tenant, id: Option<&FileId>) -> Vec<String> {
        let Some(id) = id else { return Vec::new() };
        let record = self.store.file(tenant, id).await.expect("read").expect("there");
        let bytes = self.store.read(tenant, id, 0..record.bytes).await.expect("read").expect("there");
        String::from_utf8(bytes.to_vec()).expect("text").lines().map(str::to_owned).collect()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.runner.abort();
        self.renewal.abort();
    }
}

pub(super) fn renewal(gateway: &Arc<Gateway>) -> tokio::task::JoinHandle<()> {
    let gateway = gateway.clone();
    tokio::spawn(async move { keep_claims(&gateway).await })
}

pub(super) fn memory() -> Arc<dyn Store> {
    Arc::new(Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("opens"))
}

/// A database without room for more than a few thousand results.
pub(super) fn small() -> Arc<dyn Store> {
    Arc::new(Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 4 << 20 }).expect("opens"))
}

/// Fills a bounded store up with one file, so that no result has room until the file is deleted.
pub(super) async fn fill(store: &dyn Store) -> FileId {
    let new = NewFile {
        purpose: "batch".into(),
        name: "filler".into(),
        bytes: 8 << 20,
        created: unix_seconds(),
        expires: None,
        tenant_bytes_max: u64::MAX,
        tenant_files_max: 100,
    };
    let id = store.begin_file(&filler(), new).await.expect("begun");
    let piece = Bytes::from(vec![b'x'; 3000]);
    for at in (0..).step_by(piece.len()) {
        match store.append(&filler(), &id, at, piece.clone()).await {
            Ok(()) => {}
            Err(StoreError::Full) => return id,
            Err(error) => panic!("{error}"),
        }
    }
    unreachable!("the store is bounded")
}

/// Owner of the file that fills a store.
pub(super) fn filler() -> Tenant {
    Tenant::new("filler")
}

pub(super) fn new_batch(input: FileId, expires: u64) -> NewBatch {
    NewBatch {
        endpoint: "/v1/chat/completions".into(),
        input,
        window: "24h".into(),
        expires,
        metadata: String::new(),
        output_expires_after: None,
        created: unix_seconds(),
        tenant_open_max: 100,
        tenant_batches_max: 1000,
        tenant_output_bytes_max: 1 << 30,
    }
}

pub(super) async fn put(store: &dyn Store, tenant: &Tenant, text: &str) -> FileId {
    let new = NewFile {
        purpose: "batch".into(),
        name: "a.jsonl".into(),
        bytes: text.len() as u64,
        created: unix_seconds(),
        expires: None,
        tenant_bytes_max: u64::MAX,
        tenant_files_max: 100,
    };
    let id = store.begin_file(tenant, new).await.expect("begun");
    for (at, piece) in text.as_bytes().chunks(CHUNK_BYTES_MAX).enumerate() {
        let at = (at * CHUNK_BYTES_MAX) as u64;
        store.append(tenant, &id, at, Bytes::copy_from_slice(piece)).await.expect("appended");
    }
    store.seal(tenant, &id).await.expect("sealed");
    id
}

pub(super) fn file(what: &[&str]) -> String {
    let line = |(at, what): (usize, &&str)| {
        let body = format!(r#"{{"model":"m","do":"{what}","at":{at}}}"#);
        format!(r#"{{"custom_id":"c{at}","method":"POST","url":"/v1/chat/completions","body":{body}}}"#)
    };
    what.iter().enumerate().map(|line_of| line(line_of) + "\n").collect()
}

/// A response that waits in the background, with this request.
pub(super) fn queued_response(request: &str) -> ResponseRecord {
    ResponseRecord {
        id: ResponseId::random(),
        status: ResponseStatus::Queued,
        previous: None,
        created: unix_seconds(),
        expires: tomorrow(),
        body: "{}".into(),
        input: "[]".into(),
        output: "[]".into(),
        request: request.to_owned().into(),
        event_bytes: 0,
    }
}

pub(super) fn tomorrow() -> u64 {
    unix_seconds() + 86_400
}

pub(super) fn nobody() -> Tenant {
    Tenant::new("")
}
