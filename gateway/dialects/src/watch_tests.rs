use penstock_types::event::{FinishReason, ServiceTier, Usage};

use super::*;

/// Every way to hand `text` to a watch in two cuts; the result must not depend on the cuts.
fn each_cut(
    surface: Surface,
    drop_usage: bool,
    text: &[u8],
    check: impl Fn(Vec<u8>, Result<(), ProviderFault>, &Seen),
) {
    let run = |pieces: &[&[u8]]| {
        let mut watch = Watch::new(surface, drop_usage);
        let mut out = Vec::new();
        let mut fed = || -> Result<(), ProviderFault> {
            for piece in pieces {
                watch.buffer().extend_from_slice(piece);
                while let Some(bytes) = watch.take()? {
                    out.extend_from_slice(&bytes);
                }
            }
            if let Some(bytes) = watch.end()? {
                out.extend_from_slice(&bytes);
            }
            Ok(())
        };
        let ended = fed();
        check(out, ended, watch.seen());
    };
    run(&text.chunks(1).collect::<Vec<_>>());
    for first in 0..=text.len() {
        for second in [first, first + 1, (first + text.len()) / 2] {
            let second = second.clamp(first, text.len());
            run(&[&text[..first], &text[first..second], &text[second..]]);
        }
    }
}

const CHAT: &[u8] = b": hi\n\ndata: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}],\"usage\":null}\n\n\
data: {\"choices\":[{\"delta\":{\"content\":\"a \\\"usage\\\": b\"},\"finish_reason\":null}],\"usage\":null}\r\n\r\n\
data: {\"choices\":[{\"delta\":{\"content\":\"c\"},\"finish_reason\": null}]}\n\n\
data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}\n\n";
const COUNTS: &[u8] = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":1}}}\n\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

#[test]
fn a_chat_stream_is_passed_on_and_understood() {
    let text = [CHAT, COUNTS, DONE].concat();
    each_cut(Surface::Chat, false, &text, |out, ended, seen| {
        assert_eq!((String::from_utf8_lossy(&out), ended), (String::from_utf8_lossy(&text), Ok(())));
        let usage = Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 1, ..Usage::default() };
        let expected = Seen {
            content: true,
            complete: true,
            usage: Some(usage),
            finish: Some(FinishReason::Length),
            pieces: 2,
            ..Seen::default()
        };
        assert_eq!(*seen, expected);
    });
}

#[test]
fn counts_that_nobody_asked_for_are_kept_back() {
    let text = [CHAT, COUNTS, DONE].concat();
    each_cut(Surface::Chat, true, &text, |out, ended, seen| {
        assert_eq!((String::from_utf8_lossy(&out), ended), (String::from_utf8_lossy(&[CHAT, DONE].concat()), Ok(())));
        assert_eq!(seen.usage.map(|usage| usage.prompt_tokens), Some(3));
    });
}

#[test]
fn counts_are_read_where_each_provider_puts_them() {
    let counts = r#"{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,"cached_tokens":8}"#;
    let chunk = |rest: &str| format!("data: {{\"choices\":[{{\"delta\":{{}},\"finish_reason\":\"stop\"{rest}\n\n");
    let expected = Usage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: 8, ..Usage::default() };
    for last in [
        format!("data: {{\"choices\":[],\"usage\":{counts}}}\n\n"),
        chunk(&format!(",\"usage\":{counts}}}]}}")),
        chunk(&format!("}}],\"x_groq\":{{\"id\":\"req\",\"usage\":{counts}}}}}")),
    ] {
        let text = [CHAT, last.as_bytes(), DONE].concat();
        each_cut(Surface::Chat, false, &text, |out, ended, seen| {
            assert_eq!((out.as_slice(), ended, seen.usage), (text.as_slice(), Ok(()), Some(expected)), "{last}");
        });
    }
    let prompt = |body: &[u8], surface| whole(surface, body).expect("an answer").usage.map(|usage| usage.prompt_tokens);
    assert_eq!(prompt(br#"{"data":[],"usage":{"total_tokens":7}}"#, Surface::Embeddings), Some(7));
    assert_eq!(prompt(br#"{"results":[],"meta":{"tokens":{"input_tokens":7}}}"#, Surface::Rerank), Some(7));
    assert_eq!(prompt(br#"{"results":[],"meta":{"billed_units":{"search_units":1}}}"#, Surface::Rerank), None);
}

#[test]
fn a_stream_without_its_end_is_a_fault() {
    each_cut(Surface::Chat, false, CHAT, |out, ended, _| {
        assert_eq!(out, CHAT);
        assert_eq!(ended.map_err(|fault| fault.class), Err(FaultClass::Truncated));
    });
}

#[test]
fn the_last_event_may_lack_its_empty_line() {
    for tail in [&b"data: [DONE]"[..], b"data: [DONE]\n", b"data: [DONE]\r\n", b"data:[DONE]\r"] {
        let text = [CHAT, tail].concat();
        each_cut(Surface::Chat, true, &text, |out, ended, _| {
            assert_eq!((String::from_utf8_lossy(&out), ended), (String::from_utf8_lossy(&text), Ok(())));
        });
    }
}

#[test]
fn an_error_event_is_a_fault_and_not_passed_on() {
    let error = b"data: {\"error\":{\"message\":\"no\",\"type\":\"rate_limit_error\",\"code\":429}}\n\n";
    each_cut(Surface::Chat, false, error, |out, ended, seen| {
        let fault = ended.expect_err("a fault");
        assert_eq!((out.len(), fault.class, fault.message.as_str()), (0, FaultClass::RateLimited, "no"));
        assert!(!seen.content);
    });
    each_cut(Surface::Chat, false, &[CHAT, error].concat(), |out, ended, _| {
        assert_eq!((out.as_slice(), ended.expect_err("a fault").code.as_deref()), (CHAT, Some("rate_limit_error")));
    });
}

#[test]
fn garbage_in_place_of_the_first_event_is_a_fault() {
    for text in [&b"data: <html>\n\n"[..], b"data: {\"choices\":\n\n", b"data: \xff\n\n"] {
        each_cut(Surface::Chat, false, text, |out, ended, _| {
            assert_eq!((out.len(), ended.expect_err("a fault").class), (0, FaultClass::Garbled));
        });
    }
}

#[test]
fn several_data_lines_are_one_event() {
    let text = b"data: {\"choices\":[{\"delta\":\ndata: {\"content\":\"x\"}}]}\n\ndata: [DONE]\n\n";
    each_cut(Surface::Chat, false, text, |out, ended, seen| {
        assert_eq!((out.as_slice(), ended, seen.pieces), (&text[..], Ok(()), 1));
    });
}

#[test]
fn an_endless_event_is_a_fault() {
    let mut watch = Watch::new(Surface::Chat, false);
    watch.buffer().extend_from_slice(b"data: ");
    let piece = vec![b'x'; 1 << 20];
    let fault = (0..64).find_map(|_| {
        watch.buffer().extend_from_slice(&piece);
        watch.take().err()
    });
    assert_eq!(fault.map(|fault| fault.class), Some(FaultClass::AnswerTooLarge));
}

#[test]
fn completions_say_text() {
    let text = b"data: {\"choices\":[{\"text\":\"\",\"finish_reason\":null}]}\n\ndata: {\"choices\":[{\"text\":\"x\"}]}\n\ndata: [DONE]\n\n";
    each_cut(Surface::Completions, false, text, |_, ended, seen| assert_eq!((ended, seen.pieces), (Ok(()), 1)));
}

#[test]
fn responses_end_with_their_status() {
    let text = b"event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"usage\":null}}\n\n\
        event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n\
        event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"b\"}\n\n\
        event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"error\":null,\"usage\":{\"input_tokens\":4,\"output_tokens\":2}}}\n\n";
    each_cut(Surface::Responses, false, text, |out, ended, seen| {
        assert_eq!((out.as_slice(), ended), (&text[..], Ok(())));
        assert_eq!((seen.pieces, seen.usage.map(|usage| usage.prompt_tokens)), (2, Some(4)));
    });
    let failed = b"data: {\"type\":\"response.created\",\"response\":{}}\n\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\",\"message\":\"x\"},\"usage\":{\"input_tokens\":4,\"output_tokens\":2}}}\n\n";
    each_cut(Surface::Responses, false, failed, |_, ended, seen| {
        assert_eq!((ended.expect_err("a fault").class, seen.content), (FaultClass::Server, false));
        let counted = seen.usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens));
        assert_eq!(counted, Some((4, 2)), "what it has used is billed");
    });
    let error = b"data: {\"type\":\"error\",\"code\":\"rate_limit_exceeded\",\"message\":\"x\"}\n\n";
    each_cut(Surface::Responses, false, error, |_, ended, _| {
        assert_eq!(ended.expect_err("a fault").class, FaultClass::RateLimited);
    });
}

#[test]
fn messages_merge_their_counts() {
    let text = b"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":5,\"cache_read_input_tokens\":7,\"cache_creation_input_tokens\":2,\"output_tokens\":1}}}\n\n\
        event: content_block_start\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n\
        event: ping\ndata: {\"type\":\"ping\"}\n\n\
        event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\n\
        event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"b\"}}\n\n\
        event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"tool_use\"},\"usage\":{\"output_tokens\":9}}\n\n\
        event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    each_cut(Surface::Messages, false, text, |out, ended, seen| {
        assert_eq!((out.as_slice(), ended, seen.pieces), (&text[..], Ok(()), 2));
        assert_eq!(seen.finish, Some(FinishReason::ToolCalls));
        let usage = Usage {
            prompt_tokens: 14,
            cached_tokens: 7,
            cache_write_tokens: 2,
            completion_tokens: 9,
            reasoning_tokens: 0,
        };
        assert_eq!(seen.usage, Some(usage));
    });
    let error =
        b"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"x\"}}\n\n";
    each_cut(Surface::Messages, false, error, |_, ended, _| {
        assert_eq!(ended.expect_err("a fault").class, FaultClass::Overloaded);
    });
}

#[test]
fn compactions_are_counted_beside_the_answer() {
    let iteration = |kind: &str, input: u64, output: u64| {
        let cache = r#""cache_read_input_tokens":3,"cache_creation_input_tokens":1"#;
        format!(r#"{{"type":"{kind}","input_tokens":{input},{cache},"output_tokens":{output}}}"#)
    };
    let (first, second) = (iteration("compaction", 180, 35), iteration("compaction", 100, 15));
    let others = [iteration("message", 23, 9), iteration("advisor_message", 1000, 1000)].join(",");
    let event = |json: String| format!("data: {json}\n\n");
    let text = [
        event(r#"{"type":"message_start","message":{"usage":{"input_tokens":5,"cache_read_input_tokens":7,"output_tokens":1,"iterations":null}}}"#.into()),
        event(format!(r#"{{"type":"message_delta","delta":{{}},"usage":{{"output_tokens":4,"iterations":[{first}]}}}}"#)),
        event(r#"{"type":"message_delta","delta":{},"usage":{"output_tokens":6}}"#.into()),
        // Another event repeats the list, and adds to it.
        event(format!(
            r#"{{"type":"message_delta","delta":{{"stop_reason":"end_turn"}},"usage":{{"output_tokens":9,"iterations":[{first},{others},{second},1]}}}}"#
        )),
        event(r#"{"type":"message_stop"}"#.into()),
    ]
    .concat();
    let expected = Usage {
        prompt_tokens: 12 + 184 + 104,
        cached_tokens: 7 + 3 + 3,
        cache_write_tokens: 1 + 1,
        completion_tokens: 9 + 35 + 15,
        reasoning_tokens: 0,
    };
    each_cut(Surface::Messages, false, text.as_bytes(), |out, ended, seen| {
        assert_eq!((out.as_slice(), ended, seen.usage), (text.as_bytes(), Ok(()), Some(expected)));
    });
    let counts = r#""input_tokens":5,"cache_read_input_tokens":7,"output_tokens":9"#;
    for (list, expected) in [
        (format!("[{first},{others},{second}]"), expected),
        ("[]".to_owned(), Usage { prompt_tokens: 12, cached_tokens: 7, completion_tokens: 9, ..Usage::default() }),
    ] {
        let body = format!(
            r#"{{"type":"message","content":[],"stop_reason":"end_turn","usage":{{"iterations":{list},{counts}}}}}"#
        );
        let seen = whole(Surface::Messages, body.as_bytes()).expect("an answer");
        assert_eq!(seen.usage, Some(expected), "{list}");
    }
}

#[test]
fn gemini_is_complete_with_a_finish_reason() {
    let text = b"data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"a\"}]}}],\"usageMetadata\":{\"promptTokenCount\":3}}\r\n\r\n\
        data: {\"candidates\":[{\"finishReason\":\"STOP\"}],\"usageMetadata\":{\"promptTokenCount\":3,\"candidatesTokenCount\":2,\"thoughtsTokenCount\":4}}\r\n\r\n";
    each_cut(Surface::Generate, false, text, |out, ended, seen| {
        assert_eq!((out.as_slice(), ended, seen.finish), (&text[..], Ok(()), Some(FinishReason::Stop)));
        assert_eq!(seen.usage.map(|usage| (usage.completion_tokens, usage.reasoning_tokens)), Some((6, 4)));
    });
    let open = b"data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"a\"}]}}]}\n\n";
    each_cut(Surface::Generate, false, open, |_, ended, _| {
        assert_eq!(ended.map_err(|fault| fault.class), Err(FaultClass::Truncated));
    });
}

#[test]
fn comments_are_kept_from_clients_of_gemini() {
    let chunk = "data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"a\"}]}}]}\n\n";
    let last = ": kept, as it is a part of an event\ndata: {\"candidates\":[{\"finishReason\":\"STOP\"}]}\n\n";
    let text = format!(": keep-alive\n\n\n\n{chunk}: keep-alive\n\n\nevent: ping\n\n{last}: x-penstock-cost: 1\n\n");
    each_cut(Surface::Generate, false, text.as_bytes(), |out, ended, seen| {
        assert_eq!((String::from_utf8_lossy(&out).into_owned(), ended), (format!("\n\n{chunk}\n{last}"), Ok(())));
        assert_eq!((seen.finish, seen.pieces), (Some(FinishReason::Stop), 1));
    });
}

#[test]
fn a_byte_order_mark_hides_no_event() {
    let event = "data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"a\"}]},\"finishReason\":\"STOP\"}],\
        \"usageMetadata\":{\"promptTokenCount\":3,\"candidatesTokenCount\":2}}\n\n";
    for (text, is_seen) in [
        (format!("\u{feff}{event}"), true),
        (format!("\u{feff}\n{event}"), true),
        // Anywhere else the mark is a part of the line's name.
        (format!("\n\u{feff}{event}"), false),
        (format!("\u{feff}\u{feff}{event}"), false),
    ] {
        each_cut(Surface::Generate, false, text.as_bytes(), |out, ended, seen| {
            assert_eq!(ended.is_ok(), is_seen, "{text:?}");
            if is_seen {
                assert_eq!(String::from_utf8_lossy(&out), text);
                assert_eq!(seen.usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens)), Some((3, 2)));
                assert_eq!(seen.finish, Some(FinishReason::Stop), "{text:?}");
            }
        });
    }
}

#[test]
fn whole_answers_are_read() {
    let seen = whole(
        Surface::Chat,
        br#"{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}"#,
    )
    .expect("an answer");
    assert_eq!((seen.finish, seen.usage.map(|usage| usage.prompt_tokens)), (Some(FinishReason::Stop), Some(1)));
    let seen = whole(Surface::Messages, br#"{"type":"message","content":[{"type":"tool_use","input":{"usage":{"input_tokens":99}}}],"stop_reason":"end_turn","usage":{"input_tokens":1,"output_tokens":2}}"#).expect("an answer");
    assert_eq!(seen.usage.map(|usage| usage.prompt_tokens), Some(1));
    let seen = whole(
        Surface::Generate,
        br#"{"candidates":[{"finishReason":"MAX_TOKENS"}],"usageMetadata":{"promptTokenCount":8}}"#,
    )
    .expect("an answer");
    assert_eq!((seen.finish, seen.usage.map(|usage| usage.prompt_tokens)), (Some(FinishReason::Length), Some(8)));
    assert_eq!(whole(Surface::Chat, b"<html>").map_err(|fault| fault.class), Err(FaultClass::Garbled));
    assert_eq!(whole(Surface::Chat, br#"{"error":"no"}"#).map_err(|fault| fault.class), Err(FaultClass::Server));
    assert!(whole(Surface::Embeddings, br#"{"data":[{"embedding":[0.1,2]}],"usage":{"prompt_tokens":2}}"#).is_ok());
    assert!(whole(Surface::Rerank, b"[1,2]").is_ok());
}

proptest::proptest! {
    #[test]
    fn never_panics_and_never_invents(bytes in proptest::collection::vec(proptest::sample::select(&b"data: {}[]\"\\:\n\r,choiesDONE1"[..]), 0..200), piece in 1usize..20, kind in 0usize..4) {
        let surface = [Surface::Chat, Surface::Responses, Surface::Messages, Surface::Generate][kind];
        let mut watch = Watch::new(surface, false);
        let mut out = Vec::new();
        for part in bytes.chunks(piece) {
            watch.buffer().extend_from_slice(part);
            match watch.take() {
                Ok(Some(taken)) => out.extend_from_slice(&taken),
                Ok(None) => {}
                Err(_) => break,
            }
        }
        if let Ok(Some(taken)) = watch.end() {
            out.extend_from_slice(&taken);
        }
        if surface == Surface::Generate {
            // What says no data is left out; the rest stays in order.
            let mut came = bytes.iter();
            proptest::prop_assert!(out.iter().all(|byte| came.any(|other| other == byte)));
        } else {
            proptest::prop_assert!(bytes.starts_with(&out));
        }
    }
}

#[test]
fn the_tier_of_an_answer_is_read_in_every_api() {
    let of = |surface, text: &str| {
        let read = std::cell::Cell::new(None);
        each_cut(surface, false, text.as_bytes(), |_, _, seen| read.set(seen.tier));
        read.get()
    };
    let chat = |tier: &str| {
        format!(
            "data: {{\"service_tier\":\"{tier}\",\"choices\":[{{\"delta\":{{\"content\":\"a\"}},\"finish_reason\":\"stop\"}}]}}\n\ndata: [DONE]\n\n"
        )
    };
    assert_eq!(of(Surface::Chat, &chat("priority")), Some(ServiceTier::Priority));
    assert_eq!(of(Surface::Chat, &chat("default")), Some(ServiceTier::Standard));
    assert_eq!(of(Surface::Chat, &chat("auto")), None);
    let response = "data: {\"type\":\"response.completed\",\"response\":{\"service_tier\":\"flex\",\"usage\":{\"input_tokens\":1}}}\n\n";
    assert_eq!(of(Surface::Responses, response), Some(ServiceTier::Flex));
    let message = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":1,\"service_tier\":\"priority\"}}}\n\n\
                   event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    assert_eq!(of(Surface::Messages, message), Some(ServiceTier::Priority));
}

/// The provider goes on with such an answer where nobody can fetch it.
#[test]
fn a_response_that_is_put_off_is_not_complete() {
    for (surface, status, is_complete) in [
        (Surface::Responses, "completed", true),
        (Surface::Responses, "incomplete", true),
        (Surface::Responses, "queued", false),
        (Surface::Responses, "in_progress", false),
        (Surface::Chat, "queued", true),
    ] {
        let body = format!(r#"{{"id":"resp_1","object":"response","status":"{status}","error":null,"output":[]}}"#);
        assert_eq!(whole(surface, body.as_bytes()).map(|seen| seen.complete), Ok(is_complete), "{status}");
    }
}
