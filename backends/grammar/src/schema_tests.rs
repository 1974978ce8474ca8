//! Schemas that are refused, and keywords that are reported.

use super::*;

fn prepared(schema: Value) -> Result<(Value, Vec<Unenforced>), GrammarError> {
    prepare_value(Kind::JsonSchema, schema, &mut Spent::default())
}

fn reported(schema: Value) -> Vec<String> {
    let (_, unenforced) = prepared(schema).expect("it is taken");
    unenforced.iter().map(Unenforced::to_string).collect()
}

#[test]
fn keywords_that_cannot_be_enforced_are_named_with_their_place() {
    let schema = json!({
        "type": "object",
        "properties": {
            "a": {"type": "array", "uniqueItems": true, "items": {"not": {"type": "null"}}},
            "b": {"type": "string", "format": "idn-email"},
            "c/d": {"if": {"type": "string"}, "then": {"minLength": 1}},
        },
        "propertyNames": {"pattern": "^a"},
    });
    assert_eq!(
        reported(schema),
        [
            "`propertyNames` at /",
            "`uniqueItems` at /properties/a",
            "`not` at /properties/a/items",
            "`format: idn-email` at /properties/b",
            "`if` at /properties/c~1d",
            "`then` at /properties/c~1d",
        ]
    );
}

#[test]
fn names_and_values_are_no_keywords() {
    let schema = json!({
        "type": "object",
        "properties": {"not": {"type": "string"}, "if": {"enum": [{"contains": 1}]}},
        "default": {"uniqueItems": true},
        "x-note": {"not": 1},
        "uniqueItems": false,
    });
    assert_eq!(reported(schema), Vec::<String>::new());
}

#[test]
fn a_one_of_is_enforced_where_its_options_cannot_meet() {
    let options = |a: Value, b: Value| reported(json!({"oneOf": [a, b]}));
    assert!(options(json!({"type": "string"}), json!({"type": "null"})).is_empty());
    let tagged = |tag: &str| json!({"type": "object", "properties": {"t": {"const": tag}}, "required": ["t"]});
    assert!(options(tagged("a"), tagged("b")).is_empty());
    assert_eq!(options(tagged("a"), tagged("a")), ["`oneOf` at /"]);
    for meets in [
        [json!({"type": "integer"}), json!({"type": "number"})],
        // A value that is no object satisfies both.
        [
            json!({"properties": {"k": {"const": "a"}}, "required": ["k"]}),
            json!({"properties": {"k": {"const": "b"}}, "required": ["k"]}),
        ],
        [json!({"const": 1}), json!({"const": 1.0})],
        [json!({"const": [1, {"a": 2}]}), json!({"const": [1.0, {"a": 2e0}]})],
        [json!({"enum": ["a", "b"]}), json!({"enum": ["b", "c"]})],
        [json!({"type": ["string", "null"]}), json!({"type": ["null", "array"]})],
        [json!({"properties": {"t": {"const": "a"}}, "type": "object"}), tagged("b")],
        [json!({"$ref": "#/oneOf/1"}), json!({"$ref": "#/oneOf/0"})],
    ] {
        let [a, b] = meets;
        assert_eq!(options(a.clone(), b.clone()), ["`oneOf` at /"], "{a} {b}");
    }
    for apart in [
        [json!({"type": "string"}), json!({"type": "integer"})],
        [json!({"type": "string"}), json!({"type": ["number", "null"]})],
        [json!({"enum": ["a", 1]}), json!({"enum": ["b", 2]})],
        [json!({"enum": ["a", "b"]}), json!({"type": "integer"})],
        [json!({"type": "object"}), json!({"type": "array"})],
    ] {
        let [a, b] = apart;
        assert!(options(a.clone(), b.clone()).is_empty(), "{a} {b}");
    }
    let union = |kinds: [Value; 2]| {
        let [a, b] = kinds;
        let of = |kind: Value| json!({"type": "object", "properties": {"kind": kind}, "required": ["kind"]});
        json!({
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {"A": of(a), "B": of(b)},
        })
    };
    assert!(reported(union([json!({"const": "a"}), json!({"enum": ["b", "c"]})])).is_empty());
    assert_eq!(reported(union([json!({"const": "b"}), json!({"enum": ["b", "c"]})])), ["`oneOf` at /"]);
}

#[test]
fn a_one_of_that_takes_long_to_look_at_is_named() {
    let values = |from: usize| (from..from + 1100).collect::<Vec<_>>();
    assert!(reported(json!({"oneOf": [{"enum": &values(0)[..900]}, {"enum": &values(900)[..900]}]})).is_empty());
    assert_eq!(reported(json!({"oneOf": [{"enum": values(0)}, {"enum": values(1100)}]})), ["`oneOf` at /"]);
}

#[test]
fn whole_numbers_that_would_be_written_as_others_are_named() {
    for (keyword, value) in
        [("const", json!(9_007_199_254_740_993_u64)), ("enum", json!([1, {"a": [-9_007_199_254_740_993_i64]}]))]
    {
        let refused = prepared(json!({"items": {keyword: value}})).expect_err(keyword);
        assert!(
            matches!(&refused, GrammarError::Unsupported { feature, .. } if feature.contains("740993 at /items")),
            "{refused}"
        );
    }
    assert!(reported(json!({"const": 9_007_199_254_740_992_u64, "default": 9_007_199_254_740_993_u64})).is_empty());
}

#[test]
fn counts_of_properties_need_required_ones() {
    let object = |required: Value| json!({"type": "object", "properties": {"a": {}, "b": {}}, "required": required, "minProperties": 3});
    assert_eq!(reported(object(json!(["a"]))), ["`minProperties, maxProperties` at /"]);
    assert!(reported(object(json!(["a", "b"]))).is_empty());
}

#[test]
fn counts_of_properties_are_named_where_names_may_repeat() {
    assert!(reported(json!({"minProperties": 1, "maxProperties": 9})).is_empty());
    assert_eq!(reported(json!({"minProperties": 2})), ["`minProperties, maxProperties` at /"]);
    assert!(reported(json!({"minProperties": 2, "required": ["a"]})).is_empty());
}

#[test]
fn counts_of_properties_are_named_where_they_meet_optional_ones() {
    let optional = json!({"properties": {"a": {}, "b": {}}});
    let counted = json!({"maxProperties": 1});
    assert_eq!(reported(json!({"allOf": [optional, counted]})), ["`minProperties, maxProperties` at /allOf/1"]);
    let both = json!({"$ref": "#/$defs/c", "properties": {"a": {}}, "$defs": {"c": counted}});
    assert_eq!(reported(both), ["`minProperties, maxProperties` at /$defs/c"]);
    assert!(
        reported(json!({"items": {"anyOf": [optional, {"type": "null"}]}, "additionalProperties": counted})).is_empty()
    );
}

#[test]
fn schemas_that_only_references_reach_are_looked_at() {
    let schema = json!({
        "$ref": "#/components/list",
        "components": {
            "list": {"type": "array", "uniqueItems": true, "items": {"$ref": "#/components/day"}},
            "day": {"type": "string", "format": "date", "not": {"const": ""}},
        },
        "default": {"not": 1},
    });
    assert_eq!(reported(schema.clone()), ["`uniqueItems` at /components/list", "`not` at /components/day"]);
    let (schema, _) = prepared(schema).expect("taken");
    let day = &schema["components"]["day"];
    assert!(day["format"].is_null() && day["pattern"].is_string(), "{day}");

    let many: Map<String, Value> = (0..=ELSEWHERE_MAX).map(|n| (n.to_string(), json!({}))).collect();
    let refs: Vec<Value> = many.keys().map(|name| json!({"$ref": format!("#/x/{name}")})).collect();
    let refused = prepared(json!({"x": many, "prefixItems": refs}));
    assert!(matches!(refused, Err(GrammarError::TooLarge { limit: 64, .. })), "{refused:?}");
}

#[test]
fn open_objects_have_no_escapes_of_letters() {
    let escapes = |schema: Value| {
        let (schema, _) = prepared(schema).expect("taken");
        schema[OPTIONS]["json_allowed_escapes"].as_str().expect("a text").ends_with('u')
    };
    assert!(escapes(json!({"type": "object"})));
    assert!(escapes(json!({"properties": {"a": {}}, "additionalProperties": false})));
    assert!(!escapes(json!({"properties": {"a": {}}})));
    assert!(!escapes(json!({"items": {"required": ["a"], "additionalProperties": {"type": "string"}}})));
    assert!(!escapes(json!({"$ref": "#/x", "x": {"patternProperties": {"^a": {}}}})));
}

#[test]
fn bounds_beyond_all_numbers_are_named() {
    let refused = prepared(json!({"items": {"type": "integer", "minimum": 1e30}}));
    assert!(
        matches!(&refused, Err(GrammarError::Unsupported { feature, .. }) if feature.contains("`minimum`")),
        "{refused:?}"
    );
}

#[test]
fn references_stay_in_the_document() {
    let refused = |target: Value| prepared(json!({"items": {"$ref": target}})).expect_err("refused");
    for target in ["https://example.com/a.json", "file:///etc/passwd", "a.json#/b", "#anchor"] {
        let error = refused(json!(target));
        assert!(matches!(&error, GrammarError::Unsupported { feature, .. } if feature.contains("/items")), "{error}");
    }
    assert!(matches!(refused(json!(7)), GrammarError::Malformed { .. }));
    assert!(prepared(json!({"items": {"$ref": "#"}})).is_ok());
    let long = |length: usize| {
        let name = "a".repeat(length - "#/$defs/".len());
        prepared(json!({"$ref": format!("#/$defs/{name}"), "$defs": {name: {"not": {}}}}))
    };
    assert_eq!(long(POINTER_BYTES_MAX).expect("taken").1.len(), 1);
    assert!(matches!(long(POINTER_BYTES_MAX + 1), Err(GrammarError::TooLarge { what: "bytes in one `$ref`", .. })));
}

#[test]
fn schemas_behind_references_with_escapes_are_looked_at_where_they_are() {
    let schema = json!({
        "prefixItems": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/x/c%20d"}],
        "$defs": {"a/b": {"uniqueItems": true}},
        "x": {"c d": {"not": {}}},
    });
    assert_eq!(reported(schema), ["`uniqueItems` at /$defs/a~1b", "`not` at /x/c%20d"]);
}

#[test]
fn places_are_named_shortly() {
    let name = format!("é{}é", "a".repeat(10_000));
    let places = reported(json!({"properties": {name: {"prefixItems": vec![json!({"not": {}}); 3]}}}));
    assert_eq!(places.len(), 3);
    assert!(
        places[0].starts_with("`not` at /properties/éaaa") && places[0].ends_with("aaé/prefixItems/0"),
        "{places:?}"
    );
    assert!(places.iter().all(|place| place.len() < 300), "{places:?}");
}

#[test]
fn the_schemas_of_a_grammar_share_its_bounds() {
    let taken = |schema: &Value| {
        let (mut spent, mut count) = (Spent::default(), 0);
        while count < 1000 && prepare_value(Kind::Lark, schema.clone(), &mut spent).is_ok() {
            count += 1;
        }
        count
    };
    let values: Vec<usize> = (0..900).collect();
    let copied = json!({"$defs": {"/": {"const": values}}, "$ref": "#/$defs/~1"});
    let patterns = vec![json!({"pattern": "a"}); PATTERNS_MAX];
    let long = json!({"pattern": "a".repeat(PATTERN_BYTES_MAX)});
    let any: Vec<Value> = (0..20).map(|n| json!({"minimum": n})).collect();
    let expanded = json!({"allOf": [{"anyOf": any}, {"anyOf": any}, {"maximum": 9}]});
    for (schema, most) in [(json!({"prefixItems": patterns}), 16), (long, 16), (copied, 110), (expanded, 42)] {
        let count = taken(&schema);
        assert!(count > 0 && count <= most, "{count} of {schema:.60}");
    }
    assert_eq!(taken(&json!({"enum": [1, 2, 3]})), 1000);
}

#[test]
fn copies_of_schemas_within_each_other_are_bounded() {
    let values: Vec<usize> = (0..5000).collect();
    let nested = |levels| (0..levels).fold(json!({"const": values}), |inner, _| json!({"n/": inner}));
    let refs = |levels| -> Vec<Value> {
        (1..=levels).map(|level| json!({"$ref": format!("#/x{}", "/n~1".repeat(level))})).collect()
    };
    let made = |levels| prepared(json!({"x": nested(levels), "prefixItems": refs(levels)}));
    assert!(made(10).is_ok());
    assert!(matches!(made(30), Err(GrammarError::TooLarge { limit: 100_000, .. })));
}

#[test]
fn the_librarys_options_are_ours() {
    let (schema, _) = prepare(Kind::JsonSchema, r#"{"x-guidance": {"whitespace_flexible": true}}"#).expect("taken");
    assert_eq!(schema[OPTIONS]["whitespace_flexible"], json!(false));
    let spaced = r#"{"x-guidance": {"item_separator": ", ", "key_separator": " ", "lenient": false}}"#;
    let (schema, _) = prepare(Kind::JsonSchema, spaced).expect("taken");
    let got = ["item_separator", "key_separator", "lenient"].map(|name| schema[OPTIONS][name].clone());
    assert_eq!(got, [json!(", "), json!(": "), json!(true)]);
    let (schema, _) = prepare(Kind::JsonSchema, "true").expect("taken");
    assert_eq!(schema[OPTIONS]["whitespace_flexible"], json!(false));
    for text in ["false", "1", "null", "[]", "\"x\"", "{", ""] {
        assert!(matches!(prepare(Kind::JsonSchema, text), Err(GrammarError::Malformed { .. })), "{text}");
    }
}

#[test]
fn alternatives_are_counted_as_they_multiply() {
    let any: Vec<Value> = (0..30).map(|n| json!({"type": "object", "properties": {format!("p{n}"): {}}})).collect();
    let schema = json!({"allOf": [{"anyOf": any}, {"anyOf": any}, {"anyOf": any}]});
    assert!(matches!(prepared(schema), Err(GrammarError::TooLarge { .. })));
    let side_by_side: Vec<Value> = (0..30).map(|_| json!({"anyOf": any})).collect();
    assert!(prepared(json!({"prefixItems": side_by_side})).is_ok());
}

#[test]
fn a_keyword_that_is_not_enforced_is_named_whatever_its_value() {
    for keyword in UNENFORCED {
        for value in [json!(false), json!(true), json!({}), json!({ "type": "string" }), json!(1), json!(["a"])] {
            let schema = json!({ "properties": { "a": { keyword: value } } });
            let named = prepare(Kind::JsonSchema, &schema.to_string());
            let is_off = keyword == "uniqueItems" && value == json!(false);
            let is_named = named.is_ok_and(|(_, unenforced)| unenforced.iter().any(|one| one.keyword == keyword));
            assert_eq!(is_named, !is_off, "{schema}");
        }
    }
}
