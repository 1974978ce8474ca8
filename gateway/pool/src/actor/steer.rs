//! An operator's orders to one worker: hold, release, restart, set the role.
//!
//! A held worker finishes its requests and gets no new ones. A worker to be restarted is held, told to exit when its
//! requests have finished, and killed when its time is over; requests that are then still open go on elsewhere or at
//! its next life.

use std::time::{Duration, Instant};

use penstock_proto::frames::{DownBody, Drain};
use penstock_router::WorkerId;
use tracing::{info, warn};

use super::super::member::Seat;
use super::super::steering::Steering;
use super::super::supervisor::Order;
use super::super::{Steer, SteerError};
use super::{Actor, DRAIN_NOTICE};

impl Actor {
    /// Carries out an operator's order, or says why not.
    pub(super) fn steer(&mut self, name: &str, steer: Steer) -> Result<(), SteerError> {
        let worker = self.members.named(name).ok_or(SteerError::NotFound)?;
        let is_restarting = matches!(self.members[worker].steering, Steering::Restarting { .. });
        let is_stopped = self.members[worker].seat != Seat::On;
        match steer {
            Steer::Hold | Steer::Release | Steer::Restart { .. } if is_stopped => return Err(SteerError::Stopped),
            Steer::Hold | Steer::Release if is_restarting => return Err(SteerError::Restarting),
            Steer::Hold => self.hold(worker, Steering::Held),
            Steer::Release => self.release(worker),
            Steer::Restart { patience } => self.restart(worker, patience)?,
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
        self.router.suspend(worker, true);
        self.moves.is_due = true;
    }

    pub(super) fn release(&mut self, worker: WorkerId) {
        self.members[worker].steering = Steering::Free;
        if self.members[worker].takes_requests() {
            self.router.suspend(worker, false);
        }
    }

    pub(super) fn restart(&mut self, worker: WorkerId, patience: Duration) -> Result<(), SteerError> {
        if !self.supervisors.contains_key(&worker) {
            return Err(SteerError::Elsewhere);
        }
        let (asked, member) = (Instant::now(), &self.members[worker]);
        let epoch = member.ready.as_ref().map_or(0, |ready| ready.epoch);
        if member.link.is_none() {
            // The worker serves nobody: no need to wait for anything.
            self.order(worker, Order::Kill);
            return Ok(());
        }
        self.hold(worker, Steering::Restarting { epoch, asked, until: asked + patience });
        self.members.send(worker, DownBody::Drain(Drain { exit: true }));
        Ok(())
    }

    /// Re-applies the order in force to a new session: a restart is complete if the epoch has changed.
    pub(super) fn steer_ready(&mut self, worker: WorkerId) {
        let member = &mut self.members[worker];
        let now = member.ready.as_ref().map_or(0, |ready| ready.epoch);
        match member.steering {
            Steering::Free => {}
            Steering::Restarting { epoch, .. } if epoch != now => self.release(worker),
            Steering::Held | Steering::Leaving => self.router.suspend(worker, true),
            Steering::Restarting { .. } => {
                self.router.suspend(worker, true);
                self.members.send(worker, DownBody::Drain(Drain { exit: true }));
            }
        }
    }

    /// Ends restarts whose worker does not drain, or whose time is over.
    pub(super) fn steer_tick(&mut self, now: Instant) {
        for worker in self.members.ids() {
            let member = &mut self.members[worker];
            let Steering::Restarting { asked, until, .. } = member.steering else { continue };
            let refuses = member.link.is_some() && !member.state.draining && now > asked + DRAIN_NOTICE;
            if refuses {
                warn!(worker = %member.name, "worker does not restart: it did not begin to drain, as when another gateway uses it");
                self.release(worker);
            } else if now >= until {
                warn!(worker = %member.name, requests = member.bound.len(), "worker is killed for a restart: its open requests did not end in time");
                member.steering = Steering::Free;
                self.order(worker, Order::Kill);
            }
        }
    }
}
