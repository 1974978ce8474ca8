//! Adapters that the pool's own workers are to hold: those of the config, and those that open requests still need.
//!
//! Workers are told whole lists. An adapter that leaves the config, or whose name stands for other content now, stays on the workers' list until
//! no open request runs with it, so that a request goes on even after its worker's death; where the name has other content, also until a worker
//! has that. New requests cannot name the first kind, and take the new content of the second as soon as a ready worker has it.
//!
//! Workers that this gateway has not started are told nothing: they have folders of their own.

use super::members::Members;
use super::requests::Requests;
use super::status::WorkerPhase;
use arc_swap::ArcSwap;
use penstock_proto::frames::{AdapterOrder, OrderedAdapter};
use penstock_proto::{ADAPTERS_MAX, AdapterId};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time without use after which a removed adapter is unloaded: a request that has just looked up the adapter is not counted yet.
const UNUSED: Duration = Duration::from_secs(1);

/// Adapter of a pool's config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSource {
    /// Name by which requests ask for it.
    pub name: String,
    /// Absolute path of the PEFT folder; unused for workers that this gateway does not start.
    pub path: PathBuf,
    /// Digest of the folder's path and files as they are now; empty for workers that this gateway does not start.
    pub key: String,
}

impl AdapterSource {
    fn ordered(&self) -> OrderedAdapter {
        let Self { name, path, key } = self;
        OrderedAdapter { name: name.clone(), path: path.to_string_lossy().into_owned(), key: key.clone() }
    }
}

/// Lists that the pool's handle, its actor and the supervisors of its processes share.
pub(super) struct Lists {
    /// Adapters of the config.
    wanted: ArcSwap<Vec<AdapterSource>>,
    /// Adapters that workers are told to hold, and started with.
    told: ArcSwap<Vec<AdapterSource>>,
    /// False once another process or pool tells the workers that this one shares with it.
    tells: AtomicBool,
}

impl Lists {
    pub(super) fn new(wanted: Vec<AdapterSource>) -> Self {
        let wanted = Arc::new(wanted);
        Self { wanted: ArcSwap::new(Arc::clone(&wanted)), told: ArcSwap::new(wanted), tells: AtomicBool::new(true) }
    }

    /// Leaves it for good to another process or pool to tell the workers.
    pub(super) fn settle(&self) {
        self.tells.store(false, Ordering::Relaxed);
    }

    /// Sets the adapters of the config. An equal list is told again, and what failed is tried again.
    pub(super) fn want(&self, wanted: Vec<AdapterSource>) {
        self.wanted.store(Arc::new(wanted));
    }

    /// Adapters of the config.
    pub(super) fn wanted(&self) -> Arc<Vec<AdapterSource>> {
        self.wanted.load_full()
    }

    /// Arguments by which a worker is started with the adapters.
    pub(super) fn arguments(&self) -> Vec<String> {
        let one = |source: &AdapterSource| {
            let OrderedAdapter { name, path, key } = source.ordered();
            ["--ordered-adapter".to_owned(), format!("{key}:{name}={path}")]
        };
        std::iter::once("--adapter-orders".to_owned()).chain(self.told.load().iter().flat_map(one)).collect()
    }
}

/// Adapter that is to leave.
struct Retiring {
    source: AdapterSource,
    /// Id of its content, once a worker has announced it.
    id: Option<AdapterId>,
    /// Instant since which nothing has needed it.
    unused_since: Option<Instant>,
}

/// Adapters as the actor keeps them; see the module header.
pub(super) struct Adapters {
    lists: Arc<Lists>,
    wanted: Arc<Vec<AdapterSource>>,
    retiring: Vec<Retiring>,
}

impl Adapters {
    pub(super) fn new(lists: Arc<Lists>) -> Self {
        let wanted = lists.wanted();
        Self { lists, wanted, retiring: Vec::new() }
    }

    /// Adapters of the config, as they were taken in last.
    pub(super) fn wanted(&self) -> Arc<Vec<AdapterSource>> {
        Arc::clone(&self.wanted)
    }

    /// Returns true if this pool tells its workers what to hold.
    pub(super) fn tells(&self) -> bool {
        self.lists.tells.load(Ordering::Relaxed)
    }

    /// Returns true if a worker's adapter is not in the config any more, or the config has other content under its name.
    pub(super) fn is_superseded(&self, name: &str, key: &str) -> bool {
        !key.is_empty() && !self.wanted.iter().any(|source| source.name == name && source.key == key)
    }

    /// List for the workers. Where there is no room for all, adapters that were replaced or removed are left out first.
    pub(super) fn order(&self) -> AdapterOrder {
        AdapterOrder { adapters: self.all().map(AdapterSource::ordered).collect() }
    }

    fn all(&self) -> impl Iterator<Item = &AdapterSource> {
        self.wanted.iter().chain(self.retiring.iter().map(|retiring| &retiring.source)).take(ADAPTERS_MAX)
    }

    /// Takes in a changed list of the config; true: the workers are to be told.
    pub(super) fn take_in(&mut self) -> bool {
        let wanted = self.lists.wanted();
        if Arc::ptr_eq(&wanted, &self.wanted) {
            return false;
        }
        let before = std::mem::replace(&mut self.wanted, wanted);
        self.retiring.retain(|retiring| !self.wanted.contains(&retiring.source));
        for source in before.iter().filter(|source| !source.key.is_empty() && !self.wanted.contains(source)) {
            self.retiring.push(Retiring { source: source.clone(), id: None, unused_since: None });
        }
        self.tell();
        true
    }

    /// Lets go of adapters that nothing needs any more; true: the workers are to be told.
    pub(super) fn tick(&mut self, members: &Members, requests: &Requests, now: Instant) -> bool {
        if self.retiring.is_empty() {
            return false;
        }
        let used = requests.adapters();
        let before = self.retiring.len();
        let wanted = Arc::clone(&self.wanted);
        self.retiring.retain_mut(|Retiring { source, id, unused_since }| {
            let announced = |source: &AdapterSource, ready: bool| {
                let workers = members.iter().map(|(_, member)| member);
                let mut workers = workers.filter(|member| !ready || member.phase(now) == WorkerPhase::Ready);
                workers.find_map(|member| member.announces(&source.name, &source.key))
            };
            *id = id.or_else(|| announced(source, false));
            let heir = wanted.iter().find(|other| other.name == source.name);
            let is_heir_missing = heir.is_some_and(|heir| announced(heir, true).is_none());
            let is_needed = id.is_some_and(|id| used.contains(&id) || is_heir_missing);
            *unused_since = if is_needed { None } else { unused_since.or(Some(now)) };
            unused_since.is_none_or(|since| now.saturating_duration_since(since) < UNUSED)
        });
        let has_changed = self.retiring.len() < before;
        if has_changed {
            self.tell();
        }
        has_changed
    }

    /// Sets the list that workers are started with.
    fn tell(&self) {
        self.lists.told.store(Arc::new(self.all().cloned().collect()));
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::job;
    use super::super::members::tests::{absent, connect};
    use super::super::requests::End;
    use super::super::ticket::Slot;
    use super::*;
    use penstock_proto::RequestId;
    use penstock_proto::frames::LoadedAdapter;
    use penstock_router::WorkerId;

    const WORKER: WorkerId = WorkerId(0);

    fn source(name: &str, key: &str) -> AdapterSource {
        AdapterSource { name: name.into(), path: format!("/models/{key}").into(), key: key.into() }
    }

    struct Bench {
        lists: Arc<Lists>,
        adapters: Adapters,
        members: Members,
        requests: Requests,
        now: Instant,
        _far: tokio::sync::mpsc::Receiver<penstock_proto::frames::Down>,
    }

    impl Bench {
        fn new(wanted: Vec<AdapterSource>) -> Self {
            let now = Instant::now();
            let mut members = absent(1, now);
            let far = connect(&mut members, WORKER, 8, now);
            let lists = Arc::new(Lists::new(wanted));
            let adapters = Adapters::new(Arc::clone(&lists));
            Self { lists, adapters, members, requests: Requests::new(8), now, _far: far }
        }

        /// The worker announces what it was told to hold, but for `without`.
        fn obeys(&mut self, without: &[&str]) {
            let loaded = self.adapters.order().adapters.into_iter().filter(|one| !without.contains(&&*one.key));
            let id =
                |key: &str| AdapterId(u128::from(key.bytes().fold(0_u64, |sum, byte| sum * 256 + u64::from(byte))));
            let told =
                loaded.map(|one| LoadedAdapter { id: id(&one.key).to_bytes().to_vec(), name: one.name, key: one.key });
            let ready = self.members[WORKER].ready.as_mut().expect("connected");
            ready.adapters = told.collect();
        }

        fn ask(&mut self, number: u64, key: &str) {
            let id = AdapterId(u128::from(key.bytes().fold(0_u64, |sum, byte| sum * 256 + u64::from(byte))));
            let slot = Arc::new(Slot::new(RequestId(number), 8));
            let asked = super::super::job::Job { adapter: Some(id), ..job(1) };
            self.requests.submit(asked, slot, self.now);
        }

        /// Ticks for longer than an unused adapter stays; returns the keys of the order.
        fn wait(&mut self) -> Vec<String> {
            for _ in 0..3 {
                self.adapters.tick(&self.members, &self.requests, self.now);
                self.now += UNUSED;
            }
            self.keys()
        }

        fn keys(&self) -> Vec<String> {
            self.adapters.order().adapters.into_iter().map(|one| one.key).collect()
        }

        fn want(&mut self, wanted: Vec<AdapterSource>) {
            self.lists.want(wanted);
            assert!(self.adapters.take_in() && !self.adapters.take_in());
        }
    }

    #[test]
    fn an_adapter_that_leaves_the_config_stays_while_a_request_runs_with_it() {
        let mut bench = Bench::new(vec![source("a", "1"), source("b", "2")]);
        bench.obeys(&[]);
        bench.ask(1, "1");
        bench.want(vec![source("b", "2")]);
        assert_eq!(bench.wait(), ["2", "1"]);
        assert!(bench.adapters.is_superseded("a", "1") && !bench.adapters.is_superseded("b", "2"));
        // A worker that is started meanwhile can go on with the request.
        assert_eq!(
            bench.lists.arguments(),
            ["--adapter-orders", "--ordered-adapter", "2:b=/models/2", "--ordered-adapter", "1:a=/models/1"]
        );
        bench.requests.close(RequestId(1), End::Finished);
        assert_eq!(bench.wait(), ["2"]);
        assert_eq!(bench.lists.arguments().len(), 3);
    }

    #[test]
    fn replaced_content_serves_until_a_worker_has_the_new() {
        let mut bench = Bench::new(vec![source("a", "1")]);
        bench.obeys(&[]);
        bench.want(vec![source("a", "2")]);
        bench.obeys(&["2"]);
        assert_eq!(bench.wait(), ["2", "1"], "the new one cannot be loaded, or not yet");
        bench.obeys(&[]);
        assert_eq!(bench.wait(), ["2"]);
    }

    #[test]
    fn what_comes_back_before_it_has_gone_is_not_loaded_again() {
        let mut bench = Bench::new(vec![source("a", "1")]);
        bench.obeys(&[]);
        bench.ask(1, "1");
        bench.want(vec![]);
        assert_eq!(bench.wait(), ["1"]);
        bench.want(vec![source("a", "1")]);
        assert_eq!((bench.wait(), bench.adapters.is_superseded("a", "1")), (vec!["1".to_owned()], false));
        // The same list again is told again, for what failed.
        bench.want(vec![source("a", "1")]);
    }

    #[test]
    fn a_full_list_has_no_room_for_what_leaves() {
        let many = |key: &str| (0..ADAPTERS_MAX).map(|at| source(&format!("a{at}"), &format!("{key}{at}"))).collect();
        let mut bench = Bench::new(many("o"));
        bench.obeys(&[]);
        bench.ask(1, "o1");
        bench.want(many("n"));
        let keys = bench.wait();
        assert_eq!((keys.len(), keys.iter().filter(|key| key.starts_with('n')).count()), (ADAPTERS_MAX, ADAPTERS_MAX));
    }

    #[test]
    fn a_pool_that_others_have_replaced_tells_nothing_any_more() {
        let lists = Arc::new(Lists::new(vec![source("a", "1")]));
        let mut adapters = Adapters::new(Arc::clone(&lists));
        lists.want(vec![source("a", "2")]);
        assert!(adapters.take_in() && adapters.tells());
        lists.settle();
        assert!(!adapters.tells());
        lists.want(vec![]);
        assert!(adapters.take_in() && !adapters.tells(), "the list is this pool's own, and no order");
    }

    #[test]
    fn names_of_workers_elsewhere_have_no_key_and_are_never_superseded() {
        let mut bench = Bench::new(vec![source("a", "")]);
        bench.want(vec![]);
        assert!(bench.keys().is_empty() && !bench.adapters.is_superseded("a", ""));
    }
}
