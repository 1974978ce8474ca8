use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);

fn pace(requests_per_minute: u32, tokens_per_minute: u64, gateways: u32, now: Instant) -> Pace {
    let config = PacingConfig { requests_per_minute, tokens_per_minute, gateways, wait: Duration::from_secs(5) };
    Pace::new(&config, now)
}

fn first(name: u8) -> Request {
    of(name, 0)
}

fn of(name: u8, tokens: u64) -> Request {
    Request { asker: Asker::new(&name.to_string(), None), tokens, is_extra: false }
}

fn extra(name: u8) -> Request {
    Request { is_extra: true, ..first(name) }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn wait(pace: &mut Pace, name: u8, limit: u64, now: Instant) -> Option<u64> {
    match pace.join(first(name), seconds(limit), Part::Own, now) {
        Joined::Waits(id, _) => Some(id),
        Joined::Go(_) => panic!("at once"),
        Joined::Refused(_) => None,
    }
}

#[test]
fn no_minute_has_more_requests_than_are_published() {
    for (published, gateways, share) in [(1, 1, 1), (2, 1, 2), (60, 1, 60), (500, 1, 500), (500, 4, 125), (3, 5, 1)] {
        let start = Instant::now();
        let mut pace = pace(published, 0, gateways, start);
        let mut sent: Vec<u64> = Vec::new();
        for ms in (0..180_000).step_by(20) {
            if pace.at_once(first(1), Part::Own, start + ms as u32 * MS).is_ok() {
                sent.push(ms);
            }
        }
        let busiest =
            sent.iter().map(|from| sent.iter().filter(|at| (*from..from + 60_000).contains(at)).count()).max();
        assert!(busiest.is_some_and(|most| most <= share), "{published} / {gateways}: {busiest:?}");
        assert!(
            sent.len() >= share * 5 / 2 - share / 4,
            "{published} / {gateways}: only {} in three minutes",
            sent.len()
        );
    }
}

#[test]
fn tokens_are_reserved_and_settled() {
    let start = Instant::now();
    let mut pace = pace(0, 1000, 1, start);
    let hold = pace.at_once(of(1, 900), Part::Own, start).expect("it fits").expect("a hold");
    assert!(pace.at_once(of(1, 200), Part::Own, start).is_err());
    pace.settle(hold, Some(100), start);
    assert!(pace.at_once(of(1, 900), Part::Own, start).is_ok());
    let later = pace.at_once(of(1, 5000), Part::Own, start).expect_err("full");
    assert!((seconds(55)..=seconds(62)).contains(&later), "{later:?}");
    assert!(
        pace.at_once(of(1, 5000), Part::Own, start + seconds(62)).is_ok(),
        "more than a minute has gets a whole one"
    );
}

#[test]
fn keys_take_turns_and_whose_turn_comes_too_late_does_not_wait() {
    let start = Instant::now();
    let mut pace = pace(60, 0, 1, start);
    while pace.at_once(first(1), Part::Own, start).is_ok() {}
    let greedy: Vec<u64> = (0..10).map_while(|_| wait(&mut pace, 1, 5, start)).collect();
    assert!((3..=5).contains(&greedy.len()), "{greedy:?}");
    let modest = wait(&mut pace, 2, 5, start).expect("there is room for another key");
    let mut order = Vec::new();
    for ms in (0..20_000).step_by(10) {
        for id in greedy.iter().chain([&modest]) {
            if matches!(pace.step(*id, Part::Own, start + ms as u32 * MS), Step::Go(_)) {
                order.push(*id);
            }
        }
    }
    assert_eq!(order.len(), greedy.len() + 1);
    assert_eq!(order.iter().position(|id| *id == modest), Some(1), "behind the first of the other key");
}

/// Requests of one key that give up one after the other leave the turn to the next of the same key, although another
/// key, with one patient request at a time, always comes in front of those that have queued longer.
#[test]
fn a_turn_stays_with_its_key_when_a_request_gives_up() {
    let start = Instant::now();
    let mut pace = pace(600, 0, 1, start);
    while pace.at_once(first(1), Part::Own, start).is_ok() {}
    let (mut hasty, mut patient) = (Vec::new(), None);
    let (mut sent_hasty, mut sent_patient) = (0, 0);
    for ms in (0..20_000_u64).step_by(10) {
        let now = start + ms as u32 * MS;
        if ms % 50 == 0 {
            hasty.extend(wait(&mut pace, 1, 1, now).map(|id| (id, now + seconds(1))));
        }
        if patient.is_none() {
            patient = wait(&mut pace, 2, 5, now);
        }
        hasty.retain(|(id, until)| match pace.step(*id, Part::Own, now) {
            Step::Go(_) => {
                sent_hasty += 1;
                false
            }
            Step::Wait(wait) if now + wait > *until => {
                pace.leave(*id);
                false
            }
            _ if now >= *until => {
                pace.leave(*id);
                false
            }
            _ => true,
        });
        if patient.is_some_and(|id| matches!(pace.step(id, Part::Own, now), Step::Go(_))) {
            (sent_patient, patient) = (sent_patient + 1, None);
        }
    }
    assert!(sent_hasty * 10 >= sent_patient * 9, "{sent_hasty} beside {sent_patient}");
}

#[test]
fn a_full_line_makes_room_for_whoever_has_less_in_it() {
    let start = Instant::now();
    let mut pace = pace(600_000, 0, 1, start);
    while pace.at_once(first(1), Part::Own, start).is_ok() {}
    let greedy: Vec<u64> = (0..LINE_MAX).map_while(|_| wait(&mut pace, 1, 60, start)).collect();
    assert_eq!((greedy.len(), wait(&mut pace, 1, 60, start)), (LINE_MAX, None));
    assert!(wait(&mut pace, 2, 60, start).is_some());
    assert!(matches!(pace.step(greedy[LINE_MAX - 1], Part::Own, start), Step::Out));
}

#[test]
fn an_extra_attempt_leaves_most_of_the_burst_and_of_the_tokens() {
    for (published, burst) in [(10, 1), (20, 2), (30, 3), (40, 4), (100, 10), (1000, 100)] {
        let (start, least) = (Instant::now(), (burst * 3_u32).div_ceil(4));
        let mut pace = pace(published, 0, 1, start);
        let mut sent = 0;
        let wait = loop {
            match pace.at_once(extra(1), Part::Own, start) {
                Ok(_) => sent += 1,
                Err(wait) => break wait,
            }
        };
        assert_eq!(sent, burst - least + 1, "{published}: one for each that is there beyond the part of the others");
        assert!(pace.at_once(extra(1), Part::Own, start + wait - MS).is_err(), "{published}");
        assert!(pace.at_once(extra(1), Part::Own, start + wait).is_ok(), "{published}");
        let first = (0..burst + 1).filter(|_| pace.at_once(first(2), Part::Own, start + wait).is_ok()).count();
        assert_eq!(first as u32, least - 1, "{published}: the others have their part");
    }
    let start = Instant::now();
    let mut pace = pace(0, 1000, 1, start);
    let with = |tokens, request: Request| Request { tokens, ..request };
    assert!(pace.at_once(with(700, extra(1)), Part::Own, start).is_ok());
    assert!(pace.at_once(with(100, extra(1)), Part::Own, start).is_err());
    assert!(pace.at_once(with(300, first(2)), Part::Own, start).is_ok());
    // One that needs more than such a part waits for an empty minute and reserves all that it needs.
    let next = start + seconds(62);
    assert!(pace.at_once(with(900, extra(1)), Part::Own, next).is_ok());
    assert!(pace.at_once(with(250, first(2)), Part::Own, next).is_err());
}

#[test]
fn an_extra_attempt_waits_behind_all_others() {
    let start = Instant::now();
    let mut pace = pace(40, 0, 1, start);
    let apart = pace.own.apart;
    for _ in 0..2 {
        assert!(pace.at_once(first(1), Part::Own, start).is_ok());
    }
    let Joined::Waits(waits, _) = pace.join(extra(1), seconds(60), Part::Own, start) else { panic!("one is missing") };
    assert!(pace.at_once(first(2), Part::Own, start).is_ok(), "who waits for a spare turn holds up nobody");
    assert!(pace.at_once(first(2), Part::Own, start).is_ok());
    let behind = wait(&mut pace, 2, 60, start).expect("it waits for the next");
    assert!(matches!(pace.step(waits, Part::Own, start + apart), Step::Behind));
    assert!(matches!(pace.step(behind, Part::Own, start + apart), Step::Go(_)));
    let Step::Wait(wait) = pace.step(waits, Part::Own, start + apart) else { panic!("three are missing") };
    assert!(wait > apart * 2 && wait <= apart * 3, "{wait:?}");
}

/// However long a request may wait, an extra attempt gives up after one spacing where first attempts go on to come.
#[test]
fn an_extra_attempt_waits_for_one_spacing_at_most() {
    for published in [40, 1000] {
        let start = Instant::now();
        let mut pace = pace(published, 0, 1, start);
        let apart = pace.own.apart;
        while pace.at_once(first(1), Part::Own, start).is_ok() {}
        assert!(matches!(pace.join(extra(1), seconds(60), Part::Own, start), Joined::Refused(_)), "{published}");
        // One request short of what it needs.
        let needed = (published / 10 * 3).div_ceil(4);
        let now = start + apart * needed - apart / 2;
        let Joined::Waits(id, _) = pace.join(extra(1), seconds(60), Part::Own, now) else { panic!("half a spacing") };
        assert!(pace.at_once(first(1), Part::Own, now).is_ok());
        let until = now + pace.longest_wait(extra(1), seconds(60), Part::Own);
        let Step::Wait(wait) = pace.step(id, Part::Own, until - MS) else { panic!("a first attempt was before it") };
        assert!(until - MS + wait > until, "{published}: it gives up");
    }
}

#[test]
fn an_extra_attempt_takes_no_place_of_a_first_one() {
    let start = Instant::now();
    let mut pace = pace(600_000, 0, 1, start);
    while pace.at_once(first(1), Part::Own, start).is_ok() {}
    assert_eq!((0..LINE_MAX).filter_map(|_| wait(&mut pace, 1, 60, start)).count(), LINE_MAX);
    assert!(matches!(pace.join(extra(2), seconds(60), Part::Own, start), Joined::Refused(_)));
}

proptest! {
    /// Property: every waiter is sent or leaves, a leaver delays nobody, and the line never exceeds the key's pace.
    #[test]
    fn everybody_in_line_is_sent_or_leaves(
        steps in prop::collection::vec((0_u8..4, any::<bool>(), 0_u64..400, any::<bool>()), 1..120),
    ) {
        let start = Instant::now();
        let mut now = start;
        let mut pace = pace(120, 0, 1, start);
        let mut line = Vec::new();
        for (name, is_extra, ms, leaves) in steps {
            now += ms as u32 * MS;
            match pace.join(Request { is_extra, ..first(name) }, seconds(30), Part::Own, now) {
                Joined::Waits(id, _) if leaves => pace.leave(id),
                Joined::Waits(id, _) => line.push(id),
                Joined::Go(_) | Joined::Refused(_) => {}
            }
            line.retain(|id| !matches!(pace.step(*id, Part::Own, now), Step::Go(_)));
        }
        for _ in 0..1000 {
            now += 100 * MS;
            line.retain(|id| !matches!(pace.step(*id, Part::Own, now), Step::Go(_)));
        }
        prop_assert!(line.is_empty() && pace.line.is_empty());
    }
}

#[tokio::test]
async fn who_waits_is_woken_and_who_gives_up_holds_up_nobody() {
    let config = PacingConfig { requests_per_minute: 6000, tokens_per_minute: 0, gateways: 1, wait: seconds(30) };
    let pacer = Pacer::new(&config, Instant::now());
    while pacer.at_once(first(1), None).await.is_ok() {}
    let waiting = |name| {
        let pacer = pacer.clone();
        tokio::spawn(async move { pacer.wait(first(name), seconds(30), None).await.is_ok() })
    };
    let mut all: Vec<_> = (0..20).map(|at| waiting(at % 3)).collect();
    all.remove(0).abort();
    for one in all {
        assert!(tokio::time::timeout(seconds(60), one).await.expect("in time").expect("no panic"));
    }
    assert!(pacer.pace().line.is_empty());
}

/// Counters of one minute that never ends, for several gateways.
struct Counted {
    room: AtomicU64,
    is_up: AtomicBool,
    asked: AtomicU64,
}

struct Counts(Arc<Counted>, u64);

impl SharedHold for Counts {
    fn settle(self: Box<Self>, is_sent: bool, _: Option<u64>) {
        if !is_sent {
            self.0.room.fetch_add(self.1, Ordering::SeqCst);
        }
    }
}

#[async_trait]
impl SharedPace for Arc<Counted> {
    fn is_up(&self) -> bool {
        self.is_up.load(Ordering::SeqCst)
    }

    async fn take(&self, asked: &SharedAsk<'_>) -> SharedAnswer {
        assert_eq!(asked.key, "key");
        // An extra attempt finds the last quarter of the minute taken.
        let kept = 6000 - asked.requests_per_minute;
        self.asked.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
        if !self.is_up() {
            return SharedAnswer::Away(Box::new(Counts(self.clone(), 0)));
        }
        let taken = self.room.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |room| (room > kept).then(|| room - 1));
        taken.map_or(SharedAnswer::Full, |_| SharedAnswer::Counted(Box::new(Counts(self.clone(), 1))))
    }
}

fn counted(room: u64) -> Arc<Counted> {
    Arc::new(Counted { room: AtomicU64::new(room), is_up: AtomicBool::new(true), asked: AtomicU64::new(0) })
}

fn sixth(gateways: u32) -> Arc<Pacer> {
    let config = PacingConfig { requests_per_minute: 6000, tokens_per_minute: 0, gateways, wait: seconds(30) };
    Pacer::new(&config, Instant::now())
}

#[tokio::test]
async fn gateways_that_count_together_send_no_more_than_one_alone_and_lend_what_they_do_not_use() {
    let counters = counted(90);
    let together = || Some(Together { counters: &counters, key: "key" });
    let (one, two) = (sixth(2), sixth(2));
    // Alone, one of two gateways would have a burst of 300.
    let mut sent = 0;
    while one.at_once(first(1), together()).await.is_ok() {
        sent += 1;
    }
    assert_eq!(sent, 90, "what the other gateway does not use is lent");
    assert!(two.at_once(first(1), together()).await.is_err(), "nothing is left for the other");
    counters.room.store(1, Ordering::SeqCst);
    assert!(two.wait(first(1), seconds(30), together()).await.is_ok(), "who waits goes when there is room");
}

#[tokio::test]
async fn an_extra_attempt_leaves_a_quarter_of_what_gateways_count_together() {
    let counters = counted(1501);
    let together = || Some(Together { counters: &counters, key: "key" });
    let (one, two) = (sixth(2), sixth(2));
    assert!(one.at_once(extra(1), together()).await.is_ok(), "more than a quarter is left");
    for gateway in [&one, &two] {
        assert!(gateway.at_once(extra(1), together()).await.is_err(), "a quarter is left");
        assert!(gateway.at_once(first(1), together()).await.is_ok(), "it is for first attempts, which go on");
    }
    assert!(one.wait(extra(1), seconds(30), together()).await.is_err(), "it does not wait until others leave more");
}

#[tokio::test]
async fn gateways_whose_counters_are_away_take_their_part_and_give_back_what_they_did_not_send() {
    let counters = counted(1000);
    let together = || Some(Together { counters: &counters, key: "key" });
    let pacer = sixth(60);
    counters.is_up.store(false, Ordering::SeqCst);
    let mut sent = 0;
    while pacer.at_once(first(1), together()).await.is_ok() {
        sent += 1;
    }
    assert!((10..60).contains(&sent), "a burst of a sixtieth of the rate: {sent}");
    assert_eq!(counters.asked.load(Ordering::SeqCst), 0, "counters that are away are not waited for");
    counters.is_up.store(true, Ordering::SeqCst);
    let paced = pacer.at_once(first(1), together()).await.unwrap_or_else(|_| panic!("all of the rate"));
    assert_eq!(counters.room.load(Ordering::SeqCst), 999);
    drop(paced);
    assert_eq!(counters.room.load(Ordering::SeqCst), 999, "it was sent");
}

#[tokio::test]
async fn waiters_of_all_gateways_are_sent_in_turn_or_give_up_without_a_trace() {
    let counters = counted(10);
    let pacers = [sixth(1), sixth(1)];
    let waiting = |at: usize| {
        let (pacer, counters) = (pacers[at % 2].clone(), counters.clone());
        tokio::spawn(async move {
            let together = Some(Together { counters: &counters, key: "key" });
            pacer.wait(first(at as u8 % 3), seconds(30), together).await.is_ok()
        })
    };
    let mut all: Vec<_> = (0..60).map(waiting).collect();
    for leaves in all.drain(40..) {
        leaves.abort();
    }
    let refill = counters.clone();
    let refill = tokio::spawn(async move {
        for _ in 0..200 {
            tokio::time::sleep(20 * MS).await;
            refill.room.fetch_add(1, Ordering::SeqCst);
        }
    });
    for one in all {
        assert!(tokio::time::timeout(seconds(60), one).await.expect("in time").expect("no panic"));
    }
    refill.abort();
    assert!(pacers.iter().all(|pacer| pacer.pace().line.is_empty()));
}
