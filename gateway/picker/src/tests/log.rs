//! Records for the access log: one for each request, whatever the proxy sends and however the stream ends.

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::*;

/// Text of a prompt and of an answer, which no record may have.
const SECRET: &str = "tell-nobody";

fn stream_head() -> Step {
    Step::ResponseHeaders(head(&[(":status", "200"), ("content-type", "text/event-stream")], false))
}

fn answer_status(status: &str) -> Step {
    Step::ResponseHeaders(head(&[(":status", status)], false))
}

fn event(json: &str) -> HttpBody {
    part(&format!("data: {json}\n\n"), false)
}

fn content() -> Step {
    Step::ResponseBody(event(&json!({"id": "1", "choices": [{"index": 0, "delta": {"content": SECRET}}]}).to_string()))
}

fn last() -> Step {
    let usage = json!({"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}});
    let choices = json!([{"index": 0, "delta": {}, "finish_reason": "stop"}]);
    Step::ResponseBody(event(&json!({"id": "1", "choices": choices, "usage": usage}).to_string()))
}

fn done() -> Step {
    Step::ResponseBody(event("[DONE]"))
}

pub(super) fn request() -> Step {
    let fields = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        ("x-request-id", "abc-1"),
        ("x-forwarded-for", "9.9.9.9, 1.2.3.4"),
    ];
    Step::RequestHeaders(head(&fields, false))
}

pub(super) fn body() -> Step {
    Step::RequestBody(part(&format!("{{\"messages\":\"{SECRET}\"}}"), true))
}

fn end_of_answer() -> Step {
    Step::ResponseBody(part("", true))
}

/// Lines that a conversation of these messages leaves behind; `end` says what the server tells the conversation last.
async fn lines(double: Double, messages: Vec<ProcessingRequest>, end: fn(&mut Conversation<Double>)) -> Vec<Json> {
    let double = Arc::new(double);
    let mut talk = Conversation::new(double.clone());
    for message in messages {
        if talk.take(message).await.is_over {
            break;
        }
    }
    end(&mut talk);
    drop(talk);
    assert_eq!(double.bodies.bytes_held(), 0);
    std::mem::take(&mut *double.lines.lock().expect("not poisoned"))
}

/// The one line of a conversation, without its times, which must be there.
async fn line(double: Double, steps: Vec<Step>, end: fn(&mut Conversation<Double>)) -> Json {
    line_of(double, steps.into_iter().map(step).collect(), end).await
}

async fn line_of(double: Double, messages: Vec<ProcessingRequest>, end: fn(&mut Conversation<Double>)) -> Json {
    let mut all = lines(double, messages, end).await;
    assert_eq!(all.len(), 1, "{all:?}");
    let mut line = all.remove(0);
    assert!(!line.to_string().contains(SECRET), "{line}");
    let fields = line.as_object_mut().expect("an object");
    assert!(fields.remove("time_ms").and_then(|time| time.as_u64()).is_some_and(|time| time > 0));
    assert!(fields.remove("duration_ms").and_then(|time| time.as_f64()).is_some_and(|time| time >= 0.0));
    line
}

const LEFT: fn(&mut Conversation<Double>) = Conversation::left;
const NOTHING: fn(&mut Conversation<Double>) = |_| {};

fn picked(more: Json) -> Json {
    let all = json!({
        "request_id": "abc-1", "client": "1.2.3.4", "protocol": "ext_proc", "route": "/v1/chat/completions",
        "model": "m", "stream": true, "target": "a/m", "reason": "cached", "endpoints": [FIRST, SECOND],
    });
    with(all, more)
}

fn with(mut all: Json, more: Json) -> Json {
    let Json::Object(more) = more else { panic!("an object") };
    all.as_object_mut().expect("an object").extend(more);
    all
}

fn unpicked(more: Json) -> Json {
    let all = json!({
        "request_id": "abc-1", "client": "1.2.3.4", "protocol": "ext_proc", "route": "/v1/chat/completions",
    });
    with(all, more)
}

#[tokio::test]
async fn a_complete_answer_says_all_that_was_seen() {
    let steps = vec![request(), body(), stream_head(), content(), content(), last(), done(), end_of_answer()];
    let mut line = line(double(), steps, LEFT).await;
    let fields = line.as_object_mut().expect("an object");
    assert!(fields.remove("ttft_ms").is_some_and(|time| time.as_f64() >= Some(0.0)));
    assert!(fields.remove("tpot_ms").is_some_and(|time| time.as_f64() >= Some(0.0)));
    let counts = json!({
        "status": 200, "end": "complete", "finish": ["stop"], "prompt_tokens": 40, "cached_tokens": 32,
        "completion_tokens": 3, "cost_usd": 3.0,
    });
    assert_eq!(line, picked(counts));
}

#[tokio::test]
async fn each_ending_has_its_line() {
    let attempts = |outcome: &str| json!([{"target": "a/m", "outcome": outcome, "ms": 1.0}]);
    // The client has left: within its body, and before the answer.
    let gone = json!({"status": 0, "end": "client_gone", "client_gone": true});
    let partly = Step::RequestBody(part(SECRET, false));
    assert_eq!(line(double(), vec![request(), partly], LEFT).await, unpicked(gone.clone()));
    assert_eq!(line(double(), vec![request(), body()], LEFT).await, picked(gone));
    // In the middle of an answer it might as well be the endpoint; without a word of the proxy it might be this process.
    let steps = || vec![request(), body(), stream_head()];
    assert_eq!(line(double(), steps(), LEFT).await, picked(json!({"status": 200, "end": "cut"})));
    assert_eq!(line(double(), vec![request(), body()], NOTHING).await, picked(json!({"status": 0, "end": "cut"})));
    // A client that has read the end of a stream need not wait for the end of the answer.
    let steps = vec![request(), body(), stream_head(), last(), done()];
    assert_eq!(line(double(), steps, LEFT).await["end"], "complete");
    // The answer of the endpoint, or of Envoy in its place, is an error.
    let steps = || vec![request(), body(), answer_status("503")];
    let failed = json!({
        "status": 503, "end": "failed", "error": "Overloaded", "detail": "Overloaded", "attempts": attempts("error"),
    });
    assert_eq!(line(double(), steps(), LEFT).await, picked(failed.clone()));
    let whole = [steps(), vec![end_of_answer()]].concat();
    assert_eq!(line(double(), whole, LEFT).await, picked(failed));
    // An error event in a stream that began well.
    let error = Step::ResponseBody(event(r#"{"error":{"message":"tell-nobody","type":"server_error"}}"#));
    let failed = line(double(), vec![request(), body(), stream_head(), error, end_of_answer()], LEFT).await;
    assert_eq!(
        (&failed["end"], &failed["error"], &failed["status"]),
        (&json!("failed"), &json!("ProviderFailed"), &json!(200))
    );
    // Envoy answers in place of everybody, before the request has come to its end.
    let early = line(double(), vec![request(), answer_status("408"), end_of_answer()], LEFT).await;
    let failed = json!({"status": 408, "end": "failed", "error": "DeadlineExceeded", "detail": "Timeout"});
    assert_eq!(early, unpicked(failed));
    // The proxy shows no bodies of answers, or not even heads.
    for (more, status) in [(vec![stream_head()], 200), (vec![], 0)] {
        let first = with_modes(request(), BodySendMode::FullDuplexStreamed, BodySendMode::None);
        let messages = std::iter::once(first).chain([body()].into_iter().chain(more).map(step)).collect();
        let line = line_of(double(), messages, LEFT).await;
        assert_eq!(line, picked(json!({"status": status, "end": "unseen"})));
    }
}

#[tokio::test]
async fn each_refusal_has_its_line() {
    for (kind, model, error, reason, status) in [
        (ErrorKind::Unavailable, json!("m"), "Unavailable", "no_endpoint", 503),
        (ErrorKind::RateLimited, json!("m"), "RateLimited", "full", 429),
        (ErrorKind::InvalidRequest, json!("m"), "InvalidRequest", "invalid", 400),
        (ErrorKind::ModelNotFound, Json::Null, "ModelNotFound", "unknown_model", 404),
    ] {
        let refusing = Double { refuses: Some(kind), ..double() };
        let mut expected = unpicked(json!({
            "model": model, "stream": false, "status": status, "end": "failed", "error": error, "detail": "why",
            "reason": reason,
        }));
        expected.as_object_mut().expect("an object").retain(|_, value| !value.is_null());
        assert_eq!(line(refusing, vec![request(), body()], NOTHING).await, expected);
    }
    let refused = |reason: &str, error: &str, status: u16| {
        unpicked(json!({"status": status, "end": "failed", "error": error, "reason": reason}))
    };
    let small = || Double { body_bytes_max: 10, ..double() };
    assert_eq!(line(small(), vec![request(), body()], NOTHING).await, refused("too_large", "TooLarge", 413));
    let slow: fn(&mut Conversation<Double>) = |talk| drop(talk.too_slow());
    assert_eq!(line(double(), vec![request()], slow).await, refused("slow_body", "ClientTimeout", 408));
    let full: fn(&mut Conversation<Double>) = |talk| drop(talk.cover(2 << 20));
    let vast = || Double { body_bytes_max: 4 << 20, ..double() };
    assert_eq!(line(vast(), vec![request()], full).await, refused("share", "Overloaded", 503));
    let nobodys = Step::RequestHeaders(head(&[(":method", "POST"), (":path", "/"), ("x-request-id", "abc-1")], false));
    let found_none = line(vast(), vec![nobodys], full).await;
    assert_eq!((&found_none["reason"], found_none.get("client")), (&json!("memory"), None), "{found_none}");
    let streamed = vec![with_modes(request(), BodySendMode::Streamed, BodySendMode::Streamed)];
    let mode = line_of(double(), streamed, NOTHING).await;
    let headless = line(double(), vec![body()], NOTHING).await;
    for refused in [mode, headless] {
        let said = (&refused["reason"], &refused["error"], &refused["status"]);
        assert_eq!(said, (&json!("mode"), &json!("Internal"), &json!(500)), "{refused}");
    }
    // The proxy breaks the protocol: the kind of the failure and what it was.
    let broken: fn(&mut Conversation<Double>) = |talk| talk.broken(ErrorKind::Malformed, "a message cannot be read");
    let more = json!({"status": 0, "end": "failed", "error": "Malformed", "detail": "a message cannot be read"});
    assert_eq!(line(double(), vec![request()], broken).await, with(unpicked(more), json!({"reason": "protocol"})));
    let second = line(double(), vec![request(), body(), request()], NOTHING).await;
    assert_eq!((&second["error"], &second["reason"]), (&json!("Malformed"), &json!("cached")));
    // After the end of the answer nothing can fail.
    let steps = vec![request(), body(), stream_head(), last(), done(), end_of_answer()];
    assert_eq!(line(double(), steps, broken).await["end"], "complete");
}

#[tokio::test]
async fn a_choice_that_does_not_come_and_one_that_panics_have_their_lines() {
    let double_that = Arc::new(Double { hangs: true, ..double() });
    let mut talk = Conversation::new(double_that.clone());
    talk.take(step(request())).await;
    let choice = tokio::time::timeout(Duration::from_millis(1), talk.take(step(body()))).await;
    assert!(choice.is_err(), "it hangs");
    talk.left();
    drop(talk);
    let lines = std::mem::take(&mut *double_that.lines.lock().expect("not poisoned"));
    assert_eq!((lines.len(), &lines[0]["end"]), (1, &json!("client_gone")));
    let double_that = Arc::new(Double { panics: true, ..double() });
    let other = double_that.clone();
    let ended = tokio::spawn(async move {
        let mut talk = Conversation::new(other);
        talk.take(step(request())).await;
        talk.take(step(body())).await;
    });
    assert!(ended.await.expect_err("it panics").is_panic());
    let lines = std::mem::take(&mut *double_that.lines.lock().expect("not poisoned"));
    assert_eq!((lines.len(), &lines[0]["end"], &lines[0]["error"]), (1, &json!("failed"), &json!("Internal")));
}

#[tokio::test]
async fn ids_and_names_of_a_hostile_client_stay_out() {
    let long = "x".repeat(129);
    for (given, is_kept) in [
        (&b"f3c7a1d0-0000-4000-8000-000000000000"[..], true),
        (b"a\"b", false),
        (b"a\nb", false),
        (b"\xff\xfe", false),
        (b"", false),
        (long.as_bytes(), false),
    ] {
        let field = |name: &'static str, value: &[u8]| HeaderValue {
            key: Bytes::from_static(name.as_bytes()),
            value: Bytes::new(),
            raw_value: Bytes::copy_from_slice(value),
        };
        // A second field of the name does not count; a path that is no text is no route.
        let headers = vec![
            field(":path", b"/v1/\xff"),
            field("x-request-id", given),
            field("x-request-id", b"second"),
            field("x-forwarded-for", b"\xff"),
        ];
        let head = HttpHeaders { headers: Some(HeaderMap { headers }), end_of_stream: false };
        let line = line(double(), vec![Step::RequestHeaders(head)], LEFT).await;
        let id = line["request_id"].as_str().expect("text").as_bytes();
        assert_eq!((id == given, id.starts_with(b"req_")), (is_kept, !is_kept), "{line}");
        assert_eq!((&line["route"], line.get("client")), (&json!("-"), None));
    }
}

#[derive(Clone, Debug)]
enum Act {
    Message(ProcessingRequest),
    Cover(usize),
    TooSlow,
    TooLong,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<bool>().prop_map(|ends| match request() {
            Step::RequestHeaders(head) => Step::RequestHeaders(HttpHeaders { end_of_stream: ends, ..head }),
            other => other,
        }),
        4 => any::<bool>().prop_map(|ends| Step::RequestBody(part(SECRET, ends))),
        1 => Just(Step::RequestTrailers(HttpTrailers {})),
        3 => (prop_oneof![Just(200_u16), Just(204), Just(302), Just(404), Just(503), Just(0), Just(99)], any::<bool>())
            .prop_map(|(status, ends)| Step::ResponseHeaders(head(
                &[(":status", status.to_string().as_str()), ("content-type", "text/event-stream")],
                ends,
            ))),
        2 => Just(content()),
        1 => Just(last()),
        1 => Just(done()),
        1 => Just(Step::ResponseBody(event("no JSON"))),
        1 => Just(Step::ResponseBody(event(r#"{"error":{"message":"tell-nobody"}}"#))),
        2 => any::<bool>().prop_map(|ends| Step::ResponseBody(part("", ends))),
        1 => Just(Step::ResponseTrailers(HttpTrailers {})),
    ]
}

fn any_act() -> impl Strategy<Value = Act> {
    let mode = || (0..6_i32).prop_map(|mode| BodySendMode::try_from(mode).expect("a mode"));
    let message = (any_step(), proptest::option::weighted(0.2, (mode(), mode())), proptest::bool::weighted(0.05));
    prop_oneof![
        20 => message.prop_map(|(request, modes, observability_mode)| {
            let message = match modes {
                Some((asks, answers)) => with_modes(request, asks, answers),
                None => step(request),
            };
            Act::Message(ProcessingRequest { observability_mode, ..message })
        }),
        1 => Just(Act::Message(ProcessingRequest::default())),
        1 => (0..3_usize << 20).prop_map(Act::Cover),
        1 => Just(Act::TooSlow),
        1 => Just(Act::TooLong),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_request_leaves_one_line_and_no_more(
        acts in proptest::collection::vec(any_act(), 0..14),
        refuses in proptest::option::weighted(0.3, prop_oneof![
            Just(ErrorKind::Unavailable), Just(ErrorKind::ModelNotFound), Just(ErrorKind::RateLimited)
        ]),
        has_left in any::<bool>(),
        is_broken in proptest::bool::weighted(0.2),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let double = Arc::new(Double { refuses, ..double() });
        let mut talk = Conversation::new(double.clone());
        let (mut has_head, mut statuses, mut is_answering, mut has_end, mut has_done) = (false, vec![], false, false, false);
        for act in acts {
            // As the server does: what may be refused are bodies that are awaited.
            let replies = match act {
                Act::Message(message) => {
                    if !message.observability_mode {
                        has_head |= matches!(message.request, Some(Step::RequestHeaders(_) | Step::RequestBody(_)));
                        match message.request.as_ref().filter(|_| has_head) {
                            Some(Step::ResponseHeaders(head)) => {
                                is_answering = true;
                                has_end |= head.end_of_stream;
                                let status = head.headers.as_ref().and_then(|all| all.get(b":status")).expect("one");
                                statuses.push(std::str::from_utf8(status).expect("text").parse::<u16>().expect("a number"));
                            }
                            Some(Step::ResponseBody(part)) => {
                                is_answering = true;
                                has_end |= part.end_of_stream;
                                has_done |= part.body.starts_with(b"data: [DONE]");
                            }
                            Some(Step::ResponseTrailers(_)) => (is_answering, has_end) = (true, true),
                            _ => {}
                        }
                    }
                    runtime.block_on(talk.take(message))
                }
                Act::Cover(held) => talk.cover(held).err().unwrap_or_default(),
                Act::TooSlow if talk.awaits_body() => talk.too_slow(),
                Act::TooLong if talk.awaits_body() => talk.too_long(),
                Act::TooSlow | Act::TooLong => Replies::default(),
            };
            if let Some(Reply::Immediate(answer)) = replies.messages.first().and_then(|first| first.response.as_ref()) {
                statuses.push(u16::try_from(answer.status.expect("a status").code).expect("a status"));
            }
            if replies.is_over {
                break;
            }
        }
        if has_left {
            talk.left();
        }
        if is_broken {
            talk.broken(ErrorKind::Malformed, "broken");
        }
        drop(talk);
        prop_assert_eq!(double.bodies.bytes_held(), 0);
        let lines = std::mem::take(&mut *double.lines.lock().expect("not poisoned"));
        prop_assert_eq!(lines.len(), usize::from(has_head));
        let told = told(&double);
        let counted: Vec<&String> = told.iter().filter(|told| told.starts_with("count ")).collect();
        let picks = told.iter().filter(|told| *told == "count m picked cached").count();
        prop_assert_eq!(told.iter().filter(|told| *told == "dropped").count(), picks, "{:?}", told);
        let Some(line) = lines.first() else { return Ok(()) };
        prop_assert!(!line.to_string().contains(SECRET) && line.to_string().len() < 2048, "{}", line);
        prop_assert!(counted.len() <= 1 && picks <= 1, "one outcome for a request: {:?}", told);
        prop_assert_eq!(line.get("reason").is_some(), counted.len() == 1, "{} {:?}", line, told);
        if let Some(reason) = line.get("reason").and_then(Json::as_str) {
            prop_assert_eq!(counted[0].rsplit(' ').next(), Some(reason));
        }
        prop_assert_eq!(line.get("endpoints").is_some(), picks == 1, "{}", line);
        prop_assert_eq!(line.get("target").is_some(), picks == 1, "{}", line);
        prop_assert_eq!(&line["status"], &json!(statuses.last().copied().unwrap_or(0)), "{}", line);
        let end = line["end"].as_str().expect("text");
        prop_assert_eq!(end == "failed", line.get("error").is_some(), "{}", line);
        prop_assert_eq!(end == "client_gone", line.get("client_gone").is_some(), "{}", line);
        if statuses.iter().any(|status| *status >= 400) || refuses.is_some() && !counted.is_empty() {
            prop_assert_eq!(end, "failed", "{}", line);
        }
        match end {
            "complete" => prop_assert!(has_end || has_done, "{}", line),
            "client_gone" => prop_assert!(has_left && !is_answering, "{}", line),
            "unseen" => prop_assert!(picks == 1 && !has_end, "{}", line),
            "cut" => prop_assert!((is_answering || !has_left) && !has_end, "{}", line),
            _ => {}
        }
    }
}
