//! Readers of the requests in a batch: a line of OpenAI's input file, an element of Anthropic's list.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{BatchFault, MESSAGES};

/// Longest `custom_id` of a line, in characters.
const CUSTOM_ID_CHARS_MAX: usize = 512;

/// Fields of one line of the file, as its JSON has them.
#[derive(Deserialize)]
struct RawLine<'a> {
    #[serde(borrow)]
    custom_id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    method: Option<Cow<'a, str>>,
    #[serde(borrow)]
    url: Option<Cow<'a, str>>,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

/// Request of a batch, checked and ready to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LineRequest {
    /// Client's name for the request, unique within the file; the result line repeats it.
    pub(crate) custom_id: String,
    /// Body that the client would have posted to the batch's endpoint.
    pub(crate) body: Bytes,
}

/// A fault of a line whose number is not known yet.
pub(crate) fn fault(
    code: &'static str,
    param: Option<&'static str>,
    message: impl Into<String>,
) -> BatchFault<'static> {
    BatchFault { code, message: message.into(), param, line: None }
}

/// Reads one line as a request.
///
/// # Errors
/// The line is no request for `endpoint`; the fault has no line number yet.
pub(crate) fn request(text: &Bytes, endpoint: &str) -> Result<LineRequest, BatchFault<'static>> {
    if endpoint == MESSAGES {
        return message_request(text);
    }
    let line: RawLine<'_> = serde_json::from_slice(text).map_err(|error| {
        fault("invalid_json_line", None, format!("This line is not a JSON object that can be read: {error}."))
    })?;
    let missing = |name: &'static str| {
        fault("missing_required_parameter", Some(name), format!("Missing required parameter: '{name}'."))
    };
    let custom_id = line.custom_id.ok_or_else(|| missing("custom_id"))?;
    if custom_id.is_empty() || custom_id.chars().count() > CUSTOM_ID_CHARS_MAX {
        let message = format!("custom_id must have 1 to {CUSTOM_ID_CHARS_MAX} characters.");
        return Err(fault("invalid_value", Some("custom_id"), message));
    }
    if line.method.ok_or_else(|| missing("method"))? != "POST" {
        return Err(fault("invalid_method", Some("method"), "method must be POST."));
    }
    let url = line.url.ok_or_else(|| missing("url"))?;
    if url != endpoint {
        return Err(fault(
            "mismatched_endpoint",
            Some("url"),
            format!("url must be the batch's endpoint, {endpoint}."),
        ));
    }
    let body = line.body.ok_or_else(|| missing("body"))?.get();
    if !body.starts_with('{') {
        return Err(fault("invalid_value", Some("body"), "body must be an object."));
    }
    Ok(LineRequest { custom_id: custom_id.into_owned(), body: text.slice_ref(body.as_bytes()) })
}

/// Fields of one request of a batch of messages.
#[derive(Deserialize)]
struct RawMessage<'a> {
    #[serde(borrow)]
    custom_id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

/// Longest `custom_id` of a batch of messages, in bytes, as its API has it.
const MESSAGE_ID_BYTES_MAX: usize = 64;

/// Reads one request of a batch of messages.
///
/// # Errors
/// The text is no such request.
pub(crate) fn message_request(text: &Bytes) -> Result<LineRequest, BatchFault<'static>> {
    let line: RawMessage<'_> = serde_json::from_slice(text).map_err(|error| {
        fault("invalid_json_line", None, format!("This is not an object that can be read: {error}."))
    })?;
    let missing = |name: &'static str| fault("missing_required_parameter", Some(name), "required, but missing");
    let custom_id = line.custom_id.ok_or_else(|| missing("custom_id"))?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if custom_id.is_empty() || custom_id.len() > MESSAGE_ID_BYTES_MAX || !custom_id.bytes().all(plain) {
        let message = format!("must be 1 to {MESSAGE_ID_BYTES_MAX} letters, digits, underscores and hyphens");
        return Err(fault("invalid_value", Some("custom_id"), message));
    }
    let params = line.params.ok_or_else(|| missing("params"))?.get();
    if !params.starts_with('{') {
        return Err(fault("invalid_value", Some("params"), "must be an object"));
    }
    Ok(LineRequest { custom_id: custom_id.into_owned(), body: text.slice_ref(params.as_bytes()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &'static str) -> Result<(String, String), (&'static str, Option<&'static str>)> {
        let read = request(&Bytes::from_static(text.as_bytes()), "/v1/embeddings");
        read.map(|line| (line.custom_id, String::from_utf8_lossy(&line.body).into_owned()))
            .map_err(|fault| (fault.code, fault.param))
    }

    #[test]
    fn a_line_is_a_request_or_says_why_not() {
        let good = r#"{"custom_id":"a","method":"POST","url":"/v1/embeddings","body":{"model":"m"}}"#;
        assert_eq!(read(good), Ok(("a".into(), "{\"model\":\"m\"}".into())));
        for (text, code, param) in [
            ("{", "invalid_json_line", None),
            ("[1]", "invalid_json_line", None),
            (r#"{"custom_id":"a","custom_id":"b"}"#, "invalid_json_line", None),
            (r#"{"method":"POST"}"#, "missing_required_parameter", Some("custom_id")),
            (r#"{"custom_id":""}"#, "invalid_value", Some("custom_id")),
            (r#"{"custom_id":"a","method":"GET"}"#, "invalid_method", Some("method")),
            (r#"{"custom_id":"a","method":"POST","url":"/v1/x"}"#, "mismatched_endpoint", Some("url")),
            (r#"{"custom_id":"a","method":"POST","url":"/v1/embeddings"}"#, "missing_required_parameter", Some("body")),
            (r#"{"custom_id":"a","method":"POST","url":"/v1/embeddings","body":[]}"#, "invalid_value", Some("body")),
        ] {
            assert_eq!(read(text), Err((code, param)), "{text}");
        }
    }
}
