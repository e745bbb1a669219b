"""Wakes a thread that sits in a poll. Rung by any thread (and from signal handlers), answered by one."""

from __future__ import annotations

import os
import socket


class Doorbell:
    """Poll ``fd`` for reading; call ``answer`` before looking at what is new, so that no ring is lost."""

    def __init__(self) -> None:
        self._ear, self._button = socket.socketpair()
        self._ear.setblocking(False)
        self._button.setblocking(False)
        self.fd = self._ear.fileno()
        self.button_fd = self._button.fileno()

    def ring(self) -> None:
        try:
            os.write(self.button_fd, b"!")
        except BlockingIOError:
            pass  # enough rings are waiting already
        except OSError:
            pass  # closed: its thread has ended

    def answer(self) -> bytes:
        """What was rung (with ``signal.set_wakeup_fd``: the signals' numbers)."""
        try:
            return self._ear.recv(4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self._ear.close()
        self._button.close()
