-- The control store of several machines, in a schema of its own per campaign. Each statement has a name; postgres.py
-- runs them by it. Times are UTC microseconds by the server's clock. A window's verdicts are one byte a row
-- (formats.sendlog.Verdict), 0 while it is open: no other place says whether a row is in a window.

-- name: schema
CREATE TABLE meta (key text PRIMARY KEY, value text NOT NULL);
CREATE TABLE campaign (
    id text PRIMARY KEY,
    plan_fingerprint text NOT NULL,
    rows bigint NOT NULL,
    partitions integer NOT NULL,
    state text NOT NULL DEFAULT 'ready',            -- ready, paused, cancelled
    loaded_at_us bigint NOT NULL,
    server text NOT NULL DEFAULT ''                 -- system id and timeline that the operator knows of
);
CREATE TABLE bundle (
    name text NOT NULL,                             -- path in the campaign folder
    part integer NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (name, part)
);
ALTER TABLE bundle ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE TABLE incarnation (
    id text PRIMARY KEY,
    sender text NOT NULL,
    host_id text NOT NULL,
    boot_id text NOT NULL,
    pid integer NOT NULL,
    partition integer,
    state text NOT NULL,                            -- alive, ended, superseded
    started_at_us bigint NOT NULL,
    renewed_at_us bigint NOT NULL,
    lease_us bigint NOT NULL,
    superseded_by text,
    counters text NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);
CREATE TABLE batch (
    number integer PRIMARY KEY,
    partition integer NOT NULL,
    first_row bigint NOT NULL,
    rows integer NOT NULL,
    state text NOT NULL DEFAULT 'pending',          -- pending, claimed, done
    owner text REFERENCES incarnation (id),
    started integer NOT NULL DEFAULT 0,             -- how often it was claimed
    late integer NOT NULL DEFAULT 0                 -- how often somebody who does not own it changed what is known
) WITH (fillfactor = 70);
CREATE INDEX batch_open ON batch (partition, number) WHERE state <> 'done';
CREATE TABLE win (
    id uuid PRIMARY KEY,                            -- incarnation (8 bytes), worker (2), number (6)
    batch integer NOT NULL,
    at_us bigint NOT NULL,
    log_length bigint NOT NULL,                     -- how far the worker's log had come, and its last seal
    log_seal text NOT NULL,
    rows bytea NOT NULL,                            -- uint32, little-endian, counted from the batch's first row
    verdicts bytea NOT NULL,
    details bytea NOT NULL DEFAULT ''               -- entries.DETAIL records of what a byte cannot say
) WITH (fillfactor = 60);
ALTER TABLE win ALTER COLUMN rows SET STORAGE PLAIN;
ALTER TABLE win ALTER COLUMN verdicts SET STORAGE PLAIN;
ALTER TABLE win ALTER COLUMN details SET STORAGE EXTERNAL;
CREATE INDEX win_batch ON win (batch);
CREATE TABLE decision (
    log_id text NOT NULL,                           -- the window
    serial bigint NOT NULL,                         -- the row's place in it
    row bigint NOT NULL,
    what text NOT NULL,                             -- resend, accept
    who text NOT NULL,
    at_us bigint NOT NULL,
    PRIMARY KEY (log_id, serial)
);
CREATE INDEX decision_row ON decision (row);
CREATE TABLE share (                                -- limits that machines share: pace.commons.Table, as JSON
    key text PRIMARY KEY,
    version bigint NOT NULL,
    body bytea NOT NULL
) WITH (fillfactor = 50);
CREATE TABLE override (                             -- an operator's or a throttle's word that every machine obeys
    scope text NOT NULL,                            -- campaign, domain:..., provider:...
    what text NOT NULL,
    value text NOT NULL,
    who text NOT NULL,
    at_us bigint NOT NULL,
    until_us bigint,
    PRIMARY KEY (scope, what)
);
CREATE FUNCTION wall_us() RETURNS bigint LANGUAGE sql VOLATILE AS
    $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint $$;
CREATE FUNCTION keep_first(old bytea, new bytea) RETURNS bytea LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    FOR i IN 0 .. length(old) - 1 LOOP
        -- An acceptance or a rejection (1, 2) that is told later resolves doubt (6).
        IF get_byte(old, i) = 0 OR (get_byte(old, i) = 6 AND get_byte(new, i) IN (1, 2)) THEN
            old := set_byte(old, i, get_byte(new, i));
        END IF;
    END LOOP;
    RETURN old;
END $$;

-- name: server
SELECT (SELECT system_identifier FROM pg_control_system())::text || '/'
    || CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END;

-- name: standbys
SELECT current_setting('synchronous_standby_names'), (SELECT count(*) FROM pg_stat_replication);

-- name: campaigns
SELECT nspname FROM pg_namespace WHERE nspname LIKE 'rowpost\_%' ORDER BY nspname;

-- name: add_campaign
INSERT INTO campaign (id, plan_fingerprint, rows, partitions, loaded_at_us, server) VALUES (%s, %s, %s, %s, %s, %s);

-- name: add_batches
INSERT INTO batch (number, partition, first_row, rows)
SELECT * FROM unnest(%s::integer[], %s::integer[], %s::bigint[], %s::integer[]);

-- name: campaign
SELECT id, plan_fingerprint, rows, partitions, state FROM campaign;

-- name: known_server
SELECT server, coalesce((SELECT value FROM meta WHERE key = 'confirmed'), '') FROM campaign;

-- name: confirm_server
-- When it was said is kept too: whoever has not heard of it holds what the server may have forgotten.
WITH said AS (
    INSERT INTO meta VALUES ('confirmed', wall_us()::text)
    ON CONFLICT (key) DO UPDATE SET value = greatest(meta.value::bigint + 1, wall_us())::text
)
UPDATE campaign SET server = %s;

-- name: set_campaign_state
UPDATE campaign SET state = %s;

-- name: add_bundle
INSERT INTO bundle (name, part, body) VALUES (%s, %s, %s);

-- name: bundle
SELECT name, body FROM bundle ORDER BY name, part;

-- name: register
INSERT INTO incarnation (id, sender, host_id, boot_id, pid, partition, state, started_at_us, renewed_at_us, lease_us)
VALUES (%s, %s, %s, %s, %s, %s, 'alive', wall_us(), wall_us(), %s);

-- name: renew
UPDATE incarnation SET renewed_at_us = wall_us(), counters = %s WHERE id = %s AND state = 'alive';

-- name: leave
UPDATE incarnation SET state = 'ended', renewed_at_us = wall_us(), counters = %s WHERE id = %s AND state = 'alive';

-- name: supersede
UPDATE incarnation SET state = 'superseded', superseded_by = %s WHERE id = %s AND state = 'alive';

-- name: supersede_expired
UPDATE incarnation SET state = 'superseded', superseded_by = %s
WHERE state = 'alive' AND renewed_at_us + lease_us < wall_us() AND id <> %s AND id IN (
    SELECT owner FROM batch WHERE state = 'claimed' AND (%s::integer IS NULL OR partition = %s::integer))
RETURNING id, sender, partition;

-- name: incarnations
SELECT id, sender, host_id, boot_id, pid, partition, state, started_at_us, renewed_at_us, lease_us, counters
FROM incarnation ORDER BY started_at_us, id;

-- name: claim
-- The claimant's own lease is locked, so that one that was superseded claims nothing afterwards.
WITH lease AS MATERIALIZED (
    SELECT 1 FROM incarnation WHERE id = %(me)s AND state = 'alive' FOR SHARE
), free AS MATERIALIZED (
    SELECT b.number FROM batch b LEFT JOIN incarnation i ON i.id = b.owner
    WHERE b.partition = %(partition)s AND b.state <> 'done' AND (b.owner IS NULL OR i.state <> 'alive')
    ORDER BY b.number LIMIT %(most)s FOR UPDATE OF b SKIP LOCKED
)
UPDATE batch SET owner = %(me)s, state = 'claimed', started = started + 1
WHERE number IN (SELECT number FROM free) AND EXISTS (SELECT FROM lease)
    -- Said again, for a row that changed after this statement's snapshot is judged by this alone.
    AND state <> 'done' AND (owner IS NULL OR owner IN (SELECT id FROM incarnation WHERE state <> 'alive'))
RETURNING number, first_row, rows, started - 1, late;

-- name: fullest
-- Partitions that have something to give, the largest remaining first.
SELECT b.partition FROM batch b LEFT JOIN incarnation i ON i.id = b.owner
WHERE b.state <> 'done' AND (b.owner IS NULL OR i.state <> 'alive')
GROUP BY b.partition ORDER BY sum(b.rows) DESC, b.partition;

-- name: unfinished
SELECT count(*) FROM batch b JOIN incarnation i ON i.id = b.owner
WHERE b.state = 'claimed' AND i.state = 'alive' AND i.id <> %s;

-- name: mine
SELECT number, first_row, rows, started - 1, late FROM batch WHERE owner = %s AND state = 'claimed' ORDER BY number;

-- name: begun
SELECT number, first_row, rows, started FROM batch
WHERE partition = %s AND state <> 'done' AND started > 0 ORDER BY number;

-- name: owners
SELECT number, owner FROM batch WHERE partition = %s AND state <> 'done' AND owner IS NOT NULL;

-- name: done
UPDATE batch SET state = 'done' WHERE number = %s AND owner = %s;

-- name: done_unless_late
UPDATE batch SET state = 'done' WHERE number = %s AND owner = %s AND state = 'claimed' AND late = %s;

-- name: late
SELECT late FROM batch WHERE number = %s AND owner = %s AND state = 'claimed';

-- name: reopen
UPDATE batch SET late = late + 1, state = CASE state WHEN 'done' THEN 'pending' ELSE state END,
    owner = CASE state WHEN 'done' THEN NULL ELSE owner END
WHERE first_row <= %s AND first_row + rows > %s;

-- name: batch_states
SELECT partition, state, count(*), sum(rows)::bigint FROM batch GROUP BY partition, state ORDER BY partition, state;

-- name: batch_owners
SELECT b.number, b.partition, b.first_row, b.rows, b.state, b.owner, i.sender, i.state, b.started
FROM batch b LEFT JOIN incarnation i ON i.id = b.owner
WHERE b.state <> 'pending' OR b.started > 0 ORDER BY b.number;

-- name: decide
INSERT INTO decision (log_id, serial, row, what, who, at_us)
SELECT * FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::text[], %s::text[], %s::bigint[])
ON CONFLICT (log_id, serial) DO UPDATE SET what = excluded.what, who = excluded.who, at_us = excluded.at_us
WHERE decision.what <> 'resend';

-- name: decisions
SELECT log_id, serial, row, what, who, at_us FROM decision ORDER BY at_us, log_id, serial;

-- name: decisions_between
SELECT log_id, serial, row, what, who, at_us FROM decision WHERE row >= %s AND row < %s;

-- name: advance
-- Verdicts of rows in windows, windows that are born closed, and new windows: one statement, one commit.
-- The lease is locked FOR SHARE: whoever ends it waits for us, or we find it ended. Reports ask for no lease.
WITH lease AS MATERIALIZED (
    SELECT 1 FROM incarnation WHERE id = %(me)s AND state = 'alive' FOR SHARE
), told AS (
    SELECT * FROM unnest(%(r_id)s::uuid[], %(r_known)s::bytea[], %(r_verdicts)s::bytea[], %(r_details)s::bytea[],
        %(r_due)s::boolean[]) AS r (id, known, verdicts, details, is_due)
), reported AS (
    UPDATE win w SET
        verdicts = CASE WHEN w.verdicts = r.known THEN r.verdicts ELSE keep_first(w.verdicts, r.verdicts) END,
        details = CASE WHEN r.details = '' OR w.verdicts = r.verdicts THEN w.details ELSE w.details || r.details END
    FROM told r WHERE w.id = r.id
    RETURNING w.batch, r.is_due
), late AS (
    UPDATE batch b SET late = b.late + 1, state = CASE b.state WHEN 'done' THEN 'pending' ELSE b.state END,
        owner = CASE b.state WHEN 'done' THEN NULL ELSE b.owner END
    FROM (SELECT batch, bool_or(is_due) AS is_due FROM reported GROUP BY batch) r
    WHERE b.number = r.batch AND r.is_due AND (b.owner IS DISTINCT FROM %(me)s OR b.state = 'done')
), settled AS (
    INSERT INTO win (id, batch, at_us, log_length, log_seal, rows, verdicts, details)
    SELECT id, batch, wall_us(), 0, '', rows, verdicts, details
    FROM unnest(%(s_id)s::uuid[], %(s_batch)s::integer[], %(s_rows)s::bytea[], %(s_verdicts)s::bytea[],
        %(s_details)s::bytea[]) AS s (id, batch, rows, verdicts, details)
    ON CONFLICT (id) DO NOTHING
), asked AS MATERIALIZED (
    SELECT o.* FROM unnest(%(o_id)s::uuid[], %(o_batch)s::integer[], %(o_rows)s::bytea[], %(o_verdicts)s::bytea[],
        %(o_length)s::bigint[], %(o_seal)s::text[]) AS o (id, batch, rows, verdicts, log_length, log_seal)
    JOIN batch b ON b.number = o.batch AND b.owner = %(me)s AND b.state = 'claimed'
    WHERE EXISTS (SELECT FROM lease) AND (SELECT state FROM campaign) <> 'cancelled'
), opened AS (
    INSERT INTO win (id, batch, at_us, log_length, log_seal, rows, verdicts)
    SELECT id, batch, wall_us(), log_length, log_seal, rows, verdicts FROM asked
    ON CONFLICT (id) DO NOTHING
    RETURNING id
)
SELECT EXISTS (SELECT FROM lease), wall_us(), array(
    SELECT id FROM opened
    UNION ALL
    -- The answer to an earlier try was lost: it counts if the window is as it was made.
    SELECT w.id FROM win w JOIN asked o ON o.id = w.id AND o.verdicts = w.verdicts AND o.rows = w.rows
    WHERE NOT EXISTS (SELECT FROM decision d WHERE d.log_id = w.id::text)
);

-- name: entries
SELECT id, batch, at_us, log_length, log_seal, rows, verdicts, details FROM win WHERE batch = ANY (%s) ORDER BY id;

-- name: lock_done
SELECT 1 FROM batch WHERE number = %s AND state = 'done' FOR UPDATE;

-- name: entries_locked
SELECT id, batch, at_us, log_length, log_seal, rows, verdicts, details FROM win WHERE batch = %s ORDER BY id FOR UPDATE;

-- name: delete_windows
DELETE FROM win WHERE id = ANY (%s);

-- name: add_windows
INSERT INTO win (id, batch, at_us, log_length, log_seal, rows, verdicts, details)
SELECT * FROM unnest(%s::uuid[], %s::integer[], %s::bigint[], %s::bigint[], %s::text[], %s::bytea[], %s::bytea[], %s::bytea[]);

-- name: entries_of_log
SELECT id, batch, at_us, log_length, log_seal, rows, verdicts, details FROM win WHERE id BETWEEN %s AND %s ORDER BY id;

-- name: entries_after
SELECT id, batch, at_us, log_length, log_seal, rows, verdicts, details FROM win WHERE id > %s ORDER BY id LIMIT %s;

-- name: held_entries
SELECT id, batch, at_us, log_length, log_seal, rows, verdicts, details FROM win
WHERE position('\x00'::bytea IN verdicts) > 0 OR position('\x06'::bytea IN verdicts) > 0 ORDER BY id;

-- name: batches_by_number
SELECT number, first_row, rows, started, late FROM batch WHERE number = ANY (%s);

-- name: now
SELECT wall_us();

-- name: schema_2
DROP TABLE bucket, connections;
CREATE TABLE share (
    key text PRIMARY KEY,
    version bigint NOT NULL,
    body bytea NOT NULL
) WITH (fillfactor = 50);

-- name: read_shares
SELECT NULL, 0::bigint, NULL, wall_us() UNION ALL SELECT key, version, body, 0 FROM share WHERE key = ANY (%s);

-- name: swap_shares
INSERT INTO share (key, version, body) SELECT * FROM unnest(%s::text[], %s::bigint[], %s::bytea[]) AS s (key, version, body)
ON CONFLICT (key) DO UPDATE SET version = excluded.version, body = excluded.body
WHERE share.version = excluded.version - 1
RETURNING key;

-- name: lock_key
SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || %s, 7));

-- name: override
INSERT INTO override (scope, what, value, who, at_us, until_us) VALUES (%s, %s, %s, %s, wall_us(), %s)
ON CONFLICT (scope, what) DO UPDATE
SET value = excluded.value, who = excluded.who, at_us = excluded.at_us, until_us = excluded.until_us;

-- name: overrides
SELECT scope, what, value, who, at_us, until_us FROM override
WHERE until_us IS NULL OR until_us > wall_us() ORDER BY scope, what;
