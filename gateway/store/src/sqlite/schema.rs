//! Schema in versions that only add: a gateway of the previous version keeps working while this one starts.

use rusqlite::Connection;

use crate::StoreError;

/// Statements that lead from the version of their index to the next. Never changed once released; new ones are
/// appended.
const VERSIONS: [&str; 10] = [KEPT, GOVERNED, LIVES, PEOPLE, BOUNDED, OBJECTS, SECRETS, RESULTS, SWEPT, MARKED];

/// Tables of files, batches and responses.
const KEPT: &str = "
    CREATE TABLE files (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        purpose TEXT NOT NULL,
        name TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created INTEGER NOT NULL,
        expires INTEGER,
        sealed INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX files_of_tenant ON files (tenant, seq);
    CREATE INDEX files_expiry ON files (expires) WHERE expires IS NOT NULL;
    CREATE TABLE file_chunks (
        file INTEGER NOT NULL,
        at INTEGER NOT NULL,
        data BLOB NOT NULL
    );
    CREATE UNIQUE INDEX file_chunks_place ON file_chunks (file, at);
    CREATE TABLE batches (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        status TEXT NOT NULL,
        is_open INTEGER NOT NULL DEFAULT 1,
        endpoint TEXT NOT NULL,
        input TEXT NOT NULL,
        output TEXT,
        errors TEXT,
        completion_window TEXT NOT NULL,
        metadata TEXT NOT NULL,
        faults TEXT NOT NULL DEFAULT '',
        output_expires_after INTEGER,
        created INTEGER NOT NULL,
        expires INTEGER NOT NULL,
        in_progress INTEGER,
        finalizing INTEGER,
        cancelling INTEGER,
        ended INTEGER,
        total INTEGER NOT NULL DEFAULT 0,
        completed INTEGER NOT NULL DEFAULT 0,
        failed INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX batches_of_tenant ON batches (tenant, seq);
    CREATE INDEX batches_open ON batches (seq) WHERE is_open = 1;
    CREATE TABLE batch_lines (
        batch INTEGER NOT NULL,
        line INTEGER NOT NULL,
        custom_id TEXT NOT NULL,
        at INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        ok INTEGER,
        result BLOB,
        PRIMARY KEY (batch, line)
    );
    CREATE INDEX batch_lines_waiting ON batch_lines (batch, line) WHERE ok IS NULL;
    CREATE TABLE responses (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        status INTEGER NOT NULL,
        previous TEXT,
        created INTEGER NOT NULL,
        expires INTEGER NOT NULL,
        body BLOB NOT NULL,
        input BLOB NOT NULL,
        output BLOB NOT NULL,
        request BLOB NOT NULL
    );
    CREATE INDEX responses_of_tenant ON responses (tenant);
    CREATE INDEX responses_expiry ON responses (expires);
    CREATE INDEX responses_open ON responses (seq) WHERE status < 2;
";

/// Tables of keys and owners, the ledger, the audit log and configs.
const GOVERNED: &str = "
    CREATE TABLE directory (version INTEGER NOT NULL);
    INSERT INTO directory VALUES (0);
    CREATE TABLE issued_keys (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        previous_digest BLOB,
        previous_until INTEGER,
        hint TEXT NOT NULL,
        team TEXT,
        user TEXT,
        parent TEXT,
        scope TEXT NOT NULL,
        limits TEXT NOT NULL,
        tags TEXT NOT NULL,
        created INTEGER NOT NULL,
        rotated INTEGER,
        expires INTEGER,
        revoked INTEGER,
        version INTEGER NOT NULL
    );
    CREATE INDEX issued_keys_previous ON issued_keys (previous_digest) WHERE previous_digest IS NOT NULL;
    CREATE INDEX issued_keys_of_team ON issued_keys (team, seq);
    CREATE INDEX issued_keys_of_user ON issued_keys (user, seq);
    CREATE INDEX issued_keys_changed ON issued_keys (version);
    CREATE TABLE owners (
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        name TEXT NOT NULL,
        team TEXT,
        scope TEXT NOT NULL,
        limits TEXT NOT NULL,
        budgets TEXT NOT NULL,
        tags TEXT NOT NULL,
        blocked INTEGER NOT NULL,
        created INTEGER NOT NULL,
        removed INTEGER,
        version INTEGER NOT NULL,
        PRIMARY KEY (kind, id)
    );
    CREATE INDEX owners_changed ON owners (version);
    CREATE TABLE ledger (
        at INTEGER NOT NULL,
        request TEXT NOT NULL,
        gateway TEXT NOT NULL,
        key_id TEXT NOT NULL,
        team_id TEXT NOT NULL,
        user_id TEXT NOT NULL,
        model TEXT NOT NULL,
        provider TEXT NOT NULL,
        route TEXT NOT NULL,
        tags TEXT NOT NULL,
        held_input INTEGER NOT NULL,
        held_output INTEGER NOT NULL,
        held_usd INTEGER NOT NULL,
        state INTEGER NOT NULL,
        input INTEGER NOT NULL DEFAULT 0,
        input_cached INTEGER NOT NULL DEFAULT 0,
        input_written INTEGER NOT NULL DEFAULT 0,
        output INTEGER NOT NULL DEFAULT 0,
        reasoning INTEGER NOT NULL DEFAULT 0,
        micro_usd INTEGER NOT NULL DEFAULT 0,
        status INTEGER NOT NULL DEFAULT 0,
        outcome TEXT NOT NULL DEFAULT '',
        attempts INTEGER NOT NULL DEFAULT 0,
        first_ms INTEGER NOT NULL DEFAULT 0,
        total_ms INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (at, request)
    ) WITHOUT ROWID;
    CREATE INDEX ledger_open ON ledger (at) WHERE state = 0;
    CREATE TABLE audit (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        at INTEGER NOT NULL,
        actor TEXT NOT NULL,
        address TEXT NOT NULL,
        action TEXT NOT NULL,
        target TEXT NOT NULL,
        outcome TEXT NOT NULL,
        detail TEXT NOT NULL
    );
    CREATE INDEX audit_time ON audit (at);
    CREATE INDEX audit_of_target ON audit (target, seq);
    CREATE TABLE configs (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        text TEXT NOT NULL,
        sha256 TEXT NOT NULL,
        at INTEGER NOT NULL,
        actor TEXT NOT NULL,
        note TEXT NOT NULL,
        outcome TEXT NOT NULL
    );
";

/// Table of gateways' lives, with the time of their last report.
const LIVES: &str = "
    CREATE TABLE lives (
        gateway TEXT PRIMARY KEY,
        seen INTEGER NOT NULL
    ) WITHOUT ROWID;
";

/// Table of the identities of users who come with a token.
const PEOPLE: &str = "
    CREATE TABLE people (
        tenant TEXT PRIMARY KEY,
        identity TEXT NOT NULL,
        at INTEGER NOT NULL
    ) WITHOUT ROWID;
";

/// Secrets that the gateways of one store share.
const SECRETS: &str = "
    CREATE TABLE secrets (
        name TEXT PRIMARY KEY,
        value BLOB NOT NULL
    ) WITHOUT ROWID;
";

/// Sizes of stored responses, and their sums by tenant. Triggers maintain the sums on every write and delete; responses
/// added by a gateway of the previous version count as 0 bytes.
const BOUNDED: &str = "
    ALTER TABLE responses ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
    UPDATE responses SET bytes = 512 + length(body) + length(input) + length(output) + length(request);
    CREATE INDEX responses_ended ON responses (tenant, seq, bytes) WHERE status = 2;
    CREATE INDEX responses_waiting ON responses (tenant, seq, bytes) WHERE status < 2;
    CREATE TABLE response_sums (
        tenant TEXT PRIMARY KEY,
        responses INTEGER NOT NULL,
        bytes INTEGER NOT NULL
    ) WITHOUT ROWID;
    INSERT INTO response_sums SELECT tenant, count(*), sum(bytes) FROM responses GROUP BY tenant;
    CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
        INSERT INTO response_sums VALUES (NEW.tenant, 1, NEW.bytes)
            ON CONFLICT (tenant) DO UPDATE SET responses = responses + 1, bytes = bytes + excluded.bytes;
    END;
    CREATE TRIGGER response_changed AFTER UPDATE OF bytes ON responses BEGIN
        UPDATE response_sums SET bytes = bytes - OLD.bytes + NEW.bytes WHERE tenant = NEW.tenant;
    END;
    CREATE TRIGGER response_removed AFTER DELETE ON responses BEGIN
        UPDATE response_sums SET responses = responses - 1, bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
        DELETE FROM response_sums WHERE tenant = OLD.tenant AND responses <= 0;
    END;
";

/// Kinds of objects beside responses in the same table: chat completions and conversations, with the items of
/// conversations and who holds one; and the events of streamed background responses. `responses_listed` covers the
/// filters of lists, so that a list reads no document that it does not return.
const OBJECTS: &str = "
    ALTER TABLE responses ADD COLUMN kind INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE responses ADD COLUMN model TEXT NOT NULL DEFAULT '';
    ALTER TABLE responses ADD COLUMN metadata TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE responses ADD COLUMN holder TEXT;
    ALTER TABLE responses ADD COLUMN held_until INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE responses ADD COLUMN events BLOB NOT NULL DEFAULT x'';
    CREATE INDEX responses_listed ON responses (tenant, kind, seq, model, metadata, bytes) WHERE kind > 0;
    CREATE TABLE conversation_items (
        conversation TEXT NOT NULL,
        at INTEGER NOT NULL,
        id TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        item BLOB NOT NULL,
        PRIMARY KEY (conversation, at)
    );
    CREATE UNIQUE INDEX conversation_items_id ON conversation_items (conversation, id);
    CREATE TRIGGER conversation_removed AFTER DELETE ON responses WHEN OLD.kind = 2 BEGIN
        DELETE FROM conversation_items WHERE conversation = OLD.id;
    END;
";

/// Sizes of the results of batches that have not ended, so that nobody reads results to know their sum. Results added by a
/// gateway of the previous version count as 0 bytes until their batch ends.
const RESULTS: &str = "
    ALTER TABLE batches ADD COLUMN result_bytes INTEGER NOT NULL DEFAULT 0;
    UPDATE batches SET result_bytes =
        (SELECT coalesce(sum(length(result)), 0) FROM batch_lines WHERE batch = batches.seq) WHERE is_open = 1;
";

/// Index of batches that have ended, for their removal.
const SWEPT: &str = "CREATE INDEX batches_ended ON batches (ended) WHERE is_open = 0;";

/// Random marks of the directory's last versions. A trigger gives them, so that changes by a gateway of the previous version
/// have marks, too.
const MARKED: &str = "
    CREATE TABLE directory_marks (version INTEGER PRIMARY KEY, mark TEXT NOT NULL);
    INSERT INTO directory_marks SELECT version, hex(randomblob(16)) FROM directory;
    CREATE TRIGGER directory_marked AFTER UPDATE OF version ON directory BEGIN
        INSERT OR REPLACE INTO directory_marks VALUES (NEW.version, hex(randomblob(16)));
        DELETE FROM directory_marks WHERE version <= NEW.version - 10000;
    END;
";

/// Migrates the database to the newest version. A newer database is used as it is, since versions only add.
pub(super) fn migrate(connection: &Connection) -> Result<(), StoreError> {
    connection.execute_batch("BEGIN IMMEDIATE")?;
    let have: usize = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    for (version, statements) in VERSIONS.iter().enumerate().skip(have) {
        connection.execute_batch(statements)?;
        connection.pragma_update(None, "user_version", version + 1)?;
    }
    Ok(connection.execute_batch("COMMIT")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_that_were_there_count() {
        let connection = Connection::open_in_memory().expect("memory");
        for statements in &VERSIONS[..4] {
            connection.execute_batch(statements).expect("made");
        }
        connection.pragma_update(None, "user_version", 4).expect("as it was");
        let old = "INSERT INTO responses (id, tenant, status, created, expires, body, input, output, request)
                   VALUES (?1, 'a', 2, 1, 2, x'0102', x'03', x'', x'')";
        connection.execute(old, ["resp_1"]).expect("kept before");
        migrate(&connection).expect("brought up");
        let sums = |connection: &Connection| -> (u64, u64) {
            let sql = "SELECT responses, bytes FROM response_sums WHERE tenant = 'a'";
            connection.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?))).expect("sums")
        };
        assert_eq!(sums(&connection), (1, 515));
        connection.execute(old, ["resp_2"]).expect("a gateway of the version before");
        assert_eq!(sums(&connection), (2, 515));
        connection.execute("DELETE FROM responses WHERE id = 'resp_1'", []).expect("deleted");
        assert_eq!(sums(&connection), (1, 0));
    }

    #[test]
    fn changes_by_a_gateway_of_the_version_before_are_marked() {
        let connection = Connection::open_in_memory().expect("memory");
        for statements in &VERSIONS[..9] {
            connection.execute_batch(statements).expect("made");
        }
        connection.pragma_update(None, "user_version", 9).expect("as it was");
        let change = || connection.execute("UPDATE directory SET version = version + 1", []).expect("changed");
        change();
        migrate(&connection).expect("brought up");
        change();
        let mut marks =
            connection.prepare("SELECT version, mark FROM directory_marks ORDER BY version").expect("there");
        let marks = marks.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).expect("read");
        let marks: Vec<(u64, String)> = marks.collect::<Result<_, _>>().expect("rows");
        assert_eq!(marks.iter().map(|(version, _)| *version).collect::<Vec<_>>(), [1, 2]);
        assert_ne!(marks[0].1, marks[1].1);
    }

    #[test]
    fn results_that_were_there_count() {
        let connection = Connection::open_in_memory().expect("memory");
        for statements in &VERSIONS[..7] {
            connection.execute_batch(statements).expect("made");
        }
        connection.pragma_update(None, "user_version", 7).expect("as it was");
        let old =
            "INSERT INTO batches (id, tenant, status, endpoint, input, completion_window, metadata, created, expires)
                   VALUES ('batch_1', 'a', 'in_progress', '/v1/embeddings', 'file-1', '24h', '', 1, 2);
                   INSERT INTO batch_lines VALUES (1, 0, 'c0', 0, 9, 1, x'010203'), (1, 1, 'c1', 9, 9, NULL, NULL);";
        connection.execute_batch(old).expect("kept before");
        migrate(&connection).expect("brought up");
        let bytes: u64 = connection.query_row("SELECT result_bytes FROM batches", [], |row| row.get(0)).expect("a sum");
        assert_eq!(bytes, 3);
    }

    #[test]
    fn migrating_twice_and_from_the_future_changes_nothing() {
        let connection = Connection::open_in_memory().expect("memory");
        migrate(&connection).expect("the first time");
        migrate(&connection).expect("again");
        connection.pragma_update(None, "user_version", 99).expect("a newer one");
        migrate(&connection).expect("a newer one is used");
        let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).expect("a version");
        assert_eq!(version, 99);
    }
}
