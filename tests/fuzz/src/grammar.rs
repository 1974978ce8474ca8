//! A grammar's text from outside: the first byte says its kind. What compiles is followed by chance, which the second byte
//! seeds: every allowed token can be consumed, and what is forced is allowed.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use penstock_grammar::structural_tag::{self, SpecialTokens};
use penstock_grammar::{Grammar, Kind, Source, TokenText, Vocabulary};
use penstock_vocabulary::TokenBytes;

/// Tokens of a walk.
const WALK: usize = 12;

static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
    let json = include_bytes!("../../../models/penstock-demo/tokenizer.json");
    let table = TokenBytes::from_json(json).expect("the demo tokenizer");
    let tokens = (0..table.count()).map(|id| TokenText { bytes: table.token(id), is_special: table.is_special(id) });
    Vocabulary::new(tokens, &[], table.count() as usize).expect("the demo vocabulary")
});

/// The demo model's control token that ends a turn.
struct Specials;

const SPECIAL: (&str, u32) = ("<|im_end|>", 4089);

impl SpecialTokens for Specials {
    fn name(&self, id: u32) -> Option<&str> {
        (id == SPECIAL.1).then_some(SPECIAL.0)
    }

    fn find(&self, text: &str) -> Vec<(Range<usize>, u32)> {
        text.match_indices(SPECIAL.0).map(|(at, name)| (at..at + name.len(), SPECIAL.1)).collect()
    }
}

pub(crate) fn run(data: &[u8]) {
    let [kind, seed, text @ ..] = data else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let kinds = [Kind::JsonSchema, Kind::Regex, Kind::Lark, Kind::Choice];
    let source = match kinds.get(usize::from(*kind) % (kinds.len() + 1)) {
        Some(kind) => Source { kind: *kind, text: text.to_owned() },
        None => {
            let Ok(tag) = structural_tag::to_rules(text, &Specials) else { return };
            Source::lark(format!("start: {}\n{}", tag.start, tag.rules))
        }
    };
    let checked = source.check();
    let Ok(grammar) = Grammar::compile(&source, &VOCABULARY) else { return };
    assert!(checked.is_ok(), "what compiles passes the check before it");
    let mut matcher = grammar.matcher();
    for step in 0..WALK {
        if matcher.is_complete() {
            break;
        }
        // Err: beyond the limits, which ends this sequence alone.
        let Ok(forced) = matcher.forced() else { break };
        let Ok(mask) = matcher.mask() else { break };
        let allows = |token: u32| mask.bits[token as usize / 32] >> (token % 32) & 1 == 1;
        let allowed: Vec<u32> = (0..VOCABULARY.rows() as u32).filter(|token| allows(*token)).collect();
        assert_eq!(allowed.is_empty(), mask.is_empty);
        if let Some(forced) = forced {
            assert!(allowed.contains(&forced) && !mask.may_end, "{source:?}: {forced} is forced and not allowed");
        }
        let chance = usize::from(*seed).wrapping_mul(31).wrapping_add(step * 7);
        let Some(token) = allowed.get(chance % allowed.len().max(1)) else { break };
        match matcher.consume(*token) {
            Ok(()) | Err(penstock_grammar::MatchError::TooComplex { .. }) => {}
            Err(error) => panic!("{source:?}: {error}, though it is allowed"),
        }
    }
}
