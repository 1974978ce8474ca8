//! Parsers of tool calls in an answer's text, in the formats that models write.
//!
//! A parser takes one character at a time, so the result does not depend on the cuts of the text. Everything that does
//! not turn out to be a call comes out as text: malformed and truncated calls never vanish. A call is announced when
//! its name is known and its arguments begin, and then its arguments come out as the model writes them.
//!
//! A format is one file and one line of [`FORMATS`].

mod call;
mod hermes;
mod json;
mod llama3;
mod mistral;

use crate::piece::Pieces;

/// Format in which a model writes its tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3.
    Hermes,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name[ARGS]{…}`: Mistral.
    Mistral,
    /// The whole answer is `{"name": …, "parameters": …}`: Llama 3.1 to 3.3.
    Llama3Json,
}

struct Format {
    format: ToolFormat,
    /// Test whether a chat template shows the format to its model.
    shown_by: fn(&str) -> bool,
    /// Marks that may be special tokens and are text to the parser.
    marks: &'static [&'static str],
    parser: fn() -> Box<dyn ToolParser>,
}

static FORMATS: [Format; 3] = [
    Format {
        format: ToolFormat::Hermes,
        shown_by: hermes::shown_by,
        marks: &hermes::MARKS,
        parser: || Box::new(hermes::Hermes::new()),
    },
    Format {
        format: ToolFormat::Mistral,
        shown_by: mistral::shown_by,
        marks: &mistral::MARKS,
        parser: || Box::new(mistral::Mistral::new()),
    },
    Format {
        format: ToolFormat::Llama3Json,
        shown_by: llama3::shown_by,
        marks: &llama3::MARKS,
        parser: || Box::new(llama3::Llama3::new()),
    },
];

impl ToolFormat {
    /// Format of tool calls that a chat template shows to its model; `None`: none that is known.
    pub(crate) fn detect(template: &str) -> Option<Self> {
        FORMATS.iter().find(|entry| (entry.shown_by)(template)).map(|entry| entry.format)
    }

    pub(crate) fn parser(self) -> Box<dyn ToolParser> {
        (self.entry().parser)()
    }

    pub(crate) fn marks(self) -> &'static [&'static str] {
        self.entry().marks
    }

    fn entry(self) -> &'static Format {
        FORMATS.iter().find(|entry| entry.format == self).expect("every format has its line")
    }
}

/// Parser that separates the tool calls of one answer from its text.
pub(crate) trait ToolParser: Send {
    /// Takes the character at byte `offset` of the model's text.
    fn push(&mut self, offset: usize, c: char, out: &mut Pieces);
    /// Ends the text at byte `end` and releases the held text.
    fn finish(&mut self, end: usize, out: &mut Pieces);
    /// Returns true if a call has been announced and goes on, so that no text is held.
    fn in_call(&self) -> bool;
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::piece::Piece;

    /// Content of an answer: its text, its calls (name, arguments, complete).
    #[derive(Debug, Default, PartialEq, Eq)]
    pub(crate) struct Answer {
        pub(crate) text: String,
        pub(crate) calls: Vec<(String, String, bool)>,
    }

    pub(crate) fn parse(format: ToolFormat, text: &str) -> Answer {
        let (mut parser, mut out, mut answer) = (format.parser(), Pieces::default(), Answer::default());
        for (offset, c) in text.char_indices() {
            parser.push(offset, c, &mut out);
        }
        parser.finish(text.len(), &mut out);
        for piece in out.0 {
            match piece {
                Piece::Text { at, text: piece } => {
                    assert_eq!(text.get(at..at + piece.len()), Some(piece.as_str()), "text stands where it says");
                    answer.text.push_str(&piece);
                }
                Piece::CallStart { name } => answer.calls.push((name, String::new(), false)),
                Piece::CallArguments(json) => answer.calls.last_mut().unwrap().1.push_str(&json),
                Piece::CallEnd => answer.calls.last_mut().unwrap().2 = true,
                Piece::Reasoning(_) => unreachable!("parsers know no reasoning"),
            }
        }
        answer
    }

    #[track_caller]
    pub(crate) fn check(format: ToolFormat, text: &str, content: &str, calls: &[(&str, &str)]) {
        let calls = calls.iter().map(|&(name, json)| (name.into(), json.into(), true)).collect();
        assert_eq!(parse(format, text), Answer { text: content.into(), calls }, "{text}");
    }

    #[test]
    fn formats_are_found_in_templates() {
        let qwen = r#"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"#;
        assert_eq!(ToolFormat::detect(qwen), Some(ToolFormat::Hermes));
        assert_eq!(ToolFormat::detect("{{- '[TOOL_CALLS][' }}"), Some(ToolFormat::Mistral));
        let llama =
            r#"<|python_tag|> {"name": function name, "parameters": dictionary of argument name and its value}"#;
        assert_eq!(ToolFormat::detect(llama), Some(ToolFormat::Llama3Json));
        assert_eq!(ToolFormat::detect("<tool_call>\n<function=f>\n<parameter=x>"), None);
        assert_eq!(ToolFormat::detect("{{ messages[0].content }}"), None);
    }
}
