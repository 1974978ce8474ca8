//! The internal request. Every field is checked: whoever holds one does not check again.

/// What a client asks for. (Embed, Rerank and Raw come with their upstreams.)
#[derive(Clone, Debug)]
pub enum Request {
    /// A conversation.
    Chat(Box<ChatRequest>),
    /// Plain continuation.
    Complete(Box<CompleteRequest>),
}

impl Request {
    /// Name of the model asked for.
    pub fn model(&self) -> &str {
        match self {
            Request::Chat(chat) => &chat.model,
            Request::Complete(complete) => &complete.model,
        }
    }

    /// Whether the answer is to be streamed.
    pub fn stream(&self) -> bool {
        match self {
            Request::Chat(chat) => chat.stream.is_some(),
            Request::Complete(complete) => complete.stream.is_some(),
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
    /// JSON object of template arguments (bounded), as text.
    pub template_kwargs: Option<String>,
    /// Open the assistant's turn (default true).
    pub add_generation_prompt: bool,
    /// Continue the last assistant message instead of opening a new turn.
    pub continue_final_message: bool,
    /// Put special tokens into the text.
    pub keep_special_tokens: bool,
    /// Also return token ids (vLLM's `return_token_ids`).
    pub return_token_ids: bool,
    /// Narrows cache sharing.
    pub cache_salt: Option<String>,
    /// Lower runs first.
    pub priority: i32,
    /// Unknown fields, by name: warned about, ignored.
    pub ignored: Vec<String>,
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
    /// Narrows cache sharing.
    pub cache_salt: Option<String>,
    /// Lower runs first.
    pub priority: i32,
    /// Unknown fields, by name: warned about, ignored.
    pub ignored: Vec<String>,
}

/// A prompt as the client gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenized, special tokens added as the tokenizer does.
    Text(String),
    /// Used as they are.
    Tokens(Vec<u32>),
}

/// Sampling parameters within their documented bounds.
#[derive(Clone, Debug, PartialEq)]
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
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions (`developer` is read as this).
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// Result of a call.
    Tool,
}

/// One turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// Text parts joined; `None` for null or absent.
    pub content: Option<String>,
    /// Participant's name.
    pub name: Option<String>,
    /// Earlier reasoning of the assistant (`reasoning` or `reasoning_content`).
    pub reasoning: Option<String>,
    /// Calls made by the assistant.
    pub tool_calls: Vec<ToolCall>,
    /// Call that a tool message answers.
    pub tool_call_id: Option<String>,
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
}

/// A function the model may call.
#[derive(Clone, Debug)]
pub struct Tool {
    /// Function name.
    pub name: String,
    /// The whole tool object as the client wrote it (compact JSON text), for the template.
    pub json: String,
}

/// How tools may be called. (`required` and named tools need guided decoding: refused until built.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// Tools are not shown to the model.
    None,
    /// The model decides.
    Auto,
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
