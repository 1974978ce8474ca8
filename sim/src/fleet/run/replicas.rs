//! Engines whose number follows the load: the real planner decides, and its decisions take time.
//!
//! A started engine serves after a while, with an empty cache. A stopped engine gets no new requests, finishes its
//! open ones, and is gone with its cache. Both count as running for all that time.

use super::{Event, Setup, World, add, engine};
use penstock_router::WorkerId;
use penstock_router::load::{Promises, Traffic, WorkerLoad};
use penstock_router::replicas::{Change, ReplicaLimits, Replicas as Planner, Sight};
use std::time::Duration;

/// Rules by which the number of engines follows the load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replicas {
    /// Rules of the planner; times are those of the objectives. The maximum is all engines.
    pub limits: ReplicaLimits,
    /// Seconds from the start of an engine until it serves.
    pub start: f64,
}

/// Cost of the engines in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// Seconds that engines ran, including their start and drain.
    pub seconds: f64,
    /// Most engines that ran at once.
    pub most: usize,
    /// Number of engines started because of the load.
    pub starts: u64,
    /// Number of engines stopped because of the load.
    pub stops: u64,
}

/// Planner of the number of engines, with the times for which each ran.
pub(super) struct Scaler {
    planner: Option<Planner>,
    pub(super) promises: Promises,
    /// Time since which each engine runs; `None` while it is stopped.
    since: Vec<Option<f64>>,
    pub(super) spent: Spent,
}

impl Scaler {
    pub(super) fn new(setup: &Setup) -> Self {
        let limits = setup.replicas.map(|replicas| ReplicaLimits {
            max: setup.engines,
            ttft: setup.slo.ttft,
            tpot: setup.slo.tpot,
            ..replicas.limits
        });
        let first = limits.map_or(setup.engines, |limits| limits.min.min(setup.engines));
        Self {
            planner: limits.map(Planner::new),
            promises: Promises::default(),
            since: (0..setup.engines).map(|at| (at < first).then_some(0.0)).collect(),
            spent: Spent { most: first, ..Spent::default() },
        }
    }

    /// Returns true if an engine runs or is starting.
    pub(super) fn has(&self, engine: usize) -> bool {
        self.since[engine].is_some()
    }

    /// Ends the run and returns the cost.
    pub(super) fn end(&mut self, now: f64) -> Spent {
        self.spent.seconds += self.since.iter_mut().filter_map(Option::take).map(|since| now - since).sum::<f64>();
        self.spent
    }
}

impl World<'_> {
    /// Records the first token of a request.
    pub(super) fn first_token(&mut self, request: usize, now: f64) {
        let slo = &self.setup.slo;
        let promised = slo.ttft + slo.ttft_per_thousand * self.trace.requests[request].input as f64 / 1000.0;
        let took = (now - self.outcomes[request].arrival).max(0.0);
        self.scaler.promises.first_token(Duration::from_secs_f64(took), Duration::from_secs_f64(promised));
    }

    /// Runs the planner; an engine may come or go.
    pub(super) fn look_replicas(&mut self, loads: &[WorkerLoad], traffic: Traffic, now: Duration) {
        self.end_empty();
        let late = self.scaler.promises.look();
        let there: Vec<WorkerLoad> =
            loads.iter().filter(|load| self.scaler.has(usize::from(load.worker.0))).copied().collect();
        let leaving = self.seats.iter().position(|seat| seat.leaving).map(|at| WorkerId(at as u8));
        let Some(planner) = &mut self.scaler.planner else { return };
        let change = planner.look(&Sight { loads: &there, leaving, traffic, late }, now).change;
        match change {
            None => {}
            Some(Change::Start) => self.start_engine(),
            Some(Change::Stop(worker)) => self.empty(usize::from(worker.0), true),
            Some(Change::Keep) => leaving.into_iter().for_each(|worker| self.empty(usize::from(worker.0), false)),
        }
    }

    fn start_engine(&mut self) {
        let Some(engine) = (0..self.seats.len()).find(|at| !self.scaler.has(*at)) else { return };
        let (now, start) = (self.seconds(), self.setup.replicas.map_or(0.0, |replicas| replicas.start));
        self.scaler.since[engine] = Some(now);
        let count = self.scaler.since.iter().flatten().count();
        self.scaler.spent.most = self.scaler.spent.most.max(count);
        self.scaler.spent.starts += 1;
        self.after(start, Event::Restart { engine });
    }

    fn empty(&mut self, engine: usize, leaves: bool) {
        self.seats[engine].leaving = leaves;
        self.placement.suspend(engine, leaves);
        if !leaves {
            self.dispatch();
        }
    }

    /// Ends engines that were stopped and have no request left.
    fn end_empty(&mut self) {
        let now = self.seconds();
        let is_done = |at: &usize| self.seats[*at].leaving && self.seats[*at].bound.is_empty();
        let Some(at) = (0..self.seats.len()).find(is_done) else { return };
        let seat = &mut self.seats[at];
        (seat.leaving, seat.alive, seat.stepping) = (false, false, None);
        seat.life += 1;
        seat.down.clear();
        seat.up.clear();
        self.placement.leave(at);
        add(&mut self.past[at], &self.engines[at].sums);
        self.engines[at] = engine(self.setup, at, self.store.clone());
        self.forsake(at);
        let since = self.scaler.since[at].take().unwrap_or(now);
        self.scaler.spent.seconds += now - since;
        self.scaler.spent.stops += 1;
    }
}
