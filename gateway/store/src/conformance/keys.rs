//! Conformance of the key directory. All checks are one function, since all tests share one sequence of versions.

use std::time::{Duration, Instant};

use penstock_govern::Scope;

use super::kept::page;
use crate::{
    KeyChange, KeyDigest, KeyFilter, KeyId, KeyRecord, Order, OwnerChange, OwnerKind, OwnerRecord, PreviousDigest,
    Rotation, Store,
};

pub(super) async fn all(store: &dyn Store) {
    keys_are_found_until_they_are_revoked(store).await;
    keys_are_listed_by_owner(store).await;
    teams_and_users_come_and_go(store).await;
    whoever_follows_misses_nothing(store).await;
    whoever_waits_is_woken(store).await;
}

fn key(team: &str, byte: u8) -> KeyRecord {
    let mut digest = [byte; 32];
    // Distinct from the digests of every other test.
    digest[..team.len().min(24)].copy_from_slice(&team.as_bytes()[..team.len().min(24)]);
    KeyRecord {
        id: KeyId::random(),
        name: format!("{team} {byte}"),
        digest: KeyDigest(digest),
        previous: None,
        hint: "abcd".into(),
        team: Some(team.into()),
        user: None,
        parent: None,
        scope: Scope {
            models: vec!["chat-*".into()],
            addresses: vec!["10.0.0.0/8".parse().expect("a network")],
            ..Scope::default()
        },
        limits: vec!["standard".into()],
        tags: vec!["cost:a".into(), "ä\"'".into()],
        created: 100,
        rotated: None,
        expires: Some(10_000),
        revoked: None,
        version: 0,
    }
}

/// A key is read back completely, by its id and by each of its digests.
async fn keys_are_found_until_they_are_revoked(store: &dyn Store) {
    let new = key("found", 1);
    let made = store.create_key(new.clone()).await.expect("created").expect("new");
    assert_eq!(made, KeyRecord { version: made.version, ..new.clone() });
    assert!(made.version > 0 && made.version <= store.directory_version().await.expect("a version"));
    assert_eq!(store.create_key(new.clone()).await, Ok(None), "the id is taken");
    assert_eq!(
        store.create_key(KeyRecord { id: KeyId::random(), ..new.clone() }).await,
        Ok(None),
        "the digest is taken"
    );
    assert_eq!(store.key(&made.id).await, Ok(Some(made.clone())));
    assert_eq!(store.key_by_digest(&made.digest).await, Ok(Some(made.clone())));
    assert_eq!(store.key(&KeyId::random()).await, Ok(None));
    assert_eq!(store.key_by_digest(&KeyDigest([255; 32])).await, Ok(None));

    let change =
        KeyChange { name: Some("other".into()), team: Some(None), expires: Some(None), ..KeyChange::default() };
    let changed = store.update_key(&made.id, change.clone()).await.expect("changed").expect("there");
    let want = KeyRecord { name: "other".into(), team: None, expires: None, version: changed.version, ..made.clone() };
    assert_eq!(changed, want);
    assert!(changed.version > made.version);
    assert_eq!(store.update_key(&KeyId::random(), change).await, Ok(None));

    let fresh = KeyDigest(key("found", 2).digest.0);
    let rotation = Rotation { digest: fresh, hint: "wxyz".into(), previous_until: 300, now: 200 };
    let rotated = store.rotate_key(&made.id, rotation.clone()).await.expect("rotated").expect("there");
    let previous = Some(PreviousDigest { digest: made.digest, until: 300 });
    let want = KeyRecord {
        digest: fresh,
        hint: "wxyz".into(),
        previous,
        rotated: Some(200),
        version: rotated.version,
        ..changed
    };
    assert_eq!(rotated, want);
    for digest in [fresh, made.digest] {
        assert_eq!(store.key_by_digest(&digest).await, Ok(Some(rotated.clone())), "both are good for a while");
    }
    assert_eq!(store.rotate_key(&made.id, rotation.clone()).await, Ok(None), "the digest is taken");
    let taken = KeyRecord { id: KeyId::random(), ..new };
    assert_eq!(store.create_key(taken).await, Ok(None), "the digest before the rotation is taken too");

    let revoked = store.revoke_key(&made.id, 400).await.expect("revoked").expect("there");
    assert_eq!(revoked.revoked, Some(400));
    assert!(revoked.version > rotated.version);
    assert_eq!(store.revoke_key(&made.id, 500).await, Ok(Some(revoked.clone())), "once, at its time");
    let late = Rotation { digest: KeyDigest([9; 32]), ..rotation };
    assert_eq!(store.rotate_key(&made.id, late).await, Ok(None), "what is revoked stays so");
    assert_eq!(store.revoke_key(&KeyId::random(), 1).await, Ok(None));
    assert_eq!(store.key(&made.id).await, Ok(Some(revoked)));
}

async fn keys_are_listed_by_owner(store: &dyn Store) {
    let mut made = Vec::new();
    for byte in 0..5 {
        let new = KeyRecord {
            user: (byte % 2 == 0).then(|| "listed-user".into()),
            parent: made.first().map(|first: &KeyRecord| first.id.clone()),
            ..key("listed", byte)
        };
        made.push(store.create_key(new).await.expect("created").expect("new"));
    }
    let team = KeyFilter { team: Some("listed".into()), ..KeyFilter::default() };
    let (mut have, mut after) = (Vec::new(), None);
    loop {
        let listing = store.keys(&team, &page(2, Order::Ascending, after.as_deref())).await.expect("listed");
        have.extend(listing.items);
        after = have.last().map(|key: &KeyRecord| key.id.as_str().to_owned());
        if !listing.more {
            break;
        }
    }
    assert_eq!(have, made);
    made[1] = store.revoke_key(&made[1].id, 7).await.expect("revoked").expect("there");
    let ids = |filter: KeyFilter| async move {
        let listing = store.keys(&filter, &page(100, Order::Descending, None)).await.expect("listed");
        listing.items.into_iter().map(|key| key.id).collect::<Vec<_>>()
    };
    let id = |at: usize| made[at].id.clone();
    let user = KeyFilter { user: Some("listed-user".into()), ..KeyFilter::default() };
    assert_eq!(ids(user).await, [id(4), id(2), id(0)]);
    assert_eq!(ids(KeyFilter { revoked: Some(true), ..team.clone() }).await, [id(1)]);
    assert_eq!(ids(KeyFilter { revoked: Some(false), ..team.clone() }).await, [id(4), id(3), id(2), id(0)]);
    assert_eq!(ids(KeyFilter { parent: Some(id(0)), ..team }).await.len(), 4);
    assert_eq!(ids(KeyFilter { team: Some("nobody".into()), ..KeyFilter::default() }).await, []);
}

fn owner(kind: OwnerKind, id: &str) -> OwnerRecord {
    OwnerRecord {
        kind,
        id: id.into(),
        name: "A".into(),
        team: None,
        scope: Scope { expires: Some(9), ..Scope::default() },
        limits: vec!["l".into()],
        budgets: vec!["b".into(), "c".into()],
        tags: vec![],
        blocked: false,
        created: 100,
        removed: None,
        version: 0,
    }
}

async fn teams_and_users_come_and_go(store: &dyn Store) {
    let (team, user) = (OwnerKind::Team, OwnerKind::User);
    let new = owner(team, "come");
    let made = store.create_owner(new.clone()).await.expect("created").expect("new");
    assert_eq!(made, OwnerRecord { version: made.version, ..new.clone() });
    assert_eq!(store.create_owner(new.clone()).await, Ok(None), "there is one");
    assert_eq!(store.owner(user, "come").await, Ok(None), "users are others");
    assert_eq!(store.owner(team, "come").await, Ok(Some(made.clone())));
    let change = OwnerChange { blocked: Some(true), budgets: Some(vec![]), ..OwnerChange::default() };
    let changed = store.update_owner(team, "come", change.clone()).await.expect("changed").expect("there");
    let want = OwnerRecord { blocked: true, budgets: vec![], version: changed.version, ..made.clone() };
    assert_eq!(changed, want);
    assert!(changed.version > made.version);
    assert_eq!(store.update_owner(team, "nobody", change).await, Ok(None));
    for id in ["come-b", "come-a", "come-c"] {
        let new = OwnerRecord { team: (id != "come-c").then(|| "come".into()), ..owner(user, id) };
        store.create_owner(new).await.expect("created").expect("new");
    }
    let first = store.owners(user, Some("come"), &page(1, Order::Ascending, None)).await.expect("listed");
    assert_eq!((first.items[0].id.as_str(), first.more), ("come-a", true));
    let rest = store.owners(user, Some("come"), &page(9, Order::Ascending, Some("come-a"))).await.expect("listed");
    assert_eq!((rest.items.len(), rest.items[0].id.as_str(), rest.more), (1, "come-b", false));
    assert_eq!(store.remove_owner(user, "come-a", 200).await, Ok(true));
    assert_eq!(store.remove_owner(user, "come-a", 201).await, Ok(false));
    assert_eq!(store.owner(user, "come-a").await, Ok(None));
    let left = store.owners(user, Some("come"), &page(9, Order::Descending, None)).await.expect("listed");
    assert_eq!(left.items.iter().map(|user| user.id.as_str()).collect::<Vec<_>>(), ["come-b"]);
    let again = store.create_owner(owner(user, "come-a")).await.expect("created").expect("made anew");
    assert_eq!(again.removed, None);
}

/// A reader of changes from a version on ends with the complete directory, in pages however small.
async fn whoever_follows_misses_nothing(store: &dyn Store) {
    let before = store.directory_version().await.expect("a version");
    let mut keys = Vec::new();
    for byte in 0..4 {
        keys.push(store.create_key(key("follows", byte)).await.expect("created").expect("new").id);
        store.create_owner(owner(OwnerKind::Team, &format!("follows-{byte}"))).await.expect("created").expect("new");
    }
    store.revoke_key(&keys[0], 5).await.expect("revoked").expect("there");
    store.remove_owner(OwnerKind::Team, "follows-3", 6).await.expect("removed");
    for limit in [1, 2, 3, 100] {
        let (mut seen, mut have, mut owners) = (before, Vec::new(), Vec::new());
        loop {
            let changes = store.directory_since(seen, limit).await.expect("read");
            assert!(changes.keys.len() <= limit as usize && changes.owners.len() <= limit as usize);
            assert!(changes.version > seen || !changes.more, "it goes forward");
            have.extend(changes.keys);
            owners.extend(changes.owners);
            seen = changes.version;
            assert_eq!(changes.mark, store.directory_mark(seen).await.expect("read"));
            if !changes.more {
                break;
            }
        }
        assert_eq!(seen, store.directory_version().await.expect("a version"));
        let mark = store.directory_mark(seen).await.expect("read");
        assert!(mark.is_some() && mark != store.directory_mark(before).await.expect("read"), "each version has a mark");
        let ids: Vec<_> = have.iter().map(|key| key.id.clone()).collect();
        assert_eq!(ids, [&keys[1..], &keys[..1]].concat(), "each once, in the order of its last change");
        assert_eq!(have[3].revoked, Some(5));
        assert_eq!(owners.len(), 4);
        assert_eq!(owners[3].removed, Some(6), "what is removed is told");
    }
    let none = store.directory_since(store.directory_version().await.expect("a version"), 10).await.expect("read");
    assert!(none.keys.is_empty() && none.owners.is_empty() && !none.more);
}

async fn whoever_waits_is_woken(store: &dyn Store) {
    let seen = store.directory_version().await.expect("a version");
    assert_eq!(store.directory_changed(seen, Duration::ZERO).await, Ok(seen), "its time is over at once");
    let began = Instant::now();
    let (version, made) = tokio::join!(store.directory_changed(seen, Duration::from_secs(20)), async {
        store.create_key(key("waits", 1)).await.expect("created").expect("new")
    });
    assert_eq!(version, Ok(made.version));
    assert!(began.elapsed() < Duration::from_secs(5), "woken, not timed out");
}
