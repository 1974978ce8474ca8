//! Any text as an answer with tool calls, in the format that the first byte chooses: no panic, complete arguments are
//! JSON objects, and every byte is accounted for: what is not text belongs to a call, or is a blank beside one.

use std::sync::{Arc, LazyLock};

use penstock_text::{AnswerPart, CallableTool, ToolFormat};
use serde::de::IgnoredAny;

static TOOLS: LazyLock<Arc<[CallableTool]>> = LazyLock::new(|| {
    let parameters = r#"{"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "a": {"type": "array"}, "o": {"type": ["object", "null"]}}}"#;
    Arc::from([CallableTool::new("f", Some(parameters), false), CallableTool::new("g", None, false)])
});

pub(crate) fn run(input: &[u8]) {
    let Some((choice, bytes)) = input.split_first() else { return };
    let formats: Vec<ToolFormat> = ToolFormat::all().collect();
    let format = formats[usize::from(*choice) % formats.len()];
    let answer = String::from_utf8_lossy(bytes);
    let channels = format == ToolFormat::Harmony;
    let (mut done, mut calls, mut any) = (0, 0, false);
    for part in format.parse(&TOOLS, &answer) {
        match part {
            AnswerPart::Text { at, text } => {
                assert_eq!(answer.get(at..at + text.len()), Some(text.as_str()), "text stands where it says");
                assert!(at >= done, "nothing comes out twice");
                // Channels have headers, which are no text.
                let gap = answer[done..at].trim();
                assert!(calls > 0 || gap.is_empty() || channels, "{gap:?} vanished");
                (done, calls) = (at + text.len(), 0);
            }
            AnswerPart::Reasoning(text) => assert!(channels && !text.is_empty()),
            AnswerPart::Call { name, id, arguments, complete } => {
                assert!(!name.is_empty() && id.is_none_or(|id| id.contains(&name)));
                (calls, any) = (calls + 1, true);
                if complete {
                    // Control characters inside strings pass as they are.
                    let json = arguments.replace(|c: char| c.is_control(), " ");
                    let read = serde_json::from_str::<IgnoredAny>(&json);
                    assert!(json.trim_start().starts_with('{') && read.is_ok(), "{arguments}: {read:?}");
                }
            }
        }
    }
    let rest = &answer[done..];
    assert!(calls > 0 || channels || rest.is_empty() || any && rest.trim().is_empty(), "{rest:?} vanished");
}
