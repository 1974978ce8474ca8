//! `contents` and `systemInstruction`: turns become messages, and each answer to a call gets the id of its call.
//!
//! Contents of the model in a row are one turn: Google's SDKs keep each chunk of a streamed answer as a content of its own.
//!
//! Google allows a call without an id; every other API needs one. A call without an id gets `call_N`, and an answer
//! without one belongs to the oldest unanswered call of its function.

use super::fields::{list, object, word};
use super::parts::{Part, Piece, Response, part};
use crate::packed_thinking::{Thought, packed};
use penstock_types::Bounds;
use penstock_types::fields::bounded;
use penstock_types::json::{Fault, Reader, Within, short};
use penstock_types::request::{self, ImageSource, Message, Role, ToolCall};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Speaker {
    User,
    Model,
}

/// Speakers of a turn. `function` is Google's former role for answers to calls, which may also stand in a user's turn.
const SPEAKERS: &[(&str, Speaker)] = &[("user", Speaker::User), ("model", Speaker::Model), ("function", Speaker::User)];

/// Most contents of one message, on average: chunks of a streamed answer.
const CONTENTS_PER_MESSAGE: usize = 16;

/// Reads the `contents` list into messages.
pub(super) fn contents(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Message>, Fault> {
    let mut conversation = Conversation::default();
    list(reader, bounds.messages_max * CONTENTS_PER_MESSAGE, "contents", |reader| {
        let (speaker, parts) = content(reader, bounds)?;
        match speaker {
            // A content without parts says nothing and ends no turn.
            _ if parts.is_empty() => {}
            Speaker::User => conversation.user(parts, bounds)?,
            Speaker::Model => conversation.model(parts, bounds)?,
        }
        bounded(conversation.count().saturating_sub(1), bounds.messages_max, "messages")
    })?;
    let messages = conversation.finish();
    if messages.is_empty() {
        return Err(Fault::invalid("must hold at least one content with a part"));
    }
    Ok(messages)
}

/// Reads `systemInstruction`: text only. `None` where the text is empty.
pub(super) fn system(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Option<Message>, Fault> {
    let text = text_of(reader, bounds)?;
    Ok((!text.is_empty()).then(|| Message { role: Role::System, content: Some(text), ..Message::default() }))
}

/// Reads a content that may have text parts only, and joins their texts.
pub(super) fn text_of(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    let mut text = String::new();
    let mut parts = |reader: &mut Reader<'_>| {
        list(reader, bounds.parts_max, "parts", |reader| match part(reader, bounds)?.piece {
            Piece::Text { text: more, .. } => {
                text.push_str(&more);
                Ok(())
            }
            _ => Err(Fault::invalid("only text is allowed here")),
        })
    };
    object(reader, bounds.inner_fields_max, |reader, key| if key == "parts" { parts(reader) } else { reader.skip() })?;
    Ok(text)
}

fn content(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<(Speaker, Vec<Part>), Fault> {
    let (mut speaker, mut all) = (Speaker::User, Vec::new());
    object(reader, bounds.inner_fields_max, |reader, key| match key {
        "role" => {
            speaker = word(reader, SPEAKERS)?;
            Ok(())
        }
        "parts" => list(reader, bounds.parts_max, "parts", |reader| {
            all.push(part(reader, bounds)?);
            Ok(())
        }),
        _ => reader.skip(),
    })?;
    Ok((speaker, all))
}

#[derive(Default)]
struct Conversation {
    messages: Vec<Message>,
    /// The model's turn, while it lasts.
    turn: Option<ModelTurn>,
    /// What the user has said since the model's last turn, to stand behind the answers to its calls.
    said: Vec<Message>,
    /// Calls without an answer so far: id and function.
    open: std::collections::VecDeque<(String, String)>,
    calls: usize,
}

impl Conversation {
    /// Number of messages so far.
    fn count(&self) -> usize {
        self.messages.len() + usize::from(self.turn.is_some()) + self.said.len()
    }

    fn finish(mut self) -> Vec<Message> {
        self.messages.extend(self.turn.map(ModelTurn::message));
        self.messages.append(&mut self.said);
        self.messages
    }

    /// Reads a content of the user: first the answers to calls, since they must follow the calls, then the user's own
    /// parts.
    fn user(&mut self, parts: Vec<Part>, bounds: &Bounds) -> Result<(), Fault> {
        self.messages.extend(self.turn.take().map(ModelTurn::message));
        let mut said = Said::default();
        for (index, part) in parts.into_iter().enumerate() {
            match part.piece {
                Piece::Text { text, .. } => said.text(text),
                Piece::Image(source) => said.image(source),
                Piece::Response(response) => {
                    bounded(self.count(), bounds.messages_max, "messages")?;
                    let message = self.answer(response).at(index).within("parts")?;
                    self.messages.push(message);
                }
                Piece::Call { .. } => {
                    let wrong = Fault::invalid("only allowed in contents of the model");
                    return Err(wrong).within("functionCall").at(index).within("parts");
                }
            }
        }
        if !said.is_empty {
            self.said.push(said.message(Role::User));
        }
        Ok(())
    }

    /// Reads a content of the model into its turn.
    fn model(&mut self, parts: Vec<Part>, bounds: &Bounds) -> Result<(), Fault> {
        self.messages.append(&mut self.said);
        let turn = self.turn.get_or_insert_default();
        for (index, Part { piece, signature }) in parts.into_iter().enumerate() {
            match piece {
                Piece::Text { text, thought: true } => {
                    turn.think(text);
                    signature.into_iter().for_each(|signature| turn.sign(signature));
                }
                Piece::Text { text, thought: false } => {
                    // An empty text may only carry the signature.
                    if !text.is_empty() || signature.is_none() {
                        turn.text.get_or_insert_default().push_str(&text);
                    }
                    signature.into_iter().for_each(|signature| turn.sign(signature));
                }
                Piece::Call { id, name, arguments } => {
                    bounded(turn.calls.len(), bounds.tool_calls_max, "calls")?;
                    let id = id.unwrap_or_else(|| format!("call_{}", self.calls));
                    self.calls += 1;
                    self.open.push_back((id.clone(), name.clone()));
                    turn.calls.push(ToolCall { id, name, arguments, signature });
                }
                Piece::Image(_) | Piece::Response(_) => {
                    let wrong = Fault::invalid("only allowed in contents of the user");
                    return Err(wrong).at(index).within("parts");
                }
            }
        }
        Ok(())
    }

    /// Makes the message that answers a call.
    fn answer(&mut self, response: Response) -> Result<Message, Fault> {
        let Response { id, name, content, failed, images } = response;
        let at = self.open.iter().position(|(open, function)| match &id {
            Some(id) => open == id,
            None => *function == name,
        });
        let id = match (at.and_then(|at| self.open.remove(at)), id) {
            (Some((id, _)), _) | (None, Some(id)) => id,
            (None, None) => {
                let why = format!("no call of \"{}\" waits for an answer", short(&name));
                return Err(Fault::invalid(why)).within("functionResponse");
            }
        };
        let mut said = Said::default();
        said.text(content);
        images.into_iter().for_each(|image| said.image(image));
        let message = said.message(Role::Tool);
        Ok(Message { name: Some(name), tool_call_id: Some(id), tool_failed: failed, ..message })
    }
}

/// Turn of the model, in one or more contents: text, thoughts and calls each keep their order.
#[derive(Default)]
struct ModelTurn {
    /// Text of the turn; `None` until a text was read, even an empty one.
    text: Option<String>,
    thoughts: Vec<Thought>,
    calls: Vec<ToolCall>,
}

impl ModelTurn {
    /// Adds a text of reasoning: to the last thought, unless that one is complete with its signature.
    fn think(&mut self, text: String) {
        match self.thoughts.last_mut() {
            Some(Thought::Plain { text: before, signature: None }) => before.push_str(&text),
            _ if text.is_empty() => {}
            _ => self.thoughts.push(Thought::Plain { text, signature: None }),
        }
    }

    /// Adds a signature: of the last thought, or of one without a text where that one has its own.
    fn sign(&mut self, signature: String) {
        match (self.thoughts.last_mut(), Thought::signed(String::new(), signature)) {
            (Some(Thought::Plain { signature: place @ None, .. }), Thought::Plain { signature, .. }) => {
                *place = signature;
            }
            (_, thought) => self.thoughts.push(thought),
        }
    }

    fn message(self) -> Message {
        let Self { text, thoughts, calls } = self;
        let (reasoning, reasoning_signature) = packed(thoughts);
        // The empty text of a stream's last chunk is no content beside calls.
        let mut content = text.filter(|text| !text.is_empty() || calls.is_empty());
        if content.is_none() && calls.is_empty() && reasoning.is_none() {
            content = Some(String::new());
        }
        Message {
            role: Role::Assistant,
            content,
            reasoning,
            reasoning_signature,
            tool_calls: calls,
            ..Message::default()
        }
    }
}

/// Text and images of one message.
struct Said {
    text: String,
    /// All parts, used once one of them is an image.
    parts: Vec<request::Part>,
    is_empty: bool,
}

impl Default for Said {
    fn default() -> Self {
        Self { text: String::new(), parts: Vec::new(), is_empty: true }
    }
}

impl Said {
    fn text(&mut self, text: String) {
        self.is_empty = false;
        self.text.push_str(&text);
        if !self.parts.is_empty() {
            self.parts.push(request::Part::Text(text));
        }
    }

    fn image(&mut self, source: ImageSource) {
        self.is_empty = false;
        if self.parts.is_empty() && !self.text.is_empty() {
            self.parts.push(request::Part::Text(self.text.clone()));
        }
        self.parts.push(request::Part::Image { source, detail: None });
    }

    fn message(self, role: Role) -> Message {
        Message { role, content: Some(self.text), parts: self.parts, ..Message::default() }
    }
}
