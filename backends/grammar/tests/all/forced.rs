//! Forced tokens: a function of the tokens before them, wherever a run is cut.

use crate::common::{allowed, bytes, grammar, sources, step, walk};
use penstock_grammar::Source;

#[test]
fn a_run_that_is_cut_anywhere_goes_on_with_the_same_tokens() {
    for source in sources() {
        let grammar = grammar(&source);
        for seed in 0..6 {
            let (whole, ended) = walk(&mut grammar.matcher(), seed, 120);
            for cut in 0..=whole.len() {
                let mut matcher = grammar.matcher();
                matcher.replay(&whole[..cut]).expect("its own tokens");
                if matcher.is_complete() {
                    assert!(ended && cut == whole.len());
                    continue;
                }
                let (rest, _) = walk(&mut matcher, seed, whole.len() - cut);
                assert_eq!(rest, whole[cut..], "cut at {cut}: {}", source.text);
            }
        }
    }
}

#[test]
fn a_forced_token_is_one_that_the_mask_allows() {
    let mut forced_tokens = 0;
    for source in sources() {
        for seed in 0..5 {
            let mut matcher = grammar(&source).matcher();
            for _ in 0..60 {
                if let Some(forced) = matcher.forced().expect("within limits") {
                    let mask = matcher.mask().expect("within limits");
                    assert!(!mask.may_end, "an end is a choice too");
                    assert!(allowed(&mask).contains(&forced), "{forced}: {}", source.text);
                    forced_tokens += 1;
                }
                let Some(token) = step(&mut matcher, seed) else { break };
                matcher.consume(token).expect("allowed");
                if matcher.is_complete() {
                    break;
                }
            }
        }
    }
    assert!(forced_tokens > 500, "{forced_tokens}");
}

#[test]
fn asking_changes_nothing() {
    for source in sources() {
        let (tokens, _) = walk(&mut grammar(&source).matcher(), 3, 60);
        let (mut silent, mut asked) = (grammar(&source).matcher(), grammar(&source).matcher());
        for &token in &tokens {
            asked.is_accepting().expect("within limits");
            asked.forced().expect("within limits");
            asked.mask().expect("within limits");
            asked.forced().expect("within limits");
            silent.consume(token).expect("its own");
            asked.consume(token).expect("its own");
        }
        let (a, b) = (asked.mask().expect("within limits"), silent.mask().expect("within limits"));
        assert_eq!((a.bits, a.may_end), (b.bits, b.may_end), "{}", source.text);
        assert_eq!(asked.forced(), silent.forced());
    }
}

#[test]
fn fixed_text_is_forced_to_its_last_token() {
    let mut matcher = grammar(&Source::choice(["the one and only answer"])).matcher();
    let mut tokens = Vec::new();
    while let Some(token) = matcher.forced().expect("within limits") {
        matcher.consume(token).expect("forced");
        tokens.push(token);
    }
    assert!(matcher.is_complete());
    assert_eq!(bytes(&tokens), b"the one and only answer");
    let longest = tokens.iter().map(|token| bytes(&[*token]).len()).max();
    assert!(longest > Some(2), "in long tokens: {tokens:?}");
}
