//! Conformance of files, batches and responses. Each function uses its own tenants.

use bytes::Bytes;

use crate::{
    BatchId, BatchStatus, CHUNK_BYTES_MAX, Cancelled, Counts, Deleted, EndedBatch, FileId, InventoryFilter, LineResult,
    Listed, NewBatch, NewFile, NewLine, Order, Page, ResponseChange, ResponseId, ResponseRecord, ResponseRoom,
    ResponseStatus, Store, StoreError, Tenant, WorkClaim,
};

/// Runs all checks of this module.
pub(super) async fn all(store: &dyn Store) {
    files_are_there_once_sealed(store).await;
    files_have_quotas_and_are_swept(store).await;
    lists_have_pages(store).await;
    a_batch_lives_from_creation_to_end(store).await;
    work_is_claimed_once(store).await;
    a_result_counts_once(store).await;
    batches_are_cancelled_and_bounded(store).await;
    old_batches_make_place(store).await;
    the_operator_sees_what_tenants_own(store).await;
    responses_make_conversations(store).await;
    old_responses_make_room(store).await;
    open_responses_are_listed_by_turns(store).await;
    background_responses_change_until_they_end(store).await;
    tenants_see_their_own(store).await;
    people_are_known_while_they_have_something_open(store).await;
    a_secret_is_made_once(store).await;
}

fn new_file(purpose: &str, bytes: u64) -> NewFile {
    NewFile {
        purpose: purpose.into(),
        name: "a.jsonl".into(),
        bytes,
        created: 100,
        expires: None,
        tenant_bytes_max: 1 << 30,
        tenant_files_max: 1000,
    }
}

/// Writes a file of the tenant, seals it, and returns its id.
async fn put(store: &dyn Store, tenant: &Tenant, purpose: &str, content: &[u8]) -> FileId {
    let id = store.begin_file(tenant, new_file(purpose, content.len() as u64)).await.expect("begun");
    let mut at = 0;
    for piece in content.chunks(CHUNK_BYTES_MAX) {
        store.append(tenant, &id, at, Bytes::copy_from_slice(piece)).await.expect("appended");
        at += piece.len() as u64;
    }
    store.seal(tenant, &id).await.expect("sealed");
    id
}

pub(super) fn page(limit: u32, order: Order, after: Option<&str>) -> Page {
    Page { after: after.map(str::to_owned), limit, order }
}

/// A file is invisible until sealed; ranges read the written bytes, whatever the chunks were.
async fn files_are_there_once_sealed(store: &dyn Store) {
    let tenant = Tenant::new("files");
    let content: Vec<u8> = (0..3 * CHUNK_BYTES_MAX + 17).map(|at| (at % 251) as u8).collect();
    let id = store.begin_file(&tenant, new_file("batch", content.len() as u64)).await.expect("begun");
    let mut at = 0;
    for piece in [&content[..1], &content[1..1000], &content[1000..1000 + CHUNK_BYTES_MAX]] {
        store.append(&tenant, &id, at as u64, Bytes::copy_from_slice(piece)).await.expect("appended");
        at += piece.len();
    }
    assert_eq!(store.file(&tenant, &id).await, Ok(None), "it is not sealed");
    assert_eq!(store.read(&tenant, &id, 0..10).await, Ok(None), "it is not sealed");
    let twice = store.append(&tenant, &id, 0, Bytes::from_static(b"x")).await;
    assert!(matches!(twice, Err(StoreError::Misuse(_))), "{twice:?}");
    assert!(matches!(store.seal(&tenant, &id).await, Err(StoreError::Misuse(_))), "it lacks bytes");
    for piece in content[at..].chunks(CHUNK_BYTES_MAX) {
        store.append(&tenant, &id, at as u64, Bytes::copy_from_slice(piece)).await.expect("appended");
        at += piece.len();
    }
    let more = store.append(&tenant, &id, at as u64, Bytes::from_static(b"x")).await;
    assert!(matches!(more, Err(StoreError::Misuse(_))), "{more:?}");
    let record = store.seal(&tenant, &id).await.expect("sealed");
    assert_eq!((record.bytes, record.purpose.as_str()), (content.len() as u64, "batch"));
    assert_eq!(store.file(&tenant, &id).await, Ok(Some(record)));
    let end = content.len();
    for (from, to) in
        [(0, end), (0, 1), (1, 2), (999, 1001), (1000 + CHUNK_BYTES_MAX - 1, end), (end - 1, end + 9), (end, end + 1)]
    {
        let read = store.read(&tenant, &id, from as u64..to as u64).await.expect("read").expect("there");
        assert!(read == content[from..to.min(end)], "{from}..{to}");
    }
    assert_eq!(store.delete_file(&tenant, &id).await, Ok(Deleted::Yes));
    assert_eq!(store.delete_file(&tenant, &id).await, Ok(Deleted::Absent));
    assert_eq!(store.read(&tenant, &id, 0..1).await, Ok(None));
    let empty = put(store, &tenant, "batch", b"").await;
    assert_eq!(store.read(&tenant, &empty, 0..9).await, Ok(Some(Bytes::new())));
}

/// The announced size counts at once; unfinished and expired files are swept.
async fn files_have_quotas_and_are_swept(store: &dyn Store) {
    let tenant = Tenant::new("quotas");
    let limited = |bytes, created, expires| NewFile {
        tenant_bytes_max: 100,
        tenant_files_max: 2,
        created,
        expires,
        ..new_file("batch", bytes)
    };
    let unsealed = store.begin_file(&tenant, limited(60, 100, None)).await.expect("begun");
    let second = store.begin_file(&tenant, limited(41, 100, None)).await;
    assert_eq!(second, Err(StoreError::Quota { used: 101, max: 100 }));
    let expiring = store.begin_file(&tenant, limited(0, 100, Some(500))).await.expect("begun");
    store.seal(&tenant, &expiring).await.expect("sealed");
    assert_eq!(store.begin_file(&tenant, limited(0, 100, None)).await, Err(StoreError::Quota { used: 3, max: 2 }));
    store.sweep_files(499, 100).await.expect("swept");
    assert!(store.file(&tenant, &expiring).await.expect("read").is_some());
    let seal = store.append(&tenant, &unsealed, 0, Bytes::from_static(b"x")).await;
    assert_eq!(seal, Ok(()), "still there");
    while store.sweep_files(500, 101).await.expect("swept") > 0 {}
    assert_eq!(store.file(&tenant, &expiring).await, Ok(None));
    let gone = store.append(&tenant, &unsealed, 1, Bytes::from_static(b"x")).await;
    assert!(matches!(gone, Err(StoreError::Misuse(_))), "{gone:?}");
}

/// Pages are complete in both orders, without gaps or duplicates.
async fn lists_have_pages(store: &dyn Store) {
    let tenant = Tenant::new("pages");
    let mut all = Vec::new();
    for number in 0..7 {
        let purpose = if number % 2 == 0 { "batch" } else { "user_data" };
        all.push(put(store, &tenant, purpose, b"x").await);
    }
    store.begin_file(&tenant, new_file("batch", 1)).await.expect("begun, and never seen");
    for order in [Order::Ascending, Order::Descending] {
        let mut want = all.clone();
        if order == Order::Descending {
            want.reverse();
        }
        let (mut have, mut after) = (Vec::new(), None);
        loop {
            let listing = store.files(&tenant, None, &page(3, order, after.as_deref())).await.expect("listed");
            have.extend(listing.items.iter().map(|file| file.id.clone()));
            after = have.last().map(|id: &FileId| id.as_str().to_owned());
            if !listing.more {
                break;
            }
        }
        assert_eq!(have, want);
    }
    let batch = store.files(&tenant, Some("batch"), &page(100, Order::Ascending, None)).await.expect("listed");
    assert_eq!((batch.items.len(), batch.more), (4, false));
    let unknown = store.files(&tenant, None, &page(3, Order::Ascending, Some("file-unknown"))).await.expect("listed");
    assert_eq!((unknown.items.len(), unknown.more), (0, false));
}

fn new_batch(input: &FileId) -> NewBatch {
    NewBatch {
        endpoint: "/v1/chat/completions".into(),
        input: input.clone(),
        window: "24h".into(),
        expires: 86_500,
        metadata: "{\"a\":\"b\"}".into(),
        output_expires_after: None,
        created: 100,
        tenant_open_max: 100,
        tenant_batches_max: 1000,
        tenant_output_bytes_max: 1 << 30,
    }
}

fn lines(count: u32) -> Vec<NewLine> {
    let line = |line| NewLine { line, custom_id: format!("c{line}"), at: u64::from(line) * 10, bytes: 9 };
    (0..count).map(line).collect()
}

/// Creates a batch of `count` lines and starts it; returns its id.
async fn running(store: &dyn Store, tenant: &Tenant, count: u32) -> BatchId {
    let input = put(store, tenant, "batch", b"x").await;
    let batch = store.create_batch(tenant, new_batch(&input)).await.expect("made").expect("the file is there");
    store.admit_lines(&batch.id, lines(count)).await.expect("admitted");
    store.start_batch(&batch.id, 110).await.expect("started");
    batch.id
}

fn result(ok: bool, text: &'static str) -> LineResult {
    LineResult { ok, text: Bytes::from_static(text.as_bytes()) }
}

/// A batch passes through every status up to completion.
async fn a_batch_lives_from_creation_to_end(store: &dyn Store) {
    let tenant = Tenant::new("life");
    let absent = store.create_batch(&tenant, new_batch(&FileId::random())).await;
    assert_eq!(absent, Ok(None));
    let input = put(store, &tenant, "batch", b"lines").await;
    let made = store.create_batch(&tenant, new_batch(&input)).await.expect("made").expect("the file is there");
    assert_eq!((made.status, made.times.created, made.times.expires), (BatchStatus::Validating, 100, 86_500));
    assert_eq!(store.delete_file(&tenant, &input).await, Ok(Deleted::InUse));
    let open = store.open_batches(100).await.expect("listed");
    assert!(open.iter().any(|open| open.tenant == tenant && open.batch == made));
    let (many, few) = (Tenant::new("life-many"), Tenant::new("life-few"));
    for owner in [&many, &many, &many, &few] {
        let input = put(store, owner, "batch", b"lines").await;
        store.create_batch(owner, new_batch(&input)).await.expect("made").expect("the file is there");
    }
    let open = store.open_batches(100).await.expect("listed");
    let at = |owner: &Tenant| open.iter().position(|open| open.tenant == *owner).expect("listed");
    let second = open.iter().skip(at(&many) + 1).find(|open| open.tenant == many || open.tenant == few);
    assert!(second.is_some_and(|open| open.tenant == few), "tenants take turns in the list");
    for open in open.iter().filter(|open| open.tenant == many || open.tenant == few) {
        store.cancel_batch(&open.tenant, &open.batch.id, 120).await.expect("cancelled");
        let end =
            EndedBatch { status: BatchStatus::Cancelled, output: None, errors: None, faults: String::new(), now: 130 };
        assert_eq!(store.end_batch(&open.batch.id, end).await, Ok(true));
    }
    store.admit_lines(&made.id, lines(2)).await.expect("admitted");
    store.admit_lines(&made.id, lines(3)).await.expect("again, after a crash");
    store.start_batch(&made.id, 110).await.expect("started");
    store.start_batch(&made.id, 111).await.expect("again changes nothing");
    let batch = store.batch(&tenant, &made.id).await.expect("read").expect("there");
    assert_eq!((batch.status, batch.counts.total, batch.times.in_progress), (BatchStatus::InProgress, 3, Some(110)));
    assert_eq!(store.waiting_lines(&made.id, 0, 2).await.expect("read"), lines(3)[..2]);
    for (line, ok, text) in [(2, true, "two"), (0, true, "zero"), (1, false, "one")] {
        assert_eq!(store.finish_line(&made.id, line, result(ok, text)).await, Ok(true));
    }
    assert_eq!(store.waiting_lines(&made.id, 0, 10).await, Ok(vec![]));
    store.finalize_batch(&made.id, 120).await.expect("finalizing");
    assert_eq!(store.result_bytes(&made.id, true).await, Ok((7, 2)));
    assert_eq!(store.output_bytes(&tenant).await, Ok(13), "of both outcomes with line ends, before there are files");
    assert_eq!(store.results(&made.id, true, 0, 1).await, Ok(vec![(0, "zero".into())]), "at least one");
    assert_eq!(store.results(&made.id, true, 1, 99).await, Ok(vec![(2, "two".into())]));
    assert_eq!(store.results(&made.id, false, 0, 99).await, Ok(vec![(1, "one".into())]));
    let output = store.begin_file(&tenant, new_file("batch_output", 2)).await.expect("begun");
    let end =
        |output| EndedBatch { status: BatchStatus::Completed, output, errors: None, faults: String::new(), now: 130 };
    let early = store.end_batch(&made.id, end(Some(output.clone()))).await;
    assert!(matches!(early, Err(StoreError::Misuse(_))), "its file lacks bytes: {early:?}");
    store.append(&tenant, &output, 0, Bytes::from_static(b"ok")).await.expect("appended");
    assert_eq!(store.end_batch(&made.id, end(Some(output.clone()))).await, Ok(true));
    assert_eq!(store.end_batch(&made.id, end(None)).await, Ok(false));
    assert_eq!(store.output_bytes(&tenant).await, Ok(2), "the file of results, and not that of requests");
    let refused = store.create_batch(&tenant, NewBatch { tenant_output_bytes_max: 2, ..new_batch(&input) }).await;
    assert_eq!(refused, Err(StoreError::Quota { used: 3, max: 2 }));
    let batch = store.batch(&tenant, &made.id).await.expect("read").expect("there");
    assert_eq!(
        (batch.status, batch.output, batch.times.ended),
        (BatchStatus::Completed, Some(output.clone()), Some(130))
    );
    assert_eq!(batch.counts, Counts { total: 3, completed: 2, failed: 1 });
    assert!(store.file(&tenant, &output).await.expect("read").is_some(), "sealed with the end");
    assert_eq!(store.delete_file(&tenant, &input).await, Ok(Deleted::Yes));
    assert_eq!(store.delete_file(&tenant, &output).await, Ok(Deleted::Yes));
    assert_eq!(store.output_bytes(&tenant).await, Ok(0), "what was deleted");
}

/// A second result for a line is reported and changes nothing.
async fn a_result_counts_once(store: &dyn Store) {
    let tenant = Tenant::new("once");
    let id = running(store, &tenant, 2).await;
    assert_eq!(store.finish_line(&id, 0, result(true, "first")).await, Ok(true));
    assert_eq!(store.finish_line(&id, 0, result(false, "second")).await, Ok(false));
    assert_eq!(store.finish_line(&id, 7, result(true, "no such line")).await, Ok(false));
    let batch = store.batch(&tenant, &id).await.expect("read").expect("there");
    assert_eq!(batch.counts, Counts { total: 2, completed: 1, failed: 0 });
    assert_eq!(store.output_bytes(&tenant).await, Ok(6));
    assert_eq!(store.results(&id, true, 0, 99).await, Ok(vec![(0, "first".into())]));
}

/// Lists across tenants: owners, sizes, pages, and what cannot be deleted.
async fn the_operator_sees_what_tenants_own(store: &dyn Store) {
    let (first, second) = (Tenant::new("inventory-a"), Tenant::new("inventory-b"));
    let id = running(store, &first, 2).await;
    let other = running(store, &second, 1).await;
    assert_eq!(store.finish_line(&id, 0, result(true, "12345")).await, Ok(true));
    let hidden = put(store, &second, ".messages", b"x").await;
    let free = put(store, &second, "user_data", b"four").await;
    let of = |tenant: &Tenant| InventoryFilter { tenant: Some(tenant.clone()), ..InventoryFilter::default() };
    let newest = page(100, Order::Descending, None);
    let listed = store.all_batches(&of(&first), &newest).await.expect("listed");
    let [owned] = &listed.items[..] else { panic!("{listed:?}") };
    assert_eq!((&owned.tenant, &owned.batch.id, owned.batch.counts.total), (&first, &id, 2));
    assert_eq!((owned.input_bytes, owned.output_bytes), (Some(1), 5));
    let all = store.all_batches(&InventoryFilter::default(), &page(1, Order::Descending, None)).await.expect("listed");
    assert_eq!((&all.items[0].batch.id, all.more), (&other, true), "the newest of all tenants");
    let next = page(1, Order::Descending, Some(other.as_str()));
    let next = store.all_batches(&InventoryFilter::default(), &next).await.expect("listed");
    assert_eq!(next.items[0].batch.id, id);
    let one = InventoryFilter { id: Some(other.as_str().into()), ..InventoryFilter::default() };
    assert_eq!(store.all_batches(&one, &newest).await.expect("listed").items[0].tenant, second);

    let files = store.all_files(&of(&second), &newest).await.expect("listed").items;
    let seen: Vec<_> = files.iter().map(|owned| (owned.file.bytes, owned.is_in_use)).collect();
    assert_eq!(seen, [(4, false), (1, true)], "no file of messages, and one that a batch reads");
    assert_eq!((&files[0].file.id, &files[0].tenant), (&free, &second));
    let one = InventoryFilter { id: Some(hidden.as_str().into()), ..InventoryFilter::default() };
    assert!(store.all_files(&one, &newest).await.expect("listed").items.is_empty());

    for (tenant, id) in [(&first, &id), (&second, &other)] {
        let output = store.begin_file(tenant, new_file("batch_output", 3)).await.expect("begun");
        store.append(tenant, &output, 0, "abc".into()).await.expect("appended");
        let status = BatchStatus::Completed;
        let end = EndedBatch { status, output: Some(output), errors: None, faults: String::new(), now: 130 };
        assert_eq!(store.end_batch(id, end).await, Ok(true));
    }
    let open = InventoryFilter { is_open: true, ..of(&first) };
    assert!(store.all_batches(&open, &newest).await.expect("listed").items.is_empty());
    let input = store.all_batches(&of(&first), &newest).await.expect("listed").items[0].batch.input.clone();
    assert_eq!(store.delete_file(&first, &input).await, Ok(Deleted::Yes));
    let ended = store.all_batches(&of(&first), &newest).await.expect("listed").items;
    assert_eq!((ended[0].input_bytes, ended[0].output_bytes), (None, 3));
}

/// Only unfinished batches can be cancelled; the number of open ones is bounded.
async fn batches_are_cancelled_and_bounded(store: &dyn Store) {
    let tenant = Tenant::new("cancelled");
    assert_eq!(store.cancel_batch(&tenant, &BatchId::random(), 120).await, Ok(Cancelled::Absent));
    let id = running(store, &tenant, 1).await;
    let full = store
        .create_batch(&tenant, NewBatch { tenant_open_max: 1, ..new_batch(&put(store, &tenant, "batch", b"x").await) });
    assert_eq!(full.await, Err(StoreError::Quota { used: 2, max: 1 }));
    let cancelled = store.cancel_batch(&tenant, &id, 120).await.expect("cancelled");
    assert!(matches!(&cancelled, Cancelled::Yes(batch) if batch.status == BatchStatus::Cancelling), "{cancelled:?}");
    store.finalize_batch(&id, 125).await.expect("no change");
    let batch = store.batch(&tenant, &id).await.expect("read").expect("there");
    assert_eq!((batch.status, batch.times.cancelling), (BatchStatus::Cancelling, Some(120)));
    let end =
        EndedBatch { status: BatchStatus::Cancelled, output: None, errors: None, faults: String::new(), now: 130 };
    assert_eq!(store.end_batch(&id, end).await, Ok(true));
    assert!(matches!(store.cancel_batch(&tenant, &id, 140).await, Ok(Cancelled::Yes(_))), "it is what was asked for");
    let other = running(store, &tenant, 1).await;
    let end = EndedBatch { status: BatchStatus::Failed, output: None, errors: None, faults: "{}".into(), now: 130 };
    assert_eq!(store.end_batch(&other, end).await, Ok(true));
    assert!(matches!(store.cancel_batch(&tenant, &other, 140).await, Ok(Cancelled::TooLate(_))));
    let listed =
        store.batches(&tenant, Listed::Except("/other"), &page(1, Order::Descending, None)).await.expect("listed");
    assert_eq!((listed.items[0].id.clone(), listed.more), (other.clone(), true));
    let behind = store
        .batches(&tenant, Listed::Except("/other"), &page(1, Order::Descending, Some(other.as_str())))
        .await
        .expect("listed");
    assert_eq!((behind.items[0].id.clone(), behind.more), (id.clone(), false));
    // Lists are of one endpoint, or of all others.
    for (listed, count) in [
        (Listed::Of("/v1/chat/completions"), 2),
        (Listed::Except("/v1/chat/completions"), 0),
        (Listed::Of("/other"), 0),
    ] {
        let found = store.batches(&tenant, listed, &page(9, Order::Descending, None)).await.expect("listed");
        assert_eq!(found.items.len(), count, "{listed:?}");
    }
    // A batch that has ended is deleted with its files; one that has not is in use.
    let open = running(store, &tenant, 1).await;
    assert_eq!(store.delete_batch(&tenant, &open).await, Ok(Deleted::InUse));
    let input = store.batch(&tenant, &id).await.expect("read").expect("there").input;
    assert_eq!(store.delete_batch(&tenant, &id).await, Ok(Deleted::Yes));
    assert_eq!(store.delete_batch(&tenant, &id).await, Ok(Deleted::Absent));
    assert_eq!((store.batch(&tenant, &id).await, store.file(&tenant, &input).await), (Ok(None), Ok(None)));
    let end =
        EndedBatch { status: BatchStatus::Cancelled, output: None, errors: None, faults: String::new(), now: 130 };
    assert_eq!(store.end_batch(&open, end).await, Ok(true));
}

/// Ends a batch with a file of results, or as failed without one.
async fn ended(store: &dyn Store, tenant: &Tenant, id: &BatchId, has_output: bool, now: u64) -> Option<FileId> {
    let mut output = None;
    if has_output {
        let file = store.begin_file(tenant, new_file("batch_output", 2)).await.expect("begun");
        store.append(tenant, &file, 0, Bytes::from_static(b"ok")).await.expect("appended");
        output = Some(file);
    }
    let status = if has_output { BatchStatus::Completed } else { BatchStatus::Failed };
    let end = EndedBatch { status, output: output.clone(), errors: None, faults: String::new(), now };
    assert_eq!(store.end_batch(id, end).await, Ok(true));
    output
}

/// Batches without results make place for others of their tenant, and go when they are old; those with results stay.
async fn old_batches_make_place(store: &dyn Store) {
    let (tenant, other) = (Tenant::new("places"), Tenant::new("places-other"));
    let input = put(store, &tenant, "batch", b"x").await;
    let create = async || store.create_batch(&tenant, NewBatch { tenant_batches_max: 3, ..new_batch(&input) }).await;
    let is_there = async |id: &BatchId| store.batch(&tenant, id).await.expect("read").is_some();
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(create().await.expect("made").expect("the file is there").id);
    }
    assert_eq!(create().await, Err(StoreError::Quota { used: 4, max: 3 }), "all are open");
    let output = ended(store, &tenant, &ids[0], true, 1000).await.expect("a file");
    assert_eq!(create().await, Err(StoreError::Quota { used: 4, max: 3 }), "its results are there");
    ended(store, &tenant, &ids[1], false, 1000).await;
    let next = create().await.expect("made").expect("the file is there").id;
    assert_eq!([is_there(&ids[0]).await, is_there(&ids[1]).await, is_there(&next).await], [true, false, true]);

    let (old, young) = (running(store, &other, 300).await, running(store, &other, 1).await);
    ended(store, &other, &old, false, 1000).await;
    ended(store, &other, &young, false, 2000).await;
    let sweep = async || while store.sweep_batches(1500).await.expect("swept") > 0 {};
    sweep().await;
    assert_eq!(store.batch(&other, &old).await, Ok(None));
    assert!(
        store.batch(&other, &young).await.expect("read").is_some() && is_there(&ids[0]).await && is_there(&next).await
    );
    assert_eq!(store.delete_file(&tenant, &output).await, Ok(Deleted::Yes));
    sweep().await;
    assert!(!is_there(&ids[0]).await, "its results are gone");
}

fn response(id: &ResponseId, previous: Option<&ResponseId>, input: &str, output: &str) -> ResponseRecord {
    ResponseRecord {
        id: id.clone(),
        status: ResponseStatus::Ended,
        previous: previous.cloned(),
        created: 100,
        expires: 1000,
        body: Bytes::from_static(b"{}"),
        input: Bytes::copy_from_slice(input.as_bytes()),
        output: Bytes::copy_from_slice(output.as_bytes()),
        request: Bytes::new(),
        event_bytes: 0,
    }
}

/// Change of an unfinished response.
fn change(status: ResponseStatus, body: impl Into<Bytes>, output: &'static str) -> ResponseChange {
    ResponseChange { status, body: body.into(), output: output.into(), events: Bytes::new() }
}

/// A conversation is read oldest turn first, within its bounds.
async fn responses_make_conversations(store: &dyn Store) {
    let tenant = Tenant::new("responses");
    let ids: Vec<ResponseId> = (0..3).map(|_| ResponseId::random()).collect();
    for (at, (input, output)) in [("[1]", "[2]"), ("[3]", "[4]"), ("[5]", "[6]")].into_iter().enumerate() {
        let previous = at.checked_sub(1).map(|before| &ids[before]);
        store.save_response(&tenant, response(&ids[at], previous, input, output), ROOM).await.expect("saved");
    }
    let turns = store.conversation(&tenant, &ids[2], 10, 1000).await.expect("read").expect("there");
    let inputs: Vec<_> = turns.iter().map(|turn| turn.input.as_ref()).collect();
    assert_eq!(inputs, [b"[1]", b"[3]", b"[5]"]);
    let long = store.conversation(&tenant, &ids[2], 2, 1000).await;
    assert_eq!(long, Err(StoreError::TooLong { what: "turns", max: 2 }));
    assert!(matches!(
        store.conversation(&tenant, &ids[2], 10, 17).await,
        Err(StoreError::TooLong { what: "bytes", .. })
    ));
    assert_eq!(store.conversation(&tenant, &ResponseId::random(), 10, 1000).await, Ok(None));
    let saved = store.response(&tenant, &ids[1]).await.expect("read").expect("there");
    assert_eq!(saved, response(&ids[1], Some(&ids[0]), "[3]", "[4]"));
    let state = store.response_state(&tenant, &ids[1]).await.expect("read").expect("there");
    assert_eq!((state.status, state.event_bytes), (saved.status, 0));
    assert_eq!(store.response_state(&Tenant::new("stranger"), &ids[1]).await, Ok(None));
    assert_eq!(store.delete_response(&tenant, &ids[0]).await, Ok(true));
    assert_eq!(store.delete_response(&tenant, &ids[0]).await, Ok(false));
    let shorter = store.conversation(&tenant, &ids[2], 10, 1000).await.expect("read").expect("there");
    assert_eq!(shorter.len(), 2, "what was deleted ends the conversation");
    while store.sweep_responses(1000).await.expect("swept") > 0 {}
    assert_eq!(store.response(&tenant, &ids[2]).await, Ok(None));
}

/// Room that is never used up, for tests of something else.
const ROOM: ResponseRoom = ResponseRoom { tenant_max: 1000, tenant_bytes_max: 1 << 40, bytes_max: 1 << 50 };

/// Indexes of those of `ids` that the tenant has.
async fn there(store: &dyn Store, tenant: &Tenant, ids: &[ResponseId]) -> Vec<usize> {
    let mut out = Vec::new();
    for (at, id) in ids.iter().enumerate() {
        if store.response(tenant, id).await.expect("read").is_some() {
            out.push(at);
        }
    }
    out
}

/// The oldest ended responses make room; a response that would need more than that changes nothing.
async fn old_responses_make_room(store: &dyn Store) {
    let (tenant, large) = (Tenant::new("roomy"), "x".repeat(10_000));
    let ids: Vec<ResponseId> = (0..8).map(|_| ResponseId::random()).collect();
    let open = |id: &ResponseId| ResponseRecord {
        status: ResponseStatus::Queued,
        request: Bytes::from(large.clone()),
        ..response(id, None, "[]", "[]")
    };
    let one = open(&ids[0]).bytes();
    assert!((10_000..11_000).contains(&one), "a row counts its documents and a little: {one}");
    let three = ResponseRoom { tenant_bytes_max: 3 * one, ..ROOM };
    store.save_response(&tenant, open(&ids[0]), three).await.expect("saved");
    for id in &ids[1..4] {
        store.save_response(&tenant, response(id, None, &large, "[]"), three).await.expect("saved");
    }
    assert_eq!(there(store, &tenant, &ids).await, [0, 2, 3], "the oldest that has ended went, not the open one");
    // The number of responses is bounded too.
    let few = ResponseRoom { tenant_max: 2, ..ROOM };
    store.save_response(&tenant, response(&ids[4], None, "[]", "[]"), few).await.expect("saved");
    assert_eq!(there(store, &tenant, &ids).await, [0, 4]);
    // A response that cannot fit beside the open ones deletes nothing.
    let refused = store.save_response(&tenant, response(&ids[5], None, &large.repeat(2), &large), three).await;
    assert!(matches!(refused, Err(StoreError::Quota { .. })), "{refused:?}");
    assert_eq!(there(store, &tenant, &ids).await, [0, 4]);
    // An answer that grows needs room; the notice that there is none does not.
    let update = |body: String, room| store.update_response(&ids[0], change(ResponseStatus::Ended, body, "[]"), room);
    let refused = update(large.repeat(4), Some(three)).await;
    assert!(matches!(refused, Err(StoreError::Quota { .. })), "{refused:?}");
    assert_eq!(update("{}".into(), None).await, Ok(true));
    assert_eq!(there(store, &tenant, &ids).await, [0, 4]);
    // For the bound of all tenants, the tenant with the most bytes gives way, not the one that writes.
    let (largest, small) = (Tenant::new("keeps most"), Tenant::new("keeps little"));
    let theirs: Vec<ResponseId> = (0..3).map(|_| ResponseId::random()).collect();
    for id in &theirs {
        store.save_response(&largest, response(id, None, &"x".repeat(3 << 20), "[]"), ROOM).await.expect("saved");
    }
    let now = store.response_bytes().await.expect("summed");
    let full = ResponseRoom { bytes_max: now, ..ROOM };
    store.save_response(&small, response(&ids[6], None, &large, "[]"), full).await.expect("saved");
    assert_eq!(there(store, &largest, &theirs).await, [1, 2]);
    assert_eq!(there(store, &small, &ids).await, [6]);
    let after = store.response_bytes().await.expect("summed");
    assert_eq!(after, now - (3 << 20) + 10_000, "less one of three megabytes, and one of ten thousand bytes more");
    let never = ResponseRoom { bytes_max: 1000, ..ROOM };
    let refused = store.save_response(&small, response(&ids[7], None, &large, "[]"), never).await;
    assert!(matches!(refused, Err(StoreError::Quota { .. })), "{refused:?}");
    assert_eq!(there(store, &small, &ids).await, [6]);
    while store.sweep_responses(1000).await.expect("swept") > 0 {}
}

/// Responses of a tenant with many do not hide those of another.
async fn open_responses_are_listed_by_turns(store: &dyn Store) {
    let (many, few) = (Tenant::new("has many"), Tenant::new("has few"));
    let queued = |id: &ResponseId| ResponseRecord { status: ResponseStatus::Queued, ..response(id, None, "[]", "[]") };
    let ids: Vec<ResponseId> = (0..6).map(|_| ResponseId::random()).collect();
    for (at, id) in ids.iter().enumerate() {
        let tenant = if at < 4 { &many } else { &few };
        store.save_response(tenant, queued(id), ROOM).await.expect("saved");
    }
    let listed = async |each| {
        let open = store.open_responses(each, 100).await.expect("listed");
        let ours = open.into_iter().filter(|open| [&many, &few].contains(&&open.tenant));
        ours.map(|open| ids.iter().position(|id| *id == open.id).expect("ours")).collect::<Vec<_>>()
    };
    assert_eq!(listed(100).await, [0, 4, 1, 5, 2, 3]);
    assert_eq!(listed(1).await, [0, 4]);
    assert!(store.open_responses(100, 1).await.expect("listed").len() == 1);
    while store.sweep_responses(1000).await.expect("swept") > 0 {}
}

/// A response can be changed until it has ended.
async fn background_responses_change_until_they_end(store: &dyn Store) {
    let tenant = Tenant::new("background");
    let id = ResponseId::random();
    let queued = ResponseRecord {
        status: ResponseStatus::Queued,
        request: Bytes::from_static(b"{\"model\":\"m\"}"),
        ..response(&id, None, "[]", "[]")
    };
    store.save_response(&tenant, queued.clone(), ROOM).await.expect("saved");
    let open = store.open_responses(100, 100).await.expect("listed");
    assert!(open.iter().any(|open| open.tenant == tenant && open.id == queued.id));
    assert_eq!(store.response(&tenant, &id).await, Ok(Some(queued)));
    assert_eq!(store.conversation(&tenant, &id, 10, 1000).await, Ok(None), "it has not ended");
    let update = |status, body: &'static str| store.update_response(&id, change(status, body, "[1]"), Some(ROOM));
    assert_eq!(store.response_events(&tenant, &id).await, Ok(Some(Bytes::new())));
    assert_eq!(update(ResponseStatus::InProgress, "{1}").await, Ok(true));
    let before = store.response(&tenant, &id).await.expect("read").expect("there").bytes();
    let ended = ResponseChange { events: "data: 1".into(), ..change(ResponseStatus::Ended, "{2}", "[1]") };
    let sum = store.response_bytes().await.expect("summed");
    assert_eq!(store.update_response(&id, ended, Some(ROOM)).await, Ok(true));
    assert_eq!(store.response_events(&tenant, &id).await, Ok(Some("data: 1".into())));
    assert_eq!(store.response_events(&Tenant::new("nobody"), &id).await, Ok(None));
    let after = store.response(&tenant, &id).await.expect("read").expect("there");
    assert_eq!((after.event_bytes, after.bytes()), (7, before + 7 - 13), "events count, the request no more");
    assert_eq!(store.response_bytes().await.expect("summed"), sum + 7 - 13);
    assert_eq!(update(ResponseStatus::Ended, "{3}").await, Ok(false));
    let ended = store.response(&tenant, &id).await.expect("read").expect("there");
    assert_eq!((ended.body.as_ref(), ended.request.len()), (b"{2}".as_slice(), 0));
    assert!(store.open_responses(100, 100).await.expect("listed").iter().all(|open| open.id != id));
}

/// Objects of another tenant are invisible in every operation.
async fn tenants_see_their_own(store: &dyn Store) {
    let (owner, other) = (Tenant::new("owner"), Tenant::new("other"));
    let file = put(store, &owner, "batch", b"secret").await;
    let unsealed = store.begin_file(&owner, new_file("batch", 1)).await.expect("begun");
    let batch = running(store, &owner, 1).await;
    let id = ResponseId::random();
    store.save_response(&owner, response(&id, None, "[]", "[]"), ROOM).await.expect("saved");
    for stranger in [&other, &Tenant::new("")] {
        assert_eq!(store.file(stranger, &file).await, Ok(None));
        assert_eq!(store.read(stranger, &file, 0..6).await, Ok(None));
        assert_eq!(store.delete_file(stranger, &file).await, Ok(Deleted::Absent));
        assert_eq!(store.delete_file(stranger, &unsealed).await, Ok(Deleted::Absent));
        assert!(store.append(stranger, &unsealed, 0, Bytes::from_static(b"x")).await.is_err());
        assert!(store.seal(stranger, &unsealed).await.is_err());
        let listed = store.files(stranger, None, &page(100, Order::Ascending, None)).await.expect("listed");
        assert_eq!(listed.items, vec![]);
        let behind = store.files(stranger, None, &page(100, Order::Descending, Some(file.as_str()))).await;
        assert_eq!(behind.expect("listed").items, vec![], "another's id is no place in a list");
        assert_eq!(store.create_batch(stranger, new_batch(&file)).await, Ok(None));
        assert_eq!(store.batch(stranger, &batch).await, Ok(None));
        assert_eq!(
            store
                .batches(stranger, Listed::Except("/other"), &page(100, Order::Ascending, None))
                .await
                .expect("listed")
                .items,
            vec![]
        );
        assert_eq!(store.delete_batch(stranger, &batch).await, Ok(Deleted::Absent));
        assert_eq!(store.cancel_batch(stranger, &batch, 1).await, Ok(Cancelled::Absent));
        assert_eq!(store.response(stranger, &id).await, Ok(None));
        assert_eq!(store.conversation(stranger, &id, 10, 1000).await, Ok(None));
        assert_eq!(store.delete_response(stranger, &id).await, Ok(false));
    }
    assert!(store.file(&owner, &file).await.expect("read").is_some());
}

/// An identity is kept while its tenant has an open batch or response; the last one stored counts.
async fn people_are_known_while_they_have_something_open(store: &dyn Store) {
    let (ada, bob, eve) = (Tenant::new("jwt:corp:ada"), Tenant::new("jwt:corp:bob"), Tenant::new("jwt:corp:eve"));
    assert_eq!(store.identity(&ada).await, Ok(None));
    for (tenant, identity, at) in
        [(&ada, "{\"a\":1}", 100), (&bob, "b", 100), (&eve, "e", 100), (&ada, "{\"a\":2}", 200)]
    {
        store.keep_identity(tenant, identity, at).await.expect("kept");
    }
    assert_eq!(store.identity(&ada).await, Ok(Some(("{\"a\":2}".to_owned(), 200))));
    let input = put(store, &bob, "batch", b"{}").await;
    let batch = store.create_batch(&bob, new_batch(&input)).await.expect("created").expect("its file is there");
    let id = ResponseId::random();
    let queued = ResponseRecord { status: ResponseStatus::Queued, ..response(&id, None, "[]", "[]") };
    store.save_response(&eve, queued, ROOM).await.expect("saved");
    assert_eq!(store.sweep_identities(1_000).await, Ok(1), "ada has nothing open");
    assert_eq!(store.identity(&ada).await, Ok(None));
    let end = EndedBatch { status: BatchStatus::Failed, output: None, errors: None, faults: String::new(), now: 900 };
    assert_eq!(store.end_batch(&batch.id, end).await, Ok(true));
    assert_eq!(store.sweep_identities(100).await, Ok(0), "not yet");
    assert_eq!(store.sweep_identities(1_000).await, Ok(1));
    assert_eq!(store.identity(&eve).await, Ok(Some(("e".to_owned(), 100))));
    let ended = change(ResponseStatus::Ended, "{}", "[]");
    assert_eq!(store.update_response(&id, ended, None).await, Ok(true));
    assert_eq!(store.sweep_identities(1_000).await, Ok(1), "her response has ended");
    let long = "x".repeat(crate::IDENTITY_BYTES_MAX + 1);
    assert!(matches!(store.keep_identity(&eve, &long, 1).await, Err(StoreError::Misuse(_))));
}

/// Whoever asks first makes the secret; all get the same.
async fn a_secret_is_made_once(store: &dyn Store) {
    let first = store.secret("reasoning", &[1; 32]).await.expect("kept");
    assert_eq!(store.secret("reasoning", &[2; 32]).await, Ok(first.clone()));
    assert_ne!(store.secret("other", &[3; 32]).await.expect("kept"), first);
    for (name, value) in [("", vec![1]), ("a", Vec::new()), ("a", vec![1; 257]), ("a\0", vec![1])] {
        assert!(matches!(store.secret(name, &value).await, Err(StoreError::Misuse(_))), "{name:?}");
    }
}

/// Work has one holder at a time; a claim that was renewed is not forgotten, and a lost one is not renewed.
async fn work_is_claimed_once(store: &dyn Store) {
    let others = async |of: &str| {
        let found = store.claims_of_others(of, 100).await.expect("listed");
        found.into_iter().filter(|claim| claim.work.starts_with("work-")).collect::<Vec<_>>()
    };
    assert_eq!(store.claim_work("work-a", "one").await, Ok(true));
    assert_eq!(store.claim_work("work-a", "one").await, Ok(true), "a claim that was asked for again");
    assert_eq!(store.claim_work("work-a", "two").await, Ok(false));
    assert_eq!(store.claim_work("work-b", "two").await, Ok(true));
    let seen = others("two").await;
    assert_eq!(seen, [WorkClaim { work: "work-a".into(), holder: "one".into(), beats: 0 }]);
    assert_eq!(store.renew_work("one").await, Ok(vec!["work-a".to_owned()]));
    assert_eq!(store.forget_work(&seen[0]).await, Ok(false), "its holder has given a sign of life");
    let seen = others("two").await;
    assert_eq!(seen[0].beats, 1);
    // The holder is silent, and another takes over; when the first is back, it learns so.
    assert_eq!((store.forget_work(&seen[0]).await, store.forget_work(&seen[0]).await), (Ok(true), Ok(false)));
    assert_eq!(store.claim_work("work-a", "two").await, Ok(true));
    assert_eq!(store.renew_work("one").await, Ok(vec![]));
    let both = ["work-a".to_owned(), "work-b".to_owned()];
    store.release_work(&both, "one").await.expect("nothing of its own");
    assert_eq!(others("one").await.len(), 2);
    store.release_work(&both, "two").await.expect("released");
    assert_eq!(others("one").await, []);
    for (work, holder) in [("", "one"), ("work-c", ""), ("work\0", "one"), (&"x".repeat(300), "one")] {
        assert!(matches!(store.claim_work(work, holder).await, Err(StoreError::Misuse(_))), "{work:?}");
    }
}
