//! Model test of all counters: random histories must give the same answers on every store as on a model that shares no
//! code with them.

use std::collections::BTreeMap;

use penstock_store::conformance::nth;
use penstock_store::{Ask, Counters, Grant, MemoryCounters, Settlement, Window};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

/// Begin of the windows in Unix seconds.
const START: u64 = 6_000_000;

#[derive(Clone, Debug)]
enum Step {
    Take { holder: usize, asks: Vec<(usize, bool, u64, u64, bool, u64)>, whole: bool },
    Settle { holder: usize, counter: usize, leased: u64, spent: u64 },
    Wait(u64),
}

fn steps(count: usize) -> impl Strategy<Value = Vec<Step>> {
    // Fields: counter, sliding, maximum, wanted amount, all or nothing, lease time.
    let ask = (0..3usize, any::<bool>(), 0..60u64, 0..30u64, any::<bool>(), 0..40u64);
    let take = (0..3usize, prop::collection::vec(ask, 1..4), any::<bool>())
        .prop_map(|(holder, asks, whole)| Step::Take { holder, asks, whole });
    let settle = (0..3usize, 0..3usize, 0..30u64, 0..20u64).prop_map(|(holder, counter, leased, spent)| Step::Settle {
        holder,
        counter,
        leased,
        spent,
    });
    prop::collection::vec(prop_oneof![4 => take, 2 => settle, 1 => (1..25u64).prop_map(Step::Wait)], count)
}

fn name(counter: usize) -> String {
    format!("model:{counter}")
}

/// Window of a counter: counter 0 has no end; the others have windows of half a minute and a minute.
fn window(counter: usize, now: u64) -> Window {
    Window::at(now, [0, 30, 60][counter])
}

fn asks(asks: &[(usize, bool, u64, u64, bool, u64)], now: u64) -> Vec<Ask> {
    let mut out: Vec<Ask> = Vec::new();
    for &(counter, sliding, max, want, exact, lease) in asks {
        let counter_name = name(counter);
        if out.iter().all(|ask| ask.counter != counter_name) {
            out.push(Ask {
                counter: counter_name,
                window: window(counter, now),
                sliding,
                max,
                want,
                least: if exact { want } else { 0 },
                until: now + lease,
            });
        }
    }
    out
}

/// Model of the counters: all events so far, and the amounts that follow from them.
#[derive(Default)]
struct Model {
    spent: BTreeMap<(String, Window), u64>,
    leases: BTreeMap<(String, Window, String), (u64, u64)>,
}

impl Model {
    fn used(&self, counter: &str, window: Window, now: u64) -> u64 {
        let leased =
            self.leases.iter().filter(|((name, at, _), (_, until))| name == counter && *at == window && *until > now);
        let spent = self.spent.get(&(counter.to_owned(), window)).copied().unwrap_or(0);
        spent + leased.map(|(_, (amount, _))| amount).sum::<u64>()
    }

    fn take(&mut self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Vec<Grant> {
        let used: Vec<u64> = asks
            .iter()
            .map(|ask| {
                let mut used = self.used(&ask.counter, ask.window, now);
                if ask.sliding && ask.window.seconds > 0 {
                    let before = Window { start: ask.window.start - ask.window.seconds, ..ask.window };
                    let left = ask.window.start + ask.window.seconds - now;
                    used += (self.used(&ask.counter, before, now) * left).div_ceil(ask.window.seconds);
                }
                used
            })
            .collect();
        let mut got: Vec<u64> =
            asks.iter().zip(&used).map(|(ask, used)| ask.want.min(ask.max.saturating_sub(*used))).collect();
        let short: Vec<bool> = asks.iter().zip(&got).map(|(ask, got)| *got < ask.least).collect();
        for (got, short_one) in got.iter_mut().zip(&short) {
            if *short_one || whole && short.contains(&true) {
                *got = 0;
            }
        }
        let mut grants = Vec::new();
        for ((ask, used), granted) in asks.iter().zip(used).zip(got) {
            let place = (ask.counter.clone(), ask.window, holder.to_owned());
            let (amount, until) = self.leases.get(&place).copied().filter(|(_, until)| *until > now).unwrap_or((0, 0));
            self.leases.insert(place, (amount + granted, until.max(ask.until)));
            grants.push(Grant { granted, leased: amount + granted, used: used + granted });
        }
        // An empty lease has no end that could matter.
        self.leases.retain(|_, (amount, until)| *amount > 0 && *until > now);
        grants
    }

    fn settle(&mut self, holder: &str, one: &Settlement) {
        let place = (one.counter.clone(), one.window, holder.to_owned());
        if let Some((amount, _)) = self.leases.get_mut(&place) {
            *amount = amount.saturating_sub(one.leased);
        }
        self.leases.retain(|_, (amount, _)| *amount > 0);
        *self.spent.entry((one.counter.clone(), one.window)).or_default() += one.spent;
    }
}

/// Checks one history on one store.
async fn check(store: &dyn Counters, history: &[Step], name: &str) {
    let (mut model, mut now) = (Model::default(), START);
    let renamed = |counter: &str| format!("{name}:{counter}");
    for (at, step) in history.iter().enumerate() {
        match step {
            Step::Wait(seconds) => now += seconds,
            Step::Take { holder, asks: wanted, whole } => {
                let holder = format!("g{holder}");
                let asks = asks(wanted, now);
                let here: Vec<Ask> =
                    asks.iter().map(|ask| Ask { counter: renamed(&ask.counter), ..ask.clone() }).collect();
                let grants = store.take(&holder, &here, *whole, now).await.expect("taken");
                assert_eq!(grants, model.take(&holder, &asks, *whole, now), "step {at}: {asks:?} at {now}");
                for (ask, grant) in asks.iter().zip(&grants) {
                    assert!(grant.granted == 0 || grant.used <= ask.max, "step {at}: {ask:?} {grant:?}");
                }
            }
            Step::Settle { holder, counter, leased, spent } => {
                let holder = format!("g{holder}");
                let (counter, window) = (self::name(*counter), window(*counter, now));
                let one = Settlement { counter, window, leased: *leased, spent: *spent };
                let here = Settlement { counter: renamed(&one.counter), ..one.clone() };
                store.settle(&holder, nth(), &[here], now).await.expect("settled");
                model.settle(&holder, &one);
            }
        }
    }
}

/// Checks histories from a fixed seed, so that a failure can be reproduced.
pub(crate) async fn check_histories(store: &dyn Counters, count: usize) {
    let mut runner = TestRunner::deterministic();
    for number in 0..count {
        let history = steps(60).new_tree(&mut runner).expect("a history").current();
        check(store, &history, &format!("h{number}")).await;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn in_memory_they_follow_the_model(history in steps(120)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(check(&MemoryCounters::default(), &history, "m"));
    }
}
