//! The Responses API: items in, items out, and the events between.
//!
//! In: [`ResponsesRequest`] reads a body; with the items of earlier turns, which a store may add, it becomes the same chat request that
//! `/v1/chat/completions` makes. Out: one machine turns events into items, streamed or whole. What each field does is in
//! `docs/reference/responses.md`.

mod echo;
mod events;
mod form;
mod input;
mod items;
mod output;
mod request;

pub use echo::{ResponseFailure, ResponseStatus};
pub use form::{FinishedResponse, ResponseCollector, ResponseForm, responses};
pub use request::ResponsesRequest;
