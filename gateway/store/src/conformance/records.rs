//! Conformance of the audit log and the config history.

use super::kept::page;
use crate::{
    AUDIT_DETAIL_BYTES_MAX, AuditEvent, AuditFilter, AuditId, CONFIG_BYTES_MAX, NewConfig, Order, Store, StoreError,
};

pub(super) async fn all(store: &dyn Store) {
    the_audit_log_only_grows(store).await;
    configs_are_kept_newest_first(store).await;
}

fn event(action: &str, at: u64) -> AuditEvent {
    AuditEvent {
        id: AuditId::random(),
        at,
        actor: "admin".into(),
        address: "127.0.0.1".into(),
        action: action.into(),
        target: "key_a".into(),
        outcome: "done".into(),
        detail: "{\"before\":null}".into(),
    }
}

async fn the_audit_log_only_grows(store: &dyn Store) {
    let mut events =
        vec![event("key.create", 10), event("key.revoke", 20), event("keyring", 30), event("config.apply", 40)];
    events[3].actor = "file".into();
    events[3].outcome = "failed".into();
    for event in &events {
        store.note(event.clone()).await.expect("noted");
        store.note(event.clone()).await.expect("again, after a failure");
    }
    let found = |filter: AuditFilter| async move {
        let listing = store.audit(&filter, &page(100, Order::Ascending, None)).await.expect("listed");
        listing.items.into_iter().map(|event| event.action).collect::<Vec<_>>()
    };
    let all = AuditFilter::default;
    assert_eq!(found(all()).await, ["key.create", "key.revoke", "keyring", "config.apply"]);
    assert_eq!(found(AuditFilter { action: Some("key.*".into()), ..all() }).await, ["key.create", "key.revoke"]);
    assert_eq!(found(AuditFilter { action: Some("keyring".into()), ..all() }).await, ["keyring"]);
    assert_eq!(found(AuditFilter { action: Some("key%".into()), ..all() }).await, [""; 0]);
    assert_eq!(found(AuditFilter { actor: Some("file".into()), ..all() }).await, ["config.apply"]);
    assert_eq!(found(AuditFilter { outcome: Some("failed".into()), ..all() }).await, ["config.apply"]);
    assert_eq!(found(AuditFilter { from: Some(20), until: Some(30), ..all() }).await, ["key.revoke"]);
    assert_eq!(found(AuditFilter { target: Some("key_b".into()), ..all() }).await, [""; 0]);
    let last = store.audit(&all(), &page(1, Order::Descending, None)).await.expect("listed");
    assert_eq!((last.items.as_slice(), last.more), (&events[3..], true));
    let next = store.audit(&all(), &page(9, Order::Descending, Some(events[2].id.as_str()))).await.expect("listed");
    assert_eq!(next.items, [events[1].clone(), events[0].clone()]);
    let long = AuditEvent { detail: "x".repeat(AUDIT_DETAIL_BYTES_MAX + 1), ..event("long", 1) };
    assert!(matches!(store.note(long).await, Err(StoreError::Misuse(_))));
    while store.sweep_audit(30).await.expect("swept") > 0 {}
    assert_eq!(found(all()).await, ["keyring", "config.apply"]);
}

async fn configs_are_kept_newest_first(store: &dyn Store) {
    let new = |text: &str| NewConfig {
        text: text.into(),
        sha256: "ab".repeat(32),
        at: 100,
        actor: "admin".into(),
        note: "because".into(),
        outcome: "applied".into(),
    };
    let mut saved = Vec::new();
    for text in ["a = 1", "a = \"ä\"", "a = 3", "a = 4"] {
        saved.push(store.save_config(new(text), 3).await.expect("saved"));
    }
    assert!(saved.windows(2).all(|pair| pair[0].number < pair[1].number));
    assert_eq!((saved[1].bytes, saved[1].note.as_str()), (8, "because"));
    assert_eq!(store.config(saved[0].number).await, Ok(None), "the oldest went");
    assert_eq!(store.config(saved[1].number).await, Ok(Some((saved[1].clone(), "a = \"ä\"".into()))));
    let listed = store.configs(None, 2).await.expect("listed");
    assert_eq!((listed.items.as_slice(), listed.more), (&[saved[3].clone(), saved[2].clone()][..], true));
    let behind = store.configs(Some(saved[2].number), 2).await.expect("listed");
    assert_eq!((behind.items.as_slice(), behind.more), (&[saved[1].clone()][..], false));
    let long = store.save_config(new(&"x".repeat(CONFIG_BYTES_MAX + 1)), 3).await;
    assert!(matches!(long, Err(StoreError::Misuse(_))));
}
