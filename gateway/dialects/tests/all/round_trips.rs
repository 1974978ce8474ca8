//! Round trips through each API of OpenAI, streamed and whole: decoding an encoded answer gives the same content.

use bytes::{Bytes, BytesMut};
use penstock_dialects::openai::{ChatCodec, ResponsesCodec, chat, responses};
use penstock_types::Bounds;
use penstock_types::{
    AnswerMeta, ChatEvent, Decoded, FinishReason, ProviderCodec, StopCause, TokenLogprob, TokenPlace, Usage,
};
use proptest::prelude::*;

/// A step of an answer, before calls are numbered.
#[derive(Clone, Debug)]
enum Step {
    Text(String, Vec<TokenLogprob>),
    Reasoning(String),
    Signature(String),
    Refusal(String),
    Call { name: String, value: String, cuts: Vec<prop::sample::Index> },
}

fn logprob() -> impl Strategy<Value = TokenLogprob> {
    let bytes = || prop::collection::vec(any::<u8>(), 1..4);
    let value = || -90.0_f32..0.0;
    let top = prop::collection::vec((Just(0), bytes(), value()), 0..3);
    (bytes(), value(), top).prop_map(|(bytes, value, top)| TokenLogprob {
        token: 0,
        bytes,
        logprob: Some(value),
        top,
        place: TokenPlace::Text,
    })
}

fn step() -> impl Strategy<Value = Step> {
    let text = || any::<String>().prop_filter("says something", |text| !text.is_empty());
    let cuts = prop::collection::vec(any::<prop::sample::Index>(), 0..4);
    prop_oneof![
        4 => (text(), prop::collection::vec(logprob(), 0..3)).prop_map(|(text, logprobs)| Step::Text(text, logprobs)),
        2 => text().prop_map(Step::Reasoning),
        1 => "openai:[A-Za-z0-9+/]{4,8}".prop_map(Step::Signature),
        1 => text().prop_map(Step::Refusal),
        2 => ("[a-z_]{1,8}", any::<String>(), cuts).prop_map(|(name, value, cuts)| Step::Call { name, value, cuts }),
    ]
}

/// Events of one choice with all content, and whether its reasoning may be signed.
fn events(choice: u32, steps: Vec<Step>, length: bool, signed: bool) -> Vec<ChatEvent> {
    let (mut all, mut calls) = (Vec::new(), 0);
    for step in steps {
        match step {
            Step::Text(text, logprobs) => all.push(ChatEvent::Text { choice, text, logprobs, tokens: Vec::new() }),
            Step::Reasoning(text) => all.push(ChatEvent::Reasoning { choice, text }),
            Step::Signature(signature) if signed => all.push(ChatEvent::ReasoningSignature { choice, signature }),
            Step::Signature(_) => {}
            Step::Refusal(text) => all.push(ChatEvent::Refusal { choice, text }),
            Step::Call { name, value, cuts } => {
                let call = calls;
                calls += 1;
                let id = format!("call_{choice}_{call}");
                all.push(ChatEvent::ToolCallStart { choice, call, id, name, signature: None });
                let json = serde_json::json!({ "value": value }).to_string();
                let mut cuts: Vec<usize> = cuts
                    .iter()
                    .map(|cut| json.floor_char_boundary(cut.index(json.len())))
                    .chain([0, json.len()])
                    .collect();
                cuts.sort_unstable();
                cuts.dedup();
                let pieces = cuts.windows(2).map(|cut| json[cut[0]..cut[1]].to_owned());
                all.extend(pieces.map(|json| ChatEvent::ToolCallArguments { choice, call, json }));
            }
        }
    }
    let reason = match (length, calls) {
        (true, _) => FinishReason::Length,
        (false, 0) => FinishReason::Stop,
        (false, _) => FinishReason::ToolCalls,
    };
    all.push(ChatEvent::Finish { choice, reason, stop: None });
    all
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 0..12)
}

fn usage() -> ChatEvent {
    ChatEvent::Usage(Usage {
        prompt_tokens: 7,
        cached_tokens: 3,
        completion_tokens: 5,
        reasoning_tokens: 2,
        ..Usage::default()
    })
}

fn meta() -> AnswerMeta {
    AnswerMeta::new("1".into(), 1)
}

fn streamed(decoded: &Decoded, events: &[ChatEvent]) -> Bytes {
    let (mut encoder, mut out) = (decoded.form.stream(&meta()), BytesMut::new());
    events.iter().for_each(|event| encoder.event(event, &mut out));
    encoder.done(&mut out);
    out.freeze()
}

fn whole(decoded: &Decoded, events: &[ChatEvent]) -> Bytes {
    let mut collector = decoded.form.whole(&meta());
    events.iter().for_each(|event| collector.event(event));
    collector.finish().expect("complete")
}

fn read(codec: &dyn ProviderCodec, decoded: &Decoded, answer: &[u8], piece: usize) -> Vec<ChatEvent> {
    let (mut decoder, mut events) = (codec.decoder(&decoded.request), Vec::new());
    for piece in answer.chunks(piece) {
        decoder.push(piece, &mut events).expect("a good answer");
    }
    decoder.end(&mut events).expect("a complete answer");
    events
}

/// Content of a choice by kind, as a whole answer keeps it.
#[derive(Debug, Default, PartialEq)]
struct Said {
    text: String,
    logprobs: Vec<TokenLogprob>,
    reasoning: String,
    refusal: String,
    calls: Vec<(String, String, String)>,
    finish: Option<(FinishReason, Option<StopCause>)>,
}

fn said(events: &[ChatEvent], choices: u32) -> Vec<Said> {
    let mut all: Vec<Said> = (0..choices).map(|_| Said::default()).collect();
    for event in events {
        match event {
            ChatEvent::Text { choice, text, logprobs, .. } => {
                all[*choice as usize].text.push_str(text);
                all[*choice as usize].logprobs.extend_from_slice(logprobs);
            }
            ChatEvent::Reasoning { choice, text } => all[*choice as usize].reasoning.push_str(text),
            ChatEvent::Refusal { choice, text } => all[*choice as usize].refusal.push_str(text),
            ChatEvent::ToolCallStart { choice, id, name, .. } => {
                all[*choice as usize].calls.push((id.clone(), name.clone(), String::new()));
            }
            ChatEvent::ToolCallArguments { choice, call, json } => {
                all[*choice as usize].calls[*call as usize].2.push_str(json);
            }
            ChatEvent::Finish { choice, reason, stop } => all[*choice as usize].finish = Some((*reason, stop.clone())),
            _ => {}
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn chat_completions(one in steps(), other in steps(), length: bool, piece in 1_usize..200) {
        let body = r#"{"model":"m","n":2,"logprobs":true,"top_logprobs":3,"messages":[{"role":"user","content":"hi"}]"#;
        let sides = ["}", r#","stream":true,"stream_options":{"include_usage":true}}"#].map(|end| {
            chat(format!("{body}{end}").as_bytes(), &Bounds::default()).expect("good")
        });
        // Choices interleave; both finish at the end, as with a provider.
        let (mut one, mut other) = (events(0, one, length, false), events(1, other, false, false));
        let ends = [one.pop().expect("its end"), other.pop().expect("its end")];
        let (mut all, mut other) = (Vec::new(), other.into_iter());
        for event in one {
            all.push(event);
            all.extend(other.next());
        }
        all.extend(other);
        all.extend(ends);
        all.push(usage());
        let [whole_side, stream_side] = &sides;
        prop_assert_eq!(&read(&ChatCodec::default(), stream_side, &streamed(stream_side, &all), piece), &all);
        let again = read(&ChatCodec::default(), whole_side, &whole(whole_side, &all), piece);
        prop_assert_eq!(said(&again, 2), said(&all, 2));
        prop_assert_eq!(again.last(), all.last());
    }

    #[test]
    fn the_responses_api(steps in steps(), length: bool, piece in 1_usize..200) {
        let body = r#"{"model":"m","input":"hi","top_logprobs":3,"stream":"#;
        let sides = ["false}", "true}"].map(|end| {
            responses(format!("{body}{end}").as_bytes(), &Bounds::default()).expect("good")
        });
        let mut all = events(0, steps, length, true);
        all.push(usage());
        let [whole_side, stream_side] = &sides;
        prop_assert_eq!(&read(&ResponsesCodec::default(), stream_side, &streamed(stream_side, &all), piece), &all);
        let again = read(&ResponsesCodec::default(), whole_side, &whole(whole_side, &all), piece);
        let (mut again, mut all) = (said(&again, 1), said(&all, 1));
        // Reasoning in several items is joined where a whole answer is collected.
        for said in again.iter_mut().chain(&mut all) {
            said.reasoning.retain(|character| character != '\n');
        }
        prop_assert_eq!(again, all);
    }

    #[test]
    fn no_bytes_break_a_reader(bytes in prop::collection::vec(any::<u8>(), 0..400), piece in 1_usize..50) {
        let decoded = chat(br#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#, &Bounds::default()).expect("good");
        for codec in [&ChatCodec::default() as &dyn ProviderCodec, &ResponsesCodec::default()] {
            let (mut decoder, mut events) = (codec.decoder(&decoded.request), Vec::new());
            let read = bytes.chunks(piece).try_for_each(|piece| decoder.push(piece, &mut events));
            prop_assert!(read.and_then(|()| decoder.end(&mut events)).is_err(), "no answer is read out of noise");
            codec.fault(500, &bytes);
        }
    }
}
