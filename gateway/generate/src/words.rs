//! Names of a request's fields in the client's API, for refusals.

use penstock_types::codec::Surface;
use penstock_types::{ResponseFormat, ToolChoice};

/// Names of the fields that a pool may refuse.
pub(crate) struct Words {
    surface: Surface,
    /// Name of the field with the list of messages.
    pub(crate) messages: &'static str,
}

impl Words {
    /// Names in the API of `surface`.
    pub(crate) fn of(surface: Surface) -> Self {
        let messages = match surface {
            Surface::Responses => "input",
            Surface::Generate | Surface::Embed => "contents",
            Surface::OllamaGenerate => "prompt",
            _ => "messages",
        };
        Self { surface, messages }
    }

    /// Field that demands the form of the answer.
    pub(crate) fn format(&self, format: &ResponseFormat) -> String {
        let own = match format {
            ResponseFormat::Text | ResponseFormat::JsonObject | ResponseFormat::JsonSchema { .. } => {
                let is_schema = matches!(format, ResponseFormat::JsonSchema { .. });
                match self.surface {
                    Surface::Responses if is_schema => "text.format.schema",
                    Surface::Responses => "text.format",
                    Surface::Messages | Surface::CountTokens => "output_config.format",
                    Surface::Generate | Surface::Embed if is_schema => "generationConfig.responseSchema",
                    Surface::Generate | Surface::Embed => "generationConfig.responseMimeType",
                    Surface::OllamaChat | Surface::OllamaGenerate => "format",
                    _ if is_schema => "response_format.json_schema.schema",
                    _ => "response_format",
                }
            }
            ResponseFormat::Choice(_) if self.surface == Surface::Generate => "generationConfig.responseSchema",
            ResponseFormat::Regex(_) => "structured_outputs.regex",
            ResponseFormat::Choice(_) => "structured_outputs.choice",
            ResponseFormat::Grammar { .. } => "structured_outputs.grammar",
            ResponseFormat::StructuralTag(_) => "structured_outputs.structural_tag",
        };
        own.to_owned()
    }

    /// Field that demands or restricts calls, and the demand in words.
    pub(crate) fn choice(&self, choice: &ToolChoice) -> (String, &'static str) {
        let what = match choice {
            ToolChoice::Named(_) => "a named function",
            ToolChoice::Allowed { .. } => "some of the functions",
            _ => "a demanded call",
        };
        let field = match (self.surface, choice) {
            (Surface::Messages | Surface::CountTokens, ToolChoice::Named(_)) => "tool_choice.name",
            (Surface::Messages | Surface::CountTokens, _) => "tool_choice.type",
            (Surface::Generate | Surface::Embed, ToolChoice::Required) => "toolConfig.functionCallingConfig.mode",
            (Surface::Generate | Surface::Embed, _) => "toolConfig.functionCallingConfig.allowedFunctionNames",
            _ => "tool_choice",
        };
        (field.to_owned(), what)
    }

    /// Field with the schema of the tool at index `at`.
    pub(crate) fn tool_schema(&self, at: usize) -> String {
        match self.surface {
            Surface::Responses => format!("tools[{at}].parameters"),
            Surface::Messages | Surface::CountTokens => format!("tools[{at}].input_schema"),
            Surface::Generate | Surface::Embed => "tools.functionDeclarations.parameters".to_owned(),
            _ => format!("tools[{at}].function.parameters"),
        }
    }
}
