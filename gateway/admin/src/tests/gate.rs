//! Gate of the API: who may ask what on every route, and which requests are refused unread.

use std::net::Ipv4Addr;

use penstock_config::Role;

use super::{Api, concrete, table};
use crate::gate;
use crate::roles::Access;

#[test]
fn every_route_asks_for_its_role_and_no_less() {
    let api = Api::start();
    let table = table();
    assert!(table.len() > 15);
    for (at, (path, method, access)) in table.into_iter().enumerate() {
        let url = concrete(&path);
        // Wrong keys slow an address down: each route is tried from another.
        let source = Ipv4Addr::new(127, 0, 1, at as u8 + 1);
        let status = |key: &str| {
            let key = format!("authorization: {key}");
            // A body that no route takes: what is asked for must not happen.
            api.ask_from(source, method.as_str(), &url, &[&key, "content-type: application/json"], "{\"no\": 1}").0
        };
        let anonymous = api.ask_from(source, method.as_str(), &url, &[], "").0;
        let Access::Role(needed) = access else {
            // Signing in takes a key or a provider's answer, in a body that is JSON; here is no provider, who would sign people out.
            let open = [
                ("/admin/v1/health", 200),
                ("/admin/v1/session", 415),
                ("/admin/v1/sign-on", 200),
                ("/admin/v1/sign-on", 404),
                ("/admin/v1/sign-on/answer", 415),
                ("/admin/v1/sign-on/logout", 404),
            ];
            assert!(open.contains(&(path.as_str(), anonymous)), "{method} {path} is open: {anonymous}");
            continue;
        };
        assert_eq!(anonymous, 401, "{method} {path} without a key");
        for wrong in ["Bearer nobody", "Basic owner", "owner", "Bearer owner, Bearer owner"] {
            assert_eq!(status(wrong), 401, "{method} {path} with {wrong:?}");
        }
        for role in Role::ALL {
            let got = status(&format!("Bearer {role}"));
            if role < needed {
                assert_eq!(got, 403, "{method} {path} as {role}");
            } else {
                assert!(!matches!(got, 0 | 401 | 403 | 429 | 500..), "{method} {path} as {role}: {got}");
            }
        }
    }
}

#[test]
fn what_is_not_there_needs_a_key_too() {
    let api = Api::start();
    assert_eq!(api.ask("GET", "/admin/v1/nothing", &[], "").0, 401);
    assert_eq!(api.ask("GET", "/other", &[], "").0, 401);
    let (status, head, _) = api.ask("GET", "/", &[], "");
    assert!(status == 303 && head.contains("location: /console/"), "{head}");
    assert_eq!(api.call("viewer", "GET", "/admin/v1/nothing", "").0, 404);
    let key = "authorization: Bearer viewer";
    let (status, head, body) = api.ask("DELETE", "/admin/v1/status", &[key], "");
    assert_eq!(status, 405, "{body}");
    assert!(head.contains("allow: get,head"), "{head}");
    assert!(body.contains("\"method_not_allowed\""));
    for path in
        ["/admin/v1/../v1/status", "/admin/v1/status/", "//admin/v1/status", "/admin/v1/%73tatus", "/ADMIN/v1/status"]
    {
        let status = api.ask("GET", path, &[], "").0;
        assert_eq!(status, 401, "{path}");
    }
}

#[test]
fn other_sites_and_rebound_names_are_refused() {
    let api = Api::with(&|config| config.origins = vec!["https://console.example".into()]);
    let key = "authorization: Bearer owner";
    let with = |fields: &[&str]| api.ask("GET", "/admin/v1/status", &[fields, &[key]].concat(), "").0;
    assert_eq!(with(&[]), 200);
    assert_eq!(with(&["host: evil.example"]), 403);
    assert_eq!(with(&["host: localhost", "host: localhost"]), 403);
    assert_eq!(with(&["origin: https://evil.example"]), 403);
    assert_eq!(with(&["origin: null"]), 403);
    assert_eq!(with(&["origin: https://console.example"]), 200);
    assert_eq!(with(&["sec-fetch-site: cross-site"]), 403);
    // Also where no key is needed.
    assert_eq!(api.ask("GET", "/admin/v1/health", &["host: evil.example"], "").0, 403);
    let absolute = api.ask("GET", "http://evil.example/admin/v1/status", &[key], "").0;
    assert_eq!(absolute, 403, "the URL says another host than Host");
}

#[test]
fn guessing_is_slowed_down() {
    let api = Api::start();
    let with = |key: &str| api.ask("GET", "/admin/v1/status", &[&format!("authorization: Bearer {key}")], "");
    assert_eq!(with("owner").0, 200);
    let refused = (0..60).map(|_| with("psa_guess")).find(|(status, ..)| *status == 429).expect("slowed down");
    assert!(refused.1.contains("retry-after: 1"), "{}", refused.1);
    assert_eq!(with("owner").0, 200, "a key that has been good is let in");
    let unused = (0..10).find(|_| with("psa_guess").0 == 429 && with("viewer").0 == 429);
    assert!(unused.is_some(), "one that nobody has used waits: it could be the next guess");
    assert_eq!(api.ask("GET", "/admin/v1/health", &[], "").0, 200);
}

#[test]
fn bodies_are_bounded_and_checked() {
    let api = Api::start();
    let put = |kind: &str, body: &str| {
        let (key, kind) = ("authorization: Bearer owner", format!("content-type: {kind}"));
        api.ask("PUT", "/admin/v1/log-level", &[key, &kind], body).0
    };
    assert_eq!(put("application/json", "{\"level\": \"debug\"}"), 200);
    assert_eq!(api.get("/admin/v1/log-level")["level"], "debug");
    assert_eq!(put("application/json; charset=utf-8", "{\"level\": \"info\"}"), 200);
    assert_eq!(put("text/plain", "{\"level\": \"debug\"}"), 415);
    for wrong in [
        "",
        "[]",
        "{}",
        "{\"level\": 1}",
        "{\"level\": \"\"}",
        "{\"level\": \"loud\"}",
        "{\"level\": \"x\", \"y\": 1}",
        "{\"level\": \"a\", \"level\": \"b\"}",
    ] {
        assert_eq!(put("application/json", wrong), 400, "{wrong}");
    }
    assert_eq!(put("application/json", &" ".repeat(gate::BODY_BYTES_MAX + 1)), 413);
    assert_eq!(api.get("/admin/v1/log-level")["level"], "info", "nothing of it was done");
}
