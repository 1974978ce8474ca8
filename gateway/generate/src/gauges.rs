//! Gauges of a pool for a scrape: its load now, and counters that go on over the lives of its workers.

use penstock_proto::frames::{NoticeKind, Role, Throttle, Tier, TierState};

use penstock_pool::{Counts, MoveCause, PoolStatus, ReplicaStatus, Sums, WorkerPhase, WorkerStatus};
use penstock_telemetry::Gauge;

type Out<'a> = &'a mut dyn FnMut(Gauge, f64);

/// Reports every gauge and counter of the pool from one snapshot.
pub(super) fn pool(status: &PoolStatus, out: Out<'_>) {
    let sums = status.sums();
    load(status, out);
    engines(&sums, out);
    transfers(&sums, out);
    guides(status, &sums, out);
    for tier in [Tier::Host, Tier::Disk, Tier::Remote] {
        self::tier(tier, status, &sums, out);
    }
    router(&status.counts, out);
    changes(&status.counts, out);
    if let Some(status) = &status.replicas {
        replicas(status, out);
    }
}

fn replicas(status: &ReplicaStatus, out: Out<'_>) {
    out(Gauge::WorkersWanted, status.wanted as f64);
    out(Gauge::WorkersLoad, status.load);
    out(Gauge::ReplicaChanges("start"), status.starts as f64);
    out(Gauge::ReplicaChanges("stop"), status.stops as f64);
    out(Gauge::ReplicaFailures, status.failures as f64);
}

fn load(status: &PoolStatus, out: Out<'_>) {
    let sum = |of: fn(&WorkerStatus) -> f64| status.workers.iter().map(of).sum::<f64>();
    out(Gauge::QueueWaiting, status.waiting as f64);
    out(Gauge::SequencesWaiting, sum(|worker| f64::from(worker.state.waiting)));
    out(Gauge::SequencesRunning, sum(|worker| f64::from(worker.state.running)));
    out(Gauge::BlocksTotal, sum(|worker| f64::from(worker.state.blocks_total)));
    out(Gauge::BlocksFree, sum(|worker| f64::from(worker.state.blocks_free)));
    out(Gauge::BlocksCached, sum(|worker| f64::from(worker.state.blocks_cached)));
    out(Gauge::WorkersReady, sum(|worker| f64::from(u8::from(worker.phase == WorkerPhase::Ready))));
    out(Gauge::WorkersPrefill, sum(|worker| f64::from(u8::from(worker.state.role() == Role::Prefill))));
    out(Gauge::WorkerStarts, sum(|worker| worker.starts as f64));
    for (how, at) in [("packed", 0), ("found", 1)] {
        out(Gauge::WorkerLoads(how), status.workers.iter().map(|worker| worker.shared_loads[at] as f64).sum());
    }
    // One copy, however many workers map it.
    let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready);
    let shared = ready.map(|worker| worker.shared_weights_bytes).max();
    out(Gauge::SharedWeightsBytes, shared.unwrap_or(0) as f64);
    out(Gauge::WorkerDeaths, sum(|worker| worker.deaths as f64));
    for kind in [NoticeKind::Transfer, NoticeKind::Tier] {
        let troubles = status.workers.iter().flat_map(|worker| &worker.troubles);
        out(Gauge::WorkerTroubles(kind.name()), troubles.filter(|trouble| trouble.kind == kind).count() as f64);
    }
}

/// Reports the figures of a worker's GPU, as far as they are known.
pub(super) fn gpu(worker: &WorkerStatus, out: &mut dyn FnMut(Gauge, &str, f64)) {
    let Some(gpu) = &worker.gpu else { return };
    let figures = [
        (Gauge::GpuMemoryUsed, gpu.memory_used_bytes.map(|bytes| bytes as f64)),
        (Gauge::GpuMemory, gpu.memory_total_bytes.map(|bytes| bytes as f64)),
        (Gauge::GpuUtilization, gpu.utilization),
        (Gauge::GpuMemoryUtilization, gpu.memory_utilization),
        (Gauge::GpuPower, gpu.power_watts),
        (Gauge::GpuPowerLimit, gpu.power_limit_watts),
        (Gauge::GpuClock("sm"), gpu.sm_clock_hertz.map(|hertz| hertz as f64)),
        (Gauge::GpuClock("memory"), gpu.memory_clock_hertz.map(|hertz| hertz as f64)),
        (Gauge::GpuTemperature, gpu.temperature_celsius.map(f64::from)),
        (Gauge::GpuEccErrors, gpu.ecc_errors.map(|count| count as f64)),
    ];
    for (gauge, value) in figures {
        value.into_iter().for_each(|value| out(gauge, &worker.name, value));
    }
    if let Some(in_force) = gpu.throttled() {
        for reason in Throttle::ALL {
            out(Gauge::GpuThrottled(reason.name()), &worker.name, f64::from(u8::from(in_force.contains(&reason))));
        }
    }
}

fn engines(sums: &Sums, out: Out<'_>) {
    out(Gauge::PrefixTokens, sums.prompt_tokens as f64);
    out(Gauge::PrefixTokensHit, sums.cached_tokens as f64);
    out(Gauge::OutputTokens, sums.output_tokens as f64);
    out(Gauge::Preemptions, sums.preemptions as f64);
    out(Gauge::ReasoningsClosed, sums.reasonings_closed as f64);
    out(Gauge::DraftTokens, sums.drafted_tokens as f64);
    out(Gauge::AcceptedDraftTokens, sums.accepted_tokens as f64);
}

fn transfers(sums: &Sums, out: Out<'_>) {
    let transfers = &sums.transfers;
    for (outcome, blocks) in ["used", "unused"].into_iter().zip(sums.prefetched) {
        out(Gauge::KvPrefetched(outcome), blocks as f64);
    }
    out(Gauge::KvTransfers("completed"), transfers.completed as f64);
    out(Gauge::KvTransfers("failed"), transfers.failed as f64);
    out(Gauge::KvTransfers("cancelled"), transfers.cancelled as f64);
    out(Gauge::KvTransferBlocks, transfers.blocks as f64);
    out(Gauge::KvTransferBytes, transfers.bytes as f64);
    out(Gauge::KvTransferSeconds, transfers.seconds);
    out(Gauge::KvTransferPrefillSeconds, transfers.prefill_seconds);
    out(Gauge::KvTransferHiddenSeconds, transfers.hidden_seconds);
    out(Gauge::KvTransferMemoryBytes, transfers.memory_bytes as f64);
    out(Gauge::KvTransferStreamBytes, transfers.stream_bytes as f64);
    out(Gauge::KvTransfersNext, transfers.asked_next as f64);
    out(Gauge::KvFirstTokens, transfers.first_tokens as f64);
}

fn guides(status: &PoolStatus, sums: &Sums, out: Out<'_>) {
    let states = || status.workers.iter().filter_map(|worker| worker.state.guides);
    out(Gauge::GuidedSequences, states().map(|guides| f64::from(guides.sequences)).sum());
    out(Gauge::GrammarMaskSecondsMax, states().map(|guides| guides.mask_seconds_max).fold(0.0, f64::max));
    let guides = &sums.guides;
    out(Gauge::JumpedTokens, guides.jumped_tokens as f64);
    out(Gauge::GrammarMasks, guides.masks as f64);
    out(Gauge::GrammarMaskSeconds, guides.mask_seconds);
    out(Gauge::GrammarsCompiled, guides.compiled as f64);
    out(Gauge::GrammarCompileSeconds, guides.compile_seconds);
    out(Gauge::GuidedTooComplex, guides.too_complex as f64);
}

/// Gauges of one tier; none of a tier that the pool lacks.
fn tier(tier: Tier, status: &PoolStatus, sums: &Sums, out: Out<'_>) {
    let states = status.workers.iter().flat_map(|worker| &worker.state.tiers);
    let states: Vec<&TierState> = states.filter(|state| state.tier == tier as i32).collect();
    let counted = sums.tier(tier);
    if states.is_empty() && *counted == Default::default() {
        return;
    }
    out(Gauge::TierBlocks(tier), states.iter().map(|state| state.blocks_used as f64).sum());
    out(Gauge::TierBlocksTotal(tier), states.iter().map(|state| state.blocks_total as f64).sum());
    out(Gauge::TierLoads(tier), counted.loaded as f64);
    out(Gauge::TierLoadSeconds(tier), counted.load_seconds);
    out(Gauge::TierStores(tier), counted.stored as f64);
    out(Gauge::TierDrops(tier), counted.dropped as f64);
    out(Gauge::TierCorrupt(tier), counted.corrupt as f64);
    out(Gauge::TierLate(tier), counted.late as f64);
}

fn router(counts: &Counts, out: Out<'_>) {
    out(Gauge::RouterDecisions, counts.decisions as f64);
    out(Gauge::RouterDecisionSeconds, counts.decision_ns as f64 / 1e9);
    out(Gauge::RouterFirstTokens, counts.first_tokens as f64);
    out(Gauge::RouterFirstTokenSeconds, counts.ttft_us as f64 / 1e6);
    out(Gauge::RouterFirstTokenPredicted, counts.ttft_predicted_us as f64 / 1e6);
    out(Gauge::RouterFirstTokenError, counts.ttft_error_us as f64 / 1e6);
    out(Gauge::PrefilledApart, counts.prefilled_apart as f64);
}

/// Counters of requests and roles that changed their worker.
fn changes(counts: &Counts, out: Out<'_>) {
    out(Gauge::RoleFlips, counts.role_flips as f64);
    out(Gauge::Resumes, counts.resumed as f64);
    out(Gauge::ResumesInexact, counts.resumed_inexact as f64);
    for (cause, (moves, failed)) in MoveCause::ALL.into_iter().zip(counts.moves.into_iter().zip(counts.moves_failed)) {
        out(Gauge::Moves(cause.name()), moves as f64);
        out(Gauge::MovesFailed(cause.name()), failed as f64);
    }
    out(Gauge::MovedBlocks, counts.moved_blocks as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_without_tiers_has_no_metrics_of_them() {
        let mut names = Vec::new();
        pool(&PoolStatus::default(), &mut |gauge, _| names.push(format!("{gauge:?}")));
        assert!(names.iter().all(|name| !name.starts_with("Tier")), "{names:?}");
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len(), "{names:?}");
    }
}
