"""The mesh's private directory, and the sockets bound in it.

The directory is the lock (0700: libzmq makes its sockets 0755), the kernel's user filter on each socket the second.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile

import zmq

from monarch_lab.errors import LaunchError

# sun_path holds 108 bytes with its final zero; our longest name in the directory is short.
_LONGEST_PATH = 107
_PREFIX = "ml-"
_HOLD = "held"
_LONGEST_NAME = len("/reports.ipc")


def make_directory() -> str:
    """A fresh directory that only this user can enter, with a path short enough for a Unix socket."""
    candidates = [tempfile.gettempdir(), "/tmp"]  # noqa: S108 - mkdtemp below makes it private
    for parent in candidates:
        if len(os.fsencode(parent)) + len(f"/{_PREFIX}XXXXXXXX") + _LONGEST_NAME <= _LONGEST_PATH and os.path.isdir(
            parent
        ):
            return tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    raise LaunchError(f"no directory with a path short enough for a socket: {candidates}; set TMPDIR to a shorter one")


def hold_directory(path: str) -> int:
    """Marks it as in use for as long as the descriptor that is returned stays open in this process."""
    # Locked before it has its name: a sweep never sees it unlocked while we live.
    unnamed = os.path.join(path, f"{_HOLD}.new")
    fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(unnamed, os.path.join(path, _HOLD))
    return fd


def sweep_directories(parent: str) -> list[str]:
    """Remove what kernels left that were killed before they had a guard; the paths removed.

    By a lock and not by the kernel's pid: another container may share the directory and not the numbers.
    """
    removed = []
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        try:
            if not name.startswith(_PREFIX) or os.lstat(path).st_uid != os.getuid():
                continue
            fd = os.open(os.path.join(path, _HOLD), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or not held yet, or nothing of ours
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_directory(path)
            removed.append(path)
        except OSError:
            pass  # its kernel lives
        finally:
            os.close(fd)
    return removed


def remove_directory(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def address(directory: str, name: str) -> str:
    return f"ipc://{directory}/{name}.ipc"


def bind_private(socket: zmq.Socket, where: str) -> None:
    """Bind for processes of this user alone."""
    if hasattr(zmq, "IPC_FILTER_UID") and os.uname().sysname == "Linux":
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    socket.bind(where)
