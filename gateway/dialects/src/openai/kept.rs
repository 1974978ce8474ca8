//! Parts of a chat completion that a store keeps beside the answer, and the client's metadata of stored objects.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};

use super::chat::read_body;
use penstock_types::Bounds;
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::fields::{self, bounded};
use penstock_types::json::{Fault, Kind, Names, Reader, Within};
use penstock_types::json_text::compacted;
use penstock_types::write;

/// Settings of a request that a stored completion repeats: the field of the request, the field of the completion, and
/// its value where the request has none.
const SETTINGS: [(&str, &str, &str); 9] = [
    ("temperature", "temperature", "1.0"),
    ("top_p", "top_p", "1.0"),
    ("presence_penalty", "presence_penalty", "0.0"),
    ("frequency_penalty", "frequency_penalty", "0.0"),
    ("seed", "seed", "null"),
    ("user", "input_user", "null"),
    ("tools", "tools", "null"),
    ("tool_choice", "tool_choice", "null"),
    ("response_format", "response_format", "null"),
];

/// Request parts that a stored chat completion repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredChat {
    /// Metadata of the client: a compact JSON object of strings, names sorted.
    pub metadata: String,
    /// The request's messages, a JSON list.
    pub messages: Bytes,
    /// Fields that repeat the request's settings, JSON text that follows other fields: `,"seed":7,…`.
    settings: String,
}

impl StoredChat {
    /// Reads the parts from the body of a chat completion request, whose other fields are not checked.
    ///
    /// # Errors
    /// The body is no JSON object, has no messages, or has metadata that are not strings within their bounds.
    pub fn read(body: &[u8], bounds: &Bounds) -> Result<Self, ApiError> {
        let (mut metadata, mut messages, mut given) = (None, None, BTreeMap::new());
        let read = read_body(body, bounds, |reader, key| {
            match key {
                "metadata" => metadata = Some(self::metadata(reader, bounds)?),
                "messages" => {
                    reader.expect(Kind::Array)?;
                    let raw = reader.raw()?.text;
                    Reader::new(raw.as_bytes())?.array(|reader, index| {
                        bounded(index, bounds.messages_max, "messages")?;
                        reader.skip()
                    })?;
                    messages = Some(raw.to_owned());
                }
                _ => match SETTINGS.iter().find(|(name, ..)| *name == key) {
                    Some((name, ..)) => drop(given.insert(*name, compacted(reader.raw()?.text))),
                    None => reader.skip()?,
                },
            }
            Ok(())
        });
        read.map_err(Fault::into_error)?;
        let missing = || ApiError::invalid("messages", "messages: required, but missing");
        let mut settings = String::new();
        for (name, shown, default) in SETTINGS {
            let value = given.get(name).map_or(default, String::as_str);
            settings.push_str(&format!(",\"{shown}\":{value}"));
        }
        Ok(Self {
            metadata: metadata.unwrap_or_else(|| "{}".to_owned()),
            messages: messages.ok_or_else(missing)?.into(),
            settings,
        })
    }

    /// Document of the completion without its metadata: the answer with the request's id and settings.
    pub fn document(&self, answer: &[u8], request_id: &str) -> Bytes {
        let mut out = BytesMut::with_capacity(answer.len() + self.settings.len() + request_id.len() + 32);
        out.put_slice(answer.strip_suffix(b"}").unwrap_or(answer));
        out.put_slice(b",\"request_id\":");
        write::string(&mut out, request_id);
        out.put_slice(self.settings.as_bytes());
        out.put_u8(b'}');
        out.freeze()
    }

    /// Bytes held by the parts.
    pub fn bytes(&self) -> usize {
        self.metadata.len() + self.messages.len() + self.settings.len()
    }
}

/// The `document` of a stored object with its `metadata` as the last field.
pub fn with_metadata(document: &[u8], metadata: &str) -> Bytes {
    let mut out = BytesMut::with_capacity(document.len() + metadata.len() + 16);
    out.put_slice(document.strip_suffix(b"}").unwrap_or(document));
    out.put_slice(b",\"metadata\":");
    out.put_slice(metadata.as_bytes());
    out.put_u8(b'}');
    out.freeze()
}

/// JSON text of one entry of metadata, as it stands in [`StoredChat::metadata`]: `"name":"value"`.
pub fn metadata_entry(name: &str, value: &str) -> String {
    let mut out = BytesMut::new();
    write::string(&mut out, name);
    out.put_u8(b':');
    write::string(&mut out, value);
    String::from_utf8_lossy(&out).into_owned()
}

/// Reads `metadata`: at most 16 strings by names, compact and in the order of their names.
pub(super) fn metadata(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    let raw = reader.raw()?.text;
    fields::metadata(&mut Reader::new(raw.as_bytes())?, bounds.metadata_max)?;
    let mut entries = BTreeMap::new();
    Reader::new(raw.as_bytes())?.object(|reader, key| {
        entries.insert(key.into_owned(), reader.string()?.into_owned());
        Ok(())
    })?;
    let entries: Vec<String> = entries.iter().map(|(name, value)| metadata_entry(name, value)).collect();
    Ok(format!("{{{}}}", entries.join(",")))
}

/// Reads the body of a request that replaces the metadata of a stored object.
///
/// # Errors
/// The body is no JSON object, or has no metadata within their bounds.
pub fn decode_metadata(body: &[u8], bounds: &Bounds) -> Result<String, ApiError> {
    let read = || -> Result<String, Fault> {
        let mut reader = Reader::new(body)?;
        reader.expect(Kind::Object)?;
        let (mut names, mut found) = (Names::new(bounds.fields_max), None);
        reader.object(|reader, key| {
            names.add(&key)?;
            if key != "metadata" {
                return Err(Fault::of(ApiErrorKind::Unsupported, "only metadata can be changed")).within(&key);
            }
            let null = reader.null()?;
            found = Some(if null { "{}".to_owned() } else { metadata(reader, bounds).within("metadata")? });
            Ok(())
        })?;
        reader.end()?;
        found.ok_or_else(|| Fault::invalid("required, but missing")).within("metadata")
    };
    read().map_err(Fault::into_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_repeats_its_request() {
        let body = br#"{"model":"m","seed":7,"messages": [ {"role":"user","content":"a"} ],"store":true,
            "metadata":{"b":"2","a":"\"1\"\u0000"},"tools":[ ],"stream":true}"#;
        let kept = StoredChat::read(body, &Bounds::default()).expect("a request");
        assert_eq!(kept.metadata, r#"{"a":"\"1\"\u0000","b":"2"}"#);
        assert_eq!(kept.messages, br#"[ {"role":"user","content":"a"} ]"#.as_slice());
        let document = kept.document(br#"{"id":"x"}"#, "req_1");
        assert_eq!(
            String::from_utf8_lossy(&with_metadata(&document, &kept.metadata)),
            r#"{"id":"x","request_id":"req_1","temperature":1.0,"top_p":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"seed":7,"input_user":null,"tools":[],"tool_choice":null,"response_format":null,"metadata":{"a":"\"1\"\u0000","b":"2"}}"#
        );
        assert!(kept.metadata.contains(&metadata_entry("a", "\"1\"\0")));
    }

    #[test]
    fn what_cannot_be_kept_is_refused_by_name() {
        for (body, param) in [
            (r#"{"model":"m"}"#, Some("messages")),
            (r#"{"messages":"x"}"#, Some("messages")),
            (r#"{"messages":[],"metadata":{"a":1}}"#, Some("metadata.a")),
            (r#"{"messages":[],"metadata":[]}"#, Some("metadata")),
            ("[]", None),
        ] {
            let error = StoredChat::read(body.as_bytes(), &Bounds::default()).expect_err(body);
            assert_eq!(error.param.as_deref(), param, "{body}");
        }
        for (body, param) in [
            ("{}", Some("metadata")),
            (r#"{"metadata":{"a":"1"},"model":"m"}"#, Some("model")),
            (r#"{"metadata":{"a":"1"},"metadata":{}}"#, Some("metadata")),
            (r#"{"metadata":{"a":null}}"#, Some("metadata.a")),
            ("{", None),
        ] {
            let error = decode_metadata(body.as_bytes(), &Bounds::default()).expect_err(body);
            assert_eq!(error.param.as_deref(), param, "{body}");
        }
        assert_eq!(decode_metadata(br#"{"metadata":null}"#, &Bounds::default()), Ok("{}".into()));
        assert_eq!(
            decode_metadata(br#"{"metadata":{"b":"","a":"x"}}"#, &Bounds::default()),
            Ok(r#"{"a":"x","b":""}"#.into())
        );
    }
}
