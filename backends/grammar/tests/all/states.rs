//! States that sequences share, limits that one of them reaches, and the cache.

use crate::common::{VOCABULARY, allowed, bytes, grammar, schema, sources, walk};
use penstock_grammar::{CacheSizes, Grammar, Grammars, MatchError, Source, TokenText, Vocabulary};
use serde_json::json;
use std::sync::Arc;

#[test]
fn used_and_fresh_states_mask_alike() {
    for source in sources() {
        let shared = grammar(&source);
        (100..120).for_each(|seed| drop(walk(&mut shared.matcher(), seed, 80)));
        let fresh = Grammar::compile(&source, &VOCABULARY).expect("good");
        let (tokens, _) = walk(&mut shared.matcher(), 7, 60);
        let (mut a, mut b) = (shared.matcher(), fresh.matcher());
        for &token in &tokens {
            assert_eq!(a.forced(), b.forced());
            let (mask_a, mask_b) = (a.mask().expect("within limits"), b.mask().expect("within limits"));
            assert_eq!((mask_a.bits, mask_a.may_end), (mask_b.bits, mask_b.may_end), "{}", source.text);
            a.consume(token).expect("its own");
            b.consume(token).expect("its own");
        }
    }
}

#[test]
fn a_rejected_token_changes_nothing() {
    let mut matcher = grammar(&schema(&json!({"type": "array", "items": {"type": "integer"}}))).matcher();
    let (tokens, _) = walk(&mut matcher.clone(), 1, 3);
    matcher.replay(&tokens).expect("its own");
    let before = allowed(&matcher.mask().expect("within limits"));
    for token in [u32::MAX, VOCABULARY.rows() as u32, 0] {
        assert_eq!(matcher.consume(token), Err(MatchError::Rejected { token }));
    }
    assert_eq!(allowed(&matcher.mask().expect("within limits")), before);
    assert_eq!(matcher.consumed(), tokens.len());
}

/// A sequence whose next mask is beyond the limits ends with an error that says so; others of its grammar go on.
#[test]
fn a_limit_reached_by_one_sequence_harms_no_other() {
    let source = Source::regex("((a{1,500}){1,500}){1,500}|[b-d ]{1,99}");
    let grammar = Grammar::compile(&source, &VOCABULARY).expect("it compiles");
    let single = |byte: u8| (0..VOCABULARY.rows() as u32).find(|id| bytes(&[*id]) == [byte]).expect("a token");
    let mut beside = grammar.matcher();
    beside.consume(single(b'b')).expect("fits");
    let mut ends = grammar.matcher();
    ends.consume(single(b'a')).expect("fits");
    let mut error = None;
    while error.is_none() && ends.consumed() < 200 {
        error = ends.mask().err().or_else(|| ends.consume(single(b'a')).err());
    }
    let error = error.expect("the limit is reached");
    assert!(matches!(error, MatchError::TooComplex { .. }), "{error}");
    for matcher in [&mut beside, &mut grammar.matcher()] {
        for byte in *b"bcd bcd" {
            assert!(allowed(&matcher.mask().expect("unharmed")).contains(&single(byte)));
            matcher.consume(single(byte)).expect("unharmed");
        }
    }
}

#[test]
fn vocabularies_are_told_apart() {
    let words: [&[u8]; 4] = [b"a", b"b", b"<end>", b""];
    let make = |words: &[&[u8]], ends: &[u32], rows| {
        Vocabulary::new(words.iter().map(|bytes| TokenText { bytes, is_special: false }), ends, rows).expect("good")
    };
    let base = make(&words, &[2], 5);
    assert!(base.is_special(2) && !base.is_special(0) && !base.is_special(99));
    assert_eq!(base.id(), make(&words, &[2], 5).id());
    let others = [make(&words, &[], 5), make(&words, &[2], 6), make(&[b"a", b"c", b"<end>", b""], &[2], 5)];
    assert!(others.iter().all(|other| other.id() != base.id()));
    assert!(Vocabulary::new([], &[], 0).is_err() && Vocabulary::new([], &[], usize::MAX).is_err());
    // Rows without a token are never allowed, and neither is the end token.
    let mut matcher = Grammar::compile(&Source::regex("(?s:.*)"), &base).expect("good").matcher();
    let mask = matcher.mask().expect("within limits");
    assert!(mask.may_end);
    assert_eq!(allowed(&mask), [0, 1]);
}

#[test]
fn a_grammar_that_the_vocabulary_cannot_spell_is_refused() {
    let words: [&[u8]; 2] = [b"a", b"b"];
    let tokens = words.map(|bytes| TokenText { bytes, is_special: false });
    let vocabulary = Vocabulary::new(tokens, &[], 2).expect("good");
    assert!(Grammar::compile(&Source::regex("c"), &vocabulary).is_err());
    let mut matcher = Grammar::compile(&Source::regex("ac?"), &vocabulary).expect("good").matcher();
    matcher.consume(0).expect("fits");
    let mask = matcher.mask().expect("within limits");
    assert!(mask.is_empty && mask.may_end, "it can only end");
    let mut stuck = Grammar::compile(&Source::regex("ac"), &vocabulary).expect("its first token is there").matcher();
    stuck.consume(0).expect("fits");
    assert!(stuck.mask().expect("within limits").is_empty && !stuck.mask().expect("within limits").may_end);
    assert_eq!(stuck.forced(), Ok(None));
}

#[test]
fn the_cache_is_bounded_and_remembers_refusals() {
    let cache = Grammars::new(Arc::clone(&VOCABULARY), CacheSizes { entries_max: 3, bytes_max: 1 << 30 });
    let choice = |n: usize| Source::choice([n.to_string()]);
    assert!(cache.peek(&choice(0)).is_none());
    for n in 0..6 {
        assert!(cache.get(&choice(n)).is_ok());
        assert!(cache.peek(&choice(n)).is_some_and(|outcome| outcome.is_ok()));
    }
    assert_eq!(cache.count(), 3);
    assert!(cache.peek(&choice(0)).is_none() && cache.peek(&choice(5)).is_some());
    let bad = Source::regex("(");
    assert!(cache.get(&bad).is_err() && cache.peek(&bad).is_some_and(|outcome| outcome.is_err()));
    let small = Grammars::new(Arc::clone(&VOCABULARY), CacheSizes { entries_max: 100, bytes_max: 1 });
    (0..4).for_each(|n| assert!(small.get(&choice(n)).is_ok(), "{n}"));
    assert_eq!(small.count(), 1, "the newest stays");
}

#[test]
fn threads_share_one_compilation() {
    let cache = Grammars::new(Arc::clone(&VOCABULARY), CacheSizes::default());
    let source = schema(&json!({"type": "object", "properties": {"a": {"type": "string"}}}));
    let all: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let run = |_| scope.spawn(|| walk(&mut cache.get(&source).expect("good").matcher(), 5, 40).0);
        let threads: Vec<_> = (0..4).map(run).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(cache.count(), 1);
}

#[test]
fn the_version_is_that_of_the_library() {
    let manifest = include_str!("../../../../Cargo.toml");
    let version = penstock_grammar::VERSION.strip_prefix("llguidance-").and_then(|rest| rest.split('+').next());
    let version = version.expect("it names the library");
    assert!(manifest.contains(&format!("llguidance = {{ version = \"={version}\"")), "{version}");
}
