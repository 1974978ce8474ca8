//! Tools that a provider is shown where its API cannot say that only some of them may be called.

use penstock_types::request::{ChatRequest, Tool, ToolChoice};

/// Tools of `chat` that may be called. Tools that [`ToolChoice::Allowed`] does not name are left out, so the model
/// cannot call them.
pub(crate) fn callable(chat: &ChatRequest) -> Vec<&Tool> {
    match &chat.tool_choice {
        ToolChoice::Allowed { names, .. } => chat.tools.iter().filter(|tool| names.contains(&tool.name)).collect(),
        _ => chat.tools.iter().collect(),
    }
}

/// Returns true if the choice demands a call.
pub(crate) fn forces_call(chat: &ChatRequest) -> bool {
    let demands = matches!(
        chat.tool_choice,
        ToolChoice::Required | ToolChoice::Named(_) | ToolChoice::Allowed { required: true, .. }
    );
    demands && !chat.tools.is_empty()
}
