"""The mesh's private directory, and the sockets bound in it.

The directory is the lock (0700: libzmq makes its sockets 0755), the kernel's user filter on each socket the second.
"""

from __future__ import annotations

import os
import shutil
import tempfile

import zmq

from monarch_lab.errors import LaunchError

# sun_path holds 108 bytes with its final zero; our longest name in the directory is short.
_LONGEST_PATH = 107
_LONGEST_NAME = len("/reports.ipc")


def make_directory() -> str:
    """A fresh directory that only this user can enter, with a path short enough for a Unix socket."""
    candidates = [tempfile.gettempdir(), "/tmp"]  # noqa: S108 - mkdtemp below makes it private
    for parent in candidates:
        if len(os.fsencode(parent)) + len("/ml-XXXXXXXX") + _LONGEST_NAME <= _LONGEST_PATH and os.path.isdir(parent):
            return tempfile.mkdtemp(prefix="ml-", dir=parent)
    raise LaunchError(f"no directory with a path short enough for a socket: {candidates}; set TMPDIR to a shorter one")


def remove_directory(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def address(directory: str, name: str) -> str:
    return f"ipc://{directory}/{name}.ipc"


def bind_private(socket: zmq.Socket, where: str) -> None:
    """Bind for processes of this user alone."""
    if hasattr(zmq, "IPC_FILTER_UID") and os.uname().sysname == "Linux":
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    socket.bind(where)
