//! Isolation between client keys: other keys' requests succeed as if the attacker's had been good ones.
//!
//! A seeded simulation: keys send requests at the same rate for 40 s of simulated time, through the real relay, its
//! breakers, the pauses of a provider's keys and the pace of a provider that publishes its rate. One key, the attacker, makes its requests fail in every way that a
//! client can bring about.

use std::collections::VecDeque;
use std::task::Poll;
use std::time::Duration;

use penstock_types::{FaultClass, Surface};
use proptest::prelude::*;

use crate::ModelConfig;
use penstock_provider::PacingConfig;

use super::double::*;

/// Mean interval between two requests of a key.
const PERIOD_MS: u64 = 100;
/// Interval between two polls of the clock.
const TICK: Duration = Duration::from_millis(10);
/// Length of one simulation in simulated time.
const LENGTH: Duration = Duration::from_secs(40);
/// Least success of the victims, in per cent of their successes beside an attacker that sends good requests.
const PART_MIN: u64 = 95;

/// Kind of the attacker's next request.
#[derive(Clone, Copy, Debug)]
enum Move {
    Good,
    BadRequest,
    /// Embeddings from a model that has none.
    NoSuchOperation,
    NoSuchModel,
    KeyRefused,
    Forbidden,
    NoCredit,
    Limited(Option<u64>),
    Busy(Option<u64>),
    Fails,
    Cut,
    Hangs,
    Leaves,
}

impl Move {
    fn act(self) -> Act {
        let after = |seconds: Option<u64>| seconds.map(Duration::from_secs);
        match self {
            Move::Good => ANSWER,
            Move::BadRequest => fail(FaultClass::Invalid),
            Move::NoSuchOperation | Move::NoSuchModel => fail(FaultClass::NotFound),
            Move::KeyRefused => fail(FaultClass::Unauthorized),
            Move::Forbidden => fail(FaultClass::Forbidden),
            Move::NoCredit => fail(FaultClass::Quota),
            Move::Limited(seconds) => Act::Refuse(FaultClass::RateLimited, 0, after(seconds)),
            Move::Busy(seconds) => Act::Refuse(FaultClass::Overloaded, 0, after(seconds)),
            Move::Fails => DOWN,
            Move::Cut => Act::Break(1),
            Move::Hangs | Move::Leaves => Act::Hang,
        }
    }
}

fn a_move() -> impl Strategy<Value = Move> {
    let seconds = || prop_oneof![Just(None), (1_u64..900).prop_map(Some)];
    prop_oneof![
        Just(Move::Good),
        Just(Move::BadRequest),
        Just(Move::NoSuchOperation),
        Just(Move::NoSuchModel),
        Just(Move::KeyRefused),
        Just(Move::Forbidden),
        Just(Move::NoCredit),
        seconds().prop_map(Move::Limited),
        seconds().prop_map(Move::Busy),
        Just(Move::Fails),
        Just(Move::Cut),
        Just(Move::Hangs),
        Just(Move::Leaves),
    ]
}

/// Words after 150 and 300 ms.
const ANSWER: Act = Act::Say(2, 150);

/// Conditions at the upstream during one simulation.
#[derive(Clone, Copy, Debug)]
struct Weather {
    /// Number of keys besides the attacker's.
    victims: usize,
    /// Percentage of the victims' requests that fail by themselves.
    faults: u64,
    /// True if everything fails for a while.
    outage: bool,
    /// Number of the provider's keys; 0: none is sent.
    keys: usize,
    fallback: bool,
    /// Requests per minute that the first provider publishes, which attacker and victims share; 0: it publishes none.
    requests_per_minute: u32,
    /// True if a second provider, without a published rate, is equal to the first.
    has_equal: bool,
}

impl Weather {
    /// Pace of the first provider. Its longest wait exceeds the time to the first token, so the time to the first token
    /// bounds the wait.
    fn pace(&self) -> Option<PacingConfig> {
        let requests_per_minute = self.requests_per_minute;
        let wait = Duration::from_secs(5);
        let pace = PacingConfig { requests_per_minute, tokens_per_minute: 0, gateways: 1, wait };
        (requests_per_minute > 0).then_some(pace)
    }
}

/// Pseudo-random numbers (SplitMix64) from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ (value >> 31)) % below
    }
}

/// Client key with its requests in the simulation.
struct Client {
    tenant: String,
    due: Duration,
    random: Random,
    /// Moves that are repeated; empty for a victim.
    moves: VecDeque<Move>,
}

/// Number of the victims' requests that succeeded. `shared`: all clients use the same key.
fn simulate(weather: Weather, moves: &[Move], seed: u64, shared: bool) -> u64 {
    let fallback = if weather.fallback { "b" } else { "" };
    let first_token_timeout = Some(Duration::from_secs(3));
    let to = if weather.has_equal { "ac" } else { "a" };
    let rules = ModelConfig { first_token_timeout, ..over(to, fallback) };
    let world = World::paced(weather.keys, weather.pace(), rules);
    let client = |index: usize| Client {
        tenant: format!("key_{}", if shared { 0 } else { index }),
        due: Duration::from_millis(index as u64 * 7),
        random: Random(seed.wrapping_add(index as u64)),
        moves: if index == 0 { moves.iter().copied().collect() } else { VecDeque::new() },
    };
    let mut clients: Vec<Client> = (0..=weather.victims).map(client).collect();
    let (mut open, mut succeeded) = (Vec::new(), 0);
    let mut time = Duration::ZERO;
    while time < LENGTH {
        let is_out = weather.outage && (20..25).contains(&time.as_secs());
        for (index, client) in clients.iter_mut().enumerate() {
            while client.due <= time {
                client.due += Duration::from_millis(PERIOD_MS / 2 + client.random.next(PERIOD_MS));
                let fault = client.random.next(100) < weather.faults;
                let step = client.moves.pop_front();
                client.moves.extend(step);
                let act = match step {
                    _ if is_out => DOWN,
                    Some(step) => step.act(),
                    None if fault => DOWN,
                    None => ANSWER,
                };
                let surface = match step {
                    Some(Move::NoSuchOperation) => Surface::Embeddings,
                    _ => Surface::Chat,
                };
                world.doubles.iter().for_each(|double| double.act_for(&client.tenant, act));
                let left = matches!(step, Some(Move::Leaves)).then(|| time + Duration::from_millis(50));
                open.push((index, left, world.ask_as(&client.tenant, surface)));
            }
        }
        open.retain_mut(|(index, left, asking)| {
            loop {
                match asking.poll() {
                    Poll::Ready(Ok(true)) => {}
                    Poll::Ready(Ok(false)) => {
                        succeeded += u64::from(*index > 0);
                        return false;
                    }
                    Poll::Ready(Err(_)) => return false,
                    Poll::Pending => return left.is_none_or(|left| time < left),
                }
            }
        });
        world.clock.advance(TICK);
        time += TICK;
    }
    succeeded
}

fn check(weather: Weather, moves: &[Move], seed: u64) -> Result<(), TestCaseError> {
    let (calm, attacked) = (simulate(weather, &[Move::Good], seed, false), simulate(weather, moves, seed, false));
    prop_assert!(calm > 100, "the victims are answered: {}", calm);
    prop_assert!(
        attacked * 100 >= calm * PART_MIN,
        "{} of {} answers are left by {:?} in {:?}, seed {}",
        attacked,
        calm,
        moves,
        weather,
        seed
    );
    Ok(())
}

const PLAIN: Weather = Weather {
    victims: 1,
    faults: 0,
    outage: false,
    keys: 1,
    fallback: false,
    requests_per_minute: 0,
    has_equal: false,
};
/// Less than half of what two keys ask for.
const SCARCE: u32 = 500;

/// Each sequence by which one key once took a service from others, alone.
#[test]
fn no_way_to_fail_takes_an_upstream_from_others() {
    let ways = [
        Move::NoSuchOperation,
        Move::NoSuchModel,
        Move::KeyRefused,
        Move::Forbidden,
        Move::NoCredit,
        Move::Limited(None),
        Move::Limited(Some(600)),
        Move::Busy(Some(60)),
        Move::Fails,
        Move::Cut,
        Move::Hangs,
        Move::Leaves,
    ];
    let scarce = Weather { requests_per_minute: SCARCE, ..PLAIN };
    for way in ways {
        for weather in [
            PLAIN,
            Weather { faults: 3, outage: true, victims: 2, ..PLAIN },
            scarce,
            Weather { has_equal: true, victims: 2, ..scarce },
        ] {
            check(weather, &[way], 7).unwrap_or_else(|why| panic!("{why}"));
        }
    }
}

/// A provider whose rate the keys together just about use up, and a key of whose requests each second one is asked again: the
/// answers between keep its own breaker closed.
#[test]
fn retries_take_no_rate_from_others() {
    for victims in 1..4 {
        let asked_per_minute = (victims as u32 + 1) * (60_000 / PERIOD_MS as u32);
        for percent in [80, 92, 96] {
            let requests_per_minute = asked_per_minute * percent / 100;
            let weather = Weather { victims, keys: 0, requests_per_minute, ..PLAIN };
            check(weather, &[Move::Cut, Move::Fails], 7).unwrap_or_else(|why| panic!("{why}"));
        }
    }
}

/// Control: with a shared key the attack does harm, so the simulation can fail.
#[test]
fn with_one_key_for_all_it_would_be_taken_from_all() {
    for way in [Move::KeyRefused, Move::Limited(Some(600))] {
        let (calm, attacked) = (simulate(PLAIN, &[Move::Good], 7, true), simulate(PLAIN, &[way], 7, true));
        assert!(attacked * 100 < calm * PART_MIN, "{way:?}: {attacked} of {calm}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn no_sequence_of_one_keys_requests_takes_an_upstream_from_others(
        moves in prop::collection::vec(a_move(), 1..12),
        (victims, faults, outage) in (1_usize..4, 0_u64..4, any::<bool>()),
        (keys, fallback) in (0_usize..3, any::<bool>()),
        seed in any::<u64>(),
    ) {
        check(Weather { victims, faults, outage, keys, fallback, ..PLAIN }, &moves, seed)?;
    }

    #[test]
    fn no_sequence_of_one_keys_requests_takes_the_pace_of_an_upstream_from_others(
        moves in prop::collection::vec(a_move(), 1..12),
        (victims, faults, outage) in (1_usize..4, 0_u64..4, any::<bool>()),
        (keys, fallback, has_equal) in (0_usize..3, any::<bool>(), any::<bool>()),
        requests_per_minute in 600_u32..3000,
        seed in any::<u64>(),
    ) {
        check(Weather { victims, faults, outage, keys, fallback, requests_per_minute, has_equal }, &moves, seed)?;
    }
}

/// The published rate is kept, whatever the requests do, and the wait for it opens no breaker.
#[test]
fn a_published_rate_is_kept_and_the_wait_for_it_is_no_fault_of_the_provider() {
    let weather = Weather { requests_per_minute: SCARCE, ..PLAIN };
    let first_token_timeout = Some(Duration::from_secs(3));
    let world = World::paced(1, weather.pace(), ModelConfig { first_token_timeout, ..over("a", "") });
    let mut open = Vec::new();
    let (mut answered, mut refused) = (0, 0);
    for tick in 0..4000 {
        if tick % 5 == 0 {
            open.push(world.ask_as("key_0", Surface::Chat));
        }
        open.retain_mut(|asking| {
            loop {
                match asking.poll() {
                    Poll::Ready(Ok(true)) => {}
                    Poll::Ready(Ok(false)) => {
                        answered += 1;
                        return false;
                    }
                    Poll::Ready(Err(failure)) => {
                        assert_eq!(failure.status(), 429, "{failure:?}");
                        assert!(failure.retry_after.is_some_and(|wait| !wait.is_zero()), "{failure:?}");
                        refused += 1;
                        return false;
                    }
                    Poll::Pending => return true,
                }
            }
        });
        assert_eq!(world.target("a").level(world.clock.now()), 0, "the provider is healthy");
        world.clock.advance(TICK);
    }
    let sent = world.double("a").opened();
    assert!((300..=SCARCE as usize).contains(&sent), "{sent} were sent in forty seconds");
    assert!(answered > 300 && refused > 200, "{answered} answered, {refused} refused");
}
