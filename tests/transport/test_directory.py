from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from monarch_lab.errors import LaunchError
from monarch_lab.transport import directory
from monarch_lab.transport.directory import (
    address,
    bind_private,
    hold_directory,
    make_directory,
    remove_directory,
    sweep_directories,
)


def test_the_directory_is_for_its_user_alone_and_short_enough_for_a_socket() -> None:
    path = make_directory()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    bind_private(socket, address(path, "reports"))
    assert os.path.exists(os.path.join(path, "reports.ipc"))
    context.destroy(linger=0)
    remove_directory(path)
    assert not os.path.exists(path)


def test_a_long_temporary_directory_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(directory.tempfile, "gettempdir", lambda: str(deep))
    path = make_directory()
    assert os.path.dirname(path) == "/tmp"
    remove_directory(path)


def test_no_short_directory_at_all_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_LONGEST_PATH", 5)
    with pytest.raises(LaunchError, match="TMPDIR"):
        make_directory()


def test_a_sweep_takes_what_nobody_holds_and_nothing_else(tmp_path: Path) -> None:
    held, left, young, foreign = (tmp_path / name for name in ("ml-held", "ml-left", "ml-young", "other"))
    for path in (held, left, young, foreign):
        path.mkdir()
    kept = hold_directory(str(held))
    os.close(hold_directory(str(left)))
    os.close(hold_directory(str(foreign)))
    assert sweep_directories(str(tmp_path)) == [str(left)]
    assert held.exists() and young.exists() and foreign.exists()
    os.close(kept)
    assert sweep_directories(str(tmp_path)) == [str(held)]
