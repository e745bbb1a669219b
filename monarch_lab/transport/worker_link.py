"""A worker's end of the mesh: orders in, control in, reports out.

Three sockets with one owner each: orders belong to the main thread, control to the reader thread, reports to whoever
holds the lock. Each socket that is read is deaf until a Welcome with the mesh's key has come over it.
"""

from __future__ import annotations

import hmac
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from monarch_lab.errors import InternalError, LaunchError, ProtocolError
from monarch_lab.transport.door import show_keys
from monarch_lab.transport.doorbell import Doorbell
from monarch_lab.transport.frames import configure, poll_ms, receive_frames, send_frames, share
from monarch_lab.wire.codec import Decoder, encode
from monarch_lab.wire.engine import ALL, CONTROL_ALL, control_topic, topic
from monarch_lab.wire.supervision import Welcome, WorkerHello, WorkerSpec

log = logging.getLogger(__name__)
_decode_welcome = Decoder(Welcome)


class WorkerLink:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._context = zmq.Context()
        self._orders = self._context.socket(zmq.SUB)
        self._control = self._context.socket(zmq.SUB)
        self._reports = self._context.socket(zmq.DEALER)
        self._reports.setsockopt(zmq.IDENTITY, b"w%d" % spec.process)
        for socket in (self._orders, self._control, self._reports):
            configure(socket, spec.linger_s)
        self._reports_lock = threading.Lock()  # guards the reports socket
        self._closing = Doorbell()
        self._reader: threading.Thread | None = None

    def connect(self) -> None:
        """Returns once the kernel has proved itself on the orders socket; LaunchError when it does not in time."""
        spec = self._spec
        rank = spec.rank
        for socket, where in ((self._orders, spec.orders), (self._control, spec.orders), (self._reports, spec.reports)):
            show_keys(socket, where, spec.key, spec.curve)
        for socket, topics in ((self._orders, (ALL, topic(rank))), (self._control, (CONTROL_ALL, control_topic(rank)))):
            # The kernel counts a subscription to the rank's own topic: the common one must have gone before it.
            for name in topics:
                socket.subscribe(name)
            socket.connect(self._spec.orders)
        self._reports.connect(self._spec.reports)
        self.send(encode(WorkerHello(self._spec.key, self._spec.process, rank, os.getpid(), _torch_version())))
        deadline = time.monotonic() + self._spec.hello_s
        if not self._wait_welcome(self._orders, lambda: self._orders.poll(poll_ms(deadline - time.monotonic())) != 0):
            raise LaunchError(f"rank {rank} had no welcome from the kernel within {self._spec.hello_s:g} s")

    def receive(self) -> list[bytes | memoryview]:
        """The next order, ``[header, *frames]``. Main thread.

        Signal handlers run while it waits. SIGINT is held back while a message passes: a handler that raises then
        loses that one message, whole, so it had better not raise outside user code.
        """
        while len(parts := receive_frames(self._orders)) < 2:
            pass  # a topic and nothing more
        return [parts[1].bytes, *(part.buffer for part in parts[2:])]

    def poll(self, timeout_s: float) -> bool:
        """Whether an order is there. Main thread."""
        return self._orders.poll(poll_ms(timeout_s)) != 0

    def send(self, header: bytes, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Report to the kernel, from any thread. Large frames are not copied: leave them alone afterwards."""
        parts = [header, *map(share, frames)]
        with self._reports_lock:
            send_frames(self._reports, parts)

    def start_control(self, handler: Callable[[bytes], None]) -> None:
        """Call ``handler(header)`` for each control message, on a thread of this link's own."""
        if self._reader is not None:
            raise InternalError("start_control was called twice")
        self._reader = threading.Thread(target=self._read_control, args=(handler,), name="control", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Main thread. The last reports get ``linger_s`` to leave; the reader thread ends."""
        if self._reader is not None:
            self._closing.ring()
            self._reader.join(self._spec.linger_s)
        else:
            self._control.close()
        self._orders.close()
        with self._reports_lock:
            self._reports.close()
        if self._reader is None or not self._reader.is_alive():
            # Waits for the last reports to leave; with a handler that hangs it would wait for ever.
            self._context.term()
            self._closing.close()

    def _read_control(self, handler: Callable[[bytes], None]) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._closing.fd, zmq.POLLIN)

        def wait_message() -> bool:
            return self._closing.fd not in dict(poller.poll())

        try:
            if not self._wait_welcome(self._control, wait_message):
                return
            while wait_message():
                parts = receive_frames(self._control)
                if len(parts) < 2:
                    continue
                try:
                    handler(parts[1].bytes)
                except Exception:
                    # One message that fails must not make the worker deaf to the next interrupt.
                    log.exception("a control message failed")
        finally:
            self._control.close()

    def _wait_welcome(self, socket: zmq.Socket, wait_message: Callable[[], bool]) -> bool:
        """Drop everything until the kernel's Welcome; False when ``wait_message`` gives up."""
        told = False
        while wait_message():
            parts = receive_frames(socket)
            if len(parts) == 2 and self._is_welcome(parts[1].bytes):
                return True
            if not told:
                told = True
                log.warning("rank %d drops what comes before the kernel's welcome", self._spec.rank)
        return False

    def _is_welcome(self, header: bytes) -> bool:
        try:
            welcome = _decode_welcome(header)
        except ProtocolError:
            return False
        return hmac.compare_digest(welcome.key, self._spec.key)


def _torch_version() -> str:
    # The zygote has imported it, or it is not there: this layer never loads it.
    return str(getattr(sys.modules.get("torch"), "__version__", ""))
