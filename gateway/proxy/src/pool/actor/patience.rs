//! How long requests wait for a worker.
//!
//! A model of some hundred megabytes is loaded again within seconds, one of a hundred gigabytes within minutes: a deadline that suits one is
//! wrong for the other. So where a worker comes, requests wait for a multiple of what its load took last, if that is longer than the deadline
//! of the config. A worker that ends again and again does not come, nor does one that nobody starts: for these only the config's deadlines
//! hold, and nobody waits whose deadline is over before the next try.

use super::super::config::PoolConfig;
use super::super::member::{Member, Process, Seat, Session};
use super::Actor;
use std::time::{Duration, Instant};

/// Retry-After where nothing is known about when a worker serves again.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Longest Retry-After: a client may try earlier than a worker serves, and waits with its request then.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// What is expected of a worker that does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coming {
    /// It loads, or will at that moment at the latest; its load takes so long, as far as that is known.
    Loads { begins: Instant, takes: Option<Duration> },
    /// It ends again and again; the next try is then.
    Loops(Instant),
    /// Nobody knows, or it will not.
    No,
}

/// How long requests wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Patience {
    /// A new one, for any worker to be ready.
    pub(super) ready: Duration,
    /// An interrupted one, for the same.
    pub(super) resume: Duration,
    /// Any, for a free worker.
    pub(super) queue: Duration,
    /// No worker comes before then, whoever waits; `None`: one may at any time.
    pub(super) nobody_before: Option<Instant>,
    /// What a client is told that has waited in vain.
    pub(super) retry_after: Duration,
}

impl Patience {
    /// From what is expected of each worker.
    pub(super) fn new(config: &PoolConfig, coming: &[Coming], now: Instant) -> Self {
        let loads = |coming: &Coming| match *coming {
            Coming::Loads { begins, takes: Some(takes) } => Some((begins.saturating_duration_since(now), takes)),
            _ => None,
        };
        let waits = coming.iter().filter_map(loads);
        let longest = waits.clone().map(|(pause, takes)| pause + takes.mul_f64(config.wait_loads)).max();
        let longest = longest.unwrap_or_default();
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
    /// What is expected of it, while it does not serve.
    pub(super) fn coming(&self, now: Instant) -> Coming {
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
            // It starts, or ends and is started again.
            (Some(_), Session::Absent { .. }) => loads(now),
            (Some(_), _) if self.state.draining => loads(now),
            _ => Coming::No,
        }
    }

    /// How long its load takes: as long as the last one, or longer, by how far this one is.
    fn takes(&self, now: Instant) -> Option<Duration> {
        let seen = match (&self.session, self.loading_since) {
            (Session::Loading(loading), Some(since)) if loading.bytes_done > 0 => {
                let whole = loading.bytes_total.max(loading.bytes_done) as f64 / loading.bytes_done as f64;
                let passed = now.saturating_duration_since(since);
                // At the very beginning a share says little.
                (whole < 20.0).then(|| passed.mul_f64(whole))
            }
            _ => None,
        };
        self.load.max(seen)
    }
}

impl Actor {
    /// How long requests wait, as things are.
    pub(super) fn patience(&self, now: Instant) -> Patience {
        let coming: Vec<Coming> = self.members.iter().map(|member| member.coming(now)).collect();
        Patience::new(&self.config, &coming, now)
    }

    /// How a worker ended, where that is why nobody serves.
    pub(super) fn last_end(&self) -> Option<&str> {
        self.members.iter().find_map(|member| member.process.as_ref()?.ended.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_proto::frames::Loading;

    const SECOND: Duration = Duration::from_secs(1);

    fn member(change: impl FnOnce(&mut Member)) -> Member {
        let address = "unix:///tmp/a.sock".parse().expect("an address");
        let mut member = Member::new("a-0".into(), address, true, Instant::now());
        member.load = Some(20 * SECOND);
        change(&mut member);
        member
    }

    #[track_caller]
    fn check(members: &[Member], now: Instant, expected: [u64; 3], nobody_before: Option<Instant>) {
        let coming: Vec<Coming> = members.iter().map(|member| member.coming(now)).collect();
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
        // One that runs elsewhere is counted on once it loads; until then it may never come.
        let elsewhere = |session| member(|member| (member.process, member.session) = (None, session));
        check(&[elsewhere(Session::Absent { why: "connection refused".into() })], now, [5, 30, 120], None);
        check(&[elsewhere(Session::Loading(Loading::default()))], now, [60, 60, 120], None);
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
