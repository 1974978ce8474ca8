//! Plugin `body`: sets, fills in and removes fields of the JSON body that clients send, before anything else reads it.
//!
//! The body stays bytes in the client's own dialect, with every field that this gateway does not know. The model and
//! whether the answer is streamed cannot be changed here (`route_by_rule` changes the model).

use std::sync::Arc;

use async_trait::async_trait;
use penstock_plugins::{Hooks, Kind, Needs, Plugin, PluginError, RequestContext, Settings, Verdict};
use serde_json::{Map, Value};

/// Plugin kind `body`: builds plugins that change fields of the JSON body.
pub(crate) struct Body;

/// Fields that decide about more than the answer's content, so that this plugin may not set them.
const KEPT: [&str; 4] = ["model", "n", "stream", "candidateCount"];

struct Edits {
    set: Vec<(Vec<String>, Value)>,
    default: Vec<(Vec<String>, Value)>,
    remove: Vec<Vec<String>>,
}

/// Steps of a path such as `generationConfig.temperature`.
fn path(settings: &Settings<'_>, name: &str, text: &str) -> Vec<String> {
    let steps: Vec<String> = text.split('.').map(str::to_owned).collect();
    if steps.iter().any(String::is_empty) {
        settings.fault(name, "is no path: names, with dots between them");
    }
    if steps.last().is_some_and(|last| KEPT.contains(&last.as_str())) {
        settings.fault(name, "is not to be changed here");
    }
    steps
}

fn fields(settings: &Settings<'_>, name: &str) -> Vec<(Vec<String>, Value)> {
    let Some(value) = settings.json(name) else { return Vec::new() };
    let Some(table) = value.as_object() else {
        settings.fault(name, "must be a table: { \"a.b\" = 1 }");
        return Vec::new();
    };
    let read = |(key, value): (&String, &Value)| (path(settings, &format!("{name}.{key}"), key), value.clone());
    table.iter().map(read).collect()
}

impl Kind for Body {
    fn name(&self) -> &'static str {
        "body"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let remove = settings.texts("remove");
        let remove = remove.iter().enumerate().map(|(at, text)| path(settings, &format!("remove[{at}]"), text));
        let remove = remove.collect();
        let edits = Edits { set: fields(settings, "set"), default: fields(settings, "default"), remove };
        Some(Arc::new(Edited(Arc::new(edits))))
    }
}

struct Edited(Arc<Edits>);

impl Plugin for Edited {
    fn needs(&self) -> Needs {
        Needs::Body
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Editing(self.0.clone()))
    }
}

struct Editing(Arc<Edits>);

#[async_trait]
impl Hooks for Editing {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        let before = request.body()?;
        let read = serde_json::from_slice(before).map_err(|_| PluginError::new("the body is no JSON"))?;
        let Value::Object(mut body) = read else { return Ok(Verdict::Pass) };
        if self.0.apply(&mut body) {
            request.set_body(Value::Object(body).to_string().into());
        }
        Ok(Verdict::Pass)
    }
}

impl Edits {
    /// Applies the edits; true where the body changed.
    fn apply(&self, body: &mut Map<String, Value>) -> bool {
        let mut changed = false;
        for path in &self.remove {
            changed |= parent(body, path, false).is_some_and(|(table, last)| table.shift_remove(last).is_some());
        }
        for (path, value) in &self.default {
            if let Some((table, last)) = parent(body, path, true).filter(|(table, last)| !table.contains_key(*last)) {
                table.insert(last.to_owned(), value.clone());
                changed = true;
            }
        }
        for (path, value) in &self.set {
            if let Some((table, last)) =
                parent(body, path, true).filter(|(table, last)| table.get(*last) != Some(value))
            {
                table.insert(last.to_owned(), value.clone());
                changed = true;
            }
        }
        changed
    }
}

/// Table that holds the last step of a path; `None` where another value stands in the way, or the table is missing and
/// is not to be made.
fn parent<'b, 'p>(
    body: &'b mut Map<String, Value>,
    path: &'p [String],
    make: bool,
) -> Option<(&'b mut Map<String, Value>, &'p str)> {
    let (last, way) = path.split_last()?;
    let mut table = body;
    for step in way {
        if make && !table.contains_key(step) {
            table.insert(step.clone(), Value::Object(Map::new()));
        }
        table = table.get_mut(step)?.as_object_mut()?;
    }
    Some((table, last))
}

#[cfg(test)]
mod tests {
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::Surface;
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_set_filled_in_and_removed() {
        let settings = json!({
            "set": { "temperature": 0, "a.b": [1] }, "default": { "max_tokens": 5, "seed": 1 }, "remove": ["user", "x.y"],
        });
        let plugin = build(&Body, &settings).expect("valid");
        let body = json!({
            "model": "m", "messages": [{ "role": "user", "content": "hi" }], "seed": 7, "user": "u", "a": { "c": 1 }, "other": true,
        });
        let mut context = request(Surface::Chat, &body, Arc::new(FakeHost::default()));
        assert!(matches!(now(plugin.begin().on_request(&mut context)), Ok(Verdict::Pass)));
        let after: Value = serde_json::from_slice(context.body().expect("there")).expect("JSON");
        let expected = json!({
            "model": "m", "messages": [{ "role": "user", "content": "hi" }], "seed": 7, "a": { "c": 1, "b": [1] }, "other": true,
            "max_tokens": 5, "temperature": 0,
        });
        assert_eq!(after.to_string(), expected.to_string(), "in the order of the client");
    }

    #[test]
    fn a_body_that_needs_nothing_stays_as_it_is() {
        let plugin = build(&Body, &json!({ "default": { "seed": 1 } })).expect("valid");
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }], "seed": 7 });
        let mut context = request(Surface::Chat, &body, Arc::new(FakeHost::default()));
        let before = context.body().expect("there").as_ptr();
        assert!(now(plugin.begin().on_request(&mut context)).is_ok());
        assert_eq!(context.body().expect("there").as_ptr(), before);
    }

    #[test]
    fn the_model_is_not_its_to_change() {
        let settings = json!({ "set": { "model": "x", "a..b": 1 }, "remove": ["stream"] });
        let faults = build(&Body, &settings).err().expect("refused");
        let paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
        assert_eq!(paths, ["remove[0]", "set.model", "set.a..b"]);
    }
}
