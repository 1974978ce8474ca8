//! Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings` and its lists of models.
//!
//! Streams are lines of JSON, and the default. An answer has one choice. The effect of each field is in
//! `docs/reference/ollama.md`.

mod answer;
mod answer_lines;
mod codec;
mod embed;
mod form;
mod messages;
mod models;
mod options;
mod request;

pub use codec::Codec;
pub use form::{chat, embed, generate};
pub use models::{model, model_asked, models_list, running, version};
