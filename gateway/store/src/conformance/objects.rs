//! Conformance of listed objects: chat completions, conversations and their items.

use bytes::Bytes;

use super::kept::page;
use crate::{
    Append, Change, Item, ObjectFilter, ObjectId, ObjectKind, ObjectRecord, Order, ResponseRoom, Store, StoreError,
    Tenant,
};

/// Room that is never used up, for tests of something else.
const ROOM: ResponseRoom = ResponseRoom { tenant_max: 1000, tenant_bytes_max: 1 << 40, bytes_max: 1 << 50 };
/// Most bytes of a page, for tests of something else.
const BYTES: u64 = 1 << 20;

/// Runs all checks of this module.
pub(super) async fn all(store: &dyn Store) {
    objects_are_kept_listed_and_labelled(store).await;
    lists_are_filtered(store).await;
    pages_are_bounded_in_bytes(store).await;
    items_are_kept_in_order(store).await;
    a_held_conversation_is_changed_by_its_holder(store).await;
    objects_make_room_and_expire(store).await;
    tenants_see_their_own(store).await;
}

fn completion(model: &str, metadata: &str, body: &str) -> ObjectRecord {
    ObjectRecord {
        id: ObjectId::random(ObjectKind::Completion),
        created: 100,
        expires: 1000,
        model: model.into(),
        metadata: metadata.into(),
        body: Bytes::copy_from_slice(body.as_bytes()),
        input: Bytes::from_static(b"[]"),
    }
}

fn conversation() -> ObjectRecord {
    let id = ObjectId::random(ObjectKind::Conversation);
    ObjectRecord { id, model: String::new(), body: Bytes::new(), input: Bytes::new(), ..completion("", "{}", "") }
}

fn item(id: &str) -> Item {
    Item { id: id.into(), json: Bytes::from(format!("{{\"id\":\"{id}\"}}")) }
}

fn adding(ids: &[&str]) -> Append {
    let items = ids.iter().map(|id| item(id)).collect();
    Append { holder: None, items, now: 200, expires: 2000, items_max: 100, room: ROOM }
}

async fn ids(store: &dyn Store, tenant: &Tenant, id: &ObjectId) -> Vec<String> {
    let items = store.all_items(tenant, id, 1000, BYTES).await.expect("read").expect("there");
    items.into_iter().map(|item| item.id).collect()
}

/// An object is read back as it was saved; its metadata changes, its place in a list does not.
async fn objects_are_kept_listed_and_labelled(store: &dyn Store) {
    let tenant = Tenant::new("objects");
    let made: Vec<_> = ["1", "2", "3"].map(|body| completion("m", "{}", body)).into();
    for object in &made {
        store.save_object(&tenant, object.clone(), Vec::new(), ROOM).await.expect("saved");
    }
    assert_eq!(store.object(&tenant, &made[1].id).await, Ok(Some(made[1].clone())));
    let before = store.response_bytes().await.expect("summed");
    assert_eq!(store.label_object(&tenant, &made[0].id, r#"{"a":"1"}"#, ROOM).await, Ok(true));
    assert_eq!(store.response_bytes().await.expect("summed"), before + 7, "metadata counts");
    let labelled = ObjectRecord { metadata: r#"{"a":"1"}"#.into(), ..made[0].clone() };
    assert_eq!(store.object(&tenant, &made[0].id).await, Ok(Some(labelled.clone())));
    let all = ObjectFilter::default();
    let listed = store.objects(&tenant, ObjectKind::Completion, &all, &page(2, Order::Ascending, None), BYTES).await;
    let listed = listed.expect("listed");
    assert_eq!((listed.items, listed.more), (vec![labelled, made[1].clone()], true));
    let after = page(2, Order::Descending, Some(made[2].id.as_str()));
    let listed = store.objects(&tenant, ObjectKind::Completion, &all, &after, BYTES).await.expect("listed");
    assert_eq!(listed.items.iter().map(|object| &object.id).collect::<Vec<_>>(), [&made[1].id, &made[0].id]);
    assert_eq!(store.delete_object(&tenant, &made[1].id).await, Ok(true));
    assert_eq!(store.delete_object(&tenant, &made[1].id).await, Ok(false));
    assert_eq!(store.label_object(&tenant, &made[1].id, "{}", ROOM).await, Ok(false));
    while store.sweep_responses(1000).await.expect("swept") > 0 {}
    assert_eq!(store.object(&tenant, &made[0].id).await, Ok(None));
}

/// A filter admits objects of the model that have all entries, and no text that only looks like an entry.
async fn lists_are_filtered(store: &dyn Store) {
    let tenant = Tenant::new("filtered");
    for (model, metadata) in [
        ("m", r#"{"a":"1"}"#),
        ("m", r#"{"a":"1","b":"2"}"#),
        ("other", r#"{"a":"1","b":"2"}"#),
        ("m", r#"{"x":"\"a\":\"1\"","y":"\"b\":\"2\""}"#),
        ("m", "{}"),
    ] {
        store.save_object(&tenant, completion(model, metadata, "x"), Vec::new(), ROOM).await.expect("saved");
    }
    let count = async |model: Option<&str>, metadata: &[&str]| {
        let filter = ObjectFilter {
            model: model.map(str::to_owned),
            metadata: metadata.iter().map(|entry| (*entry).to_owned()).collect(),
        };
        let page = page(10, Order::Descending, None);
        store.objects(&tenant, ObjectKind::Completion, &filter, &page, BYTES).await.expect("listed").items.len()
    };
    assert_eq!(count(None, &[]).await, 5);
    assert_eq!(count(Some("m"), &[]).await, 4);
    assert_eq!(count(None, &[r#""a":"1""#]).await, 3);
    assert_eq!(count(None, &[r#""a":"1""#, r#""b":"2""#]).await, 2);
    assert_eq!(count(Some("other"), &[r#""a":"1""#]).await, 1);
    assert_eq!(count(Some("nothing"), &[]).await, 0);
    while store.sweep_responses(1000).await.expect("swept") > 0 {}
}

/// A page ends where its bytes do, with at least one object.
async fn pages_are_bounded_in_bytes(store: &dyn Store) {
    let tenant = Tenant::new("bounded pages");
    for _ in 0..3 {
        let object = completion("m", "{}", &"x".repeat(5000));
        store.save_object(&tenant, object, Vec::new(), ROOM).await.expect("saved");
    }
    let filter = ObjectFilter::default();
    for (bytes_max, count) in [(1, 1), (11_500, 2), (1 << 20, 3)] {
        let page = page(10, Order::Descending, None);
        let listed = store.objects(&tenant, ObjectKind::Completion, &filter, &page, bytes_max).await.expect("listed");
        assert_eq!((listed.items.len(), listed.more), (count, count < 3), "{bytes_max}");
    }
    while store.sweep_responses(1000).await.expect("swept") > 0 {}
}

/// Items stand in the order in which they were added, whatever was deleted between them.
async fn items_are_kept_in_order(store: &dyn Store) {
    let tenant = Tenant::new("items");
    let object = conversation();
    let id = object.id.clone();
    store.save_object(&tenant, object, vec![item("a"), item("b")], ROOM).await.expect("saved");
    let before = store.response_bytes().await.expect("summed");
    assert_eq!(store.append_items(&tenant, &id, adding(&["c", "d"])).await, Ok(Change::Done));
    let added = item("c").bytes() + item("d").bytes();
    assert_eq!(store.response_bytes().await.expect("summed"), before + added, "items count");
    assert_eq!(store.delete_item(&tenant, &id, "b", 200).await, Ok(Change::Done));
    assert_eq!(store.delete_item(&tenant, &id, "b", 200).await, Ok(Change::NoItem));
    assert_eq!(store.append_items(&tenant, &id, adding(&["e"])).await, Ok(Change::Done));
    assert_eq!(ids(store, &tenant, &id).await, ["a", "c", "d", "e"]);
    assert_eq!(store.append_items(&tenant, &id, adding(&["f", "c"])).await, Ok(Change::Taken));
    assert_eq!(store.append_items(&tenant, &id, adding(&["f", "f"])).await, Ok(Change::Taken));
    let few = Append { items_max: 4, ..adding(&["f"]) };
    assert_eq!(store.append_items(&tenant, &id, few).await, Err(StoreError::TooLong { what: "items", max: 4 }));
    let listed = store.items(&tenant, &id, &page(2, Order::Descending, Some("e")), BYTES).await;
    let listed = listed.expect("read").expect("there");
    assert_eq!((listed.items, listed.more), (vec![item("d"), item("c")], true));
    let short = store.items(&tenant, &id, &page(9, Order::Ascending, None), 1).await.expect("read").expect("there");
    assert_eq!((short.items.len(), short.more), (1, true));
    assert_eq!(store.item(&tenant, &id, "c").await, Ok(Some(item("c"))));
    assert_eq!(store.item(&tenant, &id, "b").await, Ok(None));
    assert!(matches!(store.all_items(&tenant, &id, 3, BYTES).await, Err(StoreError::TooLong { what: "items", .. })));
    assert!(matches!(store.all_items(&tenant, &id, 9, 10).await, Err(StoreError::TooLong { what: "bytes", .. })));
    let now = store.object(&tenant, &id).await.expect("read").expect("there");
    assert_eq!(now.expires, 2000, "what is used stays longer");
    assert_eq!(store.delete_object(&tenant, &id).await, Ok(true));
    assert_eq!(store.items(&tenant, &id, &page(2, Order::Descending, None), BYTES).await, Ok(None));
    assert_eq!(store.item(&tenant, &id, "a").await, Ok(None));
    assert_eq!(store.append_items(&tenant, &id, adding(&["g"])).await, Ok(Change::Absent));
}

/// While a conversation is held, only its holder changes it; the lock ends when it is given up, used or over.
async fn a_held_conversation_is_changed_by_its_holder(store: &dyn Store) {
    let tenant = Tenant::new("held");
    let object = conversation();
    let id = object.id.clone();
    store.save_object(&tenant, object, vec![item("a")], ROOM).await.expect("saved");
    let hold = |holder: &'static str, now, until| store.hold_conversation(&tenant, &id, holder, now, until);
    assert_eq!(hold("one", 200, 300).await, Ok(Change::Done));
    assert_eq!(hold("two", 250, 350).await, Ok(Change::Locked));
    assert_eq!(hold("one", 250, 350).await, Ok(Change::Done), "renewed");
    assert_eq!(store.append_items(&tenant, &id, adding(&["b"])).await, Ok(Change::Locked));
    assert_eq!(store.delete_item(&tenant, &id, "a", 200).await, Ok(Change::Locked));
    let own = Append { holder: Some("one".into()), ..adding(&["b"]) };
    assert_eq!(store.append_items(&tenant, &id, own).await, Ok(Change::Done));
    assert_eq!(hold("two", 260, 400).await, Ok(Change::Done), "it was given up with the items");
    store.release_conversation(&tenant, &id, "one").await.expect("nothing to give up");
    assert_eq!(hold("one", 300, 400).await, Ok(Change::Locked));
    assert_eq!(hold("one", 400, 500).await, Ok(Change::Done), "it was over");
    store.release_conversation(&tenant, &id, "one").await.expect("given up");
    assert_eq!(store.append_items(&tenant, &id, adding(&["c"])).await, Ok(Change::Done));
    assert_eq!(ids(store, &tenant, &id).await, ["a", "b", "c"]);
    let other = ObjectId::random(ObjectKind::Conversation);
    assert_eq!(store.hold_conversation(&tenant, &other, "one", 1, 2).await, Ok(Change::Absent));
    while store.sweep_responses(3000).await.expect("swept") > 0 {}
}

/// Objects make room as responses do; a conversation in use is the last.
async fn objects_make_room_and_expire(store: &dyn Store) {
    let tenant = Tenant::new("roomy objects");
    let (talk, large) = (conversation(), "x".repeat(10_000));
    store.save_object(&tenant, talk.clone(), vec![item("a")], ROOM).await.expect("saved");
    let made: Vec<_> = (0..3).map(|_| completion("m", "{}", &large)).collect();
    let one = made[0].bytes();
    let full = ResponseRoom { tenant_bytes_max: 3 * one, ..ROOM };
    for object in &made[..2] {
        store.save_object(&tenant, object.clone(), Vec::new(), full).await.expect("saved");
    }
    let grown = Append { room: full, items: vec![Item { id: "b".into(), json: large.clone().into() }], ..adding(&[]) };
    assert_eq!(store.append_items(&tenant, &talk.id, grown).await, Ok(Change::Done));
    assert_eq!(store.object(&tenant, &made[0].id).await, Ok(None), "the oldest made room");
    assert!(store.object(&tenant, &made[1].id).await.expect("read").is_some());
    store.save_object(&tenant, made[2].clone(), Vec::new(), full).await.expect("saved");
    assert_eq!(store.object(&tenant, &made[1].id).await, Ok(None), "older than the conversation's last item");
    assert_eq!(ids(store, &tenant, &talk.id).await, ["a", "b"]);
    let huge = Append { room: full, items: vec![Item { id: "c".into(), json: large.repeat(4).into() }], ..adding(&[]) };
    let refused = store.append_items(&tenant, &talk.id, huge).await;
    assert!(matches!(refused, Err(StoreError::Quota { .. })), "{refused:?}");
    assert_eq!(ids(store, &tenant, &talk.id).await, ["a", "b"]);
    let long = format!("{{\"a\":\"{}\"}}", large.repeat(4));
    let refused = store.label_object(&tenant, &made[2].id, &long, full).await;
    assert!(matches!(refused, Err(StoreError::Quota { .. })), "{refused:?}");
    assert_eq!(store.object(&tenant, &made[2].id).await, Ok(Some(made[2].clone())));
    while store.sweep_responses(2000).await.expect("swept") > 0 {}
    assert_eq!(store.object(&tenant, &talk.id).await, Ok(None));
}

/// Objects of another tenant are invisible in every operation.
async fn tenants_see_their_own(store: &dyn Store) {
    let (owner, other) = (Tenant::new("object owner"), Tenant::new("object other"));
    let (said, talk) = (completion("m", "{}", "x"), conversation());
    store.save_object(&owner, said.clone(), Vec::new(), ROOM).await.expect("saved");
    store.save_object(&owner, talk.clone(), vec![item("a")], ROOM).await.expect("saved");
    for stranger in [&other, &Tenant::new("")] {
        for id in [&said.id, &talk.id] {
            assert_eq!(store.object(stranger, id).await, Ok(None));
            assert_eq!(store.label_object(stranger, id, "{}", ROOM).await, Ok(false));
            assert_eq!(store.delete_object(stranger, id).await, Ok(false));
        }
        let first = page(9, Order::Descending, None);
        let filter = ObjectFilter::default();
        let listed = store.objects(stranger, ObjectKind::Completion, &filter, &first, BYTES).await.expect("listed");
        assert_eq!(listed.items, vec![]);
        assert_eq!(store.hold_conversation(stranger, &talk.id, "x", 1, 2).await, Ok(Change::Absent));
        assert_eq!(store.append_items(stranger, &talk.id, adding(&["b"])).await, Ok(Change::Absent));
        assert_eq!(store.delete_item(stranger, &talk.id, "a", 1).await, Ok(Change::Absent));
        assert_eq!(store.all_items(stranger, &talk.id, 9, BYTES).await, Ok(None));
        assert_eq!(store.items(stranger, &talk.id, &first, BYTES).await, Ok(None));
        assert_eq!(store.item(stranger, &talk.id, "a").await, Ok(None));
    }
    assert_eq!(ids(store, &owner, &talk.id).await, ["a"]);
    assert!(store.object(&owner, &said.id).await.expect("read").is_some());
    while store.sweep_responses(1000).await.expect("swept") > 0 {}
}
