//! Items and messages of a stored request, as lists show them: the client's JSON text under an id.
//!
//! A list is read without building values, and only the entries of a page are written, so that a page costs memory in
//! proportion to the text that it shows.

use bytes::{BufMut, Bytes, BytesMut};

use penstock_types::error::ApiError;
use penstock_types::fields::bounded;
use penstock_types::json::{Fault, Kind, Reader};
use penstock_types::write;

/// Most entries of a stored list: more than a request may hold.
const ENTRIES_MAX: usize = 100_000;

/// Entry of a list with its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed<'a> {
    /// Id of the entry: its own, or one made of its place.
    pub id: String,
    /// JSON text of the entry, an object.
    raw: &'a str,
}

impl<'a> Listed<'a> {
    /// Entries of a list of input items of a response. An item without an id gets that of its place in the response
    /// `of`, the same each time.
    ///
    /// # Errors
    /// The text is no list of objects.
    pub fn items(list: &'a [u8], of: &str) -> Result<Vec<Self>, ApiError> {
        let own_or_place = |raw: &str, at: usize| {
            let mut own = None;
            Reader::new(raw.as_bytes())?.object(|reader, key| match key == "id" && reader.kind()? == Kind::String {
                true => reader.string().map(|id| own = Some(id.into_owned())),
                false => reader.skip(),
            })?;
            Ok(own.unwrap_or_else(|| format!("item_{of}_{at}")))
        };
        entries(list, own_or_place).map_err(Fault::into_error)
    }

    /// Entries of a list of messages of the chat completion `of`; the id of a message is made of its place.
    ///
    /// # Errors
    /// The text is no list of objects.
    pub fn messages(list: &'a [u8], of: &str) -> Result<Vec<Self>, ApiError> {
        entries(list, |_, at| Ok(format!("{of}-{at}"))).map_err(Fault::into_error)
    }

    /// JSON of an input item: its fields with the id behind them.
    ///
    /// # Errors
    /// The text is no object.
    pub fn item(&self) -> Result<Bytes, ApiError> {
        let mut out = BytesMut::with_capacity(self.raw.len() + self.id.len() + 16);
        let write = || {
            each_other(self.raw, &["id"], |key, value| field(&mut out, key, value))?;
            close(&mut out, &self.id);
            Ok(out.freeze())
        };
        write().map_err(Fault::into_error)
    }

    /// JSON of a message in the form of the API for stored ones: text in `content`, parts in `content_parts`, a name
    /// also where there is none.
    ///
    /// # Errors
    /// The text is no object.
    pub fn message(&self) -> Result<Bytes, ApiError> {
        let mut out = BytesMut::with_capacity(self.raw.len() + self.id.len() + 64);
        let (mut text, mut parts, mut name) = ("null", "null", "null");
        let write = || {
            each_other(self.raw, &["id", "content_parts"], |key, value| match key {
                "content" if value.starts_with('[') => parts = value,
                "content" => text = value,
                "name" => name = value,
                _ => field(&mut out, key, value),
            })?;
            for (key, value) in [("content", text), ("content_parts", parts), ("name", name)] {
                field(&mut out, key, value);
            }
            close(&mut out, &self.id);
            Ok(out.freeze())
        };
        write().map_err(Fault::into_error)
    }
}

fn entries(list: &[u8], id: impl Fn(&str, usize) -> Result<String, Fault>) -> Result<Vec<Listed<'_>>, Fault> {
    let mut found = Vec::new();
    Reader::new(list)?.array(|reader, index| {
        bounded(index, ENTRIES_MAX, "entries")?;
        reader.expect(Kind::Object)?;
        let raw = reader.raw()?.text;
        found.push(Listed { id: id(raw, index)?, raw });
        Ok(())
    })?;
    Ok(found)
}

/// Calls `see` with the fields of an object, those with the names of `left_out` left out.
fn each_other<'a>(raw: &'a str, left_out: &[&str], mut see: impl FnMut(&str, &'a str)) -> Result<(), Fault> {
    Reader::new(raw.as_bytes())?.object(|reader, key| {
        let value = reader.raw()?.text;
        if !left_out.contains(&&*key) {
            see(&key, value);
        }
        Ok(())
    })
}

/// Writes a field, and what stands in front of it.
fn field(out: &mut BytesMut, key: &str, value: &str) {
    out.put_u8(if out.is_empty() { b'{' } else { b',' });
    write::string(out, key);
    out.put_u8(b':');
    out.put_slice(value.as_bytes());
}

/// Writes the id, and the end of the object.
fn close(out: &mut BytesMut, id: &str) {
    out.put_slice(if out.is_empty() { b"{\"id\":" } else { b",\"id\":" });
    write::string(out, id);
    out.put_u8(b'}');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(shown: impl Iterator<Item = Result<Bytes, ApiError>>) -> Vec<String> {
        shown.map(|text| String::from_utf8(text.expect("JSON").into()).expect("text")).collect()
    }

    #[test]
    fn items_without_an_id_get_one() {
        let list = br#"[{"role":"user","content":"a"},{"id":"fc_1","type":"x"},{"id":null}, { }]"#;
        let items = Listed::items(list, "1").expect("a list of objects");
        assert_eq!(
            items.iter().map(|item| item.id.as_str()).collect::<Vec<_>>(),
            ["item_1_0", "fc_1", "item_1_2", "item_1_3"]
        );
        assert_eq!(
            texts(items.iter().map(Listed::item)),
            [
                r#"{"role":"user","content":"a","id":"item_1_0"}"#,
                r#"{"type":"x","id":"fc_1"}"#,
                r#"{"id":"item_1_2"}"#,
                r#"{"id":"item_1_3"}"#,
            ]
        );
        assert!(Listed::items(b"[1]", "1").is_err());
    }

    #[test]
    fn messages_have_ids_and_parts_of_their_own() {
        let list = br#"[{"role":"user","content":"a"},{"content":[{"type":"text"}],"name":"b"}]"#;
        let messages = Listed::messages(list, "chatcmpl-1").expect("a list of objects");
        assert_eq!(
            texts(messages.iter().map(Listed::message)),
            [
                r#"{"role":"user","content":"a","content_parts":null,"name":null,"id":"chatcmpl-1-0"}"#,
                r#"{"content":null,"content_parts":[{"type":"text"}],"name":"b","id":"chatcmpl-1-1"}"#,
            ]
        );
    }
}
