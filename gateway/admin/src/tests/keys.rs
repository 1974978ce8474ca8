//! Issued keys, teams and users.

use serde_json::Value;

use super::Api;

#[test]
fn a_key_lives_and_its_text_is_seen_once() {
    let api = Api::start();
    let wish = "{\"name\": \"search\", \"allowed\": {\"models\": [\"chat*\"], \"addresses\": [\"10.0.0.0/8\", \"::1\"]}, \"limits\": [\"small\"]}";
    assert_eq!(api.call("operator", "POST", "/admin/v1/keys", wish).0, 403, "an operator gives nobody rights");
    let (status, made) = api.call("owner", "POST", "/admin/v1/keys", wish);
    assert_eq!(status, 201, "{made}");
    let secret = made["secret"].as_str().expect("the text").to_owned();
    let id = made["key"]["id"].as_str().expect("an id").to_owned();
    let path = format!("/admin/v1/keys/{id}");
    let key = api.get(&path);
    assert_eq!((&key["state"], &key["allowed"]["addresses"][1]), (&"good".into(), &"::1/128".into()));
    let version = key["version"].clone();
    let patch = |body: &str| api.call("owner", "PATCH", &path, body);
    let (status, changed) = patch(&format!("{{\"name\": \"find\", \"expected_version\": {version}}}"));
    assert_eq!((status, &changed["name"], &changed["limits"][0]), (200, &"find".into(), &"small".into()), "{changed}");
    let (status, stale) = patch(&format!("{{\"name\": \"lost\", \"expected_version\": {version}}}"));
    assert_eq!((status, &stale["error"]["code"]), (412, &"version_mismatch".into()));
    let stale = format!("if-match: \"{version}\"");
    let fields = ["authorization: Bearer owner", "content-type: application/json", &stale];
    assert_eq!(api.ask("PATCH", &path, &fields, "{\"name\": \"lost\"}").0, 412);
    assert_eq!(patch("{\"limits\": [\"nowhere\"]}").0, 400);
    assert_eq!(patch("{\"team\": \"nobody\"}").0, 400);
    assert_eq!(patch("{\"expires\": 1}").0, 400, "it lies in the past");
    for what in ["rotate", "revoke"] {
        assert_eq!(api.ask("POST", &format!("{path}/{what}"), &fields, "{}").0, 412, "{what}");
    }
    let (status, rotated) = api.call("owner", "POST", &format!("{path}/rotate"), "{\"grace_seconds\": 60}");
    assert!(
        status == 200 && rotated["secret"] != made["secret"] && rotated["key"]["previous_until"].is_u64(),
        "{rotated}"
    );
    let (status, revoked) = api.call("operator", "POST", &format!("{path}/revoke"), "");
    assert_eq!((status, &revoked["state"]), (200, &"revoked".into()), "taking away is an operator's");
    assert_eq!(api.call("owner", "POST", &format!("{path}/rotate"), "{}").0, 409);
    assert_eq!(api.get("/admin/v1/keys?revoked=false")["data"], Value::Array(Vec::new()));
    assert_eq!(api.get("/admin/v1/keys")["data"][0]["id"], id.as_str());
    for path in ["/admin/v1/keys", &path, "/admin/v1/audit", "/admin/v1/config"] {
        let text = api.ask("GET", path, &["authorization: Bearer owner"], "").2;
        for secret in [secret.as_str(), rotated["secret"].as_str().expect("a text")] {
            assert!(!text.contains(secret), "{path}");
        }
    }
    assert_eq!(api.call("viewer", "GET", "/admin/v1/keys/key_nothing", "").0, 404);
}

#[test]
fn teams_and_users_are_made_changed_and_removed() {
    let api = Api::start();
    for kind in ["teams", "users"] {
        let all = format!("/admin/v1/{kind}");
        let wish = "{\"id\": \"research lab\", \"allowed\": {\"models\": [\"chat\"]}}";
        assert_eq!(api.call("owner", "POST", &all, wish).0, 201);
        assert_eq!(api.call("owner", "POST", &all, wish).0, 409, "there is one");
        let one = format!("{all}/research%20lab");
        let owner = api.get(&one);
        assert_eq!((&owner["name"], &owner["blocked"]), (&"research lab".into(), &false.into()));
        let (status, changed) = api.call("owner", "PATCH", &one, "{\"blocked\": true}");
        assert_eq!(
            (status, &changed["blocked"], &changed["allowed"]["models"][0]),
            (200, &true.into(), &"chat".into())
        );
        let stale = format!("{{\"expected_version\": {}}}", owner["version"]);
        assert_eq!(api.call("owner", "PATCH", &one, &stale).0, 412);
        assert_eq!(api.get(&all)["data"][0]["id"], "research lab");
        let tag = |version: &Value| format!("if-match: \"{version}\"");
        let delete = |version: &Value| api.ask("DELETE", &one, &["authorization: Bearer owner", &tag(version)], "").0;
        assert_eq!((delete(&owner["version"]), &api.get(&one)["blocked"]), (412, &true.into()), "another by now");
        assert_eq!(delete(&changed["version"]), 204);
        assert_eq!(api.call("owner", "DELETE", &one, "").0, 404);
        for wrong in
            ["{\"id\": \"\"}", "{}", "{\"id\": \"x\", \"team\": \"nobody\"}", "{\"id\": \"x\", \"limits\": [\"none\"]}"]
        {
            assert_eq!(api.call("owner", "POST", &all, wrong).0, 400, "{wrong}");
        }
    }
}
