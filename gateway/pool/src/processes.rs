//! Processes of this gateway's local workers: orders to the supervisor of each, and what its reports say of the worker.

use super::member::{Member, Seat};
use super::supervisor::{Order, Update};
use penstock_router::WorkerId;
use std::collections::HashMap;
use std::time::Instant;
use tokio::sync::mpsc;

/// Queues of orders to the supervisors, by the worker that each one watches over.
#[derive(Default)]
pub(super) struct Processes {
    supervisors: HashMap<WorkerId, mpsc::Sender<Order>>,
}

impl Processes {
    /// Notes the supervisor of a worker.
    pub(super) fn insert(&mut self, worker: WorkerId, orders: mpsc::Sender<Order>) {
        self.supervisors.insert(worker, orders);
    }

    /// Returns true if the worker's process belongs to this gateway.
    pub(super) fn has(&self, worker: WorkerId) -> bool {
        self.supervisors.contains_key(&worker)
    }

    /// Gives an order to the supervisor of a worker; a worker without one gets none.
    pub(super) fn order(&self, worker: WorkerId, order: Order) {
        // A full channel already holds an order that ends the process.
        let _ = self.supervisors.get(&worker).map(|orders| orders.try_send(order));
    }

    /// Takes all supervisors out: from now on the caller ends them.
    pub(super) fn take(&mut self) -> Vec<(WorkerId, mpsc::Sender<Order>)> {
        self.supervisors.drain().collect()
    }
}

/// Change of a process that concerns more than its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The process was started by this gateway.
    Started,
    /// The process was started by an earlier gateway, and this one has taken it over.
    Adopted,
    /// The process has ended as it was told.
    Stopped,
    /// The process has ended and will be started again.
    Down,
}

impl Member {
    /// Takes in a report on the worker's process; `None`: the worker has no process of this gateway.
    pub(super) fn update(&mut self, update: Update, now: Instant) -> Option<Change> {
        let process = self.process.as_mut()?;
        match update {
            Update::Running { adopted, displaced } => {
                process.is_running = true;
                (process.adopted, process.displaced) = (adopted, displaced);
                process.starts += u64::from(!adopted);
                process.down = None;
                self.heard = now;
                self.answers();
                self.is_there();
                Some(if adopted { Change::Adopted } else { Change::Started })
            }
            Update::Stopped => {
                (process.is_running, process.down) = (false, None);
                (process.ended, process.loops) = (None, false);
                Some(Change::Stopped)
            }
            Update::Down { retry_in, how, why, loops } => {
                process.is_running = false;
                process.down = Some((now + retry_in, why));
                process.loops = loops;
                // A worker that was told to end has no end to report.
                if matches!(self.seat, Seat::On | Seat::Emptying(_)) {
                    process.ended = Some(how);
                }
                Some(Change::Down)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::members::tests::absent;
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_process_that_ends_uncalled_leaves_its_cause() {
        let now = Instant::now();
        let mut members = absent(1, now);
        let member = &mut members[WorkerId(0)];
        let later = now + Duration::from_secs(1);
        let down = || Update::Down {
            retry_in: Duration::from_secs(2),
            how: "exit status: 1".into(),
            why: "exit status: 1, see the log".into(),
            loops: true,
        };
        assert_eq!(member.update(Update::Running { adopted: false, displaced: true }, later), Some(Change::Started));
        let process = member.process.clone().expect("a local worker");
        assert_eq!((process.starts, process.displaced, process.is_running, member.heard), (1, true, true, later));
        assert_eq!(member.update(down(), later), Some(Change::Down));
        let process = member.process.clone().expect("a local worker");
        assert_eq!((process.ended.as_deref(), process.loops), (Some("exit status: 1"), true));
        assert_eq!(process.down.map(|(until, _)| until), Some(later + Duration::from_secs(2)));
        assert_eq!(member.update(Update::Running { adopted: true, displaced: false }, later), Some(Change::Adopted));
        member.seat = Seat::Going(now);
        assert_eq!(member.update(Update::Stopped, later), Some(Change::Stopped));
        member.update(down(), later);
        assert_eq!(member.process.as_ref().and_then(|process| process.ended.as_deref()), None, "it was told to end");
        member.process = None;
        assert_eq!(member.update(Update::Stopped, later), None);
    }

    #[test]
    fn orders_go_to_the_workers_own_supervisor_until_the_end() {
        let mut processes = Processes::default();
        let (orders, mut inbox) = mpsc::channel(1);
        let (local, remote) = (WorkerId(0), WorkerId(1));
        processes.insert(local, orders);
        assert!(processes.has(local) && !processes.has(remote));
        processes.order(remote, Order::Kill);
        assert!(inbox.try_recv().is_err());
        processes.order(local, Order::Start);
        processes.order(local, Order::Kill);
        assert!(matches!(inbox.try_recv(), Ok(Order::Start)));
        assert!(inbox.try_recv().is_err(), "the queue was full");
        assert_eq!(processes.take().len(), 1);
        assert!(!processes.has(local));
    }
}
