//! Items of conversations: bodies that add them, and the form in which a conversation shows them.
//!
//! An item of a conversation has an id of the gateway's own, a type, and, for messages, its content as a list of parts;
//! everything else is as the client or the model wrote it.

use bytes::{BufMut, Bytes, BytesMut};

use super::input::{self, Turns};
use crate::openai::kept::metadata;
use crate::openai::read_body;
use penstock_types::Bounds;
use penstock_types::error::ApiError;
use penstock_types::fields::bounded;
use penstock_types::json::{Fault, Kind, Reader, Within};
use penstock_types::write;

/// Most items that one request may add to a conversation, as the API has it.
const ITEMS_MAX: usize = 20;

/// Item of a conversation with its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedItem {
    /// Id of the item, which its JSON repeats.
    pub id: String,
    /// The item, JSON text.
    pub json: Bytes,
}

/// Body of a request that makes a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewConversation {
    /// Metadata of the client: a compact JSON object of strings, names sorted.
    pub metadata: String,
    /// Items that the conversation begins with.
    pub items: Vec<NamedItem>,
}

/// Maker of ids: a new one for each call, behind the given prefix.
pub type MakeId<'a> = &'a mut dyn FnMut(&str) -> String;

/// Reads the body of a request that makes a conversation; an empty body makes an empty one.
///
/// # Errors
/// The body is no JSON object, or its items or metadata break a bound or are unsupported.
pub fn decode_conversation(body: &[u8], bounds: &Bounds, make: MakeId<'_>) -> Result<NewConversation, ApiError> {
    let mut new = NewConversation { metadata: "{}".to_owned(), items: Vec::new() };
    if body.trim_ascii().is_empty() {
        return Ok(new);
    }
    let read = read_body(body, bounds, |reader, key| {
        match key {
            "metadata" => new.metadata = metadata(reader, bounds)?,
            "items" => new.items = new_items(reader, bounds, make)?,
            _ => reader.skip()?,
        }
        Ok(())
    });
    read.map_err(Fault::into_error).map(|()| new)
}

/// Reads the body of a request that adds items to a conversation.
///
/// # Errors
/// As [`decode_conversation`]; at least one item is demanded.
pub fn decode_items(body: &[u8], bounds: &Bounds, make: MakeId<'_>) -> Result<Vec<NamedItem>, ApiError> {
    let mut items = None;
    let read = read_body(body, bounds, |reader, key| {
        match key {
            "items" => items = Some(new_items(reader, bounds, make)?),
            _ => reader.skip()?,
        }
        Ok(())
    });
    let some = |items: Option<Vec<NamedItem>>| {
        items.filter(|items| !items.is_empty()).ok_or_else(|| Fault::invalid("at least one item is needed"))
    };
    read.and_then(|()| some(items).within("items")).map_err(Fault::into_error)
}

/// Items of a list as a conversation keeps them, each with a new id; references to other items are left out, since what
/// they refer to is there. `list` was read before as the input of a request.
///
/// # Errors
/// The list is none.
pub fn named_items(list: &[u8], make: MakeId<'_>) -> Result<Vec<NamedItem>, ApiError> {
    named(list, make).map_err(Fault::into_error)
}

/// Items of an answer, which have ids already.
///
/// # Errors
/// The list is none, or an item of it has no id.
pub fn own_items(list: &[u8]) -> Result<Vec<NamedItem>, ApiError> {
    let mut items = Vec::new();
    let read = Reader::new(list).and_then(|mut reader| {
        reader.array(|reader, index| {
            let raw = reader.raw()?.text;
            let id = input::head(raw)?.id.ok_or_else(|| Fault::invalid("required, but missing")).within("id");
            items.push(NamedItem { id: id.at(index)?, json: Bytes::copy_from_slice(raw.as_bytes()) });
            Ok(())
        })
    });
    read.map_err(Fault::into_error).map(|()| items)
}

fn new_items(reader: &mut Reader<'_>, bounds: &Bounds, make: MakeId<'_>) -> Result<Vec<NamedItem>, Fault> {
    reader.expect(Kind::Array)?;
    let list = reader.raw()?.text;
    Reader::new(list.as_bytes())?.array(|reader, index| {
        bounded(index, ITEMS_MAX, "items")?;
        reader.skip()
    })?;
    // Everything that a request could not send as input is refused here, not when the conversation is continued.
    Turns::new(bounds).input(list)?;
    named(list.as_bytes(), make)
}

fn named(list: &[u8], make: MakeId<'_>) -> Result<Vec<NamedItem>, Fault> {
    let mut items = Vec::new();
    Reader::new(list)?.array(|reader, _| {
        let raw = reader.raw()?.text;
        let head = input::head(raw)?;
        let kind = match (head.kind.as_deref(), head.has_role) {
            (Some("item_reference"), _) | (None, false) => return Ok(()),
            (Some(kind), _) => kind.to_owned(),
            (None, true) => "message".to_owned(),
        };
        let id = make(match kind.as_str() {
            "message" => "msg_",
            "function_call" => "fc_",
            "function_call_output" => "fco_",
            "reasoning" => "rs_",
            _ => "item_",
        });
        items.push(NamedItem { json: shown(raw, &id, &kind)?, id });
        Ok(())
    })?;
    Ok(items)
}

/// JSON of an item as a conversation shows it.
fn shown(raw: &str, id: &str, kind: &str) -> Result<Bytes, Fault> {
    let mut out = BytesMut::with_capacity(raw.len() + 128);
    out.put_slice(b"{\"id\":");
    write::string(&mut out, id);
    out.put_slice(b",\"type\":");
    write::string(&mut out, kind);
    let (mut content, mut is_said, mut status) = (None, false, None);
    let mut rest = BytesMut::new();
    Reader::new(raw.as_bytes())?.object(|reader, key| {
        match &*key {
            "id" | "type" => reader.skip()?,
            "status" => status = Some(reader.raw()?.text),
            "content" if kind == "message" => content = Some((reader.kind()?, reader.raw()?.text)),
            _ => {
                let text = reader.raw()?.text;
                is_said |= key == "role" && text == "\"assistant\"";
                rest.put_u8(b',');
                write::string(&mut rest, &key);
                rest.put_u8(b':');
                rest.put_slice(text.as_bytes());
            }
        }
        Ok(())
    })?;
    if let Some(status) = status.or_else(|| (kind != "reasoning").then_some("\"completed\"")) {
        out.put_slice(b",\"status\":");
        out.put_slice(status.as_bytes());
    }
    out.put_slice(&rest);
    match content {
        Some((Kind::String, text)) => {
            let (kind, end): (&[u8], &[u8]) = match is_said {
                true => (b"output_text", br#","annotations":[],"logprobs":[]}]"#),
                false => (b"input_text", b"}]"),
            };
            out.put_slice(br#","content":[{"type":""#);
            out.put_slice(kind);
            out.put_slice(br#"","text":"#);
            out.put_slice(text.as_bytes());
            out.put_slice(end);
        }
        Some((_, text)) => {
            out.put_slice(b",\"content\":");
            out.put_slice(text.as_bytes());
        }
        None => {}
    }
    out.put_u8(b'}');
    Ok(out.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted() -> impl FnMut(&str) -> String {
        let mut last = 0;
        move |prefix| {
            last += 1;
            format!("{prefix}{last}")
        }
    }

    #[track_caller]
    fn check(items: &str, expected: &[&str]) {
        let body = format!("{{\"items\":{items}}}");
        let items = decode_items(body.as_bytes(), &Bounds::default(), &mut counted()).expect(items);
        let said: Vec<_> = items.iter().map(|item| String::from_utf8_lossy(&item.json)).collect();
        assert_eq!(said, expected);
    }

    #[test]
    fn items_get_ids_types_and_parts() {
        check(
            r#"[{"role":"user","content":"a\n"}, {"type":"message","id":"mine","role":"assistant","content":"b"}]"#,
            &[
                r#"{"id":"msg_1","type":"message","status":"completed","role":"user","content":[{"type":"input_text","text":"a\n"}]}"#,
                r#"{"id":"msg_2","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"b","annotations":[],"logprobs":[]}]}"#,
            ],
        );
        check(
            r#"[{"type":"function_call","call_id":"c","name":"f","arguments":"{}","status":"incomplete"},
                {"type":"function_call_output","call_id":"c","output":"1"},
                {"type":"reasoning","summary":[]}]"#,
            &[
                r#"{"id":"fc_1","type":"function_call","status":"incomplete","call_id":"c","name":"f","arguments":"{}"}"#,
                r#"{"id":"fco_2","type":"function_call_output","status":"completed","call_id":"c","output":"1"}"#,
                r#"{"id":"rs_3","type":"reasoning","summary":[]}"#,
            ],
        );
    }

    #[test]
    fn bodies_are_read_or_refused_by_name() {
        let bounds = Bounds::default();
        let many = format!("{{\"items\":[{}]}}", vec![r#"{"role":"user","content":"a"}"#; 21].join(","));
        for (body, param) in [
            ("{}", Some("items")),
            (r#"{"items":[]}"#, Some("items")),
            (r#"{"items":"x"}"#, Some("items")),
            (r#"{"items":[{"role":"user"}]}"#, Some("items[0].content")),
            (r#"{"items":[{"type":"web_search_call"}]}"#, Some("items[0].type")),
            (r#"{"items":[{"type":"item_reference","id":"msg_1"}]}"#, Some("items[0].id")),
            (many.as_str(), Some("items")),
            ("[]", None),
        ] {
            let error = decode_items(body.as_bytes(), &bounds, &mut counted()).expect_err(body);
            assert_eq!(error.param.as_deref(), param, "{body}");
        }
        let made = |body: &str| decode_conversation(body.as_bytes(), &bounds, &mut counted());
        assert_eq!(made("").map(|new| new.metadata), Ok("{}".to_owned()));
        let new = made(r#"{"metadata":{"b":"1","a":"2"},"items":[{"role":"user","content":"x"}]}"#).expect("read");
        assert_eq!((new.metadata.as_str(), new.items.len()), (r#"{"a":"2","b":"1"}"#, 1));
        assert_eq!(made(r#"{"metadata":{"a":1}}"#).expect_err("no text").param.as_deref(), Some("metadata.a"));
    }

    #[test]
    fn what_was_sent_and_said_is_kept() {
        let sent = br#"[{"type":"item_reference","id":"msg_9"},{"id":"msg_9"},{"role":"user","content":"a"}]"#;
        let items = named_items(sent, &mut counted()).expect("a list");
        assert_eq!(items.iter().map(|item| item.id.as_str()).collect::<Vec<_>>(), ["msg_1"]);
        let said = own_items(br#"[{"type":"message","id":"msg_x_0"}]"#).expect("a list");
        assert_eq!(
            (said[0].id.as_str(), said[0].json.as_ref()),
            ("msg_x_0", br#"{"type":"message","id":"msg_x_0"}"#.as_slice())
        );
        assert!(own_items(b"[{}]").is_err() && own_items(b"{}").is_err());
    }
}
