//! Table of a pool's workers by their index: lookup, frames to a worker, and since when no worker serves.

use super::member::{Member, Seat};
use penstock_proto::frames::DownBody;
use penstock_router::WorkerId;
use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time without any worker after which one that is started elsewhere is not expected back.
const GONE_AFTER: Duration = Duration::from_secs(10);

/// The workers of one pool, local and remote. Their number and their indexes are those of the config and never change.
pub(super) struct Members {
    all: Vec<Member>,
    /// Instant since which no member serves; `None` while one does.
    nobody_since: Option<Instant>,
}

/// Change between a pool that serves and a pool that does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Serving {
    /// A worker serves, for the first time after a while without any.
    Begins {
        /// Time in which no worker served.
        after: Duration,
    },
    /// The last worker that served does so no more.
    Ends,
}

impl Members {
    /// Table of these workers, of which none serves yet.
    pub(super) fn new(all: Vec<Member>, now: Instant) -> Self {
        Self { all, nobody_since: Some(now) }
    }

    /// Number of workers, whatever their state.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Indexes of all workers, in ascending order.
    pub(super) fn ids(&self) -> impl Iterator<Item = WorkerId> + use<> {
        (0..self.all.len()).map(|at| WorkerId(at as u8))
    }

    /// The workers with their indexes, in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (WorkerId, &Member)> {
        self.ids().zip(&self.all)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Member> {
        self.all.iter_mut()
    }

    /// The worker of an index that may come from elsewhere; `None`: there is no such worker.
    pub(super) fn get(&self, worker: WorkerId) -> Option<&Member> {
        self.all.get(usize::from(worker.0))
    }

    /// First worker of which `is` is true.
    pub(super) fn find(&self, is: impl Fn(&Member) -> bool) -> Option<WorkerId> {
        self.iter().find(|(_, member)| is(member)).map(|(worker, _)| worker)
    }

    /// Worker of that name, as status and metrics show it.
    pub(super) fn named(&self, name: &str) -> Option<WorkerId> {
        self.find(|member| *member.name == *name)
    }

    /// Name of a worker, for events, logs and decisions.
    pub(super) fn name(&self, worker: WorkerId) -> Arc<str> {
        Arc::clone(&self[worker].name)
    }

    /// Returns true if a worker other than `worker` has the property `has`.
    pub(super) fn any_other(&self, worker: WorkerId, has: impl Fn(&Member) -> bool) -> bool {
        self.iter().any(|(at, member)| at != worker && has(member))
    }

    /// Number of workers that are wanted now.
    pub(super) fn seated(&self) -> usize {
        self.all.iter().filter(|member| member.seat == Seat::On).count()
    }

    /// Description of a worker's end, if ended workers are why none serves.
    pub(super) fn last_end(&self) -> Option<&str> {
        self.all.iter().find_map(|member| member.process.as_ref()?.ended.as_deref())
    }

    /// Queues a frame to a worker; without a session the frame is dropped.
    pub(super) fn send(&self, worker: WorkerId, body: DownBody) {
        if let Some(link) = &self[worker].link
            && !link.send(body)
        {
            // A worker that leaves thousands of frames unread is not alive; its requests move when the session is lost.
            link.close.notify_one();
        }
    }

    /// Returns true while no worker serves.
    pub(super) fn is_nobody_there(&self) -> bool {
        self.nobody_since.is_some()
    }

    /// Returns true if the workers other than `worker` are gone: none is connected, and those that are started elsewhere, which may be back in a
    /// moment, have not served for [`GONE_AFTER`].
    pub(super) fn others_are_gone(&self, worker: WorkerId, now: Instant) -> bool {
        let is_long = self.nobody_since.is_some_and(|since| now.saturating_duration_since(since) >= GONE_AFTER);
        !self.any_other(worker, |other| other.link.is_some() || other.process.is_none() && !is_long)
    }

    /// Looks for a worker that serves. Returns the change since the last look, if there is one.
    pub(super) fn look(&mut self, now: Instant) -> Option<Serving> {
        match (self.all.iter().any(Member::serves), self.nobody_since) {
            (true, Some(since)) => {
                self.nobody_since = None;
                Some(Serving::Begins { after: now.saturating_duration_since(since) })
            }
            (false, None) => {
                self.nobody_since = Some(now);
                Some(Serving::Ends)
            }
            _ => None,
        }
    }
}

impl Index<WorkerId> for Members {
    type Output = Member;

    fn index(&self, worker: WorkerId) -> &Member {
        &self.all[usize::from(worker.0)]
    }
}

impl IndexMut<WorkerId> for Members {
    fn index_mut(&mut self, worker: WorkerId) -> &mut Member {
        &mut self.all[usize::from(worker.0)]
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::session::Link;
    use super::super::steering::EXIT;
    use super::*;
    use penstock_proto::SessionId;
    use penstock_proto::frames::{Down, Ready};
    use tokio::sync::mpsc::Receiver;

    /// Table of `count` local workers without sessions, named `a-0`, `a-1`, ….
    pub(crate) fn absent(count: usize, now: Instant) -> Members {
        let address = || "unix:///tmp/a.sock".parse().expect("an address");
        let members = (0..count).map(|at| Member::new(format!("a-{at}"), address(), true, now));
        Members::new(members.collect(), now)
    }

    /// Begins a session of a worker, with room for `frames` frames. Returns the far end of the session.
    pub(crate) fn connect(members: &mut Members, worker: WorkerId, frames: usize, now: Instant) -> Receiver<Down> {
        let (down, far) = tokio::sync::mpsc::channel(frames);
        let link = Link { session: SessionId(1), down, close: Arc::default() };
        let ready = Ready { transfer: "unix:///tmp/kv.sock".into(), sequences_max: 8, ..Ready::default() };
        members[worker].begin(Box::new(ready), link, now);
        far
    }

    #[test]
    fn workers_are_found_by_name_and_index() {
        let members = absent(2, Instant::now());
        assert_eq!((members.named("a-1"), members.named("a-2")), (Some(WorkerId(1)), None));
        assert_eq!((&*members.name(WorkerId(0)), members.len()), ("a-0", 2));
        assert!(members.get(WorkerId(2)).is_none());
        assert_eq!(members.ids().collect::<Vec<_>>(), [WorkerId(0), WorkerId(1)]);
    }

    #[test]
    fn each_change_between_serving_and_not_is_reported_once() {
        let now = Instant::now();
        let later = now + Duration::from_secs(3);
        let mut members = absent(2, now);
        assert_eq!((members.look(now), members.is_nobody_there()), (None, true));
        let _far = connect(&mut members, WorkerId(1), 1, now);
        assert_eq!(members.look(later), Some(Serving::Begins { after: Duration::from_secs(3) }));
        assert_eq!((members.look(later), members.is_nobody_there()), (None, false));
        members[WorkerId(1)].state.draining = true;
        assert_eq!(members.look(later), Some(Serving::Ends));
        assert_eq!(members.look(later), None);
    }

    #[test]
    fn a_worker_that_leaves_its_frames_unread_is_closed() {
        let now = Instant::now();
        let mut members = absent(1, now);
        let drain = || DownBody::Drain(EXIT);
        members.send(WorkerId(0), drain());
        let mut far = connect(&mut members, WorkerId(0), 1, now);
        assert!(far.try_recv().is_err(), "a frame of the time without a session is dropped");
        let close = Arc::clone(&members[WorkerId(0)].link.as_ref().expect("a session").close);
        let is_closed = |context: &mut std::task::Context<'_>| {
            let notified = std::pin::pin!(close.notified());
            std::future::Future::poll(notified, context).is_ready()
        };
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        members.send(WorkerId(0), drain());
        assert!(!is_closed(&mut context), "the frame has a place in the queue");
        members.send(WorkerId(0), drain());
        assert!(is_closed(&mut context), "the queue is full");
        assert_eq!(far.try_recv().expect("the first frame").body, Some(drain()));
    }
}
