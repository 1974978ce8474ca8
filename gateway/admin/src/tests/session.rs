//! Sessions of people who sign in at the console, and the pages of the console.

use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::time::Duration;

use penstock_config::Role;
use sha2::{Digest, Sha256};

use super::{Api, BASE, Session, concrete, connect, table, text};
use crate::roles::Access;

#[test]
fn a_session_may_what_its_key_may_on_every_route() {
    let api = Api::start();
    let sessions = Role::ALL.map(|role| (role, Session::open(&api, role.name())));
    for (path, method, access) in table() {
        // Signing out would end the test's own session.
        let Access::Role(needed) = access else { continue };
        if path == "/admin/v1/session" {
            continue;
        }
        for (role, session) in &sessions {
            let (got, body) = session.call(&api, method.as_str(), &concrete(&path), "{\"no\": 1}");
            if *role < needed {
                assert_eq!(got, 403, "{method} {path} as {role}: {body}");
            } else {
                assert!(!matches!(got, 0 | 401 | 403 | 429 | 500..), "{method} {path} as {role}: {got} {body}");
            }
        }
    }
    for (role, session) in &sessions {
        let (status, body) = session.call(&api, "GET", "/admin/v1/session", "");
        assert!(status == 200 && body.contains(&format!("\"role\":\"{role}\"")), "{body}");
        assert_eq!(session.call(&api, "DELETE", "/admin/v1/session", "").0, 204);
        assert_eq!(session.call(&api, "GET", "/admin/v1/session", "").0, 401, "it is over");
    }
    assert_eq!(api.call("viewer", "GET", "/admin/v1/session", "").0, 404, "a key is no session");
    assert_eq!(api.call("viewer", "DELETE", "/admin/v1/session", "").0, 404);
}

#[test]
fn a_change_needs_cookie_token_and_a_page_of_this_origin() {
    let api = Api::with(&|config| config.origins = vec!["https://console.example".into()]);
    let session = Session::open(&api, "owner");
    let (cookie, token) = (session.cookie.as_str(), session.token.as_str());
    let put = |fields: &[&str]| {
        let fields = [fields, &["content-type: application/json"]].concat();
        api.ask("PUT", "/admin/v1/log-level", &fields, "{\"level\": \"debug\"}").0
    };
    assert_eq!(put(&[cookie, token, "origin: http://localhost"]), 200);
    assert_eq!(put(&[cookie, token, "sec-fetch-site: same-origin"]), 200);
    for fields in [
        &[][..],
        &[cookie],
        &[token],
        &["origin: http://localhost"],
        &[cookie, "origin: http://localhost"],
        &[cookie, token],
        &[cookie, token, "origin: http://localhost:3000"],
        &[cookie, token, "origin: http://evil.example"],
        &[cookie, token, "origin: null"],
        &[cookie, token, "origin: http://localhost", "origin: http://localhost"],
        &[cookie, token, "sec-fetch-site: same-site"],
        &[cookie, token, "sec-fetch-site: none"],
        // An origin that may use the API with a key of its own has no part in others' sessions.
        &[cookie, token, "origin: https://console.example"],
        &[cookie, "x-penstock-session: ", "origin: http://localhost"],
        &[cookie, token, "origin: http://localhost", "authorization: Basic x"],
    ] {
        assert!(matches!(put(fields), 401 | 403), "{fields:?}");
    }
    // What reads needs the token as well.
    assert_eq!(api.ask("GET", "/admin/v1/status", &[cookie], "").0, 403);
    assert_eq!(api.ask("GET", "/admin/v1/status", &[cookie, token], "").0, 200);
    let other = cookie.replace("penstock_session", "penstock_session_1");
    assert_eq!(api.ask("GET", "/admin/v1/status", &[&other, token], "").0, 401, "another gateway's cookie");
}

#[test]
fn signing_in_is_slowed_down_and_noted_like_guessing() {
    let api = Api::start();
    let sign_in = |key: &str| {
        let body = format!("{{\"key\": \"{key}\"}}");
        api.ask("POST", "/admin/v1/session", &["content-type: application/json"], &body).0
    };
    assert_eq!(sign_in("owner"), 201);
    let refused = (0..60).map(|_| sign_in("psa_guess")).find(|status| *status != 401);
    assert_eq!(refused, Some(429));
    let key = "authorization: Bearer psa_guess";
    assert_eq!(api.ask("GET", "/admin/v1/status", &[key], "").0, 429, "one count for both ways");
    assert_eq!(sign_in("owner"), 201, "a key that has been good is let in");
    let events = api.call("owner", "GET", "/admin/v1/audit?action=session.*&order=asc", "").1;
    let seen: Vec<_> = events["data"].as_array().expect("a list").iter().map(|one| one["outcome"].clone()).collect();
    assert_eq!(seen, ["done", "denied", "done"], "{events}");
    assert_eq!(events["data"][0]["actor"], "owner");
}

#[test]
fn the_console_is_strict_and_can_be_off() {
    let api = Api::start();
    let (status, head, page) = api.ask("GET", "/console/", &[], "");
    assert!(status == 200 && page.contains("<title>"), "{head}");
    for field in [
        "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
         img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
        "x-frame-options: deny",
        "x-content-type-options: nosniff",
        "referrer-policy: no-referrer",
    ] {
        assert!(head.lines().any(|line| line == field), "{field} in {head}");
    }
    assert_eq!(api.ask("GET", "/console/", &["host: evil.example"], "").0, 403);
    assert_eq!(api.ask("GET", "/console/../admin/v1/status", &[], "").0, 404);
    assert_eq!(api.ask("PUT", "/console/", &[], "").0, 405);
    let session = Session::open(&api, "owner");
    let off = format!("{}\n[admin]\nconsole = false\n", super::config());
    assert_eq!(session.call(&api, "PUT", "/admin/v1/config", &text(&off, "")).0, 200);
    assert_eq!(session.call(&api, "GET", "/admin/v1/status", "").0, 401);
    assert_eq!(api.ask("GET", "/console/", &[], "").0, 404);
    let sign_in = api.ask("POST", "/admin/v1/session", &["content-type: application/json"], "{\"key\": \"owner\"}");
    assert_eq!(sign_in.0, 404);
    assert_eq!(api.call("owner", "GET", "/admin/v1/whoami", "").0, 200, "keys are what they were");
}

#[test]
fn a_session_follows_its_key() {
    let api = Api::start();
    let session = Session::open(&api, "owner");
    // The same key is a viewer's now.
    let digest: String = Sha256::digest("owner").iter().map(|byte| format!("{byte:02x}")).collect();
    let own = format!("{BASE}[[admin_keys]]\nid = \"less\"\ndigest = \"{digest}\"\nrole = \"viewer\"\n");
    assert_eq!(session.call(&api, "PUT", "/admin/v1/config", &text(&own, "")).0, 200);
    let (status, body) = session.call(&api, "GET", "/admin/v1/whoami", "");
    assert_eq!((status, body.as_str()), (200, "{\"key\":\"less\",\"role\":\"viewer\"}"));
    assert_eq!(session.call(&api, "GET", "/admin/v1/audit", "").0, 403);
}

#[test]
fn a_stream_ends_with_its_session_and_with_the_process() {
    let mut api = Api::start();
    let stream = |session: &Session| {
        let mut stream = connect(Ipv4Addr::LOCALHOST, api.address);
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        let Session { cookie, token } = session;
        let head = format!(
            "GET /admin/v1/live HTTP/1.1\r\nhost: localhost\r\n{cookie}\r\n{token}\r\naccept: text/event-stream\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).expect("sent");
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains("\n\n\r\n") {
            let mut piece = [0; 4096];
            let count = stream.read(&mut piece).expect("an event");
            assert!(count > 0, "{}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&piece[..count]);
        }
        assert!(String::from_utf8_lossy(&seen).starts_with("HTTP/1.1 200"), "{}", String::from_utf8_lossy(&seen));
        stream
    };
    let session = Session::open(&api, "viewer");
    let mut ended = stream(&session);
    assert_eq!(session.call(&api, "DELETE", "/admin/v1/session", "").0, 204);
    let mut rest = String::new();
    let mut piece = [0; 4096];
    while !rest.contains("0\r\n\r\n") {
        let count = ended.read(&mut piece).expect("the end");
        assert!(count > 0, "{rest}");
        rest += &String::from_utf8_lossy(&piece[..count]);
    }
    assert!(rest.contains("event: end"), "{rest}");
    let session = Session::open(&api, "viewer");
    let mut open = stream(&session);
    api.running.stop();
    let mut rest = Vec::new();
    open.read_to_end(&mut rest).expect("closed");
}
