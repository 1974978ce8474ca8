//! All texts in a request that somebody wrote: in the conversation, in the tools, in the required form of the answer and
//! in the arguments of a template.
//!
//! Some are names: of functions, of properties in a schema, of its types and patterns. Something else refers to a name,
//! so names are shown and never changed. Not among the texts are ids, signatures, images, stop strings and words that the
//! answer must not contain, labels that do not reach the model (`user`, `prompt_cache_key`), and fields that are not
//! known here.

use penstock_types::json::{Kind, Reader};
use penstock_types::request::{ChatRequest, ResponseFormat, Tool};
use penstock_types::{Message, Part, Prompt, Request, Role};

use crate::json_texts::{self, Place};

/// Writer of a text in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The operator or application, in instructions to the model; tools, schemas and arguments of a template too.
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

/// Calls `see` with every text and every name: those of tools and schemas first, then the names of messages and calls, then
/// the texts in the order of the conversation. A message of several kinds of parts shows their joined text and the parts.
pub fn each(request: &Request, see: &mut dyn FnMut(Writer, &str)) {
    offered(request, &mut |_, text| see(Writer::System, text));
    if let Request::Chat(chat) = request {
        for message in &chat.messages {
            message.name.iter().for_each(|name| see(message.role.into(), name));
            message.tool_calls.iter().for_each(|call| see(message.role.into(), &call.name));
        }
    }
    said(request, see);
}

/// Calls `see` with every text of the conversation, or of the prompts, inputs and documents; tools and names are left
/// out.
pub fn said(request: &Request, see: &mut dyn FnMut(Writer, &str)) {
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

/// Calls `see` with every name: strings that [`change`] leaves as they are.
pub fn names(request: &Request, see: &mut dyn FnMut(Writer, &str)) {
    offered(request, &mut |is_name, text| {
        if is_name {
            see(Writer::System, text);
        }
    });
    if let Request::Chat(chat) = request {
        for message in &chat.messages {
            let called = message.name.iter().filter(|_| message.role == Role::Tool);
            let names = called.chain(message.tool_calls.iter().map(|call| &call.name));
            names.for_each(|name| see(message.role.into(), name));
        }
    }
}

/// Calls `see` with the texts of tools, of the required form and of template arguments; true for a name.
fn offered(request: &Request, see: &mut dyn FnMut(bool, &str)) {
    match request {
        Request::Chat(chat) => {
            chat.tools.iter().for_each(|tool| json_texts::each(&tool.json, Place::Tool, see));
            format(&chat.response_format, see);
            chat.template_kwargs.iter().for_each(|json| json_texts::each(json, Place::Data, see));
        }
        Request::Complete(complete) => format(&complete.response_format, see),
        Request::Embed(_) | Request::Rerank(_) => {}
    }
}

fn format(format: &ResponseFormat, see: &mut dyn FnMut(bool, &str)) {
    match format {
        ResponseFormat::Text | ResponseFormat::JsonObject => {}
        ResponseFormat::JsonSchema { name, description, schema, .. } => {
            see(true, name);
            description.iter().for_each(|text| see(false, text));
            json_texts::each(schema, Place::Schema, see);
        }
        ResponseFormat::Choice(choices) => choices.iter().for_each(|text| see(false, text)),
        ResponseFormat::Regex(text) | ResponseFormat::Grammar { text, .. } => see(true, text),
        ResponseFormat::StructuralTag(json) => json_texts::each(json, Place::Tag, see),
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

/// Calls `edit` with every text that is no name, to change it in place. What is offered comes first, since it stays the same
/// from turn to turn.
pub fn change(request: &mut Request, edit: &mut dyn FnMut(Writer, Form, &mut String)) {
    match request {
        Request::Chat(chat) => {
            change_offered(chat, &mut |text| edit(Writer::System, Form::Plain, text));
            chat.messages.iter_mut().for_each(|message| change_in(message, edit));
        }
        Request::Complete(complete) => {
            change_format(&mut complete.response_format, &mut |text| edit(Writer::System, Form::Plain, text));
            let mut user = |text: &mut String| edit(Writer::User, Form::Plain, text);
            complete.prompts.iter_mut().filter_map(text_mut).for_each(&mut user);
            complete.suffix.iter_mut().for_each(user);
        }
        Request::Embed(embed) => {
            embed.inputs.iter_mut().filter_map(text_mut).for_each(|text| edit(Writer::User, Form::Plain, text));
        }
        Request::Rerank(rerank) => {
            let texts = std::iter::once(&mut rerank.query).chain(&mut rerank.documents);
            texts.for_each(|text| edit(Writer::User, Form::Plain, text));
        }
    }
}

fn change_offered(chat: &mut ChatRequest, edit: &mut dyn FnMut(&mut String)) {
    chat.tools.iter_mut().for_each(|tool| change_tool(tool, edit));
    change_format(&mut chat.response_format, edit);
    if let Some(json) = &mut chat.template_kwargs {
        change_json(json, Place::Data, edit);
    }
}

fn change_json(json: &mut String, place: Place, edit: &mut dyn FnMut(&mut String)) {
    if let Some(changed) = json_texts::change(json, place, edit) {
        *json = changed;
    }
}

/// Changes the JSON of a tool, and takes its description and its schema from there, so that all three say the same.
fn change_tool(tool: &mut Tool, edit: &mut dyn FnMut(&mut String)) {
    let Some(json) = json_texts::change(&tool.json, Place::Tool, edit) else { return };
    let (mut description, mut parameters) = (None, None);
    let read = Reader::new(json.as_bytes()).and_then(|mut reader| {
        reader.object(|reader, key| {
            if key != "function" {
                return reader.skip();
            }
            reader.object(|reader, key| {
                match (&*key, reader.kind()?) {
                    ("description", Kind::String) => description = Some(reader.string()?.into_owned()),
                    ("parameters", Kind::Object) => parameters = Some(reader.raw()?.text.to_owned()),
                    _ => reader.skip()?,
                }
                Ok(())
            })
        })
    });
    if read.is_ok() {
        (tool.description, tool.parameters, tool.json) = (description, parameters, json);
    }
}

fn change_format(format: &mut ResponseFormat, edit: &mut dyn FnMut(&mut String)) {
    match format {
        ResponseFormat::JsonSchema { description, schema, .. } => {
            description.iter_mut().for_each(&mut *edit);
            change_json(schema, Place::Schema, edit);
        }
        ResponseFormat::StructuralTag(json) => change_json(json, Place::Tag, edit),
        ResponseFormat::Choice(choices) => {
            choices.iter_mut().for_each(edit);
            // No text may be there twice, and none may be empty.
            let mut seen = std::collections::HashSet::new();
            choices.retain(|text| !text.is_empty() && seen.insert(text.clone()));
            if choices.is_empty() {
                *format = ResponseFormat::Text;
            }
        }
        ResponseFormat::Text
        | ResponseFormat::JsonObject
        | ResponseFormat::Regex(_)
        | ResponseFormat::Grammar { .. } => {}
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
    // The name of a tool's message is that of a function.
    let name = message.name.iter_mut().filter(|_| message.role != Role::Tool);
    for text in name.chain(&mut message.content).chain(&mut message.reasoning) {
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

#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::sync::Arc;

    use penstock_types::Surface;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::{FakeHost, request};

    fn asked(extra: &Value) -> Request {
        let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi", "name": "ann" }] });
        body.as_object_mut().expect("a table").extend(extra.as_object().expect("a table").clone());
        request(Surface::Chat, &body, Arc::new(FakeHost::default())).request().expect("read").clone()
    }

    fn texts(request: &Request) -> Vec<String> {
        let mut out = Vec::new();
        each(request, &mut |_, text| out.push(text.to_owned()));
        out
    }

    #[test]
    fn a_changed_tool_says_the_same_in_all_its_forms() {
        let schema =
            json!({ "type": "object", "properties": { "city": { "type": "string", "description": "of the client" } } });
        let function =
            json!({ "name": "f", "description": "look up", "parameters": schema, "strict": false, "own": "x" });
        let mut request = asked(&json!({ "tools": [{ "type": "function", "function": function }] }));
        for text in ["look up", "of the client", "x", "f", "city", "ann", "hi"] {
            assert!(texts(&request).iter().any(|have| have == text), "{text}");
        }
        change(&mut request, &mut |_, _, text| *text = text.to_uppercase());
        let Request::Chat(chat) = &request else { panic!("a chat") };
        let tool = &chat.tools[0];
        let json: Value = serde_json::from_str(&tool.json).expect("JSON");
        assert_eq!(json["function"]["name"], "f");
        assert_eq!(json["function"]["own"], "X", "a field that is not known here stays, as a text");
        assert_eq!(json["function"]["description"].as_str(), tool.description.as_deref());
        let parameters: Value = serde_json::from_str(tool.parameters.as_deref().expect("a schema")).expect("JSON");
        assert_eq!(json["function"]["parameters"], parameters);
        assert_eq!(parameters["properties"]["city"], json!({ "type": "string", "description": "OF THE CLIENT" }));
        assert_eq!(chat.messages[0].name.as_deref(), Some("ANN"));
    }

    #[test]
    fn the_required_form_of_an_answer_is_read_and_stays_one() {
        let schema = json!({ "type": "object", "required": ["a"], "properties": { "a": { "enum": ["x", "y"] } } });
        let format =
            json!({ "type": "json_schema", "json_schema": { "name": "n", "description": "d", "schema": schema } });
        let mut request = asked(&json!({ "response_format": format }));
        change(&mut request, &mut |_, _, text| *text = "same".into());
        let Request::Chat(chat) = &request else { panic!("a chat") };
        let ResponseFormat::JsonSchema { name, description, schema, .. } = &chat.response_format else {
            panic!("a schema")
        };
        assert_eq!((name.as_str(), description.as_deref()), ("n", Some("same")));
        let expected = json!({ "type": "object", "required": ["a"], "properties": { "a": { "enum": ["same"] } } });
        assert_eq!(serde_json::from_str::<Value>(schema).expect("JSON"), expected);
        let mut format = ResponseFormat::Choice(vec!["a".into(), "b".into(), "c".into()]);
        change_format(&mut format, &mut |text| *text = if text == "c" { String::new() } else { "x".into() });
        assert_eq!(format, ResponseFormat::Choice(vec!["x".into()]));
    }

    #[test]
    fn names_are_what_a_change_leaves() {
        let calls = json!([{ "id": "1", "type": "function", "function": { "name": "g", "arguments": "{}" } }]);
        let messages = json!([{ "role": "user", "content": "hi" }, { "role": "assistant", "tool_calls": calls },
            { "role": "tool", "tool_call_id": "1", "content": "r" }]);
        let tools =
            json!([{ "type": "function", "function": { "name": "f", "parameters": { "properties": { "k": {} } } } }]);
        let mut request = asked(&json!({ "messages": messages, "tools": tools, "chat_template_kwargs": { "a": "v" } }));
        let named = |request: &Request| {
            let mut out = Vec::new();
            names(request, &mut |_, name| out.push(name.to_owned()));
            out
        };
        let before = named(&request);
        assert!(["f", "k", "g", "a"].iter().all(|name| before.iter().any(|have| have == name)), "{before:?}");
        change(&mut request, &mut |_, _, text| *text = "changed".into());
        assert_eq!(named(&request), before);
        let Request::Chat(chat) = &request else { panic!("a chat") };
        assert_eq!(chat.template_kwargs.as_deref(), Some(r#"{"a":"changed"}"#));
    }
}
