//! The Gemini API (`v1beta`): `generateContent`, `streamGenerateContent`, `countTokens`, `embedContent`, `batchEmbedContents`, models.
//!
//! A field may be spelled in camel case or in snake case, as Google takes both; a field given in both spellings is a
//! duplicate. The effect of each field is in `docs/reference/gemini.md`.

mod answer;
mod call_ids;
mod chunk;
mod contents;
mod embed;
mod fields;
mod form;
mod models;
mod parts;
pub(crate) mod provider;
mod request;
mod schema;
pub(crate) mod signature;
mod tools;
pub mod watch;

pub use call_ids::without_call_ids;
pub use form::{count, embed, generate};
pub use models::{count_body, model, models_list};
pub use provider::{Codec, ThinkingStyle, path};
