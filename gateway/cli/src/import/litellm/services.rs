//! Service names in front of models, `provider/name`, with the services' addresses.

/// Service that LiteLLM knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Service {
    /// Name of the service, and of our provider.
    pub(super) id: &'static str,
    pub(super) protocol: &'static str,
    /// Address; `None`: the protocol's own, or that of `api_base`.
    pub(super) base_url: Option<&'static str>,
    pub(super) needs_base: bool,
    /// Variable from which LiteLLM takes the key by default.
    pub(super) key_env: Option<&'static str>,
    /// Suffix that makes an address that of OpenAI's API.
    suffix: &'static str,
}

const fn at(id: &'static str, base_url: &'static str, key_env: &'static str) -> Service {
    let base_url = Some(base_url);
    Service { id, protocol: "openai", base_url, needs_base: false, key_env: Some(key_env), suffix: "" }
}

const fn own(id: &'static str, protocol: &'static str, key_env: Option<&'static str>, needs_base: bool) -> Service {
    Service { id, protocol, base_url: None, needs_base, key_env, suffix: "" }
}

#[rustfmt::skip]
const SERVICES: &[(&str, Service)] = &[
    ("openai", own("openai", "openai", Some("OPENAI_API_KEY"), false)),
    ("text-completion-openai", own("openai", "openai", Some("OPENAI_API_KEY"), false)),
    ("azure", own("azure", "azure", Some("AZURE_API_KEY"), true)),
    ("anthropic", own("anthropic", "anthropic", Some("ANTHROPIC_API_KEY"), false)),
    ("gemini", own("gemini", "gemini", Some("GEMINI_API_KEY"), false)),
    ("vertex_ai", own("vertex", "vertex", None, false)),
    ("bedrock", own("bedrock", "bedrock", None, false)),
    ("hosted_vllm", own("vllm", "openai", None, true)),
    ("vllm", own("vllm", "openai", None, true)),
    ("openai_like", own("openai-like", "openai", None, true)),
    ("lm_studio", own("lm-studio", "openai", None, true)),
    ("llamafile", own("llamafile", "openai", None, true)),
    ("litellm_proxy", own("litellm", "openai", None, true)),
    ("ollama", Service { suffix: "/v1", ..at("ollama", "http://localhost:11434/v1", "") }),
    ("ollama_chat", Service { suffix: "/v1", ..at("ollama", "http://localhost:11434/v1", "") }),
    ("mistral", at("mistral", "https://api.mistral.ai/v1", "MISTRAL_API_KEY")),
    ("deepseek", at("deepseek", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY")),
    ("groq", at("groq", "https://api.groq.com/openai/v1", "GROQ_API_KEY")),
    ("together_ai", at("together", "https://api.together.xyz/v1", "TOGETHERAI_API_KEY")),
    ("openrouter", at("openrouter", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY")),
    ("fireworks_ai", at("fireworks", "https://api.fireworks.ai/inference/v1", "FIREWORKS_AI_API_KEY")),
    ("perplexity", at("perplexity", "https://api.perplexity.ai", "PERPLEXITYAI_API_KEY")),
    ("xai", at("xai", "https://api.x.ai/v1", "XAI_API_KEY")),
    ("cerebras", at("cerebras", "https://api.cerebras.ai/v1", "CEREBRAS_API_KEY")),
    ("nvidia_nim", at("nvidia", "https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY")),
    ("deepinfra", at("deepinfra", "https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY")),
    ("sambanova", at("sambanova", "https://api.sambanova.ai/v1", "SAMBANOVA_API_KEY")),
    ("moonshot", at("moonshot", "https://api.moonshot.ai/v1", "MOONSHOT_API_KEY")),
    ("dashscope", at("dashscope", "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY")),
];

/// Prefixes of model names that LiteLLM knows without a service in front.
const BARE: &[(&str, &str)] = &[
    ("gpt-", "openai"),
    ("o1", "openai"),
    ("o3", "openai"),
    ("o4", "openai"),
    ("chatgpt-", "openai"),
    ("text-embedding-", "openai"),
    ("claude-", "anthropic"),
    ("gemini-", "vertex_ai"),
    ("deepseek-", "deepseek"),
];

impl Service {
    /// Service of which only the address is known.
    pub(super) fn unknown() -> Self {
        own("other", "openai", None, true)
    }

    /// Address in the form that our providers take.
    pub(super) fn base(&self, given: &str) -> String {
        let given = given.trim_end_matches('/');
        if given.starts_with("os.environ/") || given.ends_with(self.suffix) {
            return given.to_owned();
        }
        format!("{given}{}", self.suffix)
    }
}

/// Service and model of `provider/name`. `said`: the service that is named beside it.
///
/// # Errors
/// The name of an unknown service.
pub(super) fn split(full: &str, said: Option<&str>) -> Result<(Service, String), String> {
    let find = |name: &str| {
        let found = SERVICES.iter().find(|(have, _)| *have == name).map(|(_, service)| *service);
        found.map(|service| Service { key_env: service.key_env.filter(|name| !name.is_empty()), ..service })
    };
    if let Some(name) = said {
        let service = find(name).ok_or(name)?;
        return Ok((
            service,
            full.strip_prefix(name).and_then(|rest| rest.strip_prefix('/')).unwrap_or(full).to_owned(),
        ));
    }
    if let Some((name, model)) = full.split_once('/') {
        let service = find(name).ok_or(name)?;
        let model = match name {
            "bedrock" => {
                ["converse/", "invoke/"].iter().fold(model, |model, way| model.strip_prefix(way).unwrap_or(model))
            }
            _ => model,
        };
        return Ok((service, model.to_owned()));
    }
    let known = BARE.iter().find(|(beginning, _)| full.starts_with(beginning));
    known.and_then(|(_, name)| find(name)).map(|service| (service, full.to_owned())).ok_or_else(|| full.to_owned())
}
