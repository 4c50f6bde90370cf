"""The JSON API, under /api/v1. Bodies are JSON, errors are problems (RFC 9457), POSTs take `Idempotency-Key`.

Each route is an `Operation`: `engine.web.openapi` writes the document of the same table, so that the two agree.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from engine.campaign import Campaign
from engine.clock import Clock
from engine.control.outbox import Enqueued, Mail
from engine.errors import EngineError
from engine.lists.suppressions import Suppressions
from engine.outbox import open_outbox
from engine.results.report import NoReport, read_summary
from engine.web import batches
from engine.web.actions import Action, Acts, recorded
from engine.web.auth import Person
from engine.web.creating import NewCampaign, create
from engine.web.events import MOST_VIEWERS, Round
from engine.web.guard import client_of
from engine.web.idempotency import MAX_KEY, Memory
from engine.web.problems import Refused, of_engine_error, problem_response
from engine.web.shelf import Shelf, Watched
from engine.web.snapshot import MachineView, Snapshot
from engine.web.starting import start
from formats.address import AddressError, canonical, parse_mailbox
from formats.suppression import Entry, Reason

T = TypeVar("T")


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


class Slow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most so much to a provider; nothing at all lifts it. `for_s`: for so many seconds."""

    connections: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    per_second: Annotated[float, msgspec.Meta(ge=0.01, le=1_000_000)] | None = None
    for_s: Annotated[float, msgspec.Meta(ge=1, le=31_536_000)] | None = None


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object."""


class Started(msgspec.Struct, frozen=True):
    """A sender runs."""

    pid: int
    partition: int
    recorded: Action


class Done(msgspec.Struct, frozen=True):
    """The act is recorded and in the store; senders obey within a second."""

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


Address = Annotated[str, msgspec.Meta(min_length=3, max_length=320)]


class NewSuppressions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses that must not be written to; `everywhere` for all lists, else the campaign's own list."""

    addresses: Annotated[list[Address], msgspec.Meta(min_length=1, max_length=10_000)]
    reason: Reason = Reason.MANUAL
    everywhere: bool = False


ShortText = Annotated[str, msgspec.Meta(min_length=1, max_length=998)]


class NewMail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mail: a template with fields, or a subject with text or html. Priority 1 is sign-up, 2 notification."""

    address: Address
    priority: Annotated[int, msgspec.Meta(ge=1, le=3)] = 3
    template: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    fields: dict[str, Any] = {}
    subject: ShortText | None = None
    text: Annotated[str, msgspec.Meta(max_length=1_000_000)] | None = None
    html: Annotated[str, msgspec.Meta(max_length=1_000_000)] | None = None
    not_before_us: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    expires_at_us: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    idempotency_key: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None


class Added(msgspec.Struct, frozen=True):
    """How many were new. Senders obey within a second."""

    added: int


class Suppressed(msgspec.Struct, frozen=True):
    """Whether the campaign would leave the address out."""

    address: str
    is_suppressed: bool


class Enqueue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mails for the outbox; all are added, or none. One with an idempotency key that is known is not added again."""

    mails: Annotated[list[NewMail], msgspec.Meta(min_length=1, max_length=1_000)]


class EnqueuedMails(msgspec.Struct, frozen=True):
    """The rows of the mails, in their order."""

    mails: list[Enqueued]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One route."""

    method: str
    path: str  # below /api/v1
    name: str
    summary: str
    body: type | None = None
    answer: Any = None  # a type; None: not JSON
    media: str = "application/json"
    status: int = 200
    refusals: tuple[int, ...] = ()
    query: tuple[tuple[str, bool, str], ...] = ()  # name, needed, description


class Api:
    """The handlers, by the operation's name."""

    def __init__(
        self, shelf: Shelf, round_: Round, memory: Memory, clock: Clock, lists: Path, outbox: str | None = None
    ) -> None:
        self._outbox = outbox
        self._shelf, self._round, self._memory, self._clock, self._lists = shelf, round_, memory, clock, lists

    def watched(self, request: Request) -> Watched:
        """The campaign that the path names; raises Refused."""
        found = self._shelf.get(request.path_params["campaign"])
        if found is None:
            raise Refused(404, "there is no such campaign here")
        return found

    def acts(self, request: Request, watched: Watched) -> Acts:
        return Acts(watched.campaign, self._clock, person_of(request).name, client_of(request))

    # -- reading ---------------------------------------------------------------------------------------------------

    def campaigns(self, request: Request) -> Campaigns:
        return Campaigns([_line(one, one.glance()) for one in self._shelf.all()])

    def campaign(self, request: Request) -> Snapshot:
        return self.watched(request).look()

    def machines(self, request: Request) -> Machines:
        return Machines(self.watched(request).look().machines)

    def events(self, request: Request) -> Events:
        return Events(self.watched(request).look().events)

    def actions(self, request: Request) -> Actions:
        return Actions(recorded(self.watched(request).campaign))

    def history(self, request: Request) -> Series:
        return Series(**self.watched(request).history.series(request.query_params.get("provider")))

    def report(self, request: Request) -> Any:
        folder = self.watched(request).campaign.report
        try:
            return read_summary(folder)
        except NoReport:
            raise Refused(404, "there is no report yet", "engine merge-logs writes it") from None

    def suppressed(self, request: Request) -> Suppressed:
        address = _canonical(request.query_params.get("address", ""))
        known = _suppressions(self.watched(request))
        return Suppressed(address, bool(known.check([address])[0]))

    async def stream(self, request: Request) -> Response:
        watched = await run_in_threadpool(self.watched, request)
        if self._round.viewers >= MOST_VIEWERS:
            raise Refused(503, "too many pages look at this server", headers={"Retry-After": "30"})
        return StreamingResponse(
            self._round.stream(watched), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    # -- acting ----------------------------------------------------------------------------------------------------

    def create(self, request: Request, body: NewCampaign) -> CampaignLine:
        key = create(self._shelf, self._lists, body)
        watched = self._shelf.get(key)
        if watched is None:
            raise Refused(409, "the campaign's folder is gone")
        self.acts(request, watched).record("create", on=watched.id)
        return _line(watched, watched.look(fresh=True))

    def start(self, request: Request, body: Start) -> Started:
        watched = self.watched(request)
        plan = watched.campaign.plan()
        if body.partition >= len(plan.partitions):
            raise Refused(422, f"the plan has {len(plan.partitions)} partitions, numbered from 0")
        state = watched.look(fresh=True).state
        if state in ("finished", "cancelled"):
            raise Refused(409, f"the campaign is {state}")

        def living() -> set[tuple[int | None, int]]:
            machines = watched.look(fresh=True).machines
            return {(one.partition, one.pid) for one in machines if one.state == "sending"}

        acts = self.acts(request, watched)
        action = acts.record("start", on=f"partition {body.partition}")
        try:
            pid = start(watched.campaign, body.partition, body.processes, living)
        except (Refused, EngineError, OSError) as problem:
            acts.record("start", on=f"partition {body.partition}", failed=str(problem))
            raise
        return Started(pid, body.partition, action)

    def pause(self, request: Request, body: Nothing) -> Done:
        return self._act(request, Acts.pause)

    def resume(self, request: Request, body: Nothing) -> Done:
        return self._act(request, Acts.resume)

    def cancel(self, request: Request, body: Nothing) -> Done:
        return self._act(request, Acts.cancel)

    def slow(self, request: Request, body: Slow) -> Done:
        provider = request.path_params["provider"]
        known = {one.name for one in self.watched(request).look(fresh=True).providers}
        if provider not in known:
            raise Refused(404, "nothing was sent to that provider yet")
        return self._act(request, lambda acts: acts.slow(provider, body.connections, body.per_second, body.for_s))

    def release(self, request: Request, body: Nothing) -> Done:
        return self._act(request, lambda acts: acts.release(request.path_params["incarnation"]))

    def suppress(self, request: Request, body: NewSuppressions) -> Added:
        watched = self.watched(request)
        scope = "all" if body.everywhere else watched.campaign.settings().campaign.list_id
        now_us = self._clock.wall_us()
        addresses = [_canonical(address) for address in body.addresses]
        entries = [Entry(address=one, scope=scope, reason=body.reason, source="api", at_us=now_us) for one in addresses]
        self.acts(request, watched).record("suppress", value=f"{len(entries)} addresses")
        return Added(_suppressions(watched).add(entries))

    def enqueue(self, request: Request, body: Enqueue) -> EnqueuedMails:
        if self._outbox is None:
            raise Refused(409, "this server has no outbox", "engine serve --outbox FOLDER names it.")
        # Attachments are files of the outbox folder: applications on other machines do not name them.
        mails = [Mail(**msgspec.structs.asdict(one)) for one in body.mails]
        with open_outbox(self._outbox) as outbox:
            return EnqueuedMails(outbox.enqueue(mails))

    def claim(self, request: Request, body: batches.Claim) -> batches.Claimed:
        return batches.claim(self._campaign(body.campaign), body)

    def progress(self, request: Request, body: batches.Progress) -> Response:
        number = batches.batch_of(request)
        return batches.respond(batches.progress(self._campaign(body.campaign), number, body))

    def _campaign(self, key: str) -> Campaign:
        watched = self._shelf.get(key)
        if watched is None:
            raise Refused(404, "there is no such campaign here")
        return watched.campaign

    def _act(self, request: Request, act: Callable[[Acts], Action]) -> Done:
        watched = self.watched(request)
        action = act(self.acts(request, watched))
        watched.look(fresh=True)
        return Done(action)

    # -- carrying out ----------------------------------------------------------------------------------------------

    def endpoint(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        """The ASGI endpoint of an operation."""
        handler = getattr(self, operation.name)
        if operation.name == "stream":
            return handler  # type: ignore[no-any-return]  # the one handler that is an endpoint already

        async def get(request: Request) -> Response:
            answer = await run_in_threadpool(handler, request)
            return json_response(answer, operation.status)

        async def post(request: Request) -> Response:
            raw = await request.body()
            return await run_in_threadpool(self._once, operation, handler, request, raw)

        return post if operation.body is not None else get

    def _once(self, operation: Operation, handler: Callable[..., Any], request: Request, raw: bytes) -> Response:
        """A POST, under its idempotency key where it has one."""
        key = request.headers.get("idempotency-key", "")
        if not key:
            return self._post(operation, handler, request, raw)
        if len(key) > MAX_KEY or not key.isprintable():
            raise Refused(422, f"an Idempotency-Key has at most {MAX_KEY} printable characters")
        who = person_of(request).name
        known = self._memory.begin(who, key, f"{request.method} {request.url.path}", raw)
        if known is not None:
            media = "application/json" if known.status < 400 else "application/problem+json"
            return Response(known.body, known.status, {"Idempotency-Replayed": "true"}, media)
        try:
            response = self._post(operation, handler, request, raw)
        except Refused as refused:
            response = problem_response(refused.status, refused.detail, refused.hint, refused.headers)
        except EngineError as error:
            response = of_engine_error(error)
        except BaseException:
            self._memory.end(who, key, 500, b"")
            raise
        self._memory.end(who, key, response.status_code, bytes(response.body))
        return response

    @staticmethod
    def _post(operation: Operation, handler: Callable[..., Any], request: Request, raw: bytes) -> Response:
        assert operation.body is not None
        answer = handler(request, read_body(request, raw, operation.body))
        return answer if isinstance(answer, Response) else json_response(answer, operation.status)


def person_of(request: Request) -> Person:
    """Who asks; the guard let them in."""
    person: Person = request.state.person
    return person


def read_body(request: Request, raw: bytes, kind: type[T]) -> T:
    """The body as this type; raises Refused. No body is an empty object."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if raw and media != "application/json":
        raise Refused(415, "the body is application/json")
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise Refused(422, str(problem)) from None


def json_response(answer: Any, status: int = 200) -> Response:
    """JSON."""
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


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


def _canonical(address: str) -> str:
    try:
        return canonical(parse_mailbox(address))
    except AddressError as problem:
        raise Refused(422, f"no address: {str(problem)[:100]}") from None


def _suppressions(watched: Watched) -> Suppressions:
    return Suppressions(watched.campaign.suppression, list_id=watched.campaign.settings().campaign.list_id)


_ACT = (404, 409, 413, 415, 422, 503)
_ONE = "/campaigns/{campaign}"
OPERATIONS: tuple[Operation, ...] = (
    Operation(method="GET", path="/campaigns", name="campaigns", summary="All campaigns here", answer=Campaigns),
    Operation(
        method="POST",
        path="/campaigns",
        name="create",
        summary="Make and plan a campaign of a template and a list",
        body=NewCampaign,
        answer=CampaignLine,
        status=201,
        refusals=_ACT,
    ),
    Operation(
        method="GET",
        path=_ONE,
        name="campaign",
        summary="Counts by state, rates, estimated finish, providers, machines",
        answer=Snapshot,
        refusals=(404,),
    ),
    Operation(
        method="GET",
        path=_ONE + "/stream",
        name="stream",
        summary="The same as server-sent events, once a second while something changes",
        media="text/event-stream",
        refusals=(404, 503),
    ),
    Operation(
        method="GET",
        path=_ONE + "/history",
        name="history",
        summary="Rate and share of deferrals over the last half hour",
        answer=Series,
        refusals=(404,),
        query=(("provider", False, "Of one provider; of all by default."),),
    ),
    Operation(
        method="GET",
        path=_ONE + "/machines",
        name="machines",
        summary="Senders and leases",
        answer=Machines,
        refusals=(404,),
    ),
    Operation(
        method="GET", path=_ONE + "/events", name="events", summary="What happened", answer=Events, refusals=(404,)
    ),
    Operation(
        method="GET", path=_ONE + "/actions", name="actions", summary="Who did what", answer=Actions, refusals=(404,)
    ),
    Operation(
        method="GET",
        path=_ONE + "/report",
        name="report",
        summary="What `engine merge-logs` wrote: summary.json",
        answer=dict,
        refusals=(404, 422),
    ),
    Operation(
        method="POST",
        path=_ONE + "/start",
        name="start",
        summary="Start a sender of one partition on this machine",
        body=Start,
        answer=Started,
        status=202,
        refusals=_ACT,
    ),
    *(
        Operation(
            method="POST", path=f"{_ONE}/{name}", name=name, summary=summary, body=Nothing, answer=Done, refusals=_ACT
        )
        for name, summary in (
            ("pause", "Attempt nothing new until resumed"),
            ("resume", "Go on"),
            ("cancel", "End it for good: what is in flight finishes"),
        )
    ),
    Operation(
        method="POST",
        path=_ONE + "/providers/{provider}/slow",
        name="slow",
        summary="Slow a provider, or lift it",
        body=Slow,
        answer=Done,
        refusals=_ACT,
    ),
    Operation(
        method="POST",
        path=_ONE + "/machines/{incarnation}/release",
        name="release",
        summary="End a machine's lease, so that others may take its batches",
        body=Nothing,
        answer=Done,
        refusals=_ACT,
    ),
    Operation(
        method="GET",
        path=_ONE + "/suppressions",
        name="suppressed",
        summary="Is an address suppressed for this campaign?",
        answer=Suppressed,
        refusals=(404, 422, 503),
        query=(("address", True, "The address."),),
    ),
    Operation(
        method="POST",
        path=_ONE + "/suppressions",
        name="suppress",
        summary="Suppress addresses",
        body=NewSuppressions,
        answer=Added,
        refusals=_ACT,
    ),
    Operation(
        method="POST",
        path="/outbox",
        name="enqueue",
        summary="Put single mails into the outbox",
        body=Enqueue,
        answer=EnqueuedMails,
        status=201,
        refusals=_ACT,
    ),
    Operation(
        method="POST",
        path="/batches/claim",
        name="claim",
        summary="Claim batches; without an incarnation, register one",
        body=batches.Claim,
        answer=batches.Claimed,
        refusals=_ACT,
    ),
    Operation(
        method="POST",
        path="/batches/{batch}/progress",
        name="progress",
        summary="Report verdicts and open a window with the next rows; 409: attempt nothing of them",
        body=batches.Progress,
        answer=batches.Progressed,
        refusals=_ACT,
    ),
)
