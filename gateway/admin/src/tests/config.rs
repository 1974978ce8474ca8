//! Config as text: checked, applied, taken back, and shown without secrets.

use sha2::{Digest, Sha256};

use super::{Api, BASE, PROVIDER_KEY, text};

#[test]
fn a_config_is_checked_applied_and_taken_back() {
    let api = Api::start();
    let config = api.get("/admin/v1/config");
    assert_eq!(
        (&config["version"], &config["text"]),
        (&1.into(), &penstock_proxy::reload::shown(&super::config()).into())
    );
    let renamed = super::config().replace("name = \"chat\"", "name = \"talk\"");
    let verdict = api.call("owner", "POST", "/admin/v1/config/validate", &text(&renamed, "")).1;
    assert_eq!((&verdict["valid"], &verdict["changes"][0]["path"]), (&true.into(), &"-models[chat]".into()));
    let bad = api.call("owner", "POST", "/admin/v1/config/validate", &text("[server]\nlissten = 1\n", "")).1;
    assert!(bad["valid"] == false && bad["faults"][0].as_str().is_some_and(|fault| fault.contains("lissten")), "{bad}");
    assert_eq!(api.get("/admin/v1/config")["version"], 1, "looking changes nothing");
    let (status, refused) = api.call("owner", "PUT", "/admin/v1/config", &text("[server]\nlissten = 1\n", ""));
    assert_eq!((status, &refused["error"]["param"]), (400, &"text".into()));
    assert!(refused["error"]["details"][0].as_str().is_some_and(|fault| fault.contains("lissten")), "{refused}");
    let (status, stale) = api.call("owner", "PUT", "/admin/v1/config", &text(&renamed, ", \"expected_version\": 9"));
    assert_eq!((status, &stale["error"]["code"]), (412, &"version_mismatch".into()));
    assert_eq!(api.call("operator", "PUT", "/admin/v1/config", &text(&renamed, "")).0, 403);
    let (status, applied) =
        api.call("owner", "PUT", "/admin/v1/config", &text(&renamed, ", \"note\": \"a better name\""));
    assert_eq!((status, &applied["persisted"]), (200, &false.into()), "{applied}");
    assert_eq!(api.call("viewer", "GET", "/admin/v1/models/talk", "").0, 200);
    let history = api.get("/admin/v1/config/history");
    assert_eq!((&history["data"][0]["note"], &history["data"][0]["actor"]), (&"a better name".into(), &"owner".into()));
    for (path, body) in [("rollback", "{\"version\": 1}"), ("reload", "{}")] {
        let fields = ["authorization: Bearer owner", "content-type: application/json", "if-match: \"1\""];
        assert_eq!(api.ask("POST", &format!("/admin/v1/config/{path}"), &fields, body).0, 412, "{path}");
    }
    let (status, _) = api.call("owner", "POST", "/admin/v1/config/rollback", "{\"version\": 1}");
    assert_eq!(status, 200);
    assert_eq!(api.call("viewer", "GET", "/admin/v1/models/talk", "").0, 404);
    assert_eq!(api.call("owner", "POST", "/admin/v1/config/rollback", "{\"version\": 99}").0, 404);
    let audit = api.call("owner", "GET", "/admin/v1/audit?action=config.*&outcome=done", "").1;
    assert_eq!(audit["data"][1]["action"], "config.apply");
    assert_eq!(audit["data"][1]["detail"]["changes"][0], "-models[chat]");
}

#[test]
fn of_many_changes_at_once_one_wins() {
    let api = Api::start();
    let wins = std::thread::scope(|scope| {
        let apply = |at: usize| {
            let own = super::config().replace("default", &format!("other-{at}"));
            api.call("owner", "PUT", "/admin/v1/config", &text(&own, ", \"expected_version\": 1")).0
        };
        let all: Vec<_> = (0..8).map(|at| scope.spawn(move || apply(at))).collect();
        let statuses: Vec<u16> = all.into_iter().map(|one| one.join().expect("no panic")).collect();
        assert!(statuses.iter().all(|status| matches!(status, 200 | 412)), "{statuses:?}");
        statuses.into_iter().filter(|status| *status == 200).count()
    });
    assert_eq!((wins, &api.get("/admin/v1/config")["version"]), (1, &2.into()));
}

#[test]
fn secrets_in_a_config_are_hidden_and_kept() {
    let api = Api::start();
    let shown = api.get("/admin/v1/config")["text"].as_str().expect("text").to_owned();
    assert!(!shown.contains(PROVIDER_KEY) && shown.contains("x-key = \"[hidden]\""), "{shown}");
    assert!(shown.contains("id = \"owner\"\ndigest = \"[hidden]\""), "{shown}");
    let edited = shown.replace("name = \"chat\"", "name = \"talk\"");
    let (status, body) = api.call("owner", "PUT", "/admin/v1/config", &text(&edited, ""));
    assert_eq!(status, 200, "{body}");
    let providers = &api.gateway.serving().config.providers;
    assert_eq!(providers[0].headers[0].1.expose(), PROVIDER_KEY, "what was hidden is what it was");
    let (status, body) = api.call("owner", "PUT", "/admin/v1/config", &text(&edited.replace("acme", "other"), ""));
    assert!(status == 400 && body.to_string().contains("providers[other].headers"), "{body}");
    for path in ["/admin/v1/config/history/1", "/admin/v1/config/history/2", "/admin/v1/audit"] {
        let (status, body) = api.call("owner", "GET", path, "");
        assert!(status == 200 && !body.to_string().contains(PROVIDER_KEY), "{path}: {body}");
    }
}

#[test]
fn keys_of_the_config_are_those_in_force() {
    let api = Api::start();
    let digest: String = Sha256::digest("fresh").iter().map(|byte| format!("{byte:02x}")).collect();
    let own = format!("{BASE}[[admin_keys]]\nid = \"fresh\"\ndigest = \"{digest}\"\nrole = \"owner\"\n");
    assert_eq!(api.call("owner", "PUT", "/admin/v1/config", &text(&own, "")).0, 200);
    assert_eq!(api.call("owner", "GET", "/admin/v1/whoami", "").0, 401, "it is not in the config any more");
    assert_eq!(api.call("fresh", "GET", "/admin/v1/whoami", "").1["role"], "owner");
    assert!(!api.call("fresh", "GET", "/admin/v1/config", "").1.to_string().contains(&digest));
    // Without any, the machine's own key counts.
    assert_eq!(api.call("fresh", "PUT", "/admin/v1/config", &text(BASE, "")).0, 200);
    assert_eq!(api.call("fresh", "GET", "/admin/v1/whoami", "").0, 401);
    let local = std::fs::read_to_string(crate::key_path(&api.dir)).expect("it was made");
    assert_eq!(api.call(local.trim(), "GET", "/admin/v1/whoami", "").1["key"], "local");
}
