//! Reasoning that is closed when its budget is spent, on the demo model: the same tokens whole, cut anywhere, preempted, in
//! company, before and inside of a grammar, jumped over or computed one by one.

use crate::guided::{
    Answers, SCHEMA, Told, after, alone, check_cuts, drawn_elsewhere, engine, engine_with, guide, request, run,
    sampling, take, text, token,
};
use penstock_engine::EngineConfig;
use penstock_proto::ErrorKind;
use penstock_proto::frames::{
    ChoiceStart, Finish, FinishReason, Generate, Guide, GuideKind, ReasoningBudget, Sampling, Window,
};
use penstock_proto::transfer::First;
use std::time::Duration;

const MARK: &str = "</think>";

/// Budget of an answer that begins inside its reasoning. A run of several tokens closes it.
fn budget(tokens: u32) -> ReasoningBudget {
    ReasoningBudget {
        tokens,
        is_open: true,
        ending: MARK.into(),
        closing: vec![token("\n"), token(MARK), token("\n"), token("\n")],
        ..ReasoningBudget::default()
    }
}

fn with(mut generate: Generate, budget: ReasoningBudget) -> Generate {
    generate.sampling.as_mut().expect("set").reasoning = Some(budget);
    generate
}

/// Requests of every kind: free answers, answers whose grammar begins behind the mark, and a grammar that the reasoning is
/// part of.
fn requests() -> Vec<Generate> {
    let free = with(request(1, None), budget(9));
    let mut sampled = with(request(2, None), budget(20));
    let penalties = Sampling { frequency_penalty: 0.4, repetition_penalty: 1.2, ..sampling(50, 1.2) };
    sampled.sampling = Some(Sampling { reasoning: Some(budget(20)), ..penalties });
    let bare = || ReasoningBudget { closing: vec![token("\n"), token(MARK)], ..budget(7) };
    let schema = Guide { begins_after: vec![token(MARK)], ..guide(GuideKind::JsonSchema, SCHEMA).expect("set") };
    let behind = with(request(3, Some(schema)), bare());
    let text = "start: think answer\nthink[lazy]: /(?s:.*)<\\/think>/\nanswer: \"the answer is \" /[0-9]{3,9}/";
    let inside = with(request(4, guide(GuideKind::Lark, text)), bare());
    let none = with(request(5, None), budget(0));
    vec![free, sampled, behind, inside, none]
}

/// Tokens of reasoning of an answer, and the text behind it.
fn parts(told: &Told) -> (usize, String) {
    let at = told.tokens.iter().position(|id| *id == token(MARK)).expect("a closing mark");
    (at, text(&Told { tokens: told.tokens[at + 1..].to_vec(), finish: None }))
}

#[test]
fn reasoning_has_no_more_tokens_than_its_budget() {
    let mut engine = engine();
    let told = run(&mut engine, requests());
    // The line break in front of the mark is a token of its own.
    for (request, most) in [(1, 10), (2, 21), (3, 8), (4, 8), (5, 1)] {
        let (tokens, answer) = parts(&told[&(request, 0)]);
        assert_eq!(tokens, most, "{request}: {answer}");
        assert!(request > 2 && request < 5 || answer.starts_with("\n\n"), "{request}: {answer:?}");
    }
    let (_, object) = parts(&told[&(3, 0)]);
    assert!(serde_json::from_str::<serde_json::Value>(&object).expect("JSON").is_object());
    assert!(parts(&told[&(4, 0)]).1.starts_with("the answer is "));
    assert_eq!(engine.state().reasonings_closed, 5);
    // As long as the budget lasts, the model says what it says without one.
    let free = alone(&request(1, None));
    assert_eq!(told[&(1, 0)].tokens[..9], free.tokens[..9]);
    assert_eq!(alone(&with(request(1, None), budget(10_000))), free);
}

#[test]
fn a_request_with_a_budget_goes_on_after_any_token() {
    check_cuts(requests());
}

#[test]
fn company_and_preemption_move_no_closing_token() {
    let whole: Vec<Told> = requests().iter().map(alone).collect();
    let tight = EngineConfig { sequences_max: 3, batch_tokens: 24, chunk_tokens: 16, ..EngineConfig::default() };
    for (pages, config) in [(96, EngineConfig { masks_beside: true, ..EngineConfig::default() }), (7, tight)] {
        let mut engine = engine_with(1, pages, &config);
        let mut told = Answers::new();
        for (urgency, request) in requests().into_iter().enumerate() {
            engine.submit(Generate { priority: -(urgency as i32), ..request });
            (0..3).for_each(|_| take(&mut engine, &mut told));
        }
        while engine.has_work() {
            take(&mut engine, &mut told);
        }
        for (request, whole) in requests().iter().zip(&whole) {
            assert_eq!(&told[&(request.request, 0)], whole, "{pages} pages, request {}", request.request);
        }
        assert!(pages > 20 || engine.state().preemptions > 0, "the small pool preempts");
    }
}

#[test]
fn closing_tokens_take_no_pass_of_their_own_unless_asked_about() {
    for request in requests() {
        let mut engine = engine();
        let whole = run(&mut engine, vec![request.clone()]).remove(&(request.request, 0)).expect("one answer");
        let steps = engine.report().number as usize;
        assert!(steps < whole.tokens.len(), "{steps} steps for {} tokens", whole.tokens.len());
        // With log-probabilities every token has a row of its own, and the model's own numbers.
        let mut told = request.clone();
        told.sampling.as_mut().expect("set").logprobs = 0;
        engine.submit(told);
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        while engine.has_work() {
            for token in engine.step(&|| Duration::ZERO).outputs.into_iter().flat_map(|output| output.tokens) {
                tokens.push(token.id);
                logprobs.push(token.logprobs.expect("asked for").logprob);
            }
        }
        assert_eq!(tokens, whole.tokens);
        let mark = tokens.iter().position(|id| *id == token(MARK)).expect("closed");
        assert!(logprobs[mark] < -0.1 && logprobs.iter().all(|value| *value <= 0.0), "{}", logprobs[mark]);
    }
}

#[test]
fn windows_and_ends_hold_inside_of_the_closing_tokens() {
    let request = &requests()[0];
    let whole = alone(request);
    let mut engine = engine();
    for window in 1..6 {
        engine.submit(Generate { window, ..request.clone() });
        let (mut told, mut allowed) = (Answers::new(), window as usize);
        loop {
            while engine.has_work() {
                take(&mut engine, &mut told);
                assert!(told[&(1, 0)].tokens.len() <= allowed);
            }
            if told[&(1, 0)].finish.is_some() {
                break;
            }
            engine.window(&Window { request: 1, choice: 0, tokens: 3 });
            allowed += 3;
        }
        assert_eq!(told[&(1, 0)], whole, "window {window}");
    }
    for max_tokens in 8..15 {
        let mut short = request.clone();
        short.sampling.as_mut().expect("set").max_tokens = max_tokens;
        let told = alone(&short);
        assert_eq!(told.tokens, whole.tokens[..max_tokens as usize]);
        assert_eq!(told.finish.as_ref().map(Finish::reason), Some(FinishReason::Length));
    }
}

#[test]
fn each_choice_has_the_whole_budget() {
    let three: Vec<ChoiceStart> = (0..3).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect();
    let told = run(&mut engine(), vec![Generate { choices: three, ..requests()[1].clone() }]);
    assert!(told.values().all(|told| parts(told).0 == 21));
    assert!(told[&(2, 0)].tokens != told[&(2, 1)].tokens || told[&(2, 1)].tokens != told[&(2, 2)].tokens);
}

#[test]
fn reasoning_that_the_model_opens_is_counted_from_there() {
    // What the model says third and fourth is its opening mark, but only at the beginning of an answer.
    let said = alone(&request(1, None)).tokens;
    let opening = text(&Told { tokens: said[..2].to_vec(), finish: None });
    let opened = |opening: &str| ReasoningBudget { is_open: false, opening: opening.into(), ..budget(4) };
    let told = alone(&with(request(1, None), opened(opening.trim_start())));
    assert_eq!((&told.tokens[..6], parts(&told).0), (&said[..6], 7));
    let later = text(&Told { tokens: said[2..4].to_vec(), finish: None });
    assert_eq!(alone(&with(request(1, None), opened(&format!("{later}~")))).tokens, said);
    let anywhere = ReasoningBudget { opens_anywhere: true, ..opened(&later) };
    let told = alone(&with(request(1, None), anywhere));
    assert_eq!((&told.tokens[..8], told.tokens[9]), (&said[..8], token(MARK)));
}

#[test]
fn a_first_token_drawn_elsewhere_is_under_the_budget() {
    for generate in requests() {
        let whole = alone(&generate);
        for cut in [0, 1, 7, 8, 9, 10, 11] {
            let first = drawn_elsewhere(&generate, &whole.tokens[..cut], generate.grammar.clone()).expect("drawn");
            let mut rest = after(&generate, &whole, cut);
            let mut here = engine();
            // A holder of an earlier build passes over the budget.
            let earlier = First { reasoning_budget: false, capabilities: Vec::new(), ..first.clone() };
            assert_eq!(here.say_first(&mut rest, earlier, 0), None);
            let outputs = here.say_first(&mut rest, first, 0).expect("it fits");
            assert_eq!(outputs[0].tokens[0].id, whole.tokens[cut], "request {}, cut {cut}", generate.request);
            let told = run(&mut here, vec![rest]).remove(&(generate.request, 0)).expect("answered");
            assert_eq!(told.tokens, whole.tokens[cut + 1..]);
        }
    }
}

#[test]
fn a_budget_that_nothing_closes_is_refused() {
    let told = alone(&with(request(1, None), ReasoningBudget { closing: Vec::new(), ..budget(3) }));
    let finish = told.finish.expect("ended");
    assert_eq!((finish.reason(), finish.error_kind), (FinishReason::Failed, ErrorKind::InvalidRequest as i32));
}
