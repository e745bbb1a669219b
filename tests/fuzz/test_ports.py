"""Strangers at every port: refused, told in few lines, nothing unpickled, the good peer answered all the while."""

from __future__ import annotations

import logging
import pickle
import statistics
from collections.abc import Iterator

import cloudpickle
import pytest

from tests.fuzz.inputs import resident_bytes
from tests.fuzz.ports import PORTS, Port, open_files, wait_open_files
from tests.fuzz.strangers import be_refused, flood, knock


@pytest.fixture(autouse=True)
def nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("bytes of a peer were unpickled")

    for module in (pickle, cloudpickle):
        for name in ("loads", "load"):
            monkeypatch.setattr(module, name, opened)


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    with PORTS[request.param]() as made:
        made.ask()
        yield made


@pytest.mark.parametrize("port", PORTS, indirect=True)
def test_key_holders_that_speak_nonsense_are_dropped(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        port.meet(flood, 1000, 1)
    assert port.dropped() >= 400  # the rest may have come under a name that is taken
    told = [record.getMessage() for record in caplog.records]
    assert len(told) <= 64, told[:10]
    assert all("is refused" in line for line in told), [line for line in told if "is refused" not in line][:5]


@pytest.mark.parametrize("port", PORTS, indirect=True)
def test_connections_that_speak_no_protocol_cost_nobody_anything(port: Port) -> None:
    before = open_files()
    port.meet(knock, 200, 2)
    assert wait_open_files(before) <= before


@pytest.mark.parametrize("port", ["hub, tcp", "mesh, tcp"], indirect=True)
def test_refused_keys_do_not_keep_good_peers_waiting(port: Port) -> None:
    waits = port.meet(be_refused, 100)
    assert port.refused() >= 100
    assert max(waits) < 5


@pytest.mark.soak
@pytest.mark.parametrize("port", PORTS, indirect=True)
def test_a_hundred_thousand_messages_and_connections_at_a_port(port: Port) -> None:
    port.meet(flood, 10_000, 1)
    port.meet(knock, 1_000, 1)
    files, resident = open_files(), resident_bytes()
    port.meet(flood, 100_000, 2)
    port.meet(knock, 10_000, 2)
    print(f"{port.dropped()} dropped, memory {(resident_bytes() - resident) / (1 << 20):+.1f} MiB")
    assert wait_open_files(files) <= files
    assert resident_bytes() - resident < 8 << 20


@pytest.mark.soak
@pytest.mark.parametrize("port", ["hub, tcp", "mesh, tcp"], indirect=True)
def test_ten_thousand_refused_handshakes_leave_the_good_peer_answered(port: Port) -> None:
    def p99(waits: list[float]) -> float:
        return statistics.quantiles(waits, n=100)[98]

    alone = p99([port.ask() for _ in range(2_000)])
    port.meet(be_refused, 500)
    files, resident = open_files(), resident_bytes()
    beside = p99(port.meet(be_refused, 10_000 // len(port.target.addresses)))
    assert port.refused() >= 10_000
    print(f"p99 {alone * 1e3:.2f} ms alone, {beside * 1e3:.2f} beside 10,000 refused handshakes")
    assert wait_open_files(files) <= files
    assert resident_bytes() - resident < 8 << 20
    # Twice its time where the machine has a core to spare for the strangers; here they share it.
    assert beside <= max(2 * alone, 0.05)
