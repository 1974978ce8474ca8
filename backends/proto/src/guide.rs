//! Rules of an output in frames: the grammar that it follows, what following it cost, and the budget of its reasoning.

use prost::Message;

/// Grammar of an output, as text. A worker compiles the text once and keeps it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Guide {
    /// [`GuideKind`] of the text, as its number.
    #[prost(enumeration = "GuideKind", tag = "1")]
    pub kind: i32,
    /// Text of the grammar.
    #[prost(string, tag = "2")]
    pub text: String,
    /// Tokens whose text is the mark behind which the grammar begins; the output is free before, but does not end there.
    /// For a model that thinks first: its closing mark. The first place where the output has that text counts, in whichever tokens.
    /// Empty means at once.
    #[prost(uint32, repeated, tag = "3")]
    pub begins_after: Vec<u32>,
}

/// Forms in which a [`Guide`] is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum GuideKind {
    /// Kind of a later version; refused.
    Unknown = 0,
    /// JSON schema. The output is a value of it, without blanks between its parts.
    JsonSchema = 1,
    /// Any JSON object, without blanks between its parts. The text is empty.
    JsonObject = 2,
    /// Regular expression in the syntax of the crate `regex`, without look-around, that the whole output matches.
    Regex = 3,
    /// Context-free grammar in llguidance's variant of Lark, with the rule `start`. A schema in it (`%json {…}`) is
    /// followed like one alone.
    Lark = 4,
    /// JSON list of strings. The output is one of them.
    Choice = 5,
}

/// Outputs that follow a [`Guide`]: sums since the epoch began, except for the first field.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct GuideState {
    /// Open sequences with a grammar, waiting ones included.
    #[prost(uint32, tag = "1")]
    pub sequences: u32,
    /// Tokens that the grammar left no choice about and that were taken without a forward pass of their own.
    #[prost(uint64, tag = "2")]
    pub jumped_tokens: u64,
    /// Masks computed.
    #[prost(uint64, tag = "3")]
    pub masks: u64,
    /// Seconds spent on masks, summed.
    #[prost(double, tag = "4")]
    pub mask_seconds: f64,
    /// Longest mask in seconds.
    #[prost(double, tag = "5")]
    pub mask_seconds_max: f64,
    /// Grammars compiled, refused ones included.
    #[prost(uint64, tag = "6")]
    pub compiled: u64,
    /// Seconds spent on compiling, summed.
    #[prost(double, tag = "7")]
    pub compile_seconds: f64,
    /// Choices that ended because a token's mask would have been too much work.
    #[prost(uint64, tag = "8")]
    pub too_complex: u64,
}

/// Most tokens of reasoning in an output, and what the worker emits once they are spent. The text of a control token is
/// its name.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ReasoningBudget {
    /// Tokens of reasoning after which the worker closes it, summed over all parts of the output that reason.
    #[prost(uint32, tag = "1")]
    pub tokens: u32,
    /// True if the output begins inside the reasoning, which the prompt has opened.
    #[prost(bool, tag = "2")]
    pub is_open: bool,
    /// Text that opens the reasoning at the beginning of an output, behind blanks; tokens that end within it are not
    /// counted. Empty if only the prompt can open it.
    #[prost(string, tag = "3")]
    pub opening: String,
    /// True if the opening text counts anywhere in an output.
    #[prost(bool, tag = "4")]
    pub opens_anywhere: bool,
    /// Text by which the model itself closes the reasoning.
    #[prost(string, tag = "5")]
    pub ending: String,
    /// Tokens that are emitted, whatever the model says, when the budget is spent: the closing mark, and text around it.
    #[prost(uint32, repeated, tag = "6")]
    pub closing: Vec<u32>,
    /// Tokens emitted instead when a later part of the output opens the reasoning again after the budget was spent.
    /// Empty: as `closing`.
    #[prost(uint32, repeated, tag = "7")]
    pub closing_again: Vec<u32>,
}
