//! Vectors and scores of a pool: each input of a request is a job of its own, a few at a time, whose result needs no
//! decoder.
//!
//! A worker gives a vector as the model computes it; here it is cut to the dimensions that were asked for and scaled. A
//! score comes from the log-probabilities of the two answers of a reranker, at the one token that it would say, or from the value of
//! its head.

use std::sync::Arc;
use std::task::{Context, Poll};

use http::{HeaderName, HeaderValue};
use penstock_proto::frames::{Output, Pooling, Sampling};
use penstock_proto::{AdapterId, ErrorKind};
use penstock_text::{HeadScore, RankRules, Task, TextModel, VectorPooling, VectorRules};
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::request::{EmbedRequest, RerankRequest};
use penstock_types::{ChatEvent, Prompt, Request, Usage};

use super::events::{BURST, ROUTE, Source, ended, failure};
use super::plan::{self, PRIORITY_BACKGROUND};
use super::refused;
use super::salt::salt;
use super::wave::Wave;
use penstock_base::error::Failure;
use penstock_pool::{Job, Needs, PROMPT_TOKENS_MAX, PoolEvent, Ticket};
use penstock_telemetry::OpenSpan;
use penstock_telemetry::trace::Kind;
use penstock_upstream::{ANSWER_BYTES_MAX, Course, Events, Facts, Measured, Origin};

/// Most bytes of text that one request may have to tokenize: the query of a rerank request counts for each document.
const TEXT_BYTES_MAX: usize = 16 << 20;

/// Estimated bytes of one component of a vector in an answer.
const COMPONENT_BYTES: usize = 12;

/// Result that the inputs of a request are computed for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wanted {
    /// A vector of each input, cut to so many components if any are named, and scaled to length 1 if so.
    Vectors { pooling: VectorPooling, dense_layers: u32, dimensions: Option<u32>, normalize: bool },
    /// A score of each input, from these two answers.
    Scores { yes: u32, no: u32 },
    /// A score of each input, from the value of a head.
    Heads(HeadScore),
}

/// Input of a request as tokens.
struct Input {
    tokens: Arc<[u32]>,
    /// Index of the first token of the second text; 0: the model is not told of a second text.
    second_text: u32,
    /// Index of the first token that is pooled.
    pooled_from: u32,
}

/// Plan of a request for vectors or scores: its inputs as tokens.
pub(crate) struct InputPlan {
    inputs: Vec<Input>,
    wanted: Wanted,
    priority: i32,
    /// Adapter that the model runs with; `None`: the model alone.
    pub(super) adapter: Option<AdapterId>,
}

/// Bytes of text to tokenize, or of token ids to check.
pub(super) fn text_bytes(request: &Request) -> usize {
    match request {
        Request::Embed(embed) => embed.inputs.iter().map(plan::prompt_bytes).sum(),
        Request::Rerank(rerank) => {
            let of = |document: &String| document.len().saturating_add(rerank.query.len());
            rerank.documents.iter().map(of).fold(0, usize::saturating_add)
        }
        Request::Chat(_) | Request::Complete(_) => 0,
    }
}

impl InputPlan {
    /// Tokenizes the inputs of a request that fits the model's task, and checks them against a context of
    /// `context_tokens`.
    pub(super) fn new(request: &Request, model: &TextModel, context_tokens: u32) -> Result<Self, Failure> {
        let bytes = text_bytes(request);
        if bytes > TEXT_BYTES_MAX {
            let what = if matches!(request, Request::Rerank(_)) { "documents" } else { "input" };
            return Err(too_large(
                what,
                &format!("{} MiB of text to tokenize; {} are allowed", bytes >> 20, TEXT_BYTES_MAX >> 20),
            ));
        }
        let plan = match (request, model.task()) {
            (Request::Embed(embed), Task::Embed(rules)) => Self::embed(embed, rules, model, context_tokens)?,
            (Request::Rerank(rerank), Task::Rerank(rules)) => Self::rerank(rerank, rules, model, context_tokens)?,
            _ => return Err(Failure::internal("a request that is not this model's task")),
        };
        let tokens = plan.measured().prompt_tokens;
        if tokens > PROMPT_TOKENS_MAX as u64 {
            return Err(too_large("input", &format!("{tokens} tokens in all; {PROMPT_TOKENS_MAX} are allowed")));
        }
        Ok(plan)
    }

    fn embed(
        embed: &EmbedRequest,
        rules: &VectorRules,
        model: &TextModel,
        context_tokens: u32,
    ) -> Result<Self, Failure> {
        check_dimensions(embed, rules.width)?;
        let Some(prompt) = rules.prompt(embed.task.as_deref()) else {
            let message = "taskType: this model has no prompt for that purpose";
            return Err(ApiError::unsupported_value("taskType", message).into());
        };
        let unpooled = rules.unpooled(model, prompt).map_err(ApiError::from)?;
        let tokens_max = rules.tokens_max.map_or(context_tokens, |max| max.min(context_tokens)) as usize;
        let tokenized = embed.inputs.iter().enumerate().map(|(at, input)| {
            let param = if embed.inputs.len() == 1 { "input".to_owned() } else { format!("input[{at}]") };
            let tokens = match input {
                Prompt::Tokens(tokens) if embed.truncate => tokens[..tokens.len().min(tokens_max)].to_vec(),
                Prompt::Tokens(tokens) => tokens.clone(),
                Prompt::Text(text) => {
                    let mut text = format!("{prompt}{text}");
                    if rules.lowercases {
                        text = text.to_lowercase();
                    }
                    let cut = embed.truncate.then_some(tokens_max);
                    encode(model, &text, cut).map_err(|error| ApiError { param: Some(param.clone()), ..error })?
                }
            };
            // Token ids come without a prompt.
            let unpooled = if matches!(input, Prompt::Text(_)) { unpooled } else { 0 };
            let tokens = checked(tokens, tokens_max, &param)?;
            if unpooled >= tokens.len() {
                let message = format!("{param} has no tokens behind the prompt of its purpose.");
                return Err(Failure::new(ErrorKind::InvalidRequest, message).param(param));
            }
            Ok(Input { tokens, second_text: 0, pooled_from: unpooled as u32 })
        });
        let inputs = tokenized.collect::<Result<_, Failure>>()?;
        let VectorRules { pooling, dense_layers, normalize, .. } = *rules;
        let wanted = Wanted::Vectors { pooling, dense_layers, dimensions: embed.dimensions, normalize };
        Ok(Self { inputs, wanted, priority: 0, adapter: None })
    }

    fn rerank(
        rerank: &RerankRequest,
        rules: &RankRules,
        model: &TextModel,
        context_tokens: u32,
    ) -> Result<Self, Failure> {
        // An answer in words takes one token of the context.
        let (wanted, answer) = match rules {
            RankRules::Answer(rules) => (Wanted::Scores { yes: rules.yes, no: rules.no }, 1),
            RankRules::Head(head) => (Wanted::Heads(head.score), 0),
        };
        let tokenized = rerank.documents.iter().enumerate().map(|(at, document)| {
            let param = format!("documents[{at}]");
            let refused = |error| ApiError { param: Some(param.clone()), ..ApiError::from(error) };
            let question = rules.question(model, &rerank.query, document).map_err(refused)?;
            let tokens = checked(question.tokens, context_tokens.saturating_sub(answer) as usize, &param)?;
            Ok(Input { tokens, second_text: question.second_text as u32, pooled_from: 0 })
        });
        let inputs = tokenized.collect::<Result<_, Failure>>()?;
        Ok(Self { inputs, wanted, priority: 0, adapter: None })
    }

    /// Tokens of all inputs. No output counts: a vector is none, and a score is read off before one.
    pub(super) fn measured(&self) -> Measured {
        let prompt_tokens = self.inputs.iter().map(|input| input.tokens.len() as u64).sum();
        Measured { prompt_tokens, completion_tokens_max: 0 }
    }

    /// Abilities that a worker needs for the inputs.
    pub(super) fn needs(&self) -> Needs {
        let (sampling, pooling) = self.asked();
        let pooled_from = self.inputs.iter().map(|input| input.pooled_from).max().unwrap_or(0);
        let of_vector = pooling.needs().and(Pooling::chain_needs(self.dense_layers(), pooled_from));
        let capabilities = sampling.needs().and(of_vector);
        Needs { capabilities, adapter: self.adapter, ..Needs::default() }
    }

    /// Lowers the priority to that of background requests.
    pub(super) fn step_back(&mut self) {
        self.priority = PRIORITY_BACKGROUND;
    }

    /// Sampling and rule of the vector that make the result.
    fn asked(&self) -> (Sampling, Pooling) {
        let quiet =
            Sampling { top_p: 1.0, repetition_penalty: 1.0, logprobs: -1, prompt_logprobs: -1, ..Sampling::default() };
        match self.wanted {
            Wanted::Vectors { pooling, .. } => (quiet, rule_of(pooling)),
            Wanted::Heads(_) => (quiet, Pooling::Head),
            Wanted::Scores { yes, no } => {
                (Sampling { max_tokens: 1, logprobs: 0, logprob_tokens: vec![yes, no], ..quiet }, Pooling::None)
            }
        }
    }

    /// Dense layers that each result goes through.
    fn dense_layers(&self) -> u32 {
        if let Wanted::Vectors { dense_layers, .. } = self.wanted { dense_layers } else { 0 }
    }

    fn job(&self, at: usize, model: &str, origin: &Origin) -> Job {
        let (sampling, pooling) = self.asked();
        Job {
            prompt: self.inputs[at].tokens.clone(),
            choices: 1,
            sampling,
            salt: salt(&origin.tenant, model, None, self.adapter).into(),
            priority: self.priority,
            deadline: origin.deadline,
            tenant: origin.tenant.as_str().into(),
            weight: origin.weight.max(1),
            session: None,
            keyed: false,
            grammar: None,
            adapter: self.adapter,
            pooling,
            second_text: self.inputs[at].second_text,
            dense_layers: self.dense_layers(),
            pooled_from: self.inputs[at].pooled_from,
            explain: origin.explain,
            sent: origin.sent.clone(),
        }
    }

    /// Event of the input at index `at` from the output that ends it.
    fn result(&self, at: usize, output: Output) -> Result<ChatEvent, Failure> {
        let index = at as u32;
        match self.wanted {
            Wanted::Vectors { dimensions, normalize, .. } => {
                let values = shaped(output.vector, dimensions, normalize)?;
                Ok(ChatEvent::Vector { index, values })
            }
            Wanted::Heads(score) => {
                let [value] = *output.vector else {
                    return Err(Failure::internal(
                        "a worker ended a rerank input without the value of the model's classification head",
                    ));
                };
                Ok(ChatEvent::Score { index, score: of_head(f64::from(value), score) })
            }
            Wanted::Scores { yes, no } => {
                let told = output.tokens.first().and_then(|token| token.logprobs.as_ref());
                let of = |answer| {
                    let told = told?;
                    let at = told.top_tokens.iter().position(|token| *token == answer)?;
                    told.top_logprobs.get(at).copied()
                };
                let (Some(yes), Some(no)) = (of(yes), of(no)) else {
                    return Err(Failure::internal("a worker left out the log-probabilities of a score"));
                };
                Ok(ChatEvent::Score { index, score: share(f64::from(yes), f64::from(no)) })
            }
        }
    }
}

/// Rule of a pooling as workers take it.
fn rule_of(pooling: VectorPooling) -> Pooling {
    match pooling {
        VectorPooling::Last => Pooling::Last,
        VectorPooling::First => Pooling::First,
        VectorPooling::Mean => Pooling::Mean,
        VectorPooling::RootMean => Pooling::RootMean,
        VectorPooling::WeightedMean => Pooling::WeightedMean,
        VectorPooling::Max => Pooling::Max,
    }
}

/// Refuses a length that vectors of the model cannot have, and answers that would be too long.
fn check_dimensions(embed: &EmbedRequest, width: Option<u32>) -> Result<(), Failure> {
    if let (Some(asked), Some(width)) = (embed.dimensions, width)
        && asked > width
    {
        return Err(too_many_dimensions(asked, width as usize));
    }
    let components = embed.dimensions.or(width).unwrap_or(0) as usize;
    let bytes = embed.inputs.len().saturating_mul(components).saturating_mul(COMPONENT_BYTES);
    if bytes > ANSWER_BYTES_MAX {
        let what = format!(
            "an answer of about {} MiB; {} are allowed: send fewer inputs",
            bytes >> 20,
            ANSWER_BYTES_MAX >> 20
        );
        return Err(too_large("input", &what));
    }
    Ok(())
}

fn too_many_dimensions(asked: u32, width: usize) -> Failure {
    let message = format!("dimensions: {asked} are asked for, vectors of this model have {width}");
    ApiError::invalid("dimensions", message).into()
}

fn too_large(param: &str, what: &str) -> Failure {
    let message = format!("{param}: {what}.");
    ApiError { kind: ApiErrorKind::TooLarge, ..ApiError::invalid(param, message) }.into()
}

/// Tokens of a text with the special tokens that the tokenizer adds; with `cut`, so many at most, the special ones
/// among them.
fn encode(model: &TextModel, text: &str, cut: Option<usize>) -> Result<Vec<u32>, ApiError> {
    // Without a cut a text that is too long to be tokenized is refused.
    let text = if cut.is_some() { model.head_of(text) } else { text };
    let tokens = model.encode(text, true)?;
    let Some(most) = cut.filter(|most| tokens.len() > *most) else { return Ok(tokens) };
    let mut plain = model.encode(text, false)?;
    let special = tokens.len().saturating_sub(plain.len());
    plain.truncate(most.saturating_sub(special));
    Ok(model.with_special_tokens(plain)?)
}

fn checked(tokens: Vec<u32>, tokens_max: usize, param: &str) -> Result<Arc<[u32]>, Failure> {
    if tokens.is_empty() {
        return Err(Failure::new(ErrorKind::InvalidRequest, format!("{param} has no tokens.")).param(param));
    }
    if tokens.len() > tokens_max {
        let message = format!(
            "This model's maximum context length is {tokens_max} tokens. However, {param} resulted in {} tokens. Please reduce \
             the length of the {param}.",
            tokens.len()
        );
        return Err(Failure::new(ErrorKind::ContextLength, message).param(param));
    }
    Ok(tokens.into())
}

/// Vector of the asked length, scaled to length 1 if wanted.
fn shaped(mut values: Vec<f32>, dimensions: Option<u32>, normalize: bool) -> Result<Vec<f32>, Failure> {
    if values.is_empty() {
        return Err(Failure::internal("a worker ended an input without its vector"));
    }
    if let Some(asked) = dimensions {
        if asked as usize > values.len() {
            return Err(too_many_dimensions(asked, values.len()));
        }
        values.truncate(asked as usize);
    }
    if normalize {
        let length = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        if length > 0.0 {
            values.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
        }
    }
    Ok(values)
}

/// Share of "yes" in the probability of both answers, from their log-probabilities.
fn share(yes: f64, no: f64) -> f64 {
    1.0 / (1.0 + (no - yes).exp())
}

/// Score of a head's value.
fn of_head(value: f64, score: HeadScore) -> f64 {
    match score {
        HeadScore::Sigmoid => 1.0 / (1.0 + (-value).exp()),
        HeadScore::Plain => value,
    }
}

/// Input that is in the pool.
struct Open {
    /// Index of the input in the request.
    at: usize,
    ticket: Ticket,
    /// True once the pool's report of a binding has been taken and the input's tokens are in the facts.
    is_counted: bool,
}

/// Events of a request for vectors or scores.
pub(super) struct InputEvents {
    plan: InputPlan,
    open: Vec<Open>,
    wave: Wave,
    source: Source,
    facts: Facts,
    /// Worker that was given an input last.
    worker: Option<Arc<str>>,
    span: Option<OpenSpan>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl InputEvents {
    /// Submits the first inputs of a plan.
    pub(super) fn start(plan: InputPlan, source: Source) -> Result<Self, Failure> {
        let wave = Wave::new(plan.inputs.len());
        let mut span =
            source.origin.trace.as_ref().map(|trace| trace.child(format!("pool {}", source.model), Kind::Internal));
        let prompt_tokens = plan.measured().prompt_tokens;
        span.iter_mut().for_each(|span| span.set("gen_ai.usage.input_tokens", prompt_tokens));
        let (open, facts, worker, headers) = (Vec::new(), Facts::default(), None, Vec::new());
        let mut events = Self { plan, open, wave, source, facts, worker, span, headers };
        events.fill()?;
        Ok(events)
    }

    /// Submits the inputs whose turn it is, at most a wave at once.
    fn fill(&mut self) -> Result<(), Failure> {
        let Self { plan, open, wave, source, .. } = self;
        let filled = wave.fill(|at| {
            let ticket = source.pool.submit(plan.job(at, &source.model, &source.origin))?;
            open.push(Open { at, ticket, is_counted: false });
            Ok(())
        });
        filled.map_err(|error| refused(&error))
    }

    /// Takes one event of the input at place `place` of the open ones; true if the input has ended.
    fn take(&mut self, place: usize, event: PoolEvent, out: &mut Vec<ChatEvent>) -> Result<bool, Failure> {
        match event {
            PoolEvent::Output(output) => {
                self.facts.cached_tokens += u64::from(output.cached_tokens.unwrap_or(0));
                let Some(finish) = &output.finish else { return Ok(false) };
                ended(finish)?;
                out.push(self.plan.result(self.open[place].at, output)?);
                return Ok(true);
            }
            PoolEvent::Bound { worker, waited, route } => {
                let open = &mut self.open[place];
                if !std::mem::replace(&mut open.is_counted, true) {
                    self.facts.prompt_tokens += self.plan.inputs[open.at].tokens.len() as u64;
                }
                let route = route.and_then(|route| HeaderValue::from_str(&route).ok());
                self.headers.extend(route.filter(|_| self.headers.is_empty()).map(|route| (ROUTE, route)));
                if let Some(span) = &mut self.span {
                    span.set("penstock.worker", worker.to_string());
                    span.set("penstock.queue_ms", waited.as_secs_f64() * 1e3);
                }
                self.worker = Some(worker);
            }
            // An input that goes on elsewhere is computed there from its first token on.
            PoolEvent::Resumed { .. } => self.facts.resumes += 1,
            PoolEvent::Moved { worker } => self.worker = Some(worker),
            PoolEvent::Gap { time, .. } => self.facts.gap_us = self.facts.gap_us.max(time.as_micros() as u64),
            PoolEvent::Failed { kind, message, retry_after } => return Err(failure(kind, message, retry_after)),
        }
        Ok(false)
    }
}

impl Events for InputEvents {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        let (mut taken, mut place) = (0, 0);
        while place < self.open.len() && taken < BURST {
            match self.open[place].ticket.poll_next(context) {
                Poll::Pending => place += 1,
                Poll::Ready(None) => {
                    return Poll::Ready(Err(Failure::internal("the pool ended an input before its result")));
                }
                Poll::Ready(Some(event)) => {
                    taken += 1;
                    if self.take(place, event, out)? {
                        self.open.remove(place);
                        self.wave.end_one();
                        // New ones come behind the others: this loop gets to them.
                        self.fill()?;
                    }
                }
            }
        }
        if self.wave.is_done() {
            let Facts { prompt_tokens, cached_tokens, .. } = self.facts;
            out.push(ChatEvent::Usage(Usage { prompt_tokens, cached_tokens, ..Usage::default() }));
            return Poll::Ready(Ok(false));
        }
        if taken == 0 { Poll::Pending } else { Poll::Ready(Ok(true)) }
    }

    fn facts(&self) -> Facts {
        let mut facts = self.facts;
        // Inputs that a worker was given since the last poll are computed as well.
        let fresh = self.open.iter().filter(|open| !open.is_counted && open.ticket.is_bound());
        facts.prompt_tokens += fresh.map(|open| self.plan.inputs[open.at].tokens.len() as u64).sum::<u64>();
        facts
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.headers
    }

    fn course(&self) -> Course {
        Course { worker: self.worker.clone(), ..Course::default() }
    }
}

impl Drop for InputEvents {
    fn drop(&mut self) {
        if let Some(span) = &mut self.span {
            span.set("penstock.cached_tokens", self.facts.cached_tokens);
            span.set("penstock.resumes", u64::from(self.facts.resumes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_proto::frames::{Token, TokenLogprobs};
    use penstock_text::TextFiles;

    fn plan(wanted: Wanted) -> InputPlan {
        let inputs = vec![Input { tokens: Arc::from([1, 2, 3]), second_text: 2, pooled_from: 1 }];
        InputPlan { inputs, wanted, priority: 0, adapter: None }
    }

    /// The demo model's tokenizer as that of a model with a context of 512 tokens, whose texts end with `<|endoftext|>` where vectors are made.
    fn short_model() -> TextModel {
        let config = br#"{"model_max_length": 512, "add_eos_token": true, "eos_token": "<|endoftext|>"}"#;
        let files = TextFiles {
            tokenizer_json: include_bytes!("../../../models/penstock-demo/tokenizer.json").into(),
            tokenizer_config_json: Some(config.into()),
            ..TextFiles::default()
        };
        let model = TextModel::load(&files).expect("a tokenizer");
        model.with_task(Task::Embed(VectorRules::default())).expect("an end")
    }

    #[test]
    fn a_text_is_cut_before_its_end_however_long_it_is() {
        let model = short_model();
        let end = model.token_id("<|endoftext|>").expect("a token");
        let words = "one two three four five six seven eight nine ten ";
        // The limit lies within a letter of the last one.
        for text in [words.to_owned(), words.repeat(1500), format!("{words}{}", "é".repeat(40_000))] {
            let all = model.encode(&text[..words.len()], false).expect("tokens");
            for most in [1, 2, 8] {
                let cut = encode(&model, &text, Some(most)).expect("it is cut");
                assert_eq!(cut, [&all[..most - 1], &[end]].concat(), "{most} of {} bytes", text.len());
            }
            let kept = encode(&model, &text, Some(1 << 20)).expect("it is cut where the limit is");
            assert_eq!((kept.last(), kept[..4] == all[..4]), (Some(&end), true));
        }
        let long = words.repeat(1500);
        let error = encode(&model, &long, None).expect_err("nothing is cut unasked");
        assert_eq!(error.kind, ApiErrorKind::ContextLength);
        let lasting = encode(&model, &long[..60_000], None).expect("short enough");
        assert_eq!(lasting.last(), Some(&end));
    }

    #[test]
    fn a_vector_is_cut_and_then_scaled() {
        assert_eq!(shaped(vec![3.0, 4.0, 12.0], None, false).expect("a vector"), [3.0, 4.0, 12.0]);
        assert_eq!(shaped(vec![3.0, 4.0, 12.0], Some(2), true).expect("a vector"), [0.6, 0.8]);
        assert_eq!(shaped(vec![0.0, 0.0], None, true).expect("a vector"), [0.0, 0.0], "nothing to scale");
        assert_eq!(shaped(vec![1.0], Some(2), true).map_err(|failure| failure.status()), Err(400));
        assert_eq!(shaped(vec![], None, true).map_err(|failure| failure.status()), Err(500));
    }

    #[test]
    fn a_length_that_vectors_cannot_have_is_refused_before_anything_is_computed() {
        let mut embed = EmbedRequest {
            model: "m".into(),
            inputs: vec![Prompt::Text("a".into())],
            dimensions: Some(97),
            task: None,
            truncate: false,
            user: None,
            ignored: Vec::new(),
        };
        let failure = check_dimensions(&embed, Some(96)).expect_err("too many");
        assert_eq!((failure.status(), failure.param.as_deref()), (400, Some("dimensions")));
        embed.dimensions = Some(96);
        assert!(check_dimensions(&embed, Some(96)).is_ok());
        embed.inputs = vec![Prompt::Text("a".into()); 2048];
        embed.dimensions = None;
        assert_eq!(check_dimensions(&embed, Some(8192)).expect_err("too much").shape().code, Some("above_maximum"));
    }

    #[test]
    fn a_score_is_the_share_of_yes() {
        let output = |tokens: &[(u32, f32)]| Output {
            tokens: vec![Token {
                id: 9,
                logprobs: Some(TokenLogprobs {
                    top_tokens: tokens.iter().map(|(token, _)| *token).collect(),
                    top_logprobs: tokens.iter().map(|(_, logprob)| *logprob).collect(),
                    ..TokenLogprobs::default()
                }),
            }],
            ..Output::default()
        };
        let plan = plan(Wanted::Scores { yes: 4, no: 5 });
        let score = |output| match plan.result(0, output) {
            Ok(ChatEvent::Score { index: 0, score }) => Ok(score),
            other => Err(format!("{other:?}")),
        };
        let even = score(output(&[(4, -2.0), (5, -2.0)])).expect("a score");
        let sure = score(output(&[(5, -3.0), (4, -1.0)])).expect("a score");
        assert!((even - 0.5).abs() < 1e-12 && (sure - 1.0 / (1.0 + (-2f64).exp())).abs() < 1e-9, "{even} {sure}");
        assert!(score(output(&[(4, -2.0)])).is_err(), "an answer is missing");
        assert!(score(Output::default()).is_err(), "nothing was told");
        assert_eq!((share(-1000.0, 0.0), share(0.0, -1000.0)), (0.0, 1.0), "no overflow");
    }

    #[test]
    fn a_score_of_a_head_is_its_sigmoid_or_itself() {
        let score = |vector: Vec<f32>, score| match plan(Wanted::Heads(score))
            .result(0, Output { vector, ..Output::default() })
        {
            Ok(ChatEvent::Score { index: 0, score }) => Ok(score),
            other => Err(format!("{other:?}")),
        };
        assert_eq!(score(vec![0.0], HeadScore::Sigmoid), Ok(0.5));
        assert_eq!(score(vec![-3.5], HeadScore::Plain), Ok(-3.5));
        assert_eq!(score(vec![-1000.0], HeadScore::Sigmoid), Ok(0.0), "no overflow");
        assert!(score(vec![], HeadScore::Plain).is_err() && score(vec![1.0, 2.0], HeadScore::Plain).is_err());
    }

    #[test]
    fn an_input_asks_its_worker_for_no_text() {
        let job = |wanted| plan(wanted).job(0, "m", &Origin { tenant: "t".into(), ..Origin::default() });
        for (pooling, asked) in [
            (VectorPooling::Last, Pooling::Last),
            (VectorPooling::First, Pooling::First),
            (VectorPooling::Mean, Pooling::Mean),
            (VectorPooling::RootMean, Pooling::RootMean),
            (VectorPooling::WeightedMean, Pooling::WeightedMean),
            (VectorPooling::Max, Pooling::Max),
        ] {
            let vector = job(Wanted::Vectors { pooling, dense_layers: 2, dimensions: None, normalize: true });
            assert_eq!((vector.dense_layers, vector.pooled_from), (2, 1));
            assert_eq!((vector.pooling, vector.sampling.max_tokens, vector.choices), (asked, 0, 1));
        }
        let head = job(Wanted::Heads(HeadScore::Sigmoid));
        assert_eq!((head.pooling, head.sampling.max_tokens, head.second_text), (Pooling::Head, 0, 2));
        let score = job(Wanted::Scores { yes: 4, no: 5 });
        assert_eq!((score.pooling, score.sampling.max_tokens), (Pooling::None, 1));
        assert_eq!((score.sampling.logprobs, score.sampling.logprob_tokens), (0, vec![4, 5]));
    }

    #[test]
    fn an_input_has_tokens_and_fits_the_context() {
        assert!(checked(vec![1; 8], 8, "input").is_ok());
        let failure = checked(vec![1; 9], 8, "input[3]").expect_err("too long");
        assert_eq!(
            (failure.shape().code, failure.param.as_deref()),
            (Some("context_length_exceeded"), Some("input[3]"))
        );
        assert_eq!(checked(vec![], 8, "input").expect_err("empty").status(), 400);
    }
}
