from __future__ import annotations

import pytest

from monarch_lab.errors import ProtocolError
from monarch_lab.supervisor.lifecycle import (
    LIVE,
    TRANSITIONS,
    AgentLost,
    Exited,
    NotStarted,
    ProcessInfo,
    ProcessState,
    Started,
    Welcomed,
    next_state,
)

NEW = ProcessInfo(rank=1, process=1, host="0", label="0.1")


def test_a_process_starts_is_welcomed_and_ends() -> None:
    info = NEW.after(Started(123)).after(Welcomed())
    assert (info.pid, info.state, info.is_live) == (123, ProcessState.READY, True)
    ended = info.after(Exited(-9, last_lines="segfault"))
    assert (ended.state, ended.code, ended.is_live) == (ProcessState.EXITED, -9, False)
    assert info.state is ProcessState.READY  # snapshots are not touched


def test_every_state_is_reached_and_no_end_is_left() -> None:
    assert set(TRANSITIONS.values()) == set(ProcessState) - {ProcessState.LAUNCHING}
    for (state, _), after in TRANSITIONS.items():
        if state not in LIVE:
            assert after is state


def test_the_loss_of_the_agent_is_allowed_in_every_state() -> None:
    for state in ProcessState:
        assert next_state(state, AgentLost()) not in LIVE


def test_a_process_starts_once() -> None:
    with pytest.raises(ProtocolError, match="Started is not allowed in RUNNING"):
        NEW.after(Started(7)).after(Started(8))


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (NEW.after(Started(123)).after(Exited(-9)), "rank 1 (host 0, pid 123) was killed by SIGKILL"),
        (NEW.after(Started(123)).after(Exited(3, False, "boom")), "rank 1 (host 0, pid 123) exited with code 3\nboom"),
        (
            NEW.after(Started(123)).after(Exited(-9, True)),
            "rank 1 (host 0, pid 123) was killed by SIGKILL: the system was out of memory",
        ),
        (NEW.after(Started(123)).after(Exited(-300)), "rank 1 (host 0, pid 123) was killed by signal 300"),
        (NEW.after(NotStarted("no memory")), "rank 1 (host 0) could not be started\nno memory"),
        (NEW.after(Started(123)).after(AgentLost()), "rank 1 (host 0, pid 123) ended with its agent"),
        (NEW.after(Started(123)), "rank 1 (host 0, pid 123) is running"),
    ],
)
def test_an_obituary_says_who_how_and_what_it_printed_last(info: ProcessInfo, text: str) -> None:
    assert info.obituary() == text
