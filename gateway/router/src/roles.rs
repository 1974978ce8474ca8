//! Which workers prefill for others, and when that should change: roles follow the load, one worker at a time.
//!
//! Each side has a load relative to what the operator promised: prefill workers by how long a prompt waits for them against the TTFT,
//! the others by how slow their steps are against the TPOT, and by how full they are. A worker changes sides when that would lower the
//! load of the worse side clearly, and would have done so for a while; then the pool rests. So noise flips nobody, and a shift of the
//! traffic flips one worker after another.
//!
//! ```text
//! load_prefill = (Σ busy + waiting seconds / TTFT) / workers      load_decode = Σ max(step / TPOT, KV fill, sequences / slots) / workers
//! flip when max(loads after) · (1 + gain) < max(loads now), `hold` long
//! ```
//! The rule for the first split of a pool of mixed workers: their steps break the TPOT while they prefill. Pure: time is an argument.

use crate::WorkerId;
use penstock_proto::frames::Role;
use std::time::Duration;

/// Share of their time that mixed workers may spend on prefill when the last prefill worker becomes one of them.
const IDLE: f64 = 0.05;

/// Load below which nobody's promise is in danger and roles stay as they are.
const CONTENT: f64 = 0.7;

/// How roles may move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoleLimits {
    /// Workers that prefill for others, at least; 0 lets a pool go back to mixed workers only.
    pub prefill_min: usize,
    /// Workers that decode, at least 1.
    pub decode_min: usize,
    /// What a worker of the decode side is called: [`Role::Decode`] or [`Role::Mixed`].
    pub decode_role: Role,
    /// Time to the first token that is promised, in seconds.
    pub ttft: f64,
    /// Time per later token that is promised, in seconds.
    pub tpot: f64,
    /// Share by which the worse side must be better off after a flip.
    pub gain: f64,
    /// How long a flip must look right before it is made.
    pub hold: Duration,
    /// How long nothing more is done after a flip.
    pub rest: Duration,
}

impl Default for RoleLimits {
    fn default() -> Self {
        Self {
            prefill_min: 0,
            decode_min: 1,
            decode_role: Role::Mixed,
            ttft: 1.0,
            tpot: 0.1,
            gain: 0.25,
            hold: Duration::from_secs(5),
            rest: Duration::from_secs(15),
        }
    }
}

/// One worker at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerLoad {
    /// The worker.
    pub worker: WorkerId,
    /// Its role now.
    pub role: Role,
    /// Whether it takes requests; others are neither counted nor flipped.
    pub ready: bool,
    /// Share of the last seconds in which it computed prefill, 0 to 1.
    pub prefill_busy: f64,
    /// Prefill seconds that wait there.
    pub queue_seconds: f64,
    /// Seconds of its steps.
    pub step_seconds: f64,
    /// Share of its KV that is held, 0 to 1.
    pub fill: f64,
    /// Sequences that run there.
    pub running: u32,
    /// Sequences that can.
    pub sequences_max: u32,
}

impl WorkerLoad {
    fn prefills_for_others(&self) -> bool {
        self.role == Role::Prefill
    }

    /// `alone`: as it would be without the prefill that it does beside.
    fn decode_load(&self, limits: &RoleLimits, alone: bool) -> f64 {
        let share = if alone { 1.0 - self.prefill_busy.clamp(0.0, 1.0) } else { 1.0 };
        let step = if self.running > 0 { share * self.step_seconds / limits.tpot } else { 0.0 };
        let slots = f64::from(self.running) / f64::from(self.sequences_max.max(1));
        step.max(self.fill).max(slots)
    }
}

/// A change of one worker's role.
#[derive(Clone, Debug, PartialEq)]
pub struct Flip {
    /// The worker.
    pub worker: WorkerId,
    /// What it was.
    pub from: Role,
    /// What it should be.
    pub to: Role,
    /// Loads of the prefill and the decode side before.
    pub before: (f64, f64),
    /// The same as expected after.
    pub after: (f64, f64),
}

/// See the module header.
#[derive(Debug, Default)]
pub struct Planner {
    limits: RoleLimits,
    /// The direction that looks right, and since when.
    leaning: Option<(Role, Duration)>,
    rests_until: Duration,
}

/// Sums over one moment.
struct Sides {
    prefill_work: f64,
    /// As the decode side has it while others prefill for it, and while it does so itself.
    decode_work: f64,
    decode_work_beside: f64,
    prefill: usize,
    decode: usize,
}

impl Sides {
    fn loads(&self, moved: isize) -> (f64, f64) {
        let share = |work: f64, workers: isize| if workers > 0 { work / workers as f64 } else { 0.0 };
        let prefill = self.prefill as isize + moved;
        let decode = self.decode as isize - moved;
        // Without prefill workers the decode side does that work too.
        match prefill {
            0 => (0.0, share(self.prefill_work + self.decode_work_beside, decode)),
            _ => (share(self.prefill_work, prefill), share(self.decode_work, decode)),
        }
    }
}

impl Planner {
    /// A planner that has seen nothing.
    pub fn new(limits: RoleLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Looks at the pool; `waiting`: prefill seconds that wait in the gateway. Call about once a second. The flip that should be made now
    /// comes out once; the planner then counts on it (or, in a dry run, on what the next look shows).
    pub fn look(&mut self, workers: &[WorkerLoad], waiting: f64, now: Duration) -> Option<Flip> {
        let ready: Vec<WorkerLoad> = workers.iter().filter(|load| load.ready).copied().collect();
        let flip = self.better(&ready, waiting);
        let to = flip.as_ref().map(|flip| flip.to);
        match (self.leaning, to) {
            (_, None) => self.leaning = None,
            (Some((was, _)), Some(to)) if was == to => {}
            (_, Some(to)) => self.leaning = Some((to, now)),
        }
        let since = self.leaning?.1;
        if now < self.rests_until || now.saturating_sub(since) < self.limits.hold {
            return None;
        }
        self.leaning = None;
        self.rests_until = now + self.limits.rest;
        flip
    }

    /// The best flip at this moment, if one is clearly better than none.
    fn better(&self, ready: &[WorkerLoad], waiting: f64) -> Option<Flip> {
        let limits = &self.limits;
        let sides = self.sides(ready, waiting);
        let before = sides.loads(0);
        let worst = |loads: (f64, f64)| loads.0.max(loads.1);
        let is_first = sides.prefill == 0;
        let moves = [
            (1, sides.decode > limits.decode_min.max(1) && (!is_first || splits(ready, limits))),
            // The last one goes back when there is next to nothing that would disturb the others again.
            (
                -1,
                sides.prefill > limits.prefill_min
                    && (sides.prefill > 1 || sides.prefill_work < IDLE * ready.len() as f64),
            ),
        ];
        let options = moves.into_iter().filter(|(_, allowed)| *allowed).map(|(moved, _)| (moved, sides.loads(moved)));
        let (moved, after) = options.min_by(|a, b| worst(a.1).total_cmp(&worst(b.1)))?;
        if worst(before) < CONTENT || worst(after) * (1.0 + limits.gain) >= worst(before) {
            return None;
        }
        let to = if moved > 0 { Role::Prefill } else { limits.decode_role };
        let candidates = ready.iter().filter(|load| load.prefills_for_others() == (moved < 0));
        // The one that has least to finish.
        let weight = |load: &WorkerLoad| load.queue_seconds + f64::from(load.running) * load.step_seconds;
        let chosen = candidates.min_by(|a, b| weight(a).total_cmp(&weight(b)))?;
        Some(Flip { worker: chosen.worker, from: chosen.role, to, before, after })
    }

    fn sides(&self, ready: &[WorkerLoad], waiting: f64) -> Sides {
        let limits = &self.limits;
        let prefill_work = waiting / limits.ttft;
        let mut sides = Sides { prefill_work, decode_work: 0.0, decode_work_beside: 0.0, prefill: 0, decode: 0 };
        for load in ready {
            sides.prefill_work += load.prefill_busy.clamp(0.0, 1.0) + load.queue_seconds.max(0.0) / limits.ttft;
            if load.prefills_for_others() {
                sides.prefill += 1;
            } else {
                sides.decode += 1;
                sides.decode_work += load.decode_load(limits, true);
                sides.decode_work_beside += load.decode_load(limits, false);
            }
        }
        sides
    }
}

/// Whether mixed workers' steps break the promise to those that decode, because they prefill.
fn splits(ready: &[WorkerLoad], limits: &RoleLimits) -> bool {
    let late =
        ready.iter().filter(|load| load.running > 1 && load.step_seconds > limits.tpot && load.prefill_busy > 0.1);
    2 * late.count() >= ready.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn load(worker: u8, role: Role) -> WorkerLoad {
        WorkerLoad {
            worker: WorkerId(worker),
            role,
            ready: true,
            prefill_busy: 0.0,
            queue_seconds: 0.0,
            step_seconds: 0.02,
            fill: 0.1,
            running: 4,
            sequences_max: 32,
        }
    }

    fn limits() -> RoleLimits {
        RoleLimits { prefill_min: 1, decode_role: Role::Decode, ..RoleLimits::default() }
    }

    /// Looks every second, for `seconds`, at a pool whose loads follow from its roles; the flips.
    fn live(
        planner: &mut Planner,
        roles: &mut [Role],
        from: u64,
        seconds: u64,
        see: impl Fn(&[Role], u64) -> Vec<WorkerLoad>,
    ) -> Vec<(u64, Flip)> {
        let mut flips = Vec::new();
        for second in from..from + seconds {
            if let Some(flip) = planner.look(&see(roles, second), 0.0, Duration::from_secs(second)) {
                roles[usize::from(flip.worker.0)] = flip.to;
                flips.push((second, flip));
            }
        }
        flips
    }

    /// Loads of a pool with so much prefill (worker seconds per second) and so many sequences that decode.
    fn pool(roles: &[Role], prefill: f64, sequences: f64) -> Vec<WorkerLoad> {
        let p = roles.iter().filter(|role| **role == Role::Prefill).count().max(1) as f64;
        let d = roles.iter().filter(|role| **role != Role::Prefill).count().max(1) as f64;
        let of = |(at, role): (usize, &Role)| match role {
            Role::Prefill => WorkerLoad {
                prefill_busy: (prefill / p).min(1.0),
                queue_seconds: (prefill / p - 1.0).max(0.0) * 3.0,
                running: 1,
                ..load(at as u8, *role)
            },
            _ => WorkerLoad {
                running: (sequences / d) as u32,
                step_seconds: 0.012 + 0.002 * sequences / d,
                fill: sequences / d / 50.0,
                ..load(at as u8, *role)
            },
        };
        roles.iter().enumerate().map(of).collect()
    }

    #[test]
    fn roles_follow_a_shift_of_the_load_and_then_stay() {
        let mut planner = Planner::new(limits());
        let mut roles = [Role::Prefill, Role::Decode, Role::Decode, Role::Decode];
        let flips = live(&mut planner, &mut roles, 0, 120, |roles, _| pool(roles, 1.9, 20.0));
        let told: Vec<_> = flips.iter().map(|(second, flip)| (*second, flip.to)).collect();
        assert_eq!(told, [(5, Role::Prefill), (20, Role::Prefill)], "{flips:?}");
        // Long answers come instead of long prompts.
        let flips = live(&mut planner, &mut roles, 120, 120, |roles, _| pool(roles, 0.3, 150.0));
        assert_eq!(flips.iter().map(|(_, flip)| flip.to).collect::<Vec<_>>(), [Role::Decode; 2]);
        assert_eq!(roles.iter().filter(|role| **role == Role::Prefill).count(), 1, "one has to stay");
    }

    #[test]
    fn a_mixed_pool_is_split_only_when_its_steps_break_the_promise() {
        let mixed = |step: f64, busy: f64| {
            move |roles: &[Role], _: u64| -> Vec<WorkerLoad> {
                let of = |(at, role): (usize, &Role)| match role {
                    Role::Prefill => WorkerLoad { prefill_busy: 0.5, running: 1, ..load(at as u8, *role) },
                    _ if roles.contains(&Role::Prefill) => load(at as u8, *role),
                    _ => WorkerLoad { step_seconds: step, prefill_busy: busy, running: 8, ..load(at as u8, *role) },
                };
                roles.iter().enumerate().map(of).collect()
            }
        };
        let mut roles = [Role::Mixed; 3];
        let quiet = live(&mut Planner::default(), &mut roles, 0, 60, mixed(0.05, 0.6));
        assert_eq!(quiet, []);
        let flips = live(&mut Planner::default(), &mut roles, 0, 60, mixed(0.3, 0.6));
        assert_eq!((flips.len(), flips[0].1.to, roles[1]), (1, Role::Prefill, Role::Mixed));
        // Nothing to do any more: it goes back.
        let mut planner = Planner::default();
        let idle = |roles: &[Role], _: u64| pool(roles, 0.0, 60.0);
        live(&mut planner, &mut roles, 100, 60, idle);
        assert_eq!(roles, [Role::Mixed; 3]);
    }

    #[test]
    fn a_burst_flips_nobody() {
        let mut roles = [Role::Prefill, Role::Decode, Role::Decode];
        let bursts = |roles: &[Role], second: u64| pool(roles, if second % 8 < 4 { 2.5 } else { 0.5 }, 20.0);
        assert_eq!(live(&mut Planner::new(limits()), &mut roles, 0, 200, bursts), []);
    }

    #[test]
    fn workers_that_are_not_ready_are_left_alone() {
        let mut planner = Planner::new(limits());
        let mut loads = pool(&[Role::Prefill, Role::Decode, Role::Decode], 3.0, 4.0);
        (loads[1].ready, loads[2].ready) = (false, false);
        for second in 0..100 {
            assert_eq!(planner.look(&loads, 9.0, Duration::from_secs(second)), None);
        }
    }

    proptest! {
        #[test]
        fn both_sides_keep_their_least_and_flips_are_apart(
            seen in prop::collection::vec((0.0..4.0_f64, 0.0..200.0_f64), 200), count in 2..6_usize
        ) {
            let mut planner = Planner::new(limits());
            let mut roles = vec![Role::Decode; count];
            roles[0] = Role::Prefill;
            let mut last: Option<u64> = None;
            for (second, (prefill, sequences)) in (0..).zip(seen) {
                let loads = pool(&roles, prefill, sequences);
                if let Some(flip) = planner.look(&loads, 0.0, Duration::from_secs(second)) {
                    prop_assert!(last.is_none_or(|last| second - last >= 15));
                    last = Some(second);
                    let role = &mut roles[usize::from(flip.worker.0)];
                    prop_assert_eq!(*role, flip.from);
                    *role = flip.to;
                }
                let prefill = roles.iter().filter(|role| **role == Role::Prefill).count();
                prop_assert!(prefill >= 1 && prefill < count);
            }
        }
    }
}
