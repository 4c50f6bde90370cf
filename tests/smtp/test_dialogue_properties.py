"""Whatever a server does: one verdict a message, doubt only after the dot, no memory.

First a server that keeps the rules and remembers what it took, in any mood and with any cut of the bytes: what we
report must agree with it. Then servers that keep no rule at all.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.smtp.dialogue import (
    MAX_REPLY_BYTES,
    Accepted,
    Dialogue,
    Event,
    InDoubt,
    Lost,
    Manner,
    Offer,
    Outgoing,
    Refused,
)
from tests.smtp.server_model import Flavour, ModelServer, Taken

mostly = st.sampled_from([True, True, True, False])
offers = st.builds(
    Offer, pipelining=mostly, chunking=st.booleans(), size=st.sampled_from([None, 0, 10_000]), eight_bit=st.booleans()
)
manners = st.builds(Manner, depth=st.integers(1, 6), pipelining=mostly, ahead=mostly, chunking=mostly)
flavours = st.builds(
    Flavour,
    keeps_refused_open=st.booleans(),
    data_without_recipient=st.booleans(),
    knows_bdat=st.sampled_from([True, True, True, False]),
)


def outgoing(ticket: int) -> Outgoing:
    """Each with its own return path, recipient and content, some of them with leading dots."""
    content = b"ticket %d\r\n" % ticket + (b".\r\n..\r\n" if ticket % 3 == 0 else b"")
    return Outgoing(ticket, f"v{ticket}@s.test", f"r{ticket}@a.test", content)


def check_one_verdict_each(events: list[Event], tickets: int) -> dict[int, Event]:
    by_ticket = {event.ticket: event for event in events}
    assert len(events) == len(by_ticket) == tickets
    return by_ticket


def check_against(server: ModelServer, events: list[Event], tickets: int, written: bytes) -> None:
    by_ticket = check_one_verdict_each(events, tickets)
    taken = {}
    for message in server.taken:
        ticket = int(message.content.split(b"\r\n")[0].split()[1])
        expected = outgoing(ticket)
        assert message == Taken(expected.return_path, expected.recipient, expected.content), "a mixed envelope"
        assert ticket not in taken, "taken twice"
        taken[ticket] = message
    for ticket, event in by_ticket.items():
        match event:
            case Accepted():
                assert ticket in taken, "reported accepted, and the server has it not"
            case InDoubt():
                assert b"ticket %d\r\n" % ticket in written, "in doubt, and the dot had not left"
            case Refused() | Lost():
                assert ticket not in taken, f"{event}, and the server took it"


@given(
    st.data(),
    offers,
    manners,
    flavours,
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_what_is_reported_agrees_with_what_the_server_took(
    data: st.DataObject, offer: Offer, manner: Manner, flavour: Flavour, proven: bool
) -> None:
    # Refused recipients are what confuses; the other stages misbehave now and then.
    answers = {
        "rcpt": [250, 250, 450, 550, 421, 0],
        "mail": [250] * 8 + [450, 550, 503, 421, 0],
        "data": [250] * 5 + [450, 554, 421, 0],
        "dot": [250] * 6 + [450, 550, 421, 0, -1],
    }
    moods = {stage: iter(data.draw(st.lists(st.sampled_from(codes), max_size=8))) for stage, codes in answers.items()}

    def mood(stage: str) -> int:
        return next(moods[stage], 250)

    # The host's memory would not say "proven" of one that knows no BDAT.
    dialogue = Dialogue(offer, manner, chunking_proven=proven and flavour.knows_bdat)
    server = ModelServer(flavour, mood)
    tickets = 0
    events: list[Event] = []
    written = b""
    to_server = to_client = b""
    cuts = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=8))
    for step in range(400):
        cut = cuts[step % len(cuts)]
        if tickets < 8 and dialogue.in_hand < dialogue.depth and not dialogue.is_ending:
            more = min(1 + step % 2, 8 - tickets)
            events += dialogue.take([outgoing(tickets + n) for n in range(more)])
            tickets += more
        elif tickets == 8:
            dialogue.finish()
        if step % 3 != 2:
            data_out = dialogue.pull()
            written += data_out
            to_server += data_out
        to_client += server.hear(to_server[:cut])
        to_server = to_server[cut:]
        events += dialogue.receive(to_client[:cut])
        to_client = to_client[cut:]
        if dialogue.is_over or (server.is_gone and not to_client):
            break
    events += dialogue.lose("connection lost", by_peer=server.is_gone)
    check_against(server, events, tickets, written)


@given(st.integers(0, 40), offers, manners, st.integers(0, 25))
@settings(deadline=None, max_examples=200)
def test_a_connection_cut_at_any_byte(before: int, offer: Offer, manner: Manner, replies: int) -> None:
    """The cable is cut while `before` bytes are still on their way and after so many reads."""
    dialogue = Dialogue(offer, manner)
    server = ModelServer(Flavour(), lambda stage: 250)
    events = dialogue.take([outgoing(ticket) for ticket in range(4)])
    written = on_the_way = b""
    for _ in range(replies):
        data = on_the_way + dialogue.pull()
        written += data[len(on_the_way) :]
        keep = min(before, len(data) - 1) if data else 0
        on_the_way = data[len(data) - keep :] if keep > 0 else b""
        events += dialogue.receive(server.hear(data[: len(data) - keep]))
    events += dialogue.lose("connection lost")
    check_against(server, events, 4, written)


lines = st.one_of(
    st.sampled_from(
        [b"250 ok", b"354 go on", b"421 bye", b"550 no", b"451 later", b"503 nested", b"250-more", b"250", b"221 bye"]
    ),
    st.builds(lambda code, rest: b"%d%b" % (code, rest), st.integers(0, 9999), st.binary(max_size=20)),
    st.binary(max_size=40),
)
bursts = st.lists(st.lists(lines, max_size=6).map(lambda some: b"".join(line + b"\r\n" for line in some)), max_size=20)


@given(
    st.lists(st.one_of(bursts, st.lists(st.binary(max_size=200), max_size=5)), max_size=4),
    offers,
    manners,
    st.booleans(),
)
@example([[b"250 ok\r\n" * 50]], Offer(pipelining=True, chunking=True), Manner(), True)
@settings(deadline=None, max_examples=250)
def test_a_server_that_keeps_no_rule(rounds: list[list[bytes]], offer: Offer, manner: Manner, proven: bool) -> None:
    dialogue = Dialogue(offer, manner, chunking_proven=proven)
    events: list[Event] = []
    written = b""
    tickets = 0
    for number, reads in enumerate(rounds):
        events += dialogue.take([outgoing(tickets), outgoing(tickets + 1)])
        tickets += 2
        for read in reads:
            while data := dialogue.pull():
                written += data
            events += dialogue.receive(read)
            assert dialogue.in_hand == tickets - len(events)
        if number == 2:
            dialogue.finish()
    in_hand = dialogue.in_hand
    final = dialogue.lose("connection lost", by_peer=proven)
    assert len(final) == in_hand
    by_ticket = check_one_verdict_each(events + final, tickets)
    for ticket, event in by_ticket.items():
        end_left = b"ticket %d\r\n" % ticket in written
        if isinstance(event, InDoubt):
            assert end_left, "in doubt, and the dot had not left"
        if isinstance(event, Accepted):
            assert end_left, "accepted before it was sent"
            assert 200 <= event.reply.code < 300
        if isinstance(event, Refused):
            assert event.reply.code >= 400
    assert dialogue.is_idle
    assert dialogue.pull() == b""


ENDLESS = (b"250-" + b"x" * 900 + b"\r\n", b"y" * 3000, b"250-z\r\n" * 300)


@given(st.lists(st.integers(0, len(ENDLESS) - 1), min_size=60, max_size=80))
@settings(deadline=None, max_examples=20)
def test_replies_without_end_do_not_grow_memory(kinds: list[int]) -> None:
    reads = [ENDLESS[kind] for kind in kinds]
    dialogue = Dialogue(Offer(pipelining=True))
    dialogue.take([outgoing(1)])
    dialogue.pull()
    received = 0
    for read in reads:
        dialogue.receive(read)
        received += len(read)
        if dialogue.is_over:
            break
        assert received <= 2 * MAX_REPLY_BYTES + 3000
    events = dialogue.lose("connection lost")
    assert dialogue.is_over
    assert [type(event) for event in events] == [Lost]
    assert len(str(events[0])) < 3000


def test_doubled_replies_are_found_at_data() -> None:
    """A server that says everything twice is out of step by the time content would leave."""
    dialogue = Dialogue(Offer(pipelining=True))
    dialogue.take([outgoing(1)])
    dialogue.pull()
    events = dialogue.receive(b"250 mail\r\n250 mail\r\n250 rcpt\r\n250 rcpt\r\n354 data\r\n354 data\r\n")
    assert dialogue.is_over
    assert [type(event) for event in events] == [Lost]


def test_the_unsent_end_of_a_message_leaves_no_doubt() -> None:
    """The transport says how much it still held when the connection was cut: the dot among it has not left."""
    dialogue = Dialogue(Offer())
    dialogue.take([outgoing(1)])
    for reply in (b"250 ok\r\n", b"250 ok\r\n", b"354 go\r\n"):
        dialogue.pull()
        dialogue.receive(reply)
    dialogue.pull()
    assert [type(event) for event in dialogue.lose("cut", unsent=1)] == [Lost]


def test_settings_change_while_it_runs() -> None:
    """From windows to one at a time and back, with everything in flight: the server notices no break of its rules."""
    dialogue = Dialogue(Offer(pipelining=True, chunking=True), Manner(depth=3), chunking_proven=True)
    server = ModelServer(Flavour(keeps_refused_open=True), lambda stage: 250)
    events: list[Event] = []
    manners = [Manner(depth=3), Manner(depth=1, pipelining=False), Manner(depth=4, chunking=False), Manner(ahead=False)]
    for ticket in range(40):
        events += dialogue.take([outgoing(ticket)])
        if ticket % 2:
            dialogue.adopt(manners[ticket // 2 % 4])
        events += dialogue.receive(server.hear(dialogue.pull()))
    while dialogue.in_hand:
        events += dialogue.receive(server.hear(dialogue.pull()))
    check_against(server, events, 40, b"")
    assert all(isinstance(event, Accepted) for event in events)
