//! Providers that publish their rates: which key, target or refusal a request gets that may not wait, and whose turn
//! comes first.

use std::time::Duration;

use penstock_hostile::provider::{Front, Provider, Step};
use penstock_hostile::raw::{Client, post, send};
use penstock_hostile::{PATIENCE, eventually};
use tokio::task::JoinSet;

/// Answer that has used this many tokens.
fn answer(tokens: u64) -> Vec<Step> {
    let message = r#"{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}"#;
    let usage = format!(r#"{{"prompt_tokens":0,"completion_tokens":{tokens}}}"#);
    let body = format!(r#"{{"id":"c","choices":[{message}],"usage":{usage}}}"#);
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
    vec![Step::Say(format!("{head}{}\r\n\r\n{body}", body.len()).into_bytes())]
}

/// Table of a provider at this address.
fn table(id: &str, provider: &Provider, keys: &str) -> String {
    format!("[[providers]]\nid = \"{id}\"\nbase_url = \"http://{}/v1\"\n{keys}\n", provider.address)
}

/// Request whose estimate is `tokens`, within 10: its bytes and its bound. `who`: the client's key.
fn chat(tokens: usize, who: &str) -> String {
    let body = format!(
        r#"{{"model":"chat","max_tokens":{},"messages":[{{"role":"user","content":"I am {who}"}}]}}"#,
        tokens - 25
    );
    let head = format!("Host: a\r\nConnection: close\r\nAuthorization: Bearer {who}\r\n");
    post("/v1/chat/completions", &body).replacen("Host: a\r\n", &head, 1)
}

/// Keys that the provider was asked with, in order.
fn keys_of(provider: &Provider) -> Vec<&'static str> {
    let key = |request: &String| if request.contains("Bearer sk-aaaa") { "a" } else { "b" };
    provider.seen.requests().iter().map(key).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_may_not_wait_goes_to_the_second_key_then_to_the_next_target_then_gets_a_429() {
    let one = Provider::start([950, 100, 100, 700].map(answer).to_vec()).await;
    let two = Provider::start(vec![answer(1)]).await;
    let model = "[[models]]\nname = \"chat\"\nto = [{ provider = \"one\", model = \"big\" }]\n\
                 fallback = [{ provider = \"two\", model = \"other\" }]\n";
    let keys = "keys_env = [\"KEY_A\", \"KEY_B\"]\ntokens_per_minute = 1000\npace_wait_ms = 20";
    let front = Front::start(
        &[table("one", &one, keys), table("two", &two, "requests_per_minute = 1\npace_wait_ms = 20"), model.into()]
            .concat(),
    )
    .await;
    for tokens in [950, 100, 100, 700] {
        let reply = send(front.address, chat(tokens, "c")).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
    }
    // It was the first key's turn in the third request, too, but that key has 50 tokens left.
    assert_eq!(keys_of(&one), ["a", "b", "b", "b"]);
    assert_eq!(two.seen.requests().len(), 0, "the first target had a free key");
    let reply = send(front.address, chat(200, "c")).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!((one.seen.requests().len(), two.seen.requests().len()), (4, 1), "no key of the first has 200 tokens");
    let reply = send(front.address, chat(200, "c")).await;
    let wait = reply.header("retry-after").and_then(|wait| wait.parse::<u64>().ok());
    assert!(reply.status == 429 && wait.is_some_and(|wait| (1..=60).contains(&wait)), "{}", reply.text);
    assert!(reply.text.contains("\"code\":\"rate_limit_exceeded\""), "{}", reply.text);
    assert_eq!((one.seen.requests().len(), two.seen.requests().len()), (4, 1), "nothing was sent");
    let metrics = front.gateway.render_metrics();
    for (provider, count) in [("one", 2), ("two", 1)] {
        let line = format!("penstock_provider_paced_total{{provider=\"{provider}\",outcome=\"refused\"}} {count}");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
}

/// A provider that asks for none for a minute gets none of the requests that wait for its pace: they go to the next target.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_line_leave_a_key_that_is_paused_meanwhile() {
    /// Requests that are sent at once at this rate, and requests that would be sent a second apart then.
    const BURST: usize = 6;
    const WAITING: usize = 10;
    let refusal = "HTTP/1.1 429 Too Many Requests\r\nretry-after: 60\r\ncontent-length: 2\r\n\r\n{}";
    let one = Provider::start(vec![vec![Step::Say(refusal.as_bytes().to_vec())]]).await;
    let two = Provider::start(vec![answer(1)]).await;
    let model = "[[models]]\nname = \"chat\"\nto = [{ provider = \"one\", model = \"big\" }]\n\
                 fallback = [{ provider = \"two\", model = \"other\" }]\n";
    let paced = "keys_env = [\"KEY_A\"]\nrequests_per_minute = 60\npace_wait_ms = 60000";
    let front = Front::start(&[table("one", &one, paced), table("two", &two, ""), model.into()].concat()).await;
    let mut asked = JoinSet::new();
    for _ in 0..BURST + WAITING {
        asked.spawn(send(front.address, chat(100, "c")));
    }
    let answered = asked.join_all().await.into_iter().filter(|reply| reply.status == 200).count();
    let sent = (one.seen.requests().len(), two.seen.requests().len());
    // A request may be sent before the first refusal has come.
    assert!(
        sent.0 <= BURST + 2 && sent.1 >= WAITING - 2 && answered >= WAITING - 2,
        "{answered} answered, {sent:?} sent"
    );
}

/// Nothing was sent to the target that is at its rate: going on to an equal one is no retry, however many do it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_provider_at_its_rate_cannot_take_goes_to_its_equals_without_a_retry() {
    let one = Provider::start(vec![answer(1)]).await;
    let (two, three) = (Provider::start(vec![answer(1)]).await, Provider::start(vec![answer(1)]).await);
    let model = "[[models]]\nname = \"chat\"\npolicy = \"order\"\nretries = 0\nretry_budget_percent = 0\n\
                 to = [{ provider = \"one\", model = \"m\" }, { provider = \"two\", model = \"m\" }, { provider = \"three\", model = \"m\" }]\n";
    let paced = "requests_per_minute = 1\npace_wait_ms = 0";
    let tables = [table("one", &one, paced), table("two", &two, paced), table("three", &three, ""), model.into()];
    let front = Front::start(&tables.concat()).await;
    for _ in 0..60 {
        let reply = send(front.address, chat(100, "c")).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
    }
    let asked = [&one, &two, &three].map(|provider| provider.seen.requests().len());
    assert!(asked[0] >= 1 && asked[1] >= 1 && asked[2] >= 40, "{asked:?}");
    assert_eq!(asked.iter().sum::<usize>(), 60);
    assert!(!front.gateway.render_metrics().contains("penstock_retries_denied_total{"), "nothing was denied");
}

/// A provider that takes 32 of its 40 seconds is not too slow for a request that has waited eleven for the pace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_the_pace_takes_no_time_of_a_slow_provider() {
    /// Requests that are sent at once at this rate, and requests that are sent a second apart then.
    const BURST: usize = 6;
    const WAITING: usize = 10;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    let event = r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}"#;
    let say = |text: &str| Step::Say(text.as_bytes().to_vec());
    let events = format!("{event}\n\ndata: [DONE]\n\n");
    let mut script = vec![vec![say(head), say(&events), Step::Close]; BURST + WAITING - 1];
    script.push(vec![say(head), Step::Gate, say(&events), Step::Close]);
    let provider = Provider::start(script).await;
    let model = "[[models]]\nname = \"chat\"\nretries = 0\nfirst_token_timeout_ms = 40000\n\
                 to = [{ provider = \"one\", model = \"big\" }]\n";
    let paced = "requests_per_minute = 60\npace_wait_ms = 60000\nfirst_token_timeout_ms = 40000";
    let front = Front::start(&[table("one", &provider, paced), model.into()].concat()).await;
    let body = r#"{"model":"chat","stream":true,"max_tokens":75,"messages":[{"role":"user","content":"hi"}]}"#;
    let streamed = post("/v1/chat/completions", body).replacen("Host: a", "Connection: close\r\nHost: a", 1);
    let mut asked = JoinSet::new();
    for _ in 0..BURST + WAITING {
        let (address, streamed) = (front.address, streamed.clone());
        asked.spawn(async move {
            let mut client = Client::connect(address).await;
            client.send(streamed).await;
            client.until(Duration::from_secs(120), |_| false).await
        });
    }
    eventually("all are sent", || provider.seen.requests().len() == BURST + WAITING).await;
    tokio::time::sleep(Duration::from_secs(32)).await;
    provider.seen.go_on();
    while let Some(reply) = asked.join_next().await {
        let reply = reply.expect("no panic");
        assert!(reply.status == 200 && reply.text.contains("[DONE]"), "{}", reply.text);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_line_of_one_client_key_does_not_starve_another() {
    /// Requests that are sent at once at this rate, and requests of the greedy key that wait then, a second apart.
    const BURST: usize = 6;
    const WAITING: usize = 40;
    let provider = Provider::start(vec![answer(1)]).await;
    let model = "[[models]]\nname = \"chat\"\nto = [{ provider = \"one\", model = \"big\" }]\n";
    let keys = "[[keys]]\nid = \"greedy\"\nkey_env = \"KEY_A\"\n[[keys]]\nid = \"modest\"\nkey_env = \"KEY_B\"\n";
    let paced = table("one", &provider, "requests_per_minute = 60\npace_wait_ms = 60000");
    let front = Front::start(&[paced, model.into(), keys.into()].concat()).await;
    let mut greedy = JoinSet::new();
    for _ in 0..BURST + WAITING {
        greedy.spawn(send(front.address, chat(100, "sk-aaaa")));
    }
    let seen = || provider.seen.requests();
    let is_full = || seen().len() >= BURST && seen().len() + front.gateway.live.list().len() >= BURST + WAITING;
    eventually("the others wait", is_full).await;
    let modest = tokio::spawn(send(front.address, chat(100, "sk-bbbb")));
    let is_there = || front.gateway.live.list().iter().any(|live| live.key.as_deref() == Some("modest"));
    eventually("the other key's request is there", is_there).await;
    let before = seen().len();
    let reply = tokio::time::timeout(PATIENCE, modest).await.expect("in time").expect("no panic");
    assert_eq!(reply.status, 200, "{}", reply.text);
    let at = seen().iter().position(|request| request.contains("I am sk-bbbb")).expect("it was sent");
    // In front of most that came before it, of which one is sent a second. First in, first out would be 46; on an
    // idle machine it is 7 or 8.
    assert!(at <= before + 15, "it was sent as number {at}, and {before} were sent before it came");
    greedy.abort_all();
    while greedy.join_next().await.is_some() {}
    eventually("nobody waits", || front.gateway.live.list().is_empty()).await;
}
