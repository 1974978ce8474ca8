//! Lines of the files of results: of a request that was answered, and of one that was not.

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;

#[derive(Serialize)]
struct ResultLine<'a> {
    id: &'a str,
    custom_id: &'a str,
    response: Option<LineResponse<'a>>,
    error: Option<LineError<'a>>,
}

#[derive(Serialize)]
struct LineResponse<'a> {
    status_code: u16,
    request_id: &'a str,
    body: &'a RawValue,
}

#[derive(Serialize)]
struct LineError<'a> {
    code: &'a str,
    message: &'a str,
}

/// Line of the output file or of the errors file, for a request that was answered. `None`: the body is not JSON.
pub(crate) fn result_line(id: &str, custom_id: &str, status: u16, request_id: &str, body: &[u8]) -> Option<Bytes> {
    let text = std::str::from_utf8(body).ok()?;
    // Outside strings a line end is only white space, and inside it cannot be: the answer of an upstream becomes one line.
    let text =
        if text.contains(['\n', '\r']) { text.replace(['\n', '\r'], " ").into() } else { std::borrow::Cow::from(text) };
    let body: &RawValue = serde_json::from_str(text.trim()).ok()?;
    let response = Some(LineResponse { status_code: status, request_id, body });
    serde_json::to_vec(&ResultLine { id, custom_id, response, error: None }).ok().map(Bytes::from)
}

/// Line of the errors file for a request that was not answered.
pub(crate) fn error_line(id: &str, custom_id: &str, code: &str, message: &str) -> Bytes {
    let line = ResultLine { id, custom_id, response: None, error: Some(LineError { code, message }) };
    serde_json::to_vec(&line).unwrap_or_default().into()
}

/// Line of the results of a batch of messages. The kind stands first, so that it can be told without reading the line.
#[derive(Serialize)]
struct MessageLine<'a> {
    result: MessageResult<'a>,
    custom_id: &'a str,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum MessageResult<'a> {
    Succeeded { message: &'a RawValue },
    Errored { error: &'a RawValue },
    Canceled,
    Expired,
}

/// Reason why a request of a batch of messages was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// The batch was cancelled before.
    Canceled,
    /// The window of the batch ended before.
    Expired,
}

impl Unanswered {
    /// Returns true if a line of results gives this reason.
    pub(crate) fn is_in(self, line: &[u8]) -> bool {
        let said: &[u8] = match self {
            Unanswered::Canceled => br#"{"result":{"type":"canceled"}"#,
            Unanswered::Expired => br#"{"result":{"type":"expired"}"#,
        };
        line.starts_with(said)
    }
}

/// Line of the results of a batch of messages: the answer or the error of a request (its body), or why there is none.
/// `None`: the body is not JSON.
pub(crate) fn message_line(custom_id: &str, said: Result<(bool, &[u8]), Unanswered>) -> Option<Bytes> {
    let text;
    let result = match said {
        Err(Unanswered::Canceled) => MessageResult::Canceled,
        Err(Unanswered::Expired) => MessageResult::Expired,
        Ok((ok, body)) => {
            text = std::str::from_utf8(body).ok()?.replace(['\n', '\r'], " ");
            let body: &RawValue = serde_json::from_str(text.trim()).ok()?;
            if ok { MessageResult::Succeeded { message: body } } else { MessageResult::Errored { error: body } }
        }
    };
    serde_json::to_vec(&MessageLine { result, custom_id }).ok().map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pretty_answer_becomes_one_line() {
        let line = result_line("batch_req_1", "a\"b", 200, "req_1", b"{\n  \"x\": \"a\\nb\"\r\n}\n").expect("JSON");
        assert_eq!(
            String::from_utf8_lossy(&line),
            r#"{"id":"batch_req_1","custom_id":"a\"b","response":{"status_code":200,"request_id":"req_1","body":{   "x": "a\nb"  }},"error":null}"#
        );
        assert_eq!(result_line("a", "b", 200, "c", b"<html>"), None);
        assert_eq!(result_line("a", "b", 200, "c", b"{}{}"), None);
    }

    #[test]
    fn results_of_messages_say_their_kind_first() {
        let line = |said| String::from_utf8_lossy(&message_line("a\"b", said).expect("a line")).into_owned();
        let succeeded = line(Ok((true, b"{\n\"id\":\"msg_1\"}")));
        assert_eq!(succeeded, r#"{"result":{"type":"succeeded","message":{ "id":"msg_1"}},"custom_id":"a\"b"}"#);
        let errored = line(Ok((false, br#"{"type":"error"}"#)));
        assert_eq!(errored, r#"{"result":{"type":"errored","error":{"type":"error"}},"custom_id":"a\"b"}"#);
        for (why, said) in [(Unanswered::Canceled, "canceled"), (Unanswered::Expired, "expired")] {
            let text = line(Err(why));
            assert_eq!(text, format!(r#"{{"result":{{"type":"{said}"}},"custom_id":"a\"b"}}"#));
            assert!(why.is_in(text.as_bytes()) && !why.is_in(errored.as_bytes()) && !why.is_in(succeeded.as_bytes()));
        }
        assert_eq!(message_line("a", Ok((true, b"<html>"))), None);
    }

    #[test]
    fn what_was_not_answered_has_no_response() {
        assert_eq!(
            String::from_utf8_lossy(&error_line("batch_req_1", "a", "batch_expired", "Too late.")),
            r#"{"id":"batch_req_1","custom_id":"a","response":null,"error":{"code":"batch_expired","message":"Too late."}}"#
        );
    }
}
