//! Items converted into messages: consecutive reasoning, text and calls of the assistant form one turn, as in chat
//! completions.

use std::collections::HashMap;

use super::request::instruction;
use crate::openai::messages::{self, Content};
use crate::packed_thinking::{Thought, packed};
use crate::reasoning_maker::from_responses_client;
use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields::{self, bounded};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, short};
use penstock_types::request::{Message, Role, ToolCall};

/// Messages under construction from the items of `input`, several of which may form one message.
pub(super) struct Turns<'a> {
    bounds: &'a Bounds,
    messages: Vec<Message>,
    /// True if the last message is the assistant's and may continue.
    open: bool,
    /// Reasoning of the last message, each item with its own signature, until the message is complete.
    thoughts: Vec<Thought>,
    /// Items of earlier turns by their id, for references.
    known: HashMap<String, &'a str>,
    /// Number of items so far, those of earlier turns included.
    items: usize,
    /// Bytes of items that references may still repeat: each item of an earlier turn once.
    repeatable: usize,
}

/// Most items of a request and its earlier turns: reasoning, text and calls of one message are items of their own.
const ITEMS_PER_MESSAGE: usize = 4;

impl<'a> Turns<'a> {
    pub(super) fn new(bounds: &'a Bounds) -> Self {
        let (messages, thoughts, known) = (Vec::new(), Vec::new(), HashMap::new());
        Self { bounds, messages, open: false, thoughts, known, items: 0, repeatable: 0 }
    }

    /// Reads `instructions`: JSON text of a string, or of a list of items.
    pub(super) fn instructions(&mut self, json: &str) -> Result<(), Fault> {
        let mut reader = Reader::new(json.as_bytes())?;
        if reader.kind()? == Kind::String {
            self.messages.push(instruction(fields::text(&mut reader)?));
            return Ok(());
        }
        self.list(&mut reader)
    }

    /// Reads the items of an earlier turn, input or output.
    pub(super) fn earlier(&mut self, json: &'a [u8]) -> Result<(), Fault> {
        Reader::new(json)?.array(|reader, index| {
            bounded(self.items + index, self.bounds.messages_max * ITEMS_PER_MESSAGE, "items")?;
            let raw = reader.raw()?.text;
            // References are not recorded under their id: a lookup must lead to an item in one step.
            if let Head { id: Some(id), kind, has_role } = head(raw)?
                && kind.map_or(has_role, |kind| kind != "item_reference")
            {
                self.repeatable += raw.len();
                self.known.entry(id).or_insert(raw);
            }
            Ok(())
        })?;
        self.list(&mut Reader::new(json)?)
    }

    /// Reads `input`: JSON text of a string, or of a list of items.
    pub(super) fn input(&mut self, json: &str) -> Result<(), Fault> {
        let mut reader = Reader::new(json.as_bytes())?;
        if reader.kind()? == Kind::String {
            let content = Some(fields::text(&mut reader)?);
            self.push(Message { role: Role::User, content, ..Message::default() });
            return Ok(());
        }
        self.list(&mut reader)
    }

    /// The messages; at least one besides instructions is demanded.
    pub(super) fn finish(mut self) -> Result<Vec<Message>, Fault> {
        self.settle();
        if self.messages.iter().all(|message| message.role == Role::System) {
            return Err(Fault::invalid("must hold at least one message"));
        }
        Ok(self.messages)
    }

    fn list(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        reader.array(|reader, index| {
            bounded(self.messages.len(), self.bounds.messages_max, "messages")?;
            bounded(self.items, self.bounds.messages_max * ITEMS_PER_MESSAGE, "items")?;
            self.items += 1;
            reader.expect(Kind::Object).at(index)?;
            let raw = reader.raw()?.text;
            self.item(raw).at(index)
        })
    }

    fn item(&mut self, raw: &str) -> Result<(), Fault> {
        let Head { kind, id, has_role } = head(raw)?;
        let mut reader = Reader::new(raw.as_bytes())?;
        match kind.as_deref() {
            Some("message") => self.message(&mut reader),
            None if has_role => self.message(&mut reader),
            Some("function_call") => self.function_call(&mut reader),
            Some("function_call_output") => self.function_call_output(&mut reader),
            Some("reasoning") => self.reasoning(&mut reader),
            Some("item_reference") | None => match id {
                Some(id) => self.reference(&id),
                None => Err(Fault::invalid("required, but missing")).within("type"),
            },
            Some(other) => {
                let why = format!(
                    "items of type \"{}\" are not built; message, function_call, function_call_output and reasoning are",
                    short(other)
                );
                Err(Fault::of(ApiErrorKind::UnsupportedValue, why)).within("type")
            }
        }
    }

    fn reference(&mut self, id: &str) -> Result<(), Fault> {
        match self.known.get(id) {
            Some(raw) => {
                let raw = *raw;
                self.repeatable = self.repeatable.checked_sub(raw.len()).ok_or_else(|| {
                    Fault::of(
                        ApiErrorKind::TooLarge,
                        "references repeat more than all earlier items together".to_owned(),
                    )
                })?;
                self.item(raw)
            }
            None => {
                let why = format!("no item \"{}\" is known here; send the item itself", short(id));
                Err(Fault::of(ApiErrorKind::UnsupportedValue, why)).within("id")
            }
        }
    }

    fn message(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        const ROLES: &[(&str, Role)] = &[
            ("user", Role::User),
            ("assistant", Role::Assistant),
            ("system", Role::System),
            ("developer", Role::System),
        ];
        let (mut role, mut content) = (None, None);
        let bounds = self.bounds;
        each(reader, bounds, |reader, key| {
            match key {
                "role" => role = Some(fields::word(reader, ROLES)?),
                "content" => content = Some(messages::content(reader, bounds)?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let role = required(role, "role")?;
        let Content { text, parts } = required(content, "content")?;
        if !parts.is_empty() && role != Role::User {
            return Err(Fault::invalid("images are only allowed in messages of the user and of tools"))
                .within("content");
        }
        if role != Role::Assistant {
            self.push(Message { role, content: Some(text), parts, ..Message::default() });
            return Ok(());
        }
        let message = self.assistant(|message| message.content.is_none());
        message.content = Some(text);
        Ok(())
    }

    fn function_call(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let (mut id, mut name, mut arguments, mut signature) = (None, None, None, None);
        let bounds = self.bounds;
        each(reader, bounds, |reader, key| {
            match key {
                "call_id" => id = Some(fields::name(reader, bounds.name_chars_max)?),
                "name" => name = Some(fields::name(reader, bounds.name_chars_max)?),
                "arguments" => arguments = Some(fields::text(reader)?),
                "extra_content" => signature = messages::thought_signature(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let (id, name) = (required(id, "call_id")?, required(name, "name")?);
        let arguments = required(arguments, "arguments")?;
        let calls_max = bounds.tool_calls_max;
        let message = self.assistant(|_| true);
        bounded(message.tool_calls.len(), calls_max, "tool calls")?;
        message.tool_calls.push(ToolCall { id, name, arguments, signature });
        Ok(())
    }

    fn function_call_output(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let (mut id, mut output) = (None, None);
        let bounds = self.bounds;
        each(reader, bounds, |reader, key| {
            match key {
                "call_id" => id = Some(fields::name(reader, bounds.name_chars_max)?),
                "output" => output = Some(messages::content(reader, bounds)?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let tool_call_id = Some(required(id, "call_id")?);
        let Content { text, parts } = required(output, "output")?;
        self.push(Message { role: Role::Tool, content: Some(text), parts, tool_call_id, ..Message::default() });
        Ok(())
    }

    /// Reads a reasoning item. `content` wins over `summary`; `encrypted_content` is the signature that the provider
    /// wants back.
    fn reasoning(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let (mut content, mut summary, mut signature) = (String::new(), String::new(), None);
        let bounds = self.bounds;
        each(reader, bounds, |reader, key| {
            match key {
                "content" => texts(reader, bounds, "", &mut content)?,
                "summary" => texts(reader, bounds, "\n\n", &mut summary)?,
                "encrypted_content" => signature = Some(from_responses_client(fields::text(reader)?)),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let text = if content.is_empty() { summary } else { content };
        self.assistant(|message| message.content.is_none() && message.tool_calls.is_empty());
        match (signature, self.thoughts.last_mut()) {
            (Some(signature), _) => self.thoughts.push(Thought::signed(text, signature)),
            (None, Some(Thought::Plain { text: before, signature: None })) => before.push_str(&text),
            (None, _) => self.thoughts.push(Thought::Plain { text, signature: None }),
        }
        Ok(())
    }

    /// Puts the reasoning into the message that it belongs to, the last one.
    fn settle(&mut self) {
        let thoughts = std::mem::take(&mut self.thoughts);
        if let Some(message) = self.messages.last_mut().filter(|_| !thoughts.is_empty()) {
            (message.reasoning, message.reasoning_signature) = packed(thoughts);
        }
    }

    /// The assistant's open message, if it `fits`, or a new one.
    fn assistant(&mut self, fits: impl FnOnce(&Message) -> bool) -> &mut Message {
        if !(self.open && self.messages.last().is_some_and(fits)) {
            self.push(Message { role: Role::Assistant, ..Message::default() });
        }
        self.messages.last_mut().expect("one was pushed if there was none")
    }

    fn push(&mut self, message: Message) {
        self.settle();
        self.open = message.role == Role::Assistant;
        self.messages.push(message);
    }
}

/// Fields that decide how an item is read.
pub(super) struct Head {
    pub(super) kind: Option<String>,
    pub(super) id: Option<String>,
    pub(super) has_role: bool,
}

pub(super) fn head(raw: &str) -> Result<Head, Fault> {
    let mut head = Head { kind: None, id: None, has_role: false };
    Reader::new(raw.as_bytes())?.object(|reader, key| {
        match &*key {
            "type" if reader.kind()? == Kind::String => head.kind = Some(fields::text(reader)?),
            "id" if reader.kind()? == Kind::String => head.id = Some(fields::text(reader)?),
            _ => {
                head.has_role |= key == "role";
                reader.skip()?;
            }
        }
        Ok(())
    })?;
    Ok(head)
}

/// Reads an item's fields, null values left out.
fn each(
    reader: &mut Reader<'_>,
    bounds: &Bounds,
    mut field: impl FnMut(&mut Reader<'_>, &str) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        field(reader, &key).within(&key)
    })
}

fn required<T>(value: Option<T>, name: &str) -> Result<T, Fault> {
    value.ok_or_else(|| Fault::invalid("required, but missing")).within(name)
}

/// Joins the `text` of each element.
fn texts(reader: &mut Reader<'_>, bounds: &Bounds, between: &str, out: &mut String) -> Result<(), Fault> {
    reader.array(|reader, index| {
        bounded(index, bounds.parts_max, "parts")?;
        let mut text = None;
        reader.object(|reader, key| {
            if key == "text" && reader.kind()? == Kind::String {
                text = Some(reader.string()?);
                return Ok(());
            }
            reader.skip()
        })?;
        if let Some(text) = text {
            if !out.is_empty() {
                out.push_str(between);
            }
            out.push_str(&text);
        }
        Ok(())
    })
}
