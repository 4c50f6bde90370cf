-- The outbox in PostgreSQL: what applications write, and what the engine answers. outbox_postgres.py runs these by name.
-- It lies in the first schema of the search path, as a rule the application's own: a mail is part of its transaction.

-- name: schema
CREATE TABLE IF NOT EXISTS outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- what applications write
    priority smallint NOT NULL DEFAULT 3 CHECK (priority IN (1, 2, 3)),
    address text NOT NULL,
    template text,                                -- a template's name, or else subject with text or html
    fields jsonb NOT NULL DEFAULT '{}',
    subject text,
    text text,
    html text,
    headers jsonb NOT NULL DEFAULT '{}',
    attachments jsonb NOT NULL DEFAULT '[]',
    not_before_us bigint NOT NULL DEFAULT 0,      -- UTC microseconds since 1970; moved on by a retry
    expires_at_us bigint,
    idempotency_key text UNIQUE,
    created_at_us bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    -- what the engine writes
    state text NOT NULL DEFAULT 'queued',
    reason text,
    code integer,
    reply text,
    attempts integer NOT NULL DEFAULT 0,
    first_at_us bigint,
    token text,
    owner text,
    intent_at_us bigint,
    doubted text,                                 -- the token of an attempt in doubt that an operator resent
    changed_at_us bigint,
    CHECK (template IS NOT NULL OR (subject IS NOT NULL AND (text IS NOT NULL OR html IS NOT NULL)))
);
CREATE INDEX IF NOT EXISTS outbox_due ON outbox (priority, not_before_us, id) WHERE state IN ('queued', 'waiting');
CREATE INDEX IF NOT EXISTS outbox_held ON outbox (owner) WHERE state = 'sending';
CREATE TABLE IF NOT EXISTS outbox_server (
    id text PRIMARY KEY,
    kind text NOT NULL,                           -- serve: `engine serve-outbox`; send: beside a campaign
    sender text NOT NULL,
    host_id text NOT NULL,
    boot_id text NOT NULL,
    pid integer NOT NULL,
    state text NOT NULL DEFAULT 'alive',          -- alive, ended, superseded
    started_at_us bigint NOT NULL,
    renewed_at_us bigint NOT NULL,
    lease_us bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS outbox_knob (name text PRIMARY KEY, value text NOT NULL);
CREATE OR REPLACE FUNCTION outbox_tell() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('rowpost_outbox', '');
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER outbox_tell AFTER INSERT ON outbox FOR EACH STATEMENT EXECUTE FUNCTION outbox_tell();

-- name: is_there
SELECT to_regclass('outbox') IS NOT NULL AND to_regclass('outbox_knob') IS NOT NULL;

-- name: enqueue
INSERT INTO outbox (priority, address, template, fields, subject, text, html, headers, attachments,
                    not_before_us, expires_at_us, idempotency_key)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (idempotency_key) DO NOTHING
RETURNING id;

-- name: known
SELECT id FROM outbox WHERE idempotency_key = %s;

-- name: now_us
SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint;

-- name: claim
WITH due AS MATERIALIZED (
    SELECT id FROM outbox
    WHERE state IN ('queued', 'waiting') AND priority = %(priority)s AND not_before_us <= (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
    ORDER BY not_before_us, id LIMIT %(most)s
    FOR UPDATE SKIP LOCKED)
UPDATE outbox SET state = 'sending', token = %(token)s, owner = %(owner)s, intent_at_us = NULL, changed_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
FROM due WHERE outbox.id = due.id
RETURNING outbox.id, priority, address, template, fields::text, subject, text, html, headers::text, attachments::text,
          expires_at_us, attempts, first_at_us, created_at_us, token, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint;

-- name: intend
UPDATE outbox SET intent_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint, first_at_us = coalesce(first_at_us, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint), changed_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
FROM unnest(%s::bigint[], %s::text[]) AS mine (id, token)
WHERE outbox.id = mine.id AND outbox.token = mine.token AND outbox.state = 'sending'
RETURNING outbox.id;

-- name: report
UPDATE outbox SET state = %(state)s, reason = %(reason)s, code = %(code)s, reply = %(reply)s,
    attempts = greatest(attempts, %(attempts)s),
    not_before_us = CASE WHEN %(is_open)s THEN (extract(epoch FROM statement_timestamp()) * 1000000)::bigint + %(wait_us)s::bigint ELSE not_before_us END,
    first_at_us = CASE WHEN %(begun)s THEN coalesce(first_at_us, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) ELSE first_at_us END,
    token = CASE WHEN %(is_open)s THEN NULL ELSE token END,
    owner = CASE WHEN %(is_open)s THEN NULL ELSE owner END,
    changed_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
WHERE id = %(id)s AND (
    (token = %(token)s AND (state = 'sending' OR (state = 'in_doubt' AND %(state)s <> 'in_doubt')))
    OR (doubted = %(token)s AND state IN ('queued', 'waiting') AND %(state)s = 'accepted'));

-- name: join
INSERT INTO outbox_server (id, kind, sender, host_id, boot_id, pid, started_at_us, renewed_at_us, lease_us)
VALUES (%s, %s, %s, %s, %s, %s, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint, %s);

-- name: renew
UPDATE outbox_server SET renewed_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint WHERE id = %s AND state = 'alive';

-- name: leave
UPDATE outbox_server SET state = 'ended', renewed_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint WHERE id = %s AND state = 'alive';

-- name: supersede
UPDATE outbox_server SET state = 'superseded' WHERE id = %s AND state = 'alive';

-- name: servers
SELECT id, kind, sender, host_id, boot_id, pid, state, started_at_us, renewed_at_us, lease_us
FROM outbox_server ORDER BY started_at_us, id;

-- name: held
SELECT id, token, owner, intent_at_us IS NOT NULL, attempts FROM outbox WHERE state = 'sending' AND owner = %s;

-- name: owners
SELECT DISTINCT owner FROM outbox WHERE state = 'sending';

-- name: release
UPDATE outbox SET state = CASE WHEN attempts > 0 THEN 'waiting' ELSE 'queued' END, token = NULL, owner = NULL,
    changed_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
WHERE state = 'sending' AND owner = %s AND intent_at_us IS NULL;

-- name: resend
UPDATE outbox SET state = 'queued', doubted = coalesce(token, doubted), token = NULL, owner = NULL,
    not_before_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint, reason = NULL, changed_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
WHERE id = ANY(%s) AND state IN ('in_doubt', 'invalid', 'unsent', 'deferred');

-- name: accept
UPDATE outbox SET state = 'accepted', reason = 'by operator', changed_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
WHERE id = ANY(%s) AND state = 'in_doubt';

-- name: cancel
UPDATE outbox SET state = 'unsent', reason = 'cancelled', changed_at_us = (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
WHERE id = ANY(%s) AND state IN ('queued', 'waiting');

-- name: tally
SELECT priority, state, coalesce(reason, ''), count(*), min(created_at_us) FROM outbox GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;

-- name: rows
SELECT id, priority, address, template, state, reason, code, reply, attempts, not_before_us, created_at_us,
       changed_at_us, idempotency_key
FROM outbox WHERE (%(state)s::text IS NULL OR state = %(state)s) AND id > %(after)s ORDER BY id LIMIT %(most)s;

-- name: forget
DELETE FROM outbox WHERE state NOT IN ('queued', 'waiting', 'sending', 'in_doubt') AND changed_at_us < %s;

-- name: knobs
SELECT name, value FROM outbox_knob;

-- name: set_knob
INSERT INTO outbox_knob (name, value) VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value;
