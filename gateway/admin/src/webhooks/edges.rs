//! What is told of a gateway's state, and when: each change once, and again only after the interval of repeats.
//!
//! A condition is true of an object (a budget, a provider, a worker, a key) for a while. Its begin is told as `firing`, its end as `resolved`. Budgets
//! that drain all the time end a little below where they begin (hysteresis), so that one at its threshold is not told again and again.
//! State in, events out: the clock is an argument.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use penstock_config::WebhookEvent as Kind;
use serde_json::{Value, json};

/// Most objects whose conditions are followed; further ones are not told.
const OBJECTS_MAX: usize = 4096;
/// Part of its threshold below which the condition of a budget ends.
const HYSTERESIS: f64 = 0.95;
/// Starts or deaths of a worker within [`LOOP_SPAN`] that are a restart loop.
const LOOP_COUNT: u64 = 3;
/// Span over which starts and deaths of a worker are counted.
const LOOP_SPAN: Duration = Duration::from_secs(15 * 60);

/// State of the gateway at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) budgets: Vec<Budget>,
    /// Ids of providers, each with whether it is down.
    pub(crate) providers: Vec<(String, bool)>,
    /// Names of workers with their starts and deaths.
    pub(crate) workers: Vec<(String, u64, u64)>,
    /// Ids of keys with their ends in Unix seconds.
    pub(crate) keys: Vec<(String, u64)>,
}

/// Use of one budget.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    pub(crate) limit: String,
    pub(crate) subject: String,
    pub(crate) measure: String,
    pub(crate) used: f64,
    pub(crate) max: f64,
}

/// Settings of what is told.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) events: Vec<Kind>,
    /// Thresholds of budgets in percent.
    pub(crate) budget_percents: Vec<u64>,
    /// Time before its end at which a key is about to expire.
    pub(crate) expiring: Duration,
    /// Interval at which a condition that lasts is told again; `None`: never.
    pub(crate) repeat: Option<Duration>,
}

/// Event to tell.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Event {
    pub(crate) kind: Kind,
    /// Object and facts about it, `state` and `repeated`.
    pub(crate) data: Value,
}

/// Moment of a condition: time since the process began, and Unix seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub(crate) since: Duration,
    pub(crate) unix: u64,
}

/// Conditions that hold, and counts from which restart loops are seen.
#[derive(Debug, Default)]
pub(crate) struct Edges {
    holding: BTreeMap<(Kind, String), Told>,
    counts: BTreeMap<String, VecDeque<(Duration, u64)>>,
}

#[derive(Debug)]
struct Told {
    at: Duration,
    data: Value,
}

impl Edges {
    /// Events of a look at the state.
    pub(crate) fn look(&mut self, seen: &Seen, rules: &Rules, now: Now) -> Vec<Event> {
        let mut conditions = BTreeMap::new();
        for kind in &rules.events {
            match kind {
                Kind::Budget => self.budgets(seen, rules, &mut conditions),
                Kind::ProviderDown => {
                    for (id, _) in seen.providers.iter().filter(|(_, is_down)| *is_down) {
                        conditions.insert((*kind, id.clone()), json!({ "provider": id }));
                    }
                }
                Kind::RestartLoop => self.loops(seen, now, &mut conditions),
                Kind::KeyExpiring => {
                    let until = now.unix.saturating_add(rules.expiring.as_secs());
                    for (id, end) in seen.keys.iter().filter(|(_, end)| (now.unix..=until).contains(end)) {
                        conditions.insert((*kind, id.clone()), json!({ "key": id, "expires": end }));
                    }
                }
            }
        }
        self.step(conditions, rules, now)
    }

    fn step(&mut self, conditions: BTreeMap<(Kind, String), Value>, rules: &Rules, now: Now) -> Vec<Event> {
        let mut out = Vec::new();
        self.holding.retain(|object, told| {
            let lasts = conditions.contains_key(object);
            if !lasts {
                out.push(event(object.0, &told.data, "resolved", false));
            }
            lasts
        });
        for (object, data) in conditions {
            let is_full = self.holding.len() >= OBJECTS_MAX;
            match self.holding.get_mut(&object) {
                None if is_full => {}
                None => {
                    out.push(event(object.0, &data, "firing", false));
                    self.holding.insert(object, Told { at: now.since, data });
                }
                Some(told) => {
                    told.data = data;
                    if rules.repeat.is_some_and(|repeat| now.since.saturating_sub(told.at) >= repeat) {
                        told.at = now.since;
                        out.push(event(object.0, &told.data, "firing", true));
                    }
                }
            }
        }
        out
    }

    fn budgets(&self, seen: &Seen, rules: &Rules, out: &mut BTreeMap<(Kind, String), Value>) {
        for Budget { limit, subject, measure, used, max } in seen.budgets.iter().filter(|budget| budget.max > 0.0) {
            for percent in &rules.budget_percents {
                let object = (Kind::Budget, format!("{limit}/{subject}/{measure}@{percent}"));
                let part = if self.holding.contains_key(&object) { HYSTERESIS } else { 1.0 };
                if used / max * 100.0 >= *percent as f64 * part {
                    let data = json!({
                        "limit": limit, "subject": subject, "measure": measure, "percent": percent, "used": used, "max": max,
                    });
                    out.insert(object, data);
                }
            }
        }
    }

    fn loops(&mut self, seen: &Seen, now: Now, out: &mut BTreeMap<(Kind, String), Value>) {
        self.counts.retain(|name, _| seen.workers.iter().any(|(worker, ..)| worker == name));
        for (name, starts, deaths) in seen.workers.iter().take(OBJECTS_MAX) {
            // The first start of a worker is none of a loop.
            let count = starts.saturating_sub(1).max(*deaths);
            let counts = self.counts.entry(name.clone()).or_default();
            if counts.back().is_none_or(|(_, last)| *last != count) {
                counts.push_back((now.since, count));
            }
            // The last count from before the span stays, as what the span began with.
            while counts.get(1).is_some_and(|(at, _)| now.since.saturating_sub(*at) >= LOOP_SPAN) {
                counts.pop_front();
            }
            let before = counts.front().map_or(count, |(_, first)| *first);
            if count.saturating_sub(before) >= LOOP_COUNT {
                let data = json!({ "worker": name, "restarts": count - before, "span_seconds": LOOP_SPAN.as_secs() });
                out.insert((Kind::RestartLoop, name.clone()), data);
            }
        }
    }
}

fn event(kind: Kind, data: &Value, state: &str, repeated: bool) -> Event {
    let mut data = data.clone();
    data["state"] = state.into();
    data["repeated"] = repeated.into();
    Event { kind, data }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        Rules {
            events: Kind::ALL.to_vec(),
            budget_percents: vec![80, 100],
            expiring: Duration::from_secs(1000),
            repeat: Some(Duration::from_secs(60)),
        }
    }

    /// Events of looks at those seconds, as `kind object state`.
    fn told(looks: &[(u64, Seen)], rules: &Rules) -> Vec<String> {
        let mut edges = Edges::default();
        let mut out = Vec::new();
        for (second, seen) in looks {
            let now = Now { since: Duration::from_secs(*second), unix: 10_000 + second };
            for Event { kind, data } in edges.look(seen, rules, now) {
                let object = ["subject", "provider", "worker", "key"].iter().find_map(|key| data[*key].as_str());
                let percent = data["percent"].as_u64().map_or_else(String::new, |percent| format!("@{percent}"));
                let again = if data["repeated"] == true { " again" } else { "" };
                let state = data["state"].as_str().unwrap_or_default();
                out.push(format!("{second} {} {}{percent} {state}{again}", kind.name(), object.unwrap_or_default()));
            }
        }
        out
    }

    fn budget(used: f64) -> Seen {
        let (limit, subject, measure) = ("l".into(), "team".into(), "usd_per_month".into());
        Seen { budgets: vec![Budget { limit, subject, measure, used, max: 10.0 }], ..Seen::default() }
    }

    #[test]
    fn each_threshold_is_told_once_and_a_draining_one_does_not_flap() {
        let looks = [(0, 7.9), (1, 8.0), (2, 8.5), (3, 7.9), (4, 8.1), (5, 10.0), (6, 9.8), (7, 7.4), (8, 8.0)]
            .map(|(at, used)| (at, budget(used)));
        assert_eq!(
            told(&looks, &rules()),
            [
                "1 budget.threshold team@80 firing",
                "5 budget.threshold team@100 firing",
                "7 budget.threshold team@100 resolved",
                "7 budget.threshold team@80 resolved",
                "8 budget.threshold team@80 firing",
            ]
        );
    }

    #[test]
    fn what_lasts_is_told_again_after_the_interval_and_not_before() {
        let down =
            |is_down| Seen { providers: vec![("acme".into(), is_down), ("other".into(), false)], ..Seen::default() };
        let looks: Vec<_> = [0, 1, 30, 59, 60, 61, 119, 120]
            .into_iter()
            .map(|at| (at, down(true)))
            .chain([(121, down(false))])
            .collect();
        assert_eq!(
            told(&looks, &rules()),
            [
                "0 provider.down acme firing",
                "60 provider.down acme firing again",
                "120 provider.down acme firing again",
                "121 provider.down acme resolved"
            ]
        );
        let never = Rules { repeat: None, ..rules() };
        assert_eq!(told(&looks, &never), ["0 provider.down acme firing", "121 provider.down acme resolved"]);
        assert_eq!(told(&looks, &Rules { events: vec![Kind::Budget], ..rules() }), [""; 0], "only what is asked for");
    }

    #[test]
    fn a_worker_that_starts_again_and_again_is_a_loop() {
        let worker = |starts, deaths| Seen { workers: vec![("w-0".into(), starts, deaths)], ..Seen::default() };
        let looks = [
            (0, worker(1, 0)),
            (10, worker(2, 1)),
            (20, worker(3, 2)),
            (30, worker(4, 3)),
            (40, worker(4, 3)),
            (2000, worker(4, 3)),
        ];
        assert_eq!(
            told(&looks, &Rules { repeat: None, ..rules() }),
            ["30 worker.restart_loop w-0 firing", "2000 worker.restart_loop w-0 resolved"]
        );
        let slow = [(0, worker(1, 0)), (800, worker(2, 0)), (1600, worker(3, 0)), (2400, worker(4, 0))];
        assert_eq!(told(&slow, &rules()), [""; 0]);
    }

    #[test]
    fn a_key_is_about_to_expire_until_it_has_expired() {
        let key = |end| Seen { keys: vec![("key_a".into(), end)], ..Seen::default() };
        let looks = [(0, key(11_500)), (500, key(11_500)), (1501, key(11_500))];
        assert_eq!(
            told(&looks, &Rules { repeat: None, ..rules() }),
            ["500 key.expiring key_a firing", "1501 key.expiring key_a resolved"]
        );
    }

    #[test]
    fn objects_are_bounded() {
        let providers = (0..OBJECTS_MAX + 10).map(|at| (format!("p{at}"), true)).collect();
        let seen = Seen { providers, ..Seen::default() };
        assert_eq!(told(&[(0, seen)], &rules()).len(), OBJECTS_MAX);
    }
}
