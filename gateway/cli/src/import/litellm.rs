//! LiteLLM's proxy config: `model_list`, `router_settings`, `litellm_settings`, `general_settings`
//! (<https://docs.litellm.ai/docs/proxy/configs>).
//!
//! Deployments with one `model_name` become the targets of one `[[models]]` entry; the services that they connect to
//! become `[[providers]]`, one per address and key. Every key of the source is either used or listed.

mod counterparts;
mod services;
mod write;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail};
use saphyr::{LoadableYamlNode, Yaml};

use super::Imported;
use counterparts::told;
use services::Service;

/// A provider of the translation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Provider {
    id: String,
    protocol: &'static str,
    base_url: Option<String>,
    key_env: Option<String>,
    api_version: Option<String>,
    region: Option<String>,
    project: Option<String>,
    pace: Pace,
}

/// Requests and tokens per minute that a provider allows one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Pace {
    requests: Option<u64>,
    tokens: Option<u64>,
}

/// `rpm` and `tpm` of one deployment, and their path in the source.
#[derive(Clone, Debug)]
struct Rated {
    provider: String,
    path: String,
    pace: Pace,
}

/// One deployment.
#[derive(Clone, Debug, PartialEq)]
struct Target {
    provider: String,
    model: String,
    weight: u64,
}

/// A model of the translation.
#[derive(Clone, Debug, Default)]
struct Model {
    name: String,
    aliases: Vec<String>,
    to: Vec<Target>,
    fallback: Vec<Target>,
    fallback_on: BTreeSet<&'static str>,
    context_tokens: u64,
    price: BTreeMap<&'static str, f64>,
    /// True if the model makes vectors or scores, which have no output tokens.
    has_no_output: bool,
}

/// Settings of all models.
#[derive(Clone, Debug, Default)]
struct Router {
    policy: Option<&'static str>,
    retries: Option<u64>,
    timeout_ms: Option<u64>,
    first_token_timeout_ms: Option<u64>,
}

#[derive(Default)]
struct Translation {
    providers: Vec<Provider>,
    models: Vec<Model>,
    /// Rates of each deployment that became a target.
    rated: Vec<Rated>,
    router: Router,
    master_key_env: Option<String>,
    /// Fallbacks: reason, model, and the models that follow it.
    fallbacks: Vec<(&'static str, String, Vec<String>)>,
    default_fallbacks: Vec<String>,
    left: Vec<String>,
}

/// Translates a config.
pub(super) fn translate(text: &str) -> anyhow::Result<Imported> {
    let documents = Yaml::load_from_str(text).context("not valid YAML")?;
    let Some(root) = documents.first().filter(|root| root.is_mapping()) else { bail!("the root must be a mapping") };
    let mut translation = Translation::default();
    for (key, value) in entries(root) {
        match key.as_str() {
            "model_list" => {
                for (at, entry) in value.as_vec().into_iter().flatten().enumerate() {
                    translation.deployment(at, entry);
                }
            }
            "router_settings" | "litellm_settings" => translation.settings(&key, value),
            "general_settings" => translation.general(value),
            "environment_variables" => {
                for (name, _) in entries(value) {
                    translation
                        .leave(&format!("environment_variables.{name}"), "set it in the environment of the process");
                }
            }
            other => translation.leave(other, told(other)),
        }
    }
    translation.link();
    translation.pace();
    translation.prices();
    Ok(Imported { toml: translation.write(), left: translation.left })
}

/// Names and values of a mapping, in its order.
fn entries<'y, 'i>(node: &'y Yaml<'i>) -> Vec<(String, &'y Yaml<'i>)> {
    let mapping = node.as_mapping().into_iter().flatten();
    mapping.map(|(key, value)| (text(key).unwrap_or_else(|| "?".into()), value)).collect()
}

/// Scalar as text.
fn text(node: &Yaml<'_>) -> Option<String> {
    let number = || node.as_integer().map(|int| int.to_string());
    node.as_str().map(str::to_owned).or_else(number).or_else(|| node.as_floating_point().map(|float| float.to_string()))
}

/// Value as a number, at least 0.
fn number(node: &Yaml<'_>) -> Option<f64> {
    let integer = node.as_integer().map(|int| int as f64);
    let typed = integer.or_else(|| node.as_floating_point());
    // "3e-06" without a dot is text in YAML 1.1, a number to LiteLLM.
    typed.or_else(|| node.as_str()?.parse().ok()).filter(|value: &f64| value.is_finite() && *value >= 0.0)
}

/// Milliseconds of a number of seconds, up to a day.
fn millis(node: &Yaml<'_>) -> Option<u64> {
    number(node).map(|seconds| (seconds * 1000.0).round() as u64).filter(|ms| (1..=86_400_000).contains(ms))
}

/// Name of the variable in `os.environ/NAME`.
fn variable(value: &str) -> Option<&str> {
    value.strip_prefix("os.environ/").map(str::trim).filter(|name| !name.is_empty())
}

impl Translation {
    fn leave(&mut self, path: &str, why: &str) {
        self.left.push(format!("{path}: {why}"));
    }

    fn deployment(&mut self, at: usize, entry: &Yaml<'_>) {
        let path = format!("model_list[{at}]");
        let (mut name, mut params, mut info) = (None, None, None);
        for (key, value) in entries(entry) {
            match key.as_str() {
                "model_name" => name = text(value),
                "litellm_params" => params = Some(value),
                "model_info" => info = Some(value),
                other => self.leave(&format!("{path}.{other}"), told(other)),
            }
        }
        let (Some(name), Some(params)) = (name, params) else {
            return self.leave(&path, "has no model_name or no litellm_params");
        };
        if name.contains('*') {
            return self
                .leave(&path, "patterns of names are not served: list the models, or use discover of [[providers]]");
        }
        let Some(target) = self.target(&path, params) else { return };
        let at = match self.models.iter().position(|model| model.name == name) {
            Some(at) => at,
            None => {
                self.models.push(Model { name, ..Model::default() });
                self.models.len() - 1
            }
        };
        self.models[at].to.push(target);
        for (node, place) in [(Some(params), "litellm_params"), (info, "model_info")] {
            self.facts(at, &format!("{path}.{place}"), node, place == "model_info");
        }
    }

    /// Takes prices and context, which stand in either place; every other key of `model_info` is listed as
    /// untranslated.
    fn facts(&mut self, model: usize, path: &str, node: Option<&Yaml<'_>>, all: bool) {
        for (key, value) in node.map(entries).unwrap_or_default() {
            let per_million = number(value).map(|price| (price * 1e12).round() / 1e6);
            let price = match key.as_str() {
                "input_cost_per_token" => Some("input"),
                "output_cost_per_token" => Some("output"),
                "cache_read_input_token_cost" => Some("cached_input"),
                "cache_creation_input_token_cost" => Some("cache_write"),
                _ => None,
            };
            match (price, per_million, key.as_str()) {
                (Some(price), Some(value), _) => {
                    let known = *self.models[model].price.entry(price).or_insert(value);
                    if known != value {
                        self.leave(
                            &format!("{path}.{key}"),
                            "another deployment of the model has another price, and a model has one",
                        );
                    }
                }
                (None, _, "max_input_tokens") if all => self.context(model, &format!("{path}.{key}"), value),
                (None, _, "mode") if all => {
                    self.models[model].has_no_output |= matches!(text(value).as_deref(), Some("embedding" | "rerank"));
                }
                (None, _, "id") if all => {}
                (Some(_), None, _) => self.leave(&format!("{path}.{key}"), "is no number"),
                _ if all => self.leave(&format!("{path}.{key}"), told(&key)),
                _ => {}
            }
        }
    }

    /// Takes the context of a deployment; the smallest one is what every target of the model has.
    fn context(&mut self, model: usize, path: &str, value: &Yaml<'_>) {
        let Some(tokens) = number(value).map(|tokens| tokens as u64).filter(|tokens| *tokens > 0) else {
            return self.leave(path, "is no number of tokens");
        };
        let before = self.models[model].context_tokens;
        self.models[model].context_tokens = if before == 0 { tokens } else { tokens.min(before) };
        if before != 0 && before != tokens {
            self.leave(path, "another deployment of the model has another context; the smaller one is taken");
        }
    }

    /// Completes the prices: an entry has one for input and one for output tokens.
    fn prices(&mut self) {
        let mut left = Vec::new();
        for model in &mut self.models {
            let has = |name: &str| model.price.contains_key(name);
            match (has("input"), has("output"), model.price.is_empty()) {
                (true, true, _) | (_, _, true) => {}
                (true, false, _) if model.has_no_output => {
                    model.price.insert("output", 0.0);
                }
                (has_input, _, false) => {
                    model.price.clear();
                    let lacking = if has_input { "output_cost_per_token" } else { "input_cost_per_token" };
                    left.push(format!(
                        "price of {}: has no {lacking}; the price table's price holds, where it has one",
                        model.name
                    ));
                }
            }
        }
        self.left.append(&mut left);
    }

    fn target(&mut self, path: &str, params: &Yaml<'_>) -> Option<Target> {
        let mut found: BTreeMap<&'static str, String> = BTreeMap::new();
        let (mut weight, mut pace) = (1, Pace::default());
        for (key, value) in entries(params) {
            let place = format!("{path}.litellm_params.{key}");
            let known = match key.as_str() {
                "model" => "model",
                "api_base" | "base_url" => "base",
                "api_key" => "key",
                "api_version" => "version",
                "aws_region_name" | "vertex_location" | "region_name" => "region",
                "vertex_project" => "project",
                "custom_llm_provider" => "service",
                "weight" => {
                    let given = number(value).unwrap_or_default();
                    match given.round() as u64 {
                        rounded @ 1..=1_000_000 => {
                            weight = rounded;
                            if given.fract() != 0.0 {
                                self.leave(&place, &format!("weights are whole numbers: {rounded} is taken"));
                            }
                        }
                        _ => self.leave(&place, "weights are whole numbers from 1"),
                    }
                    continue;
                }
                "rpm" => {
                    pace.requests = self.rate(&place, value, 10_000_000);
                    continue;
                }
                "tpm" => {
                    pace.tokens = self.rate(&place, value, 1_000_000_000_000);
                    continue;
                }
                "max_parallel_requests" => {
                    self.leave(
                        &place,
                        "limits of deployments are not kept; in_flight_max of [[providers]] is the nearest",
                    );
                    continue;
                }
                "timeout" | "stream_timeout" | "num_retries" | "max_retries" => {
                    self.leave(&place, "is set per provider or per model: see [[providers]] and [[models]]");
                    continue;
                }
                "input_cost_per_token"
                | "output_cost_per_token"
                | "cache_read_input_token_cost"
                | "cache_creation_input_token_cost" => continue,
                _ => {
                    self.leave(&place, told(&key));
                    continue;
                }
            };
            match text(value) {
                Some(value) => drop(found.insert(known, value)),
                None => self.leave(&place, "is not text"),
            }
        }
        let Some(full) = found.get("model").cloned() else {
            self.leave(path, "has no litellm_params.model");
            return None;
        };
        let (service, model) = match services::split(&full, found.get("service").map(String::as_str)) {
            Ok(found) => found,
            Err(name) if found.contains_key("base") => {
                self.leave(
                    &format!("{path}.litellm_params.model"),
                    &format!("{name:?} is not known here; taken for OpenAI-compatible"),
                );
                (Service::unknown(), full.split_once('/').map_or(full.clone(), |(_, model)| model.to_owned()))
            }
            Err(name) => {
                self.leave(
                    &format!("{path}.litellm_params.model"),
                    &format!("the provider {name:?} is not known here"),
                );
                return None;
            }
        };
        let provider = self.provider(path, service, &mut found)?;
        self.rated.push(Rated { provider: provider.clone(), path: format!("{path}.litellm_params"), pace });
        Some(Target { provider, model, weight })
    }

    /// Rate as the config takes it: a whole number up to `max`.
    fn rate(&mut self, path: &str, value: &Yaml<'_>, max: u64) -> Option<u64> {
        let rate = number(value).filter(|rate| rate.fract() == 0.0 && (1.0..=max as f64).contains(rate));
        if rate.is_none() {
            self.leave(path, "is no whole number from 1");
        }
        rate.map(|rate| rate as u64)
    }

    /// Moves `rpm` and `tpm` of deployments to their providers, where that has the same meaning: our rates are per key,
    /// for all its models together.
    fn pace(&mut self) {
        let mut of: BTreeMap<String, Vec<Rated>> = BTreeMap::new();
        for rated in std::mem::take(&mut self.rated) {
            of.entry(rated.provider.clone()).or_default().push(rated);
        }
        for rated in of.into_values() {
            let (pace, count) = (&rated[0].pace, rated.len());
            if count == 1 {
                if let Some(provider) = self.providers.iter_mut().find(|provider| provider.id == rated[0].provider) {
                    provider.pace = pace.clone();
                }
                continue;
            }
            for one in &rated {
                let names =
                    [("rpm", "requests_per_minute", one.pace.requests), ("tpm", "tokens_per_minute", one.pace.tokens)];
                for (name, ours, _) in names.into_iter().filter(|(_, _, rate)| rate.is_some()) {
                    let why = format!(
                        "{count} deployments use the key of the provider {}, and {ours} of [[providers]] is for all that a key is used \
                         for: set it there if the provider publishes such a rate",
                        one.provider
                    );
                    self.leave(&format!("{}.{name}", one.path), &why);
                }
            }
        }
    }

    /// Id of the provider with that address and key; a new one is made where there is none.
    fn provider(&mut self, path: &str, service: Service, found: &mut BTreeMap<&'static str, String>) -> Option<String> {
        let base_url = match found.remove("base").map(|base| service.base(&base)) {
            Some(base) if variable(&base).is_some() => {
                self.leave(
                    &format!("{path}.litellm_params.api_base"),
                    "addresses cannot come from the environment: write it here",
                );
                Some(format!("https://{}.invalid", service.id))
            }
            Some(base) => Some(base),
            None => service.base_url.map(str::to_owned),
        };
        if base_url.is_none() && service.needs_base {
            self.leave(path, "has no api_base");
            return None;
        }
        let literal = |name: &str, found: &mut BTreeMap<&'static str, String>| {
            found.remove(name).filter(|value| variable(value).is_none())
        };
        let key = found.remove("key");
        let mut provider = Provider {
            id: String::new(),
            protocol: service.protocol,
            base_url,
            key_env: None,
            api_version: literal("version", found),
            region: literal("region", found),
            project: literal("project", found),
            pace: Pace::default(),
        };
        provider.key_env = match key.as_deref() {
            Some(key) => Some(match variable(key) {
                Some(name) => name.to_owned(),
                // "none", "sk-fake" and the like stand where no key is needed; a variable that is not set is a fault, so it is said.
                None => {
                    let name = format!("{}_KEY_{}", write::upper(service.id), self.providers.len() + 1);
                    let why = format!("the key stands in clear text: put it into the environment variable {name}");
                    self.leave(&format!("{path}.litellm_params.api_key"), &why);
                    name
                }
            }),
            None => service.key_env.map(str::to_owned),
        };
        let same = |have: &&Provider| Provider { id: String::new(), ..(*have).clone() } == provider;
        if let Some(have) = self.providers.iter().find(same) {
            return Some(have.id.clone());
        }
        let taken = |id: &str| self.providers.iter().any(|have| have.id == id);
        let numbered = (2..).map(|count| format!("{}-{count}", service.id));
        provider.id = std::iter::once(service.id.to_owned()).chain(numbered).find(|id| !taken(id))?;
        self.providers.push(provider);
        self.providers.last().map(|provider| provider.id.clone())
    }

    fn settings(&mut self, table: &str, node: &Yaml<'_>) {
        for (key, value) in entries(node) {
            let path = format!("{table}.{key}");
            match key.as_str() {
                "routing_strategy" => self.strategy(&path, value),
                "num_retries" => self.router.retries = number(value).map(|count| (count as u64).min(10)),
                "timeout" | "request_timeout" => self.router.timeout_ms = millis(value),
                "stream_timeout" => self.router.first_token_timeout_ms = millis(value),
                "fallbacks" => self.chains("error", &path, value),
                "context_window_fallbacks" => self.chains("context_length", &path, value),
                "content_policy_fallbacks" => self.chains("content_policy", &path, value),
                "default_fallbacks" => {
                    self.default_fallbacks = value.as_vec().into_iter().flatten().filter_map(text).collect();
                }
                "model_group_alias" => self.aliases(&path, value),
                "allowed_fails" | "cooldown_time" | "disable_cooldowns" | "retry_policy" | "allowed_fails_policy" => {
                    self.leave(&path, "health is judged by rules of penstock's own: docs/reference/routing.md");
                }
                _ => self.leave(&path, told(&key)),
            }
        }
    }

    fn strategy(&mut self, path: &str, value: &Yaml<'_>) {
        let name = text(value).unwrap_or_default();
        self.router.policy = match name.as_str() {
            "simple-shuffle" => Some("weighted"),
            "least-busy" => Some("least_busy"),
            "latency-based-routing" => Some("latency"),
            "cost-based-routing" => Some("cost"),
            "usage-based-routing" | "usage-based-routing-v2" => {
                self.leave(path, "usage is not counted per deployment; least_busy is the nearest");
                Some("least_busy")
            }
            other => {
                self.leave(
                    path,
                    &format!("the strategy {other:?} is not known here: the default of [[models]] policy is kept"),
                );
                None
            }
        };
    }

    /// Reads fallbacks, `[{ model: [next, …] }, …]`.
    fn chains(&mut self, reason: &'static str, path: &str, value: &Yaml<'_>) {
        for chain in value.as_vec().into_iter().flatten() {
            for (model, followers) in entries(chain) {
                let names: Vec<_> = followers.as_vec().into_iter().flatten().filter_map(text).collect();
                if names.is_empty() {
                    self.leave(&format!("{path}.{model}"), "names no model");
                } else if model == "*" {
                    self.default_fallbacks.extend(names);
                } else {
                    self.fallbacks.push((reason, model, names));
                }
            }
        }
    }

    fn aliases(&mut self, path: &str, value: &Yaml<'_>) {
        for (alias, meant) in entries(value) {
            let meant = text(meant).or_else(|| {
                entries(meant).into_iter().find(|(key, _)| key == "model").and_then(|(_, name)| text(name))
            });
            match self.models.iter_mut().find(|model| Some(&model.name) == meant.as_ref()) {
                Some(model) => model.aliases.push(alias),
                None => self.leave(&format!("{path}.{alias}"), "stands for a model that is not there"),
            }
        }
    }

    fn general(&mut self, node: &Yaml<'_>) {
        for (key, value) in entries(node) {
            let path = format!("general_settings.{key}");
            match (key.as_str(), text(value)) {
                ("master_key", Some(key)) => {
                    let name = variable(&key).unwrap_or("PENSTOCK_MASTER_KEY").to_owned();
                    if variable(&key).is_none() {
                        let why = format!("the key stands in clear text: put it into the environment variable {name}");
                        self.leave(&path, &why);
                    }
                    self.master_key_env = Some(name);
                }
                _ => self.leave(&path, told(&key)),
            }
        }
    }

    /// Resolves fallbacks, which name models, into the targets of these models.
    fn link(&mut self) {
        let groups: BTreeMap<String, Vec<Target>> =
            self.models.iter().map(|model| (model.name.clone(), model.to.clone())).collect();
        for (reason, name, followers) in std::mem::take(&mut self.fallbacks) {
            let Some(at) = self.models.iter().position(|model| model.name == name) else {
                self.leave(&format!("fallbacks.{name}"), "there is no such model");
                continue;
            };
            self.follow(at, reason, &followers, &groups);
        }
        let defaults = std::mem::take(&mut self.default_fallbacks);
        for at in 0..self.models.len() {
            if !self.models[at].fallback_on.contains("error") && !defaults.is_empty() {
                self.follow(at, "error", &defaults, &groups);
            }
            if self.models[at].to.len() == 1 && self.router.policy.is_some_and(|policy| policy != "weighted") {
                let path = format!("routing_strategy of {}", self.models[at].name);
                self.leave(&path, "the model has one target, so there is nothing to choose");
            }
            if self.models[at].fallback_on.len() > 1 {
                let path = format!("fallbacks of {}", self.models[at].name);
                self.leave(&path, "a model has one list for all reasons: they were put one behind the other");
            }
        }
    }

    fn follow(
        &mut self,
        at: usize,
        reason: &'static str,
        followers: &[String],
        groups: &BTreeMap<String, Vec<Target>>,
    ) {
        for follower in followers {
            let Some(targets) = groups.get(follower) else {
                let path = format!("fallbacks.{}", self.models[at].name);
                self.leave(&path, &format!("there is no model {follower:?}"));
                continue;
            };
            let model = &mut self.models[at];
            let same = |have: &Target, target: &Target| have.provider == target.provider && have.model == target.model;
            for target in targets {
                if !model.to.iter().chain(&model.fallback).any(|have| same(have, target)) {
                    model.fallback.push(target.clone());
                }
            }
            if !model.fallback.is_empty() {
                model.fallback_on.insert(reason);
            }
        }
    }
}

#[cfg(test)]
mod tests;
