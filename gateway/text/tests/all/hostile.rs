//! Hostile model files and requests: refused or served, never a panic.

use crate::common;

use common::{dir, message, request};
use penstock_text::{TextError, TextFiles, TextModel};
use penstock_types::Role;
use proptest::prelude::*;
use serde_json::Value;

fn tokenizer() -> &'static [u8] {
    static BYTES: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    BYTES.get_or_init(|| {
        std::fs::read(dir().join("../../gateway/text/tests/goldens/tokenizers/sentencepiece-none.json")).unwrap()
    })
}

fn load(tokenizer: &[u8], config: Option<&str>, template: Option<&str>) -> Result<TextModel, TextError> {
    TextModel::load(&TextFiles {
        tokenizer_json: tokenizer.into(),
        tokenizer_config_json: config.map(|text| text.as_bytes().into()),
        chat_template_jinja: template.map(|text| text.as_bytes().into()),
        generation_config_json: config.map(|text| text.as_bytes().into()),
        special_tokens_map_json: config.map(|text| text.as_bytes().into()),
        config_json: config.map(|text| text.as_bytes().into()),
    })
}

/// Pointers to every place in a JSON value.
fn places(value: &Value, at: &str, out: &mut Vec<String>) {
    out.push(at.to_owned());
    match value {
        Value::Array(items) => {
            items.iter().enumerate().take(40).for_each(|(index, item)| places(item, &format!("{at}/{index}"), out));
        }
        Value::Object(map) => map.iter().take(40).for_each(|(key, item)| {
            places(item, &format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), out);
        }),
        _ => {}
    }
}

fn odd_value() -> impl Strategy<Value = Value> {
    prop::sample::select(vec![
        Value::Null,
        true.into(),
        0.into(),
        (-1).into(),
        u32::MAX.into(),
        u64::MAX.into(),
        1e300.into(),
        "".into(),
        "x".into(),
        "(((".into(),
        Value::Array(vec![]),
        serde_json::json!({}),
        serde_json::json!([[0, {"type": "BPE"}]]),
    ])
}

/// A post-processor that names an undefined token, on which the library panicked at the first text.
#[test]
fn a_processor_without_its_token_is_refused() {
    let mut json: Value = serde_json::from_slice(tokenizer()).unwrap();
    json["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "<x>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } },
    });
    let refused = load(json.to_string().as_bytes(), None, None);
    assert!(matches!(refused, Err(TextError::Malformed { file: "tokenizer.json", .. })), "{refused:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_damaged_tokenizer_is_refused_or_works(place in any::<prop::sample::Index>(), value in odd_value()) {
        let mut json: Value = serde_json::from_slice(tokenizer()).unwrap();
        let mut all = Vec::new();
        places(&json, "", &mut all);
        *json.pointer_mut(place.get::<String>(&all)).unwrap() = value;
        if let Ok(model) = load(json.to_string().as_bytes(), None, None)
            && let Ok(ids) = model.encode("Hello é <s>", true)
        {
            model.decode(&ids, true);
        }
    }

    #[test]
    fn odd_configs_are_refused_or_ignored(key in prop::sample::select(vec![
        "chat_template", "eos_token", "bos_token", "eos_token_id", "temperature", "top_k", "top_p", "added_tokens_decoder",
    ]), value in odd_value()) {
        let _ = load(tokenizer(), Some(&serde_json::json!({ key: value }).to_string()), None);
    }

    #[test]
    fn any_template_renders_or_says_why(parts in prop::collection::vec(prop::sample::select(vec![
        "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages }}", "{{ messages[-9] }}", "{{ x.y.z }}", "{% if m %}",
        "{% endif %}", "{% set ns = namespace(a=1) %}", "{{ ns.a / 0 }}", "{{ ns.a // 0 }}", "{{ 9999999999 ** 999 }}", "{{ -9223372036854775808 // -1 }}",
        "{{ 'é'[1:-7:-2] }}", "{{ 'a' * -1 }}", "{{ messages | tojson(indent=999999) }}", "{{ loop | tojson }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '%s %d' | format(1) }}", "{{ strftime_now('%') }}", "{{ raise_exception(1) }}", "{% include 'x' %}", "{% extends 'default' %}",
        "{{ self.x() }}", "{{ messages.__class__.__mro__ }}", "{{ ''.join(messages) }}", "{{ 'a'.split('') }}", "{% generation %}", "{%", "}}", "{#", "\u{fdd0}",
        "{{ range(99999999999) | list | length }}", "{{ 'a'.replace('', 'b') }}", "{{ 'x'.rsplit('', 1) }}", "{{ messages | map(attribute='a.b') | list }}",
    ]), 0..8)) {
        let template = parts.concat();
        if let Ok(model) = load(tokenizer(), None, Some(&template)) {
            let _ = model.chat_prompt(&request(vec![message(Role::User, "hi <s> \u{fdd0}"), message(Role::Assistant, "é")]), i64::MAX / 4);
        }
    }
}
