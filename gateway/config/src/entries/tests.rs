use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::json;

use super::*;

const FILE: &str = "# Our gateway.
[server]
listen = \"127.0.0.1:1\" # loopback

# The big one.
[[providers]]
id = \"acme\"   # never rename
base_url = 'https://a.example/v1'
headers = { x-team = \"s1\", \"odd key\" = 's2' }

# The small one.
[[providers]]
id = \"other\"
models = [
  \"a\", # first
  \"b\",
]
# in_flight_max = 3

# Detached.

[[models]]
name = \"m\"
to = [{ provider = \"acme\", model = \"x\" }]
price.input = 1_0 # dollars
price.output = 2.5
[models.mirror]
provider = \"other\"
percent = 5

[log]
level = \"info\"
";

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().expect("an object")
}

#[track_caller]
fn patched(text: &str, table: &str, id: &str, patch: &Value) -> String {
    changed(text, text, table, id, Change::Merge(&object(patch))).expect("changed")
}

/// The only difference of the two texts is one stretch: what it was, and what it is.
#[track_caller]
fn check(patch: (&str, &str, Value), before: &str, after: &str) {
    let (table, id, patch) = patch;
    assert!(FILE.contains(before), "{before}");
    assert_eq!(patched(FILE, table, id, &patch), FILE.replacen(before, after, 1));
}

#[test]
fn only_what_differs_is_written() {
    check(("providers", "acme", json!({ "id": "zeta" })), "\"acme\"   #", "\"zeta\"   #");
    check(("providers", "acme", json!({ "headers": { "x-team": "n" } })), "\"s1\"", "\"n\"");
    check(("providers", "acme", json!({ "headers": { "x-team": null } })), "x-team = \"s1\", ", "");
    check(("providers", "acme", json!({ "models": ["a"] })), "'s2' }\n", "'s2' }\nmodels = [\"a\"]\n");
    check(("providers", "other", json!({ "models": ["a", "c"] })), "\"b\",\n", "\"c\",\n");
    check(("providers", "other", json!({ "models": ["a", "b", "c"] })), "  \"b\",\n", "  \"b\",\n  \"c\",\n");
    check(("models", "m", json!({ "price": { "output": 3 } })), "price.output = 2.5", "price.output = 3");
    check(("models", "m", json!({ "price": { "cached_input": 1.5 } })), "2.5\n", "2.5\nprice.cached_input = 1.5\n");
    check(("models", "m", json!({ "mirror": { "percent": 6 } })), "percent = 5", "percent = 6");
    check(("models", "m", json!({ "mirror": null })), "[models.mirror]\nprovider = \"other\"\npercent = 5\n\n", "\n");
    check(("models", "m", json!({ "retries": 1 })), "2.5\n", "2.5\nretries = 1\n");
    check(
        ("models", "m", json!({ "to": [{ "provider": "acme", "model": "x", "weight": 2 }] })),
        "model = \"x\" }",
        "model = \"x\", weight = 2 }",
    );
    check(("models", "m", json!({ "price": { "input": 10 } })), "", "");
}

#[test]
fn entries_come_and_go() {
    let new = object(&json!({ "id": "new", "models": ["n"] }));
    let text = changed(FILE, FILE, "providers", "new", Change::Create(&new)).expect("created");
    let added = "# in_flight_max = 3\n\n[[providers]]\nid = \"new\"\nmodels = [\"n\"]\n\n# Detached.";
    assert_eq!(text, FILE.replace("# in_flight_max = 3\n\n# Detached.", added));
    assert_eq!(changed(&text, &text, "providers", "new", Change::Delete).as_deref(), Ok(FILE));
    let gone = changed(FILE, FILE, "providers", "other", Change::Delete).expect("deleted");
    assert!(!gone.contains("small one") && gone.contains("'s2' }\n\n# Detached.\n\n[[models]]"), "{gone}");
    let limit = object(&json!({ "id": "l", "in_flight": 1 }));
    let text = changed(FILE, FILE, "limits", "l", Change::Create(&limit)).expect("created");
    assert_eq!(text, format!("{FILE}\n[[limits]]\nid = \"l\"\nin_flight = 1\n"));
    assert_eq!(changed(&text, &text, "limits", "l", Change::Delete).as_deref(), Ok(FILE));
    let first = changed("", "", "limits", "l", Change::Create(&limit)).expect("created");
    assert_eq!(first, "[[limits]]\nid = \"l\"\nin_flight = 1\n");
}

#[test]
fn an_inline_array_stays_inline() {
    let text = "limits = [{ id = \"a\", in_flight = 1 }, { id = \"b\", in_flight = 2 }] # ours\n[log]\n";
    assert_eq!(patched(text, "limits", "b", &json!({ "in_flight": 3 })), text.replace('2', "3"));
    let gone = changed(text, text, "limits", "a", Change::Delete).expect("deleted");
    assert_eq!(gone, "limits = [{ id = \"b\", in_flight = 2 }] # ours\n[log]\n");
    let new = object(&json!({ "id": "c", "in_flight": 3 }));
    let more = changed(text, text, "limits", "c", Change::Create(&new)).expect("created");
    assert_eq!(more, text.replace("2 }]", "2 }, { id = \"c\", in_flight = 3 }]"));
}

#[test]
fn a_value_that_is_not_shown_stays() {
    let shown = FILE.replace("\"s1\"", "\"[hidden]\"").replace("'s2'", "\"[hidden]\"");
    let seen = list(&shown, "providers").expect("read").remove(0).value;
    let change = |value: &Value| changed(FILE, &shown, "providers", "acme", Change::Replace(&object(value)));
    assert_eq!(change(&seen).as_deref(), Ok(FILE), "what was read may be written back");
    let mut more = seen;
    more["in_flight_max"] = json!(7);
    assert_eq!(change(&more), Ok(FILE.replace("'s2' }\n", "'s2' }\nin_flight_max = 7\n")));
    more["headers"]["y"] = json!("[hidden]");
    assert_eq!(change(&more), Err(EntryError::Hidden("headers.y".into())));
}

/// Entry with a list of secrets, written with inline tables and with headers.
fn secrets(names: &[&str], is_inline: bool) -> String {
    let one = |name: &&str| match is_inline {
        true => format!("  {{ name = \"{name}\", note = 1, key = \"s-{name}\" }}, # of {name}\n"),
        false => format!("# of {name}\n[[plugins.list]]\nname = \"{name}\"\nnote = 1\nkey = \"s-{name}\"\n"),
    };
    let all: String = names.iter().map(one).collect();
    let list = if is_inline { format!("list = [\n{all}]\n") } else { all };
    format!("[[plugins]]\nid = \"p\"\n{list}[other]\n")
}

fn masked(text: &str) -> String {
    let mut parts = text.split("\"s-");
    let first = parts.next().unwrap_or_default().to_owned();
    let rest = parts.map(|part| format!("\"[hidden]\"{}", part.split_once('"').expect("its end").1));
    first + &rest.collect::<String>()
}

/// Names with the secret under each.
fn pairs(text: &str) -> Vec<(String, String)> {
    let entry = list(text, "plugins").expect("TOML").remove(0).value;
    let all = entry["list"].as_array().cloned().unwrap_or_default();
    let said = |one: &Value, key: &str| one[key].as_str().unwrap_or_default().to_owned();
    all.iter().map(|one| (said(one, "name"), said(one, "key"))).collect()
}

#[test]
fn a_mask_in_a_list_never_takes_the_value_of_another_element() {
    for is_inline in [true, false] {
        let text = secrets(&["a", "b", "c"], is_inline);
        let put = |list: Value| {
            let wanted = object(&json!({ "id": "p", "list": list }));
            changed(&text, &masked(&text), "plugins", "p", Change::Replace(&wanted))
        };
        let kept = |name: &str| json!({ "name": name, "note": 1, "key": "[hidden]" });
        let fresh = json!({ "name": "n", "note": 1, "key": "s-n" });
        for names in ["ba", "cab", "cb", "bc", "c", "nba", "bna", "cn", "ncba", "abcn", "nabc"] {
            let list: Vec<_> =
                names.chars().map(|name| if name == 'n' { fresh.clone() } else { kept(&name.to_string()) }).collect();
            let new = put(list.into()).unwrap_or_else(|error| panic!("{names}: {error}\n{text}"));
            let expected: Vec<_> = names.chars().map(|name| (name.to_string(), format!("s-{name}"))).collect();
            assert_eq!(pairs(&new), expected, "{new}");
        }
        // Another name is another element, whose secret is not known.
        assert_eq!(put(json!([kept("a"), kept("z")])), Err(EntryError::Hidden("list[1]".into())));
        assert_eq!(put(json!([kept("b"), kept("a"), kept("b")])), Err(EntryError::Hidden("list[0]".into())));
        let mut edited = kept("a");
        edited["note"] = json!(2);
        let new = put(json!([kept("c"), edited])).expect("changed");
        assert_eq!(pairs(&new), [("c".into(), "s-c".into()), ("a".into(), "s-a".into())], "{new}");
    }
    // Without names: by what is shown, or by the place where the number stays.
    let text = "[[plugins]]\nid = \"p\"\nlist = [{ url = 1, key = \"s-1\" }, { url = 2, key = \"s-2\" }, { url = 3, key = \"s-3\" }]\n";
    let put = |urls: &[i32]| {
        let list: Vec<_> = urls.iter().map(|url| json!({ "url": url, "key": "[hidden]" })).collect();
        let wanted = object(&json!({ "id": "p", "list": list }));
        let new = changed(text, &masked(text), "plugins", "p", Change::Replace(&wanted))?;
        Ok(pairs(&new).into_iter().map(|(_, key)| key).collect::<Vec<_>>().join(" "))
    };
    assert_eq!(put(&[2, 1, 3]).as_deref(), Ok("s-2 s-1 s-3"));
    assert_eq!(put(&[7, 2, 3]).as_deref(), Ok("s-1 s-2 s-3"));
    assert_eq!(put(&[3, 1]).as_deref(), Ok("s-3 s-1"));
    assert_eq!(put(&[2, 7, 3]), Err(EntryError::Hidden("list[1]".into())), "moved, or another one?");
    assert_eq!(put(&[7, 2]), Err(EntryError::Hidden("list[0]".into())), "whose key?");
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let none = Map::new();
    let change = |table, id, change| changed(FILE, FILE, table, id, change).expect_err("refused").to_string();
    assert!(change("providers", "nobody", Change::Delete).contains("no entry \"nobody\""));
    assert!(change("providers", "acme", Change::Create(&none)).contains("already"));
    let odd = object(&json!({ "retries": u64::MAX, "x": null }));
    assert!(change("models", "m", Change::Merge(&odd)).contains("retries"));
    let odd = object(&json!({ "x": { "y": [null] } }));
    assert!(change("models", "m", Change::Merge(&odd)).contains("x.y[0]"));
    let twice = "[[plugins]]\nname = \"a\"\n[[plugins]]\nname = \"a\"\n";
    assert!(matches!(changed(twice, twice, "plugins", "a", Change::Delete), Err(EntryError::Ambiguous { .. })));
}

#[test]
fn tables_of_an_entry_that_stand_elsewhere_come_to_it() {
    let text = "[[models]]\nname = \"m\"\n[log]\nlevel = \"a\"\n\n[models.price] # dear\ninput = 1\n";
    let after = patched(text, "models", "m", &json!({ "price": { "input": 2 } }));
    assert_eq!(after, "[[models]]\nname = \"m\"\n[models.price] # dear\ninput = 2\n[log]\nlevel = \"a\"\n\n");
    assert_eq!(changed(text, text, "models", "m", Change::Delete).as_deref(), Ok("[log]\nlevel = \"a\"\n"));
}

#[test]
fn lines_that_end_as_on_windows_stay() {
    let text = FILE.replace('\n', "\r\n");
    let after = patched(&text, "models", "m", &json!({ "retries": 1 }));
    assert_eq!(after, text.replace("2.5\r\n", "2.5\r\nretries = 1\r\n"));
    let new = object(&json!({ "id": "new" }));
    let more = changed(&text, &text, "providers", "new", Change::Create(&new)).expect("created");
    assert!(!more.replace("\r\n", "").contains('\n'), "{more:?}");
    assert_eq!(changed(&more, &more, "providers", "new", Change::Delete).as_deref(), Ok(text.as_str()));
}

/// Values as JSON, and one of the ways to write each.
fn scalar() -> impl Strategy<Value = String> + Clone {
    prop_oneof![
        any::<i32>().prop_map(|number| number.to_string()),
        (0..9_u8, 0..9_u8).prop_map(|(a, b)| format!("{a}.{b}5")),
        Just("1_000".to_owned()),
        Just("0xff".to_owned()),
        any::<bool>().prop_map(|flag| flag.to_string()),
        Just("2027-01-31".to_owned()),
        Just("\"[[models]] # no header\"".to_owned()),
        Just("'''\n[[models]]\nname = \"not one\"\n'''".to_owned()),
        Just("\"\"\"two\n# lines \\\"\"\"\"".to_owned()),
        "[a-z#\\[\\]{}= ]{0,8}".prop_map(|text| format!("'{text}'")),
    ]
}

fn valued() -> impl Strategy<Value = String> {
    let list = proptest::collection::vec(scalar(), 0..3);
    prop_oneof![
        4 => scalar(),
        1 => list.clone().prop_map(|items| format!("[{}]", items.join(", "))),
        1 => list.prop_map(|items| format!("[\n{}]", items.iter().map(|item| format!("  {item}, # c\n\n")).collect::<String>())),
        1 => (scalar(), scalar()).prop_map(|(a, b)| format!("{{ p = {a}, 'q r' = {b} }}")),
        1 => (scalar(), scalar()).prop_map(|(a, b)| format!("[{{ p = {a} }}, {{ p = {b}, id = 'x' }}]")),
    ]
}

fn trivia() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        Just("\n".into()),
        Just("# [[models]]\n".into()),
        Just("\n# note\n\n".into()),
        Just("  # key = 1\n".into())
    ]
}

/// Text of one entry of `[[models]]` with this number; keys in the spellings that TOML has.
fn entry(number: usize) -> impl Strategy<Value = String> {
    let keys = proptest::collection::vec((valued(), trivia(), 0..5_u8), 0..4);
    let below = proptest::option::of((scalar(), scalar(), 0..3_u8));
    (keys, below, prop_oneof![Just("[[models]]"), Just("[[ \"models\" ]] # head")]).prop_map(
        move |(keys, below, head)| {
            let mut text = format!("{head}\nname = \"n{number}\" # name\n");
            for (at, (value, trivia, style)) in keys.into_iter().enumerate() {
                text += &trivia;
                text += &match style {
                    0 => format!("k{at}={value}\n"),
                    1 => format!("  \"k{at}\" = {value} # of k{at}\n"),
                    2 => format!("d{at}.a = {value}\nd{at} . b = 1 # dotted\n"),
                    _ => format!("k{at} = {value}\n"),
                };
            }
            match below {
                Some((a, b, 0)) => {
                    text += &format!("\n# below\n[models.sub]\nx = {a}\n  [models.sub.deep]\n  y = {b}\n")
                }
                Some((a, b, 1)) => text += &format!("[[models.list]]\nx = {a}\n# second\n[[models.list]]\nx = {b}\n"),
                Some((a, b, _)) => text += &format!("[models.over.deep]\nx = {a}\ny = {b}\n"),
                None => {}
            }
            text
        },
    )
}

fn patch() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        Just(json!(7)),
        Just(json!(1.5)),
        Just(json!("new\n'\"# \\ \u{e9}")),
        Just(json!([])),
        Just(json!([1, "two"])),
        Just(json!([{ "p": 1 }])),
        Just(json!({})),
        Just(json!({ "p": null, "s t": 2 })),
        Just(json!({ "a": 9, "deep": { "y": 3, "z": null } })),
        Just(json!([{ "x": 1, "y": [] }, { "x": 2 }, { "x": 3 }])),
    ];
    let key = prop_oneof![
        "k[0-3]",
        "d[0-3]",
        Just("sub".into()),
        Just("list".into()),
        Just("over".into()),
        Just("new key.é".into())
    ];
    proptest::collection::btree_map(key, leaf, 1..4).prop_map(|fields| fields.into_iter().collect::<Map<_, _>>().into())
}

#[test]
fn a_long_list_is_changed_in_one_pass() {
    let names = |from: u32| (from..100_000).map(|at| json!(format!("n{at}"))).collect::<Vec<_>>();
    let text = "[[providers]]\nid = \"p\"\nmodels = [\"a\", \"z\"]\n";
    let models = |between: Vec<Value>| -> Vec<Value> { [vec![json!("a")], between, vec![json!("z")]].concat() };
    let long = patched(text, "providers", "p", &json!({ "models": models(names(0)) }));
    assert!(long.contains("[\"a\", \"n0\", \"n1\"") && long.ends_with("\"n99999\", \"z\"]\n"));
    let half = patched(&long, "providers", "p", &json!({ "models": models(names(50_000)) }));
    assert!(half.contains("[\"a\", \"n50000\", "));
    assert_eq!(patched(&half, "providers", "p", &json!({ "models": ["a", "z"] })), text);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn a_patch_changes_its_entry_alone(
        (head, one, gap, two, tail) in (trivia(), entry(1), trivia(), entry(2), trivia()),
        patch in patch(),
        is_second in any::<bool>(),
        is_crlf in any::<bool>(),
    ) {
        let ends = |text: String| if is_crlf { text.replace('\n', "\r\n") } else { text };
        let [before, one, gap, two, after] = [
            format!("# Begin.\ntop = 1\n{head}\n"),
            one,
            format!("{gap}\n[other]\nk0 = '''\n[[models]]''' # other\n\n"),
            two,
            format!("{tail}\n[last]\nname = \"n2\"\n"),
        ].map(ends);
        let text = format!("{before}{one}{gap}{two}{after}");
        let id = if is_second { "n2" } else { "n1" };
        let was = list(&text, "models").expect("TOML").into_iter().find(|entry| entry.id == id).expect("there").value;

        let mut wanted = object(&was);
        merge(&mut wanted, &object(&patch));
        let new = match changed(&text, &text, "models", id, Change::Merge(&object(&patch))) {
            Ok(new) => new,
            // An element of a list cannot be null.
            Err(EntryError::Unwritable(_)) => return Ok(()),
            Err(error) => return Err(TestCaseError::fail(format!("{error}\n{text}\n{patch}"))),
        };
        let now = list(&new, "models").expect("TOML").into_iter().find(|entry| entry.id == id).expect("there").value;
        prop_assert_eq!(&now, &Value::Object(wanted), "{}", new);
        // Everything else is what it was, byte by byte.
        let (start, end) = if is_second { (format!("{before}{one}{gap}"), after) } else { (before, format!("{two}{after}")) };
        prop_assert!(new.starts_with(&start), "{}\n---\n{}", text, new);
        prop_assert!(new.ends_with(&end), "{}\n---\n{}", text, new);
        // Comments of keys that the patch does not name are there.
        let own = &new[start.len()..];
        for comment in ["# name", "# head"].into_iter().filter(|comment| if is_second { &two } else { &one }.contains(comment)) {
            prop_assert!(own.contains(comment), "{}", own);
        }
        let kept: BTreeSet<_> = text.lines().filter(|line| line.contains("# of k") && line.starts_with("  \"k")).collect();
        for line in kept {
            let key = line.trim().trim_start_matches('"').split('"').next().unwrap_or_default();
            prop_assert!(patch.get(key).is_some() || new.contains(line), "{}", new);
        }
    }

    #[test]
    fn what_was_read_is_written_back_as_it_was(one in entry(1), two in entry(2), tail in trivia()) {
        let text = format!("{one}{two}{tail}");
        for entry in list(&text, "models").expect("TOML") {
            let same = changed(&text, &text, "models", &entry.id, Change::Replace(&object(&entry.value)));
            prop_assert_eq!(same.as_deref(), Ok(text.as_str()));
        }
        let new = object(&json!({ "name": "new", "to": [{ "pool": "p" }] }));
        let more = changed(&text, &text, "models", "new", Change::Create(&new)).expect("created");
        let back = changed(&more, &more, "models", "new", Change::Delete).expect("deleted");
        prop_assert_eq!(back, text);
    }

    #[test]
    fn no_text_breaks_it(text in "[\\[\\]a-c.=\"'#{}, \n\r1]{0,40}", id in "[a-c1]{0,2}") {
        // Whatever the answer is, it is one.
        let _ = changed(&text, &text, "a", &id, Change::Delete);
        let _ = changed(&text, &text, "a", &id, Change::Create(&object(&json!({ "id": id }))));
    }
}
