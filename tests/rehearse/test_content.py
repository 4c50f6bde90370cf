"""Any way the network cuts the bytes tells the same story."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.rehearse.content import ContentReader

LINES = st.lists(st.sampled_from([b"", b".", b"..", b"x", b".x", b"\n.\n", b"\r", b"a" * 30]), max_size=8)


def dotted(content: bytes) -> bytes:
    """As a sender writes it (RFC 5321 §4.5.2)."""
    stuffed = content.replace(b"\r\n.", b"\r\n..")
    return (b"." + stuffed if stuffed.startswith(b".") else stuffed) + b".\r\n"


@given(LINES, st.lists(st.integers(1, 20), max_size=10), st.sampled_from([b"", b"MAIL FROM:<>\r\n", b".\r\n"]))
@example([], [1], b".\r\n")
@settings(deadline=None, max_examples=300)
def test_any_chunking_reads_the_same_content(lines: list[bytes], cuts: list[int], behind: bytes) -> None:
    content = b"".join(line + b"\r\n" for line in lines)
    wire = bytearray(dotted(content) + behind)
    reader = ContentReader(None)
    start, end, found = 0, 0, None
    sizes = iter(cuts)
    while found is None:
        assert end < len(wire), "the final dot was missed"
        end = min(len(wire), end + next(sizes, len(wire)))
        start, found = reader.read_dotted(wire, start, end)
    assert found == content
    assert bytes(wire[start:]) == behind


@given(st.integers(0, 40), st.lists(st.integers(1, 20), max_size=10))
@settings(deadline=None, max_examples=100)
def test_the_limit_holds_for_any_chunking(size: int, cuts: list[int]) -> None:
    wire = bytearray(dotted(b"x" * size + b"\r\n"))
    reader = ContentReader(20)
    start, end, found = 0, 0, None
    sizes = iter(cuts)
    while found is None:
        end = min(len(wire), end + next(sizes, len(wire)))
        start, found = reader.read_dotted(wire, start, end)
    assert reader.is_too_long == (size + 2 > 20)
    assert start == len(wire)
