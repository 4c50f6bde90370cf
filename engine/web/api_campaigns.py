"""Campaigns in the API: what they are, make one, start a sender of it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from engine.errors import EngineError
from engine.results.report import NoReport, read_summary
from engine.web.actions import Action, recorded
from engine.web.creating import NewCampaign, create
from engine.web.events import MOST_VIEWERS
from engine.web.operation import ACT_REFUSALS, Operation, Site
from engine.web.problems import Refused
from engine.web.shelf import Watched
from engine.web.snapshot import MachineView, Snapshot
from engine.web.starting import start


class CampaignLine(msgspec.Struct, frozen=True, kw_only=True):
    """One campaign in a list."""

    key: str
    id: str
    state: str
    rows: int
    accepted: int
    left: int
    per_second: float
    finish_s: float | None
    problem: str = ""


class Campaigns(msgspec.Struct, frozen=True):
    """All campaigns of this server."""

    campaigns: list[CampaignLine]


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to send, and with how many processes; by default partition 0 and one process per core."""

    partition: Annotated[int, msgspec.Meta(ge=0, le=9_999)] = 0
    processes: Annotated[int, msgspec.Meta(ge=1, le=512)] | None = None


class Started(msgspec.Struct, frozen=True):
    """A sender runs."""

    pid: int
    partition: int
    recorded: Action


class Machines(msgspec.Struct, frozen=True):
    machines: list[MachineView]


class Events(msgspec.Struct, frozen=True):
    """What senders told, the latest first."""

    events: list[dict[str, Any]]


class Actions(msgspec.Struct, frozen=True):
    """What people did, the latest first."""

    actions: list[Action]


class Series(msgspec.Struct, frozen=True):
    """The last half hour: seconds before now, accepted a second, share of answers "later"."""

    ago_s: list[float]
    per_second: list[float]
    later_share: list[float]


def _campaigns(site: Site, request: Request) -> Campaigns:
    return Campaigns([_line(one, one.glance()) for one in site.shelf.all()])


def _campaign(site: Site, request: Request) -> Snapshot:
    return site.named(request).look()


def _machines(site: Site, request: Request) -> Machines:
    return Machines(site.named(request).look().machines)


def _events(site: Site, request: Request) -> Events:
    return Events(site.named(request).look().events)


def _actions(site: Site, request: Request) -> Actions:
    return Actions(recorded(site.named(request).campaign))


def _history(site: Site, request: Request) -> Series:
    return Series(**site.named(request).history.series(request.query_params.get("provider")))


def _report(site: Site, request: Request) -> Any:
    folder = site.named(request).campaign.report
    try:
        return read_summary(folder)
    except NoReport:
        raise Refused(404, "there is no report yet", "engine merge-logs writes it") from None


async def _stream(site: Site, request: Request) -> Response:
    watched = await run_in_threadpool(site.named, request)
    if site.round.viewers >= MOST_VIEWERS:
        raise Refused(503, "too many pages look at this server", headers={"Retry-After": "30"})
    return StreamingResponse(
        site.round.stream(watched), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
    )


def _create(site: Site, request: Request, body: NewCampaign) -> CampaignLine:
    key = create(site.shelf, site.lists, body)
    watched = site.shelf.get(key)
    if watched is None:
        raise Refused(409, "the campaign's folder is gone")
    site.acts(request, watched).record("create", on=watched.id)
    return _line(watched, watched.look(fresh=True))


def _start(site: Site, request: Request, body: Start) -> Started:
    watched = site.named(request)
    plan = watched.campaign.plan()
    if body.partition >= len(plan.partitions):
        raise Refused(422, f"the plan has {len(plan.partitions)} partitions, numbered from 0")
    state = watched.look(fresh=True).state
    if state in ("finished", "cancelled"):
        raise Refused(409, f"the campaign is {state}")

    def living() -> set[tuple[int | None, int]]:
        machines = watched.look(fresh=True).machines
        return {(one.partition, one.pid) for one in machines if one.state == "sending"}

    acts = site.acts(request, watched)
    action = acts.record("start", on=f"partition {body.partition}")
    try:
        pid = start(watched.campaign, body.partition, body.processes, living)
    except (Refused, EngineError, OSError) as problem:
        acts.record("start", on=f"partition {body.partition}", failed=str(problem))
        raise
    return Started(pid, body.partition, action)


def _line(watched: Watched, snapshot: Snapshot) -> CampaignLine:
    return CampaignLine(
        key=watched.key,
        id=snapshot.id,
        state=snapshot.state,
        rows=snapshot.rows,
        accepted=snapshot.accepted,
        left=snapshot.left,
        per_second=snapshot.per_second,
        finish_s=snapshot.finish_s,
        problem=watched.problem,
    )


_ONE = "/campaigns/{campaign}"
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path="/campaigns",
        name="campaigns",
        handler=_campaigns,
        summary="All campaigns here",
        answer=Campaigns,
    ),
    Operation(
        method="POST",
        path="/campaigns",
        name="create",
        handler=_create,
        summary="Make and plan a campaign of a template and a list",
        body=NewCampaign,
        answer=CampaignLine,
        status=201,
        refusals=ACT_REFUSALS,
    ),
    Operation(
        method="GET",
        path=_ONE,
        name="campaign",
        handler=_campaign,
        summary="Counts by state, rates, estimated finish, providers, machines",
        answer=Snapshot,
        refusals=(404,),
    ),
    Operation(
        method="GET",
        path=_ONE + "/stream",
        name="stream",
        handler=_stream,
        is_endpoint=True,
        summary="The same as server-sent events, once a second while something changes",
        media="text/event-stream",
        refusals=(404, 503),
    ),
    Operation(
        method="GET",
        path=_ONE + "/history",
        name="history",
        handler=_history,
        summary="Rate and share of deferrals over the last half hour",
        answer=Series,
        refusals=(404,),
        query=(("provider", False, "Of one provider; of all by default."),),
    ),
    Operation(
        method="GET",
        path=_ONE + "/machines",
        name="machines",
        handler=_machines,
        summary="Senders and leases",
        answer=Machines,
        refusals=(404,),
    ),
    Operation(
        method="GET",
        path=_ONE + "/events",
        name="events",
        handler=_events,
        summary="What happened",
        answer=Events,
        refusals=(404,),
    ),
    Operation(
        method="GET",
        path=_ONE + "/actions",
        name="actions",
        handler=_actions,
        summary="Who did what",
        answer=Actions,
        refusals=(404,),
    ),
    Operation(
        method="GET",
        path=_ONE + "/report",
        name="report",
        handler=_report,
        summary="What `engine merge-logs` wrote: summary.json",
        answer=dict,
        refusals=(404, 422),
    ),
    Operation(
        method="POST",
        path=_ONE + "/start",
        name="start",
        handler=_start,
        summary="Start a sender of one partition on this machine",
        body=Start,
        answer=Started,
        status=202,
        refusals=ACT_REFUSALS,
    ),
)
