//! Kinds of text that a grammar is written in.

/// Form in which a grammar's text is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A JSON schema; the output is a value of it, written without blanks.
    JsonSchema,
    /// Any JSON object, written without blanks; the text is not looked at.
    JsonObject,
    /// A regular expression in the syntax of the crate `regex`, without look-around; the whole output matches it.
    Regex,
    /// A context-free grammar in llguidance's variant of Lark, with the rule `start`.
    Lark,
    /// A JSON list of strings; the output is one of them.
    Choice,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::JsonSchema => "JSON schema",
            Kind::JsonObject => "JSON object",
            Kind::Regex => "regex",
            Kind::Lark => "Lark grammar",
            Kind::Choice => "list of choices",
        })
    }
}
