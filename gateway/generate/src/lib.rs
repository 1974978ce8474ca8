//! Our own pools as an upstream: a request becomes tokens, tokens become events.
//!
//! Prompts are made here once (template, tokenizer), long ones off the I/O threads. The pool gets token ids, and its
//! outputs go through one decoder per choice. A request with several prompts is several jobs of the pool under one
//! answer, a few at a time.
#![forbid(unsafe_code)]

mod echo;
pub mod events;
mod gauges;
mod guided;
mod plan;
mod reasoning;
mod salt;
mod signed_reasoning;
mod truncate;
mod unable;
mod unbuilt;
mod vectors;
mod wave;
mod words;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use penstock_proto::{AdapterId, ErrorKind};
use penstock_text::TextModel;
use penstock_types::{ApiError, Request};
use penstock_types::{DetokenizeRequest, TokenizeInput, TokenizeRequest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use events::{PoolEvents, Source};
use guided::Draft;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;
use penstock_kv_feed::Feed;
use penstock_pool::{Guided, Pool, PoolError, WorkerPhase};
use penstock_telemetry::Gauge;
use penstock_upstream::Forward;
use penstock_upstream::Forwarded;
use penstock_upstream::call::Call;
use penstock_upstream::{Card, Events, Measured, Open, Origin, Prepared, Upstream, not_forwarded};
pub(crate) use plan::Plan;
use signed_reasoning::SignedEvents;
use vectors::{InputEvents, InputPlan};

/// Size of a text above which it is tokenized on the blocking pool: about 2 ms of one core.
const INLINE_TEXT_BYTES_MAX: usize = 8 * 1024;

/// Longest wait for a permit to tokenize: a waiting request stays in memory.
const PERMIT_WAIT_MAX: Duration = Duration::from_secs(10);

/// Rules of a pool about its answers, from the config.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerRules {
    /// True if every call that has begun follows the schema of its tool, not only those of tools with `strict`.
    pub holds_calls: bool,
    /// True if earlier reasoning that is not this model's own is left out instead of refused.
    pub drops_foreign_reasoning: bool,
    /// True if JSON has one blank behind each comma and colon, false if it has none.
    pub spaces_json: bool,
}

/// Upstream of one model that a pool of ours serves.
pub struct PoolUpstream {
    id: String,
    created: u64,
    text: Arc<TextModel>,
    pool: Pool,
    rules: AnswerRules,
    /// Grammars that answers were held to.
    library: Arc<guided::Library>,
    /// Upstream of the model alone, where this one answers with an adapter of the name `id`. Held, so that the pool does not end
    /// while requests can reach it by the adapter's name.
    base: Option<Arc<Self>>,
    /// Permits to tokenize, which bound the tokenizing that runs at once; a request that waits for one ends when its
    /// client leaves.
    tokenizing: Arc<Semaphore>,
}

impl PoolUpstream {
    /// Upstream that serves `pool` under the name `id`.
    pub fn new(id: String, text: Arc<TextModel>, pool: Pool, rules: AnswerRules) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            id,
            created: unix_seconds(),
            text,
            pool,
            rules,
            library: Arc::default(),
            base: None,
            tokenizing: Arc::new(Semaphore::new(cores)),
        }
    }

    /// Upstream of the same pool that runs the model with the adapter `name`, under that name.
    #[must_use]
    pub fn adapted(self: &Arc<Self>, name: String) -> Self {
        Self {
            id: name,
            created: self.created,
            text: Arc::clone(&self.text),
            pool: self.pool.clone(),
            rules: self.rules,
            library: Arc::clone(&self.library),
            base: Some(Arc::clone(self)),
            tokenizing: Arc::clone(&self.tokenizing),
        }
    }

    /// Adapter that a request runs with, as the workers have it now; `None`: the model alone.
    fn adapter(&self) -> Result<Option<AdapterId>, Failure> {
        if self.base.is_none() {
            return Ok(None);
        }
        self.pool.adapter(&self.id).map(Some).ok_or_else(unable::lacks_adapter)
    }

    /// Runs `work` on this thread if it is small, else on the blocking pool.
    async fn off_io<T: Send + 'static>(
        &self,
        text_bytes: usize,
        work: impl FnOnce(&TextModel) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        if text_bytes <= INLINE_TEXT_BYTES_MAX {
            return work(&self.text);
        }
        let permit = permit(&self.tokenizing, PERMIT_WAIT_MAX).await?;
        let text = self.text.clone();
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&text)
        });
        task.await.map_err(|error| Failure::internal(format!("tokenizing: {error}")))?
    }

    /// Work of a call: prompts as tokens, sampling, options.
    async fn plan(&self, call: &Call) -> Result<Work, Failure> {
        let mut known = self.pool.model();
        if known.is_none() && !self.pool.is_on_demand() {
            let why = self.unready().unwrap_or_default();
            let failure = Failure::new(ErrorKind::Unavailable, format!("The model is not ready yet ({why})."));
            return Err(failure.retry_after(Duration::from_secs(1)));
        }
        let decoded = call.decoded().await?;
        unbuilt::check(&decoded.request, call.ask.surface, self.text.task())?;
        let model = match known.take() {
            Some(model) => model,
            // Loaded for a request that can be read, not for garbage.
            None => self.pool.wake().await.map_err(|error| refused(&error))?,
        };
        // Refused before any work; looked up once more after it, since content may be replaced meanwhile.
        self.adapter()?;
        penstock_types::check_token_ids(&decoded.request, model.vocab_size)?;
        let bytes = text_bytes(&decoded.request);
        if matches!(decoded.request, Request::Embed(_) | Request::Rerank(_)) {
            let made = self.off_io(bytes, move |text| InputPlan::new(&decoded.request, text, model.context_tokens));
            let mut plan = made.await?;
            plan.adapter = self.adapter()?;
            return self.able(plan).map(Work::Inputs);
        }
        let (surface, rules, signer, id) = (call.ask.surface, self.rules, call.signer.clone(), self.id.clone());
        let made = self.off_io(bytes, move |text| {
            let request =
                signed_reasoning::trusted(&decoded.request, signer.as_ref(), &id, rules.drops_foreign_reasoning)?;
            Plan::new(&request, text, model.context_tokens, surface, rules)
        });
        let mut plan = made.await?;
        if let Some(draft) = plan.draft.take() {
            plan.guided = Some(self.guided(draft, model.vocab_size).await?);
        }
        plan.adapter = self.adapter()?;
        plan.fit(&|needs| self.pool.meets(needs))?;
        Ok(Work::Answer(Box::new(plan)))
    }

    /// Refuses a plan that no worker can compute.
    fn able(&self, plan: InputPlan) -> Result<InputPlan, Failure> {
        let needs = plan.needs();
        if self.pool.meets(&needs) {
            return Ok(plan);
        }
        let message = "No worker of this model can make vectors or scores at present.";
        let log = format!("no ready worker announces {needs:?}: are all of them of this version?");
        Err(Failure::new(ErrorKind::Unavailable, message).log(log))
    }

    /// Compiles the grammar of an answer on the blocking pool, where it was not compiled before.
    async fn guided(&self, draft: Draft, rows: u32) -> Result<Arc<Guided>, Failure> {
        let guided = if self.library.knows(&draft) {
            self.library.compile(draft, &self.text, rows)?
        } else {
            let permit = permit(&self.tokenizing, PERMIT_WAIT_MAX).await?;
            let (library, text) = (self.library.clone(), self.text.clone());
            let task = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                library.compile(draft, &text, rows)
            });
            task.await.map_err(|error| Failure::internal(format!("compiling a grammar: {error}")))??
        };
        Ok(Arc::new(guided))
    }

    fn start(&self, work: Work, call: &Call, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        let source = Source { pool: self.pool.clone(), model: self.id.clone(), origin };
        let mut plan = match work {
            Work::Answer(plan) => plan,
            Work::Inputs(mut inputs) => {
                if call.background {
                    inputs.step_back();
                }
                return Ok(Box::new(InputEvents::start(inputs, source)?));
            }
        };
        if call.background {
            plan.step_back();
        }
        let events = Box::new(PoolEvents::start(*plan, source, self.text.clone())?);
        Ok(match call.signer.clone() {
            Some(signer) => Box::new(SignedEvents::new(events, signer, self.id.clone())),
            None => events,
        })
    }

    fn context_tokens(&self) -> u32 {
        self.pool.model().map_or(0, |model| model.context_tokens)
    }
}

/// Work of a call to a pool, whose prompts are tokenized and checked.
enum Work {
    /// An answer in text.
    Answer(Box<Plan>),
    /// Vectors or scores of inputs.
    Inputs(InputPlan),
}

impl Work {
    /// Prompt tokens, and the upper bound of output tokens.
    fn measured(&self) -> Measured {
        match self {
            Work::Answer(plan) => plan.measured(),
            Work::Inputs(plan) => plan.measured(),
        }
    }
}

/// Call to a pool whose prompts are tokenized and checked already.
struct Planned {
    upstream: Arc<PoolUpstream>,
    plan: Work,
}

#[async_trait]
impl Open for Planned {
    async fn open(self: Box<Self>, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        self.upstream.start(self.plan, &call, origin)
    }
}

#[async_trait]
impl Upstream for PoolUpstream {
    fn card(&self) -> Card {
        let (id, task) = (self.id.clone(), Some(self.text.task().name()));
        let parent = self.base.as_ref().map(|base| base.id.clone());
        Card { id, created: self.created, context_tokens: self.context_tokens(), task, parent }
    }

    fn unready(&self) -> Option<String> {
        let status = self.pool.status();
        if status.takes_requests() {
            return None;
        }
        let told = status.workers.iter().map(|worker| (worker, &worker.phase)).map(|(worker, phase)| match phase {
            WorkerPhase::Loading { stage, bytes_done, bytes_total } if *bytes_total > 0 => {
                format!("{stage}, {} %", bytes_done.saturating_mul(100) / bytes_total)
            }
            WorkerPhase::Loading { stage, .. } => stage.clone(),
            WorkerPhase::Starting => "starting".into(),
            WorkerPhase::Draining => "draining".into(),
            WorkerPhase::Suspected => "silent".into(),
            WorkerPhase::Down { .. } => worker.ended.as_ref().map_or("down".into(), |how| format!("down: {how}")),
            WorkerPhase::Stopped => "stopped".into(),
            WorkerPhase::Ready => "ready".into(),
        });
        Some(told.collect::<Vec<_>>().join(", "))
    }

    fn is_loaded(&self) -> bool {
        self.pool.status().is_ready()
    }

    async fn open(&self, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        let plan = self.plan(&call).await?;
        self.start(plan, &call, origin)
    }

    async fn measure(self: Arc<Self>, call: &Call) -> Result<Prepared, Failure> {
        let plan = self.plan(call).await?;
        Ok(Prepared { measured: Some(plan.measured()), opener: Some(Box::new(Planned { upstream: self, plan })) })
    }

    async fn count(&self, call: Arc<Call>) -> Result<Option<u64>, Failure> {
        let decoded = call.decoded().await?;
        unbuilt::check(&decoded.request, call.ask.surface, self.text.task())?;
        let Request::Chat(chat) = &decoded.request else { return Ok(None) };
        let bytes = plan::chat_bytes(chat);
        // Before the first worker has said how long the context is, nothing is cut.
        let context = Some(self.context_tokens()).filter(|tokens| *tokens > 0).unwrap_or(u32::MAX);
        let (signer, id, drops) = (call.signer.clone(), self.id.clone(), self.rules.drops_foreign_reasoning);
        let surface = call.ask.surface;
        let counted = self.off_io(bytes, move |text| {
            let request = signed_reasoning::trusted(&decoded.request, signer.as_ref(), &id, drops)?;
            let Request::Chat(chat) = request.as_ref() else { return Ok(0) };
            unbuilt::check_verbosity(chat, surface, text)?;
            Ok(truncate::chat_prompt(chat, text, context)?.tokens.len() as u64)
        });
        counted.await.map(Some)
    }

    async fn forward(&self, _: Arc<Forward>) -> Result<Forwarded, Failure> {
        Err(not_forwarded())
    }

    async fn tokenize(&self, request: TokenizeRequest) -> Result<Vec<u8>, Failure> {
        let context = u64::from(self.context_tokens());
        let bytes = match &request.input {
            TokenizeInput::Text { prompt, .. } => prompt.len(),
            TokenizeInput::Chat { chat, .. } => plan::chat_bytes(chat),
        };
        self.off_io(bytes, move |text| {
            let tokens = match &request.input {
                TokenizeInput::Text { prompt, add_special_tokens } => plan::encode(text, prompt, *add_special_tokens)?,
                TokenizeInput::Chat { chat, add_special_tokens } => {
                    let tokens = text.chat_prompt(chat, unix_seconds() as i64)?.tokens;
                    if *add_special_tokens { text.with_special_tokens(tokens).map_err(ApiError::from)? } else { tokens }
                }
            };
            let names = || tokens.iter().map(|id| text.token_name(*id)).collect::<Vec<_>>();
            let strings = request.return_token_strs.then(names);
            Ok(penstock_types::tokenize::tokenize_body(&tokens, context, strings.as_deref()))
        })
        .await
    }

    async fn detokenize(&self, request: DetokenizeRequest) -> Result<Vec<u8>, Failure> {
        self.off_io(request.tokens.len() * 4, move |text| {
            if let Some(at) = request.tokens.iter().position(|id| *id >= text.vocab_size()) {
                let message = format!("tokens[{at}]: not a token id of this model, which has {}", text.vocab_size());
                return Err(ApiError::invalid(format!("tokens[{at}]"), message).into());
            }
            Ok(penstock_types::tokenize::detokenize_body(&text.decode(&request.tokens, true)))
        })
        .await
    }

    fn feed(&self) -> Option<Arc<Feed>> {
        None
    }

    fn gauges(&self, out: &mut dyn FnMut(Gauge, f64)) {
        let status = self.pool.status();
        // The workers of an adapter are those of its model, which tells of them.
        match self.base {
            None => gauges::pool(&status, out),
            Some(_) => out(Gauge::AdapterWorkers, status.adapter_workers(&self.id) as f64),
        }
    }

    fn worker_gauges(&self, out: &mut dyn FnMut(Gauge, &str, f64)) {
        if self.base.is_none() {
            self.pool.status().workers.iter().for_each(|worker| gauges::gpu(worker, out));
        }
    }
}

/// Salt of the block hashes of a tenant's prompts to a model (the name of a pool, or that of an adapter with its id), without a
/// `cache_salt` of the request's own.
pub fn prefix_salt(tenant: &str, model: &str, adapter: Option<AdapterId>) -> Vec<u8> {
    salt::salt(tenant, model, None, adapter)
}

async fn permit(turns: &Arc<Semaphore>, wait_max: Duration) -> Result<OwnedSemaphorePermit, Failure> {
    match tokio::time::timeout(wait_max, turns.clone().acquire_owned()).await {
        Ok(Ok(permit)) => Ok(permit),
        Ok(Err(_)) => Err(Failure::new(ErrorKind::Draining, "The server is shutting down.")),
        Err(_) => {
            let failure = Failure::new(ErrorKind::Overloaded, "Too many long prompts are waiting. Try again shortly.");
            Err(failure.retry_after(Duration::from_secs(1)))
        }
    }
}

fn text_bytes(request: &Request) -> usize {
    match request {
        Request::Chat(chat) => plan::chat_bytes(chat) + guided::format_bytes(&chat.response_format),
        Request::Complete(complete) => {
            let prompts: usize = complete.prompts.iter().map(plan::prompt_bytes).sum();
            prompts + guided::format_bytes(&complete.response_format)
        }
        Request::Embed(_) | Request::Rerank(_) => vectors::text_bytes(request),
    }
}

fn refused(error: &PoolError) -> Failure {
    let message = match error {
        PoolError::Unavailable { why: Some(why), .. } => {
            format!("No worker is ready to take the request: the last one ended ({why}).")
        }
        PoolError::Unavailable { why: None, .. } => "No worker is ready to take the request.".to_owned(),
        PoolError::Overloaded { .. } => "Too many requests are waiting. Try again shortly.".to_owned(),
        PoolError::Draining => "The server is shutting down.".to_owned(),
        PoolError::Invalid { what } => format!("The request cannot be served: {what}."),
    };
    let failure = Failure::new(error.kind(), message).log(error.to_string());
    match error.retry_after() {
        Some(after) => failure.retry_after(after),
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_turn_to_tokenize_is_not_waited_for_without_end() {
        let turns = Arc::new(Semaphore::new(1));
        let held = permit(&turns, PERMIT_WAIT_MAX).await.expect("a free turn");
        let failure = permit(&turns, Duration::from_millis(1)).await.expect_err("no turn");
        assert_eq!((failure.status(), failure.retry_after_seconds()), (503, Some(1)));
        drop(held);
        assert!(permit(&turns, PERMIT_WAIT_MAX).await.is_ok());
    }
}
