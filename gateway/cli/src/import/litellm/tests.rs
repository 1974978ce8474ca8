use penstock_config::Overrides;

use super::translate;

/// Translates a file and compares the result with its golden file. `PENSTOCK_BLESS=1` writes the golden file anew.
#[track_caller]
fn check(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/import/golden");
    let source = std::fs::read_to_string(format!("{folder}/{name}.yaml")).expect("source");
    let text = translate(&source).expect("a translation").text("a LiteLLM config");
    let golden = format!("{folder}/{name}.toml");
    if std::env::var_os("PENSTOCK_BLESS").is_some() {
        std::fs::write(&golden, &text).expect("write");
    }
    assert_eq!(text, std::fs::read_to_string(&golden).unwrap_or_default(), "{name}");
    let env = |_: &str| Some("set".to_owned());
    penstock_config::load(Some((name, &text)), &Overrides::default(), &env)
        .unwrap_or_else(|faults| panic!("{faults}\n{text}"));
    text
}

#[test]
fn a_quickstart() {
    check("quickstart");
}

#[test]
fn deployments_that_share_and_fall_back() {
    check("balanced");
}

#[test]
fn a_grown_config_and_what_cannot_be_kept() {
    let text = check("production");
    assert!(!text.contains("do-not-print-me"), "secrets are not copied");
}

#[test]
fn prices_weights_and_contexts_that_differ() {
    let text = check("priced");
    for words in [
        "model_list[1].litellm_params.input_cost_per_token: another",
        "weights are whole numbers: 2 is taken",
        "the smaller one is taken",
    ] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
    assert!(text.contains("price = { input = 0.02, output = 0 }"), "{text}");
}

#[test]
fn what_is_no_config_is_refused() {
    for text in ["", "- a", "a: [", "x"] {
        assert!(translate(text).is_err(), "{text:?}");
    }
    let empty = translate("model_list:\n").expect("nothing to do");
    assert_eq!((empty.toml.as_str(), empty.left.len()), ("", 0));
    for text in [
        "model_list: 3",
        "model_list: [3]",
        "model_list: [{model_name: a}]",
        "model_list: [{model_name: [], litellm_params: x}]",
    ] {
        assert!(!translate(text).expect("readable").toml.contains("[[models]]"), "{text}");
    }
}

#[test]
fn aliases_of_yaml_are_followed_and_bounded() {
    let text = "x: &p {model: gpt-4o}\nmodel_list: [{model_name: a, litellm_params: *p}]";
    assert!(translate(text).expect("readable").toml.contains("gpt-4o"));
    let mut bomb = "a0: &a0 [x]\n".to_owned();
    for at in 1..30 {
        bomb += &format!("a{at}: &a{at} [*a{before}, *a{before}]\n", before = at - 1);
    }
    assert!(translate(&bomb).is_err(), "a bomb does not go off");
}
