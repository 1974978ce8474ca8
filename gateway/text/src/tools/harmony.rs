//! Harmony, the format of gpt-oss: an answer is a row of messages, each in a channel.
//!
//! ```text
//! <|channel|>analysis<|message|>…<|end|>                                   reasoning
//! <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
//! <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{…}<|call|>    as the template writes it
//! <|start|>assistant<|channel|>final<|message|>…<|return|>                 answer
//! ```
//!
//! Channels part reasoning and calls at once, so this parser does the work of both stages. The commentary channel
//! without a recipient is text for the user. Messages to built-in tools (`to=python`) are reasoning in the analysis
//! channel, and text elsewhere: nothing vanishes.

use super::{
    CallableTool, Calls, Format, Make, ToolFormat, ToolParser,
    grammar::{CallDemand, CallRule, Checkpoint, Lark, ReasoningPart, chosen},
    json::{JsonScan, Verdict},
    marks::{Marks, in_name},
};
use crate::piece::Pieces;

pub(super) static FORMAT: Format = Format {
    format: ToolFormat::Harmony,
    names: &["harmony", "openai", "gpt_oss", "gpt-oss"],
    shown_by,
    marks: &MARKS,
    make: Make::Own(|_| Box::new(Harmony::new(true, true, false))),
    calls: Calls::Own(grammar),
};

pub(crate) const CHANNEL: &str = "<|channel|>";
pub(crate) const START: &str = "<|start|>";
pub(crate) const MESSAGE: &str = "<|message|>";
pub(crate) const END: &str = "<|end|>";
const RETURN: &str = "<|return|>";
const CALL: &str = "<|call|>";
pub(crate) const CONSTRAIN: &str = "<|constrain|>";
pub(super) const MARKS: [&str; 7] = [START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN];

/// Marks that end a message, or begin the next one without such a mark.
const BODY_MARKS: &[&str] = &[END, RETURN, CALL, START, CHANNEL];
/// Longest header of a message, in bytes; a longer one is text.
const HEADER_BYTES_MAX: usize = 512;

pub(super) fn shown_by(signs: &super::Signs<'_>) -> bool {
    signs.template.contains(CHANNEL) && signs.template.contains(MESSAGE)
}

/// What the body of a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Reasoning,
    Text,
}

enum At {
    /// In front of a message or in its header, with the text so far.
    Header(String),
    Body(Body),
    /// Behind the header of a call, in front of its arguments: header and blanks, and the function's name.
    Call(String, String),
    Arguments(JsonScan),
    /// Behind a call's arguments, with blanks.
    AfterCall(String),
}

/// Parser of one answer in Harmony's format.
pub(crate) struct Harmony {
    at: At,
    marks: Marks,
    calls: bool,
    reasoning: bool,
    /// True if reasoning has come out, so that more of it begins on a line of its own.
    reasoned: bool,
    /// True if a message of reasoning has begun, whose text has not.
    fresh: bool,
}

impl Harmony {
    /// Creates a parser that separates `calls` and `reasoning`; the body of a message that is not separated is text.
    /// `in_reasoning`: the prompt ends inside an analysis message.
    pub(crate) fn new(calls: bool, reasoning: bool, in_reasoning: bool) -> Self {
        let at = if in_reasoning && reasoning { At::Body(Body::Reasoning) } else { At::Header(String::new()) };
        Self { at, marks: Marks::new(BODY_MARKS), calls, reasoning, reasoned: false, fresh: false }
    }

    /// Handles a character of a header. `end` is the offset behind it.
    fn header(&mut self, end: usize, header: String, out: &mut Pieces) {
        if let Some(text) = header.strip_suffix(MESSAGE) {
            return self.begin(end, text, &header, out);
        }
        if header.len() <= HEADER_BYTES_MAX && may_be_header(&header) {
            self.at = At::Header(header);
            return;
        }
        // The mark that seemed to begin a message is text; what follows it may begin one.
        let start = end - header.len();
        let blanks = header.len() - header.trim_start().len();
        let mark = [START, CHANNEL].into_iter().find(|mark| header[blanks..].starts_with(mark));
        let text = mark.map_or(0, |mark| blanks + mark.len());
        out.text(start, &header[..text]);
        self.at = At::Body(Body::Text);
        self.replay(start + text, &header[text..], out);
    }

    /// Begins the body of a message. `header`: all text since the last message; `text`: the part of it in front of the
    /// mark.
    fn begin(&mut self, end: usize, text: &str, header: &str, out: &mut Pieces) {
        let (role, channel) = text.split_once(CHANNEL).unwrap_or((text, ""));
        let channel_name: String = channel.trim_start().chars().take_while(|c| c.is_alphanumeric()).collect();
        let recipient = [role, channel].into_iter().find_map(|part| {
            let to = part.split_once("to=")?.1;
            Some(to.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or(to))
        });
        let function = recipient.and_then(|to| to.strip_prefix("functions."));
        self.at = match function {
            Some(name) if self.calls && !name.is_empty() && name.chars().all(in_name) => {
                At::Call(header.to_owned(), name.to_owned())
            }
            // The header of a call that is not separated is text with its body.
            Some(_) => {
                out.text(end - header.len(), header);
                At::Body(Body::Text)
            }
            None if channel_name == "analysis" && self.reasoning => {
                self.fresh = true;
                At::Body(Body::Reasoning)
            }
            None => At::Body(Body::Text),
        };
    }

    /// Handles a character of a body. `end` is the offset behind it.
    fn body(&mut self, end: usize, body: Body, c: char, out: &mut Pieces) {
        let mut free = String::new();
        let found = self.marks.push(c, &mut free);
        let held = found.map_or(self.marks.held_bytes(), str::len);
        self.shown(end - held - free.len(), body, &free, out);
        self.at = match found {
            Some(mark @ (START | CHANNEL)) => At::Header(mark.to_owned()),
            Some(_) => At::Header(String::new()),
            None => At::Body(body),
        };
    }

    fn shown(&mut self, at: usize, body: Body, text: &str, out: &mut Pieces) {
        match body {
            Body::Text => out.text(at, text),
            Body::Reasoning if text.is_empty() => {}
            Body::Reasoning => {
                if std::mem::take(&mut self.fresh) && self.reasoned {
                    out.reasoning("\n");
                }
                self.reasoned = true;
                out.reasoning(text);
            }
        }
    }

    /// Reads a text that stands at `start` again.
    fn replay(&mut self, start: usize, text: &str, out: &mut Pieces) {
        for (index, c) in text.char_indices() {
            self.push(start + index, c, out);
        }
    }

    fn arguments(&mut self, mut scan: JsonScan, offset: usize, c: char, out: &mut Pieces) {
        match scan.push(c) {
            Verdict::Bad | Verdict::EndBefore => {
                self.at = At::Body(Body::Text);
                self.push(offset, c, out);
            }
            verdict => {
                out.call_arguments(c.encode_utf8(&mut [0; 4]));
                self.at = if verdict == Verdict::End {
                    out.call_end();
                    At::AfterCall(String::new())
                } else {
                    At::Arguments(scan)
                };
            }
        }
    }
}

/// Returns true if a text may be the beginning of a message: blanks, and then a mark or a recipient.
fn may_be_header(text: &str) -> bool {
    let text = text.trim_start();
    // A mark that only ends the message before this one was handled there.
    let begins = |mark: &str| text.starts_with(mark) || mark.starts_with(text);
    if !(begins(START) || begins(CHANNEL) || begins("to=")) {
        return false;
    }
    // A second message cannot begin inside a header.
    [END, RETURN, CALL].iter().all(|mark| !text.contains(mark)) && text.matches(START).count() <= 1
}

impl ToolParser for Harmony {
    fn push(&mut self, offset: usize, c: char, out: &mut Pieces) {
        let end = offset + c.len_utf8();
        match std::mem::replace(&mut self.at, At::Body(Body::Text)) {
            At::Header(mut header) => {
                header.push(c);
                self.header(end, header, out);
            }
            At::Body(body) => self.body(end, body, c, out),
            At::Call(mut header, name) => {
                if c == '{' {
                    out.call_start(&name, None);
                    self.arguments(JsonScan::new(), offset, c, out);
                } else if c.is_whitespace() && header.len() <= HEADER_BYTES_MAX {
                    header.push(c);
                    self.at = At::Call(header, name);
                } else {
                    // Not arguments: the message is text, with its header.
                    out.text(offset - header.len(), &header);
                    self.push(offset, c, out);
                }
            }
            At::Arguments(scan) => self.arguments(scan, offset, c, out),
            At::AfterCall(mut blanks) => {
                if c.is_whitespace() {
                    blanks.push(c);
                    self.at = At::AfterCall(blanks);
                } else {
                    let start = offset - blanks.len();
                    // Blanks in front of a mark are layout.
                    if c != '<' {
                        out.text(start, &blanks);
                    }
                    self.push(offset, c, out);
                }
            }
        }
    }

    fn finish(&mut self, end: usize, out: &mut Pieces) {
        match std::mem::replace(&mut self.at, At::Header(String::new())) {
            At::Header(text) | At::Call(text, _) => out.text(end - text.len(), &text),
            At::Body(body) => {
                let held = self.marks.take_held();
                self.shown(end - held.len(), body, &held, out);
            }
            At::Arguments(_) | At::AfterCall(_) => {}
        }
    }

    fn in_call(&self) -> bool {
        matches!(self.at, At::Arguments(_))
    }

    fn in_reasoning(&self) -> bool {
        matches!(self.at, At::Body(Body::Reasoning))
    }
}

/// Grammar of the messages of an answer: reasoning (unless the rule puts it elsewhere), and then a call or the answer.
///
/// `<|call|>` ends the model's turn, so an answer has one call at most, whatever the rule allows.
pub(super) fn grammar(checkpoint: Checkpoint<'_>, tools: &[CallableTool], rule: &CallRule) -> Option<String> {
    let mut lark = Lark::new(checkpoint, &MARKS);
    let mut calls = Vec::new();
    for tool in chosen(tools, rule) {
        let arguments = lark.compact_arguments(tool);
        let header = format!("{CHANNEL}commentary to=functions.{} {CONSTRAIN}json{MESSAGE}", tool.name);
        calls.push(format!("{} {arguments}", lark.literal(&header)));
    }
    let content = lark.content(&rule.content);
    if calls.is_empty() && content.is_none() {
        return None;
    }
    let calls = if calls.is_empty() { String::new() } else { lark.rule(&calls.join(" | ")) };
    let next = format!("{END}{START}assistant");
    let text = lark.free_text("/(?s:.*)/", "");
    let and_next = format!("{text}? {}", lark.literal(&next));
    let last = if rule.demand == CallDemand::Auto {
        let commentary = lark.literal("<|channel|>commentary<|message|>");
        let answer = lark.literal("<|channel|>final<|message|>");
        let answer = format!("{answer} {}", content.unwrap_or_else(|| format!("{text}?")));
        match calls.is_empty() {
            true => lark.rule(&answer),
            false => lark.rule(&format!("({commentary} {and_next})? ({calls} | {answer})")),
        }
    } else {
        calls
    };
    let analysis = lark.literal("<|channel|>analysis<|message|>");
    let start = match rule.reasoning {
        ReasoningPart::Outside => last,
        ReasoningPart::Opened => format!("{and_next} {last}"),
        ReasoningPart::Allowed => format!("({analysis} {and_next})? {last}"),
    };
    // The reasoning is placed already.
    lark.finish(&start, &CallRule { reasoning: ReasoningPart::Outside, ..rule.clone() })
}

#[cfg(test)]
mod tests {
    use super::super::{
        ToolFormat::Harmony,
        tests::{check, incomplete},
    };

    #[test]
    fn messages_go_where_their_channel_says() {
        check(
            Harmony,
            "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>\
             <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Paris\"}<|call|>",
            "I look it up.",
            &[("get_weather", r#"{"city": "Paris"}"#)],
        );
        check(
            Harmony,
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|> {}\n<|call|><|start|>assistant<|channel|>final<|message|>Done <|x|>.<|return|>",
            "Done <|x|>.",
            &[("f", "{}")],
        );
        check(Harmony, " to=functions.f<|channel|>commentary<|message|>{}", "", &[("f", "{}")]);
        check(Harmony, "<|channel|>final<|message|>a<|end|>", "a", &[]);
        check(Harmony, "plain text", "plain text", &[]);
    }

    #[test]
    fn what_is_no_message_stays_text() {
        for text in [
            "<|channel|>",
            "<|channel|>final",
            "<|channel|>commentary to=functions.f<|message|>",
            "<|channel|>commentary to=functions.f<|message|>[1]",
            "<|channel|>commentary to=functions.<|message|>x",
            " ",
            "<|mess",
        ] {
            check(Harmony, text, text, &[]);
        }
        incomplete(Harmony, "<|channel|>commentary to=functions.f<|message|>{\"a\": x}", "x}", ("f", "{\"a\": "));
    }
}
