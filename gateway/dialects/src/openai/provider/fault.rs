//! Error answers of providers, read from many shapes and put into one of the fault classes.
//!
//! The code decides first, then the type, then the words, for a request that does not fit the context and for an account that
//! is used up: each server has its own code for the first, and fallback to a model with more room depends on it; some have
//! none for the second. The status decides last.

use crate::account_faults::class_of_anthropics;
use crate::answer_json as value;
use penstock_types::codec::{FaultClass, ProviderFault};
use penstock_types::json::{Fault, Kind, Reader, Within};

/// Longest kept part of a provider's message, in characters.
const MESSAGE_CHARS_MAX: usize = 512;
/// Longest part of an error body that is read, in bytes.
const BODY_BYTES_MAX: usize = 256 << 10;

/// Fault of an answer whose status is not 2xx.
pub(crate) fn fault_body(status: u16, body: &[u8]) -> ProviderFault {
    let body = &body[..body.len().min(BODY_BYTES_MAX)];
    let said = Said::read(body).unwrap_or_else(|_| Said { message: Some(plain(body)), ..Said::default() });
    said.into_fault(status)
}

/// Fault of an error that came as an event, or under status 200.
pub(crate) fn fault_text(json: &[u8]) -> ProviderFault {
    match Said::read(json) {
        Ok(said) => {
            let status = said.status.unwrap_or(500);
            said.into_fault(status)
        }
        Err(fault) => fault.into(),
    }
}

/// Fails if an event is an error instead of a chunk.
pub(super) fn check(name: &[u8], json: &[u8]) -> Result<(), ProviderFault> {
    if name == b"error" || (mentions_error(json) && Said::is_error(json)?) { Err(fault_text(json)) } else { Ok(()) }
}

/// Returns true if `"error"` occurs as a name or a value; inside a text its quotes would be escaped.
fn mentions_error(json: &[u8]) -> bool {
    json.windows(7).any(|piece| piece == b"\"error\"")
}

/// Fields of a provider's error body that the gateway understands, wherever they stand in it.
#[derive(Default)]
struct Said {
    message: Option<String>,
    code: Option<String>,
    kind: Option<String>,
    status: Option<u16>,
}

impl Said {
    fn read(json: &[u8]) -> Result<Self, Fault> {
        let mut said = Self::default();
        let mut reader = Reader::new(json)?;
        said.any(&mut reader)?;
        reader.end()?;
        Ok(said)
    }

    /// Whether an object is an error: `{"error": …}` or `{"object": "error", …}`.
    fn is_error(json: &[u8]) -> Result<bool, Fault> {
        let mut found = false;
        value::fields(&mut Reader::new(json)?, |reader, key| {
            match key {
                "error" => {
                    found = true;
                    reader.skip()?;
                }
                "object" => found |= value::string(reader)?.is_some_and(|word| word == "error"),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// Reads an error in any shape: an object, an array that begins with one (Gemini, FastAPI), or the bare message.
    fn any(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        match reader.kind()? {
            Kind::String => {
                let text = reader.string()?;
                self.message.get_or_insert_with(|| shortened(&text));
                Ok(())
            }
            Kind::Array => {
                reader.array(|reader, index| if index == 0 { self.any(reader).at(index) } else { reader.skip() })
            }
            Kind::Object => reader.object(|reader, key| self.field(reader, &key)),
            _ => reader.skip(),
        }
    }

    fn field(&mut self, reader: &mut Reader<'_>, key: &str) -> Result<(), Fault> {
        match key {
            "error" | "message" | "detail" | "msg" | "error_message" | "errors" => self.any(reader)?,
            "code" | "error_code" => match reader.kind()? {
                Kind::Number => self.status = value::count(reader)?.and_then(|code| u16::try_from(code).ok()),
                _ => set(&mut self.code, value::string(reader)?.as_deref()),
            },
            "type" | "error_type" | "status" => match reader.kind()? {
                Kind::Number => self.status = value::count(reader)?.and_then(|code| u16::try_from(code).ok()),
                _ => set(&mut self.kind, value::string(reader)?.as_deref()),
            },
            // Azure names the violated policy in there; the outer code stays the answer's.
            "innererror" => self.any(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn into_fault(self, status: u16) -> ProviderFault {
        let message = self.message.filter(|message| !message.is_empty());
        let words = [self.code.as_deref(), self.kind.as_deref()];
        let named = words.into_iter().flatten().find_map(class_of_word);
        let class = match named {
            Some(class) if class != FaultClass::Server || status >= 500 => class,
            _ => {
                let said = message.as_deref().and_then(|message| class_of_message(status, message));
                said.unwrap_or_else(|| ProviderFault::class_of(status))
            }
        };
        let message = message.unwrap_or_else(|| format!("The provider answered with status {status}."));
        ProviderFault { class, message, code: self.code.or(self.kind) }
    }
}

fn set(field: &mut Option<String>, word: Option<&str>) {
    if let (None, Some(word)) = (&field, word.filter(|word| !word.is_empty())) {
        *field = Some(word.chars().take(64).collect());
    }
}

/// Fault class that a code or a type names, in any spelling.
fn class_of_word(word: &str) -> Option<FaultClass> {
    let word: String = word.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    Some(match word.as_str() {
        "contextlengthexceeded"
        | "exceedcontextsizeerror"
        | "contextwindowexceeded"
        | "contextwindowexceedederror"
        | "modelmaxprompttokensexceeded"
        | "maxcontextlengthexceeded" => FaultClass::ContextLength,
        "contentfilter"
        | "contentpolicyviolation"
        | "responsibleaipolicyviolation"
        | "datainspectionfailed"
        | "moderationblocked"
        | "invalidprompt"
        | "contentfiltererror"
        | "safety" => FaultClass::ContentPolicy,
        "insufficientquota"
        | "billinghardlimitreached"
        | "billingnotactive"
        | "insufficientbalance"
        | "paymentrequired"
        | "arrearage"
        | "creditsexhausted"
        // Groq (status 400: the spend limit), Moonshot.
        | "blockedapiaccess"
        | "exceededcurrentquotaerror" => FaultClass::Quota,
        "ratelimitexceeded"
        | "ratelimiterror"
        | "toomanyrequests"
        | "throttling"
        | "throttlingratequota"
        | "resourceexhausted"
        | "tokens"
        | "requests" => FaultClass::RateLimited,
        "modelnotfound" | "modelnotfounderror" | "deploymentnotfound" | "modelnotavailable" => FaultClass::NotFound,
        "invalidapikey" | "authenticationerror" | "incorrectapikey" | "unauthenticated" => FaultClass::Unauthorized,
        // The last is Groq's, with status 400.
        "permissionerror" | "permissiondenied" | "permissiondeniederror" | "organizationrestricted" => {
            FaultClass::Forbidden
        }
        "overloadederror"
        | "engineoverloaded"
        | "engineoverloadederror"
        | "serviceunavailable"
        | "slowdown"
        | "serveroverloaded" => FaultClass::Overloaded,
        "requesttoolarge" | "requesttoolargeerror" => FaultClass::TooLarge,
        "servererror" | "internalservererror" | "apierror" | "internalerror" => FaultClass::Server,
        _ => return None,
    })
}

/// Wordings with which servers say that a prompt does not fit.
#[rustfmt::skip]
const CONTEXT_WORDS: &[&str] = &[
    "maximum context length",              // OpenAI, vLLM, DeepSeek, Mistral, OpenRouter
    "maximum model length",                // vLLM
    "model's context length",              // SGLang
    "available context size",              // llama-server
    "context window",                      // OpenAI responses, LM Studio
    "exceeds the context length",          // Ollama
    "exceeds context length",
    "context length exceeded",
    "exceeded context limit",
    "maximum prompt length",               // xAI
    "prompt is too long",                  // Anthropic's own endpoint, Fireworks
    "reduce the length of the messages",   // Groq
    "input token count",                   // Gemini's own endpoint
    "range of input length should be",     // DashScope
    "`max_new_tokens` must be",            // TGI, Together
];

/// Fault class that the words of a message tell; `None`: they tell none.
fn class_of_message(status: u16, message: &str) -> Option<FaultClass> {
    if speaks_of_context(status, message) {
        return Some(FaultClass::ContextLength);
    }
    match status {
        // Anthropic's own endpoint for OpenAI's clients.
        400 => class_of_anthropics(message),
        // Fireworks, whose code says no more than the status. No fault of a request has this status.
        412 => message.contains("spending limit").then_some(FaultClass::Quota),
        _ => None,
    }
}

fn speaks_of_context(status: u16, message: &str) -> bool {
    // A failing server also has messages; only faults of the request are meant here (500: older llama-server).
    matches!(status, 400 | 413 | 422 | 500) && {
        let message = message.to_ascii_lowercase();
        CONTEXT_WORDS.iter().any(|words| message.contains(words))
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MESSAGE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// One line of text from a body that is not JSON; empty for an HTML page, which would not help a client.
fn plain(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(4 * MESSAGE_CHARS_MAX)]);
    let text = text.trim();
    if text.starts_with('<') {
        return String::new();
    }
    let line: Vec<&str> = text.split_whitespace().collect();
    shortened(&line.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_class(status: u16, body: &str, class: FaultClass, message: &str, code: Option<&str>) {
        let expected = ProviderFault { class, message: message.to_owned(), code: code.map(Into::into) };
        assert_eq!(fault_body(status, body.as_bytes()), expected, "{body}");
    }

    #[test]
    fn errors_of_servers_are_known() {
        use FaultClass::*;
        for (status, body, class, message, code) in [
            (
                400,
                r#"{"error":{"message":"This model's maximum context length is 8192 tokens.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}"#,
                ContextLength,
                "This model's maximum context length is 8192 tokens.",
                Some("context_length_exceeded"),
            ),
            // vLLM 0.32 and before.
            (
                400,
                r#"{"error":{"message":"This model's maximum context length is 64 tokens. However, you requested 90 tokens.","type":"BadRequestError","param":"input_tokens","code":400}}"#,
                ContextLength,
                "This model's maximum context length is 64 tokens. However, you requested 90 tokens.",
                Some("BadRequestError"),
            ),
            (
                404,
                r#"{"object":"error","message":"The model `x` does not exist.","type":"NotFoundError","param":null,"code":404}"#,
                NotFound,
                "The model `x` does not exist.",
                Some("NotFoundError"),
            ),
            (401, r#"{"error":"Unauthorized"}"#, Unauthorized, "Unauthorized", None),
            // SGLang.
            (
                400,
                r#"{"object":"error","message":"The input (90 tokens) is longer than the model's context length (64 tokens).","type":"BadRequestError","param":null,"code":400}"#,
                ContextLength,
                "The input (90 tokens) is longer than the model's context length (64 tokens).",
                Some("BadRequestError"),
            ),
            // llama-server.
            (
                400,
                r#"{"error":{"code":400,"message":"the request exceeds the available context size, try increasing it","type":"exceed_context_size_error","n_prompt_tokens":90,"n_ctx":64}}"#,
                ContextLength,
                "the request exceeds the available context size, try increasing it",
                Some("exceed_context_size_error"),
            ),
            (
                503,
                r#"{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}"#,
                Overloaded,
                "Loading model",
                Some("unavailable_error"),
            ),
            // Ollama.
            (
                404,
                r#"{"error":{"message":"model \"x\" not found, try pulling it first","type":"api_error","param":null,"code":null}}"#,
                NotFound,
                "model \"x\" not found, try pulling it first",
                Some("api_error"),
            ),
            (404, r#"{"error":"model 'x' not found"}"#, NotFound, "model 'x' not found", None),
            // OpenAI and Azure.
            (
                429,
                r#"{"error":{"message":"quota","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}"#,
                Quota,
                "quota",
                Some("insufficient_quota"),
            ),
            // Accounts that are used up or closed: Groq, Moonshot, Fireworks, Anthropic's endpoint.
            (
                400,
                r#"{"error":{"message":"spent","type":"invalid_request_error","code":"blocked_api_access"}}"#,
                Quota,
                "spent",
                Some("blocked_api_access"),
            ),
            (
                400,
                r#"{"error":{"message":"ask support","type":"invalid_request_error","code":"organization_restricted"}}"#,
                Forbidden,
                "ask support",
                Some("organization_restricted"),
            ),
            (
                429,
                r#"{"error":{"message":"suspended","type":"exceeded_current_quota_error"}}"#,
                Quota,
                "suspended",
                Some("exceeded_current_quota_error"),
            ),
            (
                412,
                r#"{"error":{"message":"Account x is suspended, possibly due to reaching the monthly spending limit or failure to pay past invoices.","param":null,"code":"PRECONDITION_FAILED","type":"error"}}"#,
                Quota,
                "Account x is suspended, possibly due to reaching the monthly spending limit or failure to pay past invoices.",
                Some("PRECONDITION_FAILED"),
            ),
            (
                400,
                r#"{"error":{"code":"invalid_request_error","message":"Your credit balance is too low to access the Anthropic API.","type":"invalid_request_error"}}"#,
                Quota,
                "Your credit balance is too low to access the Anthropic API.",
                Some("invalid_request_error"),
            ),
            (
                400,
                r#"{"error":{"message":"'Your credit balance is too low' is no role; spending limit","type":"invalid_request_error"}}"#,
                Invalid,
                "'Your credit balance is too low' is no role; spending limit",
                Some("invalid_request_error"),
            ),
            (
                429,
                r#"{"error":{"message":"slow","type":"tokens","param":null,"code":"rate_limit_exceeded"}}"#,
                RateLimited,
                "slow",
                Some("rate_limit_exceeded"),
            ),
            (
                400,
                r#"{"error":{"message":"filtered","type":null,"param":"prompt","code":"content_filter","status":400,"innererror":{"code":"ResponsibleAIPolicyViolation","content_filter_result":{}}}}"#,
                ContentPolicy,
                "filtered",
                Some("content_filter"),
            ),
            // Gemini's endpoint, FastAPI, Mistral, a proxy's page, nothing.
            (
                400,
                r#"[{"error":{"code":400,"message":"The input token count (9) exceeds the maximum number of tokens allowed (8).","status":"INVALID_ARGUMENT"}}]"#,
                ContextLength,
                "The input token count (9) exceeds the maximum number of tokens allowed (8).",
                Some("INVALID_ARGUMENT"),
            ),
            (
                422,
                r#"{"detail":[{"loc":["body"],"msg":"Field required","type":"missing"}]}"#,
                Invalid,
                "Field required",
                Some("missing"),
            ),
            (
                422,
                r#"{"object":"error","message":{"detail":[{"msg":"Extra inputs are not permitted"}]},"type":"invalid_request_error"}"#,
                Invalid,
                "Extra inputs are not permitted",
                Some("invalid_request_error"),
            ),
            (502, "<html><body>Bad Gateway</body></html>", Server, "The provider answered with status 502.", None),
            (529, "", Overloaded, "The provider answered with status 529.", None),
            (500, "upstream\n  connect error", Server, "upstream connect error", None),
        ] {
            check_class(status, body, class, message, code);
        }
    }

    #[test]
    fn words_are_shortened() {
        let body = format!(r#"{{"error":{{"message":"{}","code":"{}"}}}}"#, "é".repeat(5_000), "c".repeat(5_000));
        let fault = fault_body(400, body.as_bytes());
        assert_eq!((fault.message.chars().count(), fault.code.map(|code| code.len())), (513, Some(64)));
    }

    #[test]
    fn an_event_is_an_error_only_if_it_says_so_at_its_top() {
        assert!(check(b"", br#"{"choices":[{"delta":{"content":"{\"error\":1}"}}]}"#).is_ok());
        assert!(check(b"", br#"{"error":null,"choices":[]}"#).is_ok());
        assert!(check(b"", br#"{"choices":[{"delta":{"error":"x"}}]}"#).is_ok());
        let fault = check(b"", br#"{"error":{"message":"m","code":429}}"#).expect_err("an error");
        assert_eq!((fault.class, fault.message.as_str()), (FaultClass::RateLimited, "m"));
        let fault = check(b"", br#"{"object":"error","message":"m","code":503}"#).expect_err("an error");
        assert_eq!(fault.class, FaultClass::Overloaded);
        assert_eq!(check(b"error", br#"{"message":"m"}"#).expect_err("an error").class, FaultClass::Server);
        assert_eq!(check(b"", br#"{"error":"x""#).expect_err("cut").class, FaultClass::Garbled);
    }
}
