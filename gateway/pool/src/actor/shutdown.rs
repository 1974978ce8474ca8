//! End of a pool: open requests fail, local workers exit or stay.

use super::super::Leave;
use super::super::failure::Failure;
use super::super::member::Member;
use super::super::steering::{DRAIN_NOTICE, EXIT};
use super::super::supervisor::Order;
use super::Actor;
use penstock_proto::ErrorKind;
use penstock_proto::frames::DownBody;
use std::time::Instant;
use tokio::sync::oneshot;
use tracing::info;

/// Shutdown in progress: open requests may finish until the deadline.
pub(super) struct Ending {
    pub(super) leave: Leave,
    pub(super) deadline: Instant,
    pub(super) done: oneshot::Sender<()>,
}

impl Actor {
    /// Ends the pool: fails the open requests, then lets local workers exit or stay ([`Leave`]).
    pub(super) async fn end(&mut self) {
        let Some(ending) = self.ending.take() else { return };
        self.fail_all(&Failure::new(ErrorKind::Draining, "the gateway is shutting down"));
        if ending.leave == Leave::Exit {
            self.end_workers().await;
        }
        // Err when the caller stopped waiting.
        let _ = ending.done.send(());
    }

    /// Asks the local workers to exit and waits for them. A worker that another gateway also holds does not drain and
    /// stays for that gateway.
    async fn end_workers(&mut self) {
        let mut orders = self.processes.take();
        for (worker, orders) in &orders {
            // A full queue holds an order that ends the process.
            let _ = orders.try_send(Order::Told);
            self.members.send(*worker, DownBody::Drain(EXIT));
        }
        let until = tokio::time::Instant::now() + DRAIN_NOTICE;
        let refuses = |member: &Member| member.link.is_some() && !member.state.draining;
        while orders.iter().any(|(worker, _)| refuses(&self.members[*worker])) {
            match tokio::time::timeout_at(until, self.inputs.events.recv()).await {
                Ok(Some(event)) => self.event(event),
                _ => break,
            }
        }
        let mut ends = Vec::new();
        for (worker, orders) in orders.drain(..) {
            let member = &mut self.members[worker];
            if refuses(member) {
                info!(worker = %member.name, "worker keeps running: another gateway is connected");
                continue;
            }
            let told = member.state.draining;
            let (ended, wait) = oneshot::channel();
            if orders.send(Order::End { told, ended }).await.is_ok() {
                ends.push(wait);
            }
        }
        for end in ends {
            // Err: the supervisor is gone, and so is its worker.
            let _ = end.await;
        }
    }
}
