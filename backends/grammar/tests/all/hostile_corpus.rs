//! Texts that would cost much to compile or to follow without limits.

use penstock_grammar::Source;
use penstock_grammar::structural_tag::{SpecialTokens, TagRules, to_rules};
use serde_json::{Value, json};
use std::ops::Range;

/// Name and source of each text.
pub(crate) fn corpus() -> Vec<(&'static str, Source)> {
    let mut all = schemas();
    all.extend(regexes());
    all.extend(larks());
    all.extend(at_their_limits());
    // What is refused as a tag costs nothing here.
    let written = |tag: &Value| to_rules(&tag.to_string(), &NoSpecials).ok();
    let source = |rules: TagRules| Source::lark(format!("start: {}\n{}", rules.start, rules.rules));
    all.extend(tags().iter().filter_map(|(name, tag)| Some((*name, source(written(tag)?)))));
    all
}

/// A model without control tokens.
pub(crate) struct NoSpecials;

impl SpecialTokens for NoSpecials {
    fn name(&self, _: u32) -> Option<&str> {
        None
    }

    fn find(&self, _: &str) -> Vec<(Range<usize>, u32)> {
        Vec::new()
    }
}

/// Structural tags of up to 128 KiB whose rules would repeat their marks.
pub(crate) fn tags() -> Vec<(&'static str, Value)> {
    let any = json!({"type": "any_text"});
    let tag = |begin: &str, content: &Value, end: Value| json!({"type": "tag", "begin": begin, "content": content, "end": end});
    let texts = |count: usize, length: usize| -> Vec<String> {
        (0..count).map(|n| format!("{n:05}{}", "x".repeat(length.saturating_sub(5)))).collect()
    };
    let format = |format: Value| json!({ "format": format });
    let tags = |begins: &[String]| begins.iter().map(|begin| tag(begin, &any, json!("/"))).collect::<Vec<_>>();
    let some = texts(600, 20);
    vec![
        ("tag-many-ends", format(tag("a", &any, json!(vec!["x"; 30_000])))),
        ("tag-many-different-ends", format(tag("a", &any, json!(texts(12_000, 6))))),
        ("tag-long-ends", format(tag("a", &any, json!(texts(64, 1900))))),
        ("tag-ends-in-reach", format(tag("a", &any, json!(texts(64, 200))))),
        ("tag-one-long-end", format(tag("a", &any, json!("\u{7f}".repeat(100_000))))),
        (
            "tag-texts-with-many-ends",
            format(tag("a", &json!({"type": "or", "elements": vec![any.clone(); 2000]}), json!(texts(64, 900)))),
        ),
        (
            "tag-many-triggers",
            format(json!({"type": "triggered_tags", "triggers": texts(600, 20), "tags": tags(&some)})),
        ),
        (
            "tag-many-triggers-in-front-of-a-long-end",
            format(tag(
                "(",
                &json!({"type": "triggered_tags", "triggers": texts(2000, 7), "tags": tags(&texts(1, 8))}),
                json!("y".repeat(80_000)),
            )),
        ),
        (
            "tag-many-excludes",
            format(tag("a", &json!({"type": "any_text", "excludes": texts(2000, 20)}), json!(texts(64, 200)))),
        ),
        (
            "tag-many-rules",
            format(
                json!({"type": "dispatch", "rules": some.iter().map(|begin| json!([begin, {"type": "const_string", "value": "x"}])).collect::<Vec<_>>()}),
            ),
        ),
        (
            "tag-texts-in-a-row",
            format(json!({"type": "sequence", "elements": vec![json!({"type": "const_string", "value": "x"}); 2000]})),
        ),
        (
            "tag-deep",
            format((0..30).fold(
                json!({"type": "const_string", "value": "x".repeat(100_000)}),
                |content, _| json!({"type": "or", "elements": [content, {"type": "const_string", "value": "y"}]}),
            )),
        ),
    ]
}

fn nested(levels: usize, wrap: impl Fn(Value) -> Value) -> Value {
    (0..levels).fold(json!({"type": "string"}), |inner, _| wrap(inner))
}

fn object(name: &str) -> Value {
    json!({"type": "object", "properties": {name: {"type": "string"}}, "required": [name]})
}

fn schemas() -> Vec<(&'static str, Source)> {
    let any = |count: usize| -> Vec<Value> { (0..count).map(|n| object(&format!("p{n}"))).collect() };
    let chain = |count: usize, link: &dyn Fn(String) -> Value| {
        let defs: serde_json::Map<String, Value> =
            (0..count).map(|n| (format!("a{n}"), link(format!("#/$defs/a{}", n + 1)))).collect();
        let mut defs = defs;
        defs.insert(format!("a{count}"), json!({"type": "string"}));
        json!({"$ref": "#/$defs/a0", "$defs": defs})
    };
    let list = [
        ("nested arrays beyond the parser's depth", Source::json_schema("[".repeat(100_000))),
        ("objects in objects", Source::json_schema(nested(30, |inner| json!({"type": "object", "properties": {"a": inner}})).to_string())),
        ("references into each other's inside", Source::json_schema({
            let levels = |n: usize| format!("#{}", "/x".repeat(n));
            let refs: Vec<Value> = (1..60).map(|n| json!({"$ref": levels(n)})).collect();
            let bottom = json!({"enum": (0..3000).map(|n| json!([[n]])).collect::<Vec<_>>()});
            json!({"prefixItems": refs, "x": (0..58).fold(bottom, |inner, _| json!({"x": inner}))}).to_string()
        })),
        ("allOf in allOf", Source::json_schema(nested(60, |inner| json!({"allOf": [inner]})).to_string())),
        ("anyOf doubled at each level", Source::json_schema(nested(14, |inner| json!({"anyOf": [inner, inner]})).to_string())),
        ("allOf doubled at each level", Source::json_schema(nested(14, |inner| json!({"allOf": [inner, inner]})).to_string())),
        ("allOf of anyOfs", Source::json_schema(json!({"allOf": [{"anyOf": any(60)}, {"anyOf": any(60)}, {"anyOf": any(60)}]}).to_string())),
        ("allOf of two large anyOfs", Source::json_schema(json!({"allOf": [{"anyOf": any(60)}, {"anyOf": any(60)}]}).to_string())),
        ("many overlapping oneOfs", Source::json_schema(json!({"oneOf": any(300)}).to_string())),
        ("oneOf of one large object", Source::json_schema({
            let names: Vec<String> = (0..2_500).map(|n| format!("p{n}")).collect();
            let properties: serde_json::Map<String, Value> = names.iter().map(|name| (name.clone(), json!({"const": 1}))).collect();
            let object = json!({"type": "object", "required": names, "properties": properties});
            json!({"oneOf": vec![json!({"$ref": "#/a"}); 4_000], "a": object}).to_string()
        })),
        ("oneOf of one object that requires a name often", Source::json_schema({
            let object = json!({"type": "object", "required": vec!["a"; 16_000], "properties": {"a": {"const": 1}}});
            json!({"oneOf": vec![json!({"$ref": "#/a"}); 4_000], "a": object}).to_string()
        })),
        ("oneOfs of long constants", Source::json_schema({
            let option = |n: u32| json!({"$ref": "#/a", "type": "object", "required": ["z"], "properties": {"z": {"const": n}}});
            let long = json!({"type": "object", "required": ["y"], "properties": {"y": {"const": vec![1; 16_000]}}});
            json!({"oneOf": (0..1_000).map(option).collect::<Vec<_>>(), "a": long}).to_string()
        })),
        ("references into each level of one schema", Source::json_schema({
            let constants = (0..1_400).map(|n| json!({"const": n})).collect::<Vec<_>>();
            let deepest = json!({"oneOf": constants});
            let x = (0..50).fold(deepest, |inner, _| json!({"items": inner}));
            let references: Vec<Value> = (0..50).map(|n| json!({"$ref": format!("#/x{}", "/items".repeat(n))})).collect();
            json!({"prefixItems": references, "x": x}).to_string()
        })),
        ("an enum of ten thousand", Source::json_schema(json!({"enum": (0..10_000).map(|n| format!("value-{n}")).collect::<Vec<_>>()}).to_string())),
        ("an enum of objects", Source::json_schema(json!({"enum": (0..2000).map(|n| json!({"a": n, "b": [n]})).collect::<Vec<_>>()}).to_string())),
        ("a schema of one megabyte", Source::json_schema(json!({"description": "x".repeat(1 << 20)}).to_string())),
        ("properties by the thousand", Source::json_schema(json!({"type": "object", "properties": (0..5000).map(|n| (format!("name{n}"), json!({"type": "string"}))).collect::<serde_json::Map<_, _>>()}).to_string())),
        ("optional properties without a type", Source::json_schema(json!({"properties": (0..1500).map(|n| (format!("name{n}"), json!({}))).collect::<serde_json::Map<_, _>>()}).to_string())),
        ("a hundred million items", Source::json_schema(json!({"type": "array", "items": {"type": "integer"}, "minItems": 100_000_000}).to_string())),
        ("ten million items", Source::json_schema(json!({"type": "array", "items": {"type": "integer"}, "minItems": 9_999_999, "maxItems": 10_000_000}).to_string())),
        ("a string of ten million", Source::json_schema(json!({"type": "string", "minLength": 9_000_000, "maxLength": 9_999_999}).to_string())),
        ("long strings with a pattern", Source::json_schema(json!({"type": "string", "pattern": "^(a|b)*c(a|b){40}$", "minLength": 1000}).to_string())),
        ("nested bounded items", Source::json_schema(nested(20, |inner| json!({"type": "array", "items": inner, "minItems": 1000, "maxItems": 1001})).to_string())),
        ("patterns by the hundred", Source::json_schema(json!({"prefixItems": (0..300).map(|n| json!({"type": "string", "pattern": format!("(a|b)*{n}c.{{3,9}}")})).collect::<Vec<_>>()}).to_string())),
        ("sixty costly patterns", Source::json_schema(json!({"type": "array", "prefixItems": (0..60).map(|n| json!({"type": "string", "pattern": format!("^(\\w+\\s?)*{n}(x+x+)+y$"), "minLength": 6})).collect::<Vec<_>>()}).to_string())),
        ("patternProperties that overlap", Source::json_schema(json!({"patternProperties": (0..200).map(|n| (format!("^(a|b)*{n}"), json!({}))).collect::<serde_json::Map<_, _>>()}).to_string())),
        ("an email with a costly pattern", Source::json_schema(json!({"type": "string", "format": "email", "pattern": "^\\w+([\\.-]?\\w+)*@\\w+([\\.-]?\\w+)*(\\.\\w{2,})+$", "minLength": 6}).to_string())),
        ("a reference to itself", Source::json_schema(json!({"$ref": "#"}).to_string())),
        ("references in a circle", Source::json_schema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}).to_string())),
        ("a circle with siblings", Source::json_schema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "allOf": [{"$ref": "#/$defs/a"}]}}}).to_string())),
        ("an endless object", Source::json_schema(json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}).to_string())),
        ("a chain of doubling references", Source::json_schema(chain(40, &|next| json!({"allOf": [{"$ref": next}, {"$ref": next}]})).to_string())),
        ("a long chain of references", Source::json_schema(chain(7000, &|next| json!({ "$ref": next })).to_string())),
        ("a long chain of references in allOf", Source::json_schema(chain(5500, &|next| json!({"allOf": [{"$ref": next}]})).to_string())),
        ("a long chain of references beside keywords", Source::json_schema(chain(180, &|next| json!({"$ref": next, "minLength": 1})).to_string())),
        ("a long chain of references in anyOf", Source::json_schema(chain(5500, &|next| json!({"anyOf": [{"$ref": next}]})).to_string())),
        ("a long chain of references in oneOf", Source::json_schema(chain(4000, &|next| json!({"oneOf": [{"$ref": next}, {"type": "null"}]})).to_string())),
        ("the longest chain of references in items", Source::json_schema(format!("{{{}\"a\":{{}},\"$ref\":\"#/0\"}}", (0..7400).map(|n| format!("\"{n:x}\":{{\"items\":{{\"$ref\":\"#/{:x}\"}}}},", n + 1)).collect::<String>()))),
        ("a chain of doubling alternatives", Source::json_schema(chain(40, &|next| json!({"allOf": [{"anyOf": [{"$ref": next}, {"type": "object", "properties": {"x": {"$ref": next}}}]}, {"$ref": next}]})).to_string())),
        ("a multiple of a huge prime", Source::json_schema(json!({"type": "integer", "multipleOf": 4_294_967_291_u64}).to_string())),
        ("many multiples at once", Source::json_schema(json!({"allOf": (1..40).map(|n| json!({"type": "number", "multipleOf": f64::from(n) + 0.001})).collect::<Vec<_>>()}).to_string())),
        ("bounds with many digits", Source::json_schema(json!({"type": "array", "prefixItems": (0..200).map(|n| json!({"type": "number", "minimum": 1.234_567_890_123 + f64::from(n), "maximum": 9.876_543_210_987e15})).collect::<Vec<_>>()}).to_string())),
    ];
    list.into()
}

fn regexes() -> Vec<(&'static str, Source)> {
    [
        ("repetition of repetition", "(a{1,1000}){1,1000}".to_owned()),
        ("three levels of repetition", "((a{1,500}){1,500}){1,500}".to_owned()),
        ("a state per position", "(a|b)*a(a|b){60}".to_owned()),
        ("states multiplied", "((a|b)*a(a|b){20})|((b|c)*c(b|c){20})|((a|c)*c(a|c){20})".to_owned()),
        ("backtracking bait", "(a+)+(a+)+(a+)+$".to_owned()),
        ("unicode classes", r"(\p{L}|\p{N}|\p{Sc}){1,2000}".to_owned()),
        ("unicode classes negated and repeated", r"([^\p{Greek}\p{Cyrillic}]\w[^\d]){100,900}".to_owned()),
        ("groups nested three hundred deep", format!("{}a{}", "(".repeat(300), ")".repeat(300))),
        ("groups nested eight thousand deep", format!("{}a{}", "(".repeat(8000), ")".repeat(8000))),
        ("alternatives by the thousand", (0..2500).map(|n| format!("a{n}b")).collect::<Vec<_>>().join("|")),
        ("any text up to a million", "(?s:.){0,1000000}".to_owned()),
        ("case-insensitive classes", r"(?i:[a-zα-ω]{3,300}){5,500}".to_owned()),
        ("dots between letters", (0..200).map(|_| ".*a").collect::<String>()),
        ("alternatives of runs", (0..60).map(|n| format!("(.*{n}.*)")).collect::<Vec<_>>().join("|")),
    ]
    .map(|(name, text)| (name, Source::regex(text)))
    .into()
}

fn larks() -> Vec<(&'static str, Source)> {
    let doubling: String = (0..40).map(|n| format!("r{n}: r{} r{}\n", n + 1, n + 1)).collect();
    let tokens: String = (0..30).map(|n| format!("T{n}: T{} T{}\n", n + 1, n + 1)).collect();
    [
        ("rules that double", format!("start: r0\n{doubling}r40: \"a\"\n")),
        ("terminals that double", format!("start: T0\n{tokens}T30: \"a\"\n")),
        ("left recursion", "start: start start | \"a\"".to_owned()),
        ("an ambiguous grammar", "start: e\ne: e e e | e e | \"a\" | \"\"".to_owned()),
        ("nothing but empty rules", "start: a b\na: b?\nb: a?\n".to_owned()),
        ("a rule without end", "start: \"a\" start".to_owned()),
        ("repeated rules", "start: (\"a\"{1,1000}){1,1000}".to_owned()),
        ("repeated rules of rules", "start: (a{1,9999}){1,9999}\na: (\"x\"{1,9999}){1,9999}".to_owned()),
        ("parentheses in a rule", format!("start: {}\"a\"{}", "(".repeat(5000), ")".repeat(5000))),
        (
            "ten thousand rules",
            format!("start: \"a\"\n{}", (0..10_000).map(|n| format!("r{n}: \"b{n}\"\n")).collect::<String>()),
        ),
        (
            "a line of parameters",
            format!("start: \"a\"\n%llguidance {{\"x\": {}1{}}}", "[".repeat(3000), "]".repeat(3000)),
        ),
        (
            "a terminal against terminals",
            format!("start: ({})*\n", (0..400).map(|n| format!("/a{{{n}}}b*/")).collect::<Vec<_>>().join(" | ")),
        ),
    ]
    .map(|(name, text)| (name, Source::lark(text)))
    .into_iter()
    .chain(large_larks())
    .collect()
}

/// Texts in Lark that are nearly as long as a text may be.
fn large_larks() -> Vec<(&'static str, Source)> {
    let choices = json!({"allOf": vec![json!({"anyOf": [{"minimum": 1}, {"maximum": 9}]}); 9]});
    let named: serde_json::Map<String, Value> = (0..8).map(|o| (format!("p{o}"), json!({"patternProperties": (0..8).map(|n| (format!("^(a|b)*{n}(\\\\w+\\\\w+){{2,9}}{o}$"), json!({}))).collect::<serde_json::Map<_, _>>()}))).collect();
    let named = json!({ "properties": named });
    let dead = json!({"allOf": [{"anyOf": (0..50).map(|n| json!({"const": n})).collect::<Vec<_>>()}, {"anyOf": (49..99).map(|n| json!({"const": n})).collect::<Vec<_>>()}]});
    let deader = json!({"allOf": [{"anyOf": (0..45).map(|n| json!({"required": ["a"], "properties": {"a": {"const": n}}})).collect::<Vec<_>>()}, {"anyOf": (0..45).map(|n| json!({"properties": {"a": {"const": n}}})).collect::<Vec<_>>()}]});
    // A group, and the two brackets around it, for each pair of tokens.
    let chained = |name: &str, count: usize| -> String {
        (0..count).map(|n| format!("{name}{n}:{}{name}{}{}\n", "(".repeat(28), n + 1, ")".repeat(28))).collect()
    };
    let chain = |name: &str, last: &str| -> String {
        (0..17_000).map(|n| format!("{name}{n}:{name}{}\n", n + 1)).collect::<String>()
            + &format!("{name}17000:{last}\n")
    };
    [
        ("template uses in each other", format!("start: {}", "a{".repeat(130_000))),
        ("conditions in each other", format!("start: \"a\" %if {}", "not(".repeat(65_000))),
        ("groups of thirty thousand tokens in a chain of rules", format!("start:r0\n{}r512:\"a\"", chained("r", 512))),
        (
            "groups of thirty thousand tokens in a chain of terminals",
            format!("start:T0\n{}T512:\"a\"", chained("T", 512)),
        ),
        (
            "rules of thirty thousand tokens in a chain",
            format!("start:r0\n{}r8000:\"a\"", (0..8000).map(|n| format!("r{n}:r{}\n", n + 1)).collect::<String>()),
        ),
        ("schemas by their most", format!("start: {}", "%json {} ".repeat(4096))),
        ("repeats of thirty thousand tokens", format!("start: {}\na: \"x\"", "a+".repeat(16_000))),
        ("maybes of thirty thousand tokens", format!("start: {}", "[\"\"] ".repeat(10_900))),
        ("conditions side by side in each other", format!("start: \"a\" %if {}", "and(true,".repeat(29_000))),
        ("a chain of rules", format!("start:r0\n{}", chain("r", "\"a\""))),
        ("a chain of terminals", format!("start:T0\n{}", chain("T", "\"a\""))),
        ("alternatives by the hundred thousand", format!("start: {}a\na: \"x\"", "a|".repeat(130_000))),
        ("terminals by the hundred thousand", format!("start: A\nA: {}B\nB: \"x\"", "B|".repeat(130_000))),
        ("repeats by the hundred thousand", format!("start: {}\na: \"x\"", "a+".repeat(130_000))),
        ("names by the hundred thousand", format!("start: {}\na: \"x\"", "a ".repeat(130_000))),
        ("empty strings by the thousand", format!("start: {}", "\"\" ".repeat(85_000))),
        ("a string without end", format!("start: \"{}", "\\\"".repeat(130_000))),
        ("an expression without end", format!("start: /{}", "\\/".repeat(130_000))),
        ("a string without end between schemas", format!("start: {}", "\\\" %json 1".repeat(23_000))),
        ("schemas by the thousand", format!("start: {}", "%json {} ".repeat(28_000))),
        (
            "choices of schemas by the hundred",
            format!("start: {}", format!("%json {choices} ").repeat(200_000 / choices.to_string().len())),
        ),
        (
            "a chain of groups",
            format!(
                "start:r0\n{}r4000:\"a\"",
                (0..3_600)
                    .map(|n| format!("r{n}:{}r{}{}\n", "(".repeat(27), n + 1, ")".repeat(27)))
                    .collect::<String>()
                    + "r3600: r4000\n"
            ),
        ),
        (
            "a chain of groups of terminals",
            format!(
                "start:T0\n{}T4000:\"a\"",
                (0..3_600)
                    .map(|n| format!("T{n}:{}T{}{}\n", "(".repeat(27), n + 1, ")".repeat(27)))
                    .collect::<String>()
                    + "T3600: T4000\n"
            ),
        ),
        ("dead choices of one schema", format!("start: %json {dead}")),
        (
            "dead choices of schemas",
            format!("start: {}", format!("%json {dead} ").repeat(250_000 / dead.to_string().len())),
        ),
        ("dead objects of one schema", format!("start: %json {deader}")),
        (
            "dead objects of schemas",
            format!("start: {}", format!("%json {deader} ").repeat(240_000 / deader.to_string().len())),
        ),
        ("names by patterns of one schema", format!("start: %json {named}")),
        (
            "names by patterns of schemas",
            format!("start: {}", format!("%json {named} ").repeat(250_000 / named.to_string().len())),
        ),
        ("a long suffix", format!("start: a\na[suffix=\"{}\"]: /.*/", "ab".repeat(120_000))),
        ("a long stop", format!("start: a\na[stop=/{}/]: /.*/", "ab?".repeat(80_000))),
        (
            "suffixes by the thousand",
            format!("start: r0\n{}", (0..6_000).map(|n| format!("r{n}[suffix=\"b{n}\"]: /.*/\n")).collect::<String>()),
        ),
        ("a long string", format!("start: \"{}\"", "ab".repeat(120_000))),
        ("substrings", format!("start: %regex {{\"substring_chars\": \"{}\"}}", "abcd".repeat(60_000))),
        ("substrings of words", format!("start: %regex {{\"substring_words\": \"{}\"}}", "ab ".repeat(80_000))),
        ("substrings of chunks", format!("start: %regex {{\"substring_chunks\": [{}\"b\"]}}", "\"a\",".repeat(60_000))),
    ]
    .map(|(name, text)| (name, Source::lark(text)))
    .into()
}

/// Texts with expressions, patterns and grammars that are as long, or as many, as they may be.
fn at_their_limits() -> Vec<(&'static str, Source)> {
    const REGEX_BYTES: usize = 16 << 10;
    const EXPRESSION_BYTES: usize = (128 << 10) - 64;
    const PATTERN_BYTES: usize = (8 << 10) - 64;
    const TEXT_BYTES: usize = (256 << 10) - 64;
    let of = |part: &str, bytes: usize| part.repeat(bytes / part.len());
    let classes = of(r"\p{L}", PATTERN_BYTES);
    let words = (0..).map(|n| format!("{n:x}|")).scan(0, |sum, word| {
        *sum += word.len();
        (*sum < EXPRESSION_BYTES).then_some(word)
    });
    let words: String = words.collect();
    // One pattern that meets each of many alternatives.
    let met = |pattern: &str, alternatives: usize| {
        let lengths: Vec<Value> = (0..alternatives).map(|n| json!({ "minLength": n % 100 })).collect();
        json!({"allOf": [{"type": "string", "pattern": pattern}, {"anyOf": lengths}]})
    };
    let many = |pattern: &str| json!({"prefixItems": (0..64).map(|n| json!({"type": "string", "pattern": format!("{}{n}", of(pattern, 124))})).collect::<Vec<_>>()});
    let regexes = [
        ("a regex of letters at its limit", of("a", REGEX_BYTES)),
        ("a regex of classes at its limit", of(r"\p{L}", REGEX_BYTES)),
        ("a regex of negated classes at its limit", of(r"[^\p{L}a]", REGEX_BYTES)),
        ("a regex of words at its limit", of(r"\w", REGEX_BYTES)),
        ("a regex of any texts at its limit", of(".*a", REGEX_BYTES)),
        ("a regex of repeats at its limit", of(r"\w{1,9}", REGEX_BYTES)),
        ("a regex of alternatives at its limit", of(r"\w*a|", REGEX_BYTES - 1) + "b"),
        ("a regex of optional words at its limit", of(r"\w*", REGEX_BYTES)),
        ("a regex of as many optional words as may stand in a row", of(r"\w*", 3 * 512)),
        (
            "a regex of as many optional letters as may stand in a row",
            (0..128).map(|n| format!("{n:x}?{n:x}*.?.*")).collect(),
        ),
        ("a regex without case at its limit", format!("(?i){}", of("aβ", REGEX_BYTES - 4))),
    ];
    let larks = [
        ("an expression of letters at its limit", format!("start: /{}/", of("a", EXPRESSION_BYTES))),
        ("an expression of classes at its limit", format!("start: /{}/", of(r"\p{L}", EXPRESSION_BYTES))),
        ("an expression of negated classes at its limit", format!("start: /{}/", of(r"[^\p{L}a]", EXPRESSION_BYTES))),
        ("an expression of words at its limit", format!("start: /{}/", of(r"\w", EXPRESSION_BYTES))),
        ("an expression of any texts at its limit", format!("start: /{}a/", of("(?s:.*)", EXPRESSION_BYTES))),
        ("an expression of repeats at its limit", format!("start: /{}/", of(r"\w{1,9}", EXPRESSION_BYTES))),
        ("an expression of as many words as there may be", format!("start: /{}/", of(r"\w", 2 * 8192))),
        (
            "expressions of as many words as there may be",
            format!("start: {}\"a\"", (0..256).map(|n| format!(r"/\p{{L}}*\w{n}[^x]/ | ")).collect::<String>()),
        ),
        (
            "expressions of as many optional parts as there may be",
            format!("start: {}\"a\"", (0..2300).map(|n| format!("/a?b?c?d?e?f?g?h?i?j?{n}/ | ")).collect::<String>()),
        ),
        ("terminals of optional parts that double", {
            let doubling: String = (0..14).map(|n| format!("T{n}: T{0} T{0}\n", n + 1)).collect();
            format!("start: T0\n{doubling}T14: /a*/\n")
        }),
        ("optional terminals in a row", format!("start: T\nT: {}", "\"a\"? ".repeat(14_000))),
        ("an expression of alternatives at its limit", format!("start: /{words}z/")),
        ("an expression without case at its limit", format!("start: /(?i){}/", of("aβ", EXPRESSION_BYTES))),
        (
            "two expressions of classes at their limit",
            format!("start: A B\nA: /{0}/\nB: /{0}a/", of(r"\p{L}", EXPRESSION_BYTES)),
        ),
        (
            "expressions by the thousand",
            format!("start: {}", (0..8000).map(|n| format!(r"/\p{{L}}\w\d{n}/ | ")).collect::<String>() + "\"a\""),
        ),
        (
            "expressions by the thousand in a row",
            format!("start: {}", (0..8000).map(|n| format!(r"/\p{{L}}\w\d{n}/ ")).collect::<String>()),
        ),
        (
            "terminals of classes by the thousand",
            format!(
                "start: {}\n{}",
                (0..4000).map(|n| format!("T{n} ")).collect::<String>(),
                (0..4000).map(|n| format!("T{n}: /\\p{{L}}*{n}[^x]/\n")).collect::<String>()
            ),
        ),
        ("a grammar of letters at its limit", format!("start: \"{}\"", of("é", TEXT_BYTES))),
    ];
    let letters = of("a?b", PATTERN_BYTES);
    let few = met(&letters, 450);
    let schemas = [
        ("a pattern of letters at its limit", json!({"type": "string", "pattern": of("ab", PATTERN_BYTES)})),
        ("a pattern of classes at its limit", json!({"type": "string", "pattern": classes})),
        ("patterns of classes at their limit", many(r"\p{L}")),
        ("patterns of words at their limit", many(r"\w\s")),
        ("patterns of any texts at their limit", many(".*a")),
        ("a pattern at its limit among alternatives", met(&letters, 4900)),
        ("a pattern of classes at its limit among alternatives", met(&classes, 4900)),
        (
            "a name at its limit",
            json!({"patternProperties": {of("a[^b]", PATTERN_BYTES): {}}, "additionalProperties": false}),
        ),
        ("names at their limit beside properties", {
            let names: serde_json::Map<String, Value> = (0..400).map(|n| (format!("p{n}"), json!({}))).collect();
            let patterns: serde_json::Map<String, Value> =
                (0..8).map(|n| (format!("^x{n}{}$", of("a?b", PATTERN_BYTES / 8 - 8)), json!({}))).collect();
            json!({"properties": names, "patternProperties": patterns})
        }),
    ];
    // As many as the bytes of all patterns together allow.
    let repeated = [
        ("patterns at their limit among alternatives of schemas", few, 16),
        ("patterns of classes of schemas", json!({"type": "string", "pattern": of(r"\p{L}", PATTERN_BYTES / 8)}), 40),
    ]
    .map(|(name, schema, count)| (name, Source::lark(format!("start: {}", format!("%json {schema} ").repeat(count)))));
    let different = |class: &str, count: usize| -> String {
        let schema = |n: usize| json!({"prefixItems": (0..64).map(|m| json!({"type": "string", "pattern": format!("^{class}*{}[^x]$", 64 * n + m)})).collect::<Vec<_>>()});
        (0..count / 64).map(|n| format!("%json {} ", schema(n))).collect()
    };
    let different = [
        ("different patterns of classes of schemas", Source::lark(format!("start: {}", different(r"\p{L}", 256)))),
        ("different patterns of schemas", Source::lark(format!("start: {}", different(r"\w", 1024)))),
    ];
    regexes
        .map(|(name, text)| (name, Source::regex(text)))
        .into_iter()
        .chain(larks.map(|(name, text)| (name, Source::lark(text))))
        .chain(schemas.map(|(name, schema)| (name, Source::json_schema(schema.to_string()))))
        .chain(repeated)
        .chain(different)
        .collect()
}
