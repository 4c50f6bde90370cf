"""Batches in the API, for workers in other languages: claim, and tell progress. `engine.web.batches` does it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from engine.web import batches
from engine.web.batch_bodies import Claim, Claimed, Progress, Progressed
from engine.web.operation import ACT_REFUSALS, Operation, Site


def _claim(site: Site, request: Request, body: Claim) -> Claimed:
    return batches.claim(site.watched(body.campaign).campaign, body)


def _progress(site: Site, request: Request, body: Progress) -> Response:
    number = batches.batch_of(request)
    return batches.respond(batches.progress(site.watched(body.campaign).campaign, number, body))


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/batches/claim",
        name="claim",
        handler=_claim,
        summary="Claim batches; without an incarnation, register one",
        body=Claim,
        answer=Claimed,
        refusals=ACT_REFUSALS,
    ),
    Operation(
        method="POST",
        path="/batches/{batch}/progress",
        name="progress",
        handler=_progress,
        summary="Report verdicts and open a window with the next rows; 409: attempt nothing of them",
        body=Progress,
        answer=Progressed,
        refusals=ACT_REFUSALS,
    ),
)
