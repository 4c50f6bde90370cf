"""The OpenAPI 3.1 document of the API, written from the table of operations and the structs they take and give."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine import __version__
from engine.web.api import OPERATIONS
from engine.web.idempotency import MAX_KEY
from engine.web.operation import Operation
from engine.web.problems import Problem

BASE = "/api/v1"
_PARAMETER = re.compile(r"{(\w+)}")
_WORDS = {
    400: "The request is malformed",
    401: "A token is needed",
    403: "The request does not come from our own page",
    404: "There is no such thing",
    408: "The body came too slowly",
    409: "It does not fit the present state, or the lease is lost",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "The server is not known by that name",
    422: "The request says what is not possible; `detail` says what",
    429: "Too many requests",
    503: "Not possible now; try again",
}
_ALWAYS = (401, 421, 429)


def document(operations: tuple[Operation, ...] = OPERATIONS) -> dict[str, Any]:
    """The whole document."""
    types: list[Any] = [Problem]
    types += [kind for o in operations for kind in (o.body, o.answer) if kind is not None and kind is not dict]
    unique = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    known = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, known)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rowpost",
            "version": __version__,
            "description": "Campaigns, senders, the outbox and suppressions of one rowpost server.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": BASE}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, known: dict[Any, Any]) -> dict[str, Any]:
    refusals = sorted({*operation.refusals, *_ALWAYS})
    problem = {"application/problem+json": {"schema": known[Problem]}}
    schema = {"type": "string"} if operation.answer is None else known.get(operation.answer, {"type": "object"})
    responses: dict[str, Any] = {
        str(operation.status): {"description": operation.summary, "content": {operation.media: {"schema": schema}}}
    }
    responses |= {str(code): {"description": _WORDS[code], "content": problem} for code in refusals}
    told: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": responses,
        "parameters": [_path_parameter(name) for name in _PARAMETER.findall(operation.path)],
    }
    told["parameters"] += [
        {"name": name, "in": "query", "required": needed, "description": words, "schema": {"type": "string"}}
        for name, needed, words in operation.query
    ]
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": known[operation.body]}}}
        told["parameters"].append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "Repeated under the same key within a day, the request is done once.",
                "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY, "pattern": "^[A-Za-z0-9_.-]+$"},
            }
        )
    return told


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
