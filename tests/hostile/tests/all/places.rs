//! Idle connections: the order of eviction when all places are taken; a connection whose bytes have come is never
//! closed.

use std::net::IpAddr;

use penstock_hostile::raw::{self, Client};
use penstock_hostile::{PATIENCE, Server, eventually};
use penstock_http::connection::Handler;
use penstock_http::places::Bounds;

use crate::late::{REQUEST, Standing, answer, settled, write};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_end_no_service() {
    let server = Server::start("[server]\nconnections_max = 16\n").await;
    let mut used = Vec::new();
    for number in 0..150 {
        let mut client = Client::connect(server.address).await;
        if number % 3 == 1 {
            client.send(raw::get("/health")).await;
            assert_eq!(client.answer().await.status, 200, "one after the other, each has its answer");
        } else if number % 3 == 2 {
            client.send("GET /hea").await;
        }
        used.push(client);
    }
    let mut kept = Client::connect(server.address).await;
    for _ in 0..5 {
        kept.send(raw::chat("say 1", false)).await;
        assert_eq!(kept.answer().await.status, 200, "on a connection that came last");
        assert_eq!(
            raw::send(server.address, raw::chat("say 1", false).replace("Host: a", "Host: a\r\nConnection: close"))
                .await
                .status,
            200
        );
    }
    let text = server.gateway.render_metrics();
    assert!(text.contains("penstock_connections_refused_total{reason=\"gave_way\"}"), "{text}");
    used[0].until_closed().await;
    drop((used, kept));
    eventually("all places are given back", || server.gateway.metrics.connections_now() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_http2_gives_way_and_busy_does_not() {
    let server = Server::start("[server]\nconnections_max = 2\n").await;
    let mut busy = Client::connect(server.address).await;
    busy.send(raw::chat("hang", true)).await;
    eventually("the request is open", || server.puppet.open() == 1).await;
    let mut silent = Client::connect(server.address).await;
    // Only a preface and settings.
    silent.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    assert!(!silent.until(PATIENCE, |text| !text.is_empty()).await.text.is_empty(), "its settings");
    let mut new = Client::connect(server.address).await;
    new.send(raw::get("/health")).await;
    assert_eq!(new.answer().await.status, 200);
    silent.until_closed().await;
    assert_eq!(server.puppet.open(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loopback_and_proxies_stand_for_many() {
    let server =
        Server::start("[auth]\ntrusted_proxies = [\"10.0.0.0/8\"]\n[server]\naddress_connections_max = 3\n").await;
    let of = |peer: &str| {
        let peer: Option<IpAddr> = peer.parse().ok();
        let Bounds { address_max, address_rate, .. } = server.gateway.bounds(peer);
        (address_max, address_rate)
    };
    for exempt in ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "10.1.2.3", "::ffff:10.1.2.3", "a Unix socket"]
    {
        assert_eq!(of(exempt), (0, 0), "{exempt}");
    }
    for client in ["192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1", "11.0.0.1"] {
        assert_eq!(of(client), (3, 200), "{client}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn who_gives_way_is_answered_if_its_request_has_come() {
    let server = Standing::start(1).await;
    let mut first = server.connect().await;
    settled().await;
    write(&mut first, REQUEST);
    // The place is taken before its task could read the bytes.
    let mut second = server.connect().await;
    write(&mut second, REQUEST);
    let text = answer(first).await;
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("connection: close"), "{text:?}");
    let text = answer(second).await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text:?}");
}
