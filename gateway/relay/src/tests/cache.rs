//! Cache-aware routing: requests follow their prompt's prefix, unless its target is too busy.

use crate::{ModelConfig, Policy};

use super::double::*;

fn shared() -> ModelConfig {
    ModelConfig { policy: Policy::CacheAware, ..over("ab", "") }
}

/// Body of a conversation of `turns` turns, about a topic of its own.
pub(super) fn body(topic: &str, turns: usize) -> String {
    let text = |turn: usize| format!("Turn {turn} about {topic}. {}", "It is a long story. ".repeat(20));
    let message = |turn| format!(r#"{{"role":"user","content":"{}"}}"#, text(turn));
    let messages: Vec<String> = (0..turns).map(message).collect();
    format!(r#"{{"temperature":0.{turns},"messages":[{}],"model":"m","stream":true}}"#, messages.join(","))
}

fn target(world: &World, body: &str) -> String {
    world.ask(&[], body).end().course.target.as_deref().unwrap_or_default().to_owned()
}

#[test]
fn a_conversation_stays_where_it_began_and_others_share() {
    let world = World::new(shared());
    let homes: Vec<String> = (0..8).map(|topic| target(&world, &body(&format!("topic {topic}"), 1))).collect();
    assert_eq!(homes.iter().filter(|home| *home == "a").count(), 4, "what nobody has is shared: {homes:?}");
    for turns in 2..5 {
        for (topic, home) in homes.iter().enumerate() {
            assert_eq!(target(&world, &body(&format!("topic {topic}"), turns)), *home, "turn {turns}");
        }
    }
    let predicted = world.metric("penstock_routed_cached_tokens_predicted_total", &[r#"layer="approximate""#]);
    let all = world.metric("penstock_routed_prompt_tokens_total", &[]);
    assert!(predicted > all / 2.0, "{predicted} of {all}");
}

#[test]
fn a_target_with_much_ahead_lets_a_conversation_go() {
    let world = World::new(shared());
    let home = target(&world, &body("foxes", 2));
    world.double(&home).always(Act::Hang);
    // Long prompts: the unanswered one is all queued ahead of the next request there.
    let waiting: Vec<_> = (0..4)
        .map(|n| {
            let mut asking = world.ask(&[], &body(&format!("owls {n}"), 40));
            let _ = asking.poll();
            asking
        })
        .collect();
    assert_eq!(world.double(&home).open(), 1, "the others went where nothing was ahead");
    world.double(&home).always(GOOD);
    let other = if home == "a" { "b" } else { "a" };
    assert_eq!(target(&world, &body("foxes", 3)), other);
    drop(waiting);
    assert_eq!(target(&world, &body("foxes", 4)), other, "it has more of the conversation now");
}
