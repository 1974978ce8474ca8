//! Between events and the bytes of a client's dialect, for plugins that need the other form.

use std::sync::{Arc, LazyLock};

use bytes::BytesMut;
use penstock_dialects::{anthropic, gemini, ollama, openai};
use penstock_types::{AnswerDecoder, ChatEvent, Dialect, ProviderCodec, StreamEncoder, Surface, Usage, WholeCollector};

use super::shell::AnswerShape;
use penstock_base::error::Failure;
use penstock_upstream::Facts;

type Codec = Box<dyn ProviderCodec>;

/// Codec that speaks the API of a surface from the client's side.
pub(super) fn codec_of(surface: Surface) -> &'static dyn ProviderCodec {
    static ANTHROPIC: LazyLock<Codec> = LazyLock::new(|| Box::new(anthropic::Codec::default()));
    static GEMINI: LazyLock<Codec> = LazyLock::new(|| Box::new(gemini::Codec::default()));
    static OLLAMA: LazyLock<Codec> = LazyLock::new(|| Box::new(ollama::Codec));
    static CHAT: LazyLock<Codec> = LazyLock::new(|| Box::new(openai::ChatCodec::default()));
    static RESPONSES: LazyLock<Codec> = LazyLock::new(|| Box::new(openai::ResponsesCodec::default()));
    let codec = match (surface, surface.dialect()) {
        (Surface::Responses, _) => &RESPONSES,
        (_, Dialect::OpenAi) => &CHAT,
        (_, Dialect::Anthropic) => &ANTHROPIC,
        (_, Dialect::Gemini) => &GEMINI,
        (_, Dialect::Ollama) => &OLLAMA,
    };
    &***codec
}

/// Converter in front of a plugin, or behind the last one.
pub(super) enum Converter {
    /// Undecided: no event has come yet, and the first one decides.
    Open,
    /// No conversion: events have the wanted form already.
    None,
    /// From the bytes of an upstream's answer to events.
    Read { decoder: Box<dyn AnswerDecoder>, usage: bool },
    /// From events to the bytes of a stream.
    Stream { encoder: Box<dyn StreamEncoder>, finished: usize },
    /// From events to the bytes of a whole answer.
    Whole { collector: Option<Box<dyn WholeCollector>> },
}

/// Usage of an answer in the form that dialects write.
pub(super) fn usage_of(facts: Facts) -> Usage {
    Usage {
        prompt_tokens: facts.prompt_tokens,
        cached_tokens: facts.cached_tokens,
        cache_write_tokens: facts.cache_write_tokens,
        completion_tokens: facts.completion_tokens,
        reasoning_tokens: facts.reasoning_tokens,
    }
}

impl Converter {
    /// Chooses the conversion by the form of the first event and the form that is wanted.
    fn settle(&mut self, first: &ChatEvent, wants_bytes: bool, shape: &Arc<AnswerShape>) {
        let is_bytes = matches!(first, ChatEvent::Raw(_));
        let decoded = &shape.decoded;
        *self = match (is_bytes, wants_bytes) {
            (true, false) => {
                let decoder = codec_of(shape.surface).decoder(&decoded.request);
                Converter::Read { decoder, usage: false }
            }
            (false, true) => match shape.stream {
                true => Converter::Stream { encoder: decoded.form.stream(&shape.meta), finished: 0 },
                false => Converter::Whole { collector: Some(decoded.form.whole(&shape.meta)) },
            },
            _ => Converter::None,
        };
    }

    /// Bytes that the conversion holds: what has not been said yet, or the whole answer.
    pub(super) fn held(&self) -> usize {
        match self {
            Converter::Open | Converter::None => 0,
            Converter::Read { decoder, .. } => decoder.held(),
            Converter::Stream { encoder, .. } => encoder.held(),
            Converter::Whole { collector } => collector.as_ref().map_or(0, |collector| collector.bytes()),
        }
    }

    /// Turns `events` into the wanted form. `facts` and `score` are the upstream's.
    pub(super) fn convert(
        &mut self,
        events: &mut Vec<ChatEvent>,
        end: bool,
        wants_bytes: bool,
        shape: &Arc<AnswerShape>,
        facts: Facts,
        score: &dyn Fn(u32) -> Option<f32>,
    ) -> Result<(), Failure> {
        if let (Converter::Open, Some(first)) = (&*self, events.first()) {
            self.settle(first, wants_bytes, shape);
        }
        match self {
            Converter::Open | Converter::None => Ok(()),
            Converter::Read { decoder, usage } => read(decoder.as_mut(), usage, events, end, facts),
            Converter::Stream { encoder, finished } => {
                *finished += finishes(events);
                let mut out = BytesMut::new();
                encoder.set_usage(usage_of(facts));
                events.drain(..).for_each(|event| encoder.event(&event, &mut out));
                if encoder.held() > penstock_upstream::ANSWER_BYTES_MAX {
                    return Err(Failure::internal("the answer grew beyond what a plugin may be shown"));
                }
                if end {
                    if *finished < shape.decoded.form.choices() {
                        return Err(Failure::internal("the upstream ended before all choices had finished"));
                    }
                    encoder.done(&mut out);
                }
                events.extend((!out.is_empty()).then(|| ChatEvent::Raw(out.freeze())));
                Ok(())
            }
            Converter::Whole { collector } => {
                collector.iter_mut().for_each(|held| events.iter().for_each(|event| held.event(event)));
                events.clear();
                if collector.as_ref().is_some_and(|held| held.bytes() > penstock_upstream::ANSWER_BYTES_MAX) {
                    return Err(Failure::internal("the answer grew beyond what a plugin may be shown"));
                }
                let Some(mut done) = end.then(|| collector.take()).flatten() else { return Ok(()) };
                for choice in 0..shape.decoded.form.choices() as u32 {
                    score(choice).into_iter().for_each(|mean| done.score(choice, mean));
                }
                let body = done.finish().ok_or_else(|| Failure::internal("an answer without all its choices"))?;
                events.push(ChatEvent::Raw(body));
                Ok(())
            }
        }
    }
}

/// Decodes bytes into events. Usage that the client did not ask for is decoded too, and passed on.
fn read(
    decoder: &mut dyn AnswerDecoder,
    usage: &mut bool,
    events: &mut Vec<ChatEvent>,
    end: bool,
    facts: Facts,
) -> Result<(), Failure> {
    let mut out = Vec::with_capacity(events.len() + 1);
    for event in events.drain(..) {
        match event {
            ChatEvent::Raw(bytes) => decoder.push(&bytes, &mut out).map_err(Failure::provider)?,
            other => out.push(other),
        }
    }
    if end {
        decoder.end(&mut out).map_err(Failure::provider)?;
    }
    *usage |= out.iter().any(|event| matches!(event, ChatEvent::Usage(_)));
    let counted = facts.is_known();
    out.extend((end && !*usage && counted).then(|| ChatEvent::Usage(usage_of(facts))));
    *events = out;
    Ok(())
}

/// Number of choices that finish in these events.
pub(super) fn finishes(events: &[ChatEvent]) -> usize {
    events.iter().filter(|event| matches!(event, ChatEvent::Finish { .. })).count()
}
