//! The Responses API: items in, items out, and the events between.
//!
//! Reading: [`ResponsesRequest`] reads a body; with the items of earlier turns, which a store may add, it becomes the
//! same chat request as that of `/v1/chat/completions`. Writing: one machine turns events into items, streamed or
//! whole. The effect of each field is in `docs/reference/responses.md`.

mod conversation;
mod echo;
mod events;
mod form;
mod input;
mod items;
mod needs;
mod output;
mod request;

pub use conversation::{MakeId, NamedItem, NewConversation, decode_conversation, decode_items, named_items, own_items};
pub use echo::{ResponseFailure, ResponseStatus};
pub use form::{FinishedResponse, ResponseCollector, ResponseForm, count_responses, responses};
pub use needs::StoreNeeds;
pub use request::ResponsesRequest;
