//! State that the API shows: models, providers, limits, and requests in flight.

use http::Method;
use penstock_auth::Principal;
use penstock_proxy::live_requests::About;
use serde_json::Value;

use super::{Api, PROVIDER_KEY, concrete, table};

#[test]
fn models_and_providers_are_shown_without_secrets() {
    let api = Api::start();
    let models = api.get("/admin/v1/models");
    let names: Vec<_> = models["data"].as_array().expect("a list").iter().map(|model| model["name"].clone()).collect();
    assert_eq!(names, ["big", "chat", "small"]);
    let chat = api.get("/admin/v1/models/default");
    assert_eq!((&chat["targets"][0]["id"], &chat["targets"][0]["weight"]), (&"acme/big".into(), &3.into()));
    assert_eq!((&chat["targets"][1]["weight"], &chat["targets"][1]["breaker"]), (&0.into(), &"closed".into()));
    let provider = api.get("/admin/v1/providers/acme");
    assert_eq!((&provider["url"], &provider["keys"]), (&"http://127.0.0.1:9/v1".into(), &0.into()));
    for (path, method, _) in table() {
        if method == Method::GET {
            let text = api.ask("GET", &concrete(&path), &["authorization: Bearer owner"], "").2;
            assert!(!text.contains(PROVIDER_KEY), "{path}");
        }
    }
    let first = api.get("/admin/v1/models?limit=2");
    assert_eq!(
        (&first["next"], api.get("/admin/v1/models?limit=2&after=chat")["data"][0]["name"].clone()),
        (&"chat".into(), "small".into())
    );
    let long = format!("after={}", "x".repeat(513));
    for wrong in ["limit=0", "limit=x", "limit=1001", "nonsense=1", &long] {
        assert_eq!(api.call("viewer", "GET", &format!("/admin/v1/models?{wrong}"), "").0, 400, "{wrong}");
    }
}

#[test]
fn live_requests_are_listed_and_cancelled_once() {
    let api = Api::start();
    let about = About { request_id: "req_1".into(), route: "/v1/chat/completions", ..About::default() };
    let (entry, cancelled) = api.gateway.live.begin(about, &Principal::default());
    entry.asks("chat", true);
    let listed = api.get("/admin/v1/requests?model=chat");
    assert_eq!(listed["data"][0]["request_id"], "req_1");
    assert_eq!(api.get("/admin/v1/requests?model=other")["data"], Value::Array(Vec::new()));
    let id = listed["data"][0]["id"].as_str().expect("an id").to_owned();
    let path = format!("/admin/v1/requests/{id}/cancel");
    assert_eq!(api.call("viewer", "POST", &path, "").0, 403);
    assert_eq!(api.call("operator", "POST", &path, "").0, 200);
    assert_eq!(api.call("operator", "POST", &path, "").0, 404, "told once");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(cancelled);
    drop(entry);
    assert_eq!(api.call("viewer", "GET", &format!("/admin/v1/requests/{id}"), "").0, 404);
}

#[test]
fn limits_say_whether_they_act() {
    let api = Api::start();
    let limit = api.get("/admin/v1/limits/small");
    assert_eq!(
        (&limit["measures"][0]["measure"], &limit["measures"][0]["max"]),
        (&"requests_per_minute".into(), &60.0.into()),
        "{limit}"
    );
    assert_eq!(limit["effective"], false, "nobody of the config names it");
    assert_eq!(api.get("/admin/v1/limits/small/counters")["data"], Value::Array(Vec::new()));
    assert_eq!(api.call("viewer", "GET", "/admin/v1/limits/other/counters", "").0, 404);
    assert_eq!(api.get("/admin/v1/status")["limits_ineffective"][0], "small");
}
