//! Embeddings, rerank and score: a client's side and a provider's.

use crate::common;

use common::read_cut;
use penstock_dialects::openai::{ChatCodec, embeddings, rerank, score};
use penstock_types::{AnswerMeta, ApiError, ChatEvent, Decoded, FaultClass, ProviderCodec, Usage};
use penstock_types::{Bounds, error_body::openai::refusal};
use serde_json::{Value, json};

type Decode = fn(&[u8], &Bounds) -> Result<Decoded, ApiError>;

fn good(decode: Decode, body: &str) -> Decoded {
    decode(body.as_bytes(), &Bounds::default()).unwrap_or_else(|error| panic!("{error}: {body}"))
}

fn whole(decoded: &Decoded, events: &[ChatEvent]) -> Option<Value> {
    let mut collector = decoded.form.whole(&AnswerMeta::new("1".into(), 7));
    events.iter().for_each(|event| collector.event(event));
    collector.finish().map(|body| serde_json::from_slice(&body).expect("JSON"))
}

/// Checks the body sent to the provider, and the client's answer for the provider's answer.
#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "reads as data")]
fn check(decode: Decode, body: &str, sent: Value, path: &str, answer: &Value, expected: Value) {
    let decoded = good(decode, body);
    let call = ChatCodec::default().encode(&decoded.request, "their").expect("can be said");
    assert_eq!(call.path, path);
    assert_eq!(serde_json::from_slice::<Value>(&call.body).expect("JSON"), sent, "{body}");
    let answer = serde_json::to_vec(answer).expect("JSON");
    let events = read_cut(&ChatCodec::default(), &decoded.request, &answer).expect("a good answer");
    assert_eq!(whole(&decoded, &events), Some(expected), "{body}");
}

#[test]
fn vectors_in_the_format_that_the_client_wants() {
    // 1.0 and -0.5, little-endian.
    let base64 = "AACAPwAAAL8=";
    let sent =
        json!({"model": "their", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 2, "user": "u"});
    let body = |format: &str| {
        format!(r#"{{"model":"m","input":["a","b"],"dimensions":2,"user":"u","encoding_format":"{format}"}}"#)
    };
    let answered = |one: Value, other: Value| {
        json!({"object": "list", "model": "m", "usage": {"prompt_tokens": 4, "total_tokens": 4}, "data": [
            {"object": "embedding", "index": 0, "embedding": one}, {"object": "embedding", "index": 1, "embedding": other}]})
    };
    let in_base64 = json!({"data": [{"index": 1, "embedding": "AAAAQAAAgL8="}, {"index": 0, "embedding": base64}],
        "usage": {"prompt_tokens": 4, "total_tokens": 4}});
    let in_numbers =
        json!({"data": [{"embedding": [1.0, -0.5]}, {"embedding": [2, -1e0]}], "usage": {"total_tokens": 4}});
    for answer in [&in_base64, &in_numbers] {
        let numbers = answered(json!([1.0, -0.5]), json!([2.0, -1.0]));
        check(embeddings, &body("float"), sent.clone(), "/embeddings", answer, numbers);
        let encoded = answered(json!(base64), json!("AAAAQAAAgL8="));
        check(embeddings, &body("base64"), sent.clone(), "/embeddings", answer, encoded);
    }
}

#[test]
fn inputs_of_every_shape() {
    for (input, sent) in [
        (r#""a""#, json!("a")),
        ("[1,2]", json!([1, 2])),
        ("[[1,2],[3]]", json!([[1, 2], [3]])),
        (r#"["a"]"#, json!("a")),
    ] {
        let decoded = good(embeddings, &format!(r#"{{"model":"m","input":{input}}}"#));
        let call = ChatCodec::default().encode(&decoded.request, "m").expect("can be said");
        assert_eq!(serde_json::from_slice::<Value>(&call.body).expect("JSON")["input"], sent);
    }
}

#[test]
fn a_ranking() {
    let body = r#"{"model":"m","query":"q","documents":["a",{"text":"b"},"c"],"top_n":2,"return_documents":true}"#;
    let sent = json!({"model": "their", "query": "q", "documents": ["a", "b", "c"], "top_n": 2});
    let expected = json!({"id": "rerank-1", "object": "list", "model": "m", "usage": {"prompt_tokens": 9, "total_tokens": 9},
        "results": [{"index": 2, "relevance_score": 0.75, "document": {"text": "c"}},
            {"index": 0, "relevance_score": 0.5, "document": {"text": "a"}}]});
    let jina = json!({"results": [{"index": 2, "relevance_score": 0.75, "document": {"text": "c"}},
        {"index": 0, "relevance_score": 0.5}], "usage": {"total_tokens": 9}});
    let cohere = json!({"id": "x", "results": [{"index": 0, "relevance_score": 0.5}, {"index": 1, "relevance_score": 1e-9},
        {"index": 2, "relevance_score": 0.75}], "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": 9}}});
    for answer in [jina, cohere] {
        check(rerank, body, sent.clone(), "/rerank", &answer, expected.clone());
    }
}

#[test]
fn scores_in_the_order_of_the_texts() {
    let body = r#"{"model":"m","text_1":["q"],"text_2":["a","b"]}"#;
    let sent = json!({"model": "their", "query": "q", "documents": ["a", "b"]});
    let answer = json!([{"index": 1, "score": 0.75}, {"index": 0, "score": -0.5}]);
    let expected = json!({"id": "score-1", "object": "list", "created": 7, "model": "m",
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
        "data": [{"index": 0, "object": "score", "score": -0.5}, {"index": 1, "object": "score", "score": 0.75}]});
    check(score, body, sent, "/rerank", &answer, expected);
}

#[test]
fn answers_that_lack_something_are_faults() {
    let embed = good(embeddings, r#"{"model":"m","input":["a","b"]}"#);
    let ranked = good(rerank, r#"{"model":"m","query":"q","documents":["a"]}"#);
    for (decoded, answer, class) in [
        (&embed, r#"{"data":[{"index":0,"embedding":[1]}]}"#, FaultClass::Garbled),
        (&embed, r#"{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":[1e99]}]}"#, FaultClass::Garbled),
        (&embed, r#"{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":"AAA="}]}"#, FaultClass::Garbled),
        (&embed, r#"{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":[]}]}"#, FaultClass::Garbled),
        (&embed, r#"{"error":"loading"}"#, FaultClass::Server),
        (&embed, r#"{"data":["#, FaultClass::Truncated),
        (&embed, "", FaultClass::Truncated),
        (&ranked, r#"{"results":[{"index":1,"relevance_score":1}]}"#, FaultClass::Garbled),
        (&ranked, r#"{"ok":true}"#, FaultClass::Garbled),
    ] {
        let read = read_cut(&ChatCodec::default(), &decoded.request, answer.as_bytes());
        assert_eq!(read.map_err(|fault| fault.class), Err(class), "{answer}");
    }
    let usage = ChatEvent::Usage(Usage::default());
    assert_eq!(whole(&embed, std::slice::from_ref(&usage)), None);
    assert_eq!(whole(&ranked, &[usage]), None);
}

#[test]
fn refusals_name_the_parameter() {
    let many = format!("[{}\"x\"]", "\"x\",".repeat(2_048));
    let (invalid, value, bound) = (None, Some("unsupported_value"), Some("above_maximum"));
    for (decode, fields, param, code) in [
        (embeddings as Decode, r#""model":"m""#.to_owned(), "input", invalid),
        (embeddings, r#""input":"a""#.to_owned(), "model", invalid),
        (embeddings, r#""model":"m","input":[]"#.to_owned(), "input", invalid),
        (embeddings, r#""model":"m","input":["a",""]"#.to_owned(), "input[1]", invalid),
        (embeddings, r#""model":"m","input":["a",[1]]"#.to_owned(), "input[1]", invalid),
        (embeddings, format!(r#""model":"m","input":{many}"#), "input", bound),
        (embeddings, r#""model":"m","input":"a","encoding_format":"int8""#.to_owned(), "encoding_format", invalid),
        (embeddings, r#""model":"m","input":"a","dimensions":0"#.to_owned(), "dimensions", invalid),
        (embeddings, r#""model":"m","input":"a","stream":true"#.to_owned(), "stream", value),
        (rerank, r#""model":"m","documents":["a"]"#.to_owned(), "query", invalid),
        (rerank, r#""model":"m","query":"a""#.to_owned(), "documents", invalid),
        (rerank, r#""model":"m","query":"a","documents":[]"#.to_owned(), "documents", invalid),
        (rerank, r#""model":"m","query":"a","documents":[{}]"#.to_owned(), "documents[0].text", invalid),
        (rerank, r#""model":"m","query":"a","documents":["a"],"top_n":0"#.to_owned(), "top_n", invalid),
        (rerank, format!(r#""model":"m","query":"a","documents":{many}"#), "documents", bound),
        (score, r#""model":"m","text_1":["a","b"],"text_2":["a","b"]"#.to_owned(), "text_1", value),
        (score, r#""model":"m","text_1":"a""#.to_owned(), "text_2", invalid),
    ] {
        let body = format!("{{{fields}}}");
        let error = decode(body.as_bytes(), &Bounds::default()).map(|_| ()).expect_err(&fields[..fields.len().min(80)]);
        let answer: Value = serde_json::from_slice(&refusal(&error).1).expect("JSON");
        assert_eq!(
            (answer["error"]["param"].as_str(), answer["error"]["code"].as_str()),
            (Some(param), code),
            "{error}"
        );
    }
}
