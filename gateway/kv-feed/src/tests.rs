//! Tests of feeds against a test publisher: late subscription, gaps, lost connections.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_proto::BlockHash;
use penstock_router::foreign::zmtp::{Role, Zmtp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use super::follow::confirm;
use super::{Endpoint, Feed, chain, start};
use crate::KvEventsConfig;

/// Event in array form: block `number` of 32 tokens, behind the block before it.
fn stored(number: u64) -> Vec<u8> {
    let mut out = vec![0x92, 0xc0, 0x91, 0x96, 0xab];
    out.extend_from_slice(b"BlockStored");
    let hash = |out: &mut Vec<u8>, number: u64| {
        out.push(0xcf);
        out.extend_from_slice(&(number + 1).to_be_bytes());
    };
    out.push(0x91);
    hash(&mut out, number);
    match number.checked_sub(1) {
        Some(parent) => hash(&mut out, parent),
        None => out.push(0xc0),
    }
    out.extend_from_slice(&[0xdc, 0, 32]);
    for token in tokens(number) {
        out.push(0xce);
        out.extend_from_slice(&token.to_be_bytes());
    }
    out.extend_from_slice(&[32, 0xc0]);
    out
}

fn tokens(number: u64) -> impl Iterator<Item = u32> {
    (0..32).map(move |token| number as u32 * 100 + token)
}

type Message = (u64, Vec<u8>);

/// Test server that publishes events and replays those it keeps.
struct Publisher {
    events: Endpoint,
    replay: Endpoint,
    live: broadcast::Sender<Option<Message>>,
    kept: Arc<Mutex<Vec<Message>>>,
    _tasks: JoinSet<()>,
}

async fn exchange(stream: &mut TcpStream, zmtp: &mut Zmtp) -> Option<()> {
    let output = zmtp.take_output();
    stream.write_all(&output).await.ok()?;
    let mut buffer = [0; 4096];
    let count = stream.read(&mut buffer).await.ok().filter(|count| *count > 0)?;
    zmtp.feed(&buffer[..count]).ok()
}

async fn publish(mut stream: TcpStream, mut live: broadcast::Receiver<Option<Message>>) -> Option<()> {
    let mut zmtp = Zmtp::new(Role::Dealer, 1 << 20);
    while zmtp.message().is_none() {
        exchange(&mut stream, &mut zmtp).await?;
    }
    while let Some((sequence, payload)) = live.recv().await.ok()? {
        zmtp.send(&[b"kv", &sequence.to_be_bytes(), &payload]);
        stream.write_all(&zmtp.take_output()).await.ok()?;
    }
    None
}

async fn answer(mut stream: TcpStream, kept: Arc<Mutex<Vec<Message>>>) -> Option<()> {
    let mut zmtp = Zmtp::new(Role::Dealer, 1 << 20);
    let asked = loop {
        if let Some(asked) = zmtp.message() {
            break asked;
        }
        exchange(&mut stream, &mut zmtp).await?;
    };
    assert_eq!(asked[0], b"", "as REQ asks ROUTER");
    let from = u64::from_be_bytes(asked[1].as_slice().try_into().expect("a number"));
    for (sequence, payload) in kept.lock().expect("kept").iter().filter(|(sequence, _)| *sequence >= from) {
        zmtp.send(&[b"", b"kv", &sequence.to_be_bytes(), payload]);
    }
    zmtp.send(&[b"", b"", &[0xff; 8], b""]);
    stream.write_all(&zmtp.take_output()).await.ok()?;
    stream.read(&mut [0]).await.ok().map(drop)
}

impl Publisher {
    async fn new() -> Self {
        let listen = || async { TcpListener::bind("127.0.0.1:0").await.expect("a port") };
        let (events, replay) = (listen().await, listen().await);
        let endpoint = |listener: &TcpListener| {
            Endpoint::parse(&format!("tcp://{}", listener.local_addr().expect("an address"))).expect("an endpoint")
        };
        let (events_at, replay_at) = (endpoint(&events), endpoint(&replay));
        let (live, kept) = (broadcast::Sender::new(64), Arc::<Mutex<Vec<Message>>>::default());
        let mut tasks = JoinSet::new();
        let (sender, buffer) = (live.clone(), kept.clone());
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    Ok((stream, _)) = events.accept() => drop(connections.spawn(publish(stream, sender.subscribe()))),
                    Ok((stream, _)) = replay.accept() => drop(connections.spawn(answer(stream, buffer.clone()))),
                }
            }
        });
        Self { events: events_at, replay: replay_at, live, kept, _tasks: tasks }
    }

    fn feed(&self, with_replay: bool) -> Arc<Feed> {
        let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
        let replay = with_replay.then(|| self.replay.clone());
        let feed = Feed::new("test", &KvEventsConfig { endpoint: self.events.clone(), replay, tokenizer });
        start(std::slice::from_ref(&feed));
        feed
    }

    /// Publishes a block, or only keeps it for replays.
    fn say(&self, number: u64, aloud: bool) {
        let message = (number, stored(number));
        self.kept.lock().expect("kept").push(message.clone());
        if aloud {
            let _ = self.live.send(Some(message));
        }
    }
}

/// Number of leading blocks of the chain that the feed knows.
fn hit(feed: &Feed) -> u32 {
    let prompt: Vec<u32> = (0..10).flat_map(tokens).collect();
    loop {
        if let Some((on_device, _)) = feed.hits(&chain(&prompt)) {
            return on_device;
        }
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap_or_else(|_| panic!("{what} never came"));
}

/// Publishes until the subscriber has received something: a new subscriber misses all earlier messages.
async fn until_heard(publisher: &Publisher, feed: &Feed) {
    until("the subscription", || feed.state().connected && publisher.live.receiver_count() > 0).await;
}

#[tokio::test]
async fn a_feed_that_comes_late_asks_for_what_was_before() {
    let publisher = Publisher::new().await;
    (0..3).for_each(|number| publisher.say(number, false));
    let feed = publisher.feed(true);
    until("the replay", || hit(&feed) == 3).await;
    until_heard(&publisher, &feed).await;
    publisher.say(3, true);
    until("the next block", || hit(&feed) == 4).await;
    assert!(feed.text().is_some());
    let state = feed.state();
    assert_eq!((state.gaps, state.replayed, state.skipped, state.blocks), (0, 3, 0, 4));
}

#[tokio::test]
async fn a_gap_is_filled_by_replay() {
    let publisher = Publisher::new().await;
    let feed = publisher.feed(true);
    until_heard(&publisher, &feed).await;
    publisher.say(0, true);
    until("the first block", || hit(&feed) == 1).await;
    publisher.say(1, false);
    publisher.say(2, true);
    until("both blocks", || hit(&feed) == 3).await;
    assert_eq!(feed.state().gaps, 1);
}

#[tokio::test]
async fn a_server_that_has_forgotten_its_last_batch_is_another_process() {
    let publisher = Publisher::new().await;
    let feed = publisher.feed(true);
    confirm(&feed).await.expect("it has said nothing so far");
    until_heard(&publisher, &feed).await;
    publisher.say(0, true);
    publisher.say(1, true);
    until("two blocks", || hit(&feed) == 2).await;
    confirm(&feed).await.expect("it is the same process");
    publisher.kept.lock().expect("kept").truncate(1);
    assert!(confirm(&feed).await.is_err(), "batch 1 was said and is not known");
}

#[tokio::test]
async fn without_replay_a_gap_means_to_begin_anew() {
    let publisher = Publisher::new().await;
    let feed = publisher.feed(false);
    until_heard(&publisher, &feed).await;
    publisher.say(0, true);
    publisher.say(1, true);
    until("two blocks", || hit(&feed) == 2).await;
    publisher.say(3, true);
    until("the gap", || feed.state().gaps == 1).await;
    until("the end of what was known", || hit(&feed) == 0).await;
    assert_eq!(feed.state().skipped, 1, "nobody knows what block 3 stands behind");
}

#[tokio::test]
async fn a_lost_connection_forgets_and_comes_back() {
    let publisher = Publisher::new().await;
    publisher.say(0, false);
    let feed = publisher.feed(true);
    until("the replay", || hit(&feed) == 1).await;
    until_heard(&publisher, &feed).await;
    // Another process is behind the address now, and has published other events.
    publisher.kept.lock().expect("kept").clear();
    let _ = publisher.live.send(None);
    until("the end of what was known", || hit(&feed) == 0).await;
    until_heard(&publisher, &feed).await;
    publisher.say(0, true);
    until("the first block of its new life", || hit(&feed) == 1).await;
    assert_eq!(feed.state().malformed, 0);
}

#[tokio::test]
async fn a_replay_without_an_end_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = Endpoint::parse(&format!("tcp://{}", listener.local_addr().expect("an address"))).expect("good");
    let server = async {
        let (mut stream, _) = listener.accept().await.ok()?;
        let mut zmtp = Zmtp::new(Role::Dealer, 1 << 20);
        while zmtp.message().is_none() {
            exchange(&mut stream, &mut zmtp).await?;
        }
        (0..1000).for_each(|_| zmtp.send(&[b"", &[0; 8], b""]));
        let same = zmtp.take_output();
        while stream.write_all(&same).await.is_ok() {}
        None::<()>
    };
    let mut heard = 0_u32;
    let (told, _) = tokio::join!(super::client::replay(&endpoint, 0, |_| heard += 1), server);
    assert!(told.is_err() && heard > 100_000, "{told:?} after {heard}");
}

/// Number of lookups that found a block during a long message, the longest lookup, and the duration of all.
fn looks_meanwhile(payload: &[u8], prompt: &[BlockHash]) -> (u32, Duration, Duration) {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
    let endpoint = Endpoint::parse("tcp://127.0.0.1:9").expect("an endpoint");
    let feed = Feed::new("test", &KvEventsConfig { endpoint, replay: None, tokenizer });
    let is_taken = std::sync::atomic::AtomicBool::new(false);
    let (mut seen, mut longest) = (0_u32, Duration::ZERO);
    let took = std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            let began = std::time::Instant::now();
            assert_eq!(feed.hear(&[0_u64.to_be_bytes().to_vec(), payload.to_vec()]), super::Heard::Fine);
            is_taken.store(true, std::sync::atomic::Ordering::Relaxed);
            began.elapsed()
        });
        while !is_taken.load(std::sync::atomic::Ordering::Relaxed) {
            let began = std::time::Instant::now();
            seen += u32::from(feed.hits(prompt) == Some((10, 10)));
            longest = longest.max(began.elapsed());
        }
        taking.join().expect("taken")
    });
    assert_eq!((feed.state().batches, feed.state().skipped, hit(&feed)), (1, 0, 0));
    (seen, longest, took)
}

/// A long message from the server must neither delay a request nor leave it without an answer for the message's whole
/// duration.
#[test]
fn requests_wait_for_no_batch() {
    const BLOCKS: u64 = 30_000;
    // One message: an event per block, and a final one that clears all of them.
    let mut payload = vec![0x92, 0xc0, 0xdd];
    payload.extend_from_slice(&(BLOCKS as u32 + 1).to_be_bytes());
    (0..BLOCKS).for_each(|number| payload.extend_from_slice(&stored(number)[3..]));
    payload.extend_from_slice(b"\x91\xb0AllBlocksCleared");
    let prompt = chain(&(0..10).flat_map(tokens).collect::<Vec<_>>());
    // Lookups succeed in the middle of the message. The longest lookup depends on the scheduler too (but is far from
    // the whole duration), and a machine that stalls for a moment does not do so every time.
    let mut all = Vec::new();
    while !all.last().is_some_and(|(seen, longest, took)| *seen > 100 && *longest < *took / 2) {
        assert!(all.len() < 5, "seen, the longest look, the whole: {all:?}");
        all.push(looks_meanwhile(&payload, &prompt));
    }
}

#[test]
fn endpoints_are_of_one_server() {
    for text in
        ["ipc:///tmp/x", "tcp://*:5557", "tcp://host", "tcp://:5557", "tcp://host:0", "tcp://host:99999", "host:1"]
    {
        assert!(Endpoint::parse(text).is_err(), "{text}");
    }
    assert_eq!(Endpoint::parse("tcp://[::1]:5557").expect("good").to_string(), "tcp://[::1]:5557");
}
