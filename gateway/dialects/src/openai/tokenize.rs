//! `POST /tokenize` and `POST /detokenize`, in vLLM's shapes.

use super::chat::{EFFORTS, generation_prompt, read_body, template_kwargs};
use super::{messages, tools};
use penstock_types::Bounds;
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::fields;
use penstock_types::json::{Fault, Reader, Within, short};
use penstock_types::request::{ChatRequest, Message, ReasoningEffort, Tool, ToolChoice};
use penstock_types::tokenize::{DetokenizeRequest, TokenizeInput, TokenizeRequest};

/// Decodes the body of a tokenize request. Errors and cost as [`super::decode_chat`].
pub fn decode_tokenize(body: &[u8], bounds: &Bounds) -> Result<TokenizeRequest, ApiError> {
    let mut draft = Draft::default();
    read_body(body, bounds, |reader, key| draft.field(reader, key, bounds))
        .and_then(|()| draft.finish())
        .map_err(Fault::into_error)
}

#[derive(Default)]
struct Draft {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    tools: Vec<Tool>,
    add_special_tokens: Option<bool>,
    return_token_strs: bool,
    add_generation_prompt: Option<bool>,
    continue_final_message: bool,
    reasoning_effort: Option<ReasoningEffort>,
    template_kwargs: Option<String>,
    ignored: Vec<String>,
}

impl Draft {
    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "model" => self.model = Some(fields::name(reader, bounds.model_chars_max)?),
            "prompt" => self.prompt = Some(fields::text(reader)?),
            "messages" => self.messages = Some(messages::messages(reader, bounds)?),
            "tools" => self.tools = tools::offered_tools(reader, bounds)?,
            "add_special_tokens" => self.add_special_tokens = Some(reader.boolean()?),
            "return_token_strs" => self.return_token_strs = reader.boolean()?,
            "add_generation_prompt" => self.add_generation_prompt = Some(reader.boolean()?),
            "continue_final_message" => self.continue_final_message = reader.boolean()?,
            "reasoning_effort" => self.reasoning_effort = Some(fields::word(reader, EFFORTS)?),
            "chat_template_kwargs" => self.template_kwargs = Some(template_kwargs(reader, bounds)?),
            "chat_template" => {
                return Err(Fault::of(
                    ApiErrorKind::Unsupported,
                    "templates come with the model, never with a request",
                ));
            }
            _ => {
                reader.skip()?;
                if self.ignored.len() < bounds.ignored_max {
                    self.ignored.push(short(key));
                }
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<TokenizeRequest, Fault> {
        let (model, return_token_strs) = (self.model.clone(), self.return_token_strs);
        let input = match (self.prompt.take(), self.messages.take()) {
            (Some(prompt), None) => {
                TokenizeInput::Text { prompt, add_special_tokens: self.add_special_tokens.unwrap_or(true) }
            }
            (None, Some(messages)) => {
                let add_special_tokens = self.add_special_tokens.unwrap_or(false);
                TokenizeInput::Chat { chat: Box::new(self.chat(messages)?), add_special_tokens }
            }
            (Some(_), Some(_)) => return Err(Fault::invalid("not allowed with messages")).within("prompt"),
            (None, None) => return Err(Fault::invalid("this or messages is required, but missing")).within("prompt"),
        };
        Ok(TokenizeRequest { model, input, return_token_strs })
    }

    fn chat(self, messages: Vec<Message>) -> Result<ChatRequest, Fault> {
        let add_generation_prompt =
            generation_prompt(self.add_generation_prompt, self.continue_final_message, &messages)?;
        Ok(ChatRequest {
            tool_choice: if self.tools.is_empty() { ToolChoice::None } else { ToolChoice::Auto },
            tools: self.tools,
            reasoning_effort: self.reasoning_effort,
            template_kwargs: self.template_kwargs,
            add_generation_prompt,
            continue_final_message: self.continue_final_message,
            ignored: self.ignored,
            ..ChatRequest::new(self.model.unwrap_or_default(), messages)
        })
    }
}

/// Decodes the body of a detokenize request. Errors and cost as [`super::decode_chat`].
pub fn decode_detokenize(body: &[u8], bounds: &Bounds) -> Result<DetokenizeRequest, ApiError> {
    let (mut model, mut tokens) = (None, None);
    read_body(body, bounds, |reader, key| {
        match key {
            "model" => model = Some(fields::name(reader, bounds.model_chars_max)?),
            "tokens" => tokens = Some(fields::token_ids(reader, bounds.prompt_tokens_max)?),
            _ => reader.skip()?,
        }
        Ok(())
    })
    .and_then(|()| tokens.ok_or_else(|| Fault::invalid("required, but missing")).within("tokens"))
    .map(|tokens| DetokenizeRequest { model, tokens })
    .map_err(Fault::into_error)
}
