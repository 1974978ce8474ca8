//! All texts in a request that somebody wrote.

use penstock_types::{Message, Part, Prompt, Request, Role};

/// Writer of a text in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The operator or application, in instructions to the model.
    System,
    /// The person; prompts of completions, inputs of embeddings, queries and documents too.
    User,
    /// The model, in earlier turns; its reasoning and its calls too.
    Assistant,
    /// A tool, in the result of a call.
    Tool,
}

impl From<Role> for Writer {
    fn from(role: Role) -> Self {
        match role {
            Role::System => Writer::System,
            Role::User => Writer::User,
            Role::Assistant => Writer::Assistant,
            Role::Tool => Writer::Tool,
        }
    }
}

/// Form of a text in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Plain text, replaced as it is.
    Plain,
    /// JSON text: a replacement in it must be escaped.
    Json,
}

/// Calls `see` with every text, in the order of the conversation. A message of several kinds of parts shows their
/// joined text and the parts.
pub fn each(request: &Request, see: &mut dyn FnMut(Writer, &str)) {
    match request {
        Request::Chat(chat) => chat.messages.iter().for_each(|message| each_of(message, see)),
        Request::Complete(complete) => {
            let texts = complete.prompts.iter().chain([]).filter_map(text_of);
            texts.chain(complete.suffix.as_deref()).for_each(|text| see(Writer::User, text));
        }
        Request::Embed(embed) => embed.inputs.iter().filter_map(text_of).for_each(|text| see(Writer::User, text)),
        Request::Rerank(rerank) => {
            let texts = std::iter::once(&rerank.query).chain(&rerank.documents);
            texts.for_each(|text| see(Writer::User, text));
        }
    }
}

fn text_of(prompt: &Prompt) -> Option<&str> {
    match prompt {
        Prompt::Text(text) => Some(text),
        Prompt::Tokens(_) => None,
    }
}

fn each_of(message: &Message, see: &mut dyn FnMut(Writer, &str)) {
    let writer = message.role.into();
    let parts = message.parts.iter().filter_map(|part| match part {
        Part::Text(text) => Some(text),
        Part::Image { .. } => None,
    });
    let texts = message.content.iter().chain(&message.reasoning).chain(parts);
    texts.chain(message.tool_calls.iter().map(|call| &call.arguments)).for_each(|text| see(writer, text));
}

/// Calls `edit` with every text, to change it in place.
pub fn change(request: &mut Request, edit: &mut dyn FnMut(Writer, Form, &mut String)) {
    let mut user = |text: &mut String| edit(Writer::User, Form::Plain, text);
    match request {
        Request::Chat(chat) => chat.messages.iter_mut().for_each(|message| change_in(message, edit)),
        Request::Complete(complete) => {
            complete.prompts.iter_mut().filter_map(text_mut).for_each(&mut user);
            complete.suffix.iter_mut().for_each(user);
        }
        Request::Embed(embed) => embed.inputs.iter_mut().filter_map(text_mut).for_each(user),
        Request::Rerank(rerank) => {
            user(&mut rerank.query);
            rerank.documents.iter_mut().for_each(user);
        }
    }
}

fn text_mut(prompt: &mut Prompt) -> Option<&mut String> {
    match prompt {
        Prompt::Text(text) => Some(text),
        Prompt::Tokens(_) => None,
    }
}

fn change_in(message: &mut Message, edit: &mut dyn FnMut(Writer, Form, &mut String)) {
    let writer = message.role.into();
    for text in message.content.iter_mut().chain(&mut message.reasoning) {
        edit(writer, Form::Plain, text);
    }
    for part in &mut message.parts {
        if let Part::Text(text) = part {
            edit(writer, Form::Plain, text);
        }
    }
    for call in &mut message.tool_calls {
        edit(writer, Form::Json, &mut call.arguments);
    }
}
