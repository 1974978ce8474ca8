//! Codecs of the public APIs: each translates between its API and the internal request and event of `penstock-types`.
//!
//! Each public API is a module here: [`openai`], [`anthropic`], [`gemini`], [`ollama`]; [`bedrock`] is a provider only. A dialect
//! decodes a body into a [`penstock_types::Request`] (every bound checked, every fault an
//! [`penstock_types::ApiError`] that names its parameter) and encodes events into its own stream or whole answer.
#![forbid(unsafe_code)]

mod account_faults;
mod answer_body;
mod answer_json;
pub mod anthropic;
pub mod bedrock;
mod called;
mod decode;
pub mod gemini;
mod identifiers;
pub mod listing;
pub mod ollama;
pub mod openai;
mod packed_thinking;
pub mod provider_fields;
mod reasoning_maker;
mod schema_rules;
mod schema_subset;
mod seen;
pub mod watch;

pub use decode::decode;
pub use reasoning_maker::{holds_call_signature, holds_foreign_signature};
