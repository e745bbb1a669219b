"""A mesh whose sockets are TCP's, with CURVE. The workers are tests/agent/fake_worker.py."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import msgspec
import pytest
import zmq

from monarch_lab.errors import UsageError, UsageValueError
from monarch_lab.supervisor import Supervisor
from monarch_lab.supervisor.groundwork import Ground
from monarch_lab.transport import curve
from monarch_lab.transport.door import show_keys
from monarch_lab.transport.keys import make_pair
from monarch_lab.wire.codec import encode
from monarch_lab.wire.keys import CurveKeys
from monarch_lab.wire.supervision import AgentSpec, WorkerHello
from tests.supervisor.conftest import StartMesh
from tests.supervisor.recorder import SETTINGS, Recorder, key_of, launch_of, wait_until


def spec_of(supervisor: Supervisor) -> AgentSpec:
    assert supervisor._loop is not None
    return supervisor._loop._spec


def refused_by(supervisor: Supervisor) -> int:
    assert supervisor._loop is not None
    return supervisor._loop._door.refused


def test_a_mesh_over_tcp_gives_orders_hears_reports_and_restarts_a_rank(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh(socket_type="tcp")
    assert spec_of(supervisor).orders.startswith("tcp://127.0.0.1:")
    large = os.urandom(1 << 20)
    supervisor.send(None, b"echo all", [large])
    assert [recorder.wait_report(rank) for rank in (0, 1)] == [[b"echo all", large]] * 2
    supervisor.send_control([1], b"one")
    assert recorder.wait_report(1) == [b"control one"]
    supervisor.restart([1])  # with a fresh pair of keys
    supervisor.send(None, b"echo again")
    assert [recorder.wait_report(rank) for rank in (0, 1)] == [[b"echo again"]] * 2
    assert not list(Path(supervisor.directory).glob("*.ipc"))


def test_nobody_without_a_listed_key_is_answered(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh(socket_type="tcp")
    spec = spec_of(supervisor)
    assert spec.curve is not None
    context = zmq.Context()
    strangers = []
    for kind, where in ((zmq.DEALER, spec.reports), (zmq.SUB, spec.orders)):
        for own in (None, make_pair()):  # without CURVE; with a pair that is not listed
            socket = context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            if own is not None:
                show_keys(socket, where, spec.key, CurveKeys(spec.curve.server, own))
            if kind == zmq.SUB:
                socket.subscribe(b"")
            socket.connect(where)
            if kind == zmq.DEALER:
                socket.send(encode(WorkerHello(spec.key, 0, 0, 1, "")))
            strangers.append(socket)
    wait_until(lambda: refused_by(supervisor) >= 2)
    supervisor.send(None, b"echo secret")
    assert [recorder.wait_report(rank) for rank in (0, 1)] == [[b"echo secret"]] * 2
    assert not any(socket.poll(0) for socket in strangers)
    context.destroy(linger=0)


def test_a_listed_key_speaks_for_its_holder_alone(start_mesh: StartMesh, caplog: pytest.LogCaptureFixture) -> None:
    supervisor, recorder = start_mesh(socket_type="tcp")
    spec = spec_of(supervisor)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"w7")
    show_keys(socket, spec.reports, spec.key, spec.curve)  # the agent's
    socket.connect(spec.reports)
    socket.send(encode(WorkerHello(spec.key, 7, 7, 1, "")))
    wait_until(lambda: "it holds another's key" in caplog.text)
    context.destroy(linger=0)
    supervisor.send([0], b"echo on")
    assert recorder.wait_report(0) == [b"echo on"]


def test_no_secret_is_in_a_command_line_an_environment_or_a_file(start_mesh: StartMesh) -> None:
    supervisor, _ = start_mesh(socket_type="tcp")
    spec = spec_of(supervisor)
    assert spec.curve is not None
    secrets = [shape for key in (key_of(supervisor), spec.curve.own.secret) for shape in (key, base64.b64encode(key))]
    shown = [
        Path(f"/proc/{pid}/{name}") for pid in os.listdir("/proc") if pid.isdigit() for name in ("cmdline", "environ")
    ]
    for path in [*shown, *(p for p in Path(supervisor.directory).rglob("*") if p.is_file())]:
        try:
            text = path.read_bytes()
        except OSError:
            continue
        assert not any(secret in text for secret in secrets), path
    assert spec.curve.own.secret.decode() not in repr(msgspec.structs.replace(spec, key=b""))


def test_without_curve_a_mesh_over_tcp_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve.zmq, "has", lambda _: False)
    supervisor = Supervisor(launch_of(socket_type="tcp"), SETTINGS, Recorder())
    with pytest.raises(UsageError, match="no CURVE"):
        supervisor.start()
    supervisor.stop()


def test_a_type_of_socket_that_is_none_is_refused() -> None:
    with pytest.raises(UsageValueError, match='"unix" or "tcp", not \'pipe\''):
        Supervisor(launch_of(socket_type="pipe"), SETTINGS, Recorder()).start()


def test_a_spare_with_other_sockets_does_not_fit() -> None:
    unix, tcp = (Ground.of(launch_of(socket_type=kind), SETTINGS) for kind in ("unix", "tcp"))
    assert unix.fits(unix) and not unix.fits(tcp)
