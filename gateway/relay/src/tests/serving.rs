//! Names, cards and counts of models.

use crate::ModelConfig;

use super::double::*;

#[test]
fn a_model_and_its_aliases_are_one_and_pools_keep_their_names() {
    let rules = ModelConfig { aliases: vec!["gpt-x".into()], context_tokens: 99, ..over("b", "") };
    let world = World::new(rules);
    let listed: Vec<_> = world.models.listed().iter().map(|entry| entry.name.to_string()).collect();
    assert_eq!(listed, ["m", "a", "b", "c", "d"]);
    let alias = world.models.find("gpt-x").expect("an alias");
    assert_eq!((&*alias.name, alias.upstream.card().id, alias.upstream.card().context_tokens), ("m", "m".into(), 99));
    assert!(world.models.find("M").is_none());
}

#[test]
fn a_model_is_ready_when_one_target_is() {
    let world = World::new(over("a", "b"));
    let upstream = &world.models.find("m").expect("there").upstream;
    let unready = |name: &str| *world.double(name).unready.lock().expect("unready") = Some("loading".into());
    unready("a");
    assert_eq!(upstream.unready(), None);
    unready("b");
    assert_eq!(upstream.unready().as_deref(), Some("loading"));
}
