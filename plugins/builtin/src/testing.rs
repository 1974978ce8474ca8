//! Answers for tests.

use penstock_plugins::{Flow, Hooks, Sees};
use penstock_types::{ChatEvent, FinishReason};

/// Outcome of a streamed answer that passed through a plugin.
pub(crate) struct Streamed {
    pub(crate) text: String,
    /// Last flow that the plugin returned.
    pub(crate) flow: String,
}

/// Shows an answer in pieces to a plugin, one batch each.
pub(crate) fn streamed(mut hooks: Box<dyn Hooks>, pieces: &[&str]) -> Streamed {
    let mut out = Streamed { text: String::new(), flow: "Go".into() };
    let finish = ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None };
    let mut batches: Vec<Vec<ChatEvent>> = pieces.iter().map(|piece| vec![text(piece)]).collect();
    batches.push(vec![finish]);
    let last = batches.len() - 1;
    for (at, mut batch) in batches.into_iter().enumerate() {
        let flow = match hooks.sees() {
            Sees::Events => hooks.on_event(&mut batch, at == last).expect("no failure"),
            _ => Flow::Go,
        };
        for event in &batch {
            if let ChatEvent::Text { text, .. } = event {
                out.text.push_str(text);
            }
        }
        if !matches!(flow, Flow::Go) {
            out.flow = format!("{flow:?}");
            return out;
        }
        if at == last {
            assert!(matches!(batch.last(), Some(ChatEvent::Finish { .. })), "{batch:?}");
        }
    }
    out
}

/// Text event of choice 0 with one piece.
pub(crate) fn text(text: &str) -> ChatEvent {
    ChatEvent::Text { choice: 0, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() }
}
