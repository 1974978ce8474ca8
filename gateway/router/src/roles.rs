//! Planner of roles: workers that prefill for others follow the load, one worker at a time.
//!
//! Each side has a load relative to the operator's promises. The planner computes both loads for every split of the
//! workers, and moves one worker towards the split whose more loaded side is best off, when that is clearly better than
//! now and has been for a while; then the pool rests. So noise flips no worker, a shift of the traffic flips one after
//! another, and a pool does not stay where it is because the first step alone would help nobody.
//!
//! ```text
//! p prefill, d decode; W: seconds of prefill a second, and what waits for it against the TTFT; L: its share in long prompts
//! load_prefill = W·L / p                    own = W·(1 − L) / d, all of W / d where p is 0
//! load_decode  = max(own, step / TPOT, KV fill, (running + waiting) / slots)      step = (base + Σ(alone − base) / d) / (1 − own)
//! flip when max(loads of the best split) · (1 + gain) < max(loads now), `hold` long
//! ```
//! Only long prompts are computed apart, so only they are the prefill side's work. A request in the gateway's queue
//! waits for a place to decode as well: it counts for the prefill side only as far as that side is busy. A pool of
//! mixed workers is split for the first time when their steps break the TPOT while they prefill. Pure: time is an
//! argument.

use crate::WorkerId;
use crate::load::{Traffic, WorkerLoad};
use penstock_proto::frames::Role;
use std::time::Duration;

/// Share of time that mixed workers may spend on long prompts when the last prefill worker becomes mixed.
const IDLE: f64 = 0.05;

/// Largest share of a worker's time assumed to go to prefill.
const OWN_MAX: f64 = 0.95;

/// Divisor of [`RoleLimits::rest`] while the best split is more than one flip away.
const HURRY: u32 = 3;

/// Load below which no promise is in danger and roles stay as they are.
const CONTENT: f64 = 0.7;

/// Fewest workers per side, promises to keep, and times between flips.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoleLimits {
    /// Fewest workers that prefill for others; 0 lets a pool return to mixed workers only.
    pub prefill_min: usize,
    /// Fewest workers that decode, at least 1.
    pub decode_min: usize,
    /// Role of the workers on the decode side: [`Role::Decode`] or [`Role::Mixed`].
    pub decode_role: Role,
    /// TTFT in seconds that the pool promises.
    pub ttft: f64,
    /// TPOT in seconds that the pool promises.
    pub tpot: f64,
    /// Share by which the more loaded side must be better off after a flip.
    pub gain: f64,
    /// Time that a flip must look right before it is made.
    pub hold: Duration,
    /// Time after a flip in which no other one is made.
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

/// Change of one worker's role, with the loads that speak for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Flip {
    /// Id of the worker whose role changes.
    pub worker: WorkerId,
    /// Role that the worker has before the flip.
    pub from: Role,
    /// Role that the worker is to take on.
    pub to: Role,
    /// Loads of the prefill and the decode side before the flip.
    pub before: (f64, f64),
    /// Expected loads of both sides after the change that the flip leads to.
    pub after: (f64, f64),
}

/// Planner of the workers' roles in one pool; see the module header.
#[derive(Debug, Default)]
pub struct Planner {
    limits: RoleLimits,
    /// Role that looks right for a flip, and since when.
    leaning: Option<(Role, Duration)>,
    rests_until: Duration,
}

/// Sums of load over the workers of the prefill side and the decode side at one moment.
#[derive(Default)]
struct Sides {
    /// W of the module header, in long prompts and in others.
    long: f64,
    short: f64,
    /// Mean duration of an empty step on the decode side, and the sum of the step times above that.
    base: f64,
    above_base: f64,
    fill: f64,
    slots: f64,
    /// True if any worker has a sequence in decode.
    decodes: bool,
    prefill: usize,
    decode: usize,
    tpot: f64,
}

impl Sides {
    /// Loads of both sides with `moved` workers more on the prefill side.
    fn loads(&self, moved: isize) -> (f64, f64) {
        let decode = (self.decode as isize - moved).max(1) as f64;
        let prefill = (self.prefill as isize + moved).max(0) as f64;
        // Without prefill workers the others do that work too.
        let apart = if prefill > 0.0 { self.long / prefill } else { 0.0 };
        let own = (self.short + if prefill > 0.0 { 0.0 } else { self.long }) / decode;
        let step = (self.base + self.above_base / decode) / (1.0 - own.min(OWN_MAX));
        let step = if self.decodes { step / self.tpot } else { 0.0 };
        (apart, own.max(step).max(self.fill / decode).max(self.slots / decode))
    }
}

impl Planner {
    /// A planner with these limits that has seen no load yet.
    pub fn new(limits: RoleLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Looks at the pool, about once a second. A flip is returned once; the planner then counts on it (in a dry run, on
    /// what the next look shows).
    pub fn look(&mut self, workers: &[WorkerLoad], traffic: &Traffic, now: Duration) -> Option<Flip> {
        let ready: Vec<WorkerLoad> = workers.iter().filter(|load| load.ready).copied().collect();
        let better = self.better(&ready, traffic);
        let to = better.as_ref().map(|(flip, _)| flip.to);
        match (self.leaning, to) {
            (_, None) => self.leaning = None,
            (Some((was, _)), Some(to)) if was == to => {}
            (_, Some(to)) => self.leaning = Some((to, now)),
        }
        let since = self.leaning?.1;
        if now < self.rests_until || now.saturating_sub(since) < self.limits.hold {
            return None;
        }
        let (flip, distance) = better?;
        self.rests_until = now + self.limits.rest / if distance > 1 { HURRY } else { 1 };
        if distance <= 1 {
            self.leaning = None;
        }
        Some(flip)
    }

    /// First flip towards the best split, if that is clearly better than the present one, and the number of flips to it.
    fn better(&self, ready: &[WorkerLoad], traffic: &Traffic) -> Option<(Flip, usize)> {
        let limits = &self.limits;
        let sides = self.sides(ready, traffic);
        let before = sides.loads(0);
        let worst = |loads: (f64, f64)| loads.0.max(loads.1);
        let more = sides.decode.saturating_sub(limits.decode_min.max(1)) as isize;
        let more = if sides.prefill > 0 || splits(ready, limits) { more } else { 0 };
        // The last prefill worker returns only when its work would hardly disturb the others.
        let least = limits.prefill_min.max(usize::from(sides.long >= IDLE * ready.len() as f64));
        let less = sides.prefill.saturating_sub(least) as isize;
        let options = (-less..=more).filter(|moved| *moved != 0).map(|moved| (moved, sides.loads(moved)));
        let far = |moved: isize| moved.unsigned_abs();
        let (moved, after) =
            options.min_by(|a, b| worst(a.1).total_cmp(&worst(b.1)).then_with(|| far(a.0).cmp(&far(b.0))))?;
        if worst(before) < CONTENT || worst(after) * (1.0 + limits.gain) >= worst(before) {
            return None;
        }
        let to = if moved > 0 { Role::Prefill } else { limits.decode_role };
        let candidates = ready.iter().filter(|load| load.prefills_for_others() == (moved < 0));
        // The worker with least to finish.
        let weight = |load: &WorkerLoad| load.queue_seconds + f64::from(load.running) * load.step_seconds;
        let chosen = candidates.min_by(|a, b| weight(a).total_cmp(&weight(b)))?;
        Some((Flip { worker: chosen.worker, from: chosen.role, to, before, after }, far(moved)))
    }

    fn sides(&self, ready: &[WorkerLoad], traffic: &Traffic) -> Sides {
        let limits = &self.limits;
        let mut sides = Sides { tpot: limits.tpot, ..Sides::default() };
        let (mut work, mut busy, mut slots) = (0.0, 0.0, 0);
        for load in ready {
            let share = load.prefill_busy.clamp(0.0, 1.0);
            work += share + load.queue_seconds.max(0.0) / limits.ttft;
            if load.prefills_for_others() {
                sides.prefill += 1;
                busy += share;
            } else {
                sides.decode += 1;
                sides.base += load.base_seconds;
                sides.above_base += load.above_base();
                sides.decodes |= load.running > 0;
                sides.fill += load.fill;
                sides.slots += f64::from(load.running) / f64::from(load.sequences_max.max(1));
                slots += load.sequences_max.max(1);
            }
        }
        let long_share = traffic.long_share.clamp(0.0, 1.0);
        let waits_for_prefill = if sides.prefill > 0 { busy / sides.prefill as f64 } else { 1.0 };
        let waiting = traffic.waiting_seconds.max(0.0) / limits.ttft;
        sides.long = (work + waiting * waits_for_prefill) * long_share;
        sides.short = work * (1.0 - long_share);
        sides.base /= sides.decode.max(1) as f64;
        sides.slots += traffic.waiting as f64 * sides.decode as f64 / f64::from(slots.max(1));
        sides
    }
}

/// Returns true if prefill in mixed workers' steps breaks the promised TPOT.
fn splits(ready: &[WorkerLoad], limits: &RoleLimits) -> bool {
    let late =
        ready.iter().filter(|load| load.running > 1 && load.step_seconds > limits.tpot && load.prefill_busy > 0.1);
    2 * late.count() >= ready.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All prompts are long, none waits.
    const LONG: Traffic = Traffic { waiting: 0, waiting_seconds: 0.0, long_share: 1.0 };

    fn load(worker: u8, role: Role) -> WorkerLoad {
        WorkerLoad {
            worker: WorkerId(worker),
            role,
            ready: true,
            prefill_busy: 0.0,
            decode_busy: 0.0,
            queue_seconds: 0.0,
            step_seconds: 0.02,
            base_seconds: 0.01,
            fill: 0.1,
            running: 4,
            sequences_max: 32,
        }
    }

    fn limits() -> RoleLimits {
        RoleLimits { prefill_min: 1, decode_role: Role::Decode, ..RoleLimits::default() }
    }

    /// Runs the planner every second for `seconds` on a pool whose loads follow from its roles; returns the flips.
    fn live(
        planner: &mut Planner,
        roles: &mut [Role],
        from: u64,
        seconds: u64,
        see: impl Fn(&[Role], u64) -> Vec<WorkerLoad>,
    ) -> Vec<(u64, Flip)> {
        let mut flips = Vec::new();
        for second in from..from + seconds {
            if let Some(flip) = planner.look(&see(roles, second), &LONG, Duration::from_secs(second)) {
                roles[usize::from(flip.worker.0)] = flip.to;
                flips.push((second, flip));
            }
        }
        flips
    }

    /// Loads of a pool with this much prefill (worker seconds per second) and this many decoding sequences.
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
        assert_eq!(told, [(5, Role::Prefill), (10, Role::Prefill)], "{flips:?}");
        // Long answers arrive instead of long prompts.
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
        // Without load the worker returns.
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

    /// One more prefill worker helps nobody where four are needed, but is the way there.
    #[test]
    fn a_mixed_pool_goes_all_the_way() {
        let mut planner = Planner::default();
        let mut roles = [Role::Mixed; 8];
        let see = |roles: &[Role], _: u64| -> Vec<WorkerLoad> {
            let p = roles.iter().filter(|role| **role == Role::Prefill).count();
            let of = |(at, role): (usize, &Role)| match (role, p) {
                (Role::Prefill, p) => WorkerLoad {
                    prefill_busy: (4.0 / p as f64).min(1.0),
                    queue_seconds: (4.0 / p as f64 - 1.0).max(0.0),
                    ..load(at as u8, *role)
                },
                (_, 0) => {
                    WorkerLoad { prefill_busy: 0.5, step_seconds: 0.15, base_seconds: 0.07, ..load(at as u8, *role) }
                }
                _ => load(at as u8, *role),
            };
            roles.iter().enumerate().map(of).collect()
        };
        let flips = live(&mut planner, &mut roles, 0, 200, see);
        let prefill = roles.iter().filter(|role| **role == Role::Prefill).count();
        assert!((4..=6).contains(&prefill), "{prefill}: {flips:?}");
        assert_eq!(flips.len(), prefill, "nobody goes back and forth: {flips:?}");
    }

    #[test]
    fn who_waits_for_a_place_to_decode_makes_nobody_prefill() {
        let mut planner = Planner::new(limits());
        let loads: Vec<WorkerLoad> = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode]
            .into_iter()
            .enumerate()
            .map(|(at, role)| match role {
                Role::Prefill => WorkerLoad { running: 0, prefill_busy: 0.05, ..load(at as u8, role) },
                _ => WorkerLoad { running: 32, prefill_busy: 0.1, ..load(at as u8, role) },
            })
            .collect();
        let traffic = Traffic { waiting: 100, waiting_seconds: 5.0, long_share: 0.1 };
        let flips: Vec<Flip> =
            (0..30).filter_map(|second| planner.look(&loads, &traffic, Duration::from_secs(second))).collect();
        assert!(!flips.is_empty() && flips.iter().all(|flip| flip.to == Role::Decode), "{flips:?}");
    }

    #[test]
    fn workers_that_are_not_ready_are_left_alone() {
        let mut planner = Planner::new(limits());
        let mut loads = pool(&[Role::Prefill, Role::Decode, Role::Decode], 3.0, 4.0);
        (loads[1].ready, loads[2].ready) = (false, false);
        for second in 0..100 {
            assert_eq!(
                planner.look(
                    &loads,
                    &Traffic { waiting: 9, waiting_seconds: 9.0, ..LONG },
                    Duration::from_secs(second)
                ),
                None
            );
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
                if let Some(flip) = planner.look(&loads, &LONG, Duration::from_secs(second)) {
                    prop_assert!(last.is_none_or(|last| second - last >= 5));
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
