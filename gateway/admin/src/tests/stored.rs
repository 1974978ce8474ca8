//! Batches and files of all keys.

use penstock_config::Role;
use penstock_store::{BatchId, FileId, NewBatch, NewFile, Store, Tenant};

use super::Api;

/// Calls of the store, which is asynchronous.
fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(work)
}

async fn put(store: &dyn Store, tenant: &Tenant, purpose: &str, name: &str, content: &'static str) -> FileId {
    let new = NewFile {
        purpose: purpose.into(),
        name: name.into(),
        bytes: content.len() as u64,
        created: 100,
        expires: Some(4_000_000_000),
        tenant_bytes_max: 1 << 20,
        tenant_files_max: 100,
    };
    let id = store.begin_file(tenant, new).await.expect("begun");
    store.append(tenant, &id, 0, content.into()).await.expect("appended");
    store.seal(tenant, &id).await.expect("sealed");
    id
}

async fn batch(store: &dyn Store, tenant: &Tenant, input: &FileId) -> BatchId {
    let new = NewBatch {
        endpoint: "/v1/embeddings".into(),
        input: input.clone(),
        window: "24h".into(),
        expires: 86_500,
        metadata: "{\"note\":\"private-metadata\"}".into(),
        output_expires_after: None,
        created: 100,
        tenant_open_max: 9,
        tenant_batches_max: 1000,
        tenant_output_bytes_max: 1 << 20,
    };
    store.create_batch(tenant, new).await.expect("made").expect("the file is there").id
}

#[test]
fn batches_and_files_of_all_keys_are_listed_cancelled_and_deleted() {
    let api = Api::start();
    let (alice, bob) = (Tenant::new("alice"), Tenant::new("jwt:i:bob"));
    let (first, second, input, loose) = run(async {
        let store = api.store.as_ref();
        let input = put(store, &alice, "batch", "<b>in</b>.jsonl", "secret content").await;
        let first = batch(store, &alice, &input).await;
        let other = put(store, &bob, "batch", "b", "x").await;
        let second = batch(store, &bob, &other).await;
        (first, second, input, put(store, &bob, "user_data", "notes.txt", "12345").await)
    });
    let ids = |path: &str| {
        let page = api.get(path);
        let items = page["data"].as_array().expect("a list").iter();
        (items.map(|one| one["id"].as_str().expect("text").to_owned()).collect::<Vec<_>>(), page["next"].clone())
    };
    assert_eq!(ids("/admin/v1/batches").0, [second.as_str(), first.as_str()], "newest first");
    let (page, next) = ids("/admin/v1/batches?limit=1");
    assert_eq!((page[0].as_str(), next.as_str()), (second.as_str(), Some(second.as_str())));
    assert_eq!(ids(&format!("/admin/v1/batches?limit=1&after={second}")), (vec![first.to_string()], ().into()));
    assert_eq!(ids("/admin/v1/batches?key=jwt:i:bob&open=true").0, [second.as_str()]);
    assert!(ids("/admin/v1/batches?key=nobody%00").0.is_empty());
    for wrong in ["open=maybe", "limit=0", "limit=1001", "status=failed"] {
        assert_eq!(api.call("viewer", "GET", &format!("/admin/v1/batches?{wrong}"), "").0, 400, "{wrong}");
    }
    let shown = api.get(&format!("/admin/v1/batches/{first}"));
    assert_eq!(
        (&shown["key"], &shown["status"], &shown["input_bytes"]),
        (&"alice".into(), &"validating".into(), &14.into())
    );
    let files = api.get("/admin/v1/files");
    assert_eq!(files["data"].as_array().map(Vec::len), Some(3));
    assert_eq!((&files["data"][2]["name"], &files["data"][2]["in_use"]), (&"<b>in</b>.jsonl".into(), &true.into()));
    assert_eq!(api.get(&format!("/admin/v1/files/{loose}"))["bytes"], 5);
    let text = format!("{shown}{files}{}", api.get("/admin/v1/batches"));
    assert!(!text.contains("secret content") && !text.contains("private-metadata"), "{text}");

    let cancel = format!("/admin/v1/batches/{first}/cancel");
    let delete = |role: &str, id: &str| api.call(role, "DELETE", &format!("/admin/v1/files/{id}"), "").0;
    for role in [Role::Viewer, Role::Operator] {
        assert_eq!(delete(role.name(), loose.as_str()), 403);
    }
    assert_eq!(delete("owner", input.as_str()), 409, "a batch reads it");
    assert_eq!(api.call("viewer", "POST", &cancel, "").0, 403);
    for _ in 0..2 {
        let (status, body) = api.call("operator", "POST", &cancel, "");
        assert_eq!((status, &body["status"], &body["cancellable"]), (200, &"cancelling".into(), &false.into()));
    }
    assert_eq!(api.call("operator", "POST", "/admin/v1/batches/batch_none/cancel", "").0, 404);
    assert_eq!(
        [delete("owner", loose.as_str()), delete("owner", loose.as_str()), delete("owner", "..")],
        [200, 404, 404]
    );
    let events = api.call("owner", "GET", "/admin/v1/audit?outcome=done&order=asc", "").1;
    let seen = ["batch.cancel", "batch.cancel", "file.delete"];
    assert_eq!(seen.map(Some), [0, 1, 2].map(|at: usize| events["data"][at]["action"].as_str()));
    assert_eq!(events["data"][2]["detail"]["before"]["key"], "jwt:i:bob");
    assert_eq!(events["data"][0]["target"], first.as_str());
}
