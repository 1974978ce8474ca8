//! Syntax of templates: tokens, the tree, and the parser between them, after Jinja's own.

pub(super) mod ast;
mod expression;
mod lexer;
mod parser;

pub(super) use parser::parse;

/// A fault in the source of a template.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SyntaxError {
    /// Line of the fault, from 1.
    pub(super) line: usize,
    pub(super) words: String,
}
