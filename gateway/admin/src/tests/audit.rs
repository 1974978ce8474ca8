//! Audit log: changes, refusals, and its pages.

use serde_json::Value;

use super::Api;

#[test]
fn every_change_and_every_refusal_is_in_the_audit_log() {
    let api = Api::start();
    let level = "/admin/v1/log-level";
    assert_eq!(api.call("operator", "PUT", level, "{\"level\": \"debug\"}").0, 200);
    assert_eq!(api.call("viewer", "PUT", level, "{\"level\": \"debug\"}").0, 403);
    assert_eq!(api.call("operator", "PUT", level, "{\"level\": \"loud\"}").0, 400);
    assert_eq!(api.call("operator", "POST", "/admin/v1/requests/77/cancel", "").0, 404);
    assert_eq!(api.call("stranger", "GET", level, "").0, 401);
    assert_eq!(api.call("stranger", "GET", level, "").0, 401);
    assert_eq!(api.call("viewer", "GET", "/admin/v1/audit", "").0, 403);
    let events = api.call("owner", "GET", "/admin/v1/audit?order=asc", "").1;
    let seen: Vec<_> = events["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|event| {
            ["actor", "action", "target", "outcome"].map(|field| event[field].as_str().unwrap_or("?").to_owned())
        })
        .collect();
    let expected = [
        ["operator", "log_level.set", "", "done"],
        ["viewer", "log_level.set", "", "denied"],
        ["operator", "log_level.set", "", "failed"],
        ["operator", "request.cancel", "77", "failed"],
        ["", "log_level.get", "", "denied"],
        ["viewer", "audit.list", "", "denied"],
    ];
    assert_eq!(seen, expected.map(|event| event.map(str::to_owned)), "guesses are noted once a minute");
    assert_eq!(events["data"][0]["detail"]["after"]["level"], "debug", "and to what");
    assert_eq!(events["data"][1]["detail"]["status"], 403);
    let denied = api.call("owner", "GET", "/admin/v1/audit?outcome=denied&action=log_level.*&limit=1", "").1;
    assert_eq!(denied["data"][0]["action"], "log_level.get", "newest first");
    let next = denied["next"].as_str().expect("there is more");
    let rest =
        api.call("owner", "GET", &format!("/admin/v1/audit?outcome=denied&action=log_level.*&after={next}"), "").1;
    assert_eq!((&rest["data"][0]["actor"], &rest["next"]), (&"viewer".into(), &Value::Null));
}
