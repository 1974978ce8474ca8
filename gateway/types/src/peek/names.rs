//! Field names that are read here, and look-alikes that other readers take for them.
//!
//! `encoding/json` of Go, and many readers after it, compare names under Unicode simple case folding and let the last
//! one count: `{"model":"small","Model":"big"}` is a request for `big` there, and one for `small` in Python and
//! JavaScript. A name that differs from one read here but folds onto it is refused, so that no body passes which two
//! readers understand differently.

use crate::json::{Fault, Within};

/// Names of Gemini's `generationConfig` that are read, in both of its spellings.
pub(super) const CONFIG: [&str; 4] = ["maxOutputTokens", "max_output_tokens", "candidateCount", "candidate_count"];
/// Names under which OpenRouter, LiteLLM and gateways after them read further models, which answer where `model` does not.
const OTHER_MODELS: [&str; 6] = [
    "models",
    "fallbacks",
    "fallback_models",
    "default_fallbacks",
    "context_window_fallbacks",
    "content_policy_fallbacks",
];
/// Names inside Ollama's `options` that are read.
pub(super) const OPTIONS: [&str; 1] = ["num_predict"];
/// Names inside `stream_options` that are read.
pub(super) const STREAM_OPTIONS: [&str; 1] = ["include_usage"];

/// Names of the top level that are read and begin with the letter `first`, in either case.
fn of_top(first: u8) -> &'static [&'static str] {
    match first | 0x20 {
        b'm' => &[
            "model",
            "models",
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "max_new_tokens",
            "max_length",
            "max_tokens_to_sample",
        ],
        // 0xc5, with 0x20 set: the first byte of U+017F, which folds onto s.
        b's' | 0xe5 => &[
            "stream",
            "stream_options",
            "store",
            "system",
            "systemInstruction",
            "system_instruction",
            "service_tier",
            "serviceTier",
            "speed",
        ],
        b'n' => &["n", "n_predict", "num_predict"],
        b'p' => &["prompt", "prompt_embeds"],
        b'g' => &["generationConfig", "generation_config"],
        b'i' => &["input", "instructions"],
        b'b' => &["best_of", "background"],
        b'c' => &["contents", "context_window_fallbacks", "content_policy_fallbacks"],
        b'f' => &["fallbacks", "fallback_models"],
        b'd' => &["default_fallbacks", "deferred"],
        b't' => &["tools"],
        b'u' => &["user"],
        _ => &[],
    }
}

/// Refuses a name of the top level that another reader takes for one that is read here.
pub(super) fn check_top(key: &str) -> Result<(), Fault> {
    match key.as_bytes().first() {
        // Google's names have two spellings; any other underscore variant is neither.
        Some(first) => check(key, of_top(*first), matches!(first, b'g' | b'G')),
        None => Ok(()),
    }
}

/// Static copy of `key`, if it is a name under which some upstreams read further models.
pub fn other_models(key: &str) -> Option<&'static str> {
    OTHER_MODELS.into_iter().find(|name| folds(key, name, false))
}

/// Refuses a name that is not in `names` but that another reader takes for one of them; with `loosely`, underscores
/// are ignored in the comparison.
pub(super) fn check(key: &str, names: &[&str], loosely: bool) -> Result<(), Fault> {
    if names.contains(&key) {
        return Ok(());
    }
    // Readers in C end a name at its first NUL, which only an escape can bring.
    let read = key.split('\0').next().unwrap_or_default();
    match names.iter().find(|name| folds(read, name, loosely)) {
        None => Ok(()),
        Some(name) => Err(alike(name)).within(key),
    }
}

/// Refusal of a look-alike of `name`.
fn alike(name: &str) -> Fault {
    Fault::invalid(format!("some servers read this as \"{name}\" and others do not: write \"{name}\""))
}

/// Returns true if `key` equals `name`, which is ASCII, under Unicode simple case folding: two characters outside ASCII fold
/// onto letters.
pub fn folds(key: &str, name: &str, loosely: bool) -> bool {
    if !loosely && key.is_ascii() {
        return key.eq_ignore_ascii_case(name);
    }
    let counts = |character: &char| !(loosely && *character == '_');
    let folded = |character: char| match character {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        other => other.to_ascii_lowercase(),
    };
    key.chars().filter(counts).map(folded).eq(name.chars().filter(counts).map(folded))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_name(key: &str, is_allowed: bool) {
        assert_eq!(check_top(key).is_ok(), is_allowed, "{key:?}");
    }

    #[test]
    fn only_the_name_itself_is_read_as_it() {
        for name in ["model", "max_tokens", "stream", "n", "generationConfig", "generation_config", "user"] {
            check_name(name, true);
        }
        for other in ["", "Temperature", "top_n", "models", "maxtokens", "model_s", "\u{e4}", "mode", "nn", "modelx\0"]
        {
            check_name(other, true);
        }
        for alike in [
            "Model",
            "MODELS",
            "mOdEl",
            "MAX_TOKENS",
            "max_to\u{212a}ens",
            "\u{17f}tream",
            "STREAM_OPTION\u{17f}",
            "N",
            "model\0x",
            "generationconfig",
            "generationConfig_",
            "GENERATION__CONFIG",
        ] {
            check_name(alike, false);
        }
    }

    /// Names that the arms of a `match` in a function's source are about.
    fn matched(source: &str, function: &str) -> Vec<String> {
        let from = source.find(function).unwrap_or_else(|| panic!("{function} is there"));
        let body = &source[from..from + source[from..].find("\n}\n").expect("an end")];
        let arms = body.lines().filter_map(|line| line.trim().strip_prefix('"')?.split_once(" =>"));
        let names = arms.flat_map(|(names, _)| names.split(" if ").next().unwrap_or_default().split('|'));
        names.map(|name| name.trim().trim_matches('"').to_owned()).collect()
    }

    #[test]
    fn every_name_that_is_read_has_its_look_alikes_refused() {
        let mut read = matched(include_str!("../peek.rs"), "\nfn field(");
        read.extend(super::super::PROMPT.into_iter().flatten().map(|name| (*name).to_owned()));
        read.extend(matched(include_str!("amounts.rs"), "pub(super) fn field("));
        assert!(read.len() > 20, "{read:?}");
        // Read in bodies that are never forwarded as they are.
        for name in read.iter().filter(|name| *name != "options") {
            check_name(&name.to_uppercase(), false);
            check_name(name, true);
        }
    }

    #[test]
    fn spellings_of_googles_names_are_two() {
        for (key, is_allowed) in
            [("maxOutputTokens", true), ("max_output_tokens", true), ("maxOutput_tokens", false), ("topK", true)]
        {
            assert_eq!(check(key, &CONFIG, true).is_ok(), is_allowed, "{key}");
        }
    }
}
