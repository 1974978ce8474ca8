//! [`Objects`] in SQLite: rows of the responses' table, with a table of items.

use async_trait::async_trait;
use bytes::Bytes;
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};

use super::responses::make_room;
use super::{Sqlite, pages};
use crate::sql::{direction, fitting, listing};
use crate::{
    Append, Change, Item, Listing, ObjectFilter, ObjectId, ObjectKind, ObjectRecord, Objects, Page, ResponseRoom,
    StoreError, Tenant,
};

const COLUMNS: &str = "id, created, expires, model, metadata, body, input";

fn record(row: &Row<'_>, kind: ObjectKind) -> rusqlite::Result<ObjectRecord> {
    let bytes = |at: usize| row.get::<_, Vec<u8>>(at).map(Bytes::from);
    Ok(ObjectRecord {
        id: ObjectId::parse(kind, &row.get::<_, String>(0)?).ok_or(rusqlite::Error::InvalidQuery)?,
        created: row.get(1)?,
        expires: row.get(2)?,
        model: row.get(3)?,
        metadata: row.get(4)?,
        body: bytes(5)?,
        input: bytes(6)?,
    })
}

fn item(row: &Row<'_>) -> rusqlite::Result<Item> {
    Ok(Item { id: row.get(0)?, json: Bytes::from(row.get::<_, Vec<u8>>(1)?) })
}

fn insert_items(connection: &Connection, id: &ObjectId, from: i64, items: &[Item]) -> Result<(), StoreError> {
    let sql = "INSERT INTO conversation_items (conversation, at, id, bytes, item) VALUES (?1, ?2, ?3, ?4, ?5)";
    let mut statement = connection.prepare(sql)?;
    for (at, item) in (from..).zip(items) {
        statement.execute(params![id.as_str(), at, item.id, item.bytes(), item.json.as_ref()])?;
    }
    Ok(())
}

/// Returns true if an item id occurs twice in `items`, or already belongs to an item of the conversation `id`.
fn is_taken(connection: &Connection, id: &ObjectId, items: &[Item]) -> Result<bool, StoreError> {
    let mut seen = std::collections::HashSet::new();
    let sql = "SELECT EXISTS (SELECT 1 FROM conversation_items WHERE conversation = ?1 AND id = ?2)";
    let mut statement = connection.prepare(sql)?;
    for item in items {
        if !seen.insert(item.id.as_str()) || statement.query_row(params![id.as_str(), item.id], |row| row.get(0))? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn save(
    connection: &Connection,
    tenant: &Tenant,
    new: &ObjectRecord,
    items: &[Item],
    room: ResponseRoom,
) -> Result<(), StoreError> {
    if is_taken(connection, &new.id, items)? {
        return Err(StoreError::Misuse("two items of one id"));
    }
    let bytes = new.bytes() + items.iter().map(Item::bytes).sum::<u64>();
    make_room(connection, tenant.as_str(), 1, bytes, 0, room)?;
    pages::room_for(connection, bytes)?;
    connection
        .prepare(
            "INSERT INTO responses (id, tenant, status, created, expires, body, input, output, request, bytes, kind, model, \
             metadata) VALUES (?1, ?2, 2, ?3, ?4, ?5, ?6, x'', x'', ?7, ?8, ?9, ?10)",
        )?
        .execute(params![
            new.id.as_str(),
            tenant.as_str(),
            new.created,
            new.expires,
            new.body.as_ref(),
            new.input.as_ref(),
            bytes,
            new.id.kind().number(),
            new.model,
            new.metadata
        ])?;
    insert_items(connection, &new.id, 0, items)
}

fn find(connection: &Connection, tenant: &Tenant, id: &ObjectId) -> Result<Option<ObjectRecord>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM responses WHERE id = ?1 AND tenant = ?2 AND kind = ?3");
    let mut statement = connection.prepare(&sql)?;
    let values = params![id.as_str(), tenant.as_str(), id.kind().number()];
    Ok(statement.query_row(values, |row| record(row, id.kind())).optional()?)
}

fn list(
    connection: &Connection,
    tenant: &Tenant,
    kind: ObjectKind,
    filter: &ObjectFilter,
    page: &Page,
    bytes_max: u64,
) -> Result<Listing<ObjectRecord>, StoreError> {
    let (order, beyond) = direction(page.order);
    let mut sql = format!(
        "SELECT seq, bytes FROM responses INDEXED BY responses_listed WHERE tenant = ?1 AND kind = ?2 AND kind > 0
         AND (?3 IS NULL OR seq {beyond} (SELECT seq FROM responses WHERE id = ?3 AND tenant = ?1))
         AND (?4 IS NULL OR model = ?4)"
    );
    let mut values: Vec<Value> = vec![
        tenant.as_str().to_owned().into(),
        kind.number().into(),
        page.after.clone().map_or(Value::Null, Into::into),
        filter.model.clone().map_or(Value::Null, Into::into),
    ];
    for entry in &filter.metadata {
        values.push(entry.clone().into());
        // Metadata is compact JSON of strings: outside of a string's value, where quotes are escaped, the text of an
        // entry occurs only as that entry.
        sql.push_str(&format!(" AND instr(metadata, ?{}) > 0", values.len()));
    }
    values.push((i64::from(page.limit) + 1).into());
    sql.push_str(&format!(" ORDER BY seq {order} LIMIT ?{}", values.len()));
    let mut statement = connection.prepare(&sql)?;
    let rows = statement.query_map(params_from_iter(values), |row| Ok((row.get(0)?, row.get(1)?)))?;
    let found: Vec<(i64, u64)> = rows.collect::<Result<_, _>>()?;
    let Listing { items, more } = fitting(listing(found, page.limit), bytes_max, |(_, bytes)| *bytes);
    let mut statement = connection.prepare(&format!("SELECT {COLUMNS} FROM responses WHERE seq = ?1"))?;
    let read = |(seq, _): &(i64, u64)| statement.query_row([seq], |row| record(row, kind));
    Ok(Listing { items: items.iter().map(read).collect::<Result<_, _>>()?, more })
}

fn label(
    connection: &Connection,
    tenant: &Tenant,
    id: &ObjectId,
    metadata: &str,
    room: ResponseRoom,
) -> Result<bool, StoreError> {
    let sql = "SELECT bytes, length(CAST(metadata AS BLOB)) FROM responses WHERE id = ?1 AND tenant = ?2 AND kind = ?3";
    let key = params![id.as_str(), tenant.as_str(), id.kind().number()];
    let found: Option<(u64, u64)> =
        connection.prepare(sql)?.query_row(key, |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    let Some((bytes, before)) = found else { return Ok(false) };
    let after = metadata.len() as u64;
    if after > before {
        make_room(connection, tenant.as_str(), 0, after - before, bytes, room)?;
        pages::room_for(connection, after - before)?;
    }
    let sql = "UPDATE responses SET metadata = ?2, bytes = bytes - ?3 + ?4 WHERE id = ?1";
    let changed = connection.prepare(sql)?.execute(params![id.as_str(), metadata, before, after])?;
    // The object itself was the oldest of the tenant that keeps most.
    if changed == 0 { Err(StoreError::Quota { used: bytes + after, max: room.bytes_max }) } else { Ok(true) }
}

/// State of a conversation that decides about a change of its items.
struct Place {
    bytes: u64,
    holder: Option<String>,
}

/// Looks a conversation up; `Err`: the change is not made, for this reason.
fn place(
    connection: &Connection,
    tenant: &Tenant,
    id: &ObjectId,
    holder: Option<&str>,
    now: u64,
) -> Result<Result<Place, Change>, StoreError> {
    let sql = "SELECT bytes, CASE WHEN held_until > ?3 THEN holder END FROM responses
               WHERE id = ?1 AND tenant = ?2 AND kind = 2";
    let row = |row: &Row<'_>| Ok(Place { bytes: row.get(0)?, holder: row.get(1)? });
    let found = connection.prepare(sql)?.query_row(params![id.as_str(), tenant.as_str(), now], row).optional()?;
    Ok(match found {
        None => Err(Change::Absent),
        Some(place) if place.holder.is_some() && place.holder.as_deref() != holder => Err(Change::Locked),
        Some(place) => Ok(place),
    })
}

fn hold(
    connection: &Connection,
    tenant: &Tenant,
    id: &ObjectId,
    holder: &str,
    (now, until): (u64, u64),
) -> Result<Change, StoreError> {
    if let Err(change) = place(connection, tenant, id, Some(holder), now)? {
        return Ok(change);
    }
    let sql = "UPDATE responses SET holder = ?2, held_until = ?3 WHERE id = ?1";
    connection.prepare(sql)?.execute(params![id.as_str(), holder, until])?;
    Ok(Change::Done)
}

fn append(connection: &Connection, tenant: &Tenant, id: &ObjectId, new: &Append) -> Result<Change, StoreError> {
    let place = match place(connection, tenant, id, new.holder.as_deref(), new.now)? {
        Ok(place) => place,
        Err(change) => return Ok(change),
    };
    if is_taken(connection, id, &new.items)? {
        return Ok(Change::Taken);
    }
    let sql = "SELECT count(*), coalesce(max(at), -1) + 1 FROM conversation_items WHERE conversation = ?1";
    let (count, next): (u64, i64) =
        connection.prepare(sql)?.query_row([id.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let used = count + new.items.len() as u64;
    if used > new.items_max {
        return Err(StoreError::TooLong { what: "items", max: new.items_max });
    }
    let bytes = new.items.iter().map(Item::bytes).sum::<u64>();
    // The newest object is the last to make room.
    let sql = "UPDATE responses SET seq = (SELECT max(seq) + 1 FROM responses), expires = ?2,
               holder = NULL, held_until = 0 WHERE id = ?1";
    connection.prepare(sql)?.execute(params![id.as_str(), new.expires])?;
    make_room(connection, tenant.as_str(), 0, bytes, place.bytes, new.room)?;
    pages::room_for(connection, bytes)?;
    let sql = "UPDATE responses SET bytes = bytes + ?2 WHERE id = ?1";
    if connection.prepare(sql)?.execute(params![id.as_str(), bytes])? == 0 {
        return Err(StoreError::Quota { used: place.bytes + bytes, max: new.room.bytes_max });
    }
    insert_items(connection, id, next, &new.items)?;
    Ok(Change::Done)
}

fn remove(connection: &Connection, tenant: &Tenant, id: &ObjectId, item: &str, now: u64) -> Result<Change, StoreError> {
    if let Err(change) = place(connection, tenant, id, None, now)? {
        return Ok(change);
    }
    let sql = "DELETE FROM conversation_items WHERE conversation = ?1 AND id = ?2 RETURNING bytes";
    let freed: Option<u64> =
        connection.prepare(sql)?.query_row(params![id.as_str(), item], |row| row.get(0)).optional()?;
    let Some(freed) = freed else { return Ok(Change::NoItem) };
    let sql = "UPDATE responses SET bytes = bytes - ?2 WHERE id = ?1";
    connection.prepare(sql)?.execute(params![id.as_str(), freed])?;
    Ok(Change::Done)
}

fn is_there(connection: &Connection, tenant: &Tenant, id: &ObjectId) -> Result<bool, StoreError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM responses WHERE id = ?1 AND tenant = ?2 AND kind = 2)";
    Ok(connection.prepare(sql)?.query_row([id.as_str(), tenant.as_str()], |row| row.get(0))?)
}

fn all(
    connection: &Connection,
    tenant: &Tenant,
    id: &ObjectId,
    items_max: u64,
    bytes_max: u64,
) -> Result<Option<Vec<Item>>, StoreError> {
    if !is_there(connection, tenant, id)? {
        return Ok(None);
    }
    let sql = "SELECT count(*), coalesce(sum(length(item)), 0) FROM conversation_items WHERE conversation = ?1";
    let (count, bytes): (u64, u64) =
        connection.prepare(sql)?.query_row([id.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?;
    for (what, used, max) in [("items", count, items_max), ("bytes", bytes, bytes_max)] {
        if used > max {
            return Err(StoreError::TooLong { what, max });
        }
    }
    let mut statement =
        connection.prepare("SELECT id, item FROM conversation_items WHERE conversation = ?1 ORDER BY at")?;
    let rows = statement.query_map([id.as_str()], item)?;
    Ok(Some(rows.collect::<Result<_, _>>()?))
}

fn some(
    connection: &Connection,
    tenant: &Tenant,
    id: &ObjectId,
    page: &Page,
    bytes_max: u64,
) -> Result<Option<Listing<Item>>, StoreError> {
    if !is_there(connection, tenant, id)? {
        return Ok(None);
    }
    let (order, beyond) = direction(page.order);
    let sql = format!(
        "SELECT at, bytes FROM conversation_items WHERE conversation = ?1
         AND (?2 IS NULL OR at {beyond} (SELECT at FROM conversation_items WHERE conversation = ?1 AND id = ?2))
         ORDER BY at {order} LIMIT ?3"
    );
    let mut statement = connection.prepare(&sql)?;
    let rows =
        statement.query_map(params![id.as_str(), page.after, page.limit + 1], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let found: Vec<(i64, u64)> = rows.collect::<Result<_, _>>()?;
    let Listing { items, more } = fitting(listing(found, page.limit), bytes_max, |(_, bytes)| *bytes);
    let mut statement =
        connection.prepare("SELECT id, item FROM conversation_items WHERE conversation = ?1 AND at = ?2")?;
    let read = |(at, _): &(i64, u64)| statement.query_row(params![id.as_str(), at], item);
    Ok(Some(Listing { items: items.iter().map(read).collect::<Result<_, _>>()?, more }))
}

#[async_trait]
impl Objects for Sqlite {
    async fn save_object(
        &self,
        tenant: &Tenant,
        object: ObjectRecord,
        items: Vec<Item>,
        room: ResponseRoom,
    ) -> Result<(), StoreError> {
        let tenant = tenant.clone();
        self.writer.run(move |connection| save(connection, &tenant, &object, &items, room)).await
    }

    async fn object(&self, tenant: &Tenant, id: &ObjectId) -> Result<Option<ObjectRecord>, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.reader.run(move |connection| find(connection, &tenant, &id)).await
    }

    async fn objects(
        &self,
        tenant: &Tenant,
        kind: ObjectKind,
        filter: &ObjectFilter,
        page: &Page,
        bytes_max: u64,
    ) -> Result<Listing<ObjectRecord>, StoreError> {
        let (tenant, filter, page) = (tenant.clone(), filter.clone(), page.clone());
        self.reader.run(move |connection| list(connection, &tenant, kind, &filter, &page, bytes_max)).await
    }

    async fn label_object(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        metadata: &str,
        room: ResponseRoom,
    ) -> Result<bool, StoreError> {
        let (tenant, id, metadata) = (tenant.clone(), id.clone(), metadata.to_owned());
        self.writer.run(move |connection| label(connection, &tenant, &id, &metadata, room)).await
    }

    async fn delete_object(&self, tenant: &Tenant, id: &ObjectId) -> Result<bool, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        let sql = "DELETE FROM responses WHERE id = ?1 AND tenant = ?2 AND kind = ?3";
        let remove = move |connection: &Connection| {
            Ok(connection.execute(sql, params![id.as_str(), tenant.as_str(), id.kind().number()])? > 0)
        };
        self.writer.run(remove).await
    }

    async fn hold_conversation(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        holder: &str,
        now: u64,
        until: u64,
    ) -> Result<Change, StoreError> {
        let (tenant, id, holder) = (tenant.clone(), id.clone(), holder.to_owned());
        self.writer.run(move |connection| hold(connection, &tenant, &id, &holder, (now, until))).await
    }

    async fn release_conversation(&self, tenant: &Tenant, id: &ObjectId, holder: &str) -> Result<(), StoreError> {
        let values = [id.as_str().to_owned(), tenant.as_str().to_owned(), holder.to_owned()];
        let sql = "UPDATE responses SET holder = NULL, held_until = 0 WHERE id = ?1 AND tenant = ?2 AND holder = ?3";
        self.writer.run(move |connection| Ok(connection.execute(sql, values).map(drop)?)).await
    }

    async fn all_items(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        items_max: u64,
        bytes_max: u64,
    ) -> Result<Option<Vec<Item>>, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.reader.run(move |connection| all(connection, &tenant, &id, items_max, bytes_max)).await
    }

    async fn items(
        &self,
        tenant: &Tenant,
        id: &ObjectId,
        page: &Page,
        bytes_max: u64,
    ) -> Result<Option<Listing<Item>>, StoreError> {
        let (tenant, id, page) = (tenant.clone(), id.clone(), page.clone());
        self.reader.run(move |connection| some(connection, &tenant, &id, &page, bytes_max)).await
    }

    async fn item(&self, tenant: &Tenant, id: &ObjectId, wanted: &str) -> Result<Option<Item>, StoreError> {
        let (tenant, id, wanted) = (tenant.clone(), id.clone(), wanted.to_owned());
        let find = move |connection: &Connection| {
            if !is_there(connection, &tenant, &id)? {
                return Ok(None);
            }
            let sql = "SELECT id, item FROM conversation_items WHERE conversation = ?1 AND id = ?2";
            Ok(connection.prepare(sql)?.query_row([id.as_str(), &wanted], item).optional()?)
        };
        self.reader.run(find).await
    }

    async fn append_items(&self, tenant: &Tenant, id: &ObjectId, new: Append) -> Result<Change, StoreError> {
        let (tenant, id) = (tenant.clone(), id.clone());
        self.writer.run(move |connection| append(connection, &tenant, &id, &new)).await
    }

    async fn delete_item(&self, tenant: &Tenant, id: &ObjectId, item: &str, now: u64) -> Result<Change, StoreError> {
        let (tenant, id, item) = (tenant.clone(), id.clone(), item.to_owned());
        self.writer.run(move |connection| remove(connection, &tenant, &id, &item, now)).await
    }
}
