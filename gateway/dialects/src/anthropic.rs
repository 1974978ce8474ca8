//! The Anthropic API: Messages as a client speaks it, and as a provider does.

mod answer;
mod blocks;
pub mod errors;
mod messages;
mod models;
mod signature;
mod stream;
mod tools;
mod whole;

pub use answer::{count_tokens, messages};
pub use errors::error_body;
pub use messages::{decode_count_tokens, decode_messages};
pub use models::{count_body, estimate, model, models_list};
pub use stream::MessageEncoder;
pub use whole::MessageCollector;
