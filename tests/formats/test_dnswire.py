"""DNS messages read by hand say what dnspython says of them, and any bytes end in a value or a ValueError."""

from __future__ import annotations

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats import dnswire
from formats.dnswire import AAAA, CNAME, MX, TXT, A, MailHost, name_in, query, question, read_reply

quick = settings(deadline=None, max_examples=60)
labels = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_", min_size=1, max_size=20)
names = st.lists(labels, min_size=1, max_size=5).map(".".join)
records = st.one_of(
    st.tuples(st.just("A"), st.ip_addresses(v=4).map(str)),
    st.tuples(st.just("AAAA"), st.ip_addresses(v=6).map(str)),
    st.tuples(st.just("MX"), st.tuples(st.integers(0, 65535), names).map(lambda mx: f"{mx[0]} {mx[1]}.")),
    st.tuples(st.just("CNAME"), names.map(lambda name: f"{name}.")),
    st.tuples(st.just("TXT"), st.text("abc =;", max_size=40).map(lambda text: f'"{text}" "and more"')),
)


def reply_with(name: str, kind: int, answers: list[tuple[str, str, str]]) -> dns.message.Message:
    message = dns.message.make_response(dns.message.make_query(name, kind))
    for owner, type_, text in answers:
        message.answer.append(dns.rrset.from_text(owner + ".", 300, "IN", type_, text))
    return message


def test_a_question_is_what_dnspython_would_ask() -> None:
    ours = dns.message.from_wire(query(4711, question("Example.ORG.", MX)))
    assert (ours.id, ours.question[0].name.to_text(), ours.question[0].rdtype) == (4711, "example.org.", MX)
    assert ours.flags == dns.flags.RD
    assert ours.payload == dnswire.PAYLOAD


@pytest.mark.parametrize(
    "name", ["", ".", "a..b", "a b", "é.test", "x" * 64 + ".test", "a." * 128 + "b", "a\\046b.test"]
)
def test_what_is_no_host_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        question(name, A)


@quick
@given(names, st.lists(st.tuples(names, records), max_size=8))
def test_the_answers_are_those_that_dnspython_reads(name: str, answers: list[tuple[str, tuple[str, str]]]) -> None:
    message = reply_with(name, MX, [(owner, *record) for owner, record in answers])
    read = read_reply(message.to_wire(max_size=65535))
    found = []
    for rrset in dns.message.from_wire(message.to_wire(max_size=65535)).answer:
        for record in rrset:
            owner = rrset.name.to_text(True)
            match rrset.rdtype:
                case dns.rdatatype.MX:
                    found.append((owner, MX, MailHost(record.preference, record.exchange.to_text(True))))
                case dns.rdatatype.CNAME:
                    found.append((owner, CNAME, record.target.to_text(True)))
                case dns.rdatatype.TXT:
                    found.append((owner, TXT, b"".join(record.strings)))
                case kind:
                    found.append((owner, int(kind), record.address))
    # dnspython gathers records of a name and kind, and of several aliases (which no name may have) keeps the last.
    aliases = {record.name: record for record in read.answers if record.kind == CNAME}
    kept = [record for record in read.answers if record.kind != CNAME] + list(aliases.values())
    assert {(record.name, record.kind, record.value) for record in kept} == set(found)


@quick
@given(names, st.lists(st.tuples(names, records), max_size=4), st.data())
def test_damaged_bytes_give_a_reply_or_a_value_error(
    name: str, answers: list[tuple[str, tuple[str, str]]], data: st.DataObject
) -> None:
    packet = bytearray(reply_with(name, MX, [(owner, *record) for owner, record in answers]).to_wire(max_size=65535))
    for _ in range(data.draw(st.integers(1, 6))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(packet[: data.draw(st.integers(0, len(packet)))])
    try:
        read = read_reply(damaged)
    except ValueError:
        return
    assert all(len(record.name) <= 4 * 255 for record in read.answers)


@quick
@given(st.binary(max_size=300))
def test_any_bytes_give_a_reply_or_a_value_error(raw: bytes) -> None:
    try:
        read_reply(raw)
    except ValueError:
        return


def test_a_name_that_points_at_itself_ends() -> None:
    head = b"\x00\x01\x81\x80\x00\x01\x00\x01\x00\x00\x00\x00" + question("a.test", A)
    for name in (b"\xc0" + bytes((len(head),)), b"\xc0\xff", b"\x01a\xc0" + bytes((len(head),))):
        with pytest.raises(ValueError, match=r"forward|cut short"):
            read_reply(head + name + b"\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\x08\x08\x08\x08")


def test_negative_answers_hold_as_the_soa_says() -> None:
    message = dns.message.make_response(dns.message.make_query("no.test", "MX"))
    message.set_rcode(dns.rcode.NXDOMAIN)
    message.authority.append(dns.rrset.from_text("test.", 600, "IN", "SOA", "ns.test. h.test. 1 3600 600 86400 120"))
    read = read_reply(message.to_wire())
    assert (read.code, read.negative_ttl, read.has_authority, read.answers) == (dnswire.NXDOMAIN, 120, True, ())


def test_a_reply_that_was_cut_says_so_and_its_rest_is_not_read() -> None:
    message = dns.message.make_response(dns.message.make_query("a.test", "AAAA"))
    message.flags |= dns.flags.TC
    assert read_reply(message.to_wire()).is_cut
    assert read_reply(message.to_wire()[:-4] + b"\x00\x1c\x00\x01").is_cut


def test_letters_that_no_host_name_has_are_visible() -> None:
    assert name_in(b"\x05a.b\x00C\x04test\x00") == "a\\046b\\000c.test"
    assert name_in(b"\x00") == "."
    with pytest.raises(ValueError, match="without end"):
        name_in(b"\x05ab")
    with pytest.raises(ValueError, match="cut short"):
        name_in(b"\x02ab")


def test_addresses_of_another_length_are_no_addresses() -> None:
    head = b"\x00\x01\x81\x80\x00\x01\x00\x01\x00\x00\x00\x00" + question("a.test", A)
    for kind in (A, AAAA):
        with pytest.raises(ValueError, match="another length"):
            read_reply(head + b"\xc0\x0c\x00" + bytes((kind,)) + b"\x00\x01\x00\x00\x00\x3c\x00\x03\x08\x08\x08")
