from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from monarch_lab.config import load
from monarch_lab.errors import UsageValueError
from monarch_lab.transport.dialer import Dialer
from monarch_lab.transport.directory import address, make_directory, remove_directory
from monarch_lab.transport.events import Joined
from monarch_lab.transport.faults import NO_FAULTS, POINTS, Action, Faults, Point, Rule, parse_faults
from monarch_lab.transport.hub import Hub
from tests.transport.link_pump import LIMITS, MESH, TIMES, VERSIONS, Pump

ROOT = Path(__file__).resolve().parents[2]


def point(text: str, name: str = "hub.send") -> Point[str]:
    found: Point[str] | None = Faults(text).at(name, lambda message: message[:-1])
    assert found is not None
    return found


def test_rules_are_read_as_they_are_written() -> None:
    text = "hub.send:drop@0.25 dialer.receive:delay=0.5@0.1#3  agent.fork:crash#1 seed=7"
    assert parse_faults(text) == (
        [
            Rule("hub.send", Action.DROP, probability=0.25),
            Rule("dialer.receive", Action.DELAY, 0.5, 0.1, 3),
            Rule("agent.fork", Action.CRASH, times=1),
        ],
        7,
    )
    assert parse_faults("") == ([], 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drop", "'drop' is no rule: write POINT:ACTION"),
        ("hub.sned:drop", "'hub.sned' is no point: there are hub.send,"),
        ("hub.send:lose", "'lose' cannot be done at hub.send: there are crash, delay, drop,"),
        ("agent.fork:reorder", "'reorder' cannot be done at agent.fork: there are crash, drop"),
        ("hub.send:drop=1", "only a delay has seconds"),
        ("hub.send:drop@2", "a probability is between 0 and 1"),
        ("hub.send:drop@1.2.3", "has a number that is none"),
        ("hub.send:delay=.", "has a number that is none"),
        ("seed=x", "'seed=x' is no rule"),
    ],
)
def test_a_rule_that_is_none_says_what_to_write(text: str, words: str) -> None:
    with pytest.raises(UsageValueError) as e:
        Faults(text)
    assert words in str(e.value)


def test_without_the_switch_there_is_no_point_to_pass() -> None:
    assert load({}).faults == "" and load({"MONARCH_LAB_FAULTS": "hub.send:drop"}).faults == "hub.send:drop"
    assert all(NO_FAULTS.at(name) is None for name in POINTS)
    assert Faults("hub.send:drop").at("hub.receive") is None


def test_what_each_action_does_to_a_message() -> None:
    assert point("hub.send:drop").pass_on("abc", 0.0) == []
    assert point("hub.send:duplicate").pass_on("abc", 0.0) == ["abc", "abc"]
    assert point("hub.send:truncate").pass_on("abc", 0.0) == ["ab"]
    late = point("hub.send:delay=2#1")
    assert late.pass_on("abc", 5.0) == [] and late.next_due() == 7.0
    assert late.pass_on("def", 5.0) == ["def"]
    assert (late.due(6.9), late.due(7.0), late.due(8.0)) == ([], ["abc"], [])
    swapped = point("hub.send:reorder#1")
    assert [swapped.pass_on(message, 0.0) for message in ("a", "b", "c")] == [[], ["b", "a"], ["c"]]


def test_a_seed_makes_the_same_faults_again_and_another_makes_others() -> None:
    def run(seed: int) -> list[int]:
        lossy = point(f"hub.send:drop@0.3 seed={seed}")
        return [n for n in range(1000) if lossy.pass_on(str(n), 0.0)]

    assert run(1) == run(1) != run(2)
    assert 600 < len(run(1)) < 800


def test_a_rule_with_a_number_of_times_ends() -> None:
    lossy = point("hub.send:drop#2 hub.send:duplicate#1")
    assert [lossy.pass_on(c, 0.0) for c in "abcd"] == [[], [], ["c", "c"], ["d"]]


def test_a_crash_is_a_sigkill_of_this_process_alone() -> None:
    code = "from monarch_lab.transport.faults import Faults; Faults('agent.fork:crash').at('agent.fork').strike()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "action",
    ["drop@0.2", "delay=0.03@0.2", "duplicate@0.3", "reorder@0.3", "truncate@0.2", "drop@0.1 {}:reorder@0.1"],
)
@pytest.mark.parametrize("where", ["unix", "tcp"])
def test_a_link_delivers_once_and_in_order_whatever_happens_on_its_way(action: str, where: str) -> None:
    names = ("hub.send", "hub.receive", "dialer.send", "dialer.receive")
    faults = Faults(" ".join(f"{name}:{action.format(name)}" for name in names) + " seed=3")
    context, path = zmq.Context(), make_directory()
    at = address(path, "hub") if where == "unix" else "tcp://127.0.0.1:*"
    hub = Hub(context, mesh=MESH, address=at, times=TIMES, limits=LIMITS, versions=VERSIONS, faults=faults)
    with hub:
        invitation = hub.invite()
        dialer = Dialer(context, invitation, VERSIONS, time.monotonic(), faults)
        pump = Pump(hub, [dialer])
        pump.until_joined()
        expected = [[b"%d" % n, bytes(n)] for n in range(100)]
        for message in expected:
            now = time.monotonic()
            hub.send(invitation.peer, message, now)
            dialer.send(message, now)
            pump.turn()
        pump.until(lambda: len(pump.heard()) >= 100 and len(pump.received()) >= 100)
        assert pump.heard() == pump.received() == expected
        assert sum(isinstance(e, Joined) for e in pump.hub_events) == 1
        dialer.close()
    context.destroy(linger=0)
    remove_directory(path)
