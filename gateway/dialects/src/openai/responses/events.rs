//! Streamed events: a line `event: TYPE`, then one object with `type` and `sequence_number`, numbered from 0 without
//! gaps.

use bytes::{BufMut, BytesMut};

use crate::openai::provider::Object;

/// Writer of events: into a client's stream, or nowhere for an answer that is only collected.
pub(super) struct Events {
    streamed: bool,
    next: u64,
}

impl Events {
    pub(super) fn new(streamed: bool) -> Self {
        Self { streamed, next: 0 }
    }

    /// Writer that goes on with an event of this number.
    pub(super) fn from(next: u64) -> Self {
        Self { streamed: true, next }
    }

    /// Appends one event; `put` adds its own fields.
    pub(super) fn put(&mut self, kind: &str, out: &mut BytesMut, put: impl FnOnce(&mut Object<'_>)) {
        if !self.streamed {
            return;
        }
        out.put_slice(b"event: ");
        out.put_slice(kind.as_bytes());
        out.put_slice(b"\ndata: ");
        let mut object = Object::open(out);
        object.string("type", kind);
        object.integer("sequence_number", self.next);
        put(&mut object);
        object.close();
        out.put_slice(b"\n\n");
        self.next += 1;
    }
}
