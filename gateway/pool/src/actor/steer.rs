//! Effects of an operator's orders to one worker: hold, release, restart, set the role. Their rules are in `steering.rs`.

use super::super::steering::{Overdue, Resumed, Steering};
use super::super::supervisor::Order;
use super::super::{Steer, SteerError};
use super::Actor;
use penstock_proto::frames::DownBody;
use penstock_router::WorkerId;
use std::time::{Duration, Instant};
use tracing::{info, warn};

impl Actor {
    /// Carries out an operator's order, or says why not.
    pub(super) fn steer(&mut self, name: &str, steer: Steer) -> Result<(), SteerError> {
        let worker = self.members.named(name).ok_or(SteerError::NotFound)?;
        self.members[worker].check_order(steer)?;
        match steer {
            Steer::Hold => {
                self.config.holds.set(name, true);
                self.hold(worker, Steering::Held);
            }
            Steer::Release => {
                self.config.holds.set(name, false);
                self.release(worker);
            }
            Steer::Restart { patience } => {
                self.restart(worker, patience)?;
                // The restart of a worker that serves takes the place of the hold.
                self.config.holds.set(name, self.members[worker].steering == Steering::Held);
            }
            Steer::Role(role) => self.set_role(worker, role),
        }
        info!(worker = %name, ?steer, "worker state changed by an operator");
        let now = Instant::now();
        self.note_nobody(now);
        self.publish(now);
        Ok(())
    }

    pub(super) fn hold(&mut self, worker: WorkerId, steering: Steering) {
        self.members[worker].steering = steering;
        self.placement.router.suspend(worker, true);
        self.moves.is_due = true;
    }

    pub(super) fn release(&mut self, worker: WorkerId) {
        self.members[worker].steering = Steering::Free;
        if self.members[worker].takes_requests() {
            self.placement.router.suspend(worker, false);
        }
    }

    pub(super) fn restart(&mut self, worker: WorkerId, patience: Duration) -> Result<(), SteerError> {
        if !self.processes.has(worker) {
            return Err(SteerError::Elsewhere);
        }
        let (asked, member) = (Instant::now(), &self.members[worker]);
        if member.link.is_none() {
            // The worker serves nobody: no need to wait for anything.
            self.processes.order(worker, Order::Kill);
            return Ok(());
        }
        let restarting = Steering::Restarting { epoch: member.epoch(), asked, until: asked + patience };
        self.hold(worker, restarting);
        self.members.send(worker, DownBody::Drain(restarting.drain(asked)));
        Ok(())
    }

    /// Re-applies the order in force to a new session: a restart is complete if the epoch has changed.
    pub(super) fn steer_ready(&mut self, worker: WorkerId) {
        self.follow_hold(worker);
        let member = &self.members[worker];
        match member.steering.resumed(member.epoch(), Instant::now()) {
            Resumed::Nothing => {}
            Resumed::Release => self.release(worker),
            Resumed::Suspend => self.placement.router.suspend(worker, true),
            Resumed::Drain(order) => {
                self.placement.router.suspend(worker, true);
                self.members.send(worker, DownBody::Drain(order));
            }
        }
    }

    fn follow_hold(&mut self, worker: WorkerId) {
        let member = &self.members[worker];
        let Some(is_held) = member.to_hold(&self.config.holds) else { return };
        info!(pool = %self.config.id, worker = %member.name, is_held, "worker drained or resumed, as an operator has told another pool or process");
        if is_held {
            self.hold(worker, Steering::Held);
        } else {
            self.release(worker);
        }
    }

    /// Follows the holds that another pool of these workers was told, and ends restarts whose worker does not drain, or whose time is over.
    pub(super) fn steer_tick(&mut self, now: Instant) {
        for worker in self.members.ids() {
            self.follow_hold(worker);
            let member = &mut self.members[worker];
            match member.overdue(now) {
                None => {}
                Some(Overdue::Refuses) => {
                    warn!(worker = %member.name, "worker does not restart: it did not begin to drain, as when another gateway uses it");
                    self.release(worker);
                }
                Some(Overdue::Kill) => {
                    warn!(worker = %member.name, requests = member.bound.len(), "worker is killed for a restart: its open requests did not end in time");
                    member.steering = Steering::Free;
                    self.processes.order(worker, Order::Kill);
                }
            }
        }
    }
}
