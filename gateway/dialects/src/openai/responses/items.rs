//! Items of an answer: their state while they grow, and their JSON.

use bytes::{BufMut, BytesMut};

use crate::openai::provider::{Balance, Object};

/// State of one item of a response, its `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ItemStatus {
    InProgress,
    Completed,
    Incomplete,
}

impl ItemStatus {
    fn word(self) -> &'static str {
        match self {
            ItemStatus::InProgress => "in_progress",
            ItemStatus::Completed => "completed",
            ItemStatus::Incomplete => "incomplete",
        }
    }
}

/// One item; texts are kept as escaped JSON text.
pub(super) struct Item {
    /// Item id, `msg_…`, `rs_…` or `fc_…`.
    pub(super) id: String,
    pub(super) status: ItemStatus,
    pub(super) body: ItemBody,
}

pub(super) enum ItemBody {
    Message {
        parts: Vec<MessagePart>,
    },
    Reasoning {
        /// True if the reasoning is sent as a summary, because the client asked for one.
        summary: bool,
        text: BytesMut,
        /// True if a part has been opened for the text.
        open: bool,
        encrypted: Option<String>,
    },
    Call {
        /// Index of the call in the events of the choice.
        call: u32,
        call_id: String,
        name: String,
        arguments: BytesMut,
        balance: Balance,
        signature: Option<String>,
    },
}

/// A part of a message item: text or a refusal, with log-probabilities.
#[derive(Default)]
pub(super) struct MessagePart {
    pub(super) refusal: bool,
    pub(super) text: BytesMut,
    /// Log-probability entries, joined by commas.
    pub(super) logprobs: BytesMut,
}

impl MessagePart {
    /// Appends the part; with `empty`, in its state when it opens.
    pub(super) fn put(&self, empty: bool, out: &mut BytesMut) {
        let (text, logprobs) = if empty { (&[][..], &[][..]) } else { (&*self.text, &*self.logprobs) };
        let mut object = Object::open(out);
        if self.refusal {
            object.string("type", "refusal");
            quoted(object.key("refusal"), text);
        } else {
            object.string("type", "output_text");
            quoted(object.key("text"), text);
            object.raw("annotations", "[]");
            bracketed(object.key("logprobs"), logprobs);
        }
        object.close();
    }
}

impl Item {
    /// Bytes held by the item.
    pub(super) fn bytes(&self) -> usize {
        let body = match &self.body {
            ItemBody::Message { parts } => parts.iter().map(|part| part.text.len() + part.logprobs.len()).sum(),
            ItemBody::Reasoning { text, encrypted, .. } => text.len() + encrypted.as_ref().map_or(0, String::len),
            ItemBody::Call { call_id, name, arguments, .. } => call_id.len() + name.len() + arguments.len(),
        };
        self.id.len() + body
    }

    /// Returns true if the item is complete once another begins. Calls may arrive interleaved, so they are not.
    pub(super) fn ends_with_the_next(&self) -> bool {
        match &self.body {
            ItemBody::Call { balance, .. } => balance.is_complete(),
            ItemBody::Message { .. } | ItemBody::Reasoning { .. } => true,
        }
    }

    /// Appends the item; with `empty`, in its state when it opens.
    pub(super) fn put(&self, empty: bool, out: &mut BytesMut) {
        let status = if empty { ItemStatus::InProgress } else { self.status };
        let mut object = Object::open(out);
        object.string("id", &self.id);
        match &self.body {
            ItemBody::Message { parts } => {
                object.string("type", "message");
                object.string("status", status.word());
                object.string("role", "assistant");
                let parts = if empty { &[][..] } else { parts };
                super::super::provider::list(object.key("content"), parts, |out, part| part.put(false, out));
            }
            ItemBody::Reasoning { summary, text, open, encrypted } => {
                object.string("type", "reasoning");
                object.string("status", status.word());
                let text = Some(&text[..]).filter(|_| *open && !empty);
                put_texts(object.key("summary"), "summary_text", text.filter(|_| *summary));
                put_texts(object.key("content"), "reasoning_text", text.filter(|_| !*summary));
                let encrypted = encrypted.as_deref().filter(|_| !empty);
                penstock_types::write::optional_string(object.key("encrypted_content"), encrypted);
            }
            ItemBody::Call { call_id, name, arguments, signature, .. } => {
                object.string("type", "function_call");
                object.string("status", status.word());
                object.string("call_id", call_id);
                object.string("name", name);
                quoted(object.key("arguments"), if empty { &[] } else { arguments });
                if let Some(signature) = signature {
                    crate::openai::provider::put_signature(&mut object, signature);
                }
            }
        }
        object.close();
    }
}

/// Writes a list of at most one text.
fn put_texts(out: &mut BytesMut, kind: &str, text: Option<&[u8]>) {
    out.put_u8(b'[');
    if let Some(text) = text {
        put_text(out, kind, text);
    }
    out.put_u8(b']');
}

/// Writes `{"type":…,"text":…}` of escaped text.
pub(super) fn put_text(out: &mut BytesMut, kind: &str, text: &[u8]) {
    let mut part = Object::open(out);
    part.string("type", kind);
    quoted(part.key("text"), text);
    part.close();
}

/// Writes escaped text in quotes.
pub(super) fn quoted(out: &mut BytesMut, escaped: &[u8]) {
    out.put_u8(b'"');
    out.put_slice(escaped);
    out.put_u8(b'"');
}

/// Writes joined values as a list.
pub(super) fn bracketed(out: &mut BytesMut, joined: &[u8]) {
    out.put_u8(b'[');
    out.put_slice(joined);
    out.put_u8(b']');
}
