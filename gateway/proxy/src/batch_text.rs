//! Texts of batches: which endpoints they have, the lines of requests that are read, and the lines of results that are written.

mod request;
mod result;

use penstock_types::Surface;
use serde::Serialize;

pub(crate) use request::{fault, message_request, request};
pub(crate) use result::{Unanswered, error_line, message_line, result_line};

/// Endpoints that a batch can have, with their surfaces.
pub(crate) const ENDPOINTS: [(&str, Surface); 4] = [
    ("/v1/chat/completions", Surface::Chat),
    ("/v1/completions", Surface::Completions),
    ("/v1/embeddings", Surface::Embeddings),
    ("/v1/responses", Surface::Responses),
];

/// Endpoint of batches that Anthropic's API makes. OpenAI's API refuses it, so it is not in [`ENDPOINTS`].
pub(crate) const MESSAGES: &str = "/v1/messages";

/// Requests of an ended batch that were not answered, by reason, as the store keeps them for Anthropic's API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Number of requests without a result when the batch was cancelled.
    pub(crate) canceled: u64,
    /// Number of requests without a result when the window ended.
    pub(crate) expired: u64,
}

impl Tally {
    /// Text for the store.
    pub(crate) fn text(self) -> String {
        format!("[{},{}]", self.canceled, self.expired)
    }

    /// Tally of a text; 0 where it cannot be read.
    pub(crate) fn parse(text: &str) -> Self {
        let (canceled, expired) = serde_json::from_str(text).unwrap_or_default();
        Self { canceled, expired }
    }
}

/// Surface of a batch's endpoint, of whichever API; `None`: a batch cannot have this endpoint.
pub(crate) fn surface_of(endpoint: &str) -> Option<Surface> {
    if endpoint == MESSAGES {
        return Some(Surface::Messages);
    }
    ENDPOINTS.iter().find(|(path, _)| *path == endpoint).map(|(_, surface)| *surface)
}

/// Purpose of the files of Anthropic's batches; the dot keeps them out of the lists of files.
pub(crate) const MESSAGE_BATCH: &str = ".message_batch";

/// Value of `errors` in a batch whose input file has faults.
#[derive(Serialize)]
struct BatchErrors<'a> {
    object: &'static str,
    data: Vec<BatchFault<'a>>,
}

/// Fault in a batch's input file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct BatchFault<'a> {
    /// Error code, for programs.
    pub(crate) code: &'a str,
    /// Text of the fault, for the client.
    pub(crate) message: String,
    /// Field of the line that is at fault; `None`: the line as a whole.
    pub(crate) param: Option<&'a str>,
    /// Line of the file, from 1; `None`: the file as a whole.
    pub(crate) line: Option<u32>,
}

/// JSON of the field `errors` of a batch, made of these faults.
pub(crate) fn batch_error(data: Vec<BatchFault<'_>>) -> String {
    serde_json::to_string(&BatchErrors { object: "list", data }).unwrap_or_default()
}
