//! Waiting requests of one priority, by tenant, and the order of the tenants.
//!
//! A tenant is in the *bucket* of the service it has had: tenants of one bucket count as equals. Within a bucket they
//! are sorted by the request that is due first, so that finding the next tenant does not take a scan of ten thousand.

use penstock_proto::RequestId;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// Waiting requests of one tenant, in the order in which they are due.
#[derive(Default)]
pub(crate) struct Line {
    /// Request by (due time, arrival number).
    pub(crate) requests: BTreeMap<(Duration, u64), RequestId>,
    bucket: i64,
}

impl Line {
    /// Sort key of the tenant, by the first of its requests.
    fn key(&self) -> Option<Key> {
        self.requests.first_key_value().map(|((due, arrival), _)| (self.bucket, *due, *arrival))
    }
}

/// Sort key of a tenant: bucket, due time and arrival number of its first request; unique.
type Key = (i64, Duration, u64);

/// Waiting requests of one lane by tenant, with the order of the tenants; see the module header.
#[derive(Default)]
pub(crate) struct Lines {
    tenants: HashMap<Arc<str>, Line>,
    next: BTreeMap<Key, Arc<str>>,
}

impl Lines {
    /// Adds a request of a tenant, and sets the tenant's bucket.
    pub(crate) fn insert(&mut self, tenant: &Arc<str>, bucket: i64, at: (Duration, u64), request: RequestId) {
        self.change(tenant, |line| {
            line.bucket = bucket;
            line.requests.insert(at, request);
        });
    }

    /// Removes a waiting request of a tenant, named by its due time and arrival number.
    pub(crate) fn remove(&mut self, tenant: &Arc<str>, at: (Duration, u64)) {
        self.change(tenant, |line| {
            line.requests.remove(&at);
        });
    }

    /// Moves the tenant's line to this bucket of service.
    pub(crate) fn stand(&mut self, tenant: &Arc<str>, bucket: i64) {
        if self.tenants.get(tenant).is_some_and(|line| line.bucket != bucket) {
            self.change(tenant, |line| line.bucket = bucket);
        }
    }

    fn change(&mut self, tenant: &Arc<str>, change: impl FnOnce(&mut Line)) {
        let line = self.tenants.entry(Arc::clone(tenant)).or_default();
        let before = line.key();
        change(line);
        let after = line.key();
        if before != after {
            before.map(|key| self.next.remove(&key));
            after.map(|key| self.next.insert(key, Arc::clone(tenant)));
        }
        if after.is_none() {
            self.tenants.remove(tenant);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }

    /// Waiting requests of a tenant; `None` while the tenant has none.
    pub(crate) fn get(&self, tenant: &Arc<str>) -> Option<&Line> {
        self.tenants.get(tenant)
    }

    /// Tenants that own the first `count` requests, with their lines: those of the lowest buckets; of each bucket, the
    /// first with a request due before `now`, and the first with one due later.
    pub(crate) fn first(&self, now: Duration, count: usize) -> Vec<(&Arc<str>, &Line)> {
        let mut first = Vec::new();
        let mut from = self.next.first_key_value().map(|((bucket, ..), _)| *bucket);
        while let Some(bucket) = from.filter(|_| first.len() < count) {
            let (begin, split) = ((bucket, Duration::ZERO, 0), (bucket, now, 0));
            let end = (bucket, Duration::MAX, u64::MAX);
            let late = self.next.range(begin..split).take(count);
            let here = late.chain(self.next.range(split..=end).take(count));
            first.extend(here.filter_map(|(_, tenant)| Some((tenant, self.tenants.get(tenant)?))));
            from = self.next.range(end..).next().map(|((bucket, ..), _)| *bucket).filter(|next| *next > bucket);
        }
        first
    }

    /// The lowest bucket that has waiting requests, and its tenants.
    pub(crate) fn lowest(&self) -> Option<(i64, impl Iterator<Item = &Arc<str>>)> {
        let ((bucket, ..), _) = self.next.first_key_value()?;
        let end = (*bucket, Duration::MAX, u64::MAX);
        Some((*bucket, self.next.range(..=end).map(|(_, tenant)| tenant)))
    }
}
