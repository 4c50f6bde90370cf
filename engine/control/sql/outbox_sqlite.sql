-- The outbox in SQLite: what applications write, and what the engine answers. outbox_sqlite.py runs these by name.
-- It may lie in a file of its own or in the application's own database: then a mail is part of its transaction.

-- name: schema
CREATE TABLE IF NOT EXISTS outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    -- what applications write
    priority INTEGER NOT NULL DEFAULT 3 CHECK (priority IN (1, 2, 3)),
    address TEXT NOT NULL,
    template TEXT,                                -- a template's name, or else subject with text or html
    fields TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(fields)),
    subject TEXT,
    text TEXT,
    html TEXT,
    headers TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(headers)),
    attachments TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(attachments)),
    not_before_us INTEGER NOT NULL DEFAULT 0,     -- UTC microseconds since 1970; moved on by a retry
    expires_at_us INTEGER,
    idempotency_key TEXT UNIQUE,
    created_at_us INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)),
    -- what the engine writes
    state TEXT NOT NULL DEFAULT 'queued',
    reason TEXT,
    code INTEGER,
    reply TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    first_at_us INTEGER,
    token TEXT,
    owner TEXT,
    intent_at_us INTEGER,
    doubted TEXT,                                 -- the token of an attempt in doubt that an operator resent
    changed_at_us INTEGER,
    CHECK (template IS NOT NULL OR (subject IS NOT NULL AND (text IS NOT NULL OR html IS NOT NULL)))
) STRICT;
CREATE INDEX IF NOT EXISTS outbox_due ON outbox (priority, not_before_us, id) WHERE state IN ('queued', 'waiting');
CREATE INDEX IF NOT EXISTS outbox_held ON outbox (owner) WHERE state = 'sending';
CREATE TABLE IF NOT EXISTS outbox_server (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,                           -- serve: `engine serve-outbox`; send: beside a campaign
    sender TEXT NOT NULL,
    host_id TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    pid INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'alive',          -- alive, ended, superseded
    started_at_us INTEGER NOT NULL,
    renewed_at_us INTEGER NOT NULL,
    lease_us INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS outbox_knob (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;

-- name: enqueue
INSERT INTO outbox (priority, address, template, fields, subject, text, html, headers, attachments,
                    not_before_us, expires_at_us, idempotency_key)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (idempotency_key) DO NOTHING
RETURNING id;

-- name: known
SELECT id FROM outbox WHERE idempotency_key = ?;

-- name: is_due
SELECT EXISTS (SELECT 1 FROM outbox WHERE state IN ('queued', 'waiting') AND priority = ? AND not_before_us <= ?);

-- name: claim
UPDATE outbox SET state = 'sending', token = ?1, owner = ?2, intent_at_us = NULL, changed_at_us = ?5
WHERE id IN (
    SELECT id FROM outbox
    WHERE state IN ('queued', 'waiting') AND priority = ?3 AND not_before_us <= ?5
    ORDER BY not_before_us, id LIMIT ?4)
RETURNING id, priority, address, template, fields, subject, text, html, headers, attachments, expires_at_us,
          attempts, first_at_us, created_at_us, token, ?5;

-- name: intend
UPDATE outbox SET intent_at_us = ?1, first_at_us = coalesce(first_at_us, ?1), changed_at_us = ?1
FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS token FROM json_each(?2)) AS mine
WHERE outbox.id = mine.id AND outbox.token = mine.token AND outbox.state = 'sending'
RETURNING outbox.id;

-- name: report
UPDATE outbox SET state = :state, reason = :reason, code = :code, reply = :reply,
    attempts = max(attempts, :attempts),
    not_before_us = CASE WHEN :state IN ('queued', 'waiting') THEN :now_us + :wait_us ELSE not_before_us END,
    first_at_us = CASE WHEN :begun THEN coalesce(first_at_us, :now_us) ELSE first_at_us END,
    token = CASE WHEN :state IN ('queued', 'waiting') THEN NULL ELSE token END,
    owner = CASE WHEN :state IN ('queued', 'waiting') THEN NULL ELSE owner END,
    changed_at_us = :now_us
WHERE id = :id AND (
    (token = :token AND state IN ('sending', 'in_doubt') AND NOT (state = 'in_doubt' AND :state = 'in_doubt'))
    OR (doubted = :token AND state IN ('queued', 'waiting') AND :state = 'accepted'));

-- name: join
INSERT INTO outbox_server (id, kind, sender, host_id, boot_id, pid, started_at_us, renewed_at_us, lease_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: renew
UPDATE outbox_server SET renewed_at_us = ? WHERE id = ? AND state = 'alive';

-- name: leave
UPDATE outbox_server SET state = 'ended', renewed_at_us = ? WHERE id = ? AND state = 'alive';

-- name: supersede
UPDATE outbox_server SET state = 'superseded' WHERE id = ? AND state = 'alive';

-- name: servers
SELECT id, kind, sender, host_id, boot_id, pid, state, started_at_us, renewed_at_us, lease_us
FROM outbox_server ORDER BY started_at_us, id;

-- name: held
SELECT id, token, owner, intent_at_us IS NOT NULL, attempts FROM outbox WHERE state = 'sending' AND owner = ?;

-- name: owners
SELECT DISTINCT owner FROM outbox WHERE state = 'sending';

-- name: release
UPDATE outbox SET state = CASE WHEN attempts > 0 THEN 'waiting' ELSE 'queued' END, token = NULL, owner = NULL,
    changed_at_us = ?
WHERE state = 'sending' AND owner = ? AND intent_at_us IS NULL;

-- name: resend
UPDATE outbox SET state = 'queued', doubted = coalesce(token, doubted), token = NULL, owner = NULL, not_before_us = ?1,
    reason = NULL, changed_at_us = ?1
WHERE id = ?2 AND state IN ('in_doubt', 'invalid', 'unsent', 'deferred');

-- name: accept
UPDATE outbox SET state = 'accepted', reason = 'by operator', changed_at_us = ? WHERE id = ? AND state = 'in_doubt';

-- name: cancel
UPDATE outbox SET state = 'unsent', reason = 'cancelled', changed_at_us = ?
WHERE id = ? AND state IN ('queued', 'waiting');

-- name: tally
SELECT priority, state, coalesce(reason, ''), count(*), min(created_at_us) FROM outbox GROUP BY 1, 2, 3;

-- name: rows
SELECT id, priority, address, template, state, reason, code, reply, attempts, not_before_us, created_at_us,
       changed_at_us, idempotency_key
FROM outbox WHERE (?1 IS NULL OR state = ?1) AND id > ?2 ORDER BY id LIMIT ?3;

-- name: forget
DELETE FROM outbox WHERE state NOT IN ('queued', 'waiting', 'sending', 'in_doubt') AND changed_at_us < ?;

-- name: knobs
SELECT name, value FROM outbox_knob;

-- name: set_knob
INSERT INTO outbox_knob (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value;
