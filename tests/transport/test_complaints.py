from __future__ import annotations

from monarch_lab.transport.complaints import Complaints


def test_a_peer_is_named_once_and_all_together_once_a_minute() -> None:
    complaints = Complaints()
    assert complaints.note(b"a", "garbage", 0.0) == "peer b'a' is refused: garbage"
    assert complaints.note(b"a", "garbage", 100.0) is None
    assert (
        complaints.note(b"b", "late", 101.0)
        == "peer b'b' is refused: late; 1 messages of strangers were dropped before it"
    )
    for n in range(1000):
        assert complaints.note(b"%d" % n, "flood", 102.0) is None
    line = complaints.note(b"c", "again", 161.0)
    assert line is not None and "1000 messages" in line
    assert complaints.count == 1004


def test_ten_thousand_names_are_not_kept() -> None:
    complaints = Complaints()
    for n in range(10_000):
        complaints.note(b"%d" % n, "x", 61.0 * n)
    assert len(complaints._named) <= 1024
