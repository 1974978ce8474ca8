//! Schema in versions that only add: a gateway of the previous version keeps working while this one starts.

use std::time::Duration;

use super::held::{Held, cell};
use crate::StoreError;

/// Time limit for one version of the schema, and for another gateway that migrates.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(600);

/// Statements that lead from the version of their index to the next. Never changed once released; new ones are
/// appended.
const VERSIONS: [&str; 14] =
    [KEPT, GOVERNED, COUNTED, LIVES, PEOPLE, HELD, SETTLED, BOUNDED, OBJECTS, SECRETS, RESULTS, SWEPT, CLAIMS, MARKED];

/// Tables of files, batches and responses.
const KEPT: &str = "
    CREATE TABLE penstock.files (
        seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        purpose TEXT NOT NULL,
        name TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        created BIGINT NOT NULL,
        expires BIGINT,
        sealed BOOLEAN NOT NULL DEFAULT false
    );
    CREATE INDEX files_of_tenant ON penstock.files (tenant, seq);
    CREATE INDEX files_expiry ON penstock.files (expires) WHERE expires IS NOT NULL;
    CREATE INDEX files_unsealed ON penstock.files (created) WHERE NOT sealed;
    CREATE TABLE penstock.file_chunks (
        file BIGINT NOT NULL REFERENCES penstock.files (seq) ON DELETE CASCADE,
        at BIGINT NOT NULL,
        data BYTEA NOT NULL,
        PRIMARY KEY (file, at)
    );
    CREATE TABLE penstock.batches (
        seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        status TEXT NOT NULL,
        is_open BOOLEAN NOT NULL DEFAULT true,
        endpoint TEXT NOT NULL,
        input TEXT NOT NULL,
        output TEXT,
        errors TEXT,
        completion_window TEXT NOT NULL,
        metadata TEXT NOT NULL,
        faults TEXT NOT NULL DEFAULT '',
        output_expires_after BIGINT,
        created BIGINT NOT NULL,
        expires BIGINT NOT NULL,
        in_progress BIGINT,
        finalizing BIGINT,
        cancelling BIGINT,
        ended BIGINT,
        total BIGINT NOT NULL DEFAULT 0,
        completed BIGINT NOT NULL DEFAULT 0,
        failed BIGINT NOT NULL DEFAULT 0
    );
    CREATE INDEX batches_of_tenant ON penstock.batches (tenant, seq);
    CREATE INDEX batches_open ON penstock.batches (seq) WHERE is_open;
    CREATE INDEX batches_input ON penstock.batches (input) WHERE is_open;
    CREATE TABLE penstock.batch_lines (
        batch BIGINT NOT NULL,
        line BIGINT NOT NULL,
        custom_id TEXT NOT NULL,
        at BIGINT NOT NULL,
        bytes BIGINT NOT NULL,
        ok BOOLEAN,
        result BYTEA,
        PRIMARY KEY (batch, line)
    );
    CREATE INDEX batch_lines_waiting ON penstock.batch_lines (batch, line) WHERE ok IS NULL;
    CREATE TABLE penstock.responses (
        seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        status BIGINT NOT NULL,
        previous TEXT,
        created BIGINT NOT NULL,
        expires BIGINT NOT NULL,
        body BYTEA NOT NULL,
        input BYTEA NOT NULL,
        output BYTEA NOT NULL,
        request BYTEA NOT NULL
    );
    CREATE INDEX responses_of_tenant ON penstock.responses (tenant);
    CREATE INDEX responses_expiry ON penstock.responses (expires);
    CREATE INDEX responses_open ON penstock.responses (seq) WHERE status < 2;
";

/// Tables of keys and owners, the ledger, the audit log and configs. Sorted text columns use the "C" collation: byte
/// order, whatever the database's locale.
const GOVERNED: &str = r#"
    CREATE TABLE penstock.directory (version BIGINT NOT NULL);
    INSERT INTO penstock.directory VALUES (0);
    CREATE TABLE penstock.issued_keys (
        seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        digest BYTEA NOT NULL UNIQUE,
        previous_digest BYTEA,
        previous_until BIGINT,
        hint TEXT NOT NULL,
        team_id TEXT,
        user_id TEXT,
        parent TEXT,
        scope TEXT NOT NULL,
        limits TEXT NOT NULL,
        tags TEXT NOT NULL,
        created BIGINT NOT NULL,
        rotated BIGINT,
        expires BIGINT,
        revoked BIGINT,
        version BIGINT NOT NULL
    );
    CREATE INDEX issued_keys_previous ON penstock.issued_keys (previous_digest) WHERE previous_digest IS NOT NULL;
    CREATE INDEX issued_keys_of_team ON penstock.issued_keys (team_id, seq);
    CREATE INDEX issued_keys_of_user ON penstock.issued_keys (user_id, seq);
    CREATE INDEX issued_keys_changed ON penstock.issued_keys (version);
    CREATE TABLE penstock.owners (
        kind TEXT NOT NULL,
        id TEXT COLLATE "C" NOT NULL,
        name TEXT NOT NULL,
        team_id TEXT,
        scope TEXT NOT NULL,
        limits TEXT NOT NULL,
        budgets TEXT NOT NULL,
        tags TEXT NOT NULL,
        blocked BOOLEAN NOT NULL,
        created BIGINT NOT NULL,
        removed BIGINT,
        version BIGINT NOT NULL,
        PRIMARY KEY (kind, id)
    );
    CREATE INDEX owners_changed ON penstock.owners (version);
    CREATE TABLE penstock.ledger (
        at BIGINT NOT NULL,
        request TEXT COLLATE "C" NOT NULL,
        gateway TEXT NOT NULL,
        key_id TEXT COLLATE "C" NOT NULL,
        team_id TEXT COLLATE "C" NOT NULL,
        user_id TEXT COLLATE "C" NOT NULL,
        model TEXT COLLATE "C" NOT NULL,
        provider TEXT COLLATE "C" NOT NULL,
        route TEXT COLLATE "C" NOT NULL,
        tags TEXT[] NOT NULL,
        held_input BIGINT NOT NULL,
        held_output BIGINT NOT NULL,
        held_usd BIGINT NOT NULL,
        input BIGINT NOT NULL DEFAULT 0,
        input_cached BIGINT NOT NULL DEFAULT 0,
        input_written BIGINT NOT NULL DEFAULT 0,
        output BIGINT NOT NULL DEFAULT 0,
        reasoning BIGINT NOT NULL DEFAULT 0,
        micro_usd BIGINT NOT NULL DEFAULT 0,
        status BIGINT NOT NULL DEFAULT 0,
        outcome TEXT NOT NULL DEFAULT '',
        attempts BIGINT NOT NULL DEFAULT 0,
        first_ms BIGINT NOT NULL DEFAULT 0,
        total_ms BIGINT NOT NULL DEFAULT 0,
        state BIGINT NOT NULL,
        PRIMARY KEY (at, request)
    );
    CREATE INDEX ledger_open ON penstock.ledger (at) WHERE state = 0;
    CREATE TABLE penstock.audit (
        seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        at BIGINT NOT NULL,
        actor TEXT NOT NULL,
        address TEXT NOT NULL,
        action TEXT NOT NULL,
        target TEXT NOT NULL,
        outcome TEXT NOT NULL,
        detail TEXT NOT NULL
    );
    CREATE INDEX audit_time ON penstock.audit (at);
    CREATE INDEX audit_of_target ON penstock.audit (target, seq);
    CREATE TABLE penstock.configs (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        text TEXT NOT NULL,
        sha256 TEXT NOT NULL,
        at BIGINT NOT NULL,
        actor TEXT NOT NULL,
        note TEXT NOT NULL,
        outcome TEXT NOT NULL
    );
"#;

/// Counters: one row each, with its leases as JSON (`holder: {a: amount, u: until}`, one per gateway). The rule of
/// grants is that of `counters::granted`. About one call in a hundred removes ended windows.
const COUNTED: &str = r"
    CREATE TABLE penstock.counters (
        name TEXT NOT NULL,
        start BIGINT NOT NULL,
        seconds BIGINT NOT NULL,
        spent BIGINT NOT NULL DEFAULT 0,
        leases JSONB NOT NULL DEFAULT '{}',
        ends BIGINT,
        PRIMARY KEY (name, start, seconds)
    );
    CREATE INDEX counters_ended ON penstock.counters (ends) WHERE ends IS NOT NULL;

    CREATE FUNCTION penstock.used_1(c_spent bigint, c_leases jsonb, c_now bigint) RETURNS numeric LANGUAGE sql IMMUTABLE AS $$
        SELECT least(9007199254740991, c_spent + coalesce(sum((one.value->>'a')::numeric), 0))
        FROM jsonb_each(c_leases) one WHERE (one.value->>'u')::bigint > c_now
    $$;

    CREATE FUNCTION penstock.take_1(c_holder text, c_asks jsonb, c_whole boolean, c_now bigint)
    RETURNS TABLE (nth bigint, granted bigint, leased bigint, used bigint) LANGUAGE plpgsql AS $$
    DECLARE
        ask record;
        cell record;
        slid numeric;
        amount numeric;
        has numeric[] := '{}';
        got numeric[] := '{}';
        own numeric;
        until bigint;
        now_leases jsonb;
        enough boolean := true;
    BEGIN
        FOR ask IN
            SELECT e.ord, x.* FROM jsonb_array_elements(c_asks) WITH ORDINALITY e(v, ord),
                jsonb_to_record(e.v) x(name text, start bigint, seconds bigint, before bigint, part bigint, most bigint,
                                       want bigint, fewest bigint, until bigint)
            ORDER BY x.name, x.start, x.seconds
        LOOP
            INSERT INTO penstock.counters AS c (name, start, seconds, ends)
                VALUES (ask.name, ask.start, ask.seconds,
                        CASE WHEN ask.seconds > 0 THEN least(ask.start::numeric + 2 * ask.seconds, 9007199254740991) END)
                ON CONFLICT (name, start, seconds) DO UPDATE SET ends = excluded.ends
                RETURNING c.spent, c.leases INTO cell;
            slid := 0;
            IF ask.before >= 0 THEN
                SELECT ceil(penstock.used_1(c.spent, c.leases, c_now) * ask.part / ask.seconds) INTO slid
                    FROM penstock.counters c
                    WHERE c.name = ask.name AND c.start = ask.before AND c.seconds = ask.seconds;
            END IF;
            has[ask.ord] := least(9007199254740991, penstock.used_1(cell.spent, cell.leases, c_now) + coalesce(slid, 0));
            amount := least(ask.want, greatest(ask.most - has[ask.ord], 0));
            IF amount < ask.fewest THEN
                amount := 0;
                enough := false;
            END IF;
            got[ask.ord] := amount;
        END LOOP;
        FOR ask IN
            SELECT e.ord, x.* FROM jsonb_array_elements(c_asks) WITH ORDINALITY e(v, ord),
                jsonb_to_record(e.v) x(name text, start bigint, seconds bigint, until bigint)
        LOOP
            IF c_whole AND NOT enough THEN
                got[ask.ord] := 0;
            END IF;
            SELECT c.leases INTO cell FROM penstock.counters c
                WHERE c.name = ask.name AND c.start = ask.start AND c.seconds = ask.seconds;
            own := got[ask.ord];
            until := ask.until;
            IF (cell.leases->c_holder->>'u')::bigint > c_now THEN
                own := own + (cell.leases->c_holder->>'a')::numeric;
                until := greatest(until, (cell.leases->c_holder->>'u')::bigint);
            END IF;
            SELECT coalesce(jsonb_object_agg(one.key, one.value), '{}') INTO now_leases FROM jsonb_each(cell.leases) one
                WHERE (one.value->>'u')::bigint > c_now AND (one.value->>'a')::numeric > 0 AND one.key <> c_holder;
            IF own > 0 AND until > c_now THEN
                now_leases := now_leases || jsonb_build_object(c_holder, jsonb_build_object('a', own, 'u', until));
            END IF;
            IF now_leases <> cell.leases THEN
                UPDATE penstock.counters c SET leases = now_leases
                    WHERE c.name = ask.name AND c.start = ask.start AND c.seconds = ask.seconds;
            END IF;
            nth := ask.ord;
            granted := got[ask.ord];
            leased := own;
            used := has[ask.ord] + got[ask.ord];
            RETURN NEXT;
        END LOOP;
        IF random() < 0.01 THEN
            DELETE FROM penstock.counters WHERE (name, start, seconds) IN (
                SELECT c.name, c.start, c.seconds FROM penstock.counters c WHERE c.ends <= c_now LIMIT 1000 FOR UPDATE SKIP LOCKED);
        END IF;
    END
    $$;

    CREATE FUNCTION penstock.settle_1(c_holder text, c_settlements jsonb, c_now bigint) RETURNS void LANGUAGE plpgsql AS $$
    DECLARE
        one record;
    BEGIN
        FOR one IN
            SELECT x.* FROM jsonb_to_recordset(c_settlements)
                x(name text, start bigint, seconds bigint, leased bigint, spent bigint)
            ORDER BY x.name, x.start, x.seconds
        LOOP
            INSERT INTO penstock.counters AS c (name, start, seconds, spent, ends)
                VALUES (one.name, one.start, one.seconds, one.spent,
                        CASE WHEN one.seconds > 0 THEN least(one.start::numeric + 2 * one.seconds, 9007199254740991) END)
                ON CONFLICT (name, start, seconds) DO UPDATE SET
                    spent = least(9007199254740991, c.spent + one.spent),
                    leases = CASE WHEN (c.leases->c_holder->>'a')::numeric > one.leased THEN
                        jsonb_set(c.leases, ARRAY[c_holder, 'a'],
                                  to_jsonb((c.leases->c_holder->>'a')::numeric - one.leased))
                        ELSE c.leases - c_holder END;
        END LOOP;
    END
    $$;
";

/// Table of gateways' lives, with the time of their last report.
const LIVES: &str = "
    CREATE TABLE penstock.lives (
        gateway TEXT PRIMARY KEY,
        seen BIGINT NOT NULL
    );
";

/// Table of the identities of users who come with a token.
const PEOPLE: &str = "
    CREATE TABLE penstock.people (
        tenant TEXT PRIMARY KEY,
        identity TEXT NOT NULL,
        at BIGINT NOT NULL
    );
";

/// Lease calls are numbered per holder. An ask with an earlier number than the holder's last lease call is rejected
/// once it has the rows of its counters: it was under way when its holder gave up waiting. A lease call changes the
/// same rows after it has written its number, so whichever of the two comes second sees the other.
const HELD: &str = r"
    CREATE TABLE penstock.holders (
        holder TEXT PRIMARY KEY,
        word BIGINT NOT NULL,
        at BIGINT NOT NULL
    );

    CREATE FUNCTION penstock.heed_1(c_holder text, c_word bigint) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        IF EXISTS (SELECT FROM penstock.holders h WHERE h.holder = c_holder AND h.word > c_word) THEN
            RAISE EXCEPTION 'said before what counts now' USING ERRCODE = 'PS001';
        END IF;
    END
    $$;

    CREATE FUNCTION penstock.take_2(c_holder text, c_word bigint, c_asks jsonb, c_whole boolean, c_now bigint)
    RETURNS TABLE (nth bigint, granted bigint, leased bigint, used bigint) LANGUAGE plpgsql AS $$
    BEGIN
        RETURN QUERY SELECT t.nth, t.granted, t.leased, t.used FROM penstock.take_1(c_holder, c_asks, c_whole, c_now) t;
        PERFORM penstock.heed_1(c_holder, c_word);
    END
    $$;

    CREATE FUNCTION penstock.settle_2(c_holder text, c_word bigint, c_settlements jsonb, c_now bigint) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM penstock.settle_1(c_holder, c_settlements, c_now);
        PERFORM penstock.heed_1(c_holder, c_word);
    END
    $$;

    CREATE FUNCTION penstock.lease_1(c_holder text, c_kept jsonb, c_now bigint) RETURNS bigint LANGUAGE plpgsql AS $$
    DECLARE
        one record;
        said bigint;
    BEGIN
        INSERT INTO penstock.holders AS h (holder, word, at) VALUES (c_holder, 1, c_now)
            ON CONFLICT (holder) DO UPDATE SET word = h.word + 1, at = c_now RETURNING h.word INTO said;
        FOR one IN
            SELECT x.* FROM jsonb_to_recordset(c_kept)
                x(name text, start bigint, seconds bigint, amount bigint, until bigint)
            ORDER BY x.name, x.start, x.seconds
        LOOP
            INSERT INTO penstock.counters AS c (name, start, seconds, ends)
                VALUES (one.name, one.start, one.seconds,
                        CASE WHEN one.seconds > 0 THEN least(one.start::numeric + 2 * one.seconds, 9007199254740991) END)
                ON CONFLICT (name, start, seconds) DO UPDATE SET ends = excluded.ends;
            UPDATE penstock.counters c
                SET leases = CASE WHEN one.amount > 0
                    THEN c.leases || jsonb_build_object(c_holder, jsonb_build_object('a', one.amount, 'u', one.until))
                    ELSE c.leases - c_holder END
                WHERE c.name = one.name AND c.start = one.start AND c.seconds = one.seconds;
        END LOOP;
        -- Longer than anything is on its way.
        DELETE FROM penstock.holders WHERE at < c_now - 3456000;
        RETURN said;
    END
    $$;
";

/// Number of each holder's last settlement, so that a retry takes effect once. The holder's row is locked before its
/// counters, as in `lease_1`.
const SETTLED: &str = "
    ALTER TABLE penstock.holders ADD COLUMN settled BIGINT NOT NULL DEFAULT 0;

    CREATE FUNCTION penstock.settle_3(c_holder text, c_nth bigint, c_settlements jsonb, c_now bigint) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO penstock.holders AS h (holder, word, at, settled) VALUES (c_holder, 0, c_now, c_nth)
            ON CONFLICT (holder) DO UPDATE SET settled = c_nth, at = greatest(h.at, c_now) WHERE h.settled < c_nth;
        IF FOUND THEN
            PERFORM penstock.settle_1(c_holder, c_settlements, c_now);
        END IF;
    END
    $$;
";

/// Secrets that the gateways of one store share.
const SECRETS: &str = "
    CREATE TABLE penstock.secrets (
        name TEXT PRIMARY KEY,
        value BYTEA NOT NULL
    );
";

/// Sizes of stored responses, and their sums by tenant. A trigger maintains the sums on every write and delete;
/// responses added by a gateway of the previous version count as 0 bytes.
const BOUNDED: &str = "
    ALTER TABLE penstock.responses ADD COLUMN bytes BIGINT NOT NULL DEFAULT 0;
    UPDATE penstock.responses
        SET bytes = 512 + octet_length(body) + octet_length(input) + octet_length(output) + octet_length(request);
    CREATE INDEX responses_ended ON penstock.responses (tenant, seq) INCLUDE (bytes) WHERE status = 2;
    CREATE INDEX responses_waiting ON penstock.responses (tenant, seq) INCLUDE (bytes) WHERE status < 2;
    CREATE TABLE penstock.response_sums (
        tenant TEXT PRIMARY KEY,
        responses BIGINT NOT NULL,
        bytes BIGINT NOT NULL
    );
    INSERT INTO penstock.response_sums SELECT tenant, count(*), sum(bytes)::bigint FROM penstock.responses GROUP BY tenant;

    CREATE FUNCTION penstock.response_counted_1() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'INSERT' THEN
            INSERT INTO penstock.response_sums AS s (tenant, responses, bytes) VALUES (NEW.tenant, 1, NEW.bytes)
                ON CONFLICT (tenant) DO UPDATE SET responses = s.responses + 1, bytes = s.bytes + excluded.bytes;
        ELSIF TG_OP = 'UPDATE' THEN
            UPDATE penstock.response_sums SET bytes = bytes - OLD.bytes + NEW.bytes WHERE tenant = NEW.tenant;
        ELSE
            UPDATE penstock.response_sums SET responses = responses - 1, bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
        END IF;
        RETURN NULL;
    END
    $$;
    CREATE TRIGGER response_counted AFTER INSERT OR DELETE OR UPDATE OF bytes ON penstock.responses
        FOR EACH ROW EXECUTE FUNCTION penstock.response_counted_1();
";

/// Kinds of objects beside responses in the same table: chat completions and conversations, with the items of
/// conversations and who holds one; and the events of streamed background responses.
const OBJECTS: &str = "
    ALTER TABLE penstock.responses
        ADD COLUMN kind BIGINT NOT NULL DEFAULT 0,
        ADD COLUMN model TEXT NOT NULL DEFAULT '',
        ADD COLUMN metadata TEXT NOT NULL DEFAULT '{}',
        ADD COLUMN holder TEXT,
        ADD COLUMN held_until BIGINT NOT NULL DEFAULT 0,
        ADD COLUMN events BYTEA NOT NULL DEFAULT '';
    CREATE INDEX responses_listed ON penstock.responses (tenant, kind, seq) WHERE kind > 0;
    CREATE TABLE penstock.conversation_items (
        conversation TEXT NOT NULL REFERENCES penstock.responses (id) ON DELETE CASCADE,
        at BIGINT NOT NULL,
        id TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        item BYTEA NOT NULL,
        PRIMARY KEY (conversation, at),
        UNIQUE (conversation, id)
    );
";

/// Sizes of the results of batches that have not ended, so that nobody reads results to know their sum. Results added by a
/// gateway of the previous version count as 0 bytes until their batch ends.
const RESULTS: &str = "
    ALTER TABLE penstock.batches ADD COLUMN result_bytes BIGINT NOT NULL DEFAULT 0;
    UPDATE penstock.batches SET result_bytes =
        (SELECT coalesce(sum(octet_length(result)), 0) FROM penstock.batch_lines WHERE batch = batches.seq) WHERE is_open;
";

/// Removal of rows that nobody needs: counters that never end and count nothing (`take_3`, about one call in 200), sums of
/// tenants without responses, and, by an index, batches that ended long ago.
const SWEPT: &str = r"
    CREATE INDEX counters_endless ON penstock.counters (name) WHERE seconds = 0;

    CREATE FUNCTION penstock.take_3(c_holder text, c_word bigint, c_asks jsonb, c_whole boolean, c_now bigint)
    RETURNS TABLE (nth bigint, granted bigint, leased bigint, used bigint) LANGUAGE plpgsql AS $$
    BEGIN
        RETURN QUERY SELECT t.nth, t.granted, t.leased, t.used FROM penstock.take_2(c_holder, c_word, c_asks, c_whole, c_now) t;
        IF random() < 0.005 THEN
            DELETE FROM penstock.counters WHERE (name, start, seconds) IN (
                SELECT c.name, c.start, c.seconds FROM penstock.counters c
                WHERE c.seconds = 0 AND c.spent = 0
                  AND NOT EXISTS (SELECT FROM jsonb_each(c.leases) one WHERE (one.value->>'u')::bigint > c_now)
                LIMIT 1000 FOR UPDATE SKIP LOCKED);
        END IF;
    END
    $$;

    CREATE OR REPLACE FUNCTION penstock.response_counted_1() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'INSERT' THEN
            INSERT INTO penstock.response_sums AS s (tenant, responses, bytes) VALUES (NEW.tenant, 1, NEW.bytes)
                ON CONFLICT (tenant) DO UPDATE SET responses = s.responses + 1, bytes = s.bytes + excluded.bytes;
        ELSIF TG_OP = 'UPDATE' THEN
            UPDATE penstock.response_sums SET bytes = bytes - OLD.bytes + NEW.bytes WHERE tenant = NEW.tenant;
        ELSE
            UPDATE penstock.response_sums SET responses = responses - 1, bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
            DELETE FROM penstock.response_sums WHERE tenant = OLD.tenant AND responses <= 0;
        END IF;
        RETURN NULL;
    END
    $$;
    DELETE FROM penstock.response_sums WHERE responses <= 0;

    CREATE INDEX batches_ended ON penstock.batches (ended) WHERE NOT is_open;
";

/// Claims of gateways on the batches and responses that they run, with the number of renewals of each.
const CLAIMS: &str = "
    CREATE TABLE penstock.claims (
        work TEXT PRIMARY KEY,
        holder TEXT NOT NULL,
        beats BIGINT NOT NULL DEFAULT 0
    );
";

/// Random marks of the directory's last versions. A trigger gives them, so that changes by a gateway of the previous version
/// have marks, too.
const MARKED: &str = "
    CREATE TABLE penstock.directory_marks (version BIGINT PRIMARY KEY, mark TEXT NOT NULL);
    CREATE FUNCTION penstock.directory_marked_1() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO penstock.directory_marks
            VALUES (NEW.version, md5(random()::text || random()::text || clock_timestamp()::text || pg_backend_pid()::text))
            ON CONFLICT (version) DO UPDATE SET mark = excluded.mark;
        DELETE FROM penstock.directory_marks WHERE version <= NEW.version - 10000;
        RETURN NULL;
    END
    $$;
    CREATE TRIGGER directory_marked AFTER UPDATE OF version ON penstock.directory
        FOR EACH ROW EXECUTE FUNCTION penstock.directory_marked_1();
    UPDATE penstock.directory SET version = version;
";

/// Migrates the database to the newest version. A newer database is used as it is, since versions only add.
pub(super) async fn migrate(held: &mut Held) -> Result<(), StoreError> {
    held.begin().await?;
    // Tables may be large, and another gateway may be migrating them.
    held.wait_for(MIGRATION_TIMEOUT).await?;
    // One gateway migrates at a time; the lock ends with the transaction.
    held.batch("SELECT pg_advisory_xact_lock(7365998)").await?;
    held.batch(
        "CREATE SCHEMA IF NOT EXISTS penstock; CREATE TABLE IF NOT EXISTS penstock.version (number BIGINT NOT NULL)",
    )
    .await?;
    let row = held.one("SELECT coalesce(max(number), 0) FROM penstock.version", &[]).await?;
    let have = row.map_or(Ok(0), |row| cell::<i64>(&row, 0))?.max(0) as usize;
    for (version, statements) in VERSIONS.iter().enumerate().skip(have) {
        held.batch(statements).await?;
        held.execute("INSERT INTO penstock.version VALUES ($1)", &[&(version as i64 + 1)]).await?;
    }
    held.commit().await
}
