//! One answer in the client's dialect, streamed or whole: the only place in the gateway that knows which.

use bytes::{Bytes, BytesMut};
use penstock_dialects::openai::{
    ChatCollector, ChatEncoder, ChatMeta, CompletionCollector, CompletionEncoder, CompletionMeta,
};
use penstock_dialects::{ChatEvent, Request, Usage};
use penstock_proto::ErrorKind;

use crate::clock::unix_seconds;
use crate::error::Failure;
use crate::pump::taken;
use crate::upstream::Facts;

/// Memory that one answer may hold: what is collected of a whole one, what waits to be sent of a stream. Also bounds what a plan may say
/// of its prompts.
pub(crate) const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// An answer being made.
pub struct Answer {
    form: Form,
    choices: usize,
    /// Usage in every chunk.
    continuous: bool,
    buffer: BytesMut,
    /// Events since the size was last looked at.
    unmeasured: usize,
}

enum Form {
    ChatStream(ChatEncoder),
    CompleteStream(CompletionEncoder),
    Chat(Option<Box<ChatCollector>>),
    Complete(Option<Box<CompletionCollector>>),
}

impl Answer {
    /// For that request. The id in the body is made from the request's id, so that logs and answers can be joined.
    pub fn new(request: &Request, request_id: &str) -> Self {
        let id = request_id.strip_prefix("req_").unwrap_or(request_id);
        let (form, choices) = match request {
            Request::Chat(chat) => {
                let meta = ChatMeta::new(chat, format!("chatcmpl-{id}"), unix_seconds(), None);
                let form = match chat.stream {
                    Some(_) => Form::ChatStream(ChatEncoder::new(&meta)),
                    None => Form::Chat(Some(Box::new(ChatCollector::new(meta)))),
                };
                (form, chat.n as usize)
            }
            Request::Complete(complete) => {
                let meta = CompletionMeta::new(complete, format!("cmpl-{id}"), unix_seconds(), None);
                let form = match complete.stream {
                    Some(_) => Form::CompleteStream(CompletionEncoder::new(&meta)),
                    None => Form::Complete(Some(Box::new(CompletionCollector::new(meta)))),
                };
                (form, complete.prompts.len() * complete.best_of.max(complete.n) as usize)
            }
        };
        let stream = match request {
            Request::Chat(chat) => chat.stream,
            Request::Complete(complete) => complete.stream,
        };
        let continuous = stream.is_some_and(|stream| stream.continuous_usage_stats);
        Self { form, choices, continuous, buffer: BytesMut::new(), unmeasured: 0 }
    }

    /// Whether it is streamed.
    pub fn is_stream(&self) -> bool {
        matches!(self.form, Form::ChatStream(_) | Form::CompleteStream(_))
    }

    /// Choices that must finish.
    pub fn choices(&self) -> usize {
        self.choices
    }

    /// Takes events; what can be sent now is returned. With `more` false the last piece is kept for [`Self::done`], so that both go
    /// out in one write.
    ///
    /// # Errors
    /// The answer holds more than `ANSWER_BYTES_MAX`.
    pub fn events(&mut self, batch: &mut Vec<ChatEvent>, facts: Facts, more: bool) -> Result<Option<Bytes>, Failure> {
        let usage = Usage {
            prompt_tokens: facts.prompt_tokens,
            cached_tokens: facts.cached_tokens,
            completion_tokens: facts.completion_tokens,
            reasoning_tokens: facts.reasoning_tokens,
        };
        match &mut self.form {
            Form::ChatStream(encoder) if self.continuous => encoder.set_usage(usage),
            Form::CompleteStream(encoder) if self.continuous => encoder.set_usage(usage),
            _ => {}
        }
        self.unmeasured += batch.len();
        for event in batch.drain(..) {
            match &mut self.form {
                Form::ChatStream(encoder) => encoder.event(&event, &mut self.buffer),
                Form::CompleteStream(encoder) => encoder.event(&event, &mut self.buffer),
                Form::Chat(collector) => collector.iter_mut().for_each(|collector| collector.event(&event)),
                Form::Complete(collector) => collector.iter_mut().for_each(|collector| collector.event(&event)),
            }
        }
        self.check_size()?;
        Ok((more && !self.buffer.is_empty()).then(|| taken(&mut self.buffer)))
    }

    /// Measuring looks at every choice, so it is done once in as many events: a constant cost per event.
    fn check_size(&mut self) -> Result<(), Failure> {
        if self.unmeasured < self.choices {
            return Ok(());
        }
        self.unmeasured = 0;
        if self.bytes() <= ANSWER_BYTES_MAX {
            return Ok(());
        }
        let message = format!(
            "The answer grew beyond the {} MiB that one may have. Ask for fewer tokens, choices or log-probabilities.",
            ANSWER_BYTES_MAX >> 20
        );
        Err(Failure::new(ErrorKind::TooLarge, message))
    }

    fn bytes(&self) -> usize {
        match &self.form {
            Form::ChatStream(_) | Form::CompleteStream(_) => self.buffer.len(),
            Form::Chat(collector) => collector.as_ref().map_or(0, |collector| collector.bytes()),
            Form::Complete(collector) => collector.as_ref().map_or(0, |collector| collector.bytes()),
        }
    }

    /// What is left of a stream, and its end.
    pub fn done(&mut self) -> Bytes {
        match &mut self.form {
            Form::ChatStream(encoder) => encoder.done(&mut self.buffer),
            Form::CompleteStream(encoder) => encoder.done(&mut self.buffer),
            Form::Chat(_) | Form::Complete(_) => {}
        }
        taken(&mut self.buffer)
    }

    /// What is left of a stream, and an error event as its last.
    pub fn fail(&mut self, failure: &Failure) -> Bytes {
        match &mut self.form {
            Form::ChatStream(encoder) => encoder.fail(failure.shape(), &failure.message, &mut self.buffer),
            Form::CompleteStream(encoder) => encoder.fail(failure.shape(), &failure.message, &mut self.buffer),
            Form::Chat(_) | Form::Complete(_) => {}
        }
        taken(&mut self.buffer)
    }

    /// The whole answer; `None` if a choice is missing. `score` ranks the choices of `best_of`.
    pub fn whole(&mut self, score: &dyn Fn(u32) -> Option<f32>) -> Option<Bytes> {
        if let Form::Complete(Some(collector)) = &mut self.form {
            for choice in 0..self.choices as u32 {
                score(choice).into_iter().for_each(|mean| collector.score(choice, mean));
            }
        }
        match &mut self.form {
            Form::Chat(collector) => collector.take()?.finish(),
            Form::Complete(collector) => collector.take()?.finish(),
            Form::ChatStream(_) | Form::CompleteStream(_) => None,
        }
    }
}
