//! One answer in the client's dialect, streamed or whole: the only place in the gateway that knows which of the two it
//! is.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::HeaderValue;
use penstock_proto::ErrorKind;
use penstock_types::{AnswerForm, AnswerMeta, ChatEvent, Dialect, StreamEncoder, Usage, WholeCollector, error_body};

use penstock_base::error::Failure;
use penstock_types::ask::Variant;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::call::Call;
use penstock_upstream::{ANSWER_BYTES_MAX, Facts};

/// Bytes of a stream that go out in the same moment; a buffer up to this size is not charged as held memory.
const PASSING_BYTES: usize = 128 * 1024;

/// Encoder of one answer: events in, bytes of the client's dialect out.
pub struct Answer {
    form: Form,
    dialect: Dialect,
    stream: bool,
    /// True for a stream that is one JSON array instead of server-sent events.
    array: bool,
    /// Choices that must finish; at least one before the first event.
    choices: usize,
    buffer: BytesMut,
    /// Whole answer of an upstream that speaks the client's dialect: the upstream's bytes, without a copy.
    raw: Option<Bytes>,
    hold: Hold,
    /// Events since the size was last checked.
    unmeasured: usize,
    /// Collector that stores the answer of a stored response; `None`: nothing is stored.
    keeping: Option<Box<dyn KeepAnswer>>,
    /// True if the upstream's events, passed on as they are, end in CR LF.
    ends_in_crlf: bool,
}

/// Collection of an answer beside its way to the client, to be kept when it is complete.
pub(crate) trait KeepAnswer: Send {
    /// Sets the form of the answer, before its first event. An answer that is passed on unread has none, and is not kept.
    fn begin(&mut self, form: &dyn AnswerForm, meta: &AnswerMeta);

    /// Adds one event of the answer.
    fn event(&mut self, event: &ChatEvent);

    /// Bytes of the answer that are held.
    fn bytes(&self) -> usize;

    /// Charges the memory for the events, and for the documents that are made of them.
    ///
    /// # Errors
    /// The budget is used up.
    fn cover(&mut self) -> Result<(), Failure>;

    /// Gives up the copy; the client has its answer all the same.
    fn give_up(self: Box<Self>, why: &Failure);

    /// Keeps the complete answer, which is about to be sent. An incomplete answer is not kept.
    fn end(self: Box<Self>);
}

enum Form {
    /// No event has come; the call decides the form.
    Open(Arc<Call>),
    /// The upstream speaks the client's dialect: its bytes pass through.
    Raw,
    Stream(Box<dyn StreamEncoder>),
    Whole(Option<Box<dyn WholeCollector>>),
}

impl Answer {
    /// Encoder of the answer to `call`; `hold` is charged for the bytes that it collects.
    pub(crate) fn new(call: Arc<Call>, hold: Hold) -> Self {
        let (dialect, stream, array) = (call.dialect(), call.stream, call.ask.variant == Variant::Array);
        Self {
            form: Form::Open(call),
            dialect,
            stream,
            array,
            choices: 1,
            buffer: BytesMut::new(),
            raw: None,
            hold,
            unmeasured: 0,
            keeping: None,
            ends_in_crlf: false,
        }
    }

    /// Sets the collector that saves the answer in the store when it is complete.
    pub(crate) fn keep(&mut self, keeping: Option<Box<dyn KeepAnswer>>) {
        self.keeping = keeping;
    }

    /// Returns true if the client asked for a streamed answer.
    pub fn is_stream(&self) -> bool {
        self.stream
    }

    /// Value of `Content-Type` of a streamed answer in the client's dialect.
    pub fn content_type(&self) -> HeaderValue {
        HeaderValue::from_static(match (self.array, self.dialect) {
            (true, _) => "application/json",
            (false, Dialect::Ollama) => "application/x-ndjson",
            (false, _) => "text/event-stream; charset=utf-8",
        })
    }

    /// Returns true if the stream can carry a comment: SSE can, a JSON array cannot, and Google's SDKs take every line of theirs
    /// that is neither empty nor data for a chunk of the answer.
    pub fn takes_comments(&self) -> bool {
        !self.array && matches!(self.dialect, Dialect::OpenAi | Dialect::Anthropic)
    }

    /// Keep-alive bytes that every reader of the stream skips and every proxy passes on: an SSE comment, or white space
    /// between JSON values. Readers of lines take an empty one for broken JSON, so theirs is a blank in front of the next.
    /// Streams of Gemini's API get an empty event, ended like those of the upstream: Google's SDK for Go looks for LF LF
    /// before CR LF CR LF.
    pub fn sign_of_life(&self) -> Bytes {
        Bytes::from_static(match (self.array, self.dialect) {
            (true, _) => b"\n",
            (false, Dialect::Ollama) => b" ",
            (false, Dialect::Gemini) if self.ends_in_crlf => b"\r\n\r\n",
            (false, Dialect::Gemini) => b"\n\n",
            (false, Dialect::OpenAi | Dialect::Anthropic) => b": keep-alive\n\n",
        })
    }

    /// Bytes that go out with the head of a stream whose first event is late. Gemini's clients get the head alone: some (the
    /// deprecated SDK for JavaScript) find no event behind an empty one.
    pub fn opening(&self) -> Bytes {
        match (self.array, self.dialect) {
            (false, Dialect::Gemini) => Bytes::new(),
            _ => self.sign_of_life(),
        }
    }

    /// Returns true if the upstream's bytes are passed on unread, in the client's dialect.
    pub fn is_raw(&self) -> bool {
        matches!(self.form, Form::Raw)
    }

    /// Number of choices that must finish before the answer counts as complete.
    pub fn choices(&self) -> usize {
        self.choices
    }

    /// Chooses the form (raw, stream or whole) on the first event.
    fn settle(&mut self, first: &ChatEvent) -> Result<(), Failure> {
        let Form::Open(call) = &self.form else { return Ok(()) };
        if matches!(first, ChatEvent::Raw(_)) {
            self.form = Form::Raw;
            self.keeping = None;
            return Ok(());
        }
        let decoded = call.decoded_before().ok_or_else(|| Failure::internal("events for a request nobody read"))?;
        let meta = call.meta();
        self.choices = decoded.form.choices();
        self.keeping.iter_mut().for_each(|keeping| keeping.begin(decoded.form.as_ref(), &meta));
        self.form = match self.stream {
            true => Form::Stream(decoded.form.stream(&meta)),
            false => Form::Whole(Some(decoded.form.whole(&meta))),
        };
        Ok(())
    }

    /// Takes events and returns the bytes that can be sent now. With `more` false the last piece is kept for
    /// [`Self::done`], so that both go out in one write.
    ///
    /// # Errors
    /// The answer holds more than `ANSWER_BYTES_MAX`.
    pub fn events(&mut self, batch: &mut Vec<ChatEvent>, facts: Facts, more: bool) -> Result<Option<Bytes>, Failure> {
        let Some(first) = batch.first() else { return Ok(None) };
        self.settle(first)?;
        if let Some(ChatEvent::Raw(bytes)) = batch.last() {
            self.ends_in_crlf = bytes.ends_with(b"\r\n");
        }
        if let Form::Stream(encoder) = &mut self.form {
            encoder.set_usage(Usage {
                prompt_tokens: facts.prompt_tokens,
                cached_tokens: facts.cached_tokens,
                cache_write_tokens: facts.cache_write_tokens,
                completion_tokens: facts.completion_tokens,
                reasoning_tokens: facts.reasoning_tokens,
            });
        }
        if self.is_raw() && batch.len() == 1 && self.buffer.is_empty() && more && self.stream {
            // The common case of passing on: not even copied.
            return Ok(batch.pop().map(raw_bytes));
        }
        if self.is_raw() && batch.len() == 1 && self.buffer.is_empty() && !self.stream && self.raw.is_none() {
            self.raw = batch.pop().map(raw_bytes);
            return Ok(None);
        }
        self.unmeasured += batch.len();
        for event in batch.drain(..) {
            self.keeping.iter_mut().for_each(|keeping| keeping.event(&event));
            match &mut self.form {
                Form::Stream(encoder) => encoder.event(&event, &mut self.buffer),
                Form::Whole(collector) => collector.iter_mut().for_each(|collector| collector.event(&event)),
                Form::Raw => self.buffer.extend_from_slice(&raw_bytes(event)),
                Form::Open(_) => {}
            }
        }
        self.check_size()?;
        Ok((more && self.stream && !self.buffer.is_empty()).then(|| taken(&mut self.buffer)))
    }

    /// Checks the size bound and charges the memory. Measuring walks over every choice, so it runs once in as many
    /// events as there are choices: a constant cost per event.
    fn check_size(&mut self) -> Result<(), Failure> {
        if self.unmeasured < self.choices {
            return Ok(());
        }
        self.unmeasured = 0;
        if let Some(keeping) = &mut self.keeping
            && let Err(failure) = keeping.cover()
            && let Some(keeping) = self.keeping.take()
        {
            keeping.give_up(&failure);
        }
        let bytes = self.bytes();
        if bytes <= ANSWER_BYTES_MAX {
            return self.hold.cover(self.charged());
        }
        let message = format!(
            "The answer grew beyond the {} MiB that one may have. Ask for fewer tokens, choices or log-probabilities.",
            ANSWER_BYTES_MAX >> 20
        );
        Err(Failure::new(ErrorKind::TooLarge, message))
    }

    /// Bytes charged until the answer has gone out; the collector for the store has a hold of its own.
    fn charged(&self) -> usize {
        match &self.form {
            // The body is made of what was collected while that is still there.
            Form::Whole(collector) => 2 * collector.as_ref().map_or(0, |collector| collector.bytes()),
            Form::Stream(encoder) => encoder.held() + self.passing(),
            Form::Open(_) | Form::Raw => self.passing(),
        }
    }

    /// Bytes of the buffer, where they are more than what an answer may have on its way for nothing.
    fn passing(&self) -> usize {
        Some(self.buffer.len()).filter(|bytes| *bytes > PASSING_BYTES).unwrap_or(0)
    }

    fn bytes(&self) -> usize {
        let kept = self.keeping.as_ref().map_or(0, |keeping| keeping.bytes());
        kept + match &self.form {
            Form::Whole(collector) => collector.as_ref().map_or(0, |collector| collector.bytes()),
            Form::Stream(encoder) => encoder.held() + self.buffer.len(),
            Form::Open(_) | Form::Raw => self.buffer.len(),
        }
    }

    /// Last bytes of a stream: what the encoder still holds, and its end mark.
    pub fn done(&mut self) -> Bytes {
        self.keeping.take().into_iter().for_each(|keeping| keeping.end());
        if let Form::Stream(encoder) = &mut self.form {
            encoder.done(&mut self.buffer);
        }
        taken(&mut self.buffer)
    }

    /// Rest of a stream, and an error event as its last.
    pub fn fail(&mut self, failure: &Failure) -> Bytes {
        match &mut self.form {
            Form::Stream(encoder) => encoder.fail(failure.shape(), &failure.message, &mut self.buffer),
            Form::Raw | Form::Open(_) if self.array => {
                let body = error_body::error_body(self.dialect, failure.shape(), None, &failure.message, "");
                let open: &[u8] = if matches!(self.form, Form::Open(_)) { b"[" } else { b"," };
                [open, &body, b"]"].into_iter().for_each(|piece| self.buffer.extend_from_slice(piece));
            }
            Form::Raw | Form::Open(_) if self.stream => {
                error_body::error_event(self.dialect, failure.shape(), &failure.message, &mut self.buffer);
                if self.ends_in_crlf && self.buffer.ends_with(b"\n\n") {
                    self.buffer.truncate(self.buffer.len() - 2);
                    self.buffer.extend_from_slice(b"\r\n\r\n");
                }
            }
            Form::Raw | Form::Open(_) | Form::Whole(_) => {}
        }
        taken(&mut self.buffer)
    }

    /// Complete body of a whole answer; `None` if a choice is missing. `score` ranks the choices of `best_of`.
    pub fn whole(&mut self, score: &dyn Fn(u32) -> Option<f32>) -> Option<Bytes> {
        self.keeping.take().into_iter().for_each(|keeping| keeping.end());
        match &mut self.form {
            Form::Raw => Some(self.raw.take().unwrap_or_else(|| taken(&mut self.buffer))),
            Form::Whole(collector) => {
                let mut collector = collector.take()?;
                for choice in 0..self.choices as u32 {
                    score(choice).into_iter().for_each(|mean| collector.score(choice, mean));
                }
                collector.finish()
            }
            Form::Open(_) | Form::Stream(_) => None,
        }
    }
}

fn raw_bytes(event: ChatEvent) -> Bytes {
    match event {
        ChatEvent::Raw(bytes) => bytes,
        _ => Bytes::new(),
    }
}

/// Takes the bytes of a buffer for the client and leaves it empty.
pub(crate) fn taken(buffer: &mut BytesMut) -> Bytes {
    std::mem::take(buffer).freeze()
}

#[cfg(test)]
mod tests {
    use penstock_upstream::AnswerMemory;

    use super::*;

    /// Answer whose upstream's bytes are passed on to a client of this dialect.
    fn passing(dialect: Dialect, array: bool) -> Answer {
        Answer {
            form: Form::Raw,
            dialect,
            stream: true,
            array,
            choices: 1,
            buffer: BytesMut::new(),
            raw: None,
            hold: AnswerMemory::default().hold(),
            unmeasured: 0,
            keeping: None,
            ends_in_crlf: false,
        }
    }

    #[test]
    fn each_dialect_has_its_sign_of_life() {
        for (dialect, array, opening, sign, takes_comments) in [
            (Dialect::OpenAi, false, ": keep-alive\n\n", ": keep-alive\n\n", true),
            (Dialect::Anthropic, false, ": keep-alive\n\n", ": keep-alive\n\n", true),
            (Dialect::Gemini, false, "", "\n\n", false),
            (Dialect::Gemini, true, "\n", "\n", false),
            (Dialect::Ollama, false, " ", " ", false),
        ] {
            let answer = passing(dialect, array);
            assert_eq!(
                (answer.opening().as_ref(), answer.sign_of_life().as_ref()),
                (opening.as_bytes(), sign.as_bytes())
            );
            assert_eq!(answer.takes_comments(), takes_comments, "{dialect:?}");
        }
    }

    /// Chunks that Google's SDK for Go finds in a stream that is there as a whole: it looks for LF LF first, and skips empty ones.
    fn chunks_at_google(stream: &str) -> Vec<&str> {
        let (mut chunks, mut rest) = (Vec::new(), stream);
        while !rest.is_empty() {
            let split = rest.split_once("\n\n").or_else(|| rest.split_once("\r\n\r\n"));
            let (chunk, behind) = split.unwrap_or((rest, ""));
            chunks.extend(Some(chunk.trim_end_matches('\r')).filter(|chunk| !chunk.is_empty()));
            rest = behind;
        }
        chunks
    }

    #[test]
    fn signs_of_life_are_no_chunks_of_google() {
        for end in ["\n\n", "\r\n\r\n"] {
            let mut answer = passing(Dialect::Gemini, false);
            let mut stream = [answer.opening(), answer.sign_of_life()].concat();
            for number in 0..2 {
                let event = ChatEvent::Raw(format!("data: {{\"number\":{number}}}{end}").into());
                let bytes = answer.events(&mut vec![event], Facts::default(), true).expect("no failure");
                stream.extend_from_slice(&bytes.expect("bytes"));
                stream.extend_from_slice(&[answer.sign_of_life(), answer.sign_of_life()].concat());
            }
            stream.extend_from_slice(&answer.fail(&Failure::internal("x")));
            let stream = String::from_utf8(stream).expect("text");
            let chunks = chunks_at_google(&stream);
            assert_eq!(chunks[..2], ["data: {\"number\":0}", "data: {\"number\":1}"], "{stream:?}");
            assert!(chunks.len() == 3 && chunks[2].starts_with("data: {\"error\":"), "{stream:?}");
        }
    }
}
