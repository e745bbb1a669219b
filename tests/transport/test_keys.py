from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from monarch_lab.errors import LaunchError
from monarch_lab.transport.keys import Invitation, decode_invitation, make_pair, read_invitation, write_invitation
from monarch_lab.wire.codec import encode
from tests.transport.link_pump import LIMITS, TIMES

INVITATION = Invitation("tcp://h:1", b"m" * 16, b"k" * 32, 3, TIMES, LIMITS, make_pair().public, make_pair())


def test_an_invitation_goes_through_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "invitation"
    before = os.umask(0)
    try:
        write_invitation(str(path), INVITATION)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_invitation(str(path)) == INVITATION == decode_invitation(encode(INVITATION))
    with pytest.raises(FileExistsError):
        write_invitation(str(path), INVITATION)


def test_a_file_that_others_could_read_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "invitation"
    write_invitation(str(path), INVITATION)
    path.chmod(0o640)
    with pytest.raises(LaunchError, match="0600"):
        read_invitation(str(path))


def test_a_link_a_fifo_and_a_missing_file_are_no_invitation(tmp_path: Path) -> None:
    path = tmp_path / "invitation"
    write_invitation(str(path), INVITATION)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo", "missing"):
        with pytest.raises(LaunchError):
            read_invitation(str(tmp_path / name))


@pytest.mark.parametrize("data", [b"", b"garbage", encode(INVITATION)[:-1], bytes(1 << 20)])
def test_a_broken_invitation_says_so(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "invitation"
    path.touch(0o600)
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(LaunchError, match="is not an invitation"):
        read_invitation(str(path))


def test_no_secret_is_shown() -> None:
    assert INVITATION.own is not None
    for thing in (INVITATION, INVITATION.own):
        assert INVITATION.own.secret.decode() not in repr(thing) and "kkk" not in repr(thing)
