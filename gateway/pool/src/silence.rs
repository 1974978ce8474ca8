//! Silence of workers: the actor's own delays are no silence, and the consequences depend on who else serves.

use super::config::PoolConfig;
use super::member::{Doubt, Member, Session};
use super::members::Members;
use penstock_router::WorkerId;
use std::time::{Duration, Instant};

/// Ticks of the actor, by which its own delays are told from silences of workers.
pub(super) struct Silence {
    /// Interval at which the actor ticks.
    tick: Duration,
    last_tick: Instant,
}

/// Consequence of a worker's silence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Bind nothing new to the worker.
    pub(super) suspect: bool,
    /// Close the session: the worker's requests go on elsewhere.
    pub(super) give_up: bool,
    /// Kill the local process, which is then started again.
    pub(super) kill: bool,
}

impl Silence {
    /// Ticks at this interval from now on.
    pub(super) fn new(tick: Duration, now: Instant) -> Self {
        Self { tick, last_tick: now }
    }

    /// Takes in a tick. A late tick is this process's own delay (a busy machine, a suspend), not a worker's silence: it
    /// is added to the time at which each worker was heard last.
    pub(super) fn tick(&mut self, members: &mut Members, now: Instant) {
        let late = now.saturating_duration_since(self.last_tick).saturating_sub(self.tick);
        self.last_tick = now;
        for member in members.iter_mut() {
            member.heard = (member.heard + late).min(now);
            member.joining_since = member.joining_since.map(|since| (since + late).min(now));
        }
    }
}

impl Members {
    /// Judges the silence of a worker. `ahead`: predicted seconds of the prefill queued at the worker.
    pub(super) fn judge(&self, worker: WorkerId, config: &PoolConfig, ahead: f64, now: Instant) -> Verdict {
        let member = &self[worker];
        let doubt = member.doubt_now(config, ahead, now);
        let moves = || member.link.is_some() && self.any_other(worker, Member::takes_requests);
        // Without a link there is nothing to close: the session of a worker that loads ends by itself.
        let give_up = member.link.is_some() && doubt == Doubt::GiveUp || doubt == Doubt::Suspect && moves();
        let is_running = member.process.as_ref().is_some_and(|process| process.is_running);
        let is_silent = now.saturating_duration_since(member.heard) > config.kill_after;
        Verdict {
            give_up,
            suspect: !give_up && doubt == Doubt::Suspect && member.session == Session::Ready,
            kill: is_running && (is_silent || member.hangs(config, now)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::members::tests::{absent, connect};
    use super::*;
    use penstock_proto::frames::Loading;

    const ONE: WorkerId = WorkerId(0);
    const TICK: Duration = Duration::from_millis(200);
    const MOMENT: Duration = Duration::from_millis(1);

    #[test]
    fn a_silent_worker_is_suspected_alone_and_given_up_beside_others() {
        let now = Instant::now();
        let config = PoolConfig::new("a");
        let mut members = absent(2, now);
        let _far = connect(&mut members, ONE, 1, now);
        let check = |members: &Members, silence, expected| {
            assert_eq!(members.judge(ONE, &config, 0.0, now + silence), expected, "{silence:?}");
        };
        let suspect = Verdict { suspect: true, ..Verdict::default() };
        let give_up = Verdict { give_up: true, ..Verdict::default() };
        check(&members, config.suspect_after, Verdict::default());
        check(&members, config.suspect_after + MOMENT, suspect);
        check(&members, config.give_up_after + MOMENT, give_up);
        let _other = connect(&mut members, WorkerId(1), 1, now);
        check(&members, config.suspect_after + MOMENT, give_up);
        members[ONE].session = Session::Suspected;
        members[WorkerId(1)].state.draining = true;
        check(&members, config.suspect_after + MOMENT, Verdict::default());
    }

    #[test]
    fn a_worker_that_loads_is_given_up_by_its_session_alone() {
        let now = Instant::now();
        let config = PoolConfig::new("a");
        let mut members = absent(1, now);
        members[ONE].loads(Loading::default(), now);
        let verdict = members.judge(ONE, &config, 0.0, now + config.give_up_after + MOMENT);
        assert_eq!(verdict, Verdict::default(), "or the log would say so at each tick");
    }

    #[test]
    fn a_process_that_runs_and_stays_silent_is_killed() {
        let now = Instant::now();
        let config = PoolConfig::new("a");
        let mut members = absent(1, now);
        let kill = |members: &Members| members.judge(ONE, &config, 0.0, now + config.kill_after + MOMENT).kill;
        assert!(!kill(&members), "no process runs");
        members[ONE].process.iter_mut().for_each(|process| process.is_running = true);
        assert!(kill(&members));
    }

    #[test]
    fn a_process_that_answers_while_its_engine_hangs_is_killed() {
        let now = Instant::now();
        let config = PoolConfig::new("a");
        let mut members = absent(1, now);
        let _far = connect(&mut members, ONE, 1, now);
        members[ONE].end("given up");
        members[ONE].process.iter_mut().for_each(|process| process.is_running = true);
        let later = now + Duration::from_secs(601);
        for seconds in 0..=600 {
            let now = now + Duration::from_secs(seconds);
            assert!(!members.judge(ONE, &config, 0.0, now).kill, "{seconds}");
            members[ONE].loads(Loading::joining(), now);
        }
        assert!(members.judge(ONE, &config, 0.0, later).kill);
        members[ONE].answers();
        assert!(!members.judge(ONE, &config, 0.0, later).kill, "it was killed, or it answers");
    }

    #[test]
    fn a_late_tick_is_no_silence() {
        let now = Instant::now();
        let mut members = absent(1, now);
        let mut silence = Silence::new(TICK, now);
        silence.tick(&mut members, now + TICK);
        assert_eq!(members[ONE].heard, now);
        members[ONE].joining_since = Some(now + TICK);
        silence.tick(&mut members, now + 50 * TICK);
        assert_eq!((members[ONE].heard, members[ONE].joining_since), (now + 48 * TICK, Some(now + 49 * TICK)));
    }
}
