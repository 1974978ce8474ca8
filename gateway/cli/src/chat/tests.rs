//! Tests of the terminal client against a server with scripted answers.

use std::io::Cursor;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const MODELS: &str = r#"{"object":"list","data":[{"id":"first"},{"id":"second"}]}"#;

/// Serves connections in turn with `answers`; returns its URL and the requests' bodies once all were served.
async fn serve(answers: Vec<String>) -> (String, tokio::task::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let task = tokio::spawn(async move {
        let mut requests = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            requests.push(read_request(&mut stream).await);
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
        requests
    });
    (url, task)
}

async fn read_request(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok()).unwrap_or(0);
            if body.len() >= length {
                return text;
            }
        }
        assert!(stream.read_buf(&mut bytes).await.unwrap() > 0, "the client left within its request");
    }
}

fn whole_body(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
}

fn stream(payloads: &[&str]) -> String {
    let events: String = payloads.iter().map(|payload| format!("data: {payload}\n\n")).collect();
    format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n{events}")
}

fn args(url: &str) -> ChatArgs {
    ChatArgs {
        prompt: None,
        url: Some(url.into()),
        model: None,
        system: Some("Be brief.".into()),
        key_env: "NO_SUCH_KEY".into(),
        max_tokens: Some(7),
        temperature: Some(0.5),
    }
}

const HELLO: &str = r#"{"choices":[{"delta":{"role":"assistant","content":"Hel"},"finish_reason":null}]}"#;
const WORLD: &str = r#"{"choices":[{"delta":{"content":"lo"},"finish_reason":null}]}"#;
const THINK: &str = r#"{"choices":[{"delta":{"reasoning":"hm","reasoning_content":"hm"},"finish_reason":null}]}"#;
const STOP: &str = r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":1}}"#;

/// Pipes `prompt` to a server with `answer`; returns the output, its result and the requests.
async fn pipe(prompt: &str, answer: String) -> (String, anyhow::Result<()>, Vec<String>) {
    let (url, requests) = serve(vec![whole_body("200 OK", MODELS), answer]).await;
    let mut out = Vec::new();
    let result = answer_one(&args(&url), Cursor::new(prompt.to_owned()), Screen::new(&mut out, false)).await;
    (String::from_utf8(out).unwrap(), result, requests.await.unwrap())
}

#[tokio::test]
async fn a_piped_prompt_gets_the_answer_alone() {
    let (out, result, requests) = pipe("Hi\n", stream(&[THINK, HELLO, WORLD, STOP, USAGE, "[DONE]"])).await;
    result.unwrap();
    assert_eq!(out, "Hello\n");
    assert!(requests[0].starts_with("GET /v1/models HTTP/1.1\r\n"), "{}", requests[0]);
    let (head, body) = requests[1].split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n") && !head.contains("authorization"), "{head}");
    let want = r#"{"model":"first","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hi"}],"stream":true,"max_completion_tokens":7,"temperature":0.5}"#;
    assert_eq!(body, want);
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_an_error() {
    for broken in [stream(&[HELLO]), stream(&[HELLO, "[DONE]"]), stream(&[HELLO, "{"])] {
        let (out, result, _) = pipe("Hi", broken).await;
        assert!(out.starts_with("Hel"), "what came is shown");
        assert!(result.is_err());
    }
}

#[tokio::test]
async fn what_the_gateway_says_reaches_the_person() {
    let error = r#"{"error":{"message":"worker lost","type":"server_error","param":null,"code":"worker_failed"}}"#;
    let (_, result, _) = pipe("Hi", stream(&[HELLO, error])).await;
    assert_eq!(result.unwrap_err().to_string(), "worker lost");
    let (_, result, _) = pipe("Hi", whole_body("404 Not Found", error)).await;
    assert_eq!(result.unwrap_err().to_string(), "worker lost (404 Not Found)");
    let (_, result, _) = pipe("Hi", whole_body("502 Bad Gateway", "<html>")).await;
    assert_eq!(result.unwrap_err().to_string(), "the gateway answered 502 Bad Gateway");
}

#[tokio::test]
async fn an_empty_prompt_asks_nobody() {
    let result = answer_one(&args("http://127.0.0.1:1"), Cursor::new(" \n"), Screen::new(Vec::new(), false)).await;
    assert!(result.unwrap_err().to_string().contains("no prompt"));
}

#[tokio::test]
async fn dropping_an_answer_closes_its_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        stream.write_all(self::stream(&[HELLO]).as_bytes()).await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap_or(0)
    });
    let client = Client::connect(&url, None, Some("m".into()), Settings::default()).await.unwrap();
    let mut answer = client.ask(&[Message::user("Hi")]).await.unwrap();
    assert_eq!(answer.next().await.unwrap(), Some(Delta::Text("Hel".into())));
    drop(answer);
    tokio::time::timeout(Duration::from_secs(10), server).await.expect("the connection closes").unwrap();
}

#[tokio::test]
async fn urls_are_checked_and_may_end_in_v1() {
    for bad in ["localhost:8080", "ftp://x", "http://", "::"] {
        assert!(Client::connect(bad, None, Some("m".into()), Settings::default()).await.is_err(), "{bad}");
    }
    let (url, requests) = serve(vec![whole_body("200 OK", MODELS)]).await;
    let client =
        Client::connect(&format!("{url}/api/v1/"), Some("sk".into()), None, Settings::default()).await.unwrap();
    assert_eq!(client.model(), "first");
    let request = requests.await.unwrap().remove(0);
    assert!(
        request.starts_with("GET /api/v1/models ") && request.contains("authorization: Bearer sk\r\n"),
        "{request}"
    );
}

#[tokio::test]
async fn ctrl_c_is_not_lost_between_two_pieces_of_an_answer() {
    let pieces: Vec<&str> = std::iter::repeat_n(WORLD, 20_000).collect();
    let (url, _) = serve(vec![whole_body("200 OK", MODELS), stream(&pieces)]).await;
    let client = connect(&args(&url)).await.unwrap();
    let mut interrupts = signal(SignalKind::interrupt()).unwrap();
    // No task awaits the signal at this moment.
    let kill = std::process::Command::new("kill").args(["-INT", &std::process::id().to_string()]).status().unwrap();
    assert!(kill.success());
    let mut out = Vec::new();
    let mut screen = Screen::new(&mut out, true);
    let text = turn(&client, &[Message::user("Go on.")], &mut interrupts, &mut screen).await.unwrap();
    assert!(text.len() < 2 * pieces.len(), "the answer was stopped");
    assert!(String::from_utf8(out).unwrap().contains("stopped"));
}

#[test]
fn the_usual_variables_are_read_and_no_key_goes_where_it_is_not_meant_for() {
    let (here, far) = ("http://127.0.0.1:8080", "https://gateway.example/v1");
    let check = |url: Option<&str>, key_env: &str, set: &[(&str, &str)], want: (&str, Option<&str>)| {
        let args = ChatArgs { url: url.map(str::to_owned), key_env: key_env.into(), ..args("") };
        let env = |name: &str| set.iter().find(|(have, _)| *have == name).map(|(_, value)| (*value).to_owned());
        let want = Gateway { url: want.0.into(), key: want.1.map(str::to_owned) };
        assert_eq!(gateway(&args, &env), want, "{url:?} {key_env} {set:?}");
    };
    let (ours, openai, mine) = (("PENSTOCK_API_KEY", "ours"), ("OPENAI_API_KEY", "openai"), ("MINE", "mine"));
    let (base, base_here) = (("OPENAI_BASE_URL", far), ("OPENAI_BASE_URL", "http://localhost:9/v1"));
    check(None, KEY_ENV, &[], (here, None));
    check(None, KEY_ENV, &[("OPENAI_BASE_URL", ""), ("PENSTOCK_API_KEY", ""), openai], (here, Some("openai")));
    check(Some(here), KEY_ENV, &[ours, openai], (here, Some("ours")));
    for url in [here, "http://localhost/v1", "http://[::1]:8080"] {
        check(Some(url), KEY_ENV, &[openai, base], (url, Some("openai")));
    }
    check(Some(far), KEY_ENV, &[openai], (far, None));
    check(Some(far), KEY_ENV, &[ours, openai, base], (far, Some("ours")));
    check(Some(here), "MINE", &[openai], (here, None));
    check(Some(far), "MINE", &[ours, mine], (far, Some("mine")));
    check(None, KEY_ENV, &[base, openai, ours], (far, Some("openai")));
    check(None, KEY_ENV, &[base, ours], (far, None));
    check(None, "MINE", &[base, openai, mine], (far, Some("mine")));
    check(None, KEY_ENV, &[base_here, openai, ours], ("http://localhost:9/v1", Some("ours")));
}

#[tokio::test]
async fn a_refused_key_names_the_variable() {
    let answer = whole_body("401 Unauthorized", r#"{"error":{"message":"no key","type":"invalid_request_error"}}"#);
    let (_, result, _) = pipe("hi", answer).await;
    let said = format!("{:#}", result.expect_err("it is refused"));
    assert!(said.contains("no key") && said.contains("PENSTOCK_API_KEY") && said.contains("--key-env"), "{said}");
}
