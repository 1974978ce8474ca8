//! Signatures of reasoning, packed into the one opaque string that a message of ours has for them.
//!
//! A single signed thinking block is its own signature. Several blocks, or redacted ones, are kept as the JSON array
//! of the provider's blocks, so that exactly those are sent back; base64 never begins with a bracket. A call's own
//! signature (Gemini's) has no place in this API: it travels in a thinking block without text in front of the call.

use bytes::{BufMut, BytesMut};

use crate::reasoning_maker::{Maker, REDACTED};
use penstock_types::fields;
use penstock_types::json::{Fault, Reader};
use penstock_types::request::{Message, OWN_SIGNATURE};
use penstock_types::write;

/// A block of reasoning, readable or redacted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Thought {
    /// Readable reasoning, signed or not.
    Plain { text: String, signature: Option<String> },
    /// Redacted reasoning: opaque data that only the provider can read.
    Redacted(String),
}

impl Thought {
    /// Thought with this text and this signature; the signature may be the data of a redacted one, which has no text.
    pub(crate) fn signed(text: String, signature: String) -> Self {
        match signature.strip_prefix(REDACTED) {
            Some(data) => Self::Redacted(data.to_owned()),
            None => Self::Plain { text, signature: Some(signature) },
        }
    }

    /// The thought without a signature that the gateway made: no provider takes one.
    pub(crate) fn without_own_signature(self) -> Self {
        match self {
            Self::Plain { text, signature } => {
                Self::Plain { text, signature: signature.filter(|given| !given.starts_with(OWN_SIGNATURE)) }
            }
            redacted => redacted,
        }
    }

    /// Signature of readable reasoning.
    pub(crate) fn signature(&self) -> Option<&str> {
        match self {
            Self::Plain { signature, .. } => signature.as_deref(),
            Self::Redacted(_) => None,
        }
    }

    /// Maker of the thought's signature, if the thought is signed.
    fn maker(&self) -> Option<Maker> {
        match self {
            Self::Plain { signature, .. } => signature.as_deref().map(Maker::of),
            Self::Redacted(_) => Some(Maker::Anthropic),
        }
    }
}

/// Thoughts of a message that `maker` signed, in order. No provider takes those that another one signed.
pub(crate) fn signed_by(maker: Maker, message: &Message) -> Vec<Thought> {
    let Some(signature) = message.reasoning_signature.as_deref() else { return Vec::new() };
    let mut thoughts = if signature.starts_with('[') {
        unpacked(signature)
    } else if let Some(data) = signature.strip_prefix(REDACTED) {
        vec![Thought::Redacted(data.to_owned())]
    } else {
        let text = message.reasoning.clone().unwrap_or_default();
        vec![Thought::Plain { text, signature: Some(signature.to_owned()) }]
    };
    thoughts.retain(|thought| thought.maker() == Some(maker));
    thoughts
}

/// Packs thoughts into the reasoning text and the signature of one message.
pub(crate) fn packed(thoughts: Vec<Thought>) -> (Option<String>, Option<String>) {
    let mut text = String::new();
    for thought in &thoughts {
        if let Thought::Plain { text: more, .. } = thought
            && !more.is_empty()
        {
            if !text.is_empty() {
                text.push_str("\n\n");
            }
            text.push_str(more);
        }
    }
    let text = Some(text).filter(|text| !text.is_empty());
    if let [Thought::Plain { .. }] = thoughts.as_slice() {
        let only = thoughts.into_iter().next();
        let Some(Thought::Plain { signature, .. }) = only else { return (text, None) };
        return (text, signature);
    }
    let mut out = BytesMut::new();
    for thought in &thoughts {
        let before = if out.is_empty() { b'[' } else { b',' };
        match thought {
            Thought::Plain { signature: None, .. } => {}
            Thought::Plain { text, signature: Some(signature) } => {
                out.put_u8(before);
                put_thinking(&mut out, text, signature);
            }
            Thought::Redacted(data) => {
                out.put_u8(before);
                put_redacted(&mut out, data);
            }
        }
    }
    if out.is_empty() {
        return (text, None);
    }
    out.put_u8(b']');
    // Only text was written.
    (text, Some(String::from_utf8_lossy(&out).into_owned()))
}

/// Writes a `thinking` block with its text and signature.
pub(crate) fn put_thinking(out: &mut BytesMut, text: &str, signature: &str) {
    out.put_slice(b"{\"type\":\"thinking\",\"thinking\":");
    write::string(out, text);
    out.put_slice(b",\"signature\":");
    write::string(out, signature);
    out.put_u8(b'}');
}

/// Writes a `redacted_thinking` block with its opaque data.
pub(crate) fn put_redacted(out: &mut BytesMut, data: &str) {
    out.put_slice(b"{\"type\":\"redacted_thinking\",\"data\":");
    write::string(out, data);
    out.put_u8(b'}');
}

/// Thoughts in a packed signature. Elements that are no such block are left out: the string comes from a client.
fn unpacked(packed: &str) -> Vec<Thought> {
    let mut thoughts = Vec::new();
    let read = Reader::new(packed.as_bytes()).and_then(|mut reader| {
        reader.array(|reader, index| {
            fields::bounded(index, BLOCKS_MAX, "blocks")?;
            thoughts.extend(thought(reader)?);
            Ok(())
        })?;
        reader.end()
    });
    if read.is_ok() { thoughts } else { Vec::new() }
}

/// Most blocks in one packed signature.
const BLOCKS_MAX: usize = 1_000;

fn thought(reader: &mut Reader<'_>) -> Result<Option<Thought>, Fault> {
    let (mut kind, mut text, mut signature, mut data) = (None, None, None, None);
    reader.object(|reader, key| {
        let place = match &*key {
            "type" => &mut kind,
            "thinking" => &mut text,
            "signature" => &mut signature,
            "data" => &mut data,
            _ => return reader.skip(),
        };
        *place = Some(fields::text(reader)?);
        Ok(())
    })?;
    Ok(match (kind.as_deref(), text, signature, data) {
        (Some("thinking"), Some(text), signature @ Some(_), _) => Some(Thought::Plain { text, signature }),
        (Some("redacted_thinking"), _, _, Some(data)) => Some(Thought::Redacted(data)),
        _ => None,
    })
}
