//! Decoding of a body by the operation that was asked for.

use penstock_types::ask::{Ask, Variant};
use penstock_types::codec::Framing;
use penstock_types::{ApiError, Bounds, Decoded, Surface};

use crate::{anthropic, gemini, ollama, openai};

/// Reads a body in the dialect that `ask` names.
pub fn decode(ask: &Ask, body: &[u8]) -> Result<Decoded, ApiError> {
    let bounds = Bounds::default();
    let model = ask.model.as_deref().unwrap_or_default();
    match ask.surface {
        Surface::Chat => openai::chat(body, &bounds),
        Surface::Completions => openai::completion(body, &bounds),
        Surface::Responses if ask.variant == Variant::Count => openai::count_responses(body, &bounds),
        Surface::Responses => openai::responses(body, &bounds),
        Surface::Embeddings => openai::embeddings(body, &bounds),
        Surface::Rerank => openai::rerank(body, &bounds),
        Surface::Score => openai::score(body, &bounds),
        Surface::Messages => anthropic::messages(body, &bounds),
        Surface::CountTokens => anthropic::count_tokens(body, &bounds),
        Surface::Generate if ask.variant == Variant::Count => gemini::count(model, body, &bounds),
        Surface::Generate => gemini::generate(model, framing(ask), body, &bounds),
        Surface::Embed => gemini::embed(model, ask.variant == Variant::Batch, body, &bounds),
        Surface::OllamaChat => ollama::chat(body, &bounds),
        Surface::OllamaGenerate => ollama::generate(body, &bounds),
        Surface::OllamaEmbed => ollama::embed(ask.variant == Variant::Batch, body, &bounds),
    }
}

fn framing(ask: &Ask) -> Framing {
    match (ask.stream, ask.variant) {
        (false, _) => Framing::Whole,
        (true, Variant::Array) => Framing::Array,
        (true, _) => Framing::Events,
    }
}
