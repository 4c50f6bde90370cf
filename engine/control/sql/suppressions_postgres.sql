-- Who must not be written to, for all campaigns of a database, in a schema of its own: planning a campaign anew does
-- not touch it. Entries are only ever added; `forget` alone takes some away.

-- name: schema
CREATE SCHEMA IF NOT EXISTS "rowpost-suppression";
CREATE TABLE IF NOT EXISTS "rowpost-suppression".entry (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    address text NOT NULL,                          -- canonical, or a keyed hash (formats.suppression)
    scope text NOT NULL,
    reason text NOT NULL,
    source text NOT NULL,
    at_us bigint NOT NULL,
    lifted boolean NOT NULL,
    UNIQUE (address, scope, at_us, lifted)          -- the same entry said again is the same entry
);
CREATE TABLE IF NOT EXISTS "rowpost-suppression".secret (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    name text NOT NULL,                             -- of this table: a folder knows by it what it has exchanged with whom
    key bytea NOT NULL                              -- behind the hashes of the forgotten
);

-- name: exists
SELECT to_regclass('"rowpost-suppression".secret') IS NOT NULL;

-- name: lock
-- Entries become visible in the order of their ids: whoever has read up to one has read all before it.
SELECT pg_advisory_xact_lock(hashtextextended('rowpost-suppression', 1));

-- name: keep_secret
INSERT INTO "rowpost-suppression".secret (name, key) VALUES (%s, %s) ON CONFLICT DO NOTHING;

-- name: secret
SELECT name, key FROM "rowpost-suppression".secret;

-- name: add
INSERT INTO "rowpost-suppression".entry (address, scope, reason, source, at_us, lifted)
SELECT address, scope, reason, source, at_us, lifted
FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::bigint[], %s::boolean[])
    WITH ORDINALITY AS e (address, scope, reason, source, at_us, lifted, place)
ORDER BY place
ON CONFLICT DO NOTHING;

-- name: after
SELECT id, address, scope, reason, source, at_us, lifted FROM "rowpost-suppression".entry
WHERE id > %s ORDER BY id LIMIT %s;

-- name: erase
DELETE FROM "rowpost-suppression".entry WHERE address = ANY (%s);

-- name: erase_older
DELETE FROM "rowpost-suppression".entry e
WHERE at_us < %s AND id <= %s AND position('@' IN address) > 0 AND NOT EXISTS (
    SELECT FROM "rowpost-suppression".entry l WHERE l.address = e.address AND l.scope = e.scope AND l.lifted);
