//! Plan of a request for the workers: prompts as tokens, sampling with every default filled in, and the bounds of the
//! context.

use std::sync::Arc;

use penstock_proto::frames::{BadWord, LogitBias, Pooling, Sampling};
use penstock_proto::{AdapterId, ErrorKind};
use penstock_text::{CallableTool, ChoiceOptions, TextModel};
use penstock_types::codec::Surface;
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::request::{CompleteRequest, Message, Role, SamplingParams, StreamOptions};
use penstock_types::{ChatRequest, Prompt, Request, ToolChoice};
use sha2::{Digest, Sha256};

use super::guided::Draft;
use super::unable::unable;
use super::{AnswerRules, reasoning, salt::salt, truncate, unbuilt};
use penstock_base::error::Failure;
use penstock_base::hash;
use penstock_pool::{Guided, Job, Needs};
use penstock_upstream::ANSWER_BYTES_MAX;
use penstock_upstream::{Measured, Origin};

/// Output tokens of a completion that names no limit (the API's own default).
const COMPLETION_TOKENS_DEFAULT: u32 = 16;

/// Most urgent priority that a client can ask for, which is the normal one: a client can step back, and no client goes
/// first for free.
const PRIORITY_MIN: i32 = 0;

/// Priority of background requests: behind every request that a client waits for, unless that one stepped back further.
pub(super) const PRIORITY_BACKGROUND: i32 = 1000;

/// Plan of one request: the jobs for the workers, and the options by which their tokens become text.
pub(crate) struct Plan {
    /// Prompts of the request, one job each.
    pub(super) prompts: Vec<PlannedPrompt>,
    /// Number of choices per prompt.
    pub(super) choices: u32,
    /// Sampling parameters, the same for every prompt but for `max_tokens`.
    sampling: Sampling,
    /// Template of the decoders' options; `choice` is set per choice.
    pub(super) options: ChoiceOptions,
    /// True if the prompt is repeated in front of its first text.
    pub(super) tell_prompt: bool,
    /// True if the answer's text begins with the prompt's.
    pub(super) repeats_prompt: bool,
    /// True if the prompt event waits for the prompt's log-probabilities.
    pub(super) prompt_logprobs: bool,
    /// True if only the prompt was asked for (`max_tokens` 0).
    pub(super) prompt_only: bool,
    /// True if each piece of the answer tells the number of tokens so far.
    pub(super) counts_on: bool,
    /// True if choices are ranked by mean log-probability.
    pub(super) rank: bool,
    /// Text of the conversation that every choice repeats first.
    pub(super) echo: Option<String>,
    /// Grammar of the answer, before it is compiled.
    pub(super) draft: Option<Draft>,
    /// Adapter that the model runs with; `None`: the model alone.
    pub(super) adapter: Option<AdapterId>,
    /// Grammar of the answer, as workers follow it.
    pub(super) guided: Option<Arc<Guided>>,
    cache_salt: Option<String>,
    priority: i32,
    /// Name of the conversation in the body.
    named: Option<String>,
    /// True if the body has a cache key (`prompt_cache_key`).
    keyed: bool,
    session: Option<u64>,
}

/// One prompt of the request, tokenized, with the bound of its output.
pub(super) struct PlannedPrompt {
    /// Token ids of the prompt.
    pub(super) tokens: Arc<[u32]>,
    /// Text of the prompt, which completions with `echo` repeat.
    pub(super) text: String,
    max_tokens: u32,
    /// Index among the prompts of the request.
    index: u64,
}

/// Bytes of text that the template and the tokenizer process.
pub(super) fn chat_bytes(chat: &ChatRequest) -> usize {
    let of = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let message = |message: &Message| {
        let calls = message.tool_calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len() + 64);
        let texts = [&message.content, &message.reasoning, &message.name, &message.tool_call_id];
        texts.into_iter().map(of).sum::<usize>() + calls.sum::<usize>() + 64
    };
    let tools = chat.tools.iter().map(|tool| tool.json.len());
    chat.messages.iter().map(message).sum::<usize>() + tools.sum::<usize>() + of(&chat.template_kwargs)
}

/// Bytes of text to tokenize, or of token ids to check.
pub(super) fn prompt_bytes(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(tokens) => tokens.len() * 4,
    }
}

/// Token ids of a text, with the tokenizer's special tokens around it if `add_special`.
pub(super) fn encode(model: &TextModel, text: &str, add_special: bool) -> Result<Vec<u32>, Failure> {
    model.encode(text, add_special).map_err(|error| {
        let refusal = ApiError { param: Some("prompt".to_owned()), ..ApiError::from(error) };
        refusal.into()
    })
}

impl Plan {
    /// Tokenizes the request and checks it against a context of `context_tokens`.
    pub(super) fn new(
        request: &Request,
        model: &TextModel,
        context_tokens: u32,
        surface: Surface,
        rules: AnswerRules,
    ) -> Result<Self, Failure> {
        match request {
            Request::Chat(chat) => Self::chat(chat, model, context_tokens, surface, rules),
            Request::Complete(complete) => Self::complete(complete, model, context_tokens, surface, rules),
            Request::Embed(_) | Request::Rerank(_) => Err(Failure::internal("a request that no pool answers")),
        }
    }

    fn chat(
        chat: &ChatRequest,
        model: &TextModel,
        context_tokens: u32,
        surface: Surface,
        rules: AnswerRules,
    ) -> Result<Self, Failure> {
        unbuilt::check_verbosity(chat, surface, model)?;
        let prompt = truncate::chat_prompt(chat, model, context_tokens)?;
        let draft = Draft::of_chat(chat, &prompt, model, surface, rules)?;
        let budget = reasoning::budget(chat, prompt.opens_reasoning, model, draft.is_some());
        let tokens = truncate::tail(prompt.tokens, chat.prompt_tail, chat.sampling.max_tokens, context_tokens);
        let room = room(tokens.len(), context_tokens, "messages")?;
        let told = chat.prompt_logprobs.map_or(0, |top| logprobs_bytes(tokens.len(), top));
        check_told(told, "prompt_logprobs")?;
        let sampling = &chat.sampling;
        let max_tokens = sampling.max_tokens.map_or(room, |max| max.min(room));
        let options = ChoiceOptions {
            logprobs: chat.logprobs.is_some(),
            return_tokens: chat.return_token_ids,
            keep_special: chat.keep_special_tokens,
            parse_tools: chat.tool_choice != ToolChoice::None && !chat.tools.is_empty(),
            tools: callable(chat),
            one_call: !chat.parallel_tool_calls,
            parse_reasoning: true,
            starts_in_reasoning: prompt.opens_reasoning,
            ..options(sampling)?
        };
        Ok(Self {
            prompts: vec![PlannedPrompt { tokens: tokens.into(), text: String::new(), max_tokens, index: 0 }],
            choices: chat.n,
            sampling: Sampling {
                logprobs: wanted(chat.logprobs),
                prompt_logprobs: wanted(chat.prompt_logprobs),
                reasoning: budget,
                ..engine_sampling(sampling, model)?
            },
            options,
            tell_prompt: chat.prompt_logprobs.is_some() || chat.return_token_ids,
            repeats_prompt: false,
            prompt_logprobs: chat.prompt_logprobs.is_some(),
            prompt_only: false,
            counts_on: counts_on(chat.stream),
            rank: false,
            echo: chat.echo.then(|| echoed(chat)).flatten(),
            draft,
            adapter: None,
            guided: None,
            cache_salt: chat.cache_salt.clone(),
            priority: chat.priority,
            named: named([&chat.cache_key]),
            keyed: has_key(&chat.cache_key),
            session: Some(session(chat)),
        })
    }

    fn complete(
        complete: &CompleteRequest,
        model: &TextModel,
        context_tokens: u32,
        surface: Surface,
        rules: AnswerRules,
    ) -> Result<Self, Failure> {
        let sampling = &complete.sampling;
        let asked = sampling.max_tokens.unwrap_or(COMPLETION_TOKENS_DEFAULT);
        let mut prompts = Vec::with_capacity(complete.prompts.len());
        for prompt in &complete.prompts {
            let of_prompt = |text| if complete.prompt_tail.is_some() { model.tail_of(text) } else { text };
            let tokens = match prompt {
                Prompt::Text(text) => encode(model, of_prompt(text), true)?,
                Prompt::Tokens(tokens) => tokens.clone(),
            };
            if tokens.is_empty() {
                return Err(Failure::new(ErrorKind::InvalidRequest, "A prompt has no tokens.").param("prompt"));
            }
            let whole = tokens.len();
            let tokens = truncate::tail(tokens, complete.prompt_tail, Some(asked), context_tokens);
            let max_tokens = completion_tokens(asked, tokens.len(), context_tokens)?;
            let text = match prompt {
                Prompt::Text(text) if complete.echo && tokens.len() == whole => of_prompt(text).to_owned(),
                _ if complete.echo => model.decode(&tokens, true),
                _ => String::new(),
            };
            let index = prompts.len() as u64;
            prompts.push(PlannedPrompt { tokens: tokens.into(), text, max_tokens, index });
        }
        let echoed = if complete.echo { complete.logprobs } else { None };
        let prompt_logprobs = complete.prompt_logprobs.max(echoed);
        let told = prompts.iter().map(|prompt| {
            let ids = if complete.return_token_ids { prompt.tokens.len() * 8 } else { 0 };
            prompt.text.len() + ids + prompt_logprobs.map_or(0, |top| logprobs_bytes(prompt.tokens.len(), top))
        });
        check_told(told.sum::<usize>().saturating_mul(complete.n as usize), "prompt")?;
        let rank = complete.best_of > complete.n;
        let logprobs = complete.logprobs.or(rank.then_some(0));
        Ok(Self {
            prompts,
            choices: complete.best_of.max(complete.n),
            sampling: Sampling {
                logprobs: wanted(logprobs),
                prompt_logprobs: wanted(prompt_logprobs),
                ..engine_sampling(sampling, model)?
            },
            options: ChoiceOptions {
                logprobs: complete.logprobs.is_some(),
                return_tokens: complete.return_token_ids,
                keep_special: complete.keep_special_tokens,
                ..options(sampling)?
            },
            tell_prompt: complete.echo || prompt_logprobs.is_some() || complete.return_token_ids,
            repeats_prompt: complete.echo,
            prompt_logprobs: prompt_logprobs.is_some(),
            prompt_only: asked == 0,
            counts_on: counts_on(complete.stream),
            rank,
            echo: None,
            draft: Draft::of_completion(complete, model, surface, rules)?,
            adapter: None,
            guided: None,
            cache_salt: complete.cache_salt.clone(),
            priority: complete.priority,
            named: named([&complete.cache_key, &complete.user]),
            keyed: has_key(&complete.cache_key),
            session: None,
        })
    }

    /// Prompt tokens, and the upper bound of output tokens.
    pub(super) fn measured(&self) -> Measured {
        let prompt_tokens = self.prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum();
        let most = self.prompts.iter().map(|prompt| u64::from(prompt.max_tokens)).sum::<u64>();
        Measured { prompt_tokens, completion_tokens_max: most * u64::from(self.choices) }
    }

    /// Lowers the priority to that of background requests.
    pub(super) fn step_back(&mut self) {
        self.priority = self.priority.max(PRIORITY_BACKGROUND);
    }

    /// Fits the plan to the workers that there are: leaves out what an answer can do without, and refuses a request that
    /// none of them can answer. `meets` tells whether one has all of these abilities.
    ///
    /// Workers differ in the middle of an upgrade, and those of a checkpoint without a `tokenizer.json` follow no grammar.
    /// While no worker is ready, the last abilities count, and the request waits for a worker that has them.
    pub(super) fn fit(&mut self, meets: &dyn Fn(&Needs) -> bool) -> Result<(), Failure> {
        let needs = self.needs();
        if meets(&needs) {
            return Ok(());
        }
        // `max_tokens` alone bounds the reasoning then.
        self.sampling.reasoning = None;
        let needs = self.needs();
        if meets(&needs) { Ok(()) } else { Err(unable(&needs, meets)) }
    }

    fn needs(&self) -> Needs {
        Needs { adapter: self.adapter, ..penstock_pool::needs(&self.sampling, self.guided.as_deref()) }
    }

    /// Hash that identifies the conversation. Conversations of other tenants with the same name have another hash.
    fn session_of(&self, origin: &Origin) -> Option<u64> {
        let Some(name) = origin.session.as_deref().or(self.named.as_deref()) else {
            return self.session.map(|session| session ^ hash::stable(origin.tenant.as_bytes()));
        };
        let digest = Sha256::digest(salt(&origin.tenant, "session", Some(name), None));
        Some(u64::from_le_bytes(digest[..8].try_into().expect("a digest has 32 bytes")))
    }

    /// Job of the pool for one prompt.
    pub(super) fn job(&self, prompt: &PlannedPrompt, model: &str, origin: &Origin) -> Job {
        Job {
            prompt: prompt.tokens.clone(),
            choices: self.choices,
            sampling: Sampling {
                max_tokens: prompt.max_tokens,
                seed: seed_of_prompt(self.sampling.seed, prompt.index),
                ..self.sampling.clone()
            },
            salt: salt(&origin.tenant, model, self.cache_salt.as_deref(), self.adapter).into(),
            priority: self.priority.max(PRIORITY_MIN),
            deadline: origin.deadline,
            tenant: origin.tenant.as_str().into(),
            weight: origin.weight.max(1),
            session: self.session_of(origin),
            keyed: self.keyed || origin.session.is_some(),
            grammar: self.guided.clone(),
            adapter: self.adapter,
            pooling: Pooling::None,
            second_text: 0,
            dense_layers: 0,
            pooled_from: 0,
            explain: origin.explain,
            sent: origin.sent.clone(),
        }
    }
}

/// Tools that an answer may call, for its parser.
fn callable(chat: &ChatRequest) -> Arc<[CallableTool]> {
    match chat.tool_choice {
        ToolChoice::None => Arc::default(),
        _ => chat.tools.iter().map(CallableTool::from).collect(),
    }
}

/// Text that the answer continues: that of the last message, unless a new turn is opened behind another role's message.
fn echoed(chat: &ChatRequest) -> Option<String> {
    let last = chat.messages.last()?;
    let goes_on = !chat.add_generation_prompt || last.role == Role::Assistant;
    last.content.clone().filter(|text| goes_on && !text.is_empty())
}

/// Name of a conversation: the first of the fields that is not empty.
fn named<const N: usize>(names: [&Option<String>; N]) -> Option<String> {
    names.into_iter().flatten().find(|text| !text.is_empty()).cloned()
}

/// Returns true if the cache key is given and not empty.
fn has_key(key: &Option<String>) -> bool {
    key.as_ref().is_some_and(|key| !key.is_empty())
}

/// Hash of the parts that a conversation keeps from turn to turn: the client's `user`, and all messages to the first of
/// the user.
fn session(chat: &ChatRequest) -> u64 {
    let first = chat.messages.iter().position(|message| message.role == Role::User).unwrap_or(0);
    let opening = chat.messages.iter().take(first + 1).filter_map(|message| message.content.as_deref());
    chat.user
        .as_deref()
        .into_iter()
        .chain(opening)
        .fold(0, |sum, text| sum.rotate_left(1) ^ hash::stable(text.as_bytes()))
}

/// Output tokens that a worker is asked for: at least one, with room for it, also where only the prompt is wanted
/// (`asked` 0).
fn completion_tokens(asked: u32, prompt_tokens: usize, context_tokens: u32) -> Result<u32, Failure> {
    Ok(asked.min(room(prompt_tokens, context_tokens, "prompt")?).max(1))
}

fn counts_on(stream: Option<StreamOptions>) -> bool {
    stream.is_some_and(|stream| stream.include_usage && stream.continuous_usage_stats)
}

/// Seed of the prompt at `index`: equal prompts of one request draw differently, the first as if it were alone. (The
/// finalizer of SplitMix64.)
fn seed_of_prompt(seed: u64, index: u64) -> u64 {
    if index == 0 {
        return seed;
    }
    let mixed = seed.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Tokens of the context left behind a prompt.
fn room(prompt_tokens: usize, context_tokens: u32, param: &str) -> Result<u32, Failure> {
    let used = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
    match context_tokens.checked_sub(used) {
        Some(room @ 1..) => Ok(room),
        _ => {
            let message = format!(
                "This model's maximum context length is {context_tokens} tokens. However, your {param} resulted in {prompt_tokens} \
                 tokens. Please reduce the length of the {param}."
            );
            Err(Failure::new(ErrorKind::ContextLength, message).param(param))
        }
    }
}

/// Estimated bytes of a prompt's log-probabilities in the answer.
fn logprobs_bytes(tokens: usize, top: u32) -> usize {
    tokens.saturating_mul(top as usize + 1).saturating_mul(32)
}

/// Refuses an answer whose echo of the prompts is too large: its size is known before anything is computed.
fn check_told(bytes: usize, param: &str) -> Result<(), Failure> {
    if bytes <= ANSWER_BYTES_MAX {
        return Ok(());
    }
    let message = format!(
        "{param}: repeating the prompt and its log-probabilities would make an answer of about {} MiB; {} are allowed. Ask for fewer \
         choices, log-probabilities or prompts.",
        bytes >> 20,
        ANSWER_BYTES_MAX >> 20
    );
    Err(ApiError { kind: ApiErrorKind::TooLarge, ..ApiError::invalid(param, message) }.into())
}

fn wanted(logprobs: Option<u32>) -> i32 {
    logprobs.map_or(-1, |count| count.min(i32::MAX as u32) as i32)
}

fn random<const N: usize>() -> Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Failure::internal(format!("random numbers: {error}")))?;
    Ok(bytes)
}

/// Sampling parameters: the request's values, else the model's, else the API's.
fn engine_sampling(asked: &SamplingParams, model: &TextModel) -> Result<Sampling, Failure> {
    let default = model.default_sampling();
    let seed = match asked.seed {
        Some(seed) => seed,
        None => u64::from_le_bytes(random()?),
    };
    // A checkpoint may name end tokens that its vocabulary lacks; none can be drawn.
    let eos = model.eos_tokens().iter().filter(|id| !asked.ignore_eos && **id < model.vocab_size());
    let mut stop_tokens: Vec<u32> = eos.chain(&asked.stop_token_ids).copied().collect();
    stop_tokens.sort_unstable();
    stop_tokens.dedup();
    Ok(Sampling {
        temperature: asked.temperature.or(default.temperature).unwrap_or(1.0),
        top_k: asked.top_k.or(default.top_k).unwrap_or(0),
        top_p: asked.top_p.or(default.top_p).unwrap_or(1.0),
        min_p: asked.min_p.or(default.min_p).unwrap_or(0.0),
        presence_penalty: asked.presence_penalty,
        frequency_penalty: asked.frequency_penalty,
        repetition_penalty: asked.repetition_penalty.or(default.repetition_penalty).unwrap_or(1.0),
        logit_bias: asked.logit_bias.iter().map(|(token, bias)| LogitBias { token: *token, bias: *bias }).collect(),
        seed,
        max_tokens: 1,
        min_tokens: asked.min_tokens,
        stop_tokens,
        logprobs: -1,
        prompt_logprobs: -1,
        allowed_tokens: asked.allowed_token_ids.clone(),
        bad_words: bad_words(&asked.bad_words, model)?,
        logprob_tokens: asked.logprob_token_ids.clone(),
        reasoning: None,
    })
}

/// Tokens of the bad words, as written at the beginning of a text and, where that differs, behind a space.
fn bad_words(words: &[String], model: &TextModel) -> Result<Vec<BadWord>, Failure> {
    let mut out: Vec<BadWord> = Vec::with_capacity(2 * words.len());
    for word in words {
        let encode = |text: &str| {
            let refused = |error| ApiError { param: Some("bad_words".to_owned()), ..ApiError::from(error) };
            model.encode(text, false).map_err(refused)
        };
        let (first, later) = (encode(word.trim_start())?, encode(&format!(" {}", word.trim_start()))?);
        let differs = later != first;
        let forms = [Some(first), Some(later).filter(|_| differs)];
        out.extend(forms.into_iter().flatten().filter(|tokens| !tokens.is_empty()).map(|tokens| BadWord { tokens }));
    }
    Ok(out)
}

fn options(asked: &SamplingParams) -> Result<ChoiceOptions, Failure> {
    Ok(ChoiceOptions {
        stop: asked.stop.clone(),
        include_stop: asked.include_stop,
        stop_token_ids: asked.stop_token_ids.clone(),
        ignore_eos: asked.ignore_eos,
        min_tokens: u64::from(asked.min_tokens),
        call_ids: random()?,
        ..ChoiceOptions::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_dialects::openai::{decode_chat, decode_completion};
    use penstock_proto::frames::{Guide, ReasoningBudget};
    use penstock_proto::{Capabilities, Capability};
    use penstock_types::Bounds;

    #[test]
    fn a_request_is_refused_by_name_where_no_worker_knows_a_field_of_it() {
        let id: Arc<str> = "g".into();
        let guided = || Some(Arc::new(Guided { id: id.clone(), guide: Guide::default() }));
        let bad_words = || vec![BadWord { tokens: vec![1] }];
        let full = || Plan {
            sampling: Sampling {
                bad_words: bad_words(),
                logprob_tokens: vec![1],
                reasoning: Some(ReasoningBudget::default()),
                ..Sampling::default()
            },
            guided: guided(),
            ..plan()
        };
        let worker = |grammar: &'static str, has: Capabilities| move |needs: &Needs| needs.are_met_by(grammar, has, []);
        let all = Capabilities::all();
        let mut asked = full();
        assert!(asked.fit(&worker("g", all)).is_ok() && asked.sampling.reasoning.is_some());
        assert!(asked.fit(&worker("g", all.without(Capability::ReasoningBudgets.into()))).is_ok());
        assert_eq!(asked.sampling.reasoning, None, "an answer can do without");
        let refused = |grammar, has| {
            let failure = full().fit(&worker(grammar, has)).expect_err("no worker does");
            assert_eq!(failure.status(), 503);
            (failure.message.to_string(), failure.param.as_deref().map(str::to_owned))
        };
        for (grammar, has, lacking, param) in [
            ("g", all.without(Capability::BadWords.into()), "bad_words", Some("bad_words")),
            ("g", all.without(Capability::LogprobTokens.into()), "logprob_token_ids", Some("logprob_token_ids")),
            ("", all, "a grammar", None),
            ("", Capabilities::NONE, "a grammar and bad_words and logprob_token_ids", Some("bad_words")),
        ] {
            let message = format!("No worker of this model can follow {lacking} at present.");
            assert_eq!(refused(grammar, has), (message, param.map(str::to_owned)));
        }
        // Two workers have it all, and neither of them alone.
        let (one, other) = (worker("g", Capabilities::NONE), worker("", all));
        let failure = full().fit(&|needs| one(needs) || other(needs)).expect_err("no worker does");
        assert_eq!(failure.param.as_deref(), Some("bad_words"));
        assert!(plan().fit(&worker("", Capabilities::NONE)).is_ok(), "a request of the first version");
    }

    #[test]
    fn a_prompt_must_leave_room() {
        assert_eq!(room(99, 100, "messages").map_err(|f| f.status()), Ok(1));
        for tokens in [100, 101, usize::MAX] {
            let failure = room(tokens, 100, "messages").expect_err("no room");
            assert_eq!((failure.status(), failure.shape().code), (400, Some("context_length_exceeded")));
        }
    }

    #[test]
    fn the_end_of_a_prompt_is_kept_however_long_the_prompt_is() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
        let model = TextModel::from_dir(&folder).expect("the demo model's tokenizer");
        let text = format!("{} and the very last words", "é1 ".repeat(model.text_bytes_max() / 4 + 1));
        assert!(text.len() > model.text_bytes_max());
        let rules = AnswerRules::default;
        let complete = |keys: &str| {
            let body = format!(r#"{{"model":"m","prompt":"{text}","max_tokens":4{keys}}}"#);
            let request = decode_completion(body.as_bytes(), &Bounds::default()).expect("a request");
            Plan::complete(&request, &model, 100, Surface::Completions, rules())
                .map(|plan| plan.prompts[0].tokens.clone())
        };
        let want = model.encode(" and the very last words", false).expect("tokens");
        let kept = complete(&format!(r#","truncate_prompt_tokens":{}"#, want.len())).expect("it is cut");
        assert_eq!(kept[..], want[..]);
        let fitting = complete(r#","truncate_prompt_tokens":-1"#).expect("it is cut");
        assert!(fitting.len() <= 96 && fitting.ends_with(&want), "{}", fitting.len());
        assert_eq!(complete("").map_err(|failure| failure.shape().code), Err(Some("context_length_exceeded")));
        let chat = |keys: &str| {
            let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]{keys}}}"#);
            let request = decode_chat(body.as_bytes(), &Bounds::default()).expect("a request");
            Plan::chat(&request, &model, 100, Surface::Chat, rules()).map(|plan| plan.prompts[0].tokens.to_vec())
        };
        let kept = chat(r#","truncate_prompt_tokens":24"#).expect("it is cut");
        assert!(kept.len() == 24 && model.decode(&kept, true).contains("very last words<|im_end|>"));
        assert_eq!(chat("").map_err(|failure| failure.shape().code), Err(Some("context_length_exceeded")));
    }

    #[test]
    fn the_context_holds_what_is_really_asked_of_a_worker() {
        let asked = |asked, prompt| completion_tokens(asked, prompt, 100).map_err(|failure| failure.shape().code);
        assert_eq!([asked(0, 99), asked(1, 99), asked(50, 99), asked(50, 80)], [Ok(1), Ok(1), Ok(1), Ok(20)]);
        for tokens in [0, 1, 50] {
            assert_eq!(asked(tokens, 100), Err(Some("context_length_exceeded")));
        }
    }

    #[test]
    fn a_conversation_is_the_same_from_turn_to_turn() {
        let of = |messages: &str, rest: &str| {
            let body = format!(r#"{{"model":"m","messages":[{messages}]{rest}}}"#);
            session(&decode_chat(body.as_bytes(), &Bounds::default()).expect("a request"))
        };
        let system = r#"{"role":"system","content":"Be brief."}"#;
        let user = |text: &str| format!(r#"{{"role":"user","content":"{text}"}}"#);
        let first = format!("{system},{}", user("Why?"));
        let later = format!(r#"{first},{{"role":"assistant","content":"So."}},{}"#, user("And then?"));
        let other = format!("{system},{}", user("How?"));
        assert_eq!(of(&first, ""), of(&later, ""));
        assert_ne!(of(&first, ""), of(&other, ""), "another begins in another way");
        assert_ne!(of(&first, ""), of(&first, r#","user":"ann""#), "and is another's");
    }

    #[test]
    fn all_that_a_template_reads_counts_as_work() {
        let empty = r#"{"model":"m","messages":[{"role":"user","content":""}]}"#;
        let decoded = |body: &str| decode_chat(body.as_bytes(), &Bounds::default()).expect("a request");
        let base = chat_bytes(&decoded(empty));
        let long = "x".repeat(10_000);
        let call = format!(r#"{{"id":"c","type":"function","function":{{"name":"f","arguments":"{long}"}}}}"#);
        let tool = format!(r#"{{"type":"function","function":{{"name":"f","description":"{long}"}}}}"#);
        for body in [
            empty.replace(r#""content":"""#, &format!(r#""content":"{long}""#)),
            empty.replace(r#""user","content":"""#, &format!(r#""assistant","tool_calls":[{call}]"#)),
            empty.replace("]}", &format!(r#"],"tools":[{tool}]}}"#)),
            empty.replace("]}", &format!(r#"],"chat_template_kwargs":{{"k":"{long}"}}}}"#)),
        ] {
            assert!(chat_bytes(&decoded(&body)) >= base + long.len(), "{}", &body[..120]);
        }
        assert_eq!(prompt_bytes(&Prompt::Tokens(vec![1; 1000])), 4000);
    }

    fn plan() -> Plan {
        Plan {
            prompts: Vec::new(),
            choices: 1,
            sampling: Sampling::default(),
            options: ChoiceOptions::default(),
            tell_prompt: false,
            repeats_prompt: false,
            prompt_logprobs: false,
            prompt_only: false,
            counts_on: false,
            rank: false,
            echo: None,
            draft: None,
            adapter: None,
            guided: None,
            cache_salt: None,
            priority: 0,
            named: None,
            keyed: false,
            session: None,
        }
    }

    #[test]
    fn only_a_key_or_a_session_is_kept_together_by_name() {
        let prompt = PlannedPrompt { index: 0, tokens: Arc::from([1]), text: String::new(), max_tokens: 1 };
        let job = |keyed, header: Option<&str>| {
            let origin = Origin { session: header.map(Into::into), ..Origin::default() };
            Plan { keyed, session: Some(7), ..plan() }.job(&prompt, "m", &origin).keyed
        };
        assert_eq!([job(false, None), job(true, None), job(false, Some("a"))], [false, true, true]);
        assert_eq!([None, Some(""), Some("k")].map(|key| has_key(&key.map(str::to_owned))), [false, false, true]);
    }

    #[test]
    fn nobody_goes_first_for_free() {
        let prompt = PlannedPrompt { index: 0, tokens: Arc::from([1]), text: String::new(), max_tokens: 1 };
        let origin = Origin { tenant: "t".into(), ..Origin::default() };
        let given = |priority| Plan { priority, ..plan() }.job(&prompt, "m", &origin).priority;
        assert_eq!([i32::MIN, -1, 0, 7].map(given), [0, 0, 0, 7]);
    }

    #[test]
    fn a_conversation_is_what_the_header_says_else_the_body() {
        let of = |tenant: &str, header: Option<&str>, key: Option<&str>, known: Option<u64>| {
            let plan = Plan { named: named([&key.map(str::to_owned)]), session: known, ..plan() };
            plan.session_of(&Origin { tenant: tenant.into(), session: header.map(Into::into), ..Origin::default() })
        };
        assert_eq!(of("t", None, None, None), None);
        assert_ne!(of("t", None, None, Some(7)), of("s", None, None, Some(7)));
        assert_eq!(of("t", Some("a"), Some("k"), Some(7)), of("t", Some("a"), None, None));
        assert_eq!(of("t", None, Some("k"), Some(7)), of("t", None, Some("k"), Some(8)));
        assert_eq!(of("t", None, Some(""), Some(7)), of("t", None, None, Some(7)));
        assert_ne!(of("t", None, Some("k"), None), of("s", None, Some("k"), None));
    }

    #[test]
    fn what_is_said_of_prompts_is_bounded_before_anything_is_computed() {
        assert!(check_told(logprobs_bytes(2048, 20) * 32, "prompt").is_ok());
        for bytes in [ANSWER_BYTES_MAX + 1, logprobs_bytes(8192, 20) * 128, logprobs_bytes(usize::MAX, u32::MAX)] {
            let failure = check_told(bytes, "prompt").expect_err("too much");
            assert_eq!((failure.status(), failure.shape().code), (400, Some("above_maximum")));
            assert_eq!(failure.param.as_deref(), Some("prompt"));
        }
    }

    #[test]
    fn equal_prompts_draw_differently_and_the_same_again() {
        let seeds: std::collections::HashSet<u64> = (0..1024).map(|index| seed_of_prompt(7, index)).collect();
        assert_eq!(seeds.len(), 1024);
        assert_eq!(seed_of_prompt(7, 0), 7);
        assert_eq!(seed_of_prompt(7, 3), seed_of_prompt(7, 3));
    }

    #[test]
    fn an_adapter_is_asked_of_the_worker_that_does_the_rest() {
        let guided = Arc::new(Guided { id: "g".into(), guide: Guide::default() });
        let plan = || Plan { adapter: Some(AdapterId(7)), guided: Some(Arc::clone(&guided)), ..plan() };
        let worker = |grammar: &'static str, id| {
            move |needs: &Needs| needs.are_met_by(grammar, Capabilities::all(), [AdapterId(id)])
        };
        assert!(plan().fit(&worker("g", 7)).is_ok());
        let refused = |meets: &dyn Fn(&Needs) -> bool| {
            let failure = plan().fit(meets).expect_err("no worker does");
            (failure.status(), failure.message)
        };
        let lacking = |what: &str| (503, format!("No worker of this model {what} at present.").into_boxed_str());
        assert_eq!(refused(&worker("g", 8)), lacking("has its adapter"));
        assert_eq!(refused(&worker("", 7)), lacking("can follow a grammar"));
        let (one, other) = (worker("g", 8), worker("", 7));
        assert_eq!(refused(&|needs| one(needs) || other(needs)), lacking("can follow a grammar"));
    }
}
