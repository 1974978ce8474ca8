//! The Anthropic API: Messages as a client speaks it, and as a provider does.

mod answer;
mod blocks;
mod content;
mod decode;
pub(crate) mod encode;
mod fault;
mod messages;
mod models;
mod provider;
mod stream;
mod tools;
pub mod watch;
mod whole;

pub use answer::{count_tokens, messages};
pub use messages::{decode_count_tokens, decode_messages};
pub use models::{count_body, estimate, model, models_list, rfc3339};
pub use provider::{Codec, MAX_TOKENS_DEFAULT, ThinkingStyle};
pub use stream::MessageEncoder;
pub use whole::MessageCollector;
