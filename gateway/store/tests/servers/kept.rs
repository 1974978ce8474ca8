//! Large deletes, and rows that nobody needs, in PostgreSQL.

use bytes::Bytes;
use penstock_store::conformance::nth;
use penstock_store::{
    Ask, BatchStatus, Batches, Counters, Deleted, EndedBatch, Files, NewBatch, NewFile, NewLine, ResponseId,
    ResponseRecord, ResponseRoom, ResponseStatus, Responses, Settlement, Tenant, Window,
};
use tokio_postgres::{Client, NoTls};

use crate::harness::PostgresServer;

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.expect("counted").get(0)
}

/// Content and lines that cannot be deleted within the deadline of a statement: another session has locked some of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_deleted_is_gone_before_its_content() {
    let server = PostgresServer::start("pieces");
    let (store, tenant) = (server.open(4).await, Tenant::new("a"));
    let (client, connection) = tokio_postgres::connect(&server.options(1).url, NoTls).await.expect("a connection");
    tokio::spawn(connection);
    let new = NewFile {
        purpose: "batch".into(),
        name: "a".into(),
        bytes: 2,
        created: 1,
        expires: None,
        tenant_bytes_max: 100,
        tenant_files_max: 100,
    };
    let mut files = Vec::new();
    for _ in 0..2 {
        let id = store.begin_file(&tenant, new.clone()).await.expect("begun");
        store.append(&tenant, &id, 0, Bytes::from_static(b"ab")).await.expect("appended");
        store.seal(&tenant, &id).await.expect("sealed");
        files.push(id);
    }
    let batch = NewBatch {
        endpoint: "/v1/embeddings".into(),
        input: files[1].clone(),
        window: "24h".into(),
        expires: 86_500,
        metadata: String::new(),
        output_expires_after: None,
        created: 100,
        tenant_open_max: 10,
        tenant_batches_max: 10,
        tenant_output_bytes_max: 1 << 40,
    };
    let batch = store.create_batch(&tenant, batch).await.expect("made").expect("the file is there").id;
    let lines = (0..300).map(|line| NewLine { line, custom_id: "c".into(), at: 0, bytes: 1 }).collect();
    store.admit_lines(&batch, lines).await.expect("admitted");

    let locked = "BEGIN; SELECT FROM penstock.batch_lines FOR UPDATE; SELECT FROM penstock.file_chunks FOR UPDATE";
    client.batch_execute(locked).await.expect("locked");
    let end = EndedBatch { status: BatchStatus::Failed, output: None, errors: None, faults: String::new(), now: 130 };
    assert_eq!(store.end_batch(&batch, end.clone()).await, Ok(true));
    assert_eq!(store.end_batch(&batch, end).await, Ok(false), "it has ended");
    assert_eq!(store.delete_file(&tenant, &files[0]).await, Ok(Deleted::Yes));
    assert_eq!(store.file(&tenant, &files[0]).await, Ok(None));
    assert_eq!(count(&client, "SELECT count(*) FROM penstock.batch_lines").await, 300);
    client.batch_execute("COMMIT").await.expect("free");

    while store.sweep_batches(0).await.expect("swept") + store.sweep_files(1, 1).await.expect("swept") > 0 {}
    assert_eq!(count(&client, "SELECT count(*) FROM penstock.batch_lines").await, 0);
    assert_eq!(count(&client, "SELECT count(*) FROM penstock.file_chunks").await, 1, "of the input");
    assert_eq!(store.delete_batch(&tenant, &batch).await, Ok(Deleted::Yes));
    assert_eq!(count(&client, "SELECT count(*) FROM penstock.files").await, 0);
}

/// Places in flight of many addresses, and tenants whose responses are deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_nobody_needs_are_deleted() {
    let server = PostgresServer::start("rows");
    let store = server.open(4).await;
    let (client, connection) = tokio_postgres::connect(&server.options(1).url, NoTls).await.expect("a connection");
    tokio::spawn(connection);
    let window = Window { start: 0, seconds: 0 };
    let ask = |counter: String, until| Ask { counter, window, sliding: false, max: 9, want: 1, least: 1, until };
    let names: Vec<String> = (0..200).map(|number| format!("l/10.0.0.{number}/in_flight")).collect();
    for name in &names {
        assert_eq!(store.take("g", &[ask(name.clone(), 20)], true, 10).await.expect("taken")[0].granted, 1);
    }
    // Half of the places are given back; the others lapse.
    let given = names[..100].iter().map(|name| Settlement { counter: name.clone(), window, leased: 1, spent: 0 });
    for chunk in given.collect::<Vec<_>>().chunks(50) {
        store.settle("g", nth(), chunk, 11).await.expect("settled");
    }
    let spent = [Settlement { counter: "spent".into(), window, leased: 0, spent: 1 }];
    store.settle("g", nth(), &spent, 11).await.expect("settled");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // One call in 200 removes them.
    while count(&client, "SELECT count(*) FROM penstock.counters").await > 2 {
        assert!(std::time::Instant::now() < end, "they stay");
        let grant = store.take("g", &[ask("l/10.0.1.0/in_flight".into(), 90)], true, 30).await.expect("taken")[0];
        assert_eq!(grant.used, 1, "the lease in use stays");
        let back = [Settlement { counter: "l/10.0.1.0/in_flight".into(), window, leased: 1, spent: 0 }];
        store.settle("g", nth(), &back, 30).await.expect("settled");
    }
    assert_eq!(count(&client, "SELECT count(*) FROM penstock.counters WHERE name = 'spent'").await, 1);

    let (tenant, id) = (Tenant::new("a"), ResponseId::random());
    let record = ResponseRecord {
        id: id.clone(),
        status: ResponseStatus::Ended,
        previous: None,
        created: 100,
        expires: 1000,
        body: Bytes::from_static(b"{}"),
        input: Bytes::new(),
        output: Bytes::new(),
        request: Bytes::new(),
        event_bytes: 0,
    };
    let room = ResponseRoom { tenant_max: 9, tenant_bytes_max: 1 << 20, bytes_max: 1 << 30 };
    store.save_response(&tenant, record, room).await.expect("saved");
    assert_eq!(count(&client, "SELECT count(*) FROM penstock.response_sums").await, 1);
    assert_eq!(store.delete_response(&tenant, &id).await, Ok(true));
    assert_eq!(count(&client, "SELECT count(*) FROM penstock.response_sums").await, 0);
}
