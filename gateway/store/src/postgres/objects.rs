//! [`Objects`] in PostgreSQL: rows of the responses' table, with a table of items. Changes of one tenant's objects run
//! one after the other, under the tenant's lock.

use async_trait::async_trait;
use tokio_postgres::Row;

use super::Postgres;
use super::files::lock_tenant;
use super::held::{Held, Values, cell, int, number, odd};
use super::responses::{bytes, make_room, make_room_of_all};
use crate::sql::{direction, fitting, listing};
use crate::{
    Append, Change, Item, Listing, ObjectFilter, ObjectId, ObjectKind, ObjectRecord, Objects, Page, ResponseRoom,
    StoreError, Tenant,
};

const COLUMNS: &str = "id, created, expires, model, metadata, body, input";

fn record(row: &Row, kind: ObjectKind) -> Result<ObjectRecord, StoreError> {
    Ok(ObjectRecord {
        id: ObjectId::parse(kind, cell(row, 0)?).ok_or_else(odd)?,
        created: number(row, 1)?,
        expires: number(row, 2)?,
        model: cell(row, 3)?,
        metadata: cell(row, 4)?,
        body: bytes(row, 5)?,
        input: bytes(row, 6)?,
    })
}

fn item(row: &Row) -> Result<Item, StoreError> {
    Ok(Item { id: cell(row, 0)?, json: bytes(row, 1)? })
}

async fn insert_items(held: &mut Held, id: &ObjectId, from: i64, items: &[Item]) -> Result<(), StoreError> {
    let sql = "INSERT INTO penstock.conversation_items (conversation, at, id, bytes, item) VALUES ($1, $2, $3, $4, $5)";
    for (at, item) in (from..).zip(items) {
        held.execute(sql, &[&id.as_str(), &at, &item.id, &int(item.bytes()), &item.json.as_ref()]).await?;
    }
    Ok(())
}

/// Whether any of the items has an id that another of them or of the conversation has.
async fn is_taken(held: &mut Held, id: &ObjectId, items: &[Item]) -> Result<bool, StoreError> {
    let ids: Vec<&str> = items.iter().map(|item| item.id.as_str()).collect();
    if ids.iter().collect::<std::collections::HashSet<_>>().len() < ids.len() {
        return Ok(true);
    }
    let sql = "SELECT EXISTS (SELECT 1 FROM penstock.conversation_items WHERE conversation = $1 AND id = ANY($2))";
    held.is(sql, &[&id.as_str(), &ids]).await
}

/// Filtered list of a tenant's objects, to be followed by the order and the limit.
fn listed(beyond: &str) -> String {
    format!(
        "SELECT seq, bytes FROM penstock.responses WHERE tenant = $1 AND kind = $2 AND kind > 0
         AND ($3::text IS NULL OR seq {beyond} (SELECT seq FROM penstock.responses WHERE id = $3 AND tenant = $1))
         AND ($4::text IS NULL OR model = $4)
         AND NOT EXISTS (SELECT 1 FROM unnest($5::text[]) AS entry WHERE strpos(metadata, entry) = 0)"
    )
}

/// State of a conversation that decides about a change of its items.
struct Place {
    bytes: u64,
    holder: Option<String>,
}

/// Looks a conversation up; `Err`: the change is not made, for this reason.
async fn place(
    held: &mut Held,
    tenant: &Tenant,
    id: &ObjectId,
    holder: Option<&str>,
    now: u64,
) -> Result<Result<Place, Change>, StoreError> {
    let sql = "SELECT bytes, CASE WHEN held_until > $3 THEN holder END FROM penstock.responses
               WHERE id = $1 AND tenant = $2 AND kind = 2 FOR UPDATE";
    let Some(row) = held.one(sql, &[&id.as_str(), &tenant.as_str(), &int(now)]).await? else {
        return Ok(Err(Change::Absent));
    };
    let place = Place { bytes: number(&row, 0)?, holder: cell(&row, 1)? };
    let locked = place.holder.is_some() && place.holder.as_deref() != holder;
    Ok(if locked { Err(Change::Locked) } else { Ok(place) })
}

async fn hold(
    held: &mut Held,
    tenant: &Tenant,
    id: &ObjectId,
    holder: &str,
    (now, until): (u64, u64),
) -> Result<Change, StoreError> {
    if let Err(change) = place(held, tenant, id, Some(holder), now).await? {
        return Ok(change);
    }
    let sql = "UPDATE penstock.responses SET holder = $2, held_until = $3 WHERE id = $1";
    held.execute(sql, &[&id.as_str(), &holder, &int(until)]).await?;
    Ok(Change::Done)
}

async fn append(held: &mut Held, tenant: &Tenant, id: &ObjectId, new: &Append) -> Result<Change, StoreError> {
    let place = match place(held, tenant, id, new.holder.as_deref(), new.now).await? {
        Ok(place) => place,
        Err(change) => return Ok(change),
    };
    if is_taken(held, id, &new.items).await? {
        return Ok(Change::Taken);
    }
    let sql = "SELECT count(*), coalesce(max(at), -1) + 1 FROM penstock.conversation_items WHERE conversation = $1";
    let row = held.one(sql, &[&id.as_str()]).await?.ok_or_else(odd)?;
    let (used, next) = (number(&row, 0)? + new.items.len() as u64, cell(&row, 1)?);
    if used > new.items_max {
        return Err(StoreError::TooLong { what: "items", max: new.items_max });
    }
    let bytes = new.items.iter().map(Item::bytes).sum::<u64>();
    // The newest object is the last to make room.
    let sql = "UPDATE penstock.responses SET seq = DEFAULT, expires = $2, holder = NULL, held_until = 0 WHERE id = $1";
    held.execute(sql, &[&id.as_str(), &int(new.expires)]).await?;
    make_room(held, tenant.as_str(), 0, bytes, place.bytes, new.room).await?;
    let sql = "UPDATE penstock.responses SET bytes = bytes + $2 WHERE id = $1";
    if held.execute(sql, &[&id.as_str(), &int(bytes)]).await? == 0 {
        return Err(StoreError::Quota { used: place.bytes + bytes, max: new.room.bytes_max });
    }
    insert_items(held, id, next, &new.items).await?;
    Ok(Change::Done)
}

async fn remove(held: &mut Held, tenant: &Tenant, id: &ObjectId, item: &str, now: u64) -> Result<Change, StoreError> {
    if let Err(change) = place(held, tenant, id, None, now).await? {
        return Ok(change);
    }
    let sql = "DELETE FROM penstock.conversation_items WHERE conversation = $1 AND id = $2 RETURNING bytes";
    let gone = held.change(sql, &[&id.as_str(), &item]).await?;
    let Some(row) = gone.first() else { return Ok(Change::NoItem) };
    let sql = "UPDATE penstock.responses SET bytes = bytes - $2 WHERE id = $1";
    held.execute(sql, &[&id.as_str(), &int(number(row, 0)?)]).await?;
    Ok(Change::Done)
}

async fn is_there(held: &mut Held, tenant: &Tenant, id: &ObjectId) -> Result<bool, StoreError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM penstock.responses WHERE id = $1 AND tenant = $2 AND kind = 2)";
    held.is(sql, &[&id.as_str(), &tenant.as_str()]).await
}

impl Postgres {
    /// Runs a change of a tenant's objects in one transaction, under the tenant's lock; an error changes nothing.
    async fn changing<T>(
        &self,
        tenant: &Tenant,
        change: impl AsyncFnOnce(&mut Held) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut held = self.held().await?;
        held.begin().await?;
        lock_tenant(&mut held, tenant).await?;
        match change(&mut held).await {
            Ok(done) => held.commit().await.map(|()| done),
            Err(error) => held.undo(Err(error)).await,
        }
    }
}

#[async_trait]
impl Objects for Postgres {
    async fn save_object(
        &self,
        tenant: &Tenant,
        new: ObjectRecord,
        items: Vec<Item>,
        room: ResponseRoom,
    ) -> Result<(), StoreError> {
        let bytes = new.bytes() + items.iter().map(Item::bytes).sum::<u64>();
        make_room_of_all(&mut self.held().await?, bytes, room).await?;
        let save = async |held: &mut Held| {
            if is_taken(held, &new.id, &items).await? {
                return Err(StoreError::Misuse("two items of one id"));
            }
            make_room(held, tenant.as_str(), 1, bytes, 0, room).await?;
            let sql = "INSERT INTO penstock.responses (id, tenant, status, created, expires, body, input, output, request, \
                       bytes, kind, model, metadata) VALUES ($1, $2, 2, $3, $4, $5, $6, '', '', $7, $8, $9, $10)";
            let values: Values<'_> = &[
                &new.id.as_str(),
                &tenant.as_str(),
                &int(new.created),
                &int(new.expires),
                &new.body.as_ref(),
                &new.input.as_ref(),
                &int(bytes),
                &new.id.kind().number(),
                &new.model,
                &new.metadata,
            ];
            held.execute(sql, values).await?;
            insert_items(held, &new.id, 0, &items).await
        };
        self.changing(tenant, save).await
    }

    async fn object(&self, tenant: &Tenant, id: &ObjectId) -> Result<Option<ObjectRecord>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM penstock.responses WHERE id = $1 AND tenant = $2 AND kind = $3");
        let row = self.held().await?.one(&sql, &[&id.as_str(), &tenant.as_str(), &id.kind().number()]).await?;
        row.as_ref().map(|row| record(row, id.kind())).transpose()
    }

    async fn objects(
        &self,
        tenant: &Tenant,
        kind: ObjectKind,
        filter: &ObjectFilter,
        page: &Page,
        bytes_max: u64,
    ) -> Result<Listing<ObjectRecord>, StoreError> {
        let (order, beyond) = direction(page.order);
        let sql = format!("{} ORDER BY seq {order} LIMIT $6", listed(beyond));
        let limit = i64::from(page.limit) + 1;
        let values: Values<'_> =
            &[&tenant.as_str(), &kind.number(), &page.after, &filter.model, &filter.metadata, &limit];
        let mut held = self.held().await?;
        let rows = held.query(&sql, values).await?;
        let found = rows.iter().map(|row| Ok((cell(row, 0)?, number(row, 1)?)));
        let found: Vec<(i64, u64)> = found.collect::<Result<_, StoreError>>()?;
        let Listing { items, more } = fitting(listing(found, page.limit), bytes_max, |(_, bytes)| *bytes);
        let places: Vec<i64> = items.iter().map(|(seq, _)| *seq).collect();
        let sql = format!("SELECT {COLUMNS} FROM penstock.responses WHERE seq = ANY($1) ORDER BY seq {order}");
        let rows = held.query(&sql, &[&places]).await?;
        let items = rows.iter().map(|row| record(row, kind)).collect::<Result<_, _>>()?;
        Ok(Listing { items, more })
    }

    async fn label_object(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        metadata: &str,
        room: ResponseRoom,
    ) -> Result<bool, StoreError> {
        let after = metadata.len() as u64;
        make_room_of_all(&mut self.held().await?, after, room).await?;
        let label = async |held: &mut Held| {
            let sql = "SELECT bytes, octet_length(metadata)::bigint FROM penstock.responses \
                       WHERE id = $1 AND tenant = $2 AND kind = $3 FOR UPDATE";
            let key: Values<'_> = &[&id.as_str(), &tenant.as_str(), &id.kind().number()];
            let Some(row) = held.one(sql, key).await? else { return Ok(false) };
            let (bytes, before) = (number(&row, 0)?, number(&row, 1)?);
            if after > before {
                make_room(held, tenant.as_str(), 0, after - before, bytes, room).await?;
            }
            let sql = "UPDATE penstock.responses SET metadata = $2, bytes = bytes - $3 + $4 WHERE id = $1";
            // The object itself may have been the oldest, which made room.
            let changed = held.execute(sql, &[&id.as_str(), &metadata, &int(before), &int(after)]).await?;
            if changed == 0 {
                return Err(StoreError::Quota { used: bytes + after, max: room.tenant_bytes_max });
            }
            Ok(true)
        };
        self.changing(tenant, label).await
    }

    async fn delete_object(&self, tenant: &Tenant, id: &ObjectId) -> Result<bool, StoreError> {
        let sql = "DELETE FROM penstock.responses WHERE id = $1 AND tenant = $2 AND kind = $3";
        Ok(self.held().await?.execute(sql, &[&id.as_str(), &tenant.as_str(), &id.kind().number()]).await? > 0)
    }

    async fn hold_conversation(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        holder: &str,
        now: u64,
        until: u64,
    ) -> Result<Change, StoreError> {
        self.changing(tenant, async |held| hold(held, tenant, id, holder, (now, until)).await).await
    }

    async fn release_conversation(&self, tenant: &Tenant, id: &ObjectId, holder: &str) -> Result<(), StoreError> {
        let sql = "UPDATE penstock.responses SET holder = NULL, held_until = 0 \
                   WHERE id = $1 AND tenant = $2 AND holder = $3";
        self.held().await?.execute(sql, &[&id.as_str(), &tenant.as_str(), &holder]).await.map(drop)
    }

    async fn all_items(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        items_max: u64,
        bytes_max: u64,
    ) -> Result<Option<Vec<Item>>, StoreError> {
        let mut held = self.held().await?;
        if !is_there(&mut held, tenant, id).await? {
            return Ok(None);
        }
        let sql = "SELECT count(*), coalesce(sum(octet_length(item)), 0)::bigint FROM penstock.conversation_items \
                   WHERE conversation = $1";
        let row = held.one(sql, &[&id.as_str()]).await?.ok_or_else(odd)?;
        for (what, used, max) in [("items", number(&row, 0)?, items_max), ("bytes", number(&row, 1)?, bytes_max)] {
            if used > max {
                return Err(StoreError::TooLong { what, max });
            }
        }
        let sql = "SELECT id, item FROM penstock.conversation_items WHERE conversation = $1 ORDER BY at";
        let rows = held.query(sql, &[&id.as_str()]).await?;
        rows.iter().map(item).collect::<Result<_, _>>().map(Some)
    }

    async fn items(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        page: &Page,
        bytes_max: u64,
    ) -> Result<Option<Listing<Item>>, StoreError> {
        let mut held = self.held().await?;
        if !is_there(&mut held, tenant, id).await? {
            return Ok(None);
        }
        let (order, beyond) = direction(page.order);
        let sql = format!(
            "SELECT at, bytes FROM penstock.conversation_items i WHERE conversation = $1
             AND ($2::text IS NULL
                  OR at {beyond} (SELECT at FROM penstock.conversation_items WHERE conversation = $1 AND id = $2))
             ORDER BY at {order} LIMIT $3"
        );
        let rows = held.query(&sql, &[&id.as_str(), &page.after, &(i64::from(page.limit) + 1)]).await?;
        let found = rows.iter().map(|row| Ok((cell(row, 0)?, number(row, 1)?)));
        let found: Vec<(i64, u64)> = found.collect::<Result<_, StoreError>>()?;
        let Listing { items, more } = fitting(listing(found, page.limit), bytes_max, |(_, bytes)| *bytes);
        let places: Vec<i64> = items.iter().map(|(at, _)| *at).collect();
        let sql = format!(
            "SELECT id, item FROM penstock.conversation_items WHERE conversation = $1 AND at = ANY($2) ORDER BY at {order}"
        );
        let rows = held.query(&sql, &[&id.as_str(), &places]).await?;
        Ok(Some(Listing { items: rows.iter().map(item).collect::<Result<_, _>>()?, more }))
    }

    async fn item(&self, tenant: &Tenant, id: &ObjectId, wanted: &str) -> Result<Option<Item>, StoreError> {
        let mut held = self.held().await?;
        if !is_there(&mut held, tenant, id).await? {
            return Ok(None);
        }
        let sql = "SELECT id, item FROM penstock.conversation_items WHERE conversation = $1 AND id = $2";
        held.one(sql, &[&id.as_str(), &wanted]).await?.as_ref().map(item).transpose()
    }

    async fn append_items(&self, tenant: &Tenant, id: &ObjectId, new: Append) -> Result<Change, StoreError> {
        let bytes = new.items.iter().map(Item::bytes).sum();
        make_room_of_all(&mut self.held().await?, bytes, new.room).await?;
        self.changing(tenant, async |held| append(held, tenant, id, &new).await).await
    }

    async fn delete_item(&self, tenant: &Tenant, id: &ObjectId, item: &str, now: u64) -> Result<Change, StoreError> {
        self.changing(tenant, async |held| remove(held, tenant, id, item, now).await).await
    }
}
