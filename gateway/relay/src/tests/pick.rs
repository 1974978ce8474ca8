//! Choices for requests that another proxy forwards: they are those of the relay, and count in its load and health.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_base::error::Failure;
use penstock_govern::prices::Prices;
use penstock_proto::ErrorKind;
use penstock_telemetry::Metrics;
use penstock_upstream::{Origin, Probe, Upstream};
use tokio::sync::Semaphore;

use super::cache::body;
use super::double::*;
use crate::models::{Models, Targets};
use crate::{Endpoint, ModelConfig, Pick, Policy, RelayConfig, TargetConfig, Wanted};

/// Servers with an address each; those in `there` are known.
struct Servers<'w> {
    world: &'w World,
    places: Vec<Arc<Semaphore>>,
}

/// Address of the server with this letter.
fn at(name: &str) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, name.as_bytes()[0]], 8000))
}

impl<'w> Servers<'w> {
    fn new(world: &'w World, places: usize) -> Self {
        Self { world, places: (0..4).map(|_| Arc::new(Semaphore::new(places))).collect() }
    }

    /// Models over the servers of `to` and `fallback`, behind those `before`.
    fn models(&self, to: &str, fallback: &str, policy: Policy, before: Option<&Models>) -> Models {
        let server = |letter: char| TargetConfig::Provider(letter.to_string(), "m".into());
        let rules = ModelConfig {
            to: to.chars().map(|letter| (server(letter), 1)).collect(),
            fallback: fallback.chars().map(server).collect(),
            policy,
            ..over("a", "")
        };
        let config = RelayConfig { explain: false, models: &[rules], prices: &Prices::default(), providers: &[] };
        Models::build(&config, self, &Arc::<Metrics>::default(), before)
    }
}

impl Targets for Servers<'_> {
    fn pools(&self) -> Vec<Arc<dyn Upstream>> {
        Vec::new()
    }

    fn provided(&self) -> Vec<Arc<dyn Upstream>> {
        Vec::new()
    }

    fn provider(&self, id: &str, _: &str) -> Option<Arc<dyn Upstream>> {
        let double = self.world.doubles.iter().find(|double| double.name == id)?;
        Some(double.clone())
    }

    fn probe(&self, _: &str) -> Option<Arc<dyn Probe>> {
        None
    }

    fn endpoint(&self, id: &str) -> Option<Endpoint> {
        // The last has a host name.
        let places = self.places[usize::from(id.as_bytes()[0] - b'a')].clone();
        (id != "d").then(|| Endpoint { address: at(id), places })
    }

    fn is_kept(&self, _: &TargetConfig) -> bool {
        true
    }
}

fn pick_among(models: &Models, text: &str, among: Option<&[SocketAddr]>) -> Result<Pick, Failure> {
    let wanted = Wanted { origin: &Origin::default(), among, endpoints_max: 3 };
    now(models.pick("m", &call(&[], text), &wanted))
}

#[track_caller]
fn pick(models: &Models, text: &str) -> Pick {
    pick_among(models, text, None).expect("an endpoint")
}

fn home(models: &Models, text: &str) -> SocketAddr {
    pick(models, text).endpoints()[0]
}

#[test]
fn a_conversation_stays_and_load_is_shared() {
    let world = World::new(over("a", ""));
    let models = Servers::new(&world, 100).models("abc", "", Policy::CacheAware, None);
    let homes: Vec<SocketAddr> = (0..9).map(|topic| home(&models, &body(&format!("topic {topic}"), 1))).collect();
    assert_eq!(homes.iter().collect::<BTreeSet<_>>().len(), 3, "what nobody has is shared: {homes:?}");
    for (topic, home) in homes.iter().enumerate() {
        let next = pick(&models, &body(&format!("topic {topic}"), 2));
        assert_eq!((next.endpoints()[0], next.endpoints().len()), (*home, 3));
        let (prompt, cached) = next.predicted().expect("known");
        assert!(cached * 3 > prompt, "{cached} of {prompt}");
    }
    assert_eq!(pick(&models, &body("topic 0", 1)).reason(), "cached");
    let held: Vec<Pick> = (0..3).map(|topic| pick(&models, &body(&format!("other {topic}"), 1))).collect();
    let busy: Vec<usize> = models.targets().iter().map(|target| target.in_flight).collect();
    assert_eq!(busy, [1, 1, 1]);
    drop(held);
    assert!(models.targets().iter().all(|target| target.in_flight == 0));
}

#[test]
fn servers_come_and_go_and_the_others_keep_what_they_have() {
    let world = World::new(over("a", ""));
    let servers = Servers::new(&world, 100);
    let first = servers.models("ab", "", Policy::CacheAware, None);
    let texts: Vec<String> = (0..6).map(|topic| body(&format!("topic {topic}"), 3)).collect();
    let homes: Vec<SocketAddr> = texts.iter().map(|text| home(&first, text)).collect();
    let open = pick(&first, &texts[0]);
    // In front of the others, so that their places in the list change.
    let second = servers.models("cb", "", Policy::CacheAware, Some(&first));
    for (text, home) in texts.iter().zip(&homes).filter(|(_, home)| **home == at("b")) {
        let next = pick(&second, text);
        assert_eq!((next.endpoints()[0], next.reason()), (*home, "cached"));
    }
    let third = servers.models("cba", "", Policy::CacheAware, Some(&second));
    let gone = texts.iter().zip(&homes).find(|(_, home)| **home == at("a")).expect("one was there");
    let again = pick(&third, gone.0);
    let own =
        |name: &str| third.targets().iter().find(|target| *target.id == format!("{name}/m")).expect("there").in_flight;
    assert_ne!(again.reason(), "cached", "a server that comes back has an empty cache");
    drop((open, again));
    assert_eq!((own("a"), own("b"), own("c")), (0, 0, 0));
}

#[test]
fn failures_that_pass_by_open_the_breaker() {
    let world = World::new(over("a", ""));
    let models = Servers::new(&world, 100).models("a", "b", Policy::Order, None);
    let now = Instant::now();
    for _ in 0..5 {
        let mut pick = pick(&models, STREAM);
        assert_eq!(pick.endpoints()[0], at("a"));
        pick.refused(503, None, now);
    }
    let mut next = pick(&models, STREAM);
    assert_eq!((next.endpoints(), next.reason()), (vec![at("b")], "fallback"));
    next.answered(now);
    next.ended(None);
    drop(next);
    // The request's own fault says nothing of the server.
    for _ in 0..6 {
        let mut pick = pick(&models, STREAM);
        pick.refused(400, None, now);
        assert_eq!(pick.endpoints(), [at("b")]);
    }
    for _ in 0..5 {
        pick(&models, STREAM).refused(500, None, now);
    }
    let mut left = pick(&models, STREAM);
    assert_eq!(left.attempts(now).pop().map(|one| (one.outcome, one.status)), Some(("abandoned", 0)));
    drop(left);
    let trial = pick(&models, STREAM);
    assert_eq!(trial.reason(), "trial", "no model is blocked altogether");
    let other = pick(&models, STREAM);
    assert_eq!(other.reason(), "trial", "at the other server");
    let none = pick_among(&models, STREAM, None).err().expect("one trial at each");
    assert_eq!((none.kind, none.status()), (ErrorKind::Unavailable, 503));
    assert!(none.retry_after.is_some());
}

#[test]
fn the_second_answers_for_the_first() {
    let world = World::new(over("a", ""));
    let models = Servers::new(&world, 100).models("ab", "", Policy::Order, None);
    let now = Instant::now();
    for _ in 0..5 {
        let mut pick = pick(&models, STREAM);
        assert_eq!(pick.endpoints(), [at("a"), at("b")]);
        pick.served(at("a"), now);
        pick.served(at("c"), now);
        assert_eq!(&*pick.target(), "a/m", "an endpoint that was not named changes nothing");
        pick.served(at("b"), now);
        pick.answered(now);
        assert_eq!(&*pick.target(), "b/m");
        let busy: Vec<usize> = models.targets().iter().map(|target| target.in_flight).collect();
        assert_eq!(busy, [0, 1]);
        let asked: Vec<_> = pick.attempts(now).into_iter().map(|one| (one.target.to_string(), one.outcome)).collect();
        assert_eq!(asked, [("a/m".to_owned(), "error"), ("b/m".to_owned(), "answered")]);
        assert!(pick.attempts(now).is_empty(), "taken out once");
    }
    assert_eq!(home(&models, STREAM), at("b"), "the first is left out now");
}

#[test]
fn only_what_is_offered_and_has_room() {
    let world = World::new(over("a", ""));
    let models = Servers::new(&world, 1).models("abd", "c", Policy::Order, None);
    let among = |names: &[&str]| names.iter().map(|name| at(name)).collect::<Vec<_>>();
    let offered = pick_among(&models, STREAM, Some(&among(&["x", "c"]))).expect("the fallback");
    assert_eq!(offered.endpoints(), [at("c")]);
    drop(offered);
    for none in [among(&[]), among(&["x"]), among(&["d"])] {
        let none = pick_among(&models, STREAM, Some(&none)).err().expect("none");
        assert_eq!(none.status(), 503, "{none:?}");
    }
    let held: Vec<Pick> = (0..3).map(|_| pick(&models, STREAM)).collect();
    let all: Vec<SocketAddr> = held.iter().map(|pick| pick.endpoints()[0]).collect();
    assert_eq!(all, among(&["a", "b", "c"]));
    let full = pick_among(&models, STREAM, None).err().expect("no room");
    assert_eq!((full.status(), full.retry_after), (429, Some(Duration::from_secs(1))));
    drop(held);
    assert_eq!(home(&models, STREAM), at("a"));
    let origin = Origin::default();
    let wanted = Wanted { origin: &origin, among: None, endpoints_max: 1 };
    assert_eq!(models.pick_any(&wanted).expect("the only model").endpoints(), [at("a")]);
    assert_eq!(models.pick_unread("x", &wanted).err().expect("unknown").status(), 404);
    assert_eq!(models.pickable(), 1);
}
