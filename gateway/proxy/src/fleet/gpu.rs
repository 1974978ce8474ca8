//! Room of pools on the GPU, which is the same one for all of them: the first that has kernels.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use penstock_config::PoolConfig;
use penstock_pool::{GpuLeavers, Pool};

use super::{GIVE_WAY, State, lock};

/// Longest time after the config came for which its workers wait for others to leave the GPU.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// Test of whether workers of pools that are to end still hold memory of the GPU.
///
/// While they do, a worker of another pool that finds too little memory there ends and is started again, until they are gone. If it took the CPU instead,
/// it would stay on the CPU after their end, too. The wait has an end ([`WAIT_MAX`]): a pool goes with the last request of any model that began before it
/// left the config, which may be open for hours.
pub(super) fn leavers(state: &Arc<Mutex<State>>) -> GpuLeavers {
    let (state, began) = (Arc::downgrade(state), Instant::now());
    GpuLeavers::new(move || {
        began.elapsed() < WAIT_MAX && state.upgrade().is_some_and(|state| lock(&state).to_end().any(holds))
    })
}

/// Returns true if a process of this machine that works for the pool may hold memory of the GPU.
fn holds(pool: &Pool) -> bool {
    pool.status().workers.iter().any(|worker| worker.is_local() && worker.is_on_gpu() != Some(false))
}

/// Number of a pool's workers that hold memory of the GPU, or may soon, where its config gives them one; `None`: they compute on the CPU, since others
/// held the GPU when they started.
pub(super) fn workers_on(config: &PoolConfig, pool: &Pool) -> Option<u64> {
    let status = pool.status();
    let running = match (pool.is_on_demand() && !status.is_ready(), &status.replicas) {
        (true, _) => 0,
        (false, Some(replicas)) => replicas.running as u64,
        (false, None) => config.workers as u64,
    };
    let seats: Vec<_> = status.workers.iter().map(|worker| worker.is_on_gpu()).collect();
    held(running, &seats)
}

/// Number of `running` workers that hold memory of the GPU or may soon; `None`: all that run compute on the CPU. `seats`: what each says of itself, empty
/// before any can.
fn held(running: u64, seats: &[Option<bool>]) -> Option<u64> {
    let may_hold = seats.iter().filter(|seat| **seat != Some(false)).count() as u64;
    match (running, may_hold) {
        (0, _) => Some(0),
        _ if seats.is_empty() => Some(running),
        (_, 0) => None,
        _ => Some(running.min(may_hold)),
    }
}

/// Checks that a GPU has room for `held` workers of one config and `new` ones of another beside each other, whatever each does with its share. A worker
/// without a share may have all that is free.
pub(super) fn fit((old, held): (&PoolConfig, u64), (asked, new): (&PoolConfig, u64)) -> Result<(), String> {
    const ALL: u64 = 1_000_000;
    let of = |config: &PoolConfig, workers: u64| config.gpu_memory_millionths.map(|share| u64::from(share) * workers);
    if held == 0 {
        return Ok(());
    }
    let lacking = "its new workers would start on the GPU while the old workers still hold memory there";
    match (of(old, held), of(asked, new)) {
        (Some(old), Some(new)) if old + new <= ALL => Ok(()),
        (Some(old), Some(new)) => {
            let all = (old + new) as f64 / ALL as f64;
            Err(format!(
                "{lacking}, and the gpu_memory_share of all of them is {all} together, more than 1: {GIVE_WAY}"
            ))
        }
        _ => Err(format!("{lacking}, and not both have a gpu_memory_share: {GIVE_WAY}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_that_compute_on_the_cpu_hold_nothing_of_the_gpu() {
        let (gpu, cpu, unknown) = (Some(true), Some(false), None);
        assert_eq!(held(2, &[cpu, cpu]), None, "other processes held it");
        assert_eq!(held(2, &[gpu, cpu]), Some(1));
        assert_eq!(held(2, &[gpu, gpu]), Some(2));
        assert_eq!(held(2, &[unknown, cpu]), Some(1), "it may take one yet");
        assert_eq!((held(2, &[]), held(0, &[cpu])), (Some(2), Some(0)), "none has said anything, none runs");
    }
}
