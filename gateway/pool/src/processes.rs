//! Processes of this gateway's local workers: orders to the supervisor of each.

use super::supervisor::Order;
use penstock_router::WorkerId;
use std::collections::HashMap;
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

#[cfg(test)]
mod tests {
    use super::*;

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
