//! API protocols of providers: paths, surfaces that can be passed through, and codecs for the others.

use penstock_dialects::{anthropic, bedrock, gemini, openai};
use penstock_types::{ProviderCodec, Surface};

use crate::ProviderConfig;
use penstock_http::client::Place;
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

/// Returns true if the service is OpenAI itself (or Azure), which refuses unknown fields: by the protocol, or by the host, whatever
/// the port.
pub(super) fn is_strict(config: &ProviderConfig) -> bool {
    config.protocol == Protocol::Azure || is_openais(&config.target.place)
}

/// Domains of OpenAI's API: the host itself, and the hosts of regions (`eu.api.openai.com`).
const OPENAI: &str = "api.openai.com";
/// Domain of Azure's resources of OpenAI, whose v1 API (`https://NAME.openai.azure.com/openai/v1`) needs no protocol of its own.
const AZURE: &str = "openai.azure.com";

fn is_openais(place: &Place) -> bool {
    let Place::Tcp { host, .. } = place else { return false };
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let is_below = |domain: &str| host.strip_suffix(domain).is_some_and(|name| name.ends_with('.'));
    host == OPENAI || is_below(OPENAI) || is_below(AZURE)
}

/// Codec that translates requests of other dialects into this protocol.
pub(super) fn codec_of(config: &ProviderConfig) -> Option<Box<dyn ProviderCodec>> {
    match config.protocol {
        Protocol::OpenAi if is_strict(config) => Some(Box::new(openai::ChatCodec::strict())),
        Protocol::OpenAi => Some(Box::new(openai::ChatCodec::default())),
        Protocol::Azure => Some(Box::new(openai::ChatCodec::strict())),
        Protocol::Anthropic => Some(Box::new(anthropic::Codec::default())),
        Protocol::Gemini => Some(Box::new(gemini::Codec::default())),
        Protocol::Vertex => Some(Box::new(gemini::Codec::vertex())),
        Protocol::OpenAiResponses if is_strict(config) => Some(Box::new(openai::ResponsesCodec::strict())),
        Protocol::OpenAiResponses => Some(Box::new(openai::ResponsesCodec::default())),
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

#[cfg(test)]
mod tests {
    use penstock_http::client::Target;

    use super::*;

    #[test]
    fn calls_have_ids_where_the_provider_takes_them() {
        let chat = br#"{"model":"m","messages":[{"role":"user","content":"hi"},
            {"role":"assistant","content":null,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"f","arguments":"{}"}}]},
            {"role":"tool","tool_call_id":"call_1","content":"x"}]}"#;
        let chat = openai::chat(chat, &penstock_types::Bounds::default()).expect("good").request;
        for (protocol, has_ids) in [(Protocol::Gemini, true), (Protocol::Vertex, false)] {
            let target = Target::parse("https://example.com/v1").expect("a target");
            let config = ProviderConfig { protocol, ..ProviderConfig::at(target) };
            let body = codec_of(&config).expect("a codec").encode(&chat, "gemini-3-pro").expect("can be said").body;
            let body = String::from_utf8(body).expect("text");
            assert_eq!(body.matches("call_1").count(), if has_ids { 2 } else { 0 }, "{body}");
            assert_eq!(body.matches("\"id\"").count(), if has_ids { 2 } else { 0 }, "{body}");
            assert!(body.contains("functionCall") && body.contains("functionResponse"), "{body}");
        }
    }

    #[test]
    fn openais_hosts_are_known_whatever_the_region_and_the_port() {
        for (url, strict) in [
            ("https://api.openai.com/v1", true),
            ("https://api.openai.com:443/v1", true),
            ("https://API.OpenAI.com./v1", true),
            ("https://eu.api.openai.com/v1", true),
            ("https://us.api.openai.com:443/v1", true),
            ("https://acme.openai.azure.com/openai/v1", true),
            ("https://acme.openai.azure.com:443/openai/v1", true),
            ("https://evil-api.openai.com.example.com/v1", false),
            ("https://notapi.openai.com/v1", false),
            ("https://openai.azure.com.example.com/v1", false),
            // Azure's hosts for models of every maker.
            ("https://acme.services.ai.azure.com/openai/v1", false),
            ("http://api.openai.com.internal:8080/v1", false),
            ("https://api.mistral.ai/v1", false),
            ("unix:///run/api.openai.com:/v1", false),
        ] {
            assert_eq!(is_openais(&Target::parse(url).expect(url).place), strict, "{url}");
        }
    }
}
