//! Grammar of an answer: from the request's format, tools and tool choice to the text that the workers follow.
//!
//! A grammar is compiled here before anything is reserved or bound, off the I/O threads, so that a bad one is refused
//! in the client's dialect; workers compile the same text again. The answer's format holds for its text; reasoning in
//! front of it is free. A call that is demanded, restricted to some tools or made to a strict tool is held to the
//! model's own form of calls and to the tool's schema.

use std::ops::Range;
use std::sync::OnceLock;

use penstock_grammar::structural_tag::{self, SpecialTokens, TagRules};
use penstock_grammar::{
    CacheSizes, GrammarError, Grammars, Kind, Source, TokenText, Unenforced, Vocabulary, ends_in_escape, gbnf, lark,
};
use penstock_pool::Guided;
use penstock_proto::frames::{Guide, GuideKind};
use penstock_text::{
    CallDemand, CallRule, CallableTool, ChatPrompt, ContentForm, ReasoningPart, SpecialNames, TextModel, ToolFormat,
};
use penstock_types::codec::Surface;
use penstock_types::request::GrammarSyntax;
use penstock_types::{ApiError, ChatRequest, CompleteRequest, Message, ReasoningEffort, ResponseFormat, ToolChoice};

use super::AnswerRules;
use super::words::Words;

/// Tokens of a model as grammars need them, and the grammars that were compiled over them.
#[derive(Default)]
pub(crate) struct Library {
    /// Grammars of the first model that the pool had; `None` if its tokens cannot be indexed.
    grammars: OnceLock<Option<Grammars>>,
}

impl Library {
    /// Grammars over the tokens of `model`, whose logits have `rows` rows. Indexing the tokens takes a fraction of a
    /// second, once.
    fn grammars(&self, model: &TextModel, rows: u32) -> Option<&Grammars> {
        let made = self.grammars.get_or_init(|| {
            let bytes: Vec<Vec<u8>> = (0..model.vocab_size()).map(|id| model.token_bytes(id)).collect();
            let tokens = bytes.iter().zip(0..).map(|(bytes, id)| TokenText { bytes, is_special: model.is_special(id) });
            let vocabulary = Vocabulary::new(tokens, model.declared_end_tokens(), rows as usize);
            let indexed = vocabulary.ok().filter(|vocabulary| vocabulary.index().is_ok());
            indexed.map(|vocabulary| Grammars::new(vocabulary, CacheSizes::default()))
        });
        made.as_ref()
    }

    /// Returns true if a grammar was compiled before, so that [`Self::compile`] takes no time.
    pub(crate) fn knows(&self, draft: &Draft) -> bool {
        matches!(self.grammars.get(), Some(Some(grammars)) if grammars.peek(&draft.source).is_some())
    }

    /// Compiles the grammar of an answer. CPU time and memory are bounded; an equal text is compiled once.
    ///
    /// # Errors
    /// A refusal that names the client's field.
    pub(crate) fn compile(&self, draft: Draft, model: &TextModel, rows: u32) -> Result<Guided, ApiError> {
        let Draft { source, begins_after, param } = draft;
        let Some(grammars) = self.grammars(model, rows) else {
            return Err(ApiError::unsupported_value(
                &param,
                format!("{param}: the tokens of this model cannot be held to a grammar"),
            ));
        };
        grammars.get(&source).map_err(|error| refusal(&param, &error))?;
        let kind = match source.kind {
            Kind::JsonSchema => GuideKind::JsonSchema,
            Kind::JsonObject => GuideKind::JsonObject,
            Kind::Regex => GuideKind::Regex,
            Kind::Lark => GuideKind::Lark,
            Kind::Choice => GuideKind::Choice,
        };
        let guide = Guide { kind: kind.into(), text: source.text, begins_after };
        Ok(Guided { id: grammars.vocabulary().id().into(), guide })
    }
}

/// Grammar of an answer that has not been compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Draft {
    source: Source,
    /// Tokens behind whose first occurrence in the answer the grammar begins; empty: at once.
    begins_after: Vec<u32>,
    /// Field of the client's request that asks for the grammar.
    param: String,
}

impl Draft {
    /// Grammar of a plain completion; `None` leaves the text free.
    pub(crate) fn of_completion(
        complete: &CompleteRequest,
        model: &TextModel,
        surface: Surface,
        rules: AnswerRules,
    ) -> Result<Option<Self>, ApiError> {
        let param = Words::of(surface).format(&complete.response_format);
        let Some(form) = Form::of(&complete.response_format, &param, model, rules)? else { return Ok(None) };
        Ok(Some(Self { source: form.source(), begins_after: Vec::new(), param }))
    }

    /// Grammar of a conversation's next turn; `None` leaves the answer free.
    pub(crate) fn of_chat(
        chat: &ChatRequest,
        prompt: &ChatPrompt,
        model: &TextModel,
        surface: Surface,
        rules: AnswerRules,
    ) -> Result<Option<Self>, ApiError> {
        let words = Words::of(surface);
        let param = words.format(&chat.response_format);
        let form = Form::of(&chat.response_format, &param, model, rules)?;
        let tools: Vec<CallableTool> = match chat.tool_choice {
            ToolChoice::None => Vec::new(),
            _ => chat.tools.iter().map(CallableTool::from).collect(),
        };
        let (demand, allowed) = match &chat.tool_choice {
            ToolChoice::None | ToolChoice::Auto => (CallDemand::Auto, None),
            ToolChoice::Required => (CallDemand::Required, None),
            ToolChoice::Named(name) => (CallDemand::Named(name.clone()), None),
            ToolChoice::Allowed { names, required: true } => (CallDemand::Required, Some(names.clone())),
            ToolChoice::Allowed { names, required: false } => (CallDemand::Auto, Some(names.clone())),
        };
        let is_plain = demand == CallDemand::Auto && allowed.is_none();
        let holds_some = rules.holds_calls || tools.iter().any(|tool| tool.strict);
        let holds_calls = !tools.is_empty() && (!is_plain || holds_some);
        if form.is_none() && !holds_calls {
            return Ok(None);
        }
        check_tools(chat, &words)?;
        let place = Place::of(chat, prompt, model);
        // A structural tag says itself what a call looks like.
        let tools = if is_plain && matches!(form, Some(Form::Tag { .. })) { Vec::new() } else { tools };
        if let Some(form) = &form
            && (tools.is_empty() || form.stands_alone())
            && is_plain
            && place.reasoning == ReasoningPart::Outside
        {
            return Ok(Some(Self { source: form.source(), begins_after: place.begins_after, param }));
        }
        let (param, what) = if is_plain { (param, "the format") } else { words.choice(&chat.tool_choice) };
        let content = match form.filter(|_| demand == CallDemand::Auto) {
            None => ContentForm::Free,
            Some(Form::Schema { schema, strict }) => {
                let schema = serde_json::from_str(&schema);
                let schema = schema
                    .map_err(|error| ApiError::invalid(&param, format!("{param}: not a JSON schema: {error}")))?;
                ContentForm::Json { schema, strict }
            }
            Some(Form::Object) => ContentForm::Object,
            Some(Form::Regex(regex)) if ends_in_escape(&regex) => {
                let message = format!("{param}: the regular expression ends in a backslash");
                return Err(ApiError::invalid(&param, message));
            }
            Some(Form::Regex(regex)) => ContentForm::Regex(regex),
            Some(Form::Choice(choices)) => ContentForm::Choice(choices),
            Some(Form::Tag { start, rules } | Form::Rules { start, rules }) => ContentForm::Rules { start, rules },
            Some(Form::Lark(text)) => match lark::to_rules(&text) {
                Some((start, rules)) => ContentForm::Rules { start, rules },
                None if place.reasoning == ReasoningPart::Opened => {
                    let message = format!(
                        "{param}: a grammar without the rule `start`, or with directives of the whole text, cannot stand behind the reasoning of this model"
                    );
                    return Err(ApiError::unsupported_value(param, message));
                }
                // The answer is held to it from its beginning.
                None => return Ok(Some(Self { source: Source::lark(text), begins_after: place.begins_after, param })),
            },
        };
        let rule =
            CallRule { demand, allowed, parallel: chat.parallel_tool_calls, reasoning: place.reasoning, content };
        // Where text and reasoning cannot be told apart, the reasoning is part of the free text.
        let unmarked = || {
            let is_free = rule.demand == CallDemand::Auto && rule.content == ContentForm::Free;
            let rule = CallRule { reasoning: ReasoningPart::Outside, ..rule.clone() };
            is_free.then(|| model.answer_grammar(&tools, &rule)).flatten()
        };
        match model.answer_grammar(&tools, &rule).or_else(unmarked) {
            Some(text) => Ok(Some(Self { source: Source::lark(text), begins_after: place.begins_after, param })),
            // Strict tools under `auto` that the form of calls cannot follow: the model is left free, as before.
            None if is_plain && rule.content == ContentForm::Free => Ok(None),
            None => {
                let message = format!("{param}: the tool calls of this model cannot be held to {what}");
                Err(ApiError::unsupported_value(param, message))
            }
        }
    }
}

/// Refuses strict tools whose schemas have keywords that no grammar enforces.
fn check_tools(chat: &ChatRequest, words: &Words) -> Result<(), ApiError> {
    let strict = chat.tools.iter().enumerate().filter(|(_, tool)| tool.strict);
    for (at, tool) in strict.filter(|_| chat.tool_choice != ToolChoice::None) {
        let Some(schema) = &tool.parameters else { continue };
        check_strict(schema, &words.tool_schema(at))?;
    }
    Ok(())
}

/// Refuses a schema whose keywords are not all enforced.
fn check_strict(schema: &str, param: &str) -> Result<(), ApiError> {
    let unenforced = Source::json_schema(schema).check().map_err(|error| refusal(param, &error))?;
    match unenforced.as_slice() {
        [] => Ok(()),
        some => {
            let named: Vec<String> = some.iter().take(4).map(Unenforced::to_string).collect();
            let message = format!("{param}: not supported where strict is true: {}", named.join(", "));
            Err(ApiError::invalid(param, message))
        }
    }
}

fn refusal(param: &str, error: &GrammarError) -> ApiError {
    ApiError::invalid(param, format!("{param}: {error}"))
}

/// Place of the grammar in the answer.
struct Place {
    reasoning: ReasoningPart,
    begins_after: Vec<u32>,
}

impl Place {
    fn of(chat: &ChatRequest, prompt: &ChatPrompt, model: &TextModel) -> Self {
        let at_once = |reasoning| Self { reasoning, begins_after: Vec::new() };
        if model.tool_format() == Some(ToolFormat::Harmony) {
            // Channels are part of the grammar.
            return at_once(if prompt.opens_reasoning { ReasoningPart::Opened } else { ReasoningPart::Allowed });
        }
        let Some(markers) = model.reasoning_markers() else { return at_once(ReasoningPart::Outside) };
        if prompt.opens_reasoning {
            return match model.reasoning_close_tokens().as_slice() {
                [mark] => Self { reasoning: ReasoningPart::Outside, begins_after: vec![*mark] },
                _ => at_once(ReasoningPart::Opened),
            };
        }
        let is_off = chat.reasoning_effort == Some(ReasoningEffort::None) || chat.reasoning_tokens_max == Some(0);
        // A template that opens the reasoning where it is wanted says that none is wanted here.
        match is_off || prompt.text.trim_end().ends_with(&markers.close) || opens_when_asked(model) {
            true => at_once(ReasoningPart::Outside),
            false => at_once(ReasoningPart::Allowed),
        }
    }
}

/// Returns true if the model's template opens the reasoning itself in a conversation that asks for it.
fn opens_when_asked(model: &TextModel) -> bool {
    let message = Message { content: Some("x".into()), ..Message::default() };
    let mut chat = ChatRequest::new(String::new(), vec![message]);
    chat.template_kwargs = Some("{\"enable_thinking\":true}".into());
    model.chat_prompt(&chat, 0).is_ok_and(|prompt| prompt.opens_reasoning)
}

/// Field of a schema with the grammar library's options.
const SCHEMA_OPTIONS: &str = "x-guidance";

/// Form of an answer's text, checked.
enum Form {
    Object,
    Schema {
        schema: String,
        strict: bool,
    },
    Regex(String),
    Choice(Vec<String>),
    Lark(String),
    /// Rules of the text, which can stand among others.
    Rules {
        start: String,
        rules: String,
    },
    /// Rules of the whole answer, calls included.
    Tag {
        start: String,
        rules: String,
    },
}

impl Form {
    fn of(
        format: &ResponseFormat,
        param: &str,
        model: &TextModel,
        rules: AnswerRules,
    ) -> Result<Option<Self>, ApiError> {
        let form = match format {
            ResponseFormat::Text => return Ok(None),
            ResponseFormat::JsonObject => Self::Object,
            ResponseFormat::JsonSchema { schema, strict, .. } => {
                if *strict {
                    check_strict(schema, param)?;
                }
                Self::Schema { schema: schema.clone(), strict: *strict }
            }
            ResponseFormat::Regex(regex) => Self::Regex(regex.clone()),
            ResponseFormat::Choice(choices) => Self::Choice(choices.clone()),
            ResponseFormat::Grammar { text, syntax } => match syntax {
                Some(GrammarSyntax::Lark) => Self::Lark(text.clone()),
                None if !text.contains("::=") => Self::Lark(text.clone()),
                Some(GrammarSyntax::Gbnf) | None => {
                    let invalid =
                        |error| ApiError::invalid(param, format!("{param}: the grammar is not valid: {error}"));
                    let (start, rules) = gbnf::to_rules(text, "g").map_err(invalid)?;
                    Self::Rules { start, rules }
                }
            },
            ResponseFormat::StructuralTag(text) => {
                let TagRules { start, rules: tag } = structural_tag::to_rules(text, &Specials(model.special_names()))
                    .map_err(|error| {
                    let place = if error.at.is_empty() { String::new() } else { format!(".{}", error.at) };
                    let param = format!("{param}{place}");
                    ApiError::invalid(&param, format!("{param}: {error}"))
                })?;
                Self::Tag { start, rules: tag }
            }
        };
        Ok(Some(if rules.spaces_json { form.spaced() } else { form }))
    }

    /// The form with one blank behind each comma and colon of its JSON, unless its schema says otherwise.
    fn spaced(self) -> Self {
        let (schema, strict) = match self {
            Self::Object => (r#"{"type":"object"}"#.to_owned(), false),
            Self::Schema { schema, strict } => (schema, strict),
            other => return other,
        };
        let Ok(serde_json::Value::Object(mut fields)) = serde_json::from_str(&schema) else {
            return Self::Schema { schema, strict };
        };
        let spaced = || serde_json::json!({ "item_separator": ", ", "key_separator": ": " });
        fields.entry(SCHEMA_OPTIONS).or_insert_with(spaced);
        Self::Schema { schema: serde_json::Value::Object(fields).to_string(), strict }
    }

    /// Returns true for a grammar that cannot stand inside of another one.
    fn stands_alone(&self) -> bool {
        matches!(self, Self::Lark(text) if lark::to_rules(text).is_none())
    }

    fn source(&self) -> Source {
        match self {
            Self::Object => Source::json_object(),
            Self::Schema { schema, .. } => Source::json_schema(schema),
            Self::Regex(regex) => Source::regex(regex),
            Self::Choice(choices) => Source::choice(choices),
            Self::Lark(text) => Source::lark(text),
            Self::Rules { start, rules } | Self::Tag { start, rules } => {
                Source::lark(format!("start: {start}\n{rules}"))
            }
        }
    }
}

/// Control tokens of the model, for structural tags.
struct Specials<'a>(&'a SpecialNames);

impl SpecialTokens for Specials<'_> {
    fn name(&self, id: u32) -> Option<&str> {
        self.0.name(id)
    }

    fn find(&self, text: &str) -> Vec<(Range<usize>, u32)> {
        self.0.find(text)
    }
}

/// Bytes of the format's text, which are parsed.
pub(crate) fn format_bytes(format: &ResponseFormat) -> usize {
    match format {
        ResponseFormat::Text | ResponseFormat::JsonObject => 0,
        ResponseFormat::JsonSchema { schema, .. } => schema.len(),
        ResponseFormat::Regex(text) | ResponseFormat::Grammar { text, .. } | ResponseFormat::StructuralTag(text) => {
            text.len()
        }
        ResponseFormat::Choice(choices) => choices.iter().map(String::len).sum(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use penstock_text::TextFiles;
    use penstock_types::Tool;

    use super::*;

    const WEATHER: &str = r#"{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}"#;

    fn model() -> TextModel {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
        TextModel::from_dir(&dir).expect("the demo model's tokenizer")
    }

    fn chat(change: impl FnOnce(&mut ChatRequest)) -> ChatRequest {
        let message = Message { content: Some("hi".into()), ..Message::default() };
        let mut chat = ChatRequest::new("m".into(), vec![message]);
        change(&mut chat);
        chat
    }

    fn with_tools(choice: ToolChoice, strict: bool) -> ChatRequest {
        chat(|chat| {
            let tool = |name: &str| Tool::function(name.into(), None, Some(WEATHER.into()), strict);
            (chat.tools, chat.tool_choice) = (vec![tool("weather"), tool("time")], choice);
        })
    }

    fn draft_of(chat: &ChatRequest, surface: Surface) -> Result<Option<Draft>, ApiError> {
        let model = model();
        let prompt = model.chat_prompt(chat, 0).expect("a prompt");
        Draft::of_chat(chat, &prompt, &model, surface, AnswerRules::default())
    }

    fn compiled(chat: &ChatRequest) -> Result<Option<Guided>, ApiError> {
        let (model, library) = (model(), Library::default());
        let draft = draft_of(chat, Surface::Chat)?;
        draft.map(|draft| library.compile(draft, &model, model.vocab_size())).transpose()
    }

    fn schema(text: &str, strict: bool) -> ResponseFormat {
        ResponseFormat::JsonSchema { name: "x".into(), description: None, schema: text.into(), strict }
    }

    #[test]
    fn free_answers_have_no_grammar() {
        assert_eq!(compiled(&chat(|_| {})), Ok(None));
        assert_eq!(compiled(&with_tools(ToolChoice::Auto, false)), Ok(None));
        assert_eq!(compiled(&with_tools(ToolChoice::None, true)), Ok(None));
    }

    #[test]
    fn every_format_and_choice_has_a_grammar_that_compiles() {
        let formats = [
            ResponseFormat::JsonObject,
            schema(WEATHER, true),
            ResponseFormat::Regex("a/b\\/c|[0-9]+".into()),
            ResponseFormat::Regex(r"a\\/b".into()),
            ResponseFormat::Regex(r"[\\/]+".into()),
            ResponseFormat::Regex("a\\\nb".into()),
            ResponseFormat::Regex("^[a-z]+$".into()),
            ResponseFormat::Regex(String::new()),
            ResponseFormat::Choice(vec!["yes".into(), "no \"".into()]),
            ResponseFormat::Grammar { text: "start: \"a\"+".into(), syntax: None },
            ResponseFormat::Grammar { text: "root ::= [a-z/]+ \"\\n\"".into(), syntax: None },
        ];
        for format in &formats {
            let made = compiled(&chat(|chat| chat.response_format = format.clone()));
            assert!(made.expect("a grammar").is_some(), "{format:?}");
            for (choice, strict) in [(ToolChoice::Auto, false), (ToolChoice::Required, true)] {
                let asked = ChatRequest { response_format: format.clone(), ..with_tools(choice, strict) };
                assert!(compiled(&asked).expect("a grammar").is_some(), "{format:?} beside tools");
            }
        }
        let names = || vec!["time".to_owned()];
        for choice in [
            ToolChoice::Required,
            ToolChoice::Named("time".into()),
            ToolChoice::Allowed { names: names(), required: true },
            ToolChoice::Allowed { names: names(), required: false },
        ] {
            assert!(compiled(&with_tools(choice.clone(), false)).expect("a grammar").is_some(), "{choice:?}");
        }
        assert!(compiled(&with_tools(ToolChoice::Auto, true)).expect("a grammar").is_some(), "strict tools");
    }

    #[test]
    fn a_pool_can_hold_every_call_to_its_tool() {
        let (asked, model) = (with_tools(ToolChoice::Auto, false), model());
        let prompt = model.chat_prompt(&asked, 0).expect("a prompt");
        let draft = |holds_calls| {
            let rules = AnswerRules { holds_calls, ..AnswerRules::default() };
            Draft::of_chat(&asked, &prompt, &model, Surface::Chat, rules).expect("a draft")
        };
        assert_eq!(draft(false), None);
        let held = Library::default().compile(draft(true).expect("a grammar"), &model, model.vocab_size());
        assert!(held.expect("it compiles").guide.text.contains("city"));
    }

    #[test]
    fn json_is_compact_or_spaced_as_the_pool_says() {
        let model = model();
        let mut texts = Vec::new();
        for format in [
            ResponseFormat::JsonObject,
            ResponseFormat::JsonSchema {
                name: "x".into(),
                description: None,
                schema: r#"{"type":"object","properties":{"a":{"const":[1,2]}},"required":["a"]}"#.into(),
                strict: true,
            },
        ] {
            let asked = chat(|chat| chat.response_format = format.clone());
            let prompt = model.chat_prompt(&asked, 0).expect("a prompt");
            for spaces_json in [false, true] {
                let rules = AnswerRules { spaces_json, ..AnswerRules::default() };
                let draft = Draft::of_chat(&asked, &prompt, &model, Surface::Chat, rules).expect("a draft");
                let held = Library::default().compile(draft.expect("a grammar"), &model, model.vocab_size());
                texts.push(held.expect("it compiles").guide.text.contains(r#""item_separator":", ""#));
            }
        }
        assert_eq!(texts, [false, true, false, true]);
    }

    #[test]
    fn json_beside_tools_is_compact_or_spaced_as_the_pool_says() {
        let model = model();
        for format in [ResponseFormat::JsonObject, schema(WEATHER, true)] {
            let asked = ChatRequest { response_format: format, ..with_tools(ToolChoice::Auto, false) };
            let prompt = model.chat_prompt(&asked, 0).expect("a prompt");
            let spaced = [false, true].map(|spaces_json| {
                let rules = AnswerRules { spaces_json, ..AnswerRules::default() };
                let draft = Draft::of_chat(&asked, &prompt, &model, Surface::Chat, rules).expect("a draft");
                draft.expect("a grammar").source.text.matches(r#""item_separator":", ""#).count()
            });
            // Arguments of the two tools have blanks either way.
            assert_eq!(spaced, [2, 3]);
        }
    }

    /// A model whose tokens are bytes, so that the marks of its reasoning are texts.
    fn model_of_bytes(template: &str) -> TextModel {
        let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let mut next = 255;
        let names = (0..256_u32).map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next
            };
            (char::from_u32(code).expect("a letter").to_string(), serde_json::Value::from(byte))
        });
        let bytes = serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        let end = serde_json::json!({
            "id": 256, "content": "<eos>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        });
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
            "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": false, "byte_fallback": false, "vocab": names.collect::<serde_json::Map<_, _>>(), "merges": [],
            },
        });
        let model = TextModel::load(&TextFiles {
            tokenizer_json: tokenizer.to_string().into_bytes().into(),
            tokenizer_config_json: Some(br#"{"eos_token":"<eos>"}"#.to_vec().into()),
            chat_template_jinja: Some(template.as_bytes().to_vec().into()),
            ..TextFiles::default()
        });
        model.expect("a model of the test's own")
    }

    fn grammar_of(text: &str) -> ResponseFormat {
        ResponseFormat::Grammar { text: text.into(), syntax: None }
    }

    /// Checks texts against the grammar of a conversation with the model of bytes.
    #[track_caller]
    fn check_texts(template: &str, asked: &ChatRequest, good: &[&str], bad: &[&str]) {
        let model = model_of_bytes(template);
        let prompt = model.chat_prompt(asked, 0).expect("a prompt");
        let draft = Draft::of_chat(asked, &prompt, &model, Surface::Chat, AnswerRules::default()).expect("a draft");
        let draft = draft.expect("a grammar");
        assert_eq!(draft.begins_after, [0; 0]);
        let library = Library::default();
        let grammar = library.grammars(&model, model.vocab_size()).expect("tokens").get(&draft.source).expect("good");
        let takes = |text: &str| {
            let mut matcher = grammar.matcher();
            text.bytes().all(|byte| matcher.consume(byte.into()).is_ok()) && matcher.is_accepting().expect("sound")
        };
        good.iter().for_each(|text| assert!(takes(text), "{text:?} under {}", draft.source.text));
        bad.iter().for_each(|text| assert!(!takes(text), "{text:?} under {}", draft.source.text));
    }

    #[test]
    fn a_grammar_stands_behind_reasoning_and_beside_calls() {
        const OPENED: &str = "{% for m in messages %}{{ m.content }}{% endfor %}</think><think>\n";
        const ALLOWED: &str = "{# <think></think> #}{% for m in messages %}{{ m.content }}{% endfor %}";
        const CALLS: &str = "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}";
        for text in ["root ::= \"a\"", "start: r1\nr1: \"a\" # one"] {
            let asked = chat(|chat| chat.response_format = grammar_of(text));
            check_texts(OPENED, &asked, &["x</think>a", "</think>\n\na"], &["a", "x", "x</think>b", "x</think>"]);
            check_texts(ALLOWED, &asked, &["a", "<think>x</think>a"], &["x", "<think>x</think>", "x</think>a"]);
            let asked = ChatRequest { response_format: grammar_of(text), ..with_tools(ToolChoice::Auto, false) };
            let call = "<tool_call>\n{\"name\": \"time\", \"arguments\": {\"city\": \"x\"}}\n</tool_call>";
            check_texts(CALLS, &asked, &["a", call], &["b", "<tool_call>a", ""]);
        }
    }

    #[test]
    fn a_grammar_with_directives_of_the_whole_text_stands_alone() {
        let text = "start: \"a\" \"b\"\n%ignore / /";
        let asked = chat(|chat| chat.response_format = grammar_of(text));
        check_texts("{# <think></think> #}x", &asked, &["ab", "a b"], &["<think>x</think>ab"]);
        let model = model_of_bytes("</think><think>\n");
        let prompt = model.chat_prompt(&asked, 0).expect("a prompt");
        let refused = Draft::of_chat(&asked, &prompt, &model, Surface::Chat, AnswerRules::default());
        assert_eq!(refused.expect_err("refused").param.as_deref(), Some("structured_outputs.grammar"));
    }

    #[test]
    fn structural_tags_hold_the_whole_answer() {
        let tag = r#"{"triggers":["<tool_call>"],"structures":[{"begin":"<tool_call>","schema":{"type":"object"},"end":"</tool_call>"}]}"#;
        let format = ResponseFormat::StructuralTag(tag.into());
        for choice in [ToolChoice::None, ToolChoice::Auto] {
            let asked = ChatRequest { response_format: format.clone(), ..with_tools(choice, true) };
            let guided = compiled(&asked).expect("a grammar").expect("one");
            assert!(!guided.guide.text.contains("city"), "the tag alone: {}", guided.guide.text);
        }
        let asked =
            |tag: &str| compiled(&chat(|chat| chat.response_format = ResponseFormat::StructuralTag(tag.into())));
        let error = asked(r#"{"format":{"type":"sequence","elements":[{"type":"any_tokens"}]}}"#).expect_err("refused");
        assert_eq!(error.param.as_deref(), Some("structured_outputs.structural_tag.format.elements[0].type"));
        assert!(error.message.contains("any_tokens"), "{error}");
        assert!(asked(r#"{"format":{"type":"regex","pattern":"("}}"#).is_err(), "no regex");
    }

    #[test]
    fn refusals_name_the_field_of_the_clients_own_api() {
        let unenforced = r#"{"type":"array","items":{"type":"integer"},"uniqueItems":true}"#;
        for (surface, param) in [
            (Surface::Chat, "response_format.json_schema.schema"),
            (Surface::Responses, "text.format.schema"),
            (Surface::Messages, "output_config.format"),
            (Surface::Generate, "generationConfig.responseSchema"),
        ] {
            let error =
                draft_of(&chat(|chat| chat.response_format = schema(unenforced, true)), surface).expect_err(param);
            assert_eq!(error.param.as_deref(), Some(param));
            assert!(
                error.message.starts_with(&format!("{param}: ")) && error.message.contains("uniqueItems"),
                "{error}"
            );
        }
        assert!(compiled(&chat(|chat| chat.response_format = schema(unenforced, false))).is_ok(), "not strict");
        for (surface, param) in [
            (Surface::Chat, "tools[0].function.parameters"),
            (Surface::Responses, "tools[0].parameters"),
            (Surface::Messages, "tools[0].input_schema"),
        ] {
            let asked = chat(|chat| {
                let broken = r#"{"type":"object","properties":{"a":{"type":"array","uniqueItems":true}}}"#;
                chat.tools = vec![Tool::function("f".into(), None, Some(broken.into()), true)];
                chat.tool_choice = ToolChoice::Required;
            });
            assert_eq!(draft_of(&asked, surface).expect_err(param).param.as_deref(), Some(param));
        }
        let broken = compiled(&chat(|chat| chat.response_format = ResponseFormat::Regex("(".into())));
        assert_eq!(broken.expect_err("no regex").param.as_deref(), Some("structured_outputs.regex"));
    }
}
