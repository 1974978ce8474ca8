//! The library's parser behind a guard: panics become errors, and nothing of it is used after an error.

use crate::vocabulary::Index;
use llguidance::TokenParser;
use llguidance::api::{GrammarInit, StopReason, TopLevelGrammar};
use llguidance::derivre::ExprRef;
use llguidance::derivre::raw::ExprSet;
use llguidance::toktrie::TokTrie;
use llguidance::{Logger, panic_utils};
use std::panic::AssertUnwindSafe;
use toktrie::InferenceCapabilities;

/// Tokens that are consumed between two masks at most: only a mask renews the work that the lexer may do.
const UNMASKED_MAX: u32 = 32;

/// Most optional parts in a row, in all expressions of a grammar together: a row of `n` counts as `n(n+1)/2`. For the next
/// letter of such a row (`a*b*c*…`) the library makes an alternative of each part and everything behind it, and its own
/// limits count none of that work. One row of 512 takes a sixth of a second; rows of ten, as people write them, may be
/// there by the thousand.
const RUNS_MAX: u64 = 512 * 513 / 2;

/// Kind of an expression that is one part and what stands behind it, as the library numbers kinds.
const CONCATENATION: u8 = 10;

/// State of one sequence in the library, or of none so far.
#[derive(Clone)]
pub(crate) struct Parser {
    inner: TokenParser,
    /// Tokens consumed since the last mask.
    unmasked: u32,
}

impl Parser {
    /// Compiles a grammar.
    pub(crate) fn compile(index: &Index, grammar: TopLevelGrammar) -> Result<Self, String> {
        let factory = &index.factory;
        guarded(|| {
            let env = Some(factory.tok_env().clone());
            let (grammar, lexer) = GrammarInit::Serialized(grammar).to_internal(env, factory.limits().clone())?;
            let runs = optional_runs(lexer.regex_builder.exprset());
            anyhow::ensure!(
                runs <= RUNS_MAX,
                "too many optional parts in a row in its expressions ({runs}, limit {RUNS_MAX}: the sum of n(n+1)/2 over rows of n)"
            );
            let init = GrammarInit::Internal(grammar, lexer);
            let (logger, caps) = (Logger::new(0, 0), InferenceCapabilities::default());
            let mut parser = factory.create_parser_from_init_ext(init, logger, caps, factory.limits().clone())?;
            parser.bias_computer = index.masks.clone();
            parser.start_without_prompt();
            parser.check_stop()?;
            Ok(Self { inner: parser, unmasked: 0 })
        })
    }

    /// Copies the parser with lexer states of its own.
    pub(crate) fn isolated(&self) -> Self {
        Self { inner: self.inner.deep_clone(), unmasked: self.unmasked }
    }

    /// Bytes that the states of the lexer take, which grow with use.
    pub(crate) fn lexer_bytes(&self) -> usize {
        guarded(|| Ok(self.inner.parser.lexer_stats().num_bytes)).unwrap_or(usize::MAX)
    }

    /// Returns true if the text so far matches, and nothing may follow.
    pub(crate) fn is_complete(&self) -> bool {
        self.inner.stop_reason() == StopReason::NoExtension
    }

    /// Returns true if the text so far matches.
    pub(crate) fn is_accepting(&mut self) -> Result<bool, String> {
        let parser = &mut self.inner;
        guarded(|| {
            let accepting = parser.is_accepting();
            sound(parser)?;
            Ok(accepting)
        })
    }

    /// Returns true if a token fits.
    pub(crate) fn takes(&mut self, token: u32) -> Result<bool, String> {
        let parser = &mut self.inner;
        guarded(|| {
            let fits = parser.validate_token(token)?;
            sound(parser)?;
            Ok(fits)
        })
    }

    /// Consumes a token; false if it does not fit.
    pub(crate) fn consume(&mut self, token: u32) -> Result<bool, String> {
        let (parser, unmasked) = (&mut self.inner, &mut self.unmasked);
        guarded(|| {
            if *unmasked >= UNMASKED_MAX {
                match parser.compute_mask() {
                    Err(_) if parser.stop_reason() == StopReason::NoExtensionBias => return Ok(false),
                    masked => drop(masked?),
                }
                *unmasked = 0;
            }
            if !parser.validate_token(token)? {
                sound(parser)?;
                return Ok(false);
            }
            let back = parser.consume_token(token)?;
            anyhow::ensure!(back == 0, "the grammar takes tokens back");
            parser.check_stop()?;
            sound(parser)?;
            *unmasked += 1;
            Ok(true)
        })
    }

    /// Writes the tokens that may follow into `mask`, one bit each; false if there is none.
    pub(crate) fn mask(&mut self, mask: &mut [u32]) -> Result<bool, String> {
        let parser = &mut self.inner;
        self.unmasked = 0;
        guarded(|| match parser.compute_mask() {
            Ok(allowed) => {
                let words = allowed.as_slice();
                let (kept, rest) = mask.split_at_mut(words.len().min(mask.len()));
                kept.copy_from_slice(&words[..kept.len()]);
                rest.fill(0);
                Ok(true)
            }
            Err(_) if parser.stop_reason() == StopReason::NoExtensionBias => {
                mask.fill(0);
                Ok(false)
            }
            Err(error) => Err(error),
        })
    }

    /// Token that is forced here; see [`crate::Matcher::forced`].
    pub(crate) fn forced(&mut self, trie: &TokTrie) -> Result<Option<u32>, String> {
        let parser = &mut self.inner.parser;
        guarded(|| {
            parser.force_bytes();
            let bytes = parser.currently_forced_bytes();
            if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                return Ok(toktrie::parse_numeric_token(&bytes[1..]).map(|(_, token)| token));
            }
            let (token, length) = match bytes {
                [] => return Ok(None),
                _ => trie.prefix_token_id(&bytes[..bytes.len().min(trie.max_token_len())]),
            };
            if length == 0 {
                return Ok(None);
            }
            let may_go_on = bytes.len() < trie.max_token_len() && {
                let bytes = bytes.to_vec();
                parser.with_recognizer(|recognizer| trie.has_valid_extensions(recognizer, &bytes))
            };
            if let Some(error) = parser.get_error() {
                anyhow::bail!(error.message());
            }
            Ok(Some(token).filter(|_| !may_go_on))
        })
    }
}

/// Fails if the lexer has reached a limit: it then takes no bytes any more, for none of those who share it.
fn sound(parser: &TokenParser) -> anyhow::Result<()> {
    match parser.parser.get_error() {
        Some(error) => anyhow::bail!(error.message()),
        None => Ok(()),
    }
}

/// Sum of `n(n+1)/2` over the rows of `n` optional parts in all expressions. Equal expressions count once, as the library
/// works on them once. Cost: linear in the expressions.
fn optional_runs(expressions: &ExprSet) -> u64 {
    let mut runs: Vec<u32> = vec![0; expressions.len() + 1];
    let mut sum = 0_u64;
    // What an expression consists of comes before it.
    for id in 1..runs.len() {
        let expression = ExprRef::new(id as u32);
        if !expressions.is_valid(expression) || expressions.get_tag(expression) as u8 != CONCATENATION {
            continue;
        }
        if let [part, rest] = *expressions.get_args(expression)
            && expressions.is_nullable(part)
        {
            runs[id] = 1 + runs.get(rest.as_usize()).copied().unwrap_or(0);
            sum += u64::from(runs[id]);
        }
    }
    sum
}

fn guarded<T>(work: impl FnOnce() -> anyhow::Result<T>) -> Result<T, String> {
    panic_utils::catch_unwind(AssertUnwindSafe(work)).map_err(|error| format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Source, TokenText, Vocabulary};
    use serde_json::json;
    use std::sync::Arc;

    /// Tokens of one to fourteen characters of all widths, with parts of characters, and of JSON; words of up to twenty letters.
    fn vocabulary() -> Arc<Vocabulary> {
        let characters =
            ["a", "Z", " ", "1", "é", "\u{80}", "漢", "\u{ffff}", "😀", "\"", "\\", "n", ",", "}", "\u{7f}", "\n"];
        let mut chance = 1_u64;
        let mut next = |below: usize| {
            chance = chance.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (chance >> 33) as usize % below
        };
        let mut words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
        for _ in 0..4000 {
            // Mostly plain.
            let of = if next(4) == 0 { characters.len() } else { 9 };
            let mut word: Vec<u8> = (0..=next(14)).flat_map(|_| characters[next(of)].bytes()).collect();
            if next(8) == 0 {
                word.pop();
            }
            words.push(word);
        }
        for _ in 0..4000 {
            let first = ["", " ", " ", "B", " B", "_"][next(6)];
            let letters: Vec<u8> = (0..=next(19)).map(|_| b'a' + next(26) as u8).collect();
            let last = ["", "", "", "é", "éa", "漢"][next(6)];
            words.push([first.as_bytes(), &letters, last.as_bytes()].concat());
        }
        words.retain(|word| !word.is_empty() && word[0] != TokTrie::SPECIAL_TOKEN_MARKER);
        words.sort();
        words.dedup();
        // A few tokens have equal bytes, as those that a tokenizer has for single bytes.
        words.extend(["a", "e", "Z", " ", "the", "é"].map(|word| word.as_bytes().to_vec()));
        let rows = words.len();
        Vocabulary::new(words.iter().map(|bytes| TokenText { bytes, is_special: false }), &[], rows).expect("good")
    }

    fn schema(schema: &serde_json::Value) -> Source {
        Source::json_schema(schema.to_string())
    }

    /// Strings that are nearly as long as they may be.
    fn strings() -> Vec<Source> {
        vec![
            schema(&json!({"type": "string", "maxLength": 12})),
            schema(&json!({"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 5}})),
            schema(
                &json!({"type": "object", "properties": {"é": {"type": "string", "maxLength": 3}}, "additionalProperties": {"enum": ["aZ", 1]}}),
            ),
            schema(&json!({"type": "string", "pattern": "^[^a]{0,7}$"})),
            schema(&json!({"type": "string", "pattern": "^([a-z]{3}|.{1,4}|漢.{5})$"})),
            schema(&json!({"anyOf": [{"type": "string", "maxLength": 4}, {"const": "aaaaaa"}]})),
            Source::regex("[^\"\\\\\\x00-\\x1f\\x7f]{0,11}"),
            Source::regex(".{2,8}"),
            Source::regex("(?s).{0,5}(a|é{3})"),
            Source::regex("[ -~]{4,9}"),
            Source::lark("start: A B?\nA: /[^\"\\\\\\x00-\\x1f\\x7f]{1,6}/\nB: /,[^\"]{1,3}/"),
            Source::lark("start: (\"a\" | W)+\nW: /[^\"\\\\\\x00-\\x1f\\x7f]{3}/"),
        ]
    }

    /// Words of letters that are alike, or nearly.
    fn words() -> Vec<Source> {
        vec![
            Source::regex("[a-z ,]{3,40}\\."),
            Source::regex("[a-z]{5}é"),
            Source::regex("[a-z ]{4}q[a-z]{2}"),
            Source::regex(" ?[a-z]{4}é[a-z]{2}"),
            Source::lark("start: \"a\" (\", \" W)+\nW: /[a-z_]{1,9}/"),
            Source::lark("start: (\", \" W)+\nW: /[a-z]{2}[A-Za-zé]{1,9}/"),
            Source::lark("start: (W (N | M))+\nW: /[a-z]{3}/\nN: /é/\nM: / +漢/"),
            Source::regex("[A-Za-z]{6}[A-Z]{2}"),
            Source::lark("start: (A X \"!\" | B X C)+\nA: /[a-m]/\nB: /[n-z]/\nX: /[0-9]?/\nC: /[a-z]{2}/"),
            Source::regex("[A-Za-z]{2,20}|[a-z ]{3}!"),
            Source::regex("([A-Z][a-z]{1,7} )*[A-Za-z ]{0,9}"),
            schema(&json!({"type": "string", "pattern": "^[a-z_]{1,20}$"})),
            Source::lark("start: (W \" \")* W\nW: /[a-z_]{1,18}/"),
            Source::lark("start: (W | V)*\nW: /[a-z]{3}/\nV: / [A-Za-z]{1,4}/"),
        ]
    }

    /// Compares masks with those of the library along random texts of `sources`; returns how many were made by less than half of its work.
    fn compared(sources: Vec<Source>) -> usize {
        let vocabulary = vocabulary();
        let (mut chance, mut shorter) = (7_u64, 0);
        for source in sources {
            let grammar = crate::Grammar::compile(&source, &vocabulary).expect("a good source");
            for _ in 0..40 {
                let (mut ours, mut library) = (grammar.isolated(), grammar.isolated());
                library.inner.bias_computer = vocabulary.indexed().expect("good").factory.slicer();
                let mut masks = [(); 2].map(|()| vec![0; vocabulary.rows().div_ceil(32)]);
                for _ in 0..24 {
                    if ours.is_complete() {
                        break;
                    }
                    let walked = |parser: &Parser| parser.inner.parser.stats().trie_nodes_walked;
                    let before = [walked(&ours), walked(&library)];
                    assert_eq!(ours.mask(&mut masks[0]), library.mask(&mut masks[1]));
                    let [short, long] = [walked(&ours) - before[0], walked(&library) - before[1]];
                    shorter += usize::from(short * 2 < long);
                    let is_set = |mask: &[u32], token: u32| mask[token as usize / 32] >> (token % 32) & 1 == 1;
                    let all = 0..vocabulary.rows() as u32;
                    let differs = |token: &u32| is_set(&masks[0], *token) != is_set(&masks[1], *token);
                    let other = all.clone().find(differs).map(|token| String::from_utf8_lossy(vocabulary.bytes(token)));
                    assert_eq!(other, None, "{source:?}");
                    let allowed: Vec<u32> = all.filter(|token| is_set(&masks[0], *token)).collect();
                    if allowed.is_empty() {
                        break;
                    }
                    chance = chance.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    let token = allowed[(chance >> 33) as usize % allowed.len()];
                    assert_eq!((ours.consume(token), library.consume(token)), (Ok(true), Ok(true)));
                }
            }
        }
        shorter
    }

    #[test]
    fn optional_parts_in_a_row_are_bounded_together() {
        let vocabulary = vocabulary();
        let refused = |source: Source| match crate::Grammar::compile(&source, &vocabulary) {
            Err(error) => error.to_string().contains("optional parts in a row"),
            Ok(_) => false,
        };
        let terminals = |count: usize, row: &str| -> String {
            (0..count).map(|n| format!("/{row}{n}/ ")).collect::<String>() + "\"a\""
        };
        for part in ["a?", "(ab)*", ".*", "(a|)", "(a{0,3}b?)?"] {
            let most = if part.starts_with("(a{") { 300 } else { 512 };
            assert!(!refused(Source::regex(part.repeat(most))), "{part}");
            // What stands last has nothing behind it.
            assert!(refused(Source::regex(part.repeat(514))), "{part}");
            assert!(refused(schema(&json!({"type": "string", "pattern": part.repeat(520)}))), "{part}");
            // Rows of several expressions count together.
            assert!(refused(Source::lark(format!("start: {}", terminals(10, &part.repeat(180))))), "{part}");
        }
        assert!(!refused(Source::regex("a*b".repeat(5000))), "each row is of one");
        assert!(!refused(Source::lark(format!("start: {}", terminals(2000, "a?b?c?d?e?f?g?h?i?j?")))), "rows of ten");
        let doubling: String = (0..11).map(|n| format!("T{n}: T{0} T{0}\n", n + 1)).collect();
        assert!(refused(Source::lark(format!("start: T0\n{doubling}T11: /a*/"))));
    }

    #[test]
    fn masks_near_the_end_of_strings_are_those_of_the_library() {
        let shorter = compared(strings());
        assert!(shorter > 100, "the short way was taken {shorter} times");
    }

    #[test]
    fn masks_in_words_are_those_of_the_library() {
        let shorter = compared(words());
        assert!(shorter > 100, "the short way was taken {shorter} times");
    }
}
