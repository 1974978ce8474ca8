//! Events of a choice, the same whatever the token borders were.

use crate::common;

use common::model;
use penstock_proto::frames::{Token, TokenLogprobs};
use penstock_text::{ChoiceDecoder, ChoiceOptions, End};
use penstock_types::{ChatEvent, FinishReason, TokenPlace, event::StopCause};
use proptest::prelude::*;

/// Content of a choice, collected from its events.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    text: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    ids: Vec<String>,
    finish: Option<(FinishReason, Option<StopCause>)>,
    logprob_bytes: Vec<u8>,
    logprob_ids: Vec<u32>,
    tokens: Vec<u32>,
    completion_tokens: u64,
    reasoning_tokens: u64,
}

fn token(id: u32) -> Token {
    Token { id, logprobs: Some(TokenLogprobs { logprob: -0.5, ..TokenLogprobs::default() }) }
}

fn decode(options: &ChoiceOptions, ids: &[u32], end: End) -> Answer {
    let mut decoder = ChoiceDecoder::new(model(), options.clone());
    let mut answer = Answer::default();
    let mut events = Vec::new();
    for &id in ids {
        let decoded = decoder.push(&token(id));
        events.extend(decoded.events);
        if decoded.stopped {
            break;
        }
    }
    events.extend(decoder.finish(end));
    for event in events {
        assert!(answer.finish.is_none(), "finish is the last");
        match event {
            ChatEvent::Text { text, logprobs, tokens, .. } => {
                answer.text.push_str(&text);
                for entry in &logprobs {
                    answer.logprob_ids.push(entry.token);
                    assert!(!text.is_empty() || entry.place != TokenPlace::Text, "no text shows {entry:?}");
                    if entry.place == TokenPlace::Text {
                        answer.logprob_bytes.extend(&entry.bytes);
                    }
                }
                answer.tokens.extend(tokens);
            }
            ChatEvent::Reasoning { text, .. } => answer.reasoning.push_str(&text),
            ChatEvent::ToolCallStart { call, id, name, .. } => {
                assert_eq!(call as usize, answer.calls.len(), "indices are contiguous");
                answer.calls.push((name, String::new()));
                answer.ids.push(id);
            }
            ChatEvent::ToolCallArguments { call, json, .. } => answer.calls[call as usize].1.push_str(&json),
            ChatEvent::Finish { reason, stop, .. } => answer.finish = Some((reason, stop)),
            other => panic!("unexpected {other:?}"),
        }
    }
    answer.completion_tokens = decoder.completion_tokens();
    answer.reasoning_tokens = decoder.reasoning_tokens();
    answer
}

/// One token per byte: the finest cut of a text.
fn byte_tokens(text: &str) -> Vec<u32> {
    let model = model();
    let id =
        |byte: u8| (0..model.vocab_size()).find(|&id| model.token_bytes(id) == [byte]).expect("all bytes are tokens");
    text.bytes().map(id).collect()
}

fn options() -> ChoiceOptions {
    ChoiceOptions {
        logprobs: true,
        return_tokens: true,
        parse_tools: true,
        parse_reasoning: true,
        ..ChoiceOptions::default()
    }
}

type Expected<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], FinishReason);

/// Checks text, reasoning, calls and reason of `text`, cut by the tokenizer and cut into single bytes.
#[track_caller]
fn check(options: &ChoiceOptions, text: &str, expected: Expected<'_>) {
    for ids in [model().encode(text, false).unwrap(), byte_tokens(text)] {
        let answer = decode(options, &ids, End::Stop { token: Some(4089) });
        let calls: Vec<(&str, &str)> = answer.calls.iter().map(|(name, json)| (name.as_str(), json.as_str())).collect();
        let reason = answer.finish.as_ref().unwrap().0;
        assert_eq!((answer.text.as_str(), answer.reasoning.as_str(), calls.as_slice(), reason), expected, "{text}");
        assert_eq!(answer.tokens, ids, "every token is returned");
        assert_eq!(answer.logprob_ids, ids, "and has its log-probability");
        let shown = String::from_utf8(answer.logprob_bytes).unwrap();
        assert!(shown.contains(&answer.text), "{shown:?} explains {:?}", answer.text);
    }
}

#[test]
fn answers_with_reasoning_and_calls() {
    let call = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>";
    let calls = [("get_weather", "{\"city\": \"Zürich\"}")];
    let (stop, tools) = (FinishReason::Stop, FinishReason::ToolCalls);
    check(&options(), "Hello 👋🏽!", ("Hello 👋🏽!", "", &[], stop));
    check(&options(), "<think>\n1 + 2\n\n= 3\n</think>\n\nIt is 3.", ("It is 3.", "1 + 2\n\n= 3", &[], stop));
    check(&options(), "<think>\n\n</think>\n\nYes", ("Yes", "", &[], stop));
    check(&options(), "\n <think>x</think>", ("", "x", &[], stop));
    check(&options(), "a <think> b </think>", ("a <think> b </think>", "", &[], stop));
    check(&options(), "<thin", ("<thin", "", &[], stop));
    check(&options(), "<<think>", ("<<think>", "", &[], stop));
    check(&options(), "<think>never closed <", ("", "never closed <", &[], stop));
    check(&options(), call, ("", "", &calls, tools));
    check(&options(), &format!("<think>\nhm\n</think>\n\nLook:\n{call}"), ("Look:", "hm", &calls, tools));
    check(&options(), &format!("<think>{call}"), ("", call, &[], stop));
    check(&options(), "<tool_call>\n{\"name\":", ("<tool_call>\n{\"name\":", "", &[], stop));
    let opened = ChoiceOptions { starts_in_reasoning: true, ..options() };
    check(&opened, "hm\n</think>\n\nYes", ("Yes", "hm", &[], stop));
    let plain = ChoiceOptions { parse_tools: false, parse_reasoning: false, ..options() };
    let whole = format!("<think>x</think>{call}");
    check(&plain, &whole, (&whole, "", &[], stop));
}

#[test]
fn events_come_as_soon_as_they_can() {
    let model = model();
    let mut decoder = ChoiceDecoder::new(model.clone(), ChoiceOptions { logprobs: false, ..options() });
    let mut seen = String::new();
    for &id in &model.encode("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Par", false).unwrap() {
        for event in decoder.push(&token(id)).events {
            match event {
                ChatEvent::ToolCallStart { name, .. } => seen.push_str(&name),
                ChatEvent::ToolCallArguments { json, .. } => seen.push_str(&json),
                other => panic!("unexpected {other:?}"),
            }
        }
    }
    assert_eq!(seen, "f{\"city\": \"Par");
}

#[test]
fn call_ids_are_given_by_the_caller() {
    let call = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#.repeat(2);
    let ids = model().encode(&call, false).unwrap();
    let of = |seed: u8| decode(&ChoiceOptions { call_ids: [seed; 16], ..options() }, &ids, End::Length).ids;
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
    assert_ne!(of(1)[0], of(1)[1]);
    assert!(of(1)[0].starts_with("call_") && of(1)[0].len() == 29, "{}", of(1)[0]);
}

#[test]
fn the_only_call_that_is_allowed_ends_the_answer() {
    let call = r#"<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>"#;
    let text = format!("{call}\n{call} and more");
    for ids in [model().encode(&text, false).unwrap(), byte_tokens(&text)] {
        let answer = decode(&ChoiceOptions { one_call: true, ..options() }, &ids, End::Stop { token: None });
        assert_eq!(answer.calls, [("f".to_owned(), r#"{"a": 1}"#.to_owned())]);
        assert_eq!((answer.text.as_str(), answer.finish), ("", Some((FinishReason::ToolCalls, None))));
        let whole = r#"{"name": "f", "arguments": {"a": 1}"#;
        let through = (1..=ids.len()).find(|&n| model().decode(&ids[..n], true).contains(whole)).unwrap();
        assert_eq!(answer.completion_tokens as usize, through, "tokens after the call are not asked for");
    }
    check(&ChoiceOptions { one_call: true, ..options() }, "Hello!", ("Hello!", "", &[], FinishReason::Stop));
}

#[test]
fn stop_strings_end_the_text_and_the_count() {
    let model = model();
    let ids = model.encode("One two three four", false).unwrap();
    let stopping = ChoiceOptions { stop: vec!["o thr".into()], ..options() };
    let answer = decode(&stopping, &ids, End::Stop { token: None });
    assert_eq!(answer.text, "One tw");
    assert_eq!(answer.finish, Some((FinishReason::Stop, Some(StopCause::Text("o thr".into())))));
    let through = (1..=ids.len()).find(|&n| model.decode(&ids[..n], true).contains("o thr")).unwrap();
    assert_eq!(answer.completion_tokens as usize, through);
    assert_eq!(answer.tokens, ids[..through]);
    let kept = decode(&ChoiceOptions { include_stop: true, ..stopping }, &ids, End::Stop { token: None });
    assert_eq!(kept.text, "One two thr");
    let missed = ChoiceOptions { stop: vec!["four!".into()], ..options() };
    let answer = decode(&missed, &ids, End::Length);
    assert_eq!((answer.text.as_str(), answer.finish), ("One two three four", Some((FinishReason::Length, None))));
    let later = ChoiceOptions { stop: vec!["o".into()], min_tokens: through as u64, ..options() };
    let answer = decode(&later, &ids, End::Stop { token: None });
    assert_eq!(answer.text, "One two three f", "stops count behind min_tokens only");
}

#[test]
fn end_tokens_leave_no_text() {
    let model = model();
    let mut ids = model.encode("Yes.", false).unwrap();
    let dot = *ids.last().unwrap();
    ids.push(4089);
    let answer = decode(&options(), &ids, End::Stop { token: Some(4089) });
    assert_eq!((answer.text.as_str(), answer.finish.clone()), ("Yes.", Some((FinishReason::Stop, None))));
    assert_eq!((answer.tokens, answer.logprob_bytes), (ids.clone(), b"Yes.".to_vec()));
    assert_eq!(answer.logprob_ids, ids, "an end token has a log-probability too");
    let client = ChoiceOptions { stop_token_ids: vec![dot], ..options() };
    let answer = decode(&client, &ids[..ids.len() - 1], End::Stop { token: Some(dot) });
    assert_eq!((answer.text.as_str(), answer.finish), ("Yes", Some((FinishReason::Stop, Some(StopCause::Token(dot))))));
    let kept = ChoiceOptions { keep_special: true, ignore_eos: true, ..options() };
    assert_eq!(decode(&kept, &ids, End::Length).text, "Yes.<|im_end|>");
}

#[test]
fn log_probabilities_cover_exactly_the_text() {
    let text = "é 漢字 👩‍👩‍👧 end";
    for ids in [model().encode(text, false).unwrap(), byte_tokens(text)] {
        let answer = decode(&options(), &ids, End::Length);
        assert_eq!((answer.logprob_bytes.as_slice(), answer.text.as_str()), (text.as_bytes(), text));
    }
    // Reasoning, its marks and the line breaks that belong to them have entries that are in no text.
    let ids = model().encode("<think>\nhm\n</think>\n\nYes", false).unwrap();
    let answer = decode(&options(), &ids, End::Length);
    let between = ids.iter().position(|&id| id == 4095).unwrap() - 1;
    assert_eq!((answer.logprob_bytes.as_slice(), answer.reasoning_tokens), (&b"Yes"[..], between as u64));
    assert_eq!(answer.logprob_ids, ids);
}

#[test]
fn every_token_has_a_log_probability_also_without_text() {
    let model = model();
    let end = 4089;
    // Four cases: cut short inside a character, ended by a stop string, interrupted and ended by control tokens.
    let cut = byte_tokens("Zür👋")[..7].to_vec();
    let stopped = byte_tokens("one STOP");
    let mut marked = model.encode("one", false).unwrap();
    marked.extend([end, end]);
    marked.extend(model.encode(" two", false).unwrap());
    marked.push(end);
    let stop = ChoiceOptions { stop: vec!["STOP".into()], ..options() };
    let ignoring = ChoiceOptions { ignore_eos: true, ..options() };
    for (options, ids, text, shown) in [
        (&options(), cut, "Zür\u{fffd}", "Zür".len() + 3),
        (&stop, stopped, "one ", "one ".len()),
        (&ignoring, marked, "one two", "one two".len()),
    ] {
        let answer = decode(options, &ids, End::Length);
        assert_eq!((answer.text.as_str(), answer.logprob_bytes.len()), (text, shown));
        assert_eq!((&answer.logprob_ids, &answer.tokens), (&ids, &ids), "{text}");
    }
}

#[test]
fn log_probabilities_of_reasoning_do_not_wait_for_the_text() {
    let mut decoder = ChoiceDecoder::new(model(), options());
    let mut said = 0;
    for id in model().encode("<think>\na long thought about nothing", false).unwrap() {
        for event in decoder.push(&token(id)).events {
            if let ChatEvent::Text { text, logprobs, .. } = event {
                assert!(text.is_empty() && logprobs.iter().all(|entry| entry.place == TokenPlace::Apart));
                said += logprobs.len();
            }
        }
        assert_eq!(said as u64, decoder.completion_tokens());
    }
}

proptest! {
    #[test]
    fn token_borders_do_not_matter(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "{\"name\": \"f\", \"arguments\": ", "{\"a\": 1}",
            "}", "é👋", "text", "<", "STOP", "ST", "{",
        ]), 0..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        stop: bool,
    ) {
        let text = parts.concat();
        let stop = if stop { vec!["STOP".into()] } else { vec![] };
        let options = ChoiceOptions { stop, logprobs: false, return_tokens: false, ..options() };
        let run = |ids: &[u32]| Answer { completion_tokens: 0, reasoning_tokens: 0, ..decode(&options, ids, End::Length) };
        let whole = run(&model().encode(&text, false).unwrap());
        prop_assert_eq!(&run(&byte_tokens(&text)), &whole);
        let inside = cuts.iter().map(|cut| cut.index(text.len() + 1)).filter(|&at| text.is_char_boundary(at));
        let mut bounds: Vec<usize> = inside.chain([0, text.len()]).collect();
        bounds.sort_unstable();
        let pieces = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        let mixed: Vec<u32> = pieces.flat_map(|piece| model().encode(piece, false).unwrap()).collect();
        prop_assert_eq!(&run(&mixed), &whole);
    }
}
