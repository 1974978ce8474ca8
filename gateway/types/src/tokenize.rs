//! Requests of `/tokenize` and `/detokenize`, and the bodies of their answers, in vLLM's shapes.

use bytes::{BufMut, BytesMut};

use crate::request::ChatRequest;
use crate::write;

/// Request to tokenize a text or a conversation.
#[derive(Clone, Debug)]
pub struct TokenizeRequest {
    /// Model name; if absent, the only model served.
    pub model: Option<String>,
    /// The text or the conversation.
    pub input: TokenizeInput,
    /// True to return each token also as text of the vocabulary.
    pub return_token_strs: bool,
}

/// A text, or a conversation to be put through the model's template.
#[derive(Clone, Debug)]
pub enum TokenizeInput {
    /// Plain text, put through the tokenizer alone.
    Text {
        /// The text to be tokenized.
        prompt: String,
        /// True to add the tokenizer's special tokens (default true).
        add_special_tokens: bool,
    },
    /// A conversation, treated like a chat request: the count equals its `usage.prompt_tokens`. Only the fields that
    /// shape a prompt are set; its `model` is empty when the request names none.
    Chat {
        /// The conversation, as a chat request.
        chat: Box<ChatRequest>,
        /// True to add the tokenizer's special tokens to those that the template writes (default false).
        add_special_tokens: bool,
    },
}

/// Ids to be turned into text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// Model name; if absent, the only model served.
    pub model: Option<String>,
    /// Ids of the tokens to be turned into text.
    pub tokens: Vec<u32>,
}

/// Body of the answer to a tokenize request; `strings` are the tokens as the vocabulary writes them, when they were
/// asked for.
pub fn tokenize_body(tokens: &[u32], context_tokens: u64, strings: Option<&[String]>) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(64 + 8 * tokens.len());
    out.put_slice(b"{\"count\":");
    write::integer(&mut out, tokens.len() as u64);
    out.put_slice(b",\"max_model_len\":");
    write::integer(&mut out, context_tokens);
    out.put_slice(b",\"tokens\":");
    write::integers(&mut out, tokens);
    out.put_slice(b",\"token_strs\":");
    match strings {
        None => out.put_slice(b"null"),
        Some(strings) => {
            out.put_u8(b'[');
            for (index, text) in strings.iter().enumerate() {
                if index > 0 {
                    out.put_u8(b',');
                }
                write::string(&mut out, text);
            }
            out.put_u8(b']');
        }
    }
    out.put_u8(b'}');
    out.into()
}

/// Body of the answer to a detokenize request.
pub fn detokenize_body(prompt: &str) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(16 + prompt.len());
    out.put_slice(b"{\"prompt\":");
    write::string(&mut out, prompt);
    out.put_u8(b'}');
    out.into()
}
