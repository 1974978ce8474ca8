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

#[test]
fn formats_that_are_no_formats_are_faults() {
    let words = "Only '.' or '[' may follow ']' in format field specifier";
    let digits = "precision too big";
    for (expression, expected) in [
        ("'{0[a]\u{e9}}'.format({'a': 1})", words),
        ("'{0[a]\u{1f642}b}'.format({'a': 1})", words),
        ("'{0[a]b}'.format({'a': 1})", words),
        ("'{:.70000f}'.format(1.5)", digits),
        ("'{:.70000e}'.format(1.5)", digits),
        ("'{:.70000%}'.format(1.5)", digits),
        ("'{:.70000g}'.format(0.00015)", digits),
        ("'{:.70000}'.format(1.5)", digits),
        ("'%.70000f' % 1.5", digits),
        ("'%.70000E' % 1", digits),
        ("'%#.*g' % (70000, 0.00015)", digits),
    ] {
        let template = format!("{{{{ {expression} }}}}");
        let failed = RenderError::Failed(expected.into());
        assert_eq!(render(&template, Vec::new()), Err(failed), "{template}");
    }
}

#[test]
fn every_precision_that_is_taken_is_printed() {
    for (format, value, length) in [
        ("{:.32768f}", "0.5", 32_770),
        ("{:.32768%}", "0.5", 32_772),
        ("{:.32768e}", "0.5", 32_774),
        // Three digits more behind the point than the precision: zeros in front of the first one do not count.
        ("{:#.32768g}", "0.00015", 32_773),
        ("{:.32768}", "0.5", 3),
    ] {
        let template = format!("{{{{ '{format}'.format({value}) | length }}}}");
        assert_eq!(render(&template, Vec::new()), Ok(length.to_string()), "{template}");
    }
    let text = "{{ ('%.70000s' % ('x' * 80000)) | length }}";
    assert_eq!(render(text, Vec::new()).as_deref(), Ok("70000"), "a text has no digits");
}

#[test]
fn a_panic_of_the_evaluator_fails_the_template_and_nothing_else() {
    let panicked = guarded(|| if true { panic!("a defect of the evaluator") } else { Ok(()) });
    assert_eq!(panicked, Err(RenderError::Failed("the template evaluator panicked on it".into())));
    assert_eq!(guarded(|| Ok(7)), Ok(7));
    assert_eq!(guarded(|| Err::<(), _>(RenderError::TooMuch)), Err(RenderError::TooMuch));
}

/// Renders on a thread with a small stack: an overflow ends the process.
#[test]
fn deep_recursion_is_stopped_before_the_stack_ends() {
    let nested = "{{ m(n) }}".to_owned();
    let templates = [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_owned(),
        "{% macro m() %}{% for a in [1] %}{% if a %}{% set x %}{{ [m() ~ ''] | join }}{% endset %}{% endif %}{% endfor %}{% endmacro %}{{ m() }}".to_owned(),
        "{% macro m(a) %}{{ m(m(m(caller))) if not ([1] | map('string') | list) is none and 1 < 2 + 3 * 4 else a[a] }}{{ caller }}{% endmacro %}{{ m() }}".to_owned(),
        "{% macro m() %}{% call m() %}{{ m() }}{% endcall %}{{ caller() }}{% endmacro %}{{ m() }}".to_owned(),
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}".to_owned(),
        format!("{{% macro m(n) %}}{}{{{{ m(n) }}}}{}{{% endmacro %}}{nested}", "{% if true %}".repeat(90), "{% endif %}".repeat(90)),
        format!("{{% macro m(n) %}}{{{{ {}m(n){} }}}}{{% endmacro %}}{nested}", "(1, ".repeat(40), ")".repeat(40)),
        "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x, {'a': (ns.x,)}] %}{% endfor %}{{ ns.x }}".to_owned(),
        "{% set ns = namespace(x=[]) %}{% for i in range(190) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}{{ ns.x | tojson(indent=1) }}{{ ns.x == ns.x ~ '' }}{{ [ns.x] == [ns.x] }}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_owned(),
    ];
    let bytes = std::env::var("PENSTOCK_TEST_STACK").ok().and_then(|text| text.parse().ok()).unwrap_or(1 << 20);
    for template in templates {
        let run = move || assert_eq!(render(&template, Vec::new()), Err(RenderError::TooMuch), "{template}");
        std::thread::Builder::new().stack_size(bytes).spawn(run).unwrap().join().unwrap();
    }
}

/// Every operator, filter, test and method on values of every kind, as Python has them: goldens/make_expressions.py
/// wrote what is expected.
#[test]
fn expressions_equal_python() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/expressions/expressions.json");
    let Json::Object(document) = Json::read(&std::fs::read_to_string(path).unwrap()).unwrap() else {
        panic!("no object")
    };
    let part = |wanted: &str| match document.iter().find(|(name, _)| name == wanted) {
        Some((_, Json::Object(part))) => part,
        _ => panic!("{wanted} is missing"),
    };
    let variables: Variables = part("variables")
        .iter()
        .map(|(name, value)| (name.as_str().into(), value.value(&|text| text.into()).unwrap()))
        .collect();
    let mut faults = Vec::new();
    let cases = part("cases");
    for (template, expected) in cases {
        let config = serde_json::json!({ "chat_template": template });
        let made =
            ChatTemplate::load(None, &config, Vec::new()).map_err(|error| error.to_string()).and_then(|loaded| {
                let mut variables = variables.clone();
                variables.push(("messages".into(), json("[]")));
                loaded.unwrap().render(variables, false, 1_700_000_000).map_err(|error| format!("{error:?}"))
            });
        let equal = match (&made, expected) {
            (Ok(made), Json::Text(expected)) => made == expected,
            (Err(_), Json::Null) => true,
            _ => false,
        };
        if equal == on_purpose(template) {
            faults.push(format!("{template}\n  made {made:?}\n  golden {expected:?}"));
        }
    }
    assert!(cases.len() > 9000, "only {} cases", cases.len());
    assert!(faults.is_empty(), "{} of {}:\n{}", faults.len(), cases.len(), faults.join("\n"));
}

/// Cases that differ from Python for a reason that docs/reference/chat-templates.md gives.
fn on_purpose(template: &str) -> bool {
    // Jinja computes constants before it renders, where a fault becomes an absent value.
    let constants = ["{{ none[1:] }}", "{{ {'a': 1}['a':] }}"];
    template.contains(".encode()")
        || template == "{{ -2 ** 2.5 }}"
        || template == "{{ 'ǆ ß ΑΣ'.swapcase() }}"
        || constants.contains(&template)
}

/// Templates that try to use up time or memory end with [`RenderError::TooMuch`] or a fault, soon.
#[test]
fn hostile_templates_are_stopped() {
    let doubling = |start: &str, twice: &str| {
        format!(
            "{{% set ns = namespace(x={start}) %}}{{% for i in range(99999) %}}{{% set ns.x = {twice} %}}{{% endfor %}}"
        )
    };
    let much = [
        "{{ 'a' * 10**9 }}".to_owned(),
        "{{ 'a' * 10**30 }}".into(),
        "{{ [1] * 10**9 }}".into(),
        doubling("'ab'", "ns.x ~ ns.x"),
        doubling("'ab'", "ns.x + ns.x"),
        doubling("'ab'", "ns.x | replace('a', ns.x)"),
        doubling("'ab'", "[ns.x, ns.x] | join"),
        doubling("'ab'", "'%s%s' % (ns.x, ns.x)"),
        doubling("'ab'", "'{0}{0}'.format(ns.x)"),
        doubling("['a']", "ns.x + ns.x"),
        doubling("[]", "[ns.x]"),
        doubling("{}", "{'a': ns.x}"),
        doubling("namespace()", "namespace(x=[ns.x])") + "{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(150) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}".into(),
        "{% set ns = namespace(x=[1]) %}{% for i in range(150) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}".into(),
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(150) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}".into(),
        "{% set x = 'x' * 60000000 %}{% for i in range(9999) %}{{ x | length }}{% endfor %}".into(),
        "{% set x = 'x' * 6000000 %}{% for i in range(9999) %}{% set y = x.split('') if false else x.split('x') %}{% endfor %}".into(),
        "{% set x = range(100000) | list %}{% for i in x %}{{ i in x }}{% endfor %}".into(),
        "{% set x = range(100000) | map('string') | list %}{% for i in x %}{% set y = x | sort %}{% endfor %}".into(),
        "{% for i in range(100000) %}{% set x = range(100000) | list %}{% endfor %}".into(),
        "{{ '%*d' % (1000000, 1) * 100 }}".into(),
        "{{ 'a'.center(10**9) }}{{ 'a'.ljust(10**12) }}".into(),
        "{{ '\t'.expandtabs(10**12) }}".into(),
        "{{ 'a' | indent(10**12) }}".into(),
        "{{ [[1]] | tojson(indent=10**9) }}".into(),
    ];
    let failed = [
        "{{ range(10**9) }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '{:999999999999}'.format(1) }}",
        "{{ [1] | batch(10**9, 0) | list }}",
        "{{ -(-(2 ** 126) * 2) }}",
        "{{ 2 ** 127 }}",
        "{{ 1e308 ** 2 }}",
        "{{ messages.append(1) }}",
    ];
    for template in much.iter().map(String::as_str).chain(failed) {
        let made = render(template, Vec::new());
        let expected = if failed.contains(&template) {
            matches!(made, Err(RenderError::Failed(_)))
        } else {
            made == Err(RenderError::TooMuch)
        };
        assert!(expected, "{template}: {:?}", made.map(|text| text.len()));
    }
    let deep = ["{{ ", &"(".repeat(5000), "1", &")".repeat(5000), " }}"].concat();
    let nested = "{% if 1 %}".repeat(5000) + &"{% endif %}".repeat(5000);
    let filters = ["{{ 1", &" | string".repeat(5000), " }}"].concat();
    for source in [deep, nested, filters] {
        let config = serde_json::json!({ "chat_template": source });
        let error = ChatTemplate::load(None, &config, Vec::new()).err().unwrap().to_string();
        assert!(error.contains("nested more than 100 levels"), "{error}");
    }
    let wide = ["{{ 1", &" + 1".repeat(5000), " }}"].concat();
    assert_eq!(render(&wide, Vec::new()).as_deref(), Ok("5001"));
}
