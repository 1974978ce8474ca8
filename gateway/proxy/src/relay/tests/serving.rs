//! Names, cards and counts of models.

use crate::config::{self, Overrides};

use super::double::*;

#[test]
fn a_model_and_its_aliases_are_one_and_pools_keep_their_names() {
    let world = World::new("to = [{ pool = \"b\" }]\naliases = [\"gpt-x\"]\ncontext_tokens = 99");
    let listed: Vec<_> = world.models.listed().iter().map(|entry| entry.name.to_string()).collect();
    assert_eq!(listed, ["m", "a", "b", "c", "d"]);
    let alias = world.models.find("gpt-x").expect("an alias");
    assert_eq!((&*alias.name, alias.upstream.card().id, alias.upstream.card().context_tokens), ("m", "m".into(), 99));
    assert!(world.models.find("M").is_none());
}

#[test]
fn a_model_is_ready_when_one_target_is() {
    let world = World::new("to = [{ pool = \"a\" }]\nfallback = [{ pool = \"b\" }]");
    let upstream = &world.models.find("m").expect("there").upstream;
    let unready = |name: &str| *world.double(name).unready.lock().expect("unready") = Some("loading".into());
    unready("a");
    assert_eq!(upstream.unready(), None);
    unready("b");
    assert_eq!(upstream.unready().as_deref(), Some("loading"));
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let pools = "[[pools]]\nid = \"a\"\n[[pools]]\nid = \"b\"\n";
    let check = |keys: &str, expected: &str| {
        let text = format!("{pools}[[models]]\nname = \"m\"\n{keys}\n");
        let faults =
            config::load(Some(("p.toml", &text)), &Overrides::default(), &|_| None).expect_err(keys).to_string();
        assert!(faults.contains(expected), "{expected} in {faults}");
    };
    check("", "models[0].to: is missing");
    check("to = [{}]", "p.toml:7: models[0].to[0].pool: exactly one of pool and provider is needed");
    check("to = [{ pool = \"a\", wight = 2 }]", "models[0].to[0].wight: unknown key; did you mean weight?");
    check("to = [{ pool = \"a\", model = \"x\" }]", "goes with provider");
    check("to = [{ pool = \"z\" }]", "there is no pool \"z\"");
    check("to = [{ provider = \"z\" }]", "there is no provider \"z\"");
    check("to = [{ pool = \"a\" }]\nfallback = [{ pool = \"a\" }]", "is there twice");
    check("to = [{ pool = \"a\" }]\naliases = [\"m\"]", "the name \"m\" is used twice");
    check("to = [{ pool = \"a\" }]\nfallback_on = [\"errors\"]", "\"errors\" is not one of error, timeout");
    check("to = [{ pool = \"a\" }]\npolicy = \"best\"", "\"best\" is not one of weighted, order");
    check("to = [{ pool = \"a\" }]\nsticky = \"header:\"", "\"header:\" is not one of");
    check("to = \"a\"", "models[0].to: must be a list of tables");
    check("to = [{ pool = \"a\" }]\nprice = { input = 1 }", "input and output are both needed");
    check("to = [{ pool = \"a\", weight = 0 }]", "must be a whole number from 1");
    check(
        "to = [{ provider = \"z\", model = \"nobody-knows\" }]\npolicy = \"cost\"",
        "needs a price of \"z/nobody-knows\"",
    );
    check(
        "to = [{ pool = \"a\" }]\npolicy = \"cost\"\nfallback = []\nmirror = { percent = 3 }",
        "models[0].mirror.pool",
    );
}
