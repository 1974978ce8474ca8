//! Fault injection for the shared counters: a store that randomly drops calls, or executes them and loses the answer.
//! Invariant: no more is let in than the limit plus the use beyond reservations; and once the store works again, it has
//! counted everything exactly once.

use std::sync::atomic::AtomicU32;

use async_trait::async_trait;
use penstock_store::{Grant, MemoryCounters};
use tokio::time::timeout;

use super::*;

const MAX: u64 = 1000;
const SUBJECTS: [&str; 3] = ["a", "b", "c"];

/// Outcome of a call to the store.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Answered,
    /// The call returns an error and has no effect on the store.
    Failed,
    /// The call takes effect and returns an error.
    Lost,
    /// The call takes effect and never returns.
    Silent,
}

/// Pseudo-random numbers (xorshift) of a seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

struct Faulty {
    inner: MemoryCounters,
    /// Percentage of calls that meet a fault.
    faults: AtomicU32,
    draw: Mutex<Draw>,
}

impl Faulty {
    fn fate(&self) -> Fate {
        let mut draw = self.draw.lock().unwrap_or_else(PoisonError::into_inner);
        if draw.below(100) >= u64::from(self.faults.load(Ordering::Relaxed)) {
            return Fate::Answered;
        }
        [Fate::Failed, Fate::Lost, Fate::Silent][draw.below(3) as usize]
    }

    async fn meets<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        match self.fate() {
            Fate::Answered => call.await,
            Fate::Failed => Err(StoreError::Busy),
            Fate::Lost => call.await.and(Err(StoreError::Broken("the answer is lost".into()))),
            Fate::Silent => {
                call.await?;
                std::future::pending().await
            }
        }
    }
}

#[async_trait]
impl Counters for Faulty {
    async fn take(&self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError> {
        self.meets(self.inner.take(holder, asks, whole, now)).await
    }

    async fn lease(&self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        self.meets(self.inner.lease(holder, kept, now)).await
    }

    async fn settle(&self, holder: &str, nth: u64, settlements: &[Settlement], now: u64) -> Result<(), StoreError> {
        self.meets(self.inner.settle(holder, nth, settlements, now)).await
    }
}

/// Request in flight at one of the simulated gateways.
struct Open {
    gateway: usize,
    subject: usize,
    reserved: u64,
    portions: Vec<Portion>,
}

/// Two gateways with their requests in flight and the amounts used.
struct World {
    store: Arc<Faulty>,
    gateways: [Shared; 2],
    open: Vec<Open>,
    spent: [u64; SUBJECTS.len()],
    excess: [u64; SUBJECTS.len()],
    draw: Draw,
    served: usize,
}

fn claim<'a>(limit: &'a Arc<str>, subject: usize, amount: u64) -> Claim<'a> {
    let measure = Measure { unit: Unit::Tokens, span: Span::Day, max: MAX };
    Claim { limit, subject: SUBJECTS[subject], measure, amount, tag: 0 }
}

impl World {
    fn new(seed: u64, faults: u32) -> Self {
        let draw = || Draw(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let store = Arc::new(Faulty {
            inner: MemoryCounters::default(),
            faults: AtomicU32::new(faults),
            draw: Mutex::new(draw()),
        });
        let gateways = ["one", "two"].map(|name| Shared::new(store.clone(), name.into(), None));
        let (spent, excess) = Default::default();
        Self { store, gateways, open: Vec::new(), spent, excess, draw: draw(), served: 0 }
    }

    async fn arrive(&mut self) {
        let (gateway, subject) = (self.draw.below(2) as usize, self.draw.below(3) as usize);
        let reserved = 1 + self.draw.below(40);
        let limit: Arc<str> = "l".into();
        let claims = [claim(&limit, subject, reserved)];
        // All limits are closed: no gateway falls back to its own counters.
        let take = self.gateways[gateway].take(&claims, |_| OnStoreFailure::Closed);
        // Some callers give up before the answer.
        let patience = if self.draw.below(20) == 0 { Duration::from_millis(1) } else { Duration::from_secs(60) };
        if let Ok(Ok(portions)) = timeout(patience, take).await {
            self.open.push(Open { gateway, subject, reserved, portions });
        }
    }

    fn end(&mut self, at: usize, may_exceed: bool) {
        let Open { gateway, subject, reserved, portions } = self.open.swap_remove(at);
        let most = if may_exceed { reserved + reserved / 4 } else { reserved };
        let used = self.draw.below(most + 1);
        self.gateways[gateway].settle(portions, |_, _| Some(used));
        self.spent[subject] += used;
        self.excess[subject] += used.saturating_sub(reserved);
        self.served += 1;
    }

    /// One turn of the reporting task, with the store's back-off treated as over.
    async fn report(&mut self, gateway: usize, is_idle: bool) {
        let shared = &self.gateways[gateway];
        shared.state().down_until = None;
        if shared.begin().await && shared.correct().await {
            shared.report_once(Instant::now() + if is_idle { IDLE * 2 } else { Duration::ZERO }).await;
        }
    }

    fn check(&self) {
        for subject in 0..SUBJECTS.len() {
            let held = self.open.iter().filter(|open| open.subject == subject).map(|open| open.reserved).sum::<u64>();
            let (spent, excess) = (self.spent[subject], self.excess[subject]);
            assert!(spent + held <= MAX + excess, "{spent} spent, {held} held, {excess} beyond reservations");
        }
    }

    /// Ends all requests with a working store, and lets both gateways report.
    async fn settle_down(&mut self, may_exceed: bool) {
        self.store.faults.store(0, Ordering::Relaxed);
        while !self.open.is_empty() {
            self.end(0, may_exceed);
        }
        for gateway in [0, 1, 0, 1] {
            self.report(gateway, true).await;
        }
        let (limit, now) = (Arc::<str>::from("l"), clock::unix_seconds());
        for (subject, name) in SUBJECTS.iter().enumerate() {
            let Want { key: (counter, window), lapses: until, .. } = want(&claim(&limit, subject, 0));
            for holder in ["one", "two"] {
                let ask = Ask { counter: counter.clone(), window, sliding: false, max: MAX, want: 0, least: 0, until };
                let grant = self.store.inner.take(holder, &[ask], false, now).await.expect("asked")[0];
                assert_eq!((grant.leased, grant.used), (0, self.spent[subject]), "{holder} {name}");
            }
        }
    }
}

async fn run(seed: u64, faults: u32, may_exceed: bool) -> usize {
    let mut world = World::new(seed, faults);
    for _ in 0..400 {
        match world.draw.below(10) {
            0..5 => world.arrive().await,
            5..8 if !world.open.is_empty() => {
                let at = world.draw.below(world.open.len() as u64) as usize;
                world.end(at, may_exceed);
            }
            _ => {
                let (gateway, is_idle) = (world.draw.below(2) as usize, world.draw.below(4) == 0);
                world.report(gateway, is_idle).await;
            }
        }
        world.check();
    }
    world.settle_down(may_exceed).await;
    world.served
}

#[tokio::test(start_paused = true)]
async fn whatever_fails_everything_counts_once() {
    for (faults, least) in [(0, 100), (10, 50), (40, 10)] {
        for seed in 1..=40 {
            for may_exceed in [false, true] {
                let served = run(seed, faults, may_exceed).await;
                assert!(served >= least, "seed {seed}: {served} served with {faults} faults of a hundred");
            }
        }
    }
}
