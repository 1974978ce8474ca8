//! Server of the API: its listeners, clients that say nothing, and its end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::Api;

#[test]
fn slow_heads_and_many_connections_do_not_stop_it() {
    let api = Api::start();
    let idle: Vec<_> = (0..300).filter_map(|_| TcpStream::connect(api.address).ok()).collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    // The first 256 say nothing and are closed when their time is over; until then more are told to come back.
    let told = api.ask("GET", "/admin/v1/health", &[], "");
    assert!(matches!(told.0, 503 | 200 | 0), "{told:?}");
    while api.ask("GET", "/admin/v1/health", &[], "").0 != 200 {
        assert!(Instant::now() < deadline, "idle connections hold all places");
        std::thread::park_timeout(Duration::from_millis(100));
    }
    drop(idle);
}

#[test]
fn it_stops_in_order() {
    let mut api = Api::start();
    let file = api.dir.join(crate::ADDRESS_FILE);
    assert_eq!(std::fs::read_to_string(&file).expect("written"), format!("http://{}\n", api.address));
    api.running.stop();
    assert!(TcpStream::connect(api.address).is_err() && !file.exists());
}

#[test]
fn a_unix_socket_serves_too() {
    let path = std::env::temp_dir().join(format!("penstock-admin-{}.sock", std::process::id()));
    let api = Api::with(&|config| config.unix = Some(path.clone()));
    let mut stream = std::os::unix::net::UnixStream::connect(&path).expect("connects");
    let head =
        "GET /admin/v1/whoami HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer viewer\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).expect("written");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    assert!(text.ends_with("{\"key\":\"viewer\",\"role\":\"viewer\"}"), "{text}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).expect("there").permissions());
    assert_eq!(mode & 0o777, 0o600);
    drop(api);
    assert!(!path.exists());
}
