//! Body of an answer: server-sent events or one JSON value, told apart by the first byte, since a provider may answer
//! a streamed request with a whole answer, or the other way round.

use penstock_types::codec::{AnswerDecoder, FaultClass, ProviderFault};
use penstock_types::event::{ChatEvent, Usage};
use penstock_types::room::append;
use penstock_types::sse::SseReader;

/// Longest whole answer that is held: 2,048 vectors of 3,072 values in base64 take 34 MB, as numbers about twice that.
pub(crate) const WHOLE_BYTES_MAX: usize = 128 << 20;

/// Reader of a provider's answer, event by event or as a whole.
pub(crate) trait Answer: Send {
    /// Takes one event's data, or the whole answer; `name` is the event's name, empty where it has none.
    fn take(&mut self, name: &[u8], json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault>;
    /// Handles the provider's end mark (`[DONE]`, or the end of a whole answer): appends the events held back.
    fn done(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault>;
    /// Handles the end of a body that had no end mark. Acts as [`Answer::done`] if nothing can be missing, else fails.
    fn cut(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault>;
    /// Returns true if the answer's own last event has been taken, for an API whose end mark is not `[DONE]`.
    fn ended(&self) -> bool {
        false
    }
    /// Token counts that the answer has reported so far.
    fn usage(&self) -> Option<Usage> {
        None
    }
}

enum Form {
    /// The body has brought nothing but space so far, so its form is unknown.
    Unknown,
    Events(SseReader),
    Whole(Vec<u8>),
}

/// Decoder of an answer's body, whose first byte tells events from whole JSON.
pub(crate) struct Body<A> {
    form: Form,
    answer: A,
    complete: bool,
}

impl<A: Answer> Body<A> {
    /// Creates the decoder, before any byte.
    pub(crate) fn new(answer: A) -> Self {
        Self { form: Form::Unknown, answer, complete: false }
    }

    fn settle<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        if !matches!(self.form, Form::Unknown) {
            return bytes;
        }
        let bytes = bytes.trim_ascii_start();
        match bytes.first() {
            None => {}
            Some(b'{' | b'[') => self.form = Form::Whole(Vec::with_capacity(bytes.len())),
            Some(_) => self.form = Form::Events(SseReader::default()),
        }
        bytes
    }
}

impl<A: Answer> AnswerDecoder for Body<A> {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let bytes = self.settle(bytes);
        let Self { form, answer, complete } = self;
        match form {
            Form::Unknown => Ok(()),
            Form::Events(reader) => reader.push(bytes, |name, data| {
                let data = data.trim_ascii();
                if *complete || data.is_empty() {
                    return Ok(());
                }
                if data == b"[DONE]" {
                    *complete = true;
                    return answer.done(out);
                }
                answer.take(name, data, out)?;
                if answer.ended() {
                    *complete = true;
                    return answer.done(out);
                }
                Ok(())
            }),
            Form::Whole(held) if held.len() + bytes.len() > WHOLE_BYTES_MAX => {
                let message = format!("The provider's answer is larger than {WHOLE_BYTES_MAX} bytes.");
                Err(ProviderFault::new(FaultClass::AnswerTooLarge, message))
            }
            Form::Whole(held) => {
                append(held, bytes);
                Ok(())
            }
        }
    }

    fn end(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if std::mem::replace(&mut self.complete, true) {
            return Ok(());
        }
        match std::mem::replace(&mut self.form, Form::Unknown) {
            Form::Unknown => Err(truncated()),
            Form::Events(reader) if reader.is_inside() => Err(truncated()),
            Form::Events(_) => self.answer.cut(out),
            Form::Whole(held) => {
                // A cut JSON value is a truncated answer; that says more than the position of the syntax error.
                if !is_closed(&held) {
                    return Err(truncated());
                }
                self.answer.take(b"", &held, out)?;
                self.answer.done(out)
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.complete
    }

    fn held(&self) -> usize {
        match &self.form {
            Form::Unknown => 0,
            Form::Events(reader) => reader.held(),
            Form::Whole(held) => held.len(),
        }
    }

    fn usage(&self) -> Option<Usage> {
        self.answer.usage()
    }
}

/// Returns true if a value that begins with a bracket ends with one.
fn is_closed(json: &[u8]) -> bool {
    matches!(json.trim_ascii_end().last(), Some(b'}' | b']')) && is_balanced(json)
}

/// Returns true if every bracket outside strings is closed.
fn is_balanced(json: &[u8]) -> bool {
    let (mut depth, mut inside, mut escaped) = (0_i64, false, false);
    for byte in json {
        match (inside, *byte) {
            (true, _) if std::mem::take(&mut escaped) => {}
            (true, b'\\') => escaped = true,
            (_, b'"') => inside = !inside,
            (false, b'{' | b'[') => depth += 1,
            (false, b'}' | b']') => depth -= 1,
            _ => {}
        }
    }
    depth <= 0 && !inside
}

/// Fault of an answer that ended before it was complete.
pub(crate) fn truncated() -> ProviderFault {
    ProviderFault::new(FaultClass::Truncated, "The provider's answer ended before it was complete.")
}
