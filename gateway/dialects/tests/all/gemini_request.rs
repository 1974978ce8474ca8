//! Gemini request bodies: the decoded request, and each refusal with its parameter.

use crate::common;

use common::check_golden;
use penstock_dialects::gemini::{count, embed, generate};
use penstock_types::codec::Framing;
use penstock_types::request::{ImageSource, Part};
use penstock_types::{
    Bounds, ChatRequest, EmbedRequest, Message, ReasoningEffort, Request, ResponseFormat, Role, ToolChoice,
};

fn decoded(body: &str) -> ChatRequest {
    let decoded = generate("models/m", Framing::Whole, body.as_bytes(), &Bounds::default());
    match decoded.unwrap_or_else(|error| panic!("{error}: {body}")).request {
        Request::Chat(chat) => *chat,
        other => panic!("{other:?}"),
    }
}

/// A good request with more fields.
fn with(fields: &str) -> ChatRequest {
    decoded(&format!(r#"{{"contents":[{{"parts":[{{"text":"hi"}}]}}],{fields}}}"#))
}

/// A good request with more fields in its configuration.
fn configured(fields: &str) -> ChatRequest {
    with(&format!(r#""generationConfig":{{{fields}}}"#))
}

#[track_caller]
fn refused(body: &str, param: &str, says: &str) {
    let error = generate("m", Framing::Whole, body.as_bytes(), &Bounds::default()).err().expect(body);
    assert_eq!(error.param.as_deref().unwrap_or_default(), param, "{body}");
    assert!(error.message.contains(says), "{}: {body}", error.message);
}

/// Checks the refusal of a good request with these bad fields added.
#[track_caller]
fn refused_with(fields: &str, param: &str, says: &str) {
    refused(&format!(r#"{{"contents":[{{"parts":[{{"text":"hi"}}]}}],{fields}}}"#), param, says);
}

#[track_caller]
fn refused_parts(role: &str, parts: &str, param: &str, says: &str) {
    refused(&format!(r#"{{"contents":[{{"role":"{role}","parts":[{parts}]}}]}}"#), param, says);
}

#[test]
fn the_smallest_request() {
    check_golden(
        "gemini_smallest.request",
        &format!("{:#?}\n", decoded(r#"{"contents":{"parts":{"text":"Hello!"}}}"#)),
    );
}

#[test]
fn every_field_that_is_honoured() {
    let body = r#"{
      "model": "models/other", "systemInstruction": {"role": "system", "parts": [{"text": "Be "}, {"text": "brief."}]},
      "safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}], "labels": {"a": "b"},
      "store": true, "shiny": 1, "contents": [
        {"role": "user", "parts": [{"text": "Weather in "}, {"inlineData": {"mimeType": "image/png", "data": "_-8"}},
          {"text": "and here?"}, {"fileData": {"fileUri": "https://x/y.png", "mime_type": "image/png"}, "videoMetadata": {}}]},
        {"role": "model", "parts": [{"text": "Ask ", "thought": true}, {"text": "it.", "thought": true, "thoughtSignature": "AAAA"},
          {"functionCall": {"name": "weather", "args": {"city": "Gießen"}}, "thought_signature": "BBBB"},
          {"function_call": {"id": "c7", "name": "weather"}}]},
        {"role": "function", "parts": [{"functionResponse": {"name": "weather", "response": {"output": "rain"}}},
          {"functionResponse": {"id": "c7", "name": "weather", "response": {"error": {"code": 5}}}}, {"text": "Well?"}]}],
      "tools": [{"functionDeclarations": [{"name": "weather", "description": "say", "parameters": {"type": "OBJECT",
          "properties": {"city": {"type": "STRING", "nullable": true}}, "required": ["city"]}, "response": {"type": "STRING"}}]},
        {"function_declarations": [{"name": "time", "parametersJsonSchema": {"type": "object", "additionalProperties": false}}]}],
      "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
      "generationConfig": {"temperature": 0.5, "topP": 0.9, "top_k": 40.0, "candidateCount": 2, "maxOutputTokens": 7,
        "stopSequences": ["END"], "seed": -1, "presencePenalty": -1, "frequencyPenalty": 1, "responseMimeType": "application/json",
        "responseSchema": {"type": "ARRAY", "items": {"type": "STRING"}}, "responseLogprobs": true, "logprobs": 5,
        "thinkingConfig": {"includeThoughts": true, "thinkingLevel": "high"}, "responseModalities": ["TEXT"], "mediaResolution": "LOW"}
    }"#;
    check_golden("gemini_every_field.request", &format!("{:#?}\n", decoded(body)));
}

#[test]
fn the_url_says_whether_it_is_a_stream() {
    for framing in [Framing::Whole, Framing::Events, Framing::Array] {
        let body = br#"{"contents":[{"parts":[{"text":"hi"}]}]}"#;
        let decoded = generate("m", framing, body, &Bounds::default()).expect("good");
        assert_eq!(decoded.request.stream(), framing != Framing::Whole);
        assert_eq!((decoded.request.model(), decoded.form.choices()), ("m", 1));
    }
}

#[test]
fn calls_get_ids_and_answers_find_their_calls() {
    let chat = decoded(
        r#"{"contents":[{"role":"user","parts":[{"text":"go"}]},
        {"role":"model","parts":[{"functionCall":{"name":"a"}},{"functionCall":{"name":"b"}},{"functionCall":{"name":"a"}}]},
        {"role":"user","parts":[{"functionResponse":{"name":"a","response":{"x":1}}},{"text":"also"},
          {"functionResponse":{"name":"a","response":{"x":2}}},{"functionResponse":{"name":"b","response":{}}}]},
        {"role":"model","parts":[{"functionCall":{"name":"a"}}]},
        {"role":"user","parts":[{"functionResponse":{"name":"a","response":{"output":""}}}]}]}"#,
    );
    let calls: Vec<&str> = chat.messages.iter().flat_map(|said| &said.tool_calls).map(|call| &*call.id).collect();
    assert_eq!(calls, ["call_0", "call_1", "call_2", "call_3"]);
    let told: Vec<_> =
        chat.messages.iter().map(|said| (said.role, said.tool_call_id.as_deref(), said.content.as_deref())).collect();
    assert_eq!(
        told,
        [
            (Role::User, None, Some("go")),
            (Role::Assistant, None, None),
            (Role::Tool, Some("call_0"), Some(r#"{"x":1}"#)),
            (Role::Tool, Some("call_2"), Some(r#"{"x":2}"#)),
            (Role::Tool, Some("call_1"), Some("{}")),
            (Role::User, None, Some("also")),
            (Role::Assistant, None, None),
            (Role::Tool, Some("call_3"), Some("")),
        ]
    );
}

#[test]
fn what_a_function_returned_is_unwrapped() {
    for (response, content, failed) in [
        (r#"{"output":"rain"}"#, "rain", false),
        (r#"{"result":{"a": 1}}"#, r#"{"a": 1}"#, false),
        (r#"{"error":"no"}"#, "no", true),
        (r#"{"result":1,"error":2}"#, r#"{"result":1,"error":2}"#, false),
        (r#"{"other":1}"#, r#"{"other":1}"#, false),
        ("{}", "{}", false),
    ] {
        let chat = decoded(&format!(
            r#"{{"contents":[{{"role":"model","parts":[{{"functionCall":{{"name":"f"}}}}]}},
            {{"parts":[{{"functionResponse":{{"name":"f","response":{response}}}}}]}}]}}"#
        ));
        let told = &chat.messages[1];
        assert_eq!((told.content.as_deref(), told.tool_failed), (Some(content), failed), "{response}");
    }
}

#[test]
fn an_answer_may_hold_images() {
    let chat = decoded(
        r#"{"contents":[{"role":"model","parts":[{"functionCall":{"name":"a"}}]},{"role":"user","parts":[{"functionResponse":
        {"name":"a","response":{"output":"see"},"parts":[{"inlineData":{"mimeType":"image/png","data":"AAAA"}}]}}]}]}"#,
    );
    let image = Part::Image {
        source: ImageSource::Data { media_type: "image/png".into(), base64: "AAAA".into() },
        detail: None,
    };
    assert_eq!(chat.messages[1].parts, [Part::Text("see".into()), image]);
}

#[test]
fn tool_choice_is_a_mode_and_names() {
    let tools = r#""tools":[{"functionDeclarations":[{"name":"a"},{"name":"b"},{"name":"c"}]}]"#;
    let choice = |config: &str| {
        let chat = with(&format!(r#"{tools},"toolConfig":{{"functionCallingConfig":{{{config}}}}}"#));
        (chat.tool_choice, chat.tools.into_iter().map(|tool| (tool.name, tool.strict)).collect::<Vec<_>>())
    };
    let all = |strict| ["a", "b", "c"].map(|name| (name.to_owned(), strict)).to_vec();
    assert_eq!(choice(r#""mode":"AUTO""#), (ToolChoice::Auto, all(false)));
    assert_eq!(choice(""), (ToolChoice::Auto, all(false)));
    assert_eq!(choice(r#""mode":"VALIDATED""#), (ToolChoice::Auto, all(true)));
    assert_eq!(choice(r#""mode":"NONE""#), (ToolChoice::None, all(false)));
    assert_eq!(choice(r#""mode":"any""#), (ToolChoice::Required, all(false)));
    let named = ToolChoice::Named("b".into());
    assert_eq!(choice(r#""mode":"ANY","allowedFunctionNames":["b","b"]"#), (named, all(false)));
    let allowed = |names: &[&str], required| ToolChoice::Allowed {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        required,
    };
    let several = choice(r#""mode":"ANY","allowed_function_names":["c","a","c"]"#);
    assert_eq!(several, (allowed(&["c", "a"], true), all(false)));
    let validated = choice(r#""mode":"VALIDATED","allowedFunctionNames":["b"]"#);
    assert_eq!(validated, (allowed(&["b"], false), all(true)));
    assert_eq!(with(r#""tools":[]"#).tool_choice, ToolChoice::None);
}

#[test]
fn thinking_is_a_budget_or_a_level() {
    let thinking = |config: &str| {
        let chat = configured(&format!(r#""thinkingConfig":{{{config}}}"#));
        (chat.reasoning_effort, chat.reasoning_tokens_max)
    };
    assert_eq!(thinking(""), (None, None));
    assert_eq!(thinking(r#""thinkingBudget":-1"#), (None, None));
    assert_eq!(thinking(r#""thinkingBudget":0"#), (Some(ReasoningEffort::None), Some(0)));
    assert_eq!(thinking(r#""thinking_budget":1024"#), (None, Some(1024)));
    assert_eq!(thinking(r#""thinkingLevel":"MINIMAL""#), (Some(ReasoningEffort::Minimal), None));
    assert_eq!(thinking(r#""thinkingLevel":"THINKING_LEVEL_UNSPECIFIED""#), (None, None));
}

#[test]
fn formats() {
    assert_eq!(configured(r#""responseMimeType":"text/plain""#).response_format, ResponseFormat::Text);
    assert_eq!(configured(r#""responseMimeType":"application/json""#).response_format, ResponseFormat::JsonObject);
    let given = r#""responseMimeType":"application/json","responseJsonSchema":{"type":"object"}"#;
    let ResponseFormat::JsonSchema { schema, strict, .. } = configured(given).response_format else {
        panic!("no schema")
    };
    assert_eq!((schema.as_str(), strict), (r#"{"type":"object"}"#, true));
    let choice = ResponseFormat::Choice(vec!["yes".into(), "no".into()]);
    for schema in [
        r#""responseSchema":{"type":"STRING","format":"enum","enum":["yes","no","yes"]}"#,
        r#""responseJsonSchema":{"enum":["yes","no"]}"#,
    ] {
        assert_eq!(configured(&format!(r#""responseMimeType":"text/x.enum",{schema}"#)).response_format, choice);
    }
}

#[test]
fn a_signature_may_stand_anywhere() {
    let chat = decoded(
        r#"{"contents":[{"role":"model","parts":[{"text":"a"},{"text":"","thoughtSignature":"_-8="}]},{"parts":{"text":"b"}},
        {"role":"model","parts":[{"thoughtSignature":"AAAA"}]}]}"#,
    );
    let told = |at: usize| (chat.messages[at].content.as_deref(), chat.messages[at].reasoning_signature.as_deref());
    assert_eq!(told(0), (Some("a"), Some("gemini:/+8=")));
    assert_eq!(told(2), (Some(""), Some("gemini:AAAA")));
}

#[test]
fn contents_of_the_model_in_a_row_are_one_turn() {
    // The histories of Google's SDKs after streams: each chunk is a content.
    let chat = decoded(
        r#"{"contents":[{"parts":{"text":"go"}},
        {"role":"model","parts":[{"functionCall":{"name":"a"}}]},
        {"role":"model","parts":[{"functionCall":{"name":"b"}}]},
        {"role":"model","parts":[{"text":""}]},
        {"role":"user","parts":[{"functionResponse":{"name":"b","response":{}}},{"functionResponse":{"name":"a","response":{}}}]},
        {"role":"model","parts":[{"text":"x"}]},{"role":"user","parts":[]},{"role":"model","parts":[{"text":"y"}]},
        {"role":"model","parts":[{"text":""}]}]}"#,
    );
    let calls = |said: &Message| said.tool_calls.iter().map(|call| call.id.clone()).collect::<Vec<_>>();
    let told: Vec<_> = chat
        .messages
        .iter()
        .map(|said| (said.role, said.content.as_deref(), calls(said), said.tool_call_id.as_deref()))
        .collect();
    assert_eq!(
        told,
        [
            (Role::User, Some("go"), vec![], None),
            (Role::Assistant, None, vec!["call_0".to_owned(), "call_1".to_owned()], None),
            (Role::Tool, Some("{}"), vec![], Some("call_1")),
            (Role::Tool, Some("{}"), vec![], Some("call_0")),
            (Role::Assistant, Some("xy"), vec![], None),
        ]
    );
}

#[test]
fn each_thought_of_a_turn_keeps_its_signature() {
    let chat = decoded(
        r#"{"contents":[{"role":"model","parts":[{"text":"Let ","thought":true}]},
        {"role":"model","parts":[{"text":"me.","thought":true}]},
        {"role":"model","parts":[{"text":"","thought":true,"thoughtSignature":"AAAA"}]},
        {"role":"model","parts":[{"text":"Hi"},{"text":"Again.","thought":true}]},
        {"role":"model","parts":[{"text":" you","thoughtSignature":"BBBB"}]},
        {"role":"model","parts":[{"text":"","thought":true,"thoughtSignature":"cGVuc3RvY2s6cmVkYWN0ZWRfdGhpbmtpbmc6aGlkZGVu"}]}]}"#,
    );
    let [message] = chat.messages.as_slice() else { panic!("{:?}", chat.messages) };
    assert_eq!((message.reasoning.as_deref(), message.content.as_deref()), (Some("Let me.\n\nAgain."), Some("Hi you")));
    let packed = r#"[{"type":"thinking","thinking":"Let me.","signature":"gemini:AAAA"},{"type":"thinking","thinking":"Again.","signature":"gemini:BBBB"},{"type":"redacted_thinking","data":"hidden"}]"#;
    assert_eq!(message.reasoning_signature.as_deref(), Some(packed));
}

#[test]
fn answers_to_calls_stand_before_what_else_the_user_says() {
    let answer = |name: &str| format!(r#"{{"functionResponse":{{"name":"{name}","response":{{}}}}}}"#);
    let chat = decoded(&format!(
        r#"{{"contents":[{{"parts":{{"text":"go"}}}},
        {{"role":"model","parts":[{{"functionCall":{{"name":"a"}}}},{{"functionCall":{{"name":"b"}}}}]}},
        {{"parts":[{{"text":"1"}},{}]}},{{"parts":{{"text":"2"}}}},{{"parts":[{}]}},{{"role":"model","parts":[{{"text":"x"}}]}},{{"parts":{{"text":"3"}}}}]}}"#,
        answer("b"),
        answer("a")
    ));
    let told: Vec<_> = chat.messages.iter().map(|said| (said.role, said.content.as_deref())).collect();
    use Role::*;
    assert_eq!(
        told,
        [
            (User, Some("go")),
            (Assistant, None),
            (Tool, Some("{}")),
            (Tool, Some("{}")),
            (User, Some("1")),
            (User, Some("2")),
            (Assistant, Some("x")),
            (User, Some("3")),
        ]
    );
}

#[test]
fn what_is_wrong_is_named() {
    refused("[]", "", "object");
    refused("{", "", "not valid JSON");
    refused("{}", "contents", "required");
    refused(r#"{"contents":[]}"#, "contents", "at least one");
    refused(r#"{"contents":"hi"}"#, "contents", "an array");
    refused(r#"{"contents":[{"parts":[{"text":1}]}]}"#, "contents[0].parts[0].text", "a string");
    refused(r#"{"contents":[{"role":"assistant","parts":[]}]}"#, "contents[0].role", "user, model");
    refused_with(r#""generationConfig":{},"generation_config":{}"#, "generationConfig", "given twice");
    refused_with(r#""cachedContent":"cachedContents/x""#, "cachedContent", "not built");
    refused_with(r#""tools":[{"googleSearch":{}}]"#, "tools[0].googleSearch", "functionDeclarations");
    refused_with(
        r#""tools":[{"functionDeclarations":[{"name":"a"},{"name":"a"}]}]"#,
        "tools[0].functionDeclarations[1]",
        "twice",
    );
    refused_with(
        r#""tools":[{"functionDeclarations":[{"name":"a","parameters":{},"parametersJsonSchema":{}}]}]"#,
        "tools[0].functionDeclarations[0].parametersJsonSchema",
        "two forms",
    );
    refused_with(
        r#""toolConfig":{"functionCallingConfig":{"mode":"ANY"}}"#,
        "toolConfig.functionCallingConfig.mode",
        "functions",
    );
    let allowed = "toolConfig.functionCallingConfig.allowedFunctionNames";
    refused_with(
        r#""toolConfig":{"functionCallingConfig":{"mode":"ANY","allowedFunctionNames":["x"]}}"#,
        allowed,
        "no function",
    );
    refused_with(r#""toolConfig":{"functionCallingConfig":{"allowedFunctionNames":["x"]}}"#, allowed, "mode ANY");
    for (fields, param, says) in [
        (r#""temperature":3"#, "temperature", "at most 2"),
        (r#""topP":0"#, "topP", "above 0"),
        (r#""maxOutputTokens":0"#, "maxOutputTokens", "1 to"),
        (r#""candidateCount":1000"#, "candidateCount", "1 to"),
        (r#""responseSchema":{}"#, "responseSchema", "application/json"),
        (r#""responseMimeType":"text/x.yaml""#, "responseMimeType", "is not"),
        (r#""responseMimeType":"text/x.enum""#, "responseSchema", "required with"),
        (r#""responseMimeType":"text/x.enum","responseSchema":{"type":"STRING"}"#, "responseSchema.enum", "missing"),
        (
            r#""responseMimeType":"text/x.enum","responseSchema":{"type":"STRING","enum":["a"],"nullable":true}"#,
            "responseSchema.enum[1]",
            "expected a string, got null",
        ),
        (r#""logprobs":3"#, "logprobs", "responseLogprobs"),
        (r#""responseModalities":["TEXT","IMAGE"]"#, "responseModalities[1]", "only TEXT"),
        (r#""speechConfig":{}"#, "speechConfig", "only text"),
        (r#""thinkingConfig":{"thinkingBudget":1,"thinkingLevel":"LOW"}"#, "thinkingConfig.thinkingBudget", "only one"),
        (r#""thinkingConfig":{"thinkingLevel":"WILD"}"#, "thinkingConfig.thinkingLevel", "MINIMAL"),
    ] {
        refused_with(&format!(r#""generationConfig":{{{fields}}}"#), &format!("generationConfig.{param}"), says);
    }
    refused_parts("user", "{}", "contents[0].parts[0]", "must hold");
    refused_parts(
        "user",
        r#"{"text":"a","inlineData":{"mimeType":"image/png","data":""}}"#,
        "contents[0].parts[0]",
        "one kind",
    );
    refused_parts(
        "user",
        r#"{"inlineData":{"mimeType":"audio/wav","data":""}}"#,
        "contents[0].parts[0].inlineData.mimeType",
        "is not",
    );
    refused_parts(
        "user",
        r#"{"inlineData":{"mimeType":"image/png","data":"*"}}"#,
        "contents[0].parts[0].inlineData.data",
        "base64",
    );
    refused_parts("user", r#"{"fileData":{"fileUri":"gs://x"}}"#, "contents[0].parts[0].fileData.fileUri", "");
    refused_parts("user", r#"{"executableCode":{}}"#, "contents[0].parts[0].executableCode", "not built");
    refused_parts("user", r#"{"functionCall":{"name":"a"}}"#, "contents[0].parts[0].functionCall", "the model");
    refused_parts("user", r#"{"functionResponse":{"name":"a"}}"#, "contents[0].parts[0].functionResponse", "no call");
    refused_parts("model", r#"{"inlineData":{"mimeType":"image/png","data":""}}"#, "contents[0].parts[0]", "the user");
}

#[test]
fn bounds_hold() {
    let small = Bounds { messages_max: 2, parts_max: 2, tools_max: 1, ..Bounds::default() };
    let refused = |body: &str| generate("m", Framing::Whole, body.as_bytes(), &small).err().expect(body).kind;
    for body in [
        r#"{"contents":[{"parts":{"text":"a"}},{"parts":{"text":"a"}},{"parts":{"text":"a"}}]}"#,
        r#"{"contents":[{"parts":[{"text":"a"},{"text":"a"},{"text":"a"}]}]}"#,
        r#"{"contents":{"parts":{"text":"a"}},"tools":[{"functionDeclarations":[{"name":"a"},{"name":"b"}]}]}"#,
    ] {
        assert_eq!(refused(body), penstock_types::ApiErrorKind::TooLarge, "{body}");
    }
    // Chunks of one answer are one message; they have a bound of their own.
    let streamed = |chunks: usize| {
        let chunk = r#",{"role":"model","parts":[{"text":"a"}]}"#.repeat(chunks);
        format!(r#"{{"contents":[{{"parts":{{"text":"a"}}}}{chunk}]}}"#)
    };
    assert!(generate("m", Framing::Whole, streamed(31).as_bytes(), &small).is_ok());
    assert_eq!(refused(&streamed(32)), penstock_types::ApiErrorKind::TooLarge);
}

#[test]
fn counting_takes_contents_or_a_whole_request() {
    let counted = |body: &str| {
        count("m", body.as_bytes(), &Bounds::default()).map(|decoded| match decoded.request {
            Request::Chat(chat) => chat.messages.len(),
            other => panic!("{other:?}"),
        })
    };
    let contents = r#""contents":[{"parts":[{"text":"hi"}]}]"#;
    assert_eq!(counted(&format!("{{{contents}}}")), Ok(1));
    let inner = format!(r#"{{"model":"models/m",{contents},"systemInstruction":{{"parts":[{{"text":"x"}}]}}}}"#);
    assert_eq!(counted(&format!(r#"{{"generateContentRequest":{inner}}}"#)), Ok(2));
    assert!(counted(&format!(r#"{{"generateContentRequest":{inner},{contents}}}"#)).is_err());
    assert!(counted("{}").is_err());
    // Allowed in `countTokens` only.
    refused(&format!(r#"{{"generateContentRequest":{inner}}}"#), "contents", "required");
}

fn embedded(batch: bool, body: &str) -> Result<EmbedRequest, (String, String)> {
    match embed("models/m", batch, body.as_bytes(), &Bounds::default()) {
        Ok(decoded) => match decoded.request {
            Request::Embed(embed) => Ok(*embed),
            other => panic!("{other:?}"),
        },
        Err(error) => Err((error.param.unwrap_or_default(), error.message)),
    }
}

#[test]
fn texts_to_embed() {
    let one = embedded(
        false,
        r#"{"model":"models/m","content":{"parts":[{"text":"a"},{"text":"b"}]},"taskType":"X","outputDimensionality":8}"#,
    );
    check_golden("gemini_embed.request", &format!("{:#?}\n", one.expect("good")));
    let two =
        r#"{"requests":[{"model":"models/m","content":{"parts":{"text":"a"}}},{"content":{"parts":{"text":"b"}}}]}"#;
    assert_eq!(embedded(true, two).expect("good").inputs.len(), 2);
    for (batch, body, param) in [
        (false, r#"{}"#, "content"),
        (false, r#"{"content":{"parts":[{"functionCall":{"name":"a"}}]}}"#, "content.parts[0]"),
        (false, r#"{"content":{"parts":{"text":"a"}},"title":"x"}"#, "title"),
        (false, r#"{"content":{"parts":{"text":"a"}},"model":"models/n"}"#, "model"),
        (true, r#"{"requests":[]}"#, "requests"),
        (
            true,
            r#"{"requests":[{"content":{"parts":[]},"taskType":"A"},{"content":{"parts":[]}}]}"#,
            "requests[1].taskType",
        ),
    ] {
        assert_eq!(embedded(batch, body).expect_err(body).0, param, "{body}");
    }
}
