//! Effects of the pool's list of adapters: orders to its own workers, and what they report.

use super::Actor;
use penstock_proto::SessionId;
use penstock_proto::frames::{AdapterReport, DownBody, PendingAdapter};
use penstock_router::WorkerId;
use std::time::Instant;
use tracing::{info, warn};

impl Actor {
    /// Takes in another list of the config, and tells the workers.
    pub(super) fn adapters_change(&mut self) {
        if self.adapters.take_in() {
            let now = Instant::now();
            self.tell_all_adapters(now);
            self.publish(now);
        }
    }

    /// Tells the workers of adapters that nothing needs any more.
    pub(super) fn adapters_tick(&mut self, now: Instant) {
        if self.adapters.tick(&self.members, &self.requests, now) {
            self.tell_all_adapters(now);
        }
    }

    fn tell_all_adapters(&mut self, now: Instant) {
        self.members.ids().for_each(|worker| self.tell_adapters(worker, now));
    }

    /// Tells a worker of this gateway's own what to hold. One that takes no orders is started again where it holds something else: a worker of
    /// an earlier version, or one on a device without adapters.
    pub(super) fn tell_adapters(&mut self, worker: WorkerId, now: Instant) {
        if !self.adapters.tells() || !self.processes.has(worker) {
            return;
        }
        let member = &mut self.members[worker];
        let Some(ready) = member.ready.as_ref().filter(|_| member.link.is_some()) else { return };
        let order = self.adapters.order();
        if ready.adapter_orders {
            return self.members.send(worker, DownBody::Adapters(order));
        }
        let (mut has, mut wants): (Vec<&str>, Vec<&str>) = (
            ready.adapters.iter().map(|adapter| adapter.name.as_str()).collect(),
            order.adapters.iter().map(|adapter| adapter.name.as_str()).collect(),
        );
        has.sort_unstable();
        wants.sort_unstable();
        if has != wants
            && let Some(process) = &mut member.process
        {
            info!(worker = %member.name, "worker cannot change adapters while it runs: it is restarted with the new list when the pool can spare it");
            process.displaced = true;
            self.shares.arrange(now);
        }
    }

    /// Takes in a worker's report on its adapters.
    pub(super) fn adapted(&mut self, worker: WorkerId, session: SessionId, report: AdapterReport, now: Instant) {
        let member = &mut self.members[worker];
        if member.link.as_ref().is_none_or(|link| link.session != session) {
            return;
        }
        let Some(ready) = &mut member.ready else { return };
        let AdapterReport { mut loaded, mut pending } = report;
        penstock_proto::adapter::bound(&mut loaded, &mut pending);
        let news = pending.iter().filter(|one| !one.why.is_empty() && !ready.adapters_pending.contains(one));
        for PendingAdapter { name, why, .. } in news {
            warn!(worker = %member.name, adapter = name, why, "worker cannot load an adapter: requests for the adapter go only to workers that have it");
        }
        for adapter in loaded.iter().filter(|one| !ready.adapters.contains(one)) {
            info!(worker = %member.name, adapter = adapter.name, "worker has an adapter");
        }
        (ready.adapters, ready.adapters_pending) = (loaded, pending);
        self.placement.router.adapt(worker, ready.loaded().map(|(_, id)| id).collect());
        member.heard = now;
        self.publish(now);
    }
}
