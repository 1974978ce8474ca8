//! The OpenAI API: chat completions, completions, models, tokenize, errors.
//!
//! Reading: `decode_*` reads a body once (`penstock_types::json`), field by field, into a checked request. Writing: an encoder
//! turns events into server-sent chunks, a collector turns the same events into one answer; both write JSON text
//! straight into a buffer (`penstock_types::write`). The effect of each field, every bound and every error are in
//! `docs/reference/openai.md`.

mod chat;
mod chat_answer;
mod common;
mod completion;
mod completion_answer;
mod constraint;
mod embeddings;
mod form;
mod format;
mod functions;
mod kept;
mod legacy_logprobs;
mod listed;
mod messages;
mod models;
pub(crate) mod provider;
mod rerank;
mod responses;
mod stream;
mod structural_tag;
mod tokenize;
mod tools;
mod unbuilt;
pub mod watch;
mod watch_responses;

pub use chat::decode_chat;
pub(crate) use chat::read_body;
pub use chat_answer::{ChatCollector, ChatEncoder, ChatMeta, ReasoningNames};
pub use completion::decode_completion;
pub use completion_answer::{CompletionCollector, CompletionEncoder, CompletionMeta, best_of};
pub use embeddings::{VectorFormat, embeddings};
pub use form::{chat, completion};
pub(crate) use format::schema_text;
pub use functions::CallShape;
pub use kept::{StoredChat, decode_metadata, metadata_entry, with_metadata};
pub use listed::Listed;
pub(crate) use messages::image_source;
pub use models::{ModelCard, count_body, model, models_list};
pub use provider::{ChatCodec, MaxTokensName, ResponsesCodec, Server};
pub use rerank::{rerank, score};
pub use responses::{
    FinishedResponse, MakeId, NamedItem, NewConversation, ResponseCollector, ResponseFailure, ResponseForm,
    ResponseStatus, ResponsesRequest, StoreNeeds, count_responses, decode_conversation, decode_items, named_items,
    own_items, responses,
};
pub use tokenize::{decode_detokenize, decode_tokenize};
pub(crate) use tools::offered_tools;
