//! Bounds on the parts of a client's request. Each is checked while reading, before the part is kept.

/// Bounds of a request. The defaults are the values in `docs/reference/openai.md`; the size of the whole body is
/// bounded by the listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Characters of a model name.
    pub model_chars_max: usize,
    /// Messages of one conversation.
    pub messages_max: usize,
    /// Content parts of one message.
    pub parts_max: usize,
    /// Calls in one assistant message.
    pub tool_calls_max: usize,
    /// Tools that one request offers to the model.
    pub tools_max: usize,
    /// Bytes of one tool's JSON, spaces left out.
    pub tool_bytes_max: usize,
    /// Levels of nesting in one tool.
    pub tool_depth_max: usize,
    /// Bytes of one constraint on the answer: a regular expression, a grammar, a structural tag (spaces left out), or
    /// all texts of a choice together. A JSON schema has the bounds of a tool.
    pub constraint_bytes_max: usize,
    /// Texts to choose from, or structures and triggers of a structural tag.
    pub constraint_choices_max: usize,
    /// Characters of a name or id (function, call, participant, cache salt…).
    pub name_chars_max: usize,
    /// Stop strings of one request.
    pub stop_max: usize,
    /// Characters of one stop string.
    pub stop_chars_max: usize,
    /// Stop token ids of one request.
    pub stop_tokens_max: usize,
    /// Tokens whose log-probabilities are asked for by name.
    pub logprob_tokens_max: usize,
    /// Token ids that a request may restrict the draw to (`allowed_token_ids`).
    pub allowed_tokens_max: usize,
    /// Entries of a request's `logit_bias`.
    pub logit_bias_max: usize,
    /// Choices per prompt (`n`, `best_of`).
    pub n_max: u32,
    /// Best tokens per position (`top_logprobs`, `logprobs` of completions, `prompt_logprobs`).
    pub logprobs_max: u32,
    /// Prompts of one completion request.
    pub prompts_max: usize,
    /// Texts of one embedding, rerank or score request.
    pub inputs_max: usize,
    /// Prompts times `best_of` (or `n`).
    pub choices_max: u64,
    /// Token ids in one prompt (or to detokenize).
    pub prompt_tokens_max: usize,
    /// Characters of a completion request's `suffix`.
    pub suffix_chars_max: usize,
    /// Name and value pairs of a request's `metadata`.
    pub metadata_max: usize,
    /// Bytes of `chat_template_kwargs`, spaces left out.
    pub template_kwargs_bytes_max: usize,
    /// Names in the object `chat_template_kwargs`.
    pub template_kwargs_max: usize,
    /// Levels of nesting in `chat_template_kwargs`.
    pub template_kwargs_depth_max: usize,
    /// Fields of the body's object.
    pub fields_max: usize,
    /// Fields of each object inside it that is read (not of a tool's schema).
    pub inner_fields_max: usize,
    /// Unknown fields whose names are kept for the warning.
    pub ignored_max: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            model_chars_max: 256,
            messages_max: 10_000,
            parts_max: 1_000,
            tool_calls_max: 128,
            tools_max: 1_024,
            tool_bytes_max: 256 << 10,
            tool_depth_max: 32,
            constraint_bytes_max: 128 << 10,
            constraint_choices_max: 1_024,
            name_chars_max: 256,
            stop_max: 16,
            stop_chars_max: 1_024,
            stop_tokens_max: 128,
            logprob_tokens_max: 128,
            allowed_tokens_max: 16_384,
            logit_bias_max: 1_024,
            n_max: 128,
            logprobs_max: 20,
            prompts_max: 1_024,
            inputs_max: 2_048,
            choices_max: 1_024,
            prompt_tokens_max: 1 << 20,
            suffix_chars_max: 65_536,
            metadata_max: 16,
            template_kwargs_bytes_max: 16 << 10,
            template_kwargs_max: 64,
            template_kwargs_depth_max: 8,
            fields_max: 256,
            inner_fields_max: 32,
            ignored_max: 32,
        }
    }
}
