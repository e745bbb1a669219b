from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from monarch_lab.errors import LaunchError
from monarch_lab.transport.directory import address, make_directory, remove_directory
from monarch_lab.transport.door import Door
from monarch_lab.transport.worker_link import WorkerLink
from monarch_lab.wire.codec import Decoder, encode
from monarch_lab.wire.engine import ALL, CONTROL_ALL, control_topic, topic
from monarch_lab.wire.supervision import Welcome, WorkerHello, WorkerSpec

KEY = b"k" * 32
PATIENCE_MS = 10_000


class Kernel:
    """The kernel's two sockets, in the test's hands."""

    def __init__(self, directory: str) -> None:
        self.context = zmq.Context()
        self.door = Door(self.context, KEY, 5.0)
        self.door.open()
        self.orders = self.context.socket(zmq.XPUB)
        self.reports = self.context.socket(zmq.ROUTER)
        self.door.bind(self.orders, address(directory, "orders"))
        self.door.bind(self.reports, address(directory, "reports"))

    def close(self) -> None:
        self.orders.close(linger=0)
        self.reports.close(linger=0)
        self.door.close()
        self.context.destroy(linger=0)

    def receive(self) -> list[bytes]:
        assert self.reports.poll(PATIENCE_MS)
        return self.reports.recv_multipart()

    def wait_subscriptions(self, count: int) -> list[bytes]:
        names = []
        while len(names) < count:
            assert self.orders.poll(PATIENCE_MS)
            names.append(self.orders.recv()[1:])
        return names


@pytest.fixture
def kernel_and_spec() -> Iterator[tuple[Kernel, WorkerSpec]]:
    directory = make_directory()
    kernel = Kernel(directory)
    yield kernel, spec_in(directory)
    kernel.close()
    remove_directory(directory)


def spec_in(directory: str, hello_s: float = 10.0) -> WorkerSpec:
    return WorkerSpec(
        mesh="m", rank=3, world_size=4, local_rank=1, local_world_size=2, host="1", device="cpu", key=KEY,
        agent_pid=0, kernel_pid=0, orders=address(directory, "orders"), reports=address(directory, "reports"),
        rendezvous="", seed=0, env={}, stdout_path="", stderr_path="", python_path=[], cwd="", process=7,
        hello_s=hello_s, linger_s=0.5,
    )  # fmt: skip


def test_a_link_says_hello_and_hears_nothing_before_the_welcome(
    kernel_and_spec: tuple[Kernel, WorkerSpec], caplog: pytest.LogCaptureFixture
) -> None:
    kernel, spec = kernel_and_spec
    link = WorkerLink(spec)
    connecting = threading.Thread(target=link.connect)
    connecting.start()
    identity, hello = kernel.receive()
    assert identity == b"w7"
    said = Decoder(WorkerHello)(hello)
    assert (said.key, said.process, said.rank) == (KEY, 7, 3)
    names = kernel.wait_subscriptions(4)
    assert names.index(ALL) < names.index(topic(3)) and names.index(CONTROL_ALL) < names.index(control_topic(3))
    with caplog.at_level(logging.WARNING):
        for early in (b"garbage", encode(Welcome(b"x" * 32)), b"", encode(Welcome(b"short"))):
            kernel.orders.send_multipart([topic(3), early])
        kernel.orders.send_multipart([topic(3), encode(Welcome(KEY))])
        connecting.join()
    assert [record.message for record in caplog.records] == ["rank 3 drops what comes before the kernel's welcome"]
    kernel.orders.send_multipart([ALL, b"first", b"payload"])
    header, payload = link.receive()
    assert (header, bytes(payload)) == (b"first", b"payload")
    assert not link.poll(0)
    link.send(b"report", [b"frame"])
    assert kernel.receive() == [b"w7", b"report", b"frame"]
    link.close()


def test_control_is_read_on_its_own_thread_after_its_own_welcome(
    kernel_and_spec: tuple[Kernel, WorkerSpec],
) -> None:
    kernel, spec = kernel_and_spec
    link = WorkerLink(spec)
    heard: queue.Queue[tuple[bytes, str]] = queue.Queue()

    def handler(header: bytes) -> None:
        heard.put((header, threading.current_thread().name))
        if header == b"fails":
            raise ValueError

    connecting = threading.Thread(target=link.connect)
    connecting.start()
    kernel.wait_subscriptions(4)
    kernel.orders.send_multipart([topic(3), encode(Welcome(KEY))])
    connecting.join()
    link.start_control(handler)
    kernel.orders.send_multipart([CONTROL_ALL, b"too early"])
    kernel.orders.send_multipart([control_topic(3), encode(Welcome(KEY))])
    kernel.orders.send_multipart([control_topic(2), b"for another"])
    kernel.orders.send_multipart([control_topic(3), b"fails"])
    kernel.orders.send_multipart([CONTROL_ALL, b"interrupt"])
    assert [heard.get(timeout=10) for _ in range(2)] == [(b"fails", "control"), (b"interrupt", "control")]
    link.close()
    assert "control" not in {thread.name for thread in threading.enumerate()}


def test_the_last_report_leaves_although_the_link_is_closed_at_once(
    kernel_and_spec: tuple[Kernel, WorkerSpec],
) -> None:
    kernel, spec = kernel_and_spec
    link = WorkerLink(spec)
    connecting = threading.Thread(target=link.connect)
    connecting.start()
    kernel.wait_subscriptions(4)
    kernel.orders.send_multipart([topic(3), encode(Welcome(KEY))])
    connecting.join()
    kernel.receive()
    link.send(b"last", [bytes(1 << 20)])
    link.close()
    assert kernel.receive()[1] == b"last"


def test_a_kernel_that_stays_silent_is_given_up(tmp_path: Path) -> None:
    directory = make_directory()
    link = WorkerLink(spec_in(directory, hello_s=0.05))
    with pytest.raises(LaunchError, match="rank 3 had no welcome"):
        link.connect()
    link.close()
    remove_directory(directory)
