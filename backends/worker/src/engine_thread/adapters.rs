//! Orders of adapters on the engine's thread.

use super::{Desk, Wiring};
use crate::inbox::Command;
use crate::shelf::{Opened, Read, open};
use penstock_proto::SessionId;
use penstock_proto::frames::{AdapterOrder, AdapterReport, OrderedAdapter, UpBody};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tracing::warn;

impl Wiring {
    /// Function that reads an adapter's folder on a thread of its own and tells the inbox.
    pub(super) fn read(&self) -> Read {
        let (commands, runtime) = (self.commands.clone(), self.runtime.clone());
        Box::new(move |wanted, config| {
            let commands = commands.clone();
            // The task ends with the process; its result has no reader then.
            drop(runtime.spawn_blocking(move || {
                let opened = catch_unwind(AssertUnwindSafe(|| open(&wanted, &Arc::unwrap_or_clone(config))));
                let opened = opened.unwrap_or_else(|_| Err("the adapter cannot be read: the reader failed".to_owned()));
                let Some(commands) = commands.upgrade() else { return };
                let _ = commands.blocking_send(Command::Opened { wanted, opened });
            }));
        })
    }
}

impl Desk {
    /// Takes an order of adapters. A worker that takes none announces so, and answers none.
    pub(super) fn order_adapters(&mut self, session: SessionId, order: AdapterOrder) {
        let Some(shelf) = &mut self.shelf else {
            return warn!(
                session = session.0,
                "adapter order ignored: this worker cannot change adapters while it runs"
            );
        };
        shelf.order(order, &mut self.engine);
        self.tell_adapters();
    }

    /// Takes in a folder that was read.
    pub(super) fn opened(&mut self, wanted: OrderedAdapter, opened: Opened) {
        let Some(shelf) = &mut self.shelf else { return };
        if shelf.opened(wanted, opened, &mut self.engine) {
            self.tell_adapters();
        }
    }

    /// Does the next part of the work for adapters, between two steps.
    pub(super) fn adapters_go_on(&mut self) {
        let Some(shelf) = &mut self.shelf else { return };
        if shelf.go_on(&mut self.engine, &self.read) {
            self.tell_adapters();
        }
    }

    /// Adapters of the worker, loaded and not.
    pub(super) fn adapters(&self) -> AdapterReport {
        let fixed = || AdapterReport { loaded: self.info.adapters.clone(), pending: Vec::new() };
        let Some(shelf) = &self.shelf else { return fixed() };
        let mut report = shelf.report();
        report.loaded.splice(0..0, self.info.adapters.iter().cloned());
        report
    }

    /// Tells all gateways of the adapters.
    fn tell_adapters(&mut self) {
        let report = self.adapters();
        let sessions: Vec<SessionId> = self.sessions.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.answer(session, UpBody::Adapters(report.clone())));
    }
}
