//! Two providers behind one name, through the real client and the real listener.

use std::net::SocketAddr;

use penstock_hostile::provider::{Front, Provider, Script, Step};
use penstock_hostile::raw::{Client, Reply, post, send};
use penstock_hostile::{Vacant, eventually};

const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
const PIECE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":null}]}\n\n";
const LAST: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const COUNTS: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1000,\"completion_tokens\":500}}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const ERROR: &str =
    "data: {\"error\":{\"message\":\"overloaded\",\"type\":\"server_error\",\"code\":null,\"param\":null}}\n\n";
const WHOLE: &str = r#"{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1000,"completion_tokens":500}}"#;

fn say(text: impl Into<String>) -> Step {
    Step::Say(text.into().into_bytes())
}

fn stream(events: &[&str]) -> Vec<Step> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunks = events.iter().map(|event| say(format!("{:x}\r\n{event}\r\n", event.len())));
    std::iter::once(say(head)).chain(chunks).collect()
}

fn ended(events: &[&str]) -> Vec<Step> {
    let mut steps = stream(events);
    steps.push(say("0\r\n\r\n"));
    steps
}

fn whole(status: &str, body: &str) -> Vec<Step> {
    let length = body.len();
    vec![say(format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"))]
}

/// Starts `chat` at the first provider, with the second as fallback.
async fn setup(first: Script, second: Script, keys: &str) -> (Provider, Provider, Front) {
    let (first, second) = (Provider::start(first).await, Provider::start(second).await);
    let front = front(first.address, second.address, keys).await;
    (first, second, front)
}

/// Starts `chat` at the first address, with the second as fallback.
async fn front(first: SocketAddr, second: SocketAddr, keys: &str) -> Front {
    let provider = |id, address| format!("[[providers]]\nid = \"{id}\"\nbase_url = \"http://{address}/v1\"\n");
    let model = "[[models]]\nname = \"chat\"\nto = [{ provider = \"one\", model = \"big\" }]\n\
                 fallback = [{ provider = \"two\", model = \"other\" }]\nretries = 0\nprice = { input = 1, output = 4 }\n";
    Front::start(&[provider("one", first), provider("two", second), model.to_owned(), keys.to_owned()].concat()).await
}

fn chat(stream: bool, fields: &str) -> String {
    let body = format!(r#"{{"model":"chat","stream":{stream},"messages":[{{"role":"user","content":"hi"}}]}}"#);
    let head = format!("Host: a\r\nConnection: close\r\n{fields}");
    post("/v1/chat/completions", &body).replacen("Host: a\r\n", &head, 1)
}

/// Payload of a chunked answer.
fn payload(reply: &Reply) -> String {
    let (_, mut rest) = reply.text.split_once("\r\n\r\n").expect("a head");
    let mut out = String::new();
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let Ok(size) = usize::from_str_radix(size, 16) else { break };
        out.push_str(tail.get(..size).unwrap_or(tail));
        rest = tail.get(size + 2..).unwrap_or_default();
    }
    out
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_in_the_first_events_of_a_good_status_falls_back() {
    let good = ended(&[ROLE, PIECE, LAST, DONE]);
    let (one, two, front) = setup(vec![ended(&[ROLE, ERROR])], vec![good], "").await;
    let reply = send(front.address, chat(true, "")).await;
    assert_eq!((reply.status, payload(&reply)), (200, [ROLE, PIECE, LAST, DONE].concat()), "{}", reply.text);
    assert!(reply.is_whole());
    assert_eq!(
        (reply.header("x-penstock-target"), reply.header("x-penstock-attempts")),
        (Some("two/other"), Some("2"))
    );
    let (first, second) = (one.seen.requests(), two.seen.requests());
    assert!(first[0].contains(r#""model":"big""#) && second[0].contains(r#""model":"other""#), "each by its own name");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_there_falls_back_and_is_left_alone() {
    let (one, two) = (Vacant::new(), Provider::start(vec![whole("200 OK", WHOLE)]).await);
    let front = front(one.address, two.address, "").await;
    let is_left_alone = || front.gateway.render_metrics().contains(r#"reason="ejected"} "#);
    let mut asked = 0;
    // After a pause of the machine of a second, the next request is a probe.
    while asked < 7 || !is_left_alone() {
        let reply = send(front.address, chat(false, "")).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        asked += 1;
        assert!(asked < 1000, "it is asked all the time");
    }
    assert_eq!(two.seen.requests().len(), asked);
    let metrics = front.gateway.render_metrics();
    let answered = format!(r#"penstock_attempts_total{{model="chat",target="two/other",outcome="answered"}} {asked}"#);
    for line in [
        r#"penstock_attempts_total{model="chat",target="one/big",outcome="error"} "#,
        answered.as_str(),
        r#"penstock_fallbacks_total{model="chat",reason="ejected"} "#,
        r#"penstock_target_state{target="one/big"} "#,
    ] {
        assert!(metrics.contains(line), "{line} in\n{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_after_its_first_token_is_broken() {
    // So many bytes that the first are forwarded long before the last are read.
    let chunk = |event: &str| format!("{:x}\r\n{event}\r\n", event.len());
    let mut steps = stream(&[ROLE]);
    steps.extend([Step::Repeat(chunk(PIECE).into_bytes(), 20_000), say(chunk(ERROR)), say("0\r\n\r\n")]);
    let (_one, two, front) = setup(vec![steps], vec![whole("200 OK", WHOLE)], "").await;
    let reply = send(front.address, chat(true, "")).await;
    assert!(payload(&reply).contains("\"x\"") && payload(&reply).contains("\"error\""), "{}", reply.status);
    assert!(!reply.text.contains("[DONE]"));
    assert_eq!(two.seen.requests().len(), 0, "nobody else speaks for it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_too_large_is_made_once() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 73400320\r\n\r\n";
    let large = vec![say(head), Step::Repeat(vec![b' '; 1 << 20], 70)];
    let (one, two, front) = setup(vec![large], vec![whole("200 OK", WHOLE)], "").await;
    let reply = send(front.address, chat(false, "")).await;
    assert_eq!((reply.status, reply.header("x-should-retry")), (502, Some("false")), "{}", reply.text);
    assert_eq!((one.seen.requests().len(), two.seen.requests().len()), (1, 0), "no other target bills it too");
    let metrics = front.gateway.render_metrics();
    assert!(
        metrics.contains(r#"penstock_attempts_total{model="chat",target="one/big",outcome="unheld"} 1"#),
        "{metrics}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clients_fault_is_its_own() {
    let bad = r#"{"error":{"message":"too hot","type":"invalid_request_error","param":"temperature","code":null}}"#;
    let (_one, two, front) = setup(vec![whole("400 Bad Request", bad)], vec![whole("200 OK", WHOLE)], "").await;
    let reply = send(front.address, chat(false, "")).await;
    assert_eq!((reply.status, two.seen.requests().len()), (400, 0));
    assert!(reply.text.ends_with(bad), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_all_fail_the_client_learns_when_to_come_back() {
    let busy = |seconds| whole(&format!("503 Busy\r\nretry-after: {seconds}"), r#"{"error":{"message":"busy"}}"#);
    let (one, _two, front) = setup(vec![busy(9)], vec![busy(7)], "").await;
    let reply = send(front.address, chat(false, "")).await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("7")), "{}", reply.text);
    assert_eq!(reply.header("x-penstock-error-source"), Some("upstream"));
    let reply = send(front.address, chat(false, "")).await;
    assert_eq!((reply.status, reply.header("x-penstock-error-source")), (503, Some("gateway")), "{}", reply.text);
    assert_eq!(one.seen.requests().len(), 1, "nobody is asked before the time that it named");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cost_is_said_when_asked_for() {
    let streamed = ended(&[ROLE, PIECE, LAST, COUNTS, DONE]);
    let (_one, _two, front) = setup(vec![whole("200 OK", WHOLE), streamed], vec![whole("200 OK", WHOLE)], "").await;
    // 1000 prompt tokens for 1 dollar a million, 500 of output for 4.
    let reply = send(front.address, chat(false, "x-penstock-cost: 1\r\n")).await;
    assert_eq!(reply.header("x-penstock-cost"), Some("0.003000000"), "{}", reply.text);
    let reply = send(front.address, chat(true, "x-penstock-cost: 1\r\n")).await;
    assert!(payload(&reply).ends_with("data: [DONE]\n\n: x-penstock-cost: 0.003000000\n\n"), "{}", reply.text);
    assert!(reply.is_whole());
    let reply = send(front.address, chat(true, "")).await;
    assert!(payload(&reply).ends_with("data: [DONE]\n\n"), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hedge_wins_and_a_client_that_leaves_ends_both() {
    let mut silent = stream(&[ROLE]);
    silent.push(Step::Hang);
    let good = ended(&[ROLE, PIECE, LAST, DONE]);
    let (one, two, front) = setup(vec![silent.clone()], vec![good, silent], "hedge_after_ms = 50").await;
    let reply = send(front.address, chat(true, "")).await;
    assert_eq!(payload(&reply), [ROLE, PIECE, LAST, DONE].concat());
    assert_eq!(reply.header("x-penstock-hedged"), Some("one/big"));
    eventually("the loser is cancelled", || one.seen.left().is_some()).await;
    let mut client = Client::connect(front.address).await;
    client.send(chat(true, "")).await;
    eventually("both are asked", || one.seen.requests().len() == 2 && two.seen.requests().len() == 2).await;
    assert!(two.seen.left().is_none());
    drop(client);
    eventually("the second is cancelled too", || two.seen.left().is_some()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_active_check_finds_out_before_requests_do() {
    let sick = whole("500 Ill", "{}");
    let keys = "[[providers]]\nid = \"three\"\nbase_url = \"http://ADDRESS/v1\"\nhealth_path = \"/models\"\nhealth_interval_ms = 20\n\
                [[models]]\nname = \"watched\"\nto = [{ provider = \"three\", model = \"m\" }]\n";
    let three = Provider::start(vec![sick]).await;
    let (_one, _two, front) =
        setup(vec![Vec::new()], vec![Vec::new()], &keys.replace("ADDRESS", &three.address.to_string())).await;
    let mut asker = penstock_relay::Asker::default();
    asker.follow(front.gateway.serving().checks());
    eventually("it is left alone", || {
        front.gateway.render_metrics().contains("penstock_target_state{target=\"three/m\"} 3")
    })
    .await;
    drop(asker);
    let asked = three.seen.requests();
    assert!(asked.iter().all(|request| request.starts_with("GET /v1/models HTTP/1.1\r\n")), "{asked:?}");
}
