//! Conformance suite of the traits against real servers, and tests of several gateways and of server failures.
//!
//! Each test starts its own server in its own folder, connects over a Unix socket, and ends the server. If PostgreSQL
//! or Redis is not installed, the tests fail and say so: `make test-stores` installs them.

mod faults;
mod harness;
mod kept;
mod lost;
mod model;
mod relay;
mod shared;

use harness::{PostgresServer, RedisServer};
use penstock_store::{Store, conformance};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_is_a_store() {
    let server = PostgresServer::start("conformance");
    let store = server.open(4).await;
    conformance::everything(&store).await;
    conformance::counters(&store, "one").await;
    assert!(store.stats().commits > 0);
    // Opened again, the database is unchanged and fully usable.
    let again = server.open(1).await;
    conformance::counters(&again, "two").await;
    model::check_histories(&again, 8).await;
    shared::two_gateways_share_postgres(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_counts_and_caches() {
    let server = RedisServer::start("conformance");
    let store = server.open("a:").await;
    conformance::counters(&store, "one").await;
    conformance::cache(&store, "one").await;
    // Another prefix is another installation.
    let other = server.open("b:").await;
    conformance::counters(&other, "one").await;
    conformance::cache(&other, "one").await;
    model::check_histories(&other, 40).await;
    shared::two_gateways_share_redis(&server).await;
}
