//! The internal request, independent of dialects. Every field is checked, so its holder need not check again.
//!
//! A request can express more than any single upstream supports: an upstream's codec refuses the unsupported fields,
//! or leaves them out by a rule on its reference page.

use bytes::{BufMut, BytesMut};

use crate::write;

/// A client's request, by operation.
#[derive(Clone, Debug)]
pub enum Request {
    /// A conversation to be continued by the model.
    Chat(Box<ChatRequest>),
    /// Prompts to be continued as plain text.
    Complete(Box<CompleteRequest>),
    /// Texts to be turned into vectors.
    Embed(Box<EmbedRequest>),
    /// Documents to be ranked by relevance to a query.
    Rerank(Box<RerankRequest>),
}

impl Request {
    /// Name of the model, as the client gave it.
    pub fn model(&self) -> &str {
        match self {
            Request::Chat(chat) => &chat.model,
            Request::Complete(complete) => &complete.model,
            Request::Embed(embed) => &embed.model,
            Request::Rerank(rerank) => &rerank.model,
        }
    }

    /// Returns true if the answer is to be streamed.
    pub fn stream(&self) -> bool {
        match self {
            Request::Chat(chat) => chat.stream.is_some(),
            Request::Complete(complete) => complete.stream.is_some(),
            Request::Embed(_) | Request::Rerank(_) => false,
        }
    }

    /// Names of unknown fields, which were ignored.
    pub fn ignored(&self) -> &[String] {
        match self {
            Request::Chat(chat) => &chat.ignored,
            Request::Complete(complete) => &complete.ignored,
            Request::Embed(embed) => &embed.ignored,
            Request::Rerank(rerank) => &rerank.ignored,
        }
    }
}

/// Options of a streamed answer; their presence asks for a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// True if the stream ends with a chunk of usage and no choices.
    pub include_usage: bool,
    /// True if every chunk carries usage (vLLM's name).
    pub continuous_usage_stats: bool,
}

/// A conversation to be continued.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// Name of the model, as the client gave it.
    pub model: String,
    /// Turns of the conversation; at least one.
    pub messages: Vec<Message>,
    /// Functions that the model may call; may be empty.
    pub tools: Vec<Tool>,
    /// Choice of whether and which tools are called.
    pub tool_choice: ToolChoice,
    /// True if one answer may hold several calls (default true).
    pub parallel_tool_calls: bool,
    /// True if the client is shown the first call of an answer and no other: a second one is no fault then.
    pub shows_one_call: bool,
    /// Required form of the answer.
    pub response_format: ResponseFormat,
    /// Sampling parameters of all choices.
    pub sampling: SamplingParams,
    /// Number of choices, from 1.
    pub n: u32,
    /// Stream options; `None` asks for a whole answer.
    pub stream: Option<StreamOptions>,
    /// Log-probabilities with the k best tokens, if `Some(k)`.
    pub logprobs: Option<u32>,
    /// Log-probabilities of the prompt with the k best tokens (vLLM's extension).
    pub prompt_logprobs: Option<u32>,
    /// Reasoning effort asked for; `None` leaves it to the template.
    pub reasoning_effort: Option<ReasoningEffort>,
    /// Most reasoning tokens, where the client gives a number (Anthropic's `budget_tokens`, Gemini's `thinkingBudget`,
    /// vLLM's `thinking_token_budget`); 0 switches reasoning off.
    pub reasoning_tokens_max: Option<u32>,
    /// Length of the answer that the client wishes (`verbosity`).
    pub verbosity: Option<Verbosity>,
    /// The client's id of its own user.
    pub user: Option<String>,
    /// Key that requests of one conversation have in common (`prompt_cache_key`).
    pub cache_key: Option<String>,
    /// JSON object of template arguments (bounded), as text.
    pub template_kwargs: Option<String>,
    /// True to open the assistant's turn at the end of the prompt (default true).
    pub add_generation_prompt: bool,
    /// True to continue the last assistant message instead of opening a new turn.
    pub continue_final_message: bool,
    /// True if the answer repeats, at its start, the last message if it is the assistant's or the one being continued
    /// (vLLM's `echo`).
    pub echo: bool,
    /// Part of the prompt that is kept.
    pub prompt_tail: Option<PromptTail>,
    /// True if the oldest turns may be left out where the conversation does not fit the context (`truncation:
    /// "auto"`).
    pub truncates: bool,
    /// True to put special tokens into the text.
    pub keep_special_tokens: bool,
    /// True to return token ids too (vLLM's `return_token_ids`).
    pub return_token_ids: bool,
    /// Form of the token names in log-probabilities.
    pub token_names: TokenNames,
    /// Salt that narrows sharing of the prefix cache: only requests with the same salt share blocks.
    pub cache_salt: Option<String>,
    /// Scheduling priority at the engine; a lower number runs first, 0 is normal.
    pub priority: i32,
    /// Names of unknown fields: ignored, with a warning.
    pub ignored: Vec<String>,
}

impl ChatRequest {
    /// A request with default settings for `messages`.
    pub fn new(model: String, messages: Vec<Message>) -> Self {
        Self {
            model,
            messages,
            tools: Vec::new(),
            tool_choice: ToolChoice::None,
            parallel_tool_calls: true,
            shows_one_call: false,
            response_format: ResponseFormat::Text,
            sampling: SamplingParams::default(),
            n: 1,
            stream: None,
            logprobs: None,
            prompt_logprobs: None,
            reasoning_effort: None,
            reasoning_tokens_max: None,
            verbosity: None,
            user: None,
            cache_key: None,
            template_kwargs: None,
            add_generation_prompt: true,
            continue_final_message: false,
            echo: false,
            prompt_tail: None,
            truncates: false,
            keep_special_tokens: false,
            return_token_ids: false,
            token_names: TokenNames::Text,
            cache_salt: None,
            priority: 0,
            ignored: Vec::new(),
        }
    }
}

/// A plain continuation of prompts.
#[derive(Clone, Debug)]
pub struct CompleteRequest {
    /// Name of the model, as the client gave it.
    pub model: String,
    /// One or more prompts; choices are numbered `prompt · n + k`.
    pub prompts: Vec<Prompt>,
    /// Sampling parameters of all choices.
    pub sampling: SamplingParams,
    /// Number of choices per prompt, from 1.
    pub n: u32,
    /// Choices generated per prompt, of which the `n` best by mean log-probability are returned; at least `n`.
    pub best_of: u32,
    /// Required form of each choice's text, without the prompt and the suffix around it.
    pub response_format: ResponseFormat,
    /// True to return the prompt in front of the text.
    pub echo: bool,
    /// Text appended to each choice (not seen by the model).
    pub suffix: Option<String>,
    /// Stream options; `None` asks for a whole answer.
    pub stream: Option<StreamOptions>,
    /// Log-probabilities with the k best tokens, if `Some(k)`.
    pub logprobs: Option<u32>,
    /// Log-probabilities of the prompt with the k best tokens (vLLM's extension).
    pub prompt_logprobs: Option<u32>,
    /// True to put special tokens into the text.
    pub keep_special_tokens: bool,
    /// True to return token ids too (vLLM's `return_token_ids`).
    pub return_token_ids: bool,
    /// Form of the token names in log-probabilities.
    pub token_names: TokenNames,
    /// Part of each prompt that is kept.
    pub prompt_tail: Option<PromptTail>,
    /// Salt that narrows sharing of the prefix cache: only requests with the same salt share blocks.
    pub cache_salt: Option<String>,
    /// The client's id of its own user.
    pub user: Option<String>,
    /// Key that requests of one conversation have in common (`prompt_cache_key`).
    pub cache_key: Option<String>,
    /// Scheduling priority at the engine; a lower number runs first, 0 is normal.
    pub priority: i32,
    /// Names of unknown fields: ignored, with a warning.
    pub ignored: Vec<String>,
}

/// Part of a prompt that is kept, counted from its end (vLLM's `truncate_prompt_tokens`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptTail {
    /// The last so many tokens of the prompt.
    Tokens(u32),
    /// As many tokens as the context holds (-1).
    Fitting,
}

/// Form of the token names in log-probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenNames {
    /// Text of the token; the default.
    #[default]
    Text,
    /// Token id, as `token_id:7` (vLLM's `return_tokens_as_token_ids`).
    Ids,
}

/// A prompt as the client gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text to be tokenized, with the special tokens that the tokenizer adds.
    Text(String),
    /// Token ids, used as they are, without special tokens added.
    Tokens(Vec<u32>),
}

/// Sampling parameters within their documented bounds. The default leaves everything to the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingParams {
    /// Temperature, 0..=2; `None` is the model's own default.
    pub temperature: Option<f32>,
    /// Nucleus probability, above 0 and up to 1.
    pub top_p: Option<f32>,
    /// Number of most probable tokens to draw from, from 1; `Some(0)` means all (0 or -1 in the request).
    pub top_k: Option<u32>,
    /// Smallest probability relative to the best token's, 0..=1.
    pub min_p: Option<f32>,
    /// Presence penalty, -2..=2; 0 is off.
    pub presence_penalty: f32,
    /// Frequency penalty, -2..=2; 0 is off.
    pub frequency_penalty: f32,
    /// Repetition penalty, above 0; `None` is the model's own default.
    pub repetition_penalty: Option<f32>,
    /// Logit bias: token id to -100..=100.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random numbers; `None` if the client gave none.
    pub seed: Option<u64>,
    /// Most output tokens; `None` goes as far as the context (chat) or 16 (completions).
    pub max_tokens: Option<u32>,
    /// Least output tokens: end tokens are masked before.
    pub min_tokens: u32,
    /// True if the model's end tokens are ignored and do not end the answer.
    pub ignore_eos: bool,
    /// Up to 16 strings that end the answer.
    pub stop: Vec<String>,
    /// Token ids that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// True to leave the stop string in the text.
    pub include_stop: bool,
    /// Tokens that may be drawn; empty means all.
    pub allowed_token_ids: Vec<u32>,
    /// Words that the answer must not contain (vLLM's), none of them blank.
    pub bad_words: Vec<String>,
    /// Tokens whose log-probabilities come beside each generated token, instead of the best; empty means the best.
    pub logprob_token_ids: Vec<u32>,
}

/// Texts to be turned into vectors.
#[derive(Clone, Debug)]
pub struct EmbedRequest {
    /// Name of the model, as the client gave it.
    pub model: String,
    /// Texts, or their token ids; at least one.
    pub inputs: Vec<Prompt>,
    /// Length of the vectors, where the model has a choice.
    pub dimensions: Option<u32>,
    /// Purpose of the vectors, in the words of the provider that supports it (Gemini's `taskType`).
    pub task: Option<String>,
    /// True if the end of a text that is too long is left out, where other requests are refused (Ollama's `truncate`).
    pub truncate: bool,
    /// The client's id of its own user.
    pub user: Option<String>,
    /// Names of unknown fields: ignored, with a warning.
    pub ignored: Vec<String>,
}

/// Documents to be ranked by relevance to a query.
#[derive(Clone, Debug)]
pub struct RerankRequest {
    /// Name of the model, as the client gave it.
    pub model: String,
    /// Query that the documents are compared with.
    pub query: String,
    /// Documents as text; at least one.
    pub documents: Vec<String>,
    /// Number of best documents in the answer; `None` means all.
    pub top_n: Option<u32>,
    /// True if the answer repeats the documents' text.
    pub return_documents: bool,
    /// Names of unknown fields: ignored, with a warning.
    pub ignored: Vec<String>,
}

/// Required form of an answer: at most one constraint per request. Sizes lie within the request's bounds; schemas are
/// JSON objects, expressions and grammars are as the client wrote them and have not been compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ResponseFormat {
    /// Any text; the default.
    #[default]
    Text,
    /// Any JSON object (JSON mode), without a schema.
    JsonObject,
    /// JSON that matches a schema.
    JsonSchema {
        /// Name that the client gave the schema.
        name: String,
        /// Purpose of the schema, in words for the model.
        description: Option<String>,
        /// The schema, compact JSON text.
        schema: String,
        /// True if the answer must match the schema exactly.
        strict: bool,
    },
    /// Text that matches this regular expression as a whole (vLLM's and SGLang's `regex`); not empty.
    Regex(String),
    /// One of these texts, letter for letter (vLLM's `choice`, Gemini's `text/x.enum`); at least one, each of them once
    /// and none of them empty.
    Choice(Vec<String>),
    /// Text that a context-free grammar derives (vLLM's `grammar`, SGLang's `ebnf`, llama.cpp's `grammar`).
    Grammar {
        /// Text of the grammar, as the client wrote it; not empty.
        text: String,
        /// Notation of the grammar; `None` where the client's field leaves it open (vLLM reads Lark and GBNF there).
        syntax: Option<GrammarSyntax>,
    },
    /// Free text in which parts between tags are constrained: vLLM's structural tag as compact JSON text, an object
    /// with `structures` and `triggers` (`{"structures":[{"begin","schema","end"}],"triggers":[…]}`) or with `format`.
    /// What lies inside these fields has not been checked.
    StructuralTag(String),
}

/// Notation of a grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrammarSyntax {
    /// The GBNF of llama.cpp, which SGLang calls EBNF: rules `name ::= …`, the first symbol is `root`.
    Gbnf,
    /// Lark: rules `name: …`, the first symbol is `start`.
    Lark,
}

/// Speaker of a message in a conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Instructions (`developer` is read as this role).
    System,
    /// The user of the client's application; the default.
    #[default]
    User,
    /// The model, in an earlier turn.
    Assistant,
    /// Result of a tool call, given by the client.
    Tool,
}

/// One turn of a conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// Speaker of this message.
    pub role: Role,
    /// Text parts joined; `None` for null or absent.
    pub content: Option<String>,
    /// All parts in order, filled only if one of them is not text; else empty.
    pub parts: Vec<Part>,
    /// Name of the participant, where several share a role.
    pub name: Option<String>,
    /// Earlier reasoning of the assistant (`reasoning` or `reasoning_content`).
    pub reasoning: Option<String>,
    /// Opaque signature that the provider wants back with the reasoning (Anthropic's `signature`).
    pub reasoning_signature: Option<String>,
    /// Blocks of the earlier reasoning, where the API has blocks (Anthropic's): `reasoning` is their text.
    pub reasoning_blocks: Vec<ReasoningBlock>,
    /// Calls that the assistant made in this turn.
    pub tool_calls: Vec<ToolCall>,
    /// Id of the call that a tool message answers.
    pub tool_call_id: Option<String>,
    /// True if the call that a tool message answers has failed (Anthropic's `is_error`).
    pub tool_failed: bool,
}

/// Beginning of the signatures that the gateway itself makes. No provider takes them.
pub const OWN_SIGNATURE: &str = "penstock1.";

/// A block of an assistant's earlier reasoning, as the client sent it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasoningBlock {
    /// Index of the message in the client's list.
    pub message: usize,
    /// Index of the block in the message's content.
    pub block: usize,
    /// Text of the block; `None`: redacted reasoning, which only its maker can read.
    pub text: Option<String>,
    /// Signature of the block.
    pub signature: Option<String>,
}

/// A piece of a message: text or an image.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// A piece of plain text.
    Text(String),
    /// An image for the model to see.
    Image {
        /// URL or data of the image.
        source: ImageSource,
        /// Level of detail: low, high, auto.
        detail: Option<String>,
    },
}

/// Source of an image. The gateway never fetches it.
#[derive(Clone, Debug, PartialEq)]
pub enum ImageSource {
    /// A URL, which the upstream fetches.
    Url(String),
    /// Data in the request itself.
    Data {
        /// Media type, such as `image/png`.
        media_type: String,
        /// Data in base64, standard alphabet.
        base64: String,
    },
}

/// A call that the model made in an earlier turn.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Id by which the tool's result refers to the call.
    pub id: String,
    /// Name of the function that is called.
    pub name: String,
    /// JSON text of the arguments.
    pub arguments: String,
    /// Opaque signature that the provider wants back with the call (Gemini's thought signature).
    pub signature: Option<String>,
}

/// A function that the client offers to the model.
#[derive(Clone, Debug)]
pub struct Tool {
    /// Name of the function, by which calls refer to it.
    pub name: String,
    /// Description of the function, in words for the model.
    pub description: Option<String>,
    /// JSON schema of its arguments, compact JSON text.
    pub parameters: Option<String>,
    /// True if arguments must match the schema exactly.
    pub strict: bool,
    /// The whole tool in OpenAI's shape (compact JSON text), for templates; the client's own JSON where OpenAI's is
    /// its dialect.
    pub json: String,
}

impl Tool {
    /// Makes a tool from its fields; `json` is generated from them.
    pub fn function(name: String, description: Option<String>, parameters: Option<String>, strict: bool) -> Self {
        let mut out = BytesMut::with_capacity(96 + parameters.as_ref().map_or(0, String::len));
        out.put_slice(b"{\"type\":\"function\",\"function\":{\"name\":");
        write::string(&mut out, &name);
        if let Some(description) = &description {
            out.put_slice(b",\"description\":");
            write::string(&mut out, description);
        }
        if let Some(parameters) = &parameters {
            out.put_slice(b",\"parameters\":");
            out.put_slice(parameters.as_bytes());
        }
        if strict {
            out.put_slice(b",\"strict\":true");
        }
        out.put_slice(b"}}");
        // Only text was written.
        let json = String::from_utf8_lossy(&out).into_owned();
        Self { name, description, parameters, strict, json }
    }
}

/// Choice of whether and which tools are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// Tools are not shown to the model.
    None,
    /// The model decides whether to call and which.
    Auto,
    /// At least one call is demanded of the model.
    Required,
    /// A call of this function is demanded.
    Named(String),
    /// All tools are shown, but only some may be called (OpenAI's `allowed_tools`, Gemini's `allowedFunctionNames`).
    Allowed {
        /// Names of the functions that may be called: at least one, each of them a tool of the request and given once.
        names: Vec<String>,
        /// True if at least one call is demanded, as by [`ToolChoice::Required`]; false leaves it to the model, as
        /// [`ToolChoice::Auto`] does.
        required: bool,
    },
}

/// Length of the answer that the client wishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    /// Value `low`: a short answer.
    Low,
    /// Value `medium`, the model's own way.
    Medium,
    /// Value `high`: a long answer.
    High,
}

impl Verbosity {
    /// Words of the APIs, with their meaning.
    pub const WORDS: [(&'static str, Verbosity); 3] =
        [("low", Verbosity::Low), ("medium", Verbosity::Medium), ("high", Verbosity::High)];

    /// Word of the APIs.
    pub fn word(self) -> &'static str {
        match self {
            Verbosity::Low => "low",
            Verbosity::Medium => "medium",
            Verbosity::High => "high",
        }
    }
}

/// Reasoning effort that the client asks for, from none to the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningEffort {
    /// Value `none`: templates that support it switch thinking off.
    None,
    /// `minimal`. This and every stronger effort switch thinking on, with the given strength where a template knows
    /// it.
    Minimal,
    /// Value `low`.
    Low,
    /// Value `medium`.
    Medium,
    /// Value `high`.
    High,
    /// Values `xhigh` and `max`: the most that the upstream offers.
    Max,
}
