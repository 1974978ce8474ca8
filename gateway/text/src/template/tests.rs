//! Templates as they are rendered: features, Python's texts, bounds.

use super::*;

type Variables = Vec<(Arc<str>, Value)>;

fn render(template: &str, variables: Variables) -> Result<String, RenderError> {
    let config = serde_json::json!({ "chat_template": template });
    let template = ChatTemplate::load(None, &config, Vec::new()).unwrap().unwrap();
    template.render(variables, false, 1_700_000_000)
}

fn json(text: &str) -> Value {
    Json::read(text).unwrap().value(&|text| text.into()).unwrap()
}

#[track_caller]
fn check(template: &str, expected: &str) {
    let variables: Variables = vec![
        ("text".into(), json("\"a<b & 'c' é\"")),
        ("none".into(), Value::None),
        ("list".into(), json("[1, 2, 3]")),
        ("tool".into(), json(r#"{"b": [1, 2.5, 1e20], "a": {"x": null, "y": true}}"#)),
    ];
    assert_eq!(render(template, variables).as_deref(), Ok(expected), "{template}");
}

#[test]
fn json_is_written_as_python_does() {
    check("{{ text | tojson }}", "\"a<b & 'c' \u{e9}\"");
    check("{{ text | tojson(ensure_ascii=true) }}", "\"a<b & 'c' \\u00e9\"");
    check("{{ tool | tojson }}", r#"{"b": [1, 2.5, 1e+20], "a": {"x": null, "y": true}}"#);
    check("{{ tool.a | tojson(indent=2) }}", "{\n  \"x\": null,\n  \"y\": true\n}");
    check("{{ tool.b | tojson(separators=(',', ':')) }}", "[1,2.5,1e+20]");
    check("{{ tool | tojson(sort_keys=true) }}", r#"{"a": {"x": null, "y": true}, "b": [1, 2.5, 1e+20]}"#);
    check("{{ [] | tojson(indent=2) }}{{ {} | tojson(indent=2) }}", "[]{}");
}

#[test]
fn values_print_as_python_does() {
    check("{{ none }} {{ true }} {{ 1.0 }} {{ list }}", "None True 1.0 [1, 2, 3]");
    check("{{ tool.a }} {{ ['x', \"it's\"] }}", "{'x': None, 'y': True} ['x', \"it's\"]");
}

#[test]
fn jinja_features_that_templates_use() {
    check("{% for i in list %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13");
    check("{% set ns = namespace(n=0) %}{% for i in list %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "6");
    check("{% for k, v in tool.items() %}{{ k }}{% endfor %}", "ba");
    check("{% macro f(x, y='d') %}{{ x }}{{ y }}{% endmacro %}{{ f('a') }}{{ f('b', y='c') }}", "adbc");
    check("{{ list[::-1] | list }}{{ list[1:] | list }}{{ text[-1] }}", "[3, 2, 1][2, 3]\u{e9}");
    check("  {% generation %}\nx\n  {% endgeneration %}\ny", "x\ny");
    check("a {%- generation -%} x {%- endgeneration %} b", "ax b");
    check("{{ strftime_now('%d %b %Y') }}", "14 Nov 2023");
    check("{{ '</think>x'.split('</think>')[-1].lstrip('\\n') }}{{ 'ab'.removeprefix('a') }}", "xb");
    check(
        "{{ text is iterable }}{{ none is iterable }}{{ tool is sequence }}{{ tool is mapping }}",
        "TrueFalseTrueTrue",
    );
}

#[test]
fn a_template_refuses_in_its_own_words() {
    let refused = render("{{ raise_exception('roles must alternate') }}", Vec::new());
    assert_eq!(refused, Err(RenderError::Refused("roles must alternate".into())));
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let forever = "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}";
    assert_eq!(render(forever, Vec::new()), Err(RenderError::TooMuch));
    let large = "{% set x = 'x' * 1000000 %}{% for a in range(100) %}{{ x }}{% endfor %}";
    assert_eq!(render(large, Vec::new()), Err(RenderError::TooMuch));
}

#[test]
fn a_broken_template_is_refused_at_load() {
    let config = serde_json::json!({ "chat_template": "{% if %}" });
    let error = ChatTemplate::load(None, &config, Vec::new()).err().unwrap().to_string();
    assert!(error.starts_with("tokenizer_config.json: chat template default, line 1"), "{error}");
}

#[test]
fn named_templates_are_chosen_by_tools() {
    let config = serde_json::json!({ "chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}] });
    let template = ChatTemplate::load(None, &config, Vec::new()).unwrap().unwrap();
    assert_eq!(template.render(Vec::new(), false, 0).as_deref(), Ok("d"));
    assert_eq!(template.render(Vec::new(), true, 0).as_deref(), Ok("t"));
}
