//! Deadlines of waiting requests.
//!
//! A model of some hundred megabytes loads within seconds, one of a hundred gigabytes within minutes: no fixed deadline
//! suits both. So while a worker is expected, requests wait for the config's deadline or a multiple of that worker's
//! last load time, whichever is longer. A worker in a crash loop is not expected, nor is one that nobody starts: for
//! these only the config's deadlines hold, and a request whose deadline lies before the next start fails at once.

use super::LOAD_MAX;
use super::config::PoolConfig;
use super::member::{Member, Process, Seat, Session};
use super::members::Members;
use std::time::{Duration, Instant};

/// Value of Retry-After while the time at which a worker serves again is unknown.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Longest Retry-After. A client that retries before a worker serves waits in the queue with its request.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Forecast for a worker that does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coming {
    /// The worker loads, or will begin to at `begins` at the latest. `takes`: expected load time, if known.
    Loads { begins: Instant, takes: Option<Duration> },
    /// The worker is in a crash loop; the next start is at this instant.
    Loops(Instant),
    /// The worker will not come, or nothing is known of it.
    No,
}

/// Longest waits of requests for a worker, as forecasts of starting workers extend them now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Patience {
    /// Longest wait of a new request for any worker to be ready.
    pub(super) ready: Duration,
    /// Longest wait of an interrupted request for any worker to be ready.
    pub(super) resume: Duration,
    /// Longest wait of any request for a free worker while some are ready.
    pub(super) queue: Duration,
    /// Earliest instant at which a worker can be there, if all are in crash loops; `None`: one may come at any time.
    pub(super) nobody_before: Option<Instant>,
    /// Retry-After of a request that has waited in vain, 1 to 60 s.
    pub(super) retry_after: Duration,
}

impl Patience {
    /// Deadlines as the workers are now.
    pub(super) fn of(config: &PoolConfig, members: &Members, now: Instant) -> Self {
        let on_demand = config.on_demand.is_some();
        let coming: Vec<Coming> = members.iter().map(|(_, member)| member.coming(on_demand, now)).collect();
        Self::new(config, &coming, now)
    }

    /// Returns true if a wait until `until` will end without a worker, while none serves: the request need not wait for its deadline.
    pub(super) fn is_in_vain(&self, until: Instant, now: Instant) -> bool {
        now >= until || self.nobody_before.is_some_and(|next| next >= until)
    }

    /// Computes the deadlines from the forecasts of all workers.
    fn new(config: &PoolConfig, coming: &[Coming], now: Instant) -> Self {
        let loads = |coming: &Coming| match *coming {
            Coming::Loads { begins, takes: Some(takes) } => Some((begins.saturating_duration_since(now), takes)),
            _ => None,
        };
        let waits = coming.iter().filter_map(loads);
        let longest = waits.clone().map(|(pause, takes)| pause + takes.mul_f64(config.wait_loads)).max();
        // On demand a worker starts for the request that waits, on a machine that may be busy with another model: no forecast bounds it.
        let comes = config.on_demand.is_some() && coming.iter().any(|one| matches!(one, Coming::Loads { .. }));
        let longest = longest.unwrap_or_default().max(if comes { LOAD_MAX } else { Duration::ZERO });
        let soonest = waits.map(|(pause, takes)| pause + takes).min();
        let tries = coming.iter().map(|coming| match coming {
            Coming::Loops(at) => Some(*at),
            _ => None,
        });
        let tries: Option<Vec<Instant>> = tries.collect();
        Self {
            ready: config.unavailable_after.max(longest),
            resume: config.resume_deadline.max(longest),
            queue: config.wait_max.max(longest),
            nobody_before: tries.and_then(|tries| tries.into_iter().min()),
            retry_after: soonest.unwrap_or(RETRY_AFTER).clamp(Duration::from_secs(1), RETRY_AFTER_MAX),
        }
    }
}

impl Member {
    /// Forecast of the time at which the worker will serve, while it does not. On demand a worker that is stopped, or stops, is started
    /// for the request that waits.
    fn coming(&self, on_demand: bool, now: Instant) -> Coming {
        let is_stopped = matches!(self.seat, Seat::Off | Seat::Ending(_) | Seat::Going(_));
        if on_demand && is_stopped && self.unsuited.is_none() {
            return Coming::Loads { begins: now, takes: self.takes(now) };
        }
        if self.unsuited.is_some() || !matches!(self.seat, Seat::On | Seat::Emptying(_)) {
            return Coming::No;
        }
        let loads = |begins| Coming::Loads { begins, takes: self.takes(now) };
        match (&self.process, &self.session) {
            (_, Session::Loading(_)) if self.process.as_ref().is_none_or(|process| !process.loops) => loads(now),
            (Some(Process { loops: true, down, .. }), _) => {
                Coming::Loops(down.as_ref().map_or(now, |(until, _)| *until))
            }
            (Some(Process { down: Some((until, _)), .. }), _) => loads(*until),
            // Starts, or ends and is started again.
            (Some(_), Session::Absent { .. }) => loads(now),
            (Some(_), _) if self.state.draining => loads(now),
            _ => Coming::No,
        }
    }

    /// Expected load time: the longer of the last load and the extrapolation of this one by its share of bytes done.
    fn takes(&self, now: Instant) -> Option<Duration> {
        let seen = match (&self.session, self.loading_since) {
            (Session::Loading(loading), Some(since)) if loading.bytes_done > 0 => {
                let whole = loading.bytes_total.max(loading.bytes_done) as f64 / loading.bytes_done as f64;
                let passed = now.saturating_duration_since(since);
                // A small share is no basis: extrapolation begins at 5 %.
                (whole < 20.0).then(|| passed.mul_f64(whole))
            }
            _ => None,
        };
        self.load.max(seen)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use penstock_proto::frames::Loading;

    const SECOND: Duration = Duration::from_secs(1);

    /// Deadlines of the default config while no worker is expected.
    pub(crate) fn patience() -> Patience {
        Patience::new(&PoolConfig::new("a"), &[], Instant::now())
    }

    fn member(change: impl FnOnce(&mut Member)) -> Member {
        let address = "unix:///tmp/a.sock".parse().expect("an address");
        let mut member = Member::new("a-0".into(), address, true, Instant::now());
        member.load = Some(20 * SECOND);
        change(&mut member);
        member
    }

    #[track_caller]
    fn check(members: &[Member], now: Instant, expected: [u64; 3], nobody_before: Option<Instant>) {
        let coming: Vec<Coming> = members.iter().map(|member| member.coming(false, now)).collect();
        let patience = Patience::new(&PoolConfig::new("a"), &coming, now);
        let seconds = [patience.ready, patience.resume, patience.queue].map(|wait| wait.as_secs());
        assert_eq!((seconds, patience.nobody_before), (expected, nobody_before), "{coming:?}");
    }

    fn process(member: &mut Member) -> &mut Process {
        member.process.as_mut().expect("a local worker")
    }

    #[test]
    fn deadlines_follow_the_load_of_a_worker_that_comes() {
        let now = Instant::now();
        check(&[member(|member| process(member).is_running = true)], now, [60, 60, 120], None);
        check(
            &[member(|member| process(member).down = Some((now + 2 * SECOND, String::new())))],
            now,
            [62, 62, 120],
            None,
        );
        check(&[member(|member| member.load = Some(SECOND))], now, [5, 30, 120], None);
        check(&[member(|member| member.load = None)], now, [5, 30, 120], None);
        check(&[member(|member| member.load = Some(100 * SECOND))], now, [300, 300, 300], None);
        // A worker that runs elsewhere is expected once it loads; until then it may never come.
        let elsewhere = |session| member(|member| (member.process, member.session) = (None, session));
        check(&[elsewhere(Session::Absent { why: "connection refused".into() })], now, [5, 30, 120], None);
        check(&[elsewhere(Session::Loading(Loading::default()))], now, [60, 60, 120], None);
    }

    #[test]
    fn a_request_waits_through_a_load_on_demand() {
        let now = Instant::now();
        let mut config = PoolConfig::new("a");
        config.on_demand = Some(crate::OnDemand { keep_alive: None });
        let ready = |coming| Patience::new(&config, &[coming], now).ready;
        assert_eq!(ready(Coming::Loads { begins: now, takes: None }), LOAD_MAX);
        assert_eq!(ready(Coming::Loads { begins: now, takes: Some(SECOND) }), LOAD_MAX);
        assert_eq!(ready(Coming::Loops(now + SECOND)), config.unavailable_after);
    }

    #[test]
    fn a_stopped_worker_is_expected_on_demand_only() {
        let now = Instant::now();
        let off = member(|member| member.seat = Seat::Off);
        assert_eq!(off.coming(false, now), Coming::No);
        assert_eq!(off.coming(true, now), Coming::Loads { begins: now, takes: Some(20 * SECOND) });
        let unsuited = member(|member| (member.seat, member.unsuited) = (Seat::Off, Some("another model")));
        assert_eq!(unsuited.coming(true, now), Coming::No);
    }

    #[test]
    fn a_load_that_is_slower_than_the_last_is_waited_for() {
        let now = Instant::now();
        let loading = |bytes_done| {
            member(|member| {
                let loading = Loading { bytes_done, bytes_total: 100, ..Loading::default() };
                (member.session, member.loading_since) = (Session::Loading(loading), Some(now - 40 * SECOND));
            })
        };
        check(&[loading(50)], now, [240, 240, 240], None);
        check(&[loading(99)], now, [121, 121, 121], None);
        check(&[loading(0)], now, [60, 60, 120], None);
    }

    #[test]
    fn nobody_waits_for_a_worker_that_does_not_come() {
        let now = Instant::now();
        let looping = |retry_in: Duration| {
            member(|member| {
                process(member).loops = true;
                process(member).down = Some((now + retry_in, String::new()));
            })
        };
        check(&[looping(20 * SECOND)], now, [5, 30, 120], Some(now + 20 * SECOND));
        check(&[looping(20 * SECOND), looping(SECOND)], now, [5, 30, 120], Some(now + SECOND));
        check(&[looping(20 * SECOND), member(|_| {})], now, [60, 60, 120], None);
        check(&[member(|member| member.unsuited = Some("another model"))], now, [5, 30, 120], None);
        check(&[member(|member| member.seat = Seat::Off)], now, [5, 30, 120], None);
    }
}
