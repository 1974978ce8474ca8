//! One list of what each provider's encoder does with each field of the internal request.
//!
//! Encoders refuse by this list, and a test sets each field and compares what each encoder writes with what the list
//! says. A new field of a request does not pass that test before it has a row here, that is an answer for every
//! provider.

use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::request::{
    ChatRequest, CompleteRequest, EmbedRequest, PromptTail, RerankRequest, ResponseFormat, TokenNames, ToolChoice,
};

/// API of a provider, as an encoder writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// Chat completions at OpenAI itself and Azure, which refuse unknown fields.
    OpenAi,
    /// Chat completions at servers that are compatible with OpenAI, vLLM first.
    Compatible,
    /// OpenAI's Responses API.
    Responses,
    /// Anthropic's Messages API.
    Anthropic,
    /// Gemini's `generateContent`.
    Gemini,
    /// Bedrock's Converse API.
    Bedrock,
}

/// Columns of [`CHAT`].
pub const CHAT_APIS: [Api; 6] =
    [Api::OpenAi, Api::Compatible, Api::Responses, Api::Anthropic, Api::Gemini, Api::Bedrock];
/// Columns of [`COMPLETE`] and [`RERANK`]; the other APIs have no such operation.
pub const COMPLETE_APIS: [Api; 2] = [Api::OpenAi, Api::Compatible];
/// Columns of [`EMBED`].
pub const EMBED_APIS: [Api; 3] = [Api::OpenAi, Api::Compatible, Api::Gemini];

impl Api {
    /// Name of the API in an error message.
    fn name(self) -> &'static str {
        match self {
            Api::OpenAi => "OpenAI's API",
            Api::Compatible => "this server's API",
            Api::Responses => "OpenAI's Responses API",
            Api::Anthropic => "Anthropic's API",
            Api::Gemini => "Gemini's API",
            Api::Bedrock => "Bedrock's API",
        }
    }
}

/// Treatment of a field at one provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The field is written in the provider's own form. Where a model or another field of the request excludes it, the
    /// provider's reference page says so.
    Written,
    /// A request with the field is refused. The text names what the API lacks.
    Refused(&'static str),
    /// The field is left out, for this reason.
    LeftOut(&'static str),
}

use Fate::{LeftOut as L, Refused as R, Written as W};

/// A field of a request `T`, or one of its values, and its treatment by each of `N` APIs.
pub struct Row<T, const N: usize> {
    /// Path of the field in the internal request; a value that is treated on its own follows a colon.
    pub field: &'static str,
    /// Parameter that an error names, in OpenAI's words.
    pub param: &'static str,
    /// Returns true if the request asks for something by the field.
    pub is_asked: fn(&T) -> bool,
    /// Treatment by each API, in the order of the list's columns.
    pub fates: [Fate; N],
}

/// Refuses a request with a field that `api` cannot express.
pub(crate) fn refuse<T, const N: usize>(
    rows: &[Row<T, N>],
    columns: [Api; N],
    api: Api,
    request: &T,
) -> Result<(), ApiError> {
    let Some(column) = columns.iter().position(|column| *column == api) else { return Ok(()) };
    for Row { field, param, is_asked, fates } in rows {
        let Fate::Refused(what) = fates[column] else { continue };
        if is_asked(request) {
            let message = format!("{param}: {} has no {what}", api.name());
            let kind = match field.contains(':') {
                true => ApiErrorKind::UnsupportedValue,
                false => ApiErrorKind::Unsupported,
            };
            return Err(ApiError { kind, param: Some((*param).to_owned()), message });
        }
    }
    Ok(())
}

/// Refuses a conversation with a field that `api` cannot express.
pub(crate) fn refuse_chat(api: Api, chat: &ChatRequest) -> Result<(), ApiError> {
    refuse(CHAT, CHAT_APIS, api, chat)
}

const BY_TOKEN: Fate = R("rules by token id");
const NO_SAMPLER: Fate = L("the API has no such sampler, and the model's own sampling stays near");
const NO_TEMPLATE: Fate = L("the provider's template is not in the client's hands");
const NO_TAIL: Fate = R("way to shorten a prompt");
const NO_ECHO: Fate = R("echo of a message");
const NO_IDS: Fate = R("token ids");
const NO_LOGPROBS: Fate = R("log-probabilities");
const NO_LENGTH: Fate = R("least lengths");
const NO_WORDS: Fate = R("words to leave out");
const ONE_CHOICE: Fate = R("more than one choice");
const NO_REGEX: Fate = R("regular expressions for an answer");
const NO_CHOICE: Fate = R("choice among texts");
const NO_GRAMMAR: Fate = R("grammars for an answer");
const NO_TAG: Fate = R("structural tags");
const NO_JSON: Fate = R("\"json_object\"; give a \"json_schema\"");
const OWN_CACHE: Fate = L("the provider keeps caches apart by account");
const OWN_ROUTING: Fate = L("the provider finds common prefixes itself");
const OWN_QUEUE: Fate = L("the provider has queues of its own");
const OWN_CUT: Fate =
    L("the provider answers a conversation that does not fit with an error, which fallback can act on");
const NO_VERBOSITY: Fate = L("the API has no such wish, and the messages say what is wanted");
const NO_SEED: Fate = L("answers are not repeatable there");
const NO_USER: Fate = L("the API has no place for a user");
const NO_NAMES: Fate = L("names follow from the ids in the answer, where it has any");
const NO_SPECIAL: Fate = L("special tokens are never in its texts");

/// Fields of a conversation. Columns: [`CHAT_APIS`].
#[rustfmt::skip]
pub const CHAT: &[Row<ChatRequest, 6>] = &[
    Row { field: "model", param: "model", is_asked: |_| true, fates: [L(NAME), L(NAME), L(NAME), L(NAME), L(NAME), L(NAME)] },
    Row { field: "messages", param: "messages", is_asked: |chat| chat.messages.len() > 1, fates: [W, W, W, W, W, W] },
    Row { field: "tools", param: "tools", is_asked: |chat| !chat.tools.is_empty(), fates: [W, W, W, W, W, W] },
    Row { field: "tool_choice: none", param: "tool_choice", is_asked: |chat| hides(chat), fates: [W, W, W, W, W, W] },
    Row { field: "tool_choice: required", param: "tool_choice", is_asked: |chat| chat.tool_choice == ToolChoice::Required, fates: [W, W, W, W, W, W] },
    Row { field: "tool_choice: a function", param: "tool_choice", is_asked: |chat| matches!(chat.tool_choice, ToolChoice::Named(_)), fates: [W, W, W, W, W, W] },
    Row { field: "tool_choice: allowed tools", param: "tool_choice", is_asked: |chat| matches!(chat.tool_choice, ToolChoice::Allowed { required: false, .. }), fates: [W, W, W, W, W, W] },
    Row { field: "tool_choice: allowed tools, required", param: "tool_choice", is_asked: |chat| matches!(chat.tool_choice, ToolChoice::Allowed { required: true, .. }), fates: [W, W, W, W, W, W] },
    Row { field: "parallel_tool_calls", param: "parallel_tool_calls", is_asked: |chat| !chat.parallel_tool_calls && !chat.shows_one_call && calls(chat), fates: [W, W, W, W, R(ONE_CALL), R(ONE_CALL)] },
    Row { field: "shows_one_call", param: "functions", is_asked: |chat| chat.shows_one_call, fates: [OWN_CALLS, OWN_CALLS, OWN_CALLS, OWN_CALLS, OWN_CALLS, OWN_CALLS] },
    Row { field: "response_format: json_object", param: "response_format.type", is_asked: |chat| chat.response_format == ResponseFormat::JsonObject, fates: [W, W, W, NO_JSON, W, NO_JSON] },
    Row { field: "response_format: json_schema", param: "response_format.type", is_asked: |chat| matches!(chat.response_format, ResponseFormat::JsonSchema { .. }), fates: [W, W, W, W, W, W] },
    Row { field: "response_format: regex", param: "structured_outputs.regex", is_asked: |chat| matches!(chat.response_format, ResponseFormat::Regex(_)), fates: [NO_REGEX, W, NO_REGEX, NO_REGEX, NO_REGEX, NO_REGEX] },
    Row { field: "response_format: choice", param: "structured_outputs.choice", is_asked: |chat| matches!(chat.response_format, ResponseFormat::Choice(_)), fates: [NO_CHOICE, W, NO_CHOICE, NO_CHOICE, W, NO_CHOICE] },
    Row { field: "response_format: grammar", param: "structured_outputs.grammar", is_asked: |chat| matches!(chat.response_format, ResponseFormat::Grammar { .. }), fates: [NO_GRAMMAR, W, NO_GRAMMAR, NO_GRAMMAR, NO_GRAMMAR, NO_GRAMMAR] },
    Row { field: "response_format: structural_tag", param: "structured_outputs.structural_tag", is_asked: |chat| matches!(chat.response_format, ResponseFormat::StructuralTag(_)), fates: [NO_TAG, W, NO_TAG, NO_TAG, NO_TAG, NO_TAG] },
    Row { field: "n", param: "n", is_asked: |chat| chat.n > 1, fates: [W, W, ONE_CHOICE, ONE_CHOICE, W, ONE_CHOICE] },
    Row { field: "stream", param: "stream", is_asked: |chat| chat.stream.is_some(), fates: [W, W, W, W, W, W] },
    Row { field: "logprobs", param: "logprobs", is_asked: |chat| chat.logprobs.is_some(), fates: [W, W, W, NO_LOGPROBS, W, NO_LOGPROBS] },
    Row { field: "prompt_logprobs", param: "prompt_logprobs", is_asked: |chat| chat.prompt_logprobs.is_some(), fates: [W, W, NO_LOGPROBS_OF_PROMPT, NO_LOGPROBS, NO_LOGPROBS_OF_PROMPT, NO_LOGPROBS] },
    Row { field: "reasoning_effort", param: "reasoning_effort", is_asked: |chat| chat.reasoning_effort.is_some(), fates: [W, W, W, W, W, W] },
    Row { field: "reasoning_tokens_max", param: "thinking_token_budget", is_asked: |chat| chat.reasoning_tokens_max.is_some(), fates: [W, W, W, W, W, W] },
    Row { field: "verbosity", param: "verbosity", is_asked: |chat| chat.verbosity.is_some(), fates: [W, L("compatible servers do not know the field, and some refuse it"), W, NO_VERBOSITY, NO_VERBOSITY, NO_VERBOSITY] },
    Row { field: "user", param: "user", is_asked: |chat| chat.user.is_some(), fates: [W, W, W, W, NO_USER, NO_USER] },
    Row { field: "cache_key", param: "prompt_cache_key", is_asked: |chat| chat.cache_key.is_some(), fates: [W, L("compatible servers do not know the field, and some refuse it"), W, OWN_ROUTING, OWN_ROUTING, OWN_ROUTING] },
    Row { field: "template_kwargs", param: "chat_template_kwargs", is_asked: |chat| chat.template_kwargs.is_some(), fates: [W, W, R("arguments of a template"), NO_TEMPLATE, NO_TEMPLATE, NO_TEMPLATE] },
    Row { field: "add_generation_prompt", param: "add_generation_prompt", is_asked: |chat| !chat.add_generation_prompt, fates: [W, W, NO_TEMPLATE, NO_TEMPLATE, NO_TEMPLATE, NO_TEMPLATE] },
    Row { field: "continue_final_message", param: "continue_final_message", is_asked: |chat| chat.continue_final_message, fates: [W, W, R(CONTINUE), L("the API always continues a last message of the assistant"), R(CONTINUE), R(CONTINUE)] },
    Row { field: "echo", param: "echo", is_asked: |chat| chat.echo, fates: [W, W, NO_ECHO, NO_ECHO, NO_ECHO, NO_ECHO] },
    Row { field: "prompt_tail", param: "truncate_prompt_tokens", is_asked: |chat| matches!(chat.prompt_tail, Some(PromptTail::Tokens(_) | PromptTail::Fitting)), fates: [W, W, NO_TAIL, NO_TAIL, NO_TAIL, NO_TAIL] },
    Row { field: "truncates", param: "truncation", is_asked: |chat| chat.truncates, fates: [OWN_CUT, OWN_CUT, W, OWN_CUT, OWN_CUT, OWN_CUT] },
    Row { field: "keep_special_tokens", param: "skip_special_tokens", is_asked: |chat| chat.keep_special_tokens, fates: [W, W, R("special tokens in its texts"), NO_SPECIAL, NO_SPECIAL, NO_SPECIAL] },
    Row { field: "return_token_ids", param: "return_token_ids", is_asked: |chat| chat.return_token_ids, fates: [W, W, NO_IDS, NO_IDS, NO_IDS, NO_IDS] },
    Row { field: "token_names", param: "return_tokens_as_token_ids", is_asked: |chat| chat.token_names == TokenNames::Ids, fates: [W, W, NO_IDS, NO_NAMES, NO_NAMES, NO_NAMES] },
    Row { field: "cache_salt", param: "cache_salt", is_asked: |chat| chat.cache_salt.is_some(), fates: [W, W, OWN_CACHE, OWN_CACHE, OWN_CACHE, OWN_CACHE] },
    Row { field: "priority", param: "priority", is_asked: |chat| chat.priority != 0, fates: [W, W, OWN_QUEUE, OWN_QUEUE, OWN_QUEUE, OWN_QUEUE] },
    Row { field: "ignored", param: "ignored", is_asked: |chat| !chat.ignored.is_empty(), fates: [L(LOGGED), L(LOGGED), L(LOGGED), L(LOGGED), L(LOGGED), L(LOGGED)] },
    Row { field: "sampling.temperature", param: "temperature", is_asked: |chat| chat.sampling.temperature.is_some(), fates: [W, W, W, W, W, W] },
    Row { field: "sampling.top_p", param: "top_p", is_asked: |chat| chat.sampling.top_p.is_some(), fates: [W, W, W, W, W, W] },
    Row { field: "sampling.top_k", param: "top_k", is_asked: |chat| chat.sampling.top_k.is_some_and(|top| top > 0), fates: [W, W, R("top_k"), W, W, W] },
    Row { field: "sampling.min_p", param: "min_p", is_asked: |chat| chat.sampling.min_p.is_some_and(|min| min > 0.0), fates: [W, W, R("min_p"), NO_SAMPLER, NO_SAMPLER, NO_SAMPLER] },
    Row { field: "sampling.presence_penalty", param: "presence_penalty", is_asked: |chat| chat.sampling.presence_penalty != 0.0, fates: [W, W, R("penalties"), NO_SAMPLER, W, NO_SAMPLER] },
    Row { field: "sampling.frequency_penalty", param: "frequency_penalty", is_asked: |chat| chat.sampling.frequency_penalty != 0.0, fates: [W, W, R("penalties"), NO_SAMPLER, W, NO_SAMPLER] },
    Row { field: "sampling.repetition_penalty", param: "repetition_penalty", is_asked: |chat| chat.sampling.repetition_penalty.is_some(), fates: [W, W, R("penalties"), NO_SAMPLER, NO_SAMPLER, NO_SAMPLER] },
    Row { field: "sampling.logit_bias", param: "logit_bias", is_asked: |chat| !chat.sampling.logit_bias.is_empty(), fates: [W, W, R("biases by token id"), R("biases by token id"), R("biases by token id"), R("biases by token id")] },
    Row { field: "sampling.seed", param: "seed", is_asked: |chat| chat.sampling.seed.is_some(), fates: [W, W, NO_SEED, NO_SEED, W, NO_SEED] },
    Row { field: "sampling.max_tokens", param: "max_tokens", is_asked: |chat| chat.sampling.max_tokens.is_some(), fates: [W, W, W, W, W, W] },
    Row { field: "sampling.min_tokens", param: "min_tokens", is_asked: |chat| chat.sampling.min_tokens > 0, fates: [W, W, NO_LENGTH, NO_LENGTH, NO_LENGTH, NO_LENGTH] },
    Row { field: "sampling.ignore_eos", param: "ignore_eos", is_asked: |chat| chat.sampling.ignore_eos, fates: [W, W, NO_LENGTH, NO_LENGTH, NO_LENGTH, NO_LENGTH] },
    Row { field: "sampling.include_stop", param: "include_stop_str_in_output", is_asked: |chat| chat.sampling.include_stop && !chat.sampling.stop.is_empty(), fates: [W, W, R(STOP_SHOWN), R(STOP_SHOWN), R(STOP_SHOWN), R(STOP_SHOWN)] },
    Row { field: "sampling.stop", param: "stop", is_asked: |chat| !chat.sampling.stop.is_empty(), fates: [W, W, R("stop strings"), W, W, W] },
    Row { field: "sampling.stop_token_ids", param: "stop_token_ids", is_asked: |chat| !chat.sampling.stop_token_ids.is_empty(), fates: [W, W, BY_TOKEN, BY_TOKEN, BY_TOKEN, BY_TOKEN] },
    Row { field: "sampling.allowed_token_ids", param: "allowed_token_ids", is_asked: |chat| !chat.sampling.allowed_token_ids.is_empty(), fates: [W, W, BY_TOKEN, BY_TOKEN, BY_TOKEN, BY_TOKEN] },
    Row { field: "sampling.bad_words", param: "bad_words", is_asked: |chat| !chat.sampling.bad_words.is_empty(), fates: [W, W, NO_WORDS, NO_WORDS, NO_WORDS, NO_WORDS] },
    Row { field: "sampling.logprob_token_ids", param: "logprob_token_ids", is_asked: |chat| !chat.sampling.logprob_token_ids.is_empty(), fates: [W, W, R(LOGPROBS_BY_ID), R(LOGPROBS_BY_ID), R(LOGPROBS_BY_ID), R(LOGPROBS_BY_ID)] },
];

const NAME: &str = "the provider's own name for the model is written";
const LOGGED: &str = "names of unknown fields are for the log alone";
const OWN_CALLS: Fate = L("the gateway shows the client the first call of an answer");
const ONE_CALL: &str = "way to ask for one call at a time";
const CONTINUE: &str = "way to continue a message";
const STOP_SHOWN: &str = "stop strings in the text";
const LOGPROBS_BY_ID: &str = "log-probabilities by token id";
const NO_LOGPROBS_OF_PROMPT: Fate = R("log-probabilities of the prompt");

fn calls(chat: &ChatRequest) -> bool {
    !chat.tools.is_empty() && chat.tool_choice != ToolChoice::None
}

fn hides(chat: &ChatRequest) -> bool {
    !chat.tools.is_empty() && chat.tool_choice == ToolChoice::None
}

const LEGACY: Fate = R("constraints in plain completions");

/// Fields of a plain continuation. Columns: [`COMPLETE_APIS`]. The sampling fields are those of [`CHAT`].
#[rustfmt::skip]
pub const COMPLETE: &[Row<CompleteRequest, 2>] = &[
    Row { field: "model", param: "model", is_asked: |_| true, fates: [L(NAME), L(NAME)] },
    Row { field: "prompts", param: "prompt", is_asked: |request| request.prompts.len() > 1, fates: [W, W] },
    Row { field: "sampling", param: "sampling", is_asked: |request| request.sampling != Default::default(), fates: [W, W] },
    Row { field: "n", param: "n", is_asked: |request| request.n > 1, fates: [W, W] },
    Row { field: "best_of", param: "best_of", is_asked: |request| request.best_of > request.n, fates: [W, W] },
    Row { field: "response_format: json_object", param: "response_format.type", is_asked: |request| request.response_format == ResponseFormat::JsonObject, fates: [LEGACY, W] },
    Row { field: "response_format: json_schema", param: "response_format.type", is_asked: |request| matches!(request.response_format, ResponseFormat::JsonSchema { .. }), fates: [LEGACY, W] },
    Row { field: "response_format: regex", param: "structured_outputs.regex", is_asked: |request| matches!(request.response_format, ResponseFormat::Regex(_)), fates: [LEGACY, W] },
    Row { field: "response_format: choice", param: "structured_outputs.choice", is_asked: |request| matches!(request.response_format, ResponseFormat::Choice(_)), fates: [LEGACY, W] },
    Row { field: "response_format: grammar", param: "structured_outputs.grammar", is_asked: |request| matches!(request.response_format, ResponseFormat::Grammar { .. }), fates: [LEGACY, W] },
    Row { field: "response_format: structural_tag", param: "structured_outputs.structural_tag", is_asked: |request| matches!(request.response_format, ResponseFormat::StructuralTag(_)), fates: [LEGACY, W] },
    Row { field: "echo", param: "echo", is_asked: |request| request.echo, fates: [W, W] },
    Row { field: "suffix", param: "suffix", is_asked: |request| request.suffix.is_some(), fates: [L("the gateway puts it behind each choice"), L("the gateway puts it behind each choice")] },
    Row { field: "stream", param: "stream", is_asked: |request| request.stream.is_some(), fates: [W, W] },
    Row { field: "logprobs", param: "logprobs", is_asked: |request| request.logprobs.is_some(), fates: [W, W] },
    Row { field: "prompt_logprobs", param: "prompt_logprobs", is_asked: |request| request.prompt_logprobs.is_some(), fates: [W, W] },
    Row { field: "keep_special_tokens", param: "skip_special_tokens", is_asked: |request| request.keep_special_tokens, fates: [W, W] },
    Row { field: "return_token_ids", param: "return_token_ids", is_asked: |request| request.return_token_ids, fates: [W, W] },
    Row { field: "token_names", param: "return_tokens_as_token_ids", is_asked: |request| request.token_names == TokenNames::Ids, fates: [W, W] },
    Row { field: "prompt_tail", param: "truncate_prompt_tokens", is_asked: |request| request.prompt_tail.is_some(), fates: [W, W] },
    Row { field: "cache_salt", param: "cache_salt", is_asked: |request| request.cache_salt.is_some(), fates: [W, W] },
    Row { field: "user", param: "user", is_asked: |request| request.user.is_some(), fates: [W, W] },
    Row { field: "cache_key", param: "prompt_cache_key", is_asked: |request| request.cache_key.is_some(), fates: [L("plain completions have no such field"), L("plain completions have no such field")] },
    Row { field: "priority", param: "priority", is_asked: |request| request.priority != 0, fates: [W, W] },
    Row { field: "ignored", param: "ignored", is_asked: |request| !request.ignored.is_empty(), fates: [L(LOGGED), L(LOGGED)] },
];

/// Fields of a request for vectors. Columns: [`EMBED_APIS`]; the Responses API's codec asks as [`Api::OpenAi`] does.
#[rustfmt::skip]
pub const EMBED: &[Row<EmbedRequest, 3>] = &[
    Row { field: "model", param: "model", is_asked: |_| true, fates: [L(NAME), L(NAME), L(NAME)] },
    Row { field: "inputs", param: "input", is_asked: |request| request.inputs.len() > 1, fates: [W, W, W] },
    Row { field: "dimensions", param: "dimensions", is_asked: |request| request.dimensions.is_some(), fates: [W, W, W] },
    Row { field: "task", param: "taskType", is_asked: |request| request.task.is_some(), fates: [L("vectors have one purpose there"), L("vectors have one purpose there"), W] },
    Row { field: "truncate", param: "truncate", is_asked: |request| request.truncate, fates: [L("a long text is the provider's to cut or refuse"), L("a long text is the provider's to cut or refuse"), L("a long text is the provider's to cut or refuse")] },
    Row { field: "user", param: "user", is_asked: |request| request.user.is_some(), fates: [W, W, NO_USER] },
    Row { field: "ignored", param: "ignored", is_asked: |request| !request.ignored.is_empty(), fates: [L(LOGGED), L(LOGGED), L(LOGGED)] },
];

/// Fields of a request for scores. Columns: [`COMPLETE_APIS`].
#[rustfmt::skip]
pub const RERANK: &[Row<RerankRequest, 2>] = &[
    Row { field: "model", param: "model", is_asked: |_| true, fates: [L(NAME), L(NAME)] },
    Row { field: "query", param: "query", is_asked: |request| !request.query.is_empty(), fates: [W, W] },
    Row { field: "documents", param: "documents", is_asked: |request| request.documents.len() > 1, fates: [W, W] },
    Row { field: "top_n", param: "top_n", is_asked: |request| request.top_n.is_some(), fates: [W, W] },
    Row { field: "return_documents", param: "return_documents", is_asked: |request| request.return_documents, fates: [L("the gateway has the documents and repeats them itself"), L("the gateway has the documents and repeats them itself")] },
    Row { field: "ignored", param: "ignored", is_asked: |request| !request.ignored.is_empty(), fates: [L(LOGGED), L(LOGGED)] },
];
