//! Output of the translation as TOML.

use std::fmt::Write;

use super::{Target, Translation};

/// Text in quotes. JSON's escapes are TOML's, but for DEL.
fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default().replace('\u{7f}', "\\u007F")
}

/// Name of an environment variable made of `name`.
pub(super) fn upper(name: &str) -> String {
    name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter.to_ascii_uppercase() } else { '_' }).collect()
}

fn target(target: &Target, with_weight: bool) -> String {
    let weight = if with_weight { format!(", weight = {}", target.weight) } else { String::new() };
    format!("{{ provider = {}, model = {}{weight} }}", quoted(&target.provider), quoted(&target.model))
}

/// List, over several lines if it has several items.
fn list(items: &[String]) -> String {
    match items {
        [] | [_] => format!("[{}]", items.concat()),
        _ => format!("[\n  {},\n]", items.join(",\n  ")),
    }
}

impl Translation {
    pub(super) fn write(&self) -> String {
        let mut out = String::new();
        if let Some(name) = &self.master_key_env {
            let _ = write!(out, "\n[[keys]]\nid = \"master\"\nkey_env = {}\n", quoted(name));
        }
        for provider in &self.providers {
            let _ =
                write!(out, "\n[[providers]]\nid = {}\nprotocol = \"{}\"\n", quoted(&provider.id), provider.protocol);
            let fields = [
                ("base_url", &provider.base_url),
                ("key_env", &provider.key_env),
                ("api_version", &provider.api_version),
                ("region", &provider.region),
                ("project", &provider.project),
            ];
            for (name, value) in fields {
                if let Some(value) = value {
                    let _ = writeln!(out, "{name} = {}", quoted(value));
                }
            }
            let rates = [("requests_per_minute", provider.pace.requests), ("tokens_per_minute", provider.pace.tokens)];
            for (name, rate) in rates {
                if let Some(rate) = rate {
                    let _ = writeln!(out, "{name} = {rate}");
                }
            }
        }
        (0..self.models.len()).for_each(|at| self.write_model(at, &mut out));
        out
    }

    fn write_model(&self, at: usize, out: &mut String) {
        let (model, router) = (&self.models[at], &self.router);
        let _ = write!(out, "\n[[models]]\nname = {}\n", quoted(&model.name));
        if !model.aliases.is_empty() {
            let names: Vec<_> = model.aliases.iter().map(|name| quoted(name)).collect();
            let _ = writeln!(out, "aliases = [{}]", names.join(", "));
        }
        let weighted = model.to.iter().any(|target| target.weight != 1);
        let to: Vec<_> = model.to.iter().map(|item| target(item, weighted)).collect();
        let _ = writeln!(out, "to = {}", list(&to));
        if !model.fallback.is_empty() {
            let fallback: Vec<_> = model.fallback.iter().map(|item| target(item, false)).collect();
            let _ = writeln!(out, "fallback = {}", list(&fallback));
            let mut reasons: Vec<_> = Vec::new();
            for reason in &model.fallback_on {
                match *reason {
                    "error" => reasons.extend(["error", "timeout", "rate_limit"]),
                    other => reasons.push(other),
                }
            }
            let reasons: Vec<_> = reasons.into_iter().map(quoted).collect();
            let _ = writeln!(out, "fallback_on = [{}]", reasons.join(", "));
        }
        if let Some(policy) = router.policy.filter(|policy| *policy != "weighted" && model.to.len() > 1) {
            let _ = writeln!(out, "policy = \"{policy}\"");
        }
        let numbers = [
            ("retries", router.retries),
            ("timeout_ms", router.timeout_ms),
            ("first_token_timeout_ms", router.first_token_timeout_ms),
            ("context_tokens", Some(model.context_tokens).filter(|tokens| *tokens > 0)),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                let _ = writeln!(out, "{name} = {value}");
            }
        }
        if !model.price.is_empty() {
            let prices: Vec<_> = model.price.iter().map(|(name, price)| format!("{name} = {price}")).collect();
            let _ = writeln!(out, "price = {{ {} }}", prices.join(", "));
        }
    }
}
