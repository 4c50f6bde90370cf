-- The control store of one machine, in the campaign folder. Each statement has a name; sqlite.py runs them by it.

-- name: schema
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS campaign (
    id TEXT PRIMARY KEY,
    plan_fingerprint TEXT NOT NULL,
    rows INTEGER NOT NULL,
    partitions INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'ready',          -- ready, paused, cancelled
    loaded_at_us INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS incarnation (
    id TEXT PRIMARY KEY,
    sender TEXT NOT NULL,
    host_id TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    pid INTEGER NOT NULL,
    partition INTEGER,
    state TEXT NOT NULL,                          -- alive, ended, superseded
    started_at_us INTEGER NOT NULL,
    renewed_at_us INTEGER NOT NULL,
    lease_us INTEGER NOT NULL,
    superseded_by TEXT,
    counters TEXT NOT NULL DEFAULT '{}'
) STRICT;
CREATE TABLE IF NOT EXISTS batch (
    number INTEGER PRIMARY KEY,
    partition INTEGER NOT NULL,
    first_row INTEGER NOT NULL,
    rows INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending',        -- pending, claimed, done
    owner TEXT REFERENCES incarnation (id),
    started INTEGER NOT NULL DEFAULT 0            -- how often it was claimed
) STRICT;
CREATE INDEX IF NOT EXISTS batch_open ON batch (partition, number) WHERE state <> 'done';
CREATE TABLE IF NOT EXISTS decision (
    log_id TEXT NOT NULL,
    serial INTEGER NOT NULL,
    row INTEGER NOT NULL,
    what TEXT NOT NULL,                           -- resend, accept
    who TEXT NOT NULL,
    at_us INTEGER NOT NULL,
    PRIMARY KEY (log_id, serial)
) STRICT;
CREATE TABLE IF NOT EXISTS override (             -- an operator's word that the sender obeys within a second
    scope TEXT NOT NULL,                          -- provider:NAME
    what TEXT NOT NULL,                           -- connections, per_second
    value TEXT NOT NULL,
    who TEXT NOT NULL,
    at_us INTEGER NOT NULL,
    until_us INTEGER,
    PRIMARY KEY (scope, what)
) STRICT;
CREATE TABLE IF NOT EXISTS share (                -- limits that senders share: pace.commons.Table, as JSON
    key TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;

-- name: add_campaign
INSERT INTO campaign (id, plan_fingerprint, rows, partitions, loaded_at_us) VALUES (?, ?, ?, ?, ?);

-- name: add_batch
INSERT INTO batch (number, partition, first_row, rows) VALUES (?, ?, ?, ?);

-- name: campaign
SELECT id, plan_fingerprint, rows, partitions, state FROM campaign;

-- name: set_campaign_state
UPDATE campaign SET state = ?;

-- name: register
INSERT INTO incarnation (id, sender, host_id, boot_id, pid, partition, state, started_at_us, renewed_at_us, lease_us)
VALUES (?, ?, ?, ?, ?, ?, 'alive', ?, ?, ?);

-- name: renew
UPDATE incarnation SET renewed_at_us = ?, counters = ? WHERE id = ? AND state = 'alive';

-- name: leave
UPDATE incarnation SET state = 'ended', renewed_at_us = ?, counters = ? WHERE id = ? AND state = 'alive';

-- name: supersede
UPDATE incarnation SET state = 'superseded', superseded_by = ? WHERE id = ? AND state = 'alive';

-- name: incarnations
SELECT id, sender, host_id, boot_id, pid, partition, state, started_at_us, renewed_at_us, lease_us, counters
FROM incarnation ORDER BY started_at_us, id;

-- name: claimable
SELECT b.number, b.first_row, b.rows, b.started
FROM batch b LEFT JOIN incarnation i ON i.id = b.owner
WHERE b.partition = ? AND b.state <> 'done' AND (b.owner IS NULL OR i.state <> 'alive')
ORDER BY b.number LIMIT ?;

-- name: take
UPDATE batch SET owner = ?, state = 'claimed', started = started + 1
WHERE number = ? AND state <> 'done'
  AND (owner IS NULL OR (SELECT state FROM incarnation WHERE id = batch.owner) <> 'alive')
  AND (SELECT state FROM incarnation WHERE id = ?) = 'alive';

-- name: begun
SELECT number, first_row, rows, started FROM batch
WHERE partition = ? AND state <> 'done' AND started > 0 ORDER BY number;

-- name: done
UPDATE batch SET state = 'done' WHERE number = ? AND owner = ?;

-- name: reopen
UPDATE batch SET state = 'pending' WHERE first_row <= ? AND first_row + rows > ? AND state = 'done';

-- name: batch_states
SELECT partition, state, count(*), sum(rows) FROM batch GROUP BY partition, state ORDER BY partition, state;

-- name: owners
SELECT number, owner FROM batch WHERE partition = ? AND state <> 'done' AND owner IS NOT NULL;

-- name: decide
INSERT INTO decision (log_id, serial, row, what, who, at_us) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (log_id, serial) DO UPDATE SET what = excluded.what, who = excluded.who, at_us = excluded.at_us
WHERE decision.what <> 'resend';

-- name: decisions
SELECT log_id, serial, row, what, who, at_us FROM decision ORDER BY at_us, log_id, serial;

-- name: override
INSERT INTO override (scope, what, value, who, at_us, until_us)
VALUES (?, ?, ?, ?, CAST(strftime('%s', 'now') AS INTEGER) * 1000000, ?)
ON CONFLICT (scope, what) DO UPDATE
SET value = excluded.value, who = excluded.who, at_us = excluded.at_us, until_us = excluded.until_us;

-- name: overrides
SELECT scope, what, value, who, at_us, until_us FROM override
WHERE until_us IS NULL OR until_us > CAST(strftime('%s', 'now') AS INTEGER) * 1000000 ORDER BY scope, what;

-- name: read_shares
SELECT key, version, body FROM share WHERE key IN (:keys);

-- name: swap_share
INSERT INTO share (key, version, body) VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET version = excluded.version, body = excluded.body
WHERE share.version = excluded.version - 1;
