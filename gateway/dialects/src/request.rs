//! The internal request. Every field is checked: whoever holds one does not check again.
//!
//! It can say more than any one upstream can do: what an upstream cannot express it refuses, or leaves out by a rule that its
//! reference page states.

use bytes::{BufMut, BytesMut};

use crate::write;

/// What a client asks for.
#[derive(Clone, Debug)]
pub enum Request {
    /// A conversation.
    Chat(Box<ChatRequest>),
    /// Plain continuation.
    Complete(Box<CompleteRequest>),
    /// Vectors of texts.
    Embed(Box<EmbedRequest>),
    /// Relevance of documents to a query.
    Rerank(Box<RerankRequest>),
}

impl Request {
    /// Name of the model asked for.
    pub fn model(&self) -> &str {
        match self {
            Request::Chat(chat) => &chat.model,
            Request::Complete(complete) => &complete.model,
            Request::Embed(embed) => &embed.model,
            Request::Rerank(rerank) => &rerank.model,
        }
    }

    /// Whether the answer is to be streamed.
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

/// Streaming wishes; present = stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// A last chunk with usage and no choices.
    pub include_usage: bool,
    /// Usage in every chunk (vLLM's name).
    pub continuous_usage_stats: bool,
}

/// A conversation to be continued.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// Model name.
    pub model: String,
    /// At least one.
    pub messages: Vec<Message>,
    /// Functions the model may call.
    pub tools: Vec<Tool>,
    /// How it may call them.
    pub tool_choice: ToolChoice,
    /// Several calls in one answer are allowed (default true).
    pub parallel_tool_calls: bool,
    /// The form that the answer must have.
    pub response_format: ResponseFormat,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Choices, from 1.
    pub n: u32,
    /// `None`: whole answer.
    pub stream: Option<StreamOptions>,
    /// `Some(k)`: log-probabilities with the k best.
    pub logprobs: Option<u32>,
    /// Log-probabilities of the prompt with the k best (vLLM's extension).
    pub prompt_logprobs: Option<u32>,
    /// Asked reasoning effort; `None` leaves it to the template.
    pub reasoning_effort: Option<ReasoningEffort>,
    /// Reasoning tokens at most, where the client says it in tokens; 0 switches reasoning off.
    pub reasoning_tokens_max: Option<u32>,
    /// The client's id of its own user.
    pub user: Option<String>,
    /// What requests of one conversation have in common (`prompt_cache_key`).
    pub cache_key: Option<String>,
    /// JSON object of template arguments (bounded), as text.
    pub template_kwargs: Option<String>,
    /// Open the assistant's turn (default true).
    pub add_generation_prompt: bool,
    /// Continue the last assistant message instead of opening a new turn.
    pub continue_final_message: bool,
    /// The answer begins with the text of the message that it continues, or that is the assistant's and the last (vLLM's `echo`).
    pub echo: bool,
    /// How much of the prompt is kept.
    pub prompt_tail: Option<PromptTail>,
    /// The oldest turns may be left out where the conversation does not fit the context (`truncation: "auto"`).
    pub truncates: bool,
    /// Put special tokens into the text.
    pub keep_special_tokens: bool,
    /// Also return token ids (vLLM's `return_token_ids`).
    pub return_token_ids: bool,
    /// How log-probabilities name tokens.
    pub token_names: TokenNames,
    /// Narrows cache sharing.
    pub cache_salt: Option<String>,
    /// Lower runs first.
    pub priority: i32,
    /// Unknown fields, by name: warned about, ignored.
    pub ignored: Vec<String>,
}

impl ChatRequest {
    /// A request that asks for nothing but an answer to `messages`.
    pub fn new(model: String, messages: Vec<Message>) -> Self {
        Self {
            model,
            messages,
            tools: Vec::new(),
            tool_choice: ToolChoice::None,
            parallel_tool_calls: true,
            response_format: ResponseFormat::Text,
            sampling: SamplingParams::default(),
            n: 1,
            stream: None,
            logprobs: None,
            prompt_logprobs: None,
            reasoning_effort: None,
            reasoning_tokens_max: None,
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

/// A plain continuation.
#[derive(Clone, Debug)]
pub struct CompleteRequest {
    /// Model name.
    pub model: String,
    /// One or more prompts; choices are numbered `prompt · n + k`.
    pub prompts: Vec<Prompt>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Choices per prompt, from 1.
    pub n: u32,
    /// Choices generated per prompt, of which the `n` best by mean log-probability are returned; at least `n`.
    pub best_of: u32,
    /// Return the prompt in front.
    pub echo: bool,
    /// Appended to the text of each choice (not understood by the model).
    pub suffix: Option<String>,
    /// `None`: whole answer.
    pub stream: Option<StreamOptions>,
    /// `Some(k)`: log-probabilities with the k best.
    pub logprobs: Option<u32>,
    /// Log-probabilities of the prompt with the k best (vLLM's extension).
    pub prompt_logprobs: Option<u32>,
    /// Put special tokens into the text.
    pub keep_special_tokens: bool,
    /// Also return token ids.
    pub return_token_ids: bool,
    /// How log-probabilities name tokens.
    pub token_names: TokenNames,
    /// How much of each prompt is kept.
    pub prompt_tail: Option<PromptTail>,
    /// Narrows cache sharing.
    pub cache_salt: Option<String>,
    /// The client's id of its own user.
    pub user: Option<String>,
    /// What requests of one conversation have in common (`prompt_cache_key`).
    pub cache_key: Option<String>,
    /// Lower runs first.
    pub priority: i32,
    /// Unknown fields, by name: warned about, ignored.
    pub ignored: Vec<String>,
}

/// How much of a prompt is kept, from its end (vLLM's `truncate_prompt_tokens`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptTail {
    /// So many tokens.
    Tokens(u32),
    /// As many as the context holds (-1).
    Fitting,
}

/// How log-probabilities name tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenNames {
    /// By their text.
    #[default]
    Text,
    /// As `token_id:7` (vLLM's `return_tokens_as_token_ids`).
    Ids,
}

/// A prompt as the client gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenized, special tokens added as the tokenizer does.
    Text(String),
    /// Used as they are.
    Tokens(Vec<u32>),
}

/// Sampling parameters within their documented bounds. The default asks for nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingParams {
    /// 0..=2; `None`: the model's own default.
    pub temperature: Option<f32>,
    /// 0..=1, exclusive 0.
    pub top_p: Option<f32>,
    /// From 1; `Some(0)` or -1 given: all.
    pub top_k: Option<u32>,
    /// 0..=1.
    pub min_p: Option<f32>,
    /// -2..=2.
    pub presence_penalty: f32,
    /// -2..=2.
    pub frequency_penalty: f32,
    /// Above 0; `None`: the model's own default.
    pub repetition_penalty: Option<f32>,
    /// Token id to -100..=100.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the randoms.
    pub seed: Option<u64>,
    /// Output tokens at most; `None`: as far as the context goes (chat) or 16 (completions).
    pub max_tokens: Option<u32>,
    /// End tokens masked before.
    pub min_tokens: u32,
    /// The model's end tokens do not end the answer.
    pub ignore_eos: bool,
    /// Up to 16 strings that end the answer.
    pub stop: Vec<String>,
    /// Token ids that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Leave the stop string in the text.
    pub include_stop: bool,
    /// Only these can be drawn; empty: all.
    pub allowed_token_ids: Vec<u32>,
    /// Words that the answer must not hold (vLLM's), none of them blank.
    pub bad_words: Vec<String>,
    /// If not empty: the log-probabilities of these come beside each generated token, instead of those of the best.
    pub logprob_token_ids: Vec<u32>,
}

/// Texts to be turned into vectors.
#[derive(Clone, Debug)]
pub struct EmbedRequest {
    /// Model name.
    pub model: String,
    /// At least one.
    pub inputs: Vec<Prompt>,
    /// Length of the vectors, where the model can choose.
    pub dimensions: Option<u32>,
    /// What the vectors are for, in the words of the provider that understands it (Gemini's `taskType`).
    pub task: Option<String>,
    /// The client's id of its own user.
    pub user: Option<String>,
    /// Unknown fields, by name.
    pub ignored: Vec<String>,
}

/// Documents to be ranked by relevance to a query.
#[derive(Clone, Debug)]
pub struct RerankRequest {
    /// Model name.
    pub model: String,
    /// What is looked for.
    pub query: String,
    /// At least one.
    pub documents: Vec<String>,
    /// Only the best so many are answered; `None`: all.
    pub top_n: Option<u32>,
    /// The answer repeats the documents.
    pub return_documents: bool,
    /// Unknown fields, by name.
    pub ignored: Vec<String>,
}

/// The form that an answer must have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ResponseFormat {
    /// Anything.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema {
        /// Name of the schema.
        name: String,
        /// What it is for.
        description: Option<String>,
        /// The schema, compact JSON text.
        schema: String,
        /// Whether the answer must match it exactly.
        strict: bool,
    },
}

/// Who speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Instructions (`developer` is read as this).
    System,
    /// The person.
    #[default]
    User,
    /// The model.
    Assistant,
    /// Result of a call.
    Tool,
}

/// One turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// Text parts joined; `None` for null or absent.
    pub content: Option<String>,
    /// All parts in order, but only when one of them is not text; else empty.
    pub parts: Vec<Part>,
    /// Participant's name.
    pub name: Option<String>,
    /// Earlier reasoning of the assistant (`reasoning` or `reasoning_content`).
    pub reasoning: Option<String>,
    /// What the provider that reasoned wants back with it (Anthropic's `signature`), opaque.
    pub reasoning_signature: Option<String>,
    /// Calls made by the assistant.
    pub tool_calls: Vec<ToolCall>,
    /// Call that a tool message answers.
    pub tool_call_id: Option<String>,
    /// The call that a tool message answers has failed (Anthropic's `is_error`).
    pub tool_failed: bool,
}

/// A piece of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text.
    Text(String),
    /// An image.
    Image {
        /// Where it is.
        source: ImageSource,
        /// How closely to look at it: low, high, auto.
        detail: Option<String>,
    },
}

/// Where an image is. The gateway never fetches it.
#[derive(Clone, Debug, PartialEq)]
pub enum ImageSource {
    /// At a URL, which the upstream fetches.
    Url(String),
    /// Here.
    Data {
        /// As `image/png`.
        media_type: String,
        /// Base64, standard alphabet.
        base64: String,
    },
}

/// A call made by the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Id that the answer refers to.
    pub id: String,
    /// Function name.
    pub name: String,
    /// JSON text of the arguments.
    pub arguments: String,
    /// What the provider wants back with the call (Gemini's thought signature), opaque.
    pub signature: Option<String>,
}

/// A function the model may call.
#[derive(Clone, Debug)]
pub struct Tool {
    /// Function name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments, compact JSON text.
    pub parameters: Option<String>,
    /// Arguments must match the schema exactly.
    pub strict: bool,
    /// The whole tool in the shape of OpenAI (compact JSON text), for templates; as the client wrote it where that is its dialect.
    pub json: String,
}

impl Tool {
    /// A tool from its pieces; `json` is made of them.
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

/// How tools may be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// Tools are not shown to the model.
    None,
    /// The model decides.
    Auto,
    /// At least one call.
    Required,
    /// A call of this function.
    Named(String),
}

/// Asked reasoning effort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningEffort {
    /// `none`: templates that can, switch thinking off.
    None,
    /// Anything else switches thinking on, in the given strength where a template knows it.
    Minimal,
    /// low
    Low,
    /// medium
    Medium,
    /// high
    High,
    /// xhigh, max
    Max,
}
