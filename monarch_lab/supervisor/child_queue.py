"""A process's link to its supervisor: letters in, letters out.

Runs on: ``send`` on any user thread, under a lock; a thread of our own reads. What ``send`` has returned from will
arrive, even if the process ends at once by a signal.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
import time
from functools import cache

from monarch_lab.config import Letters, load
from monarch_lab.errors import ClosedError, DeviceException, LaunchError, ProtocolError, UsageError
from monarch_lab.supervisor.backlog import LETTER_COST_BYTES
from monarch_lab.supervisor.inbox import Entry, Inbox, View
from monarch_lab.supervisor.letters import pack_letter
from monarch_lab.transport.child_link import FrameReader, Kind, connect, number_of, pack_frame, pack_number
from monarch_lab.transport.held_interrupt import HeldInterrupt
from monarch_lab.wire.codec import encode
from monarch_lab.wire.hosts import ChildHello

PIPE_VARIABLE = "SUPERVISOR_PIPE"
IDENT_VARIABLE = "SUPERVISOR_IDENT"
_READ_BYTES = 1 << 18
_GONE = "the agent of this host has ended"


@cache
def get_message_queue() -> MessageQueue:
    """This process's queue to the supervisor that started it; the same at each call.

    UsageError in a process that no supervisor started.
    """
    pipe, ident = os.environ.get(PIPE_VARIABLE), os.environ.get(IDENT_VARIABLE)
    if not pipe or not ident:
        raise UsageError(f"no supervisor started this process: {PIPE_VARIABLE} and {IDENT_VARIABLE} are not set")
    queue = MessageQueue(pipe, int(ident), load().letters)
    queue.open()
    return queue


class MessageQueue(View):
    """``recv``, ``recvready``, ``recvloop``, ``recv_async``, ``messagefilter`` as a Context has them, and ``send``.

    The sender of a letter is None here. When the agent is gone waits end with ClosedError.
    """

    def __init__(self, pipe: str, process: int, letters: Letters) -> None:
        self._inbox = Inbox("this process", self._took)
        super().__init__(self._inbox)
        self._pipe = pipe
        self._process = process
        self._letters = letters
        self._send_lock = threading.Lock()  # guards writing to the socket
        self._credit = threading.Condition()  # guards _unread, _call and _closed
        self._unread = 0
        self._call: bytes | None = None
        self._closed = False

    def open(self) -> None:
        """Connect and prove ourselves; LaunchError when there is no agent."""
        try:
            self._socket, self._key = connect(self._pipe)
        except OSError as e:
            raise LaunchError(f"no agent answers at {self._pipe}: {e}") from e
        self._write(pack_frame(Kind.HELLO, encode(ChildHello(self._key, self._process, os.getpid()))))
        threading.Thread(target=self._read, name="supervisor queue", daemon=True).start()

    def send(self, message: object, timeout: float | None = None) -> None:
        """To the supervisor. Waits while too much is not read yet, at most ``timeout`` (None: for ever).

        DeviceException when it was not read in time: nothing was sent. ClosedError when the agent is gone.
        """
        data = pack_letter(message, self._letters.largest_bytes)
        cost = len(data) + LETTER_COST_BYTES
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._credit:
            while self._unread and self._unread + cost > self._letters.window_bytes:
                if self._closed:
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise DeviceException(
                        f"the supervisor has not read {self._unread:,} bytes of letters within {timeout:g} s;"
                        " nothing was sent"
                    )
                self._credit.wait(left)
            if self._closed:
                raise ClosedError(_GONE)
            self._unread += cost
        self._write(pack_frame(Kind.LETTER, data))

    def wait_call(self) -> bytes:
        """The FunctionCall that this process is to run, packed; ClosedError when the agent ends before it came."""
        with self._credit:
            self._credit.wait_for(lambda: self._call is not None or self._closed)
            if self._call is None:
                raise ClosedError(_GONE)
            return self._call

    def _write(self, frame: bytes) -> None:
        # A frame that a Ctrl-C cuts in two would take the next one with it. The agent always reads on.
        with HeldInterrupt(), self._send_lock:
            try:
                self._socket.sendall(frame)
            except OSError as e:
                raise ClosedError(f"{_GONE}: {e}") from e

    def _took(self, _: object, size: int) -> None:
        try:
            self._write(pack_number(Kind.TOOK, size + LETTER_COST_BYTES))
        except ClosedError:
            pass  # told by the next recv

    def _read(self) -> None:
        reader = FrameReader(self._letters.largest_bytes)
        proved = False
        try:
            while data := self._socket.recv(_READ_BYTES):
                reader.feed(data)
                while (frame := reader.next()) is not None:
                    kind, body = frame
                    if not proved:
                        if kind is not Kind.WELCOME or not hmac.compare_digest(body, self._key):
                            raise ProtocolError("the agent did not prove itself")
                        proved = True
                    else:
                        self._handle(kind, body)
        except (OSError, ProtocolError):
            pass
        with self._credit:
            self._closed = True
            self._credit.notify_all()
        self._inbox.close(_GONE)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed by the other side

    def _handle(self, kind: Kind, body: bytes) -> None:
        match kind:
            case Kind.LETTER:
                self._inbox.put([Entry(None, data=body)])
            case Kind.CREDIT:
                with self._credit:
                    self._unread = max(0, self._unread - number_of(body))
                    self._credit.notify_all()
            case Kind.CALL:
                with self._credit:
                    self._call = body
                    self._credit.notify_all()
            case _:
                raise ProtocolError(f"{kind.name} came from the agent")
