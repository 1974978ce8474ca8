//! Entries of the config as objects.

use serde_json::{Value, json};

use super::{Api, PROVIDER_KEY, config, text};

impl Api {
    fn etag(&self, path: &str) -> String {
        self.get(path)["etag"].as_str().expect("a tag").to_owned()
    }

    /// Answer to an owner's change under conditions.
    fn change_if(&self, method: &str, path: &str, condition: &str, body: &Value) -> (u16, Value) {
        let fields = ["authorization: Bearer owner", "content-type: application/json", condition];
        let (status, _, answer) = self.ask(method, path, &fields, &body.to_string());
        (status, serde_json::from_str(&answer).unwrap_or(Value::Null))
    }

    fn change(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        self.call("owner", method, path, &body.to_string())
    }

    fn text(&self) -> String {
        self.get("/admin/v1/config")["text"].as_str().expect("text").to_owned()
    }
}

const LIMIT: &str = "/admin/v1/config/limits/small";

#[test]
fn an_entry_is_made_changed_and_removed_in_the_text() {
    let api = Api::start();
    let before = api.text();
    let new = json!({ "id": "team/a%b", "in_flight": 3 });
    let (status, made) = api.change("POST", "/admin/v1/config/limits?note=for%20a", &new);
    assert_eq!(
        (status, &made["entry"]["value"], &made["config"]["changes"][0]["path"]),
        (201, &new, &"+limits[team/a%b]".into()),
        "{made}"
    );
    assert_eq!(api.get("/admin/v1/config/history")["data"][0]["note"], "for a");
    let path = "/admin/v1/config/limits/team%2Fa%25b";
    assert_eq!(api.get(path)["value"], new);
    assert_eq!(api.change("POST", "/admin/v1/config/limits", &new).0, 409);

    let (status, patched) = api.change("PATCH", path, &json!({ "in_flight": null, "tokens_per_minute": 9 }));
    assert_eq!((status, &patched["entry"]["value"]), (200, &json!({ "id": "team/a%b", "tokens_per_minute": 9 })));
    assert_eq!(api.get("/admin/v1/config/history")["data"][0]["note"], "update limits team/a%b");
    let in_force = api.get("/admin/v1/limits/team%2Fa%25b");
    assert_eq!(in_force["measures"][0]["measure"], "tokens_per_minute");

    let (status, put) = api.change("PUT", path, &json!({ "requests_per_minute": 5 }));
    assert_eq!((status, &put["entry"]["value"]), (200, &json!({ "id": "team/a%b", "requests_per_minute": 5 })));
    assert_eq!(api.change("PUT", path, &json!({ "id": "other", "requests_per_minute": 5 })).0, 400);
    let (status, renamed) = api.change("PATCH", path, &json!({ "id": "b" }));
    assert_eq!((status, &renamed["entry"]["id"]), (200, &"b".into()));

    let (status, gone) = api.change("DELETE", "/admin/v1/config/limits/b", &json!({}));
    assert_eq!((status, &gone["entry"]), (200, &Value::Null));
    assert_eq!(api.text(), before, "byte by byte");
    for (method, body) in [("GET", ""), ("PATCH", "{}"), ("DELETE", "")] {
        assert_eq!(api.call("owner", method, "/admin/v1/config/limits/b", body).0, 404, "{method}");
    }
    let events = api.call("owner", "GET", "/admin/v1/audit?action=entry.*&outcome=done", "").1;
    let told: Vec<_> = events["data"].as_array().expect("events").iter().map(|event| event["action"].clone()).collect();
    assert_eq!(told, ["entry.delete", "entry.update", "entry.replace", "entry.update", "entry.create"]);
    assert_eq!(events["data"][4]["target"], "limits/team/a%b");
}

#[test]
fn what_the_checks_refuse_changes_nothing() {
    let api = Api::start();
    let before = api.text();
    let bad = api.change("PATCH", LIMIT, &json!({ "requests_per_minute": "many", "wight": 2 }));
    assert_eq!((bad.0, &bad.1["error"]["param"]), (400, &"body".into()));
    let faults = bad.1["error"]["details"].to_string();
    assert!(faults.contains("requests_per_minute") && faults.contains("wight"), "{faults}");
    let needed = api.change("DELETE", "/admin/v1/config/providers/acme", &json!({}));
    assert_eq!((needed.0, &needed.1["error"]["code"]), (409, &"conflict".into()));
    assert!(
        needed.1["error"]["details"][0].as_str().is_some_and(|why| why.contains("chat: there is no provider \"acme\"")),
        "{}",
        needed.1
    );
    for (method, path, body, status) in [
        ("POST", "/admin/v1/config/limits", json!({ "in_flight": 1 }), 400),
        ("POST", "/admin/v1/config/limits", json!([1]), 400),
        ("POST", "/admin/v1/config/server", json!({ "id": "x" }), 404),
        ("PATCH", "/admin/v1/config/nothing/x", json!({}), 404),
        ("PATCH", LIMIT, json!({ "requests_per_minute": u64::MAX }), 400),
        ("PATCH", LIMIT, json!({ "models": [null] }), 400),
    ] {
        assert_eq!(api.change(method, path, &body).0, status, "{method} {path} {body}");
    }
    let long = format!("/admin/v1/config/limits/{}", "x".repeat(1025));
    assert_eq!(api.change("PATCH", &long, &json!({})).0, 400);
    assert_eq!(api.call("operator", "PATCH", LIMIT, "{\"in_flight\": 1}").0, 403);
    assert_eq!(api.text(), before);
}

#[test]
fn of_two_changes_of_what_was_read_one_wins() {
    let api = Api::start();
    let condition = format!("if-match: {}", api.etag(LIMIT));
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let patch = |at: u32| api.change_if("PATCH", LIMIT, &condition, &json!({ "requests_per_minute": 100 + at })).0;
        let all: Vec<_> = (0..6).map(|at| scope.spawn(move || patch(at))).collect();
        all.into_iter().map(|one| one.join().expect("no panic")).collect()
    });
    assert!(statuses.iter().all(|status| matches!(status, 200 | 412)), "{statuses:?}");
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 1, "{statuses:?}");

    let condition = format!("if-match: {}", api.etag(LIMIT));
    let other = json!({ "id": "other", "in_flight": 1 });
    assert_eq!(api.change("POST", "/admin/v1/config/limits", &other).0, 201);
    let (status, _) = api.change_if("PATCH", LIMIT, &condition, &json!({ "in_flight": 2 }));
    assert_eq!(status, 200, "a change of another entry makes no tag stale");
    assert_eq!(api.change_if("DELETE", LIMIT, &condition, &json!({})).0, 412);
    assert_eq!(api.change_if("PUT", LIMIT, "if-none-match: *", &json!({ "in_flight": 2 })).0, 412);
    assert_eq!(api.change_if("PUT", "/admin/v1/config/limits/new", "if-match: *", &json!({ "in_flight": 2 })).0, 412);
    let made = api.change_if("PUT", "/admin/v1/config/limits/new", "if-none-match: *", &json!({ "in_flight": 2 }));
    assert_eq!(made.0, 201);
}

#[test]
fn secrets_of_an_entry_are_hidden_and_kept() {
    let api = Api::start();
    let path = "/admin/v1/config/providers/acme";
    let mut seen = api.get(path)["value"].clone();
    assert_eq!(seen["headers"]["x-key"], "[hidden]");
    for path in [path, "/admin/v1/config/providers", "/admin/v1/config/admin_keys"] {
        let all = api.get(path).to_string();
        assert!(!all.contains(PROVIDER_KEY), "{all}");
    }
    assert_eq!(api.get("/admin/v1/config/admin_keys/owner")["value"]["digest"], "[hidden]");
    seen["in_flight_max"] = json!(7);
    let (status, put) = api.change("PUT", path, &seen);
    assert!(status == 200 && !put.to_string().contains(PROVIDER_KEY), "{put}");
    assert_eq!(api.gateway.serving().config.providers[0].headers[0].1.expose(), PROVIDER_KEY);
    seen["headers"]["x-other"] = json!("[hidden]");
    let (status, refused) = api.change("PUT", path, &seen);
    assert!(status == 400 && refused.to_string().contains("headers.x-other"), "{refused}");
    let audit = api.call("owner", "GET", "/admin/v1/audit", "").1;
    assert!(!audit.to_string().contains(PROVIDER_KEY), "{audit}");
    // The tag tells of another secret, too.
    let tag = api.etag(path);
    assert_eq!(api.call("owner", "PUT", "/admin/v1/config", &text(&config().replace(PROVIDER_KEY, "sk-2"), "")).0, 200);
    assert_ne!(api.etag(path), tag);
}
