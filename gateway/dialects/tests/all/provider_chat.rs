//! The provider's side of the OpenAI API: request bodies, and answers decoded alike however they are cut.

use crate::common;

use common::{check_golden, read_cut, shown};
use penstock_dialects::openai::{ChatCodec, decode_chat, decode_completion};
use penstock_types::Bounds;
use penstock_types::{ChatEvent, FaultClass, ProviderCodec, ProviderFault, Request};

fn chat(fields: &str) -> Request {
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}]{fields}}}"#);
    Request::Chat(Box::new(decode_chat(body.as_bytes(), &Bounds::default()).expect("a good request")))
}

fn completion(fields: &str) -> Request {
    let body = format!(r#"{{"model":"m"{fields}}}"#);
    Request::Complete(Box::new(decode_completion(body.as_bytes(), &Bounds::default()).expect("a good request")))
}

/// The events of an answer, the same however it is cut.
#[track_caller]
fn events(request: &Request, answer: &str) -> Result<Vec<ChatEvent>, ProviderFault> {
    read_cut(&ChatCodec::default(), request, answer.as_bytes())
}

fn stream(chunks: &[&str]) -> String {
    chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect()
}

#[track_caller]
fn check_encode(name: &str, codec: ChatCodec, request: &Request) {
    let call = codec.encode(request, "their-model").expect("can be said");
    let body: serde_json::Value = serde_json::from_slice(&call.body).expect("JSON");
    check_golden(
        &format!("{name}.provider.json"),
        &format!("{}\n{}\n", call.path, serde_json::to_string_pretty(&body).expect("JSON")),
    );
}

const EVERY_FIELD: &str = r#"{ "model" : "demo", "stream" : true,
    "max_completion_tokens": 7, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
    "presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1.1, "logit_bias": {"50": -100, "7": 2.5},
    "seed": 18446744073709551615, "n": 3, "stop": ["END", "\u00e9\n"], "stop_token_ids": [2, 3],
    "include_stop_str_in_output": true, "skip_special_tokens": false, "allowed_token_ids": [1, 2], "min_tokens": 2,
    "ignore_eos": true, "logprobs": true, "top_logprobs": 20, "return_token_ids": true, "cache_salt": "s", "priority": -3,
    "reasoning_effort": "max", "chat_template_kwargs": { "enable_thinking" : false }, "add_generation_prompt": false,
    "parallel_tool_calls": false, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "user": "u",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": {"type": "object", "properties": {}, "additionalProperties": false}}},
    "tools": [{"type": "function", "function": {"name": "weather", "strict": true, "parameters": {"type": "object"}}}],
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
            {"type": "image_url", "image_url": {"url": "https://h/i?a=\"b\""}}]},
        {"role": "assistant", "content": null, "reasoning": "Ask the tool.", "tool_calls": [{"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": "{\"city\": \"x\"}"},
            "extra_content": {"google": {"thought_signature": "c2ln"}}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]}"#;

#[test]
fn requests_say_all_that_was_asked() {
    check_encode("chat_smallest", ChatCodec::default(), &chat(""));
    let every = decode_chat(EVERY_FIELD.as_bytes(), &Bounds::default()).expect("a good request");
    let every = Request::Chat(Box::new(every));
    check_encode("chat_every_field", ChatCodec::default(), &every);
    check_encode("chat_every_field_strict", ChatCodec::strict(), &every);
    let fields =
        r#","prompt":["a","b"],"n":2,"best_of":3,"echo":true,"logprobs":2,"suffix":"!","max_tokens":3,"seed":1"#;
    check_encode("completion_every_field", ChatCodec::default(), &completion(fields));
    check_encode("completion_tokens", ChatCodec::default(), &completion(r#","prompt":[1,2],"stream":true"#));
}

#[test]
fn what_was_sent_reads_back_as_what_was_asked() {
    let every = decode_chat(EVERY_FIELD.as_bytes(), &Bounds::default()).expect("a good request");
    let mut expected = every.clone();
    expected.stream = Some(penstock_types::StreamOptions { include_usage: true, continuous_usage_stats: false });
    let call = ChatCodec::default().encode(&Request::Chat(Box::new(every)), "demo").expect("can be said");
    let again = decode_chat(&call.body, &Bounds::default()).expect("our own decoder takes it");
    assert_eq!(format!("{again:#?}"), format!("{expected:#?}"));
}

#[test]
fn answers_of_many_servers() {
    let plain = chat("");
    let several = chat(r#","n":2"#);
    let logprobs = chat(r#","logprobs":true,"top_logprobs":2,"return_token_ids":true,"prompt_logprobs":1"#);
    let mut out = String::new();
    for (name, request, answer) in [
        ("OpenAI, streamed", &plain, stream(OPENAI)),
        ("no [DONE], but every choice has finished", &plain, stream(&OPENAI[..OPENAI.len() - 1])),
        ("vLLM: reasoning under two names, usage in every chunk, a stop string", &plain, stream(VLLM)),
        ("two choices, interleaved", &several, stream(TWO)),
        ("parallel calls, as OpenAI streams them", &plain, stream(CALLS)),
        ("ids new in each delta, arguments as an object, finish_reason stop", &plain, stream(ODD_IDS)),
        ("one index for all, no ids, whole arguments", &plain, stream(ONE_INDEX)),
        ("names repeated, index gaps, null deltas, no role", &plain, stream(REPEATED)),
        ("the deprecated function_call", &plain, stream(LEGACY)),
        ("a thought's signature", &plain, stream(SIGNED)),
        ("thinking in parts, usage in the last choice", &plain, stream(PARTS)),
        ("a refusal", &plain, REFUSAL.to_owned()),
        ("a whole answer with log-probabilities and token ids", &logprobs, LOGPROBS.to_owned()),
        ("[DONE] without a finish_reason", &plain, stream(&[r#"{"choices":[{"delta":{"content":"a"}}]}"#, "[DONE]"])),
    ] {
        let events = events(request, &answer).unwrap_or_else(|fault| panic!("{name}: {fault:?}"));
        out.push_str(&format!("## {name}\n{}\n", shown(&events)));
    }
    check_golden("provider_chat.events", &out);
}

#[test]
fn broken_answers_are_faults() {
    let plain = chat("");
    let half = r#"{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}"#;
    let end = r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;
    for (answer, class) in [
        (String::new(), FaultClass::Truncated),
        ("\n\n".into(), FaultClass::Truncated),
        (stream(&[half]), FaultClass::Truncated),
        (stream(&["[DONE]"]), FaultClass::Truncated),
        (stream(&[end]).trim_end().to_owned(), FaultClass::Truncated),
        (stream(&[half, "{\"choices\":"]), FaultClass::Garbled),
        ("<html></html>".into(), FaultClass::Truncated),
        (OPENAI_WHOLE[..OPENAI_WHOLE.len() - 1].to_owned(), FaultClass::Truncated),
        ("{\"choices\":[}]}".into(), FaultClass::Garbled),
        ("{}".into(), FaultClass::Truncated),
        (stream(&[half, r#"{"error":{"message":"overloaded","code":503}}"#, "[DONE]"]), FaultClass::Overloaded),
        (stream(&[r#"{"error":{"message":"m","type":"insufficient_quota","code":null}}"#]), FaultClass::Quota),
        (format!("event: error\n{}", stream(&[r#"{"message":"m"}"#])), FaultClass::Server),
        (r#"{"error":{"message":"too many","code":429}}"#.into(), FaultClass::RateLimited),
        (
            stream(&[half, r#"{"choices":[{"delta":{},"finish_reason":"insufficient_system_resource"}]}"#]),
            FaultClass::Overloaded,
        ),
        (stream(&[half, r#"{"choices":[{"delta":{},"finish_reason":"abort"}]}"#]), FaultClass::Truncated),
        (
            stream(&[r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a"}]},"finish_reason":"stop"}]}"#]),
            FaultClass::Garbled,
        ),
    ] {
        assert_eq!(events(&plain, &answer).map_err(|fault| fault.class), Err(class), "{answer}");
    }
    let one = stream(&[end, "[DONE]"]);
    assert_eq!(events(&chat(r#","n":2"#), &one).map_err(|fault| fault.class), Err(FaultClass::Truncated));
}

#[test]
fn done_completes_an_answer_before_its_body_ends() {
    let mut decoder = ChatCodec::default().decoder(&chat(r#","stream":true"#));
    let mut events = Vec::new();
    decoder.push(stream(OPENAI).as_bytes(), &mut events).expect("good");
    assert!(decoder.is_complete());
    let before = events.len();
    decoder.push(b"data: {\"error\":{}}\n\n", &mut events).expect("not read");
    decoder.end(&mut events).expect("complete");
    assert_eq!(events.len(), before);
}

#[test]
fn completions_streamed_and_whole() {
    let request = completion(r#","prompt":["a","b"],"logprobs":1"#);
    let whole = r#"{"id":"cmpl-1","object":"text_completion","choices":[
        {"index":1,"text":"y","logprobs":null,"finish_reason":"stop","stop_reason":7},
        {"index":0,"text":"x€","logprobs":{"tokens":["x","bytes:\\xe2\\x82","bytes:\\xac"],"token_logprobs":[null,-0.5,-1.0],
        "top_logprobs":[null,{"z":-2.0,"bytes:\\xe2\\x82":-0.5},{}],"text_offset":[0,1,1]},"finish_reason":"length"}],
        "usage":{"prompt_tokens":2,"completion_tokens":4,"total_tokens":6}}"#;
    let streamed = stream(&[
        r#"{"choices":[{"index":0,"text":"x"}]}"#,
        r#"{"choices":[{"index":1,"text":"y","finish_reason":"stop"}]}"#,
        r#"{"choices":[{"index":0,"text":"","finish_reason":"length"}]}"#,
        r#"{"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":2}}"#,
        "[DONE]",
    ]);
    let (whole, streamed) = (events(&request, whole).expect("good"), events(&request, &streamed).expect("good"));
    check_golden("provider_completion.events", &format!("{}\n{}", shown(&whole), shown(&streamed)));
    let cut = stream(&[r#"{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}"#]);
    assert_eq!(events(&request, &cut).map_err(|fault| fault.class), Err(FaultClass::Truncated));
}

const OPENAI: &[&str] = &[
    r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"gpt","system_fingerprint":null,"choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"usage":null,"obfuscation":"xyz"}"#,
    r#"{"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"Grüß"},"logprobs":null,"finish_reason":null}],"usage":null}"#,
    r#"{"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" \"dich\" \ud83d\ude00"},"logprobs":null,"finish_reason":null}],"usage":null}"#,
    r#"{"id":"chatcmpl-1","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}"#,
    r#"{"id":"chatcmpl-1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":2,"cache_write_tokens":1,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":3}}}"#,
    "[DONE]",
];

const OPENAI_WHOLE: &str =
    r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}"#;

const VLLM: &[&str] = &[
    r#"{"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":"","reasoning":null}}],"usage":{"prompt_tokens":9,"completion_tokens":0}}"#,
    r#"{"id":"1","choices":[{"index":0,"delta":{"reasoning":"Hm","reasoning_content":"Hm"}}],"usage":{"prompt_tokens":9,"completion_tokens":1}}"#,
    r#"{"id":"1","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop","stop_reason":"END"}],"usage":{"prompt_tokens":9,"completion_tokens":2}}"#,
    "[DONE]",
];

const TWO: &[&str] = &[
    r#"{"choices":[{"index":1,"delta":{"content":"b"},"finish_reason":""}]}"#,
    r#"{"choices":[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":"B"},"finish_reason":"length"}]}"#,
    r#"{"choices":[{"index":0,"delta":{"content":"A"},"finish_reason":"stop"},{"index":2,"delta":{"content":"not asked for"}}]}"#,
    "[DONE]",
];

const CALLS: &[&str] = &[
    r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":"call_a","type":"function","function":{"name":"f","arguments":""}}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\""}}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"call_b","type":"function","function":{"name":"g","arguments":""}}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}"#,
    "[DONE]",
];

const ODD_IDS: &[&str] = &[
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"x1","function":{"name":"f","arguments":"{\"a\""}}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"x2","function":{"name":null,"arguments":":{}}"}}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"x3","function":{"name":"g","arguments":{"b" : [1, "a b"]}}}]},"finish_reason":"stop"}]}"#,
    "[DONE]",
];

const ONE_INDEX: &[&str] = &[
    r#"{"id":"r","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"","function":{"name":"f","arguments":"{\"a\":1}"}}]}}]}"#,
    r#"{"id":"r","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"","function":{"name":"f","arguments":"{\"a\":2}"}}]}}]}"#,
    r#"{"id":"r","choices":[{"index":0,"delta":{"tool_calls":[{"function":{"name":"g","arguments":"{}"}},{"function":{"name":"h","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}"#,
    "[DONE]",
];

const REPEATED: &[&str] = &[
    r#"{"choices":[{"index":0,"delta":null}]}"#,
    r#"{"choices":[{"index":0,"delta":{"content":"so","tool_calls":null,"function_call":null}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"a","function":{"name":"f","arguments":"{"}}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":1,"id":"a","function":{"name":"f","arguments":"}"}}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":3,"id":"b","function":{"arguments":"{\"late\""}}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":3,"id":"b","function":{"name":"g","arguments":":1}"}}]}}]}"#,
    r#"{"choices":[{"index":0,"finish_reason":"tool_calls"}]}"#,
    "[DONE]",
];

const LEGACY: &[&str] = &[
    r#"{"id":"r","choices":[{"index":0,"delta":{"role":"assistant","content":null,"function_call":{"name":"f","arguments":""}}}]}"#,
    r#"{"id":"r","choices":[{"index":0,"delta":{"function_call":{"arguments":"{}"}}}]}"#,
    r#"{"id":"r","choices":[{"index":0,"delta":{},"finish_reason":"function_call"}]}"#,
    "[DONE]",
];

const SIGNED: &[&str] = &[
    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"extra_content":{"google":{"thought_signature":"c2ln"}},"function":{"arguments":"{}","name":"f"},"id":"function-call-1","type":"function"}]},"finish_reason":"stop"}]}"#,
    "[DONE]",
];

const PARTS: &[&str] = &[
    r#"{"choices":[{"index":0,"delta":{"content":[{"type":"thinking","thinking":[{"type":"text","text":"Hm"}]}]}}]}"#,
    r#"{"choices":[{"index":0,"delta":{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},"finish_reason":"model_length","usage":{"prompt_tokens":3,"completion_tokens":2,"cached_tokens":1}}]}"#,
    "[DONE]",
];

const REFUSAL: &str = r#"{"id":"1","choices":[{"index":0,"message":{"role":"assistant","content":null,"refusal":"I can't."},"finish_reason":"content_filter"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}"#;

const LOGPROBS: &str = r#"{"id":"1","choices":[{"index":0,"message":{"role":"assistant","content":"a€"},"logprobs":{"content":[
    {"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"a","logprob":-0.5,"bytes":[97]},{"token":"b","logprob":-1.5,"bytes":null}]},
    {"token":"€","logprob":-0.25,"bytes":null,"top_logprobs":[]}],"refusal":null},"finish_reason":"stop","stop_reason":5,"token_ids":[8,9]}],
    "prompt_token_ids":[1,2],"prompt_logprobs":[null,{"3":{"logprob":-0.5,"rank":1,"decoded_token":"c"},"2":{"logprob":-2.5,"rank":4,"decoded_token":"b"}}]}"#;
