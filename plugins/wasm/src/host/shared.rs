//! State that plugins share across their virtual machines and across a reload: values with a counter for
//! compare-and-swap, queues, metrics. All plugins with the same `vm_id` share it; it is freed with the last of them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;

use super::abi::Status;

/// Most bytes of keys and values, and of queued items, per `vm_id`.
pub(super) const SHARED_BYTES_MAX: usize = 8 << 20;
/// Most queues per `vm_id`.
const QUEUES_MAX: usize = 64;
/// Most metrics per `vm_id`.
const METRICS_MAX: usize = 256;

/// Data, queues and metrics of one `vm_id`.
#[derive(Debug, Default)]
pub(super) struct Shared {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    data: HashMap<Vec<u8>, (Bytes, u32)>,
    cas: u32,
    bytes: usize,
    queues: Vec<Queue>,
    metrics: Vec<Metric>,
}

#[derive(Debug)]
struct Queue {
    name: Vec<u8>,
    items: VecDeque<Vec<u8>>,
    /// Number of items that no machine has been notified of.
    untold: usize,
}

/// Type of a metric (`proxy_metric_type_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

impl MetricKind {
    /// Reads an argument.
    pub fn from_wire(value: u32) -> Result<Self, Status> {
        [MetricKind::Counter, MetricKind::Gauge, MetricKind::Histogram]
            .get(value as usize)
            .copied()
            .ok_or(Status::BadArgument)
    }
}

/// Present state of a metric. For a histogram `value` is the sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name that the plugin gave it.
    pub name: String,
    /// Type of the metric.
    pub kind: MetricKind,
    /// Present value.
    pub value: u64,
    /// Number of records of a histogram.
    pub count: u64,
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Nothing in here is half done when a panic could strike.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A value and its counter.
    pub(super) fn get(&self, key: &[u8]) -> Option<(Bytes, u32)> {
        self.inner().data.get(key).cloned()
    }

    /// Sets a value. `cas` other than 0 must be the counter that [`Shared::get`] gave.
    pub(super) fn set(&self, key: Vec<u8>, value: Vec<u8>, cas: u32) -> Result<(), Status> {
        let mut inner = self.inner();
        let old = inner.data.get(&key);
        if cas != 0 && old.is_some_and(|(_, current)| *current != cas) {
            return Err(Status::CasMismatch);
        }
        let freed = old.map_or(0, |(value, _)| key.len() + value.len());
        let bytes = inner.bytes - freed + key.len() + value.len();
        if bytes > SHARED_BYTES_MAX {
            return Err(Status::InternalFailure);
        }
        inner.bytes = bytes;
        // 0 means "no matter which" and is never a counter.
        inner.cas = inner.cas.checked_add(1).unwrap_or(1);
        let cas = inner.cas;
        inner.data.insert(key, (value.into(), cas));
        Ok(())
    }

    /// Id of a queue, which is made if there is none.
    pub(super) fn register_queue(&self, name: &[u8]) -> Result<u32, Status> {
        if let Some(id) = self.resolve_queue(name) {
            return Ok(id);
        }
        let mut inner = self.inner();
        if inner.queues.len() >= QUEUES_MAX || inner.bytes + name.len() > SHARED_BYTES_MAX {
            return Err(Status::InternalFailure);
        }
        inner.bytes += name.len();
        inner.queues.push(Queue { name: name.to_vec(), items: VecDeque::new(), untold: 0 });
        Ok(inner.queues.len() as u32)
    }

    /// Id of a queue that exists.
    pub(super) fn resolve_queue(&self, name: &[u8]) -> Option<u32> {
        let inner = self.inner();
        inner.queues.iter().position(|queue| queue.name == name).map(|index| index as u32 + 1)
    }

    /// Appends to the end of a queue.
    pub(super) fn enqueue(&self, queue: u32, item: Vec<u8>) -> Result<(), Status> {
        let mut inner = self.inner();
        let bytes = inner.bytes + item.len() + size_of::<Vec<u8>>();
        let queue = place(&mut inner, queue)?;
        if bytes > SHARED_BYTES_MAX {
            return Err(Status::InternalFailure);
        }
        queue.items.push_back(item);
        queue.untold += 1;
        inner.bytes = bytes;
        Ok(())
    }

    /// Takes from the front of a queue.
    pub(super) fn dequeue(&self, queue: u32) -> Result<Vec<u8>, Status> {
        let mut inner = self.inner();
        let item = place(&mut inner, queue)?.items.pop_front().ok_or(Status::Empty)?;
        inner.bytes -= item.len() + size_of::<Vec<u8>>();
        Ok(item)
    }

    /// Queues among these with items that no machine has been notified of; the call counts as the notification.
    pub(super) fn take_ready(&self, queues: &[u32]) -> Vec<u32> {
        if queues.is_empty() {
            return Vec::new();
        }
        let mut inner = self.inner();
        let mut ready = Vec::new();
        for id in queues {
            if let Ok(queue) = place(&mut inner, *id) {
                // Once per item, as the specification says; what somebody has taken already needs no telling.
                let times = queue.untold.min(queue.items.len());
                queue.untold = 0;
                ready.extend(std::iter::repeat_n(*id, times));
            }
        }
        ready
    }

    /// Id of a metric, which is made if there is none.
    pub(super) fn define_metric(&self, kind: MetricKind, name: String) -> Result<u32, Status> {
        let mut inner = self.inner();
        if let Some(index) = inner.metrics.iter().position(|metric| metric.name == name) {
            let same = inner.metrics[index].kind == kind;
            return if same { Ok(index as u32 + 1) } else { Err(Status::BadArgument) };
        }
        if inner.metrics.len() >= METRICS_MAX || name.len() > 256 {
            return Err(Status::InternalFailure);
        }
        inner.metrics.push(Metric { name, kind, value: 0, count: 0 });
        Ok(inner.metrics.len() as u32)
    }

    /// Changes a counter or a gauge by `delta`.
    pub(super) fn increment_metric(&self, id: u32, delta: i64) -> Result<(), Status> {
        self.with_metric(id, |metric| {
            let down = delta < 0 && metric.kind == MetricKind::Counter;
            if down || metric.kind == MetricKind::Histogram {
                return Err(Status::BadArgument);
            }
            metric.value = metric.value.saturating_add_signed(delta);
            Ok(())
        })
    }

    /// Sets a gauge, or adds a record to a histogram; a counter cannot be set.
    pub(super) fn record_metric(&self, id: u32, value: u64) -> Result<(), Status> {
        self.with_metric(id, |metric| {
            match metric.kind {
                MetricKind::Counter => return Err(Status::BadArgument),
                MetricKind::Gauge => metric.value = value,
                MetricKind::Histogram => {
                    metric.value = metric.value.saturating_add(value);
                    metric.count += 1;
                }
            }
            Ok(())
        })
    }

    /// Value of a counter or a gauge.
    pub(super) fn get_metric(&self, id: u32) -> Result<u64, Status> {
        self.with_metric(id, |metric| match metric.kind {
            MetricKind::Histogram => Err(Status::BadArgument),
            _ => Ok(metric.value),
        })
    }

    fn with_metric<T>(&self, id: u32, act: impl FnOnce(&mut Metric) -> Result<T, Status>) -> Result<T, Status> {
        let mut inner = self.inner();
        let index = (id as usize).checked_sub(1).ok_or(Status::NotFound)?;
        act(inner.metrics.get_mut(index).ok_or(Status::NotFound)?)
    }

    /// All metrics with their present values.
    pub(super) fn metrics(&self) -> Vec<Metric> {
        self.inner().metrics.clone()
    }
}

fn place(inner: &mut Inner, queue: u32) -> Result<&mut Queue, Status> {
    let index = (queue as usize).checked_sub(1).ok_or(Status::NotFound)?;
    inner.queues.get_mut(index).ok_or(Status::NotFound)
}

/// Shared state by `vm_id`, held weakly: a plugin that comes while another of its `vm_id` lives, as in a reload, gets
/// the same state; the last plugin frees it.
#[derive(Debug, Default)]
pub(super) struct SharedById {
    known: Mutex<BTreeMap<String, Weak<Shared>>>,
}

impl SharedById {
    /// State that plugins with this `vm_id` share.
    pub(super) fn of(&self, vm_id: &str) -> Arc<Shared> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, shared| shared.strong_count() > 0);
        if let Some(shared) = known.get(vm_id).and_then(Weak::upgrade) {
            return shared;
        }
        let shared = Arc::new(Shared::default());
        known.insert(vm_id.to_owned(), Arc::downgrade(&shared));
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_changed_only_by_who_knows_its_counter() {
        let shared = Shared::default();
        assert_eq!(shared.get(b"k"), None);
        shared.set(b"k".to_vec(), b"1".to_vec(), 0).unwrap();
        let (value, cas) = shared.get(b"k").unwrap();
        assert_eq!(value, "1");
        shared.set(b"k".to_vec(), b"2".to_vec(), cas).unwrap();
        assert_eq!(shared.set(b"k".to_vec(), b"3".to_vec(), cas), Err(Status::CasMismatch));
        shared.set(b"k".to_vec(), b"4".to_vec(), 0).unwrap();
        assert_eq!(shared.get(b"k").unwrap().0, "4");
    }

    #[test]
    fn shared_data_has_a_bound_that_overwriting_does_not_eat() {
        let shared = Shared::default();
        let half = vec![0; SHARED_BYTES_MAX / 2];
        for _ in 0..10 {
            shared.set(b"a".to_vec(), half.clone(), 0).unwrap();
        }
        assert_eq!(shared.set(b"b".to_vec(), half, 0), Err(Status::InternalFailure));
    }

    #[test]
    fn a_queue_tells_once_per_item_and_gives_in_order() {
        let shared = Shared::default();
        let queue = shared.register_queue(b"q").unwrap();
        assert_eq!(shared.register_queue(b"q"), Ok(queue));
        assert_eq!(shared.resolve_queue(b"other"), None);
        assert_eq!(shared.dequeue(queue), Err(Status::Empty));
        assert_eq!(shared.dequeue(queue + 1), Err(Status::NotFound));
        assert_eq!(shared.enqueue(0, vec![]), Err(Status::NotFound));
        shared.enqueue(queue, b"1".to_vec()).unwrap();
        shared.enqueue(queue, b"2".to_vec()).unwrap();
        assert_eq!(shared.take_ready(&[queue]), [queue, queue]);
        assert!(shared.take_ready(&[queue]).is_empty());
        assert_eq!(shared.dequeue(queue).unwrap(), b"1");
        assert_eq!(shared.dequeue(queue).unwrap(), b"2");
    }

    #[test]
    fn a_queue_has_a_bound() {
        let shared = Shared::default();
        let queue = shared.register_queue(b"q").unwrap();
        let full = (0..).map(|_| shared.enqueue(queue, vec![])).position(|result| result.is_err());
        assert!(full.is_some());
        shared.dequeue(queue).unwrap();
        shared.enqueue(queue, vec![]).unwrap();
    }

    #[test]
    fn metrics_follow_their_kind() {
        let shared = Shared::default();
        let counter = shared.define_metric(MetricKind::Counter, "c".into()).unwrap();
        let gauge = shared.define_metric(MetricKind::Gauge, "g".into()).unwrap();
        let histogram = shared.define_metric(MetricKind::Histogram, "h".into()).unwrap();
        assert_eq!(shared.define_metric(MetricKind::Counter, "c".into()), Ok(counter));
        assert_eq!(shared.define_metric(MetricKind::Gauge, "c".into()), Err(Status::BadArgument));
        shared.increment_metric(counter, 2).unwrap();
        assert_eq!(shared.increment_metric(counter, -1), Err(Status::BadArgument));
        assert_eq!(shared.record_metric(counter, 9), Err(Status::BadArgument));
        assert_eq!(shared.get_metric(counter), Ok(2));
        shared.record_metric(gauge, 5).unwrap();
        shared.increment_metric(gauge, -7).unwrap();
        assert_eq!(shared.get_metric(gauge), Ok(0));
        shared.record_metric(histogram, 4).unwrap();
        shared.record_metric(histogram, 6).unwrap();
        assert_eq!(shared.get_metric(histogram), Err(Status::BadArgument));
        assert_eq!(shared.get_metric(99), Err(Status::NotFound));
        let told = shared.metrics();
        assert_eq!((told[2].value, told[2].count), (10, 2));
    }

    #[test]
    fn what_is_shared_lives_as_long_as_somebody_who_shares_it() {
        let known = SharedById::default();
        let one = known.of("a");
        one.set(b"k".to_vec(), b"v".to_vec(), 0).unwrap();
        let two = known.of("a");
        drop(one);
        assert!(known.of("a").get(b"k").is_some());
        assert!(known.of("b").get(b"k").is_none());
        drop(two);
        assert!(known.of("a").get(b"k").is_none());
    }
}
