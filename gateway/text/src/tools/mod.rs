//! Parsers of tool calls in an answer's text, in the formats that models write.
//!
//! A parser takes one character at a time, so the result does not depend on the cuts of the text. Everything that does
//! not turn out to be a call comes out as text: malformed and truncated calls never vanish. A call is announced when
//! its name is known and its arguments begin, and then its arguments come out as the model writes them.
//!
//! A format is one file and one line of [`FORMATS`].

mod block;
mod call;
mod callable;
mod deepseek;
mod frame;
mod gemma;
mod glm;
mod grammar;
mod harmony;
mod hermes;
mod json;
mod kimi;
mod llama3;
mod loose;
mod marks;
mod minimax;
mod mistral;
mod pythonic;
mod qwen3_coder;
mod xml;

use std::sync::Arc;

pub(crate) use block::PHI_CALL_MARKS;
pub use callable::CallableTool;
pub(crate) use grammar::write_content;
pub use grammar::{CallDemand, CallRule, ContentForm, ReasoningPart};
pub(crate) use harmony::Harmony;

use crate::piece::{Piece, Pieces};
use frame::{Frame, Framed};
pub(crate) use grammar::Checkpoint;
use grammar::Shape;

/// Format in which a model writes its tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// Channels of messages (`<|channel|>commentary to=functions.NAME`): gpt-oss.
    Harmony,
    /// `<｜DSML｜invoke name="NAME">`: DeepSeek V3.2.
    DeepSeekV32,
    /// Special tokens around a name and a fenced JSON object: DeepSeek V3 and R1.
    DeepSeekV3,
    /// Special tokens around a name and a JSON object: DeepSeek V3.1.
    DeepSeekV31,
    /// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}`: Kimi K2.
    KimiK2,
    /// `<tool_call>NAME<arg_key>…</arg_key><arg_value>…`: GLM-4.5 to 4.7.
    Glm,
    /// `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">…`: MiniMax-M2.
    MiniMaxM2,
    /// `<seed:tool_call><function=NAME><parameter=KEY>…`: Seed-OSS.
    SeedOss,
    /// `<tool_call><function=NAME><parameter=KEY>…`: Qwen3-Coder, Qwen3.5.
    Qwen3Coder,
    /// `<|tool_call|>[{"name": …, "arguments": …}]`: Granite 3.
    Granite,
    /// `<function_call> {"name": …, "arguments": …}`: Granite 20B.
    Granite20b,
    /// `<|tool_call>call:NAME{key:<|"|>…<|"|>}<tool_call|>`: Gemma 4.
    Gemma4,
    /// `<start_function_call>call:NAME{key:<escape>…<escape>}<end_function_call>`: FunctionGemma.
    FunctionGemma,
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4.
    Hermes,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name[ARGS]{…}`: Mistral.
    Mistral,
    /// `<tool_calls>` and JSON objects in lines or an array: MiniMax-M1, Jamba, Hunyuan.
    MiniMaxM1,
    /// `functools[{"name": …, "arguments": …}]`: Phi-4 mini with vLLM's template.
    Phi4Mini,
    /// `<|tool_call|>[{"name": …, "arguments": …}]<|/tool_call|>`: Phi-4 mini.
    Phi4MiniMarked,
    /// Python calls in lines between `<function_calls>` marks: OLMo 3.
    Olmo3,
    /// Python calls in a `tool_code` fence: Gemma 3.
    ToolCode,
    /// The whole answer is `[f(a=1), g()]`: Llama 4 and others.
    Pythonic,
    /// The whole answer is `{"name": …, "parameters": …}`: Llama 3.1 to 3.3, and Llama 4 with its own template.
    Llama3Json,
}

/// What a checkpoint shows of its format.
pub(crate) struct Signs<'a> {
    /// Source of the chat template.
    pub(crate) template: &'a str,
}

/// Maker of a format's parser.
enum Make {
    /// A format with marks, by its table.
    Framed(&'static Frame),
    /// A format with a reader of its own, which is made for the functions of the request.
    Own(fn(&Arc<[CallableTool]>) -> Box<dyn ToolParser>),
}

struct Format {
    format: ToolFormat,
    /// Names for configs, our own first; the others are those of other servers.
    names: &'static [&'static str],
    /// Test whether a checkpoint shows the format to its model.
    shown_by: fn(&Signs<'_>) -> bool,
    /// Marks that may be special tokens and are text to the parser.
    marks: &'static [&'static str],
    make: Make,
    calls: Calls,
}

/// Grammar of a format's calls.
enum Calls {
    /// Calls of one form after the other.
    Shape(&'static Shape),
    /// A grammar of its own.
    Own(fn(Checkpoint<'_>, &[CallableTool], &CallRule) -> Option<String>),
}

/// All formats. The first one that a checkpoint shows counts, so narrow tests stand in front of wide ones.
static FORMATS: [&Format; 22] = [
    &harmony::FORMAT,
    &deepseek::FORMAT_32,
    &deepseek::FORMAT_3,
    &deepseek::FORMAT_31,
    &kimi::FORMAT,
    &glm::FORMAT,
    &minimax::FORMAT,
    &qwen3_coder::SEED_FORMAT,
    &qwen3_coder::FORMAT,
    &block::PHI_MARKED_FORMAT,
    &block::GRANITE_FORMAT,
    &block::FUNCTION_FORMAT,
    &gemma::FORMAT_4,
    &gemma::FORMAT,
    &hermes::FORMAT,
    &mistral::FORMAT,
    &block::CALLS_FORMAT,
    &block::PHI_FORMAT,
    &pythonic::OLMO_FORMAT,
    &pythonic::TOOL_CODE_FORMAT,
    &pythonic::FORMAT,
    &llama3::FORMAT,
];

impl ToolFormat {
    /// Format by its name in a config: our own (`qwen3_coder`), or an alias that vLLM or SGLang uses
    /// (`--tool-call-parser`). Case does not count. `None`: no such name; [`Self::names`] lists them.
    pub fn from_name(name: &str) -> Option<Self> {
        let named = |entry: &&&Format| entry.names.iter().any(|known| known.eq_ignore_ascii_case(name));
        FORMATS.iter().find(named).map(|entry| entry.format)
    }

    /// Names of all formats, our own first for each.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FORMATS.iter().flat_map(|entry| entry.names.iter().copied())
    }

    /// All formats.
    pub fn all() -> impl Iterator<Item = Self> {
        FORMATS.iter().map(|entry| entry.format)
    }

    /// Name of the format in configs and logs.
    pub fn name(self) -> &'static str {
        self.entry().names[0]
    }

    /// Format of tool calls that a checkpoint shows to its model; `None`: none that is known.
    pub(crate) fn detect(signs: &Signs<'_>) -> Option<Self> {
        FORMATS.iter().find(|entry| (entry.shown_by)(signs)).map(|entry| entry.format)
    }

    /// Parser of one answer. `tools`: the functions of the request; with none, values take the types that they look
    /// like.
    pub(crate) fn parser(self, tools: &Arc<[CallableTool]>) -> Box<dyn ToolParser> {
        match &self.entry().make {
            Make::Framed(frame) => Box::new(Framed::new(frame, tools.clone())),
            Make::Own(make) => make(tools),
        }
    }

    /// Splits a whole answer into text and calls, as the parser of a stream does.
    ///
    /// `tools`: the functions of the request; with none, values take the types that they look like.
    pub fn parse(self, tools: &Arc<[CallableTool]>, answer: &str) -> Vec<AnswerPart> {
        let (mut parser, mut out) = (self.parser(tools), Pieces::default());
        for (offset, c) in answer.char_indices() {
            parser.push(offset, c, &mut out);
        }
        parser.finish(answer.len(), &mut out);
        let mut parts = Vec::new();
        for piece in out.0 {
            match (piece, parts.last_mut()) {
                (Piece::Text { at, text }, _) => parts.push(AnswerPart::Text { at, text }),
                (Piece::Reasoning(more), Some(AnswerPart::Reasoning(text))) => text.push_str(&more),
                (Piece::Reasoning(text), _) => parts.push(AnswerPart::Reasoning(text)),
                (Piece::CallStart { name, id }, _) => {
                    parts.push(AnswerPart::Call { name, id, arguments: String::new(), complete: false });
                }
                (Piece::CallArguments(json), Some(AnswerPart::Call { arguments, .. })) => arguments.push_str(&json),
                (Piece::CallEnd, Some(AnswerPart::Call { complete, .. })) => *complete = true,
                (Piece::CallArguments(_) | Piece::CallEnd, _) => {}
            }
        }
        parts
    }

    /// Grammar of an answer of a checkpoint under `rule`, in `llguidance`'s Lark dialect.
    pub(crate) fn call_grammar(
        self,
        checkpoint: Checkpoint<'_>,
        tools: &[CallableTool],
        rule: &CallRule,
    ) -> Option<String> {
        let entry = self.entry();
        match &entry.calls {
            Calls::Shape(shape) => grammar::write(checkpoint, shape, entry.marks, tools, rule),
            Calls::Own(write) => write(checkpoint, tools, rule),
        }
    }

    pub(crate) fn marks(self) -> &'static [&'static str] {
        self.entry().marks
    }

    fn entry(self) -> &'static Format {
        FORMATS.iter().copied().find(|entry| entry.format == self).expect("every format has its line")
    }
}

/// Part of a whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text for the user, with its byte offset in the answer.
    Text {
        /// Offset in bytes.
        at: usize,
        /// The text.
        text: String,
    },
    /// Reasoning, in formats that carry it in the same marks as calls.
    Reasoning(String),
    /// A tool call.
    Call {
        /// Name of the function.
        name: String,
        /// Id that the model wrote.
        id: Option<String>,
        /// JSON text of the arguments; a part of it if the answer broke off.
        arguments: String,
        /// True if the arguments are complete.
        complete: bool,
    },
}

/// Parser that separates the tool calls of one answer from its text.
pub(crate) trait ToolParser: Send {
    /// Takes the character at byte `offset` of the model's text.
    fn push(&mut self, offset: usize, c: char, out: &mut Pieces);
    /// Ends the text at byte `end` and releases the held text.
    fn finish(&mut self, end: usize, out: &mut Pieces);
    /// Returns true if a call has been announced and goes on, so that no text is held.
    fn in_call(&self) -> bool;
    /// Returns true if the text goes to the reasoning, in formats where this parser separates it.
    fn in_reasoning(&self) -> bool {
        false
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Content of an answer: its text, its calls (name, arguments, complete).
    #[derive(Debug, Default, PartialEq, Eq)]
    pub(crate) struct Answer {
        pub(crate) text: String,
        pub(crate) calls: Vec<(String, String, bool)>,
    }

    pub(crate) fn parse(format: ToolFormat, text: &str) -> Answer {
        let tools = ["f", "g", "get_weather"].map(|name| CallableTool::new(name, None, false));
        parse_with(format, &Arc::from(tools), text)
    }

    fn parse_with(format: ToolFormat, tools: &Arc<[CallableTool]>, whole: &str) -> Answer {
        let mut answer = Answer::default();
        for part in format.parse(tools, whole) {
            match part {
                AnswerPart::Text { at, text } => {
                    assert_eq!(whole.get(at..at + text.len()), Some(text.as_str()), "text stands where it says");
                    answer.text.push_str(&text);
                }
                AnswerPart::Call { name, arguments, complete, .. } => answer.calls.push((name, arguments, complete)),
                AnswerPart::Reasoning(_) => {}
            }
        }
        answer
    }

    fn complete(calls: &[(&str, &str)]) -> Vec<(String, String, bool)> {
        calls.iter().map(|&(name, json)| (name.into(), json.into(), true)).collect()
    }

    #[track_caller]
    pub(crate) fn check(format: ToolFormat, text: &str, content: &str, calls: &[(&str, &str)]) {
        assert_eq!(parse(format, text), Answer { text: content.into(), calls: complete(calls) }, "{text}");
    }

    /// Checks an answer to a request whose functions are not known.
    #[track_caller]
    pub(crate) fn check_unnamed(format: ToolFormat, text: &str, content: &str, calls: &[(&str, &str)]) {
        let want = Answer { text: content.into(), calls: complete(calls) };
        assert_eq!(parse_with(format, &Arc::from([]), text), want, "{text}");
    }

    /// Checks the arguments of the only call, of the function `f` with the given parameters; none if they are empty,
    /// and then the whole answer is text.
    #[track_caller]
    pub(crate) fn check_typed(format: ToolFormat, parameters: &str, text: &str, arguments: &str) {
        let tools = Arc::from([CallableTool::new("f", Some(parameters), false)]);
        let (content, calls) = if arguments.is_empty() { (text, vec![]) } else { ("", complete(&[("f", arguments)])) };
        assert_eq!(parse_with(format, &tools, text), Answer { text: content.into(), calls }, "{text}");
    }

    /// Checks an answer whose only call is not complete.
    #[track_caller]
    pub(crate) fn incomplete(format: ToolFormat, text: &str, content: &str, (name, json): (&str, &str)) {
        let calls = vec![(name.into(), json.into(), false)];
        assert_eq!(parse(format, text), Answer { text: content.into(), calls }, "{text}");
    }

    #[test]
    fn formats_are_found_in_templates() {
        let detect = |template: &str| ToolFormat::detect(&Signs { template });
        let qwen = r#"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"#;
        assert_eq!(detect(qwen), Some(ToolFormat::Hermes));
        assert_eq!(detect("{{- '[TOOL_CALLS][' }}"), Some(ToolFormat::Mistral));
        let llama =
            r#"<|python_tag|> {"name": function name, "parameters": dictionary of argument name and its value}"#;
        assert_eq!(detect(llama), Some(ToolFormat::Llama3Json));
        assert_eq!(detect("<tool_call>\n<function=f>\n<parameter=x>"), Some(ToolFormat::Qwen3Coder));
        assert_eq!(detect("{{ messages[0].content }}"), None);
    }

    #[test]
    fn names_are_known_once() {
        for format in ToolFormat::all() {
            assert_eq!(ToolFormat::from_name(format.name()), Some(format));
        }
        let mut names: Vec<&str> = ToolFormat::names().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(ToolFormat::from_name("Qwen3_Coder"), Some(ToolFormat::Qwen3Coder));
        assert_eq!(ToolFormat::from_name("none"), None);
    }
}
