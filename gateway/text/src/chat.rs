//! Conversion of a conversation into prompt tokens.

use std::{borrow::Cow, sync::Arc};

use penstock_types::{
    ChatRequest, Message, ReasoningEffort, Role, ToolCall, ToolChoice,
    error::{ApiError, ApiErrorKind},
};

use crate::{
    call_ids::{CallIds, MessageIds},
    control::ControlTokens,
    model::TextModel,
    template::{Budget, ChatTemplate, Dict, Json, RenderError, Value, json_text},
    tools,
    turns::{self, Change},
};

/// Longest `chat_template_kwargs`, in bytes of JSON.
const KWARGS_BYTES_MAX: usize = 64 << 10;
/// Template arguments that the gateway sets itself; a request that sets them contradicts its own fields.
const RESERVED: [&str; 7] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "strftime_now",
];
/// Tag written behind a message that is to be continued, to find where the template closes the message. The same as in
/// transformers, with a blank at the end that shows whether the template trims.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// System message of Phi-4-mini's model card, for a conversation with tools that has none: its template writes tools into a system message.
const SYSTEM_WITH_TOOLS: &str = "You are a helpful assistant with some tools.";

/// Prompt of a conversation, as text and as the token ids for a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatPrompt {
    /// Token ids of the prompt.
    pub tokens: Vec<u32>,
    /// Text of the prompt, as the chat template rendered it.
    pub text: String,
    /// True if the prompt ends inside the model's reasoning, so that the answer begins with it.
    pub opens_reasoning: bool,
}

impl TextModel {
    /// Renders the conversation with the model's chat template and tokenizes it.
    ///
    /// Equals Hugging Face's `apply_chat_template` (which adds no `<s>` beside the template's own) for conversations
    /// without control tokens in them; control tokens in messages are encoded as text (see `control.rs`). `now_unix_s`
    /// is the date that templates print as today, in UTC.
    ///
    /// # Errors
    /// A client's [`ApiError`]: the model has no template, the template refuses the conversation, or the request
    /// contradicts itself.
    pub fn chat_prompt(&self, request: &ChatRequest, now_unix_s: i64) -> Result<ChatPrompt, ApiError> {
        let template = self.template().ok_or_else(|| {
            ApiError::invalid("messages", "this model has no chat template; use /v1/completions with a prompt")
        })?;
        if request.continue_final_message && request.add_generation_prompt {
            return Err(ApiError::invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other; set add_generation_prompt to false",
            ));
        }
        let input = Input::new(request)?;
        let marker = ControlTokens::marker(|c| input.texts().any(|text| text.contains(c)));
        let context = Context {
            control: self.control(),
            marker,
            null_content: template.knows_null_content(),
            text_arguments: false,
            any_order: false,
            ids: self.call_ids(),
            tools_in_message: template.reads_tools_of_message(),
            result_role: self.result_role(),
        };
        let mut marked = context.render_in_some_form(template, &input, now_unix_s)?;
        if request.continue_final_message {
            marked = cut_at_tag(&marked)?;
        }
        // Of a prompt that is cut, the last tokens are kept.
        let kept = if request.prompt_tail.is_some() { self.tail_of(&marked) } else { &marked };
        let tokens = self
            .encode_marked(kept, marker)
            .map_err(|error| ApiError { param: Some("messages".into()), ..error.into() })?;
        let continued = context.continued(&input);
        let opens_reasoning =
            self.reasoning_markers().is_some_and(|markers| markers.opened_by(&marked, continued.as_deref()));
        let text = if marked.contains(marker) { marked.replace(marker, "") } else { marked };
        Ok(ChatPrompt { tokens, text, opens_reasoning })
    }
}

/// Variables of a template by name; of two with one name the later counts.
type Variables = Vec<(Arc<str>, Value)>;

/// A chat request with its JSON fields (tools, arguments, template variables) parsed.
struct Input<'a> {
    request: &'a ChatRequest,
    /// Messages of the request, or the same conversation in another form.
    messages: Cow<'a, [Message]>,
    tools: Arc<[Json]>,
    /// Parsed arguments of earlier tool calls, by message and call.
    arguments: Vec<Vec<Json>>,
    kwargs: Arc<[(String, Json)]>,
}

impl<'a> Input<'a> {
    fn new(request: &'a ChatRequest) -> Result<Self, ApiError> {
        let shown = if request.tool_choice == ToolChoice::None { &[][..] } else { &request.tools };
        let tools = shown.iter().enumerate().map(|(index, tool)| {
            Json::read(&tool.json)
                .map_err(|error| ApiError::invalid(format!("tools[{index}]"), format!("not JSON: {error}")))
        });
        Ok(Self {
            request,
            messages: Cow::Borrowed(&request.messages),
            tools: tools.collect::<Result<_, _>>()?,
            arguments: arguments_of(&request.messages),
            kwargs: kwargs(request.template_kwargs.as_deref())?.into(),
        })
    }

    /// Input with the conversation in another form.
    fn with_messages(&self, messages: Vec<Message>) -> Input<'a> {
        Input {
            request: self.request,
            arguments: arguments_of(&messages),
            messages: messages.into(),
            tools: self.tools.clone(),
            kwargs: self.kwargs.clone(),
        }
    }

    /// All strings that the client wrote, to find a marker that occurs in none of them.
    fn texts(&self) -> impl Iterator<Item = &str> {
        // Escapes hide characters in the JSON text, so the parsed strings are searched.
        let kwargs = self.kwargs.iter().map(|(_, value)| value);
        let parsed = self.tools.iter().chain(self.arguments.iter().flatten()).chain(kwargs);
        self.messages
            .iter()
            .flat_map(texts_of)
            .chain(parsed.flat_map(Json::strings))
            .chain(self.kwargs.iter().map(|(key, _)| key.as_str()))
    }
}

/// Strings of a message.
fn texts_of(message: &Message) -> impl Iterator<Item = &str> {
    let own = [&message.content, &message.name, &message.reasoning, &message.tool_call_id];
    let calls = message.tool_calls.iter().flat_map(|call| [&call.id, &call.name, &call.arguments]);
    own.into_iter().flatten().chain(calls).map(String::as_str)
}

fn arguments_of(messages: &[Message]) -> Vec<Vec<Json>> {
    messages.iter().map(|message| message.tool_calls.iter().map(arguments).collect()).collect()
}

/// Arguments of a call as the object that templates expect; invalid JSON stays text, empty text becomes an empty
/// object.
fn arguments(call: &ToolCall) -> Json {
    if call.arguments.trim().is_empty() {
        return Json::Object(Vec::new());
    }
    match Json::read(&call.arguments) {
        Ok(value @ Json::Object(_)) => value,
        _ => Json::Text(call.arguments.clone()),
    }
}

fn kwargs(json: Option<&str>) -> Result<Vec<(String, Json)>, ApiError> {
    const PARAM: &str = "chat_template_kwargs";
    let Some(json) = json else { return Ok(Vec::new()) };
    if json.len() > KWARGS_BYTES_MAX {
        let message = format!("chat_template_kwargs is {} bytes, at most {KWARGS_BYTES_MAX} are allowed", json.len());
        return Err(ApiError { kind: ApiErrorKind::TooLarge, param: Some(PARAM.into()), message });
    }
    let map = match Json::read(json) {
        Ok(Json::Object(map)) => map,
        Ok(_) => return Err(ApiError::invalid(PARAM, "not a JSON object")),
        Err(error) => return Err(ApiError::invalid(PARAM, format!("not a JSON object: {error}"))),
    };
    match map.iter().map(|(key, _)| key).find(|key| RESERVED.contains(&key.as_str())) {
        Some(key) => Err(ApiError::invalid(format!("{PARAM}.{key}"), format!("{key} cannot be set in {PARAM}"))),
        None => Ok(map),
    }
}

/// Builder of template variables in which control tokens of the client's text are broken up by the marker.
struct Context<'m> {
    control: &'m ControlTokens,
    marker: char,
    /// True if the template distinguishes an absent content from an empty one.
    null_content: bool,
    /// True if the template takes the arguments of calls as text.
    text_arguments: bool,
    /// True to leave out the template's check that the roles alternate.
    any_order: bool,
    /// Form of the ids of calls.
    ids: CallIds,
    /// True if the template takes the tools from a system message (Phi-4-mini), and knows no calls.
    tools_in_message: bool,
    /// Role of a tool's result in a template that takes tools from a message.
    result_role: &'static str,
}

/// A message with what belongs to it.
struct Turn<'t> {
    message: &'t Message,
    arguments: &'t [Json],
    ids: &'t MessageIds<'t>,
    /// True if the answer goes on with this message.
    continued: bool,
    /// Tools that this message carries, as text.
    tools: Option<Value>,
}

/// Most messages, and most bytes of their texts, of a conversation that is rendered again in other forms.
const CHANGED_MESSAGES_MAX: usize = 1000;
const CHANGED_BYTES_MAX: usize = 1 << 20;

/// Returns true if rendering the conversation several times is cheap enough.
fn may_be_changed(messages: &[Message]) -> bool {
    let bytes = |message: &Message| {
        let calls = message.tool_calls.iter().map(|call| call.arguments.len()).sum::<usize>();
        calls + message.content.as_ref().map_or(0, |text| text.len())
    };
    messages.len() <= CHANGED_MESSAGES_MAX && messages.iter().map(bytes).sum::<usize>() <= CHANGED_BYTES_MAX
}

impl Context<'_> {
    /// Prompt with the marker in it, in the first form of the conversation that the template takes.
    ///
    /// Errors: those of the first form, worded for the client.
    fn render_in_some_form(
        &self,
        template: &ChatTemplate,
        input: &Input<'_>,
        now_unix_s: i64,
    ) -> Result<String, ApiError> {
        let mut marked = self.render(template, input, now_unix_s)?;
        // A template that fails on data in transformers' form may accept it in the API's form: some templates join
        // texts.
        let calls = input.messages.iter().any(|message| !message.tool_calls.is_empty());
        for (null_content, text_arguments) in [(false, false), (false, true)] {
            if calls && matches!(marked, Err(RenderError::Failed(_))) {
                let context = Context { null_content, text_arguments, ..*self };
                marked = context.render(template, input, now_unix_s)?.or(marked);
            }
        }
        let refused = matches!(marked, Err(RenderError::Failed(_) | RenderError::Refused(_)));
        if refused && !input.request.continue_final_message && may_be_changed(&input.messages) {
            marked = self.render_changed(template, input, now_unix_s)?.map_or(marked, Ok);
        }
        marked.map_err(|error| template_fault(&error))
    }

    /// Prompt of a conversation that the template refuses, in the form of the first change that the template takes: each change alone, then all of
    /// them. If the conversation has calls or results and the template knows calls, roles may come in any order, since clients send a user's text
    /// directly behind a tool's result.
    fn render_changed(
        &self,
        template: &ChatTemplate,
        input: &Input<'_>,
        now_unix_s: i64,
    ) -> Result<Option<String>, ApiError> {
        let with_tools = |message: &Message| message.role == Role::Tool || !message.tool_calls.is_empty();
        let any_order = template.reads_calls() && input.messages.iter().any(with_tools);
        let context = Context { any_order, ..*self };
        if any_order && let Ok(marked) = context.render(template, input, now_unix_s)? {
            return Ok(Some(marked));
        }
        for changes in Change::ALL.chunks(1).chain([&Change::ALL[..]]) {
            let Some(messages) = turns::changed(&input.messages, changes) else { continue };
            match context.render(template, &input.with_messages(messages), now_unix_s)? {
                Ok(marked) => return Ok(Some(marked)),
                // Another form would cost as much again.
                Err(RenderError::TooMuch) => return Ok(None),
                Err(_) => {}
            }
        }
        Ok(None)
    }

    fn render(
        &self,
        template: &ChatTemplate,
        input: &Input<'_>,
        now_unix_s: i64,
    ) -> Result<Result<String, RenderError>, ApiError> {
        match self.variables(input)? {
            Ok(variables) if self.any_order => {
                Ok(template.render_in_any_order(variables, !input.tools.is_empty(), now_unix_s))
            }
            Ok(variables) => Ok(template.render(variables, !input.tools.is_empty(), now_unix_s)),
            Err(error) => Ok(Err(error)),
        }
    }

    fn variables(&self, input: &Input<'_>) -> Result<Result<Variables, RenderError>, ApiError> {
        if input.request.continue_final_message && input.messages.last().is_none_or(|message| message.content.is_none())
        {
            return Err(ApiError::invalid("continue_final_message", "the last message has no content to continue"));
        }
        Ok(self.build(input))
    }

    fn build(&self, input: &Input<'_>) -> Result<Variables, RenderError> {
        let request = input.request;
        let budget = Budget::new();
        let last = input.messages.len().saturating_sub(1);
        let mut messages = Vec::with_capacity(input.messages.len() + 1);
        let mut told = if self.tools_in_message { self.tools_text(&budget, &input.tools)? } else { None };
        if !input.messages.iter().any(|message| message.role == Role::System)
            && let Some(tools) = told.take()
        {
            let content = text_value(SYSTEM_WITH_TOOLS.into());
            let fields = vec![("role", text_value("system".into())), ("content", content), ("tools", tools)];
            messages.push(dict(&budget, fields)?);
        }
        let ids = self.ids.of_messages(&input.messages);
        let all = input.messages.iter().zip(&input.arguments).zip(&ids);
        for (index, ((message, arguments), ids)) in all.enumerate() {
            let continued = request.continue_final_message && index == last;
            let tools = if message.role == Role::System { told.take() } else { None };
            messages.push(self.message(&budget, Turn { message, arguments, ids, continued, tools })?);
        }
        let tools = match &input.tools[..] {
            [] => Value::None,
            tools => budget.list(tools.iter().map(|tool| self.json(tool)).collect::<Result<_, _>>()?)?,
        };
        let mut variables: Variables = vec![
            ("messages".into(), budget.list(messages)?),
            ("tools".into(), tools),
            ("documents".into(), Value::None),
            ("add_generation_prompt".into(), Value::Bool(request.add_generation_prompt)),
        ];
        // A budget of reasoning tokens without an effort counts as medium effort.
        let allowed = request.reasoning_tokens_max.filter(|tokens| *tokens > 0).map(|_| ReasoningEffort::Medium);
        variables.extend(request.reasoning_effort.or(allowed).into_iter().flat_map(effort_variables));
        variables.extend(request.verbosity.map(|verbosity| ("verbosity".into(), Value::Str(verbosity.word().into()))));
        for (key, value) in &*input.kwargs {
            variables.push((key.as_str().into(), self.json(value)?));
        }
        Ok(variables)
    }

    /// A message in the form of transformers: absent fields are left out.
    fn message(&self, budget: &Budget, turn: Turn<'_>) -> Result<Value, RenderError> {
        let Turn { message, arguments, ids, .. } = turn;
        let role = match message.role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => self.result_role,
        };
        let mut content = self.content(message);
        if self.tools_in_message && !message.tool_calls.is_empty() {
            content.get_or_insert_default().to_mut().push_str(&self.calls_text(
                budget,
                &message.tool_calls,
                arguments,
            )?);
        }
        if turn.continued
            && let Some(text) = &mut content
        {
            text.to_mut().push_str(CONTINUE_TAG);
        }
        if !self.null_content {
            content.get_or_insert_default();
        }
        let mut fields = vec![("role", text_value(role.into())), ("content", content.map_or(Value::None, text_value))];
        if let Some(name) = &message.name {
            fields.push(("name", text_value(self.mark(name))));
        }
        if let Some(reasoning) = &message.reasoning {
            let reasoning = text_value(self.control.mark_own(reasoning, self.marker));
            // Different templates use different names for the reasoning.
            fields.extend(["reasoning_content", "reasoning", "thinking"].map(|name| (name, reasoning.clone())));
        }
        if let Some(id) = &ids.result {
            fields.push(("tool_call_id", text_value(self.mark(id))));
        }
        if let Some(tools) = turn.tools {
            fields.push(("tools", tools));
        }
        if !message.tool_calls.is_empty() {
            let calls = message.tool_calls.iter().zip(arguments).zip(&ids.calls);
            let calls = calls.map(|((call, arguments), id)| {
                let id = text_value(self.mark(id));
                let function = self.called(budget, call, arguments)?;
                dict(budget, vec![("id", id), ("type", text_value("function".into())), ("function", function)])
            });
            fields.push(("tool_calls", budget.list(calls.collect::<Result<_, _>>()?)?));
        }
        dict(budget, fields)
    }

    /// Content of a message. An assistant's own keeps the marks of reasoning and calls.
    fn content<'t>(&self, message: &'t Message) -> Option<Cow<'t, str>> {
        let own = message.role == Role::Assistant;
        let mark = |text| if own { self.control.mark_own(text, self.marker) } else { self.mark(text) };
        message.content.as_deref().map(mark)
    }

    /// Content of the message that the answer goes on with, if it goes on with one.
    fn continued<'t>(&self, input: &'t Input<'_>) -> Option<Cow<'t, str>> {
        input.messages.last().filter(|_| input.request.continue_final_message).and_then(|message| self.content(message))
    }

    /// Name and arguments of a call.
    fn called(&self, budget: &Budget, call: &ToolCall, arguments: &Json) -> Result<Value, RenderError> {
        let arguments =
            if self.text_arguments { text_value(self.mark(&call.arguments)) } else { self.json(arguments)? };
        dict(budget, vec![("name", text_value(self.mark(&call.name))), ("arguments", arguments)])
    }

    /// Functions of the tools as JSON text, for a template that writes a message's `tools` as they are; `None` without tools.
    fn tools_text(&self, budget: &Budget, tools: &[Json]) -> Result<Option<Value>, RenderError> {
        if tools.is_empty() {
            return Ok(None);
        }
        let functions = tools.iter().map(|tool| self.json(tool.field("function").unwrap_or(tool)));
        let functions = budget.list(functions.collect::<Result<_, _>>()?)?;
        Ok(Some(text_value(json_text(budget, &functions)?.into())))
    }

    /// Calls as the model writes them, for a template that leaves calls out.
    fn calls_text(&self, budget: &Budget, calls: &[ToolCall], arguments: &[Json]) -> Result<String, RenderError> {
        let calls = calls.iter().zip(arguments).map(|(call, arguments)| self.called(budget, call, arguments));
        let calls = budget.list(calls.collect::<Result<_, _>>()?)?;
        let [open, close] = tools::PHI_CALL_MARKS;
        Ok(format!("{open}{}{close}", json_text(budget, &calls)?))
    }

    fn mark<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.control.mark(text, self.marker)
    }

    fn json(&self, value: &Json) -> Result<Value, RenderError> {
        value.value(&|text| self.mark(text))
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used as a function for map")]
fn text_value(text: Cow<'_, str>) -> Value {
    Value::Str(text.as_ref().into())
}

fn dict(budget: &Budget, fields: Vec<(&str, Value)>) -> Result<Value, RenderError> {
    let entries = fields.into_iter().map(|(name, value)| (text_value(name.into()), value));
    Ok(Value::Dict(Dict::new(budget, entries)?.into()))
}

/// Template variables of a reasoning effort: `enable_thinking` (Qwen, GLM, …), `thinking` (DeepSeek, Granite),
/// `reasoning_effort` (gpt-oss).
fn effort_variables(effort: ReasoningEffort) -> [(Arc<str>, Value); 3] {
    let name = match effort {
        ReasoningEffort::None => "none",
        ReasoningEffort::Minimal => "minimal",
        ReasoningEffort::Low => "low",
        ReasoningEffort::Medium => "medium",
        ReasoningEffort::High => "high",
        ReasoningEffort::Max => "max",
    };
    let on = effort != ReasoningEffort::None;
    [
        ("enable_thinking".into(), Value::Bool(on)),
        ("thinking".into(), Value::Bool(on)),
        ("reasoning_effort".into(), Value::Str(name.into())),
    ]
}

fn cut_at_tag(rendered: &str) -> Result<String, ApiError> {
    let tag = CONTINUE_TAG.trim_end();
    let at = rendered.rfind(tag).ok_or_else(|| {
        ApiError::invalid("continue_final_message", "the chat template leaves out the message that is to be continued")
    })?;
    let prompt = &rendered[..at];
    // A missing blank shows that the template trims messages, so the end of this message is trimmed too.
    let kept = rendered[at..].starts_with(CONTINUE_TAG);
    Ok(if kept { prompt } else { prompt.trim_end() }.to_owned())
}

fn template_fault(error: &RenderError) -> ApiError {
    let message = match error {
        RenderError::Refused(words) => format!("the chat template refuses this conversation: {words}"),
        RenderError::TooMuch => "the chat template takes too much time or space for this conversation".into(),
        RenderError::Failed(reason) => format!("the chat template fails on this conversation: {reason}"),
        RenderError::NoDefault => "the model has several chat templates and none for this request".into(),
    };
    ApiError::invalid("messages", message)
}
