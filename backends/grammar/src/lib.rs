//! Grammars over tokens: JSON schemas, regexes, Lark text and choices, compiled to masks of a model's vocabulary.
//!
//! ```text
//! tokenizer.json ─▶ Vocabulary                       once per model
//! Source         ─▶ Grammar                          once per text, kept in Grammars
//! Grammar        ─▶ Matcher ─▶ mask, consume, forced once per sequence, once per token
//! ```
//! The parser is the library `llguidance`. What this crate adds are rules: JSON is written without blanks; a schema's
//! keywords that cannot be enforced are named; text from outside is bounded before and while it is compiled; a token is
//! forced as a pure function of the tokens before it; and a matcher that fails harms no other one of its grammar.
//!
//! The gateway compiles a client's grammar to refuse a bad one early, and workers compile the same text to enforce it.
//! Two processes mask alike if [`Vocabulary::id`] is the same in both.
//!
//! - `vocabulary.rs`: token bytes as a trie; `strings.rs`: masks near the longest length of a string
//! - `kind.rs`, `source.rs`, `schema.rs`, `lark.rs`, `gbnf.rs`, `structural_tag.rs`: text from outside, checked and
//!   brought into the library's form; `excerpt.rs`: parts of a schema as documents of their own
//! - `grammar.rs`: compilation within limits
//! - `matcher.rs`: state of one sequence; `digits.rs`: length of its numbers
//! - `cache.rs`: compiled grammars by their text
//!
//! Deliberately absent: sampling, requests, knowledge of which tokens end a choice.
#![forbid(unsafe_code)]

mod apart;
mod cache;
mod digits;
mod error;
mod excerpt;
mod expression;
pub mod gbnf;
mod grammar;
mod kind;
pub mod lark;
mod library;
mod matcher;
mod narrow;
mod pointer;
mod runs;
mod schema;
mod source;
pub mod structural_tag;
mod vocabulary;

pub use cache::{CacheSizes, Grammars};
pub use error::{GrammarError, MatchError};
pub use excerpt::{excerpt, merged};
pub use expression::{ends_in_escape, one_line, quoted, regex};
pub use grammar::Grammar;
pub use kind::Kind;
pub use matcher::{Mask, Matcher};
pub use narrow::text_pattern;
pub use pointer::referenced;
pub use schema::{ANNOTATIONS, Unenforced};
pub use source::{Source, TEXT_BYTES_MAX};
pub use vocabulary::{TokenText, Vocabulary, VocabularyError};

/// Version of the parser and of this crate's rules: equal versions give equal masks and forced tokens.
pub const VERSION: &str = "llguidance-1.9.1+7";
