//! Scanner of one call written as a JSON object: `{"name": "f", "arguments": {…}}`, keys in any order, others ignored.
//!
//! An `id` counts in formats whose templates write it, and where it stands in front of the arguments: a call is announced with its id when its
//! arguments begin, and to hold them back until an id may follow would end their streaming.

use std::sync::Arc;

use super::{
    CallableTool,
    json::{JsonScan, Verdict},
};
use crate::piece::Pieces;

/// Longest name and key; an object with a longer one is not a call.
const NAME_BYTES_MAX: usize = 1024;

/// Effect of a character on the object that may be a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallVerdict {
    /// The object is not complete, and may still be a call.
    More,
    /// The character closes the object, which is a call.
    Done,
    /// The object is no call. The character was not taken; [`CallObject::take_raw`] is the text that must come out
    /// before it.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Begin,
    KeyOrEnd,
    Key,
    InKey,
    Colon,
    ValueStart,
    InValue,
    AfterValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    /// The call's id.
    Id,
    /// Inside arguments written as a string with JSON in it.
    ArgumentsText,
    Other,
}

/// Scanner of one JSON object that may be a tool call, with a name and arguments in any order.
#[derive(Debug)]
pub(crate) struct CallObject {
    at: At,
    field: Field,
    value: JsonScan,
    /// Key or value being collected, as written.
    written: String,
    name: Option<String>,
    /// Id of the call; `None`: none so far.
    id: Option<String>,
    /// True if the format has ids.
    with_id: bool,
    /// Functions of the request, in formats without a mark in front of the object; `None`: the mark says that the object is a call.
    bare: Option<Arc<[CallableTool]>>,
    /// True once a member was the call's arguments.
    has_arguments: bool,
    /// Arguments that came before the name and wait for it.
    waiting: String,
    announced: bool,
    complete: bool,
    /// Text since the object began that has not come out in any form.
    raw: String,
}

impl CallObject {
    pub(crate) fn new() -> Self {
        Self {
            at: At::Begin,
            field: Field::Other,
            value: JsonScan::new(),
            written: String::new(),
            name: None,
            id: None,
            with_id: false,
            bare: None,
            has_arguments: false,
            waiting: String::new(),
            announced: false,
            complete: false,
            raw: String::new(),
        }
    }

    /// Creates a scanner for a format that writes an `id` of each call.
    pub(crate) fn with_id() -> Self {
        Self { with_id: true, ..Self::new() }
    }

    /// Creates a scanner for an object that no mark tells from an answer in JSON: a call only with arguments, and with the name of one of `tools`
    /// unless there are none.
    pub(crate) fn bare(tools: &Arc<[CallableTool]>) -> Self {
        Self { bare: Some(tools.clone()), ..Self::new() }
    }

    /// Returns true if the start of the call has been emitted.
    pub(crate) fn is_announced(&self) -> bool {
        self.announced
    }

    /// Returns true if arguments are being emitted as they come, so that no text is held.
    pub(crate) fn is_streaming(&self) -> bool {
        self.announced && !self.complete
    }

    /// Takes the next character of the object; arguments that can be told go to `out`.
    pub(crate) fn push(&mut self, c: char, out: &mut Pieces) -> CallVerdict {
        let blank = c.is_ascii_whitespace();
        let ok = match self.at {
            At::InKey => self.key(c),
            At::InValue => return self.in_value(c, out),
            At::ValueStart if !blank => return self.value_start(c, out),
            _ if blank => true,
            At::Begin => self.step(c == '{', At::KeyOrEnd),
            At::KeyOrEnd | At::AfterValue if c == '}' => return self.close(out),
            At::KeyOrEnd | At::Key => {
                self.value = JsonScan::new();
                self.written.clear();
                let opened = c == '"' && self.key(c);
                self.step(opened, At::InKey)
            }
            At::Colon => self.step(c == ':', At::ValueStart),
            At::AfterValue => self.step(c == ',', At::Key),
            At::ValueStart => false,
        };
        if ok { self.keep(c) } else { CallVerdict::Bad }
    }

    fn step(&mut self, ok: bool, next: At) -> bool {
        if ok {
            self.at = next;
        }
        ok
    }

    fn keep(&mut self, c: char) -> CallVerdict {
        self.raw.push(c);
        CallVerdict::More
    }

    fn key(&mut self, c: char) -> bool {
        self.written.push(c);
        match self.value.push(c) {
            Verdict::More => self.written.len() <= NAME_BYTES_MAX,
            Verdict::End => {
                self.field = match serde_json::from_str::<String>(&self.written).as_deref() {
                    Ok("name") if self.name.is_none() => Field::Name,
                    Ok("id") if self.with_id && self.id.is_none() && !self.announced => Field::Id,
                    Ok("arguments" | "parameters") if !self.complete && self.waiting.is_empty() => Field::Arguments,
                    _ => Field::Other,
                };
                self.has_arguments |= self.field == Field::Arguments;
                self.at = At::Colon;
                true
            }
            Verdict::EndBefore | Verdict::Bad => false,
        }
    }

    fn value_start(&mut self, c: char, out: &mut Pieces) -> CallVerdict {
        self.value = JsonScan::new();
        self.written.clear();
        match (self.field, c) {
            (Field::Name, '"') | (Field::Arguments, '{') | (Field::Other, _) => {}
            (Field::Id, '"') => {}
            (Field::Id, _) => self.field = Field::Other,
            (Field::Arguments, '"') => self.field = Field::ArgumentsText,
            // `"arguments": null` counts as no arguments.
            (Field::Arguments, 'n') => self.field = Field::Other,
            _ => return CallVerdict::Bad,
        }
        self.at = At::InValue;
        self.in_value(c, out)
    }

    fn in_value(&mut self, c: char, out: &mut Pieces) -> CallVerdict {
        let verdict = self.value.push(c);
        match (verdict, self.field) {
            (Verdict::Bad, _) => return CallVerdict::Bad,
            (Verdict::EndBefore, _) => {
                self.at = At::AfterValue;
                return self.push(c, out);
            }
            (_, Field::Arguments) => return self.argument(c, verdict == Verdict::End, out),
            (_, Field::Other) => {}
            (_, Field::Name | Field::Id | Field::ArgumentsText) => {
                self.written.push(c);
                match self.field {
                    Field::Name if self.written.len() > NAME_BYTES_MAX => return CallVerdict::Bad,
                    // An id of such a length is none.
                    Field::Id if self.written.len() > NAME_BYTES_MAX => self.field = Field::Other,
                    _ => {}
                }
            }
        }
        if verdict == Verdict::End {
            self.at = At::AfterValue;
            if !self.collected(c, out) {
                return CallVerdict::Bad;
            }
            if self.field != Field::Other && self.complete {
                // The announcement took `raw`, which contains this character.
                return CallVerdict::More;
            }
        }
        self.keep(c)
    }

    /// Handles a character of the arguments: emitted, or held until the name is known.
    fn argument(&mut self, c: char, last: bool, out: &mut Pieces) -> CallVerdict {
        if let Some(name) = self.name.as_deref() {
            if !self.announced {
                out.call_start(name, self.id.take());
                self.announced = true;
                self.raw.clear();
            }
            out.call_arguments(c.encode_utf8(&mut [0; 4]));
            if last {
                self.complete = true;
                out.call_end();
            }
        } else {
            self.waiting.push(c);
            self.raw.push(c);
        }
        if last {
            self.at = At::AfterValue;
        }
        CallVerdict::More
    }

    /// Handles a complete name, or complete arguments in a string.
    fn collected(&mut self, _last: char, out: &mut Pieces) -> bool {
        if self.field == Field::Other {
            return true;
        }
        let Ok(text) = serde_json::from_str::<String>(&self.written) else { return false };
        if self.field == Field::Name {
            let is_known = |tools: &Arc<[CallableTool]>| tools.is_empty() || tools.iter().any(|tool| tool.name == text);
            if text.is_empty() || !self.bare.as_ref().is_none_or(is_known) {
                return false;
            }
            self.name = Some(text);
        } else if self.field == Field::Id {
            self.id = Some(text).filter(|id| !id.is_empty());
        } else {
            let object = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&text);
            if object.is_err() {
                return false;
            }
            self.waiting = text;
        }
        if let Some(name) = self.name.as_deref()
            && !self.waiting.is_empty()
        {
            out.call_start(name, self.id.take());
            out.call_arguments(&std::mem::take(&mut self.waiting));
            out.call_end();
            self.announced = true;
            self.complete = true;
            self.raw.clear();
        }
        true
    }

    fn close(&mut self, out: &mut Pieces) -> CallVerdict {
        let Some(name) = self.name.as_deref().filter(|_| self.bare.is_none() || self.has_arguments) else {
            return CallVerdict::Bad;
        };
        if !self.announced {
            out.call_start(name, self.id.take());
            out.call_arguments("{}");
            out.call_end();
        }
        CallVerdict::Done
    }

    /// Takes the text that must come out when the call is given up: all of it before the announcement, only the part
    /// behind the arguments later (nothing if that is blank).
    pub(crate) fn take_raw(&mut self) -> String {
        let raw = std::mem::take(&mut self.raw);
        if self.announced && raw.trim().is_empty() { String::new() } else { raw }
    }
}
