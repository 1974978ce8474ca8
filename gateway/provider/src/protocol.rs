//! API protocols of providers: paths, surfaces that can be passed through, and codecs for the others.

use penstock_dialects::{anthropic, bedrock, gemini, openai};
use penstock_types::{ProviderCodec, Surface};

use crate::ProviderConfig;
use penstock_types::ask::{Ask, Variant};

/// Protocol of a provider's API: wire format, paths, and credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// Chat Completions API of OpenAI and compatible services.
    OpenAi,
    /// OpenAI, with `/responses` for every request.
    OpenAiResponses,
    /// OpenAI at Azure: the model is in the path.
    Azure,
    /// Messages API of Anthropic.
    Anthropic,
    /// Gemini API with an API key.
    Gemini,
    /// Gemini API at Google Cloud (Vertex AI).
    Vertex,
    /// Converse API of AWS Bedrock.
    Bedrock,
}

const NAMES: [(&str, Protocol); 7] = [
    ("openai", Protocol::OpenAi),
    ("openai_responses", Protocol::OpenAiResponses),
    ("azure", Protocol::Azure),
    ("anthropic", Protocol::Anthropic),
    ("gemini", Protocol::Gemini),
    ("vertex", Protocol::Vertex),
    ("bedrock", Protocol::Bedrock),
];

impl Protocol {
    /// Protocol of a name in the config.
    pub fn parse(name: &str) -> Option<Self> {
        NAMES.iter().find(|(have, _)| *have == name).map(|(_, protocol)| *protocol)
    }

    /// Name of the protocol as the config writes it.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, protocol)| *protocol == self).map_or("", |(name, _)| name)
    }

    /// Value of `gen_ai.provider.name` by OpenTelemetry's conventions.
    pub fn provider_name(self) -> &'static str {
        match self {
            Protocol::OpenAi | Protocol::OpenAiResponses => "openai",
            Protocol::Azure => "azure.ai.openai",
            Protocol::Anthropic => "anthropic",
            Protocol::Gemini => "gcp.gemini",
            Protocol::Vertex => "gcp.vertex_ai",
            Protocol::Bedrock => "aws.bedrock",
        }
    }

    /// Names of all protocols, separated by commas, for error messages.
    pub fn names() -> String {
        NAMES.map(|(name, _)| name).join(", ")
    }

    /// Base URL of the protocol's own service, if it has one for that region and project.
    pub fn base_url(self, region: Option<&str>, project: Option<&str>) -> Option<String> {
        match self {
            Protocol::OpenAi | Protocol::OpenAiResponses => Some("https://api.openai.com/v1".into()),
            Protocol::Anthropic => Some("https://api.anthropic.com/v1".into()),
            Protocol::Gemini => Some("https://generativelanguage.googleapis.com/v1beta".into()),
            Protocol::Bedrock => region.map(|region| format!("https://bedrock-runtime.{region}.amazonaws.com")),
            Protocol::Vertex => {
                let (region, project) = (region?, project?);
                let host = if region == "global" { String::new() } else { format!("{region}-") };
                Some(format!(
                    "https://{host}aiplatform.googleapis.com/v1/projects/{project}/locations/{region}/publishers/google"
                ))
            }
            Protocol::Azure => None,
        }
    }

    /// Returns true if a streamed event can carry an image, and may therefore be larger.
    pub fn sends_images(self) -> bool {
        matches!(self, Protocol::Gemini | Protocol::Vertex | Protocol::OpenAiResponses)
    }

    /// Returns true if the request's surface is this protocol's own, so that its bytes are passed through.
    pub fn speaks(self, ask: &Ask) -> bool {
        let surface = ask.surface;
        match self {
            Protocol::OpenAi => matches!(
                surface,
                Surface::Chat | Surface::Completions | Surface::Embeddings | Surface::Rerank | Surface::Score
            ),
            Protocol::OpenAiResponses => matches!(surface, Surface::Responses | Surface::Embeddings),
            Protocol::Azure => matches!(surface, Surface::Chat | Surface::Completions | Surface::Embeddings),
            Protocol::Anthropic => matches!(surface, Surface::Messages | Surface::CountTokens),
            // The model and the kind of answer are in the path; the body is the same for all of them.
            Protocol::Gemini | Protocol::Vertex => surface == Surface::Generate && ask.variant == Variant::Usual,
            Protocol::Bedrock => false,
        }
    }
}

/// Returns true if the service is OpenAI itself (or Azure), which refuses unknown fields.
pub(super) fn is_strict(config: &ProviderConfig) -> bool {
    config.protocol == Protocol::Azure || config.target.authority == "api.openai.com"
}

/// Codec that translates requests of other dialects into this protocol.
pub(super) fn codec_of(config: &ProviderConfig) -> Option<Box<dyn ProviderCodec>> {
    match config.protocol {
        Protocol::OpenAi if is_strict(config) => Some(Box::new(openai::ChatCodec::strict())),
        Protocol::OpenAi => Some(Box::new(openai::ChatCodec::default())),
        Protocol::Azure => Some(Box::new(openai::ChatCodec::strict())),
        Protocol::Anthropic => Some(Box::new(anthropic::Codec::default())),
        Protocol::Gemini | Protocol::Vertex => Some(Box::new(gemini::Codec::default())),
        Protocol::OpenAiResponses => Some(Box::new(openai::ResponsesCodec)),
        Protocol::Bedrock => Some(Box::new(bedrock::Codec)),
    }
}

/// Path of a surface behind the base URL of an OpenAI-compatible service.
pub(super) fn openai_path(surface: Surface, variant: Variant) -> &'static str {
    match surface {
        Surface::Completions => "/completions",
        Surface::Responses if variant == Variant::Count => "/responses/input_tokens",
        Surface::Responses => "/responses",
        Surface::Embeddings => "/embeddings",
        Surface::Rerank => "/rerank",
        Surface::Score => "/score",
        Surface::Messages => "/messages",
        Surface::CountTokens => "/messages/count_tokens",
        Surface::Chat
        | Surface::Generate
        | Surface::Embed
        | Surface::OllamaChat
        | Surface::OllamaGenerate
        | Surface::OllamaEmbed => "/chat/completions",
    }
}
