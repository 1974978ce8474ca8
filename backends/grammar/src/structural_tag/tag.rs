//! Parts that several formats share: tags, the switches of formats with several tags, and where free text needs an end.

use super::fields::{Place, Written, flag, strings};
use serde_json::{Map, Value};

/// Parsed structural tag: its opening mark, its content and its closing marks.
pub(super) struct Tag<'a> {
    pub(super) begin: String,
    pub(super) at_begin: Place,
    pub(super) content: &'a Value,
    pub(super) at_content: Place,
    /// Alternatives of the closing mark, each once; one that is empty closes nothing.
    pub(super) ends: Vec<String>,
}

/// Switches of formats with several tags.
#[derive(Default)]
pub(super) struct Flow {
    pub(super) at_least_one: bool,
    pub(super) stop_after_first: bool,
    pub(super) excludes: Vec<String>,
}

impl Flow {
    pub(super) fn of(fields: &Map<String, Value>, at: &Place) -> Written<Self> {
        Ok(Self {
            at_least_one: flag(fields, "at_least_one", false, at)?,
            stop_after_first: flag(fields, "stop_after_first", false, at)?,
            excludes: strings(fields, "excludes", at)?,
        })
    }
}

/// Returns true if a format ends in free text that only the mark behind it ends.
pub(super) fn is_open(format: &Value) -> bool {
    let content = || format.get("content").is_some_and(is_open);
    let flag = |name: &str| format.get(name).and_then(Value::as_bool).unwrap_or(false);
    match format.get("type").and_then(Value::as_str) {
        Some("any_text" | "dispatch") => true,
        Some("triggered_tags") => !(flag("at_least_one") && flag("stop_after_first")),
        Some("sequence") => format["elements"].as_array().and_then(|all| all.last()).is_some_and(is_open),
        Some("or") => format["elements"].as_array().is_some_and(|all| all.iter().any(is_open)),
        Some("tag") => {
            let ends_nowhere = match &format["end"] {
                Value::Array(ends) => ends.iter().any(|end| end == ""),
                end => end == "",
            };
            ends_nowhere && content()
        }
        _ => false,
    }
}

/// Refuses a tag whose free text has no end.
pub(super) fn closed(tag: &Tag<'_>) -> Written<()> {
    if tag.ends.iter().any(String::is_empty) && is_open(tag.content) {
        return tag.at_content.fault("free text needs a closing mark here");
    }
    Ok(())
}
