//! Built-in plugins: one file each.
//!
//! Each file says at its top what the plugin does to a request and to its answer, and what it refuses to do;
//! `docs/reference/plugins.md` has every setting. Shared parts: `fields` (header fields that plugins must leave alone),
//! `lanes` (rewriting the texts of an answer while it comes), `scan` (finding words and patterns in them, wherever they
//! are cut), `held` (events that wait for a verdict), `recorder` (keeping an answer to repeat it).
#![forbid(unsafe_code)]

mod body;
mod cache;
mod capture;
mod fault;
mod fields;
mod guard;
mod headers;
mod held;
mod http_hook;
mod lanes;
mod moderation;
mod pii;
mod prompt;
mod recorder;
mod route;
mod scan;
mod semantic_cache;
mod tags;
#[cfg(test)]
mod testing;

use penstock_plugins::text::Writer;
use penstock_plugins::{AskAs, Kind, Settings};

/// Every built-in kind of plugin, as entries of the config name them.
pub const KINDS: &[&dyn Kind] = &[
    &body::Body,
    &cache::Cache,
    &capture::Capture,
    &fault::Fault,
    &guard::Guard,
    &headers::Headers,
    &http_hook::HttpHook,
    &moderation::Moderation,
    &pii::Pii,
    &prompt::Prompt,
    &route::RouteByRule,
    &semantic_cache::SemanticCache,
    &tags::Tags,
];

/// Text as it is escaped inside a JSON string, without the quotes.
fn json_inner(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

const WRITERS: [(&str, Writer); 4] =
    [("system", Writer::System), ("user", Writer::User), ("assistant", Writer::Assistant), ("tool", Writer::Tool)];

/// Setting `writers`: writers whose texts in a prompt are looked at; by default all.
fn writers(settings: &Settings<'_>) -> Vec<Writer> {
    let names = settings.texts("writers");
    if names.is_empty() {
        return WRITERS.map(|(_, writer)| writer).to_vec();
    }
    let known = |(at, name): (usize, &String)| {
        let found = WRITERS.iter().find(|(word, _)| word == name);
        if found.is_none() {
            settings.fault(&format!("writers[{at}]"), "must be one of system, user, assistant, tool");
        }
        found.map(|(_, writer)| *writer)
    };
    names.iter().enumerate().filter_map(known).collect()
}

/// Setting `ask_as`: identity under which other models are asked.
fn ask_as(settings: &Settings<'_>) -> AskAs {
    settings.word("ask_as", &[("plugin", AskAs::Plugin), ("caller", AskAs::Caller)])
}
