"""The mesh's private directory, and the sockets bound in it.

The directory is the lock (0700: libzmq makes its sockets 0755), the kernel's user filter on each socket the second.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable

import zmq

from monarch_lab.errors import LaunchError

# sun_path holds 108 bytes with its final zero; our longest name in the directory is short.
_LONGEST_PATH = 107
_PREFIX = "ml-"
_HOLD = "held"
# Files in a mesh's directory that others of this user read or write.
RECORD = "mesh.json"
STOP_ASKED = "stop-asked"  # who asks, before SIGTERM to the agent: the kernel is told
_LONGEST_NAME = len("/reports.ipc")


def parents_of_directories() -> list[str]:
    """Where a mesh of this process would have its directory."""
    return list(dict.fromkeys((tempfile.gettempdir(), "/tmp")))  # noqa: S108 - mkdtemp below makes it private


def make_directory() -> str:
    """A fresh directory that only this user can enter, with a path short enough for a Unix socket."""
    candidates = parents_of_directories()
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
    for path in own_directories([parent]):
        try:
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


def own_directories(parents: Iterable[str]) -> list[str]:
    """Directories of meshes of this user in ``parents``."""
    found = []
    for parent in parents:
        try:
            names = sorted(os.listdir(parent))
        except OSError:
            continue  # gone, or not to be read
        for name in names:
            path = os.path.join(parent, name)
            try:
                if name.startswith(_PREFIX) and os.lstat(path).st_uid == os.getuid():
                    found.append(path)
            except OSError:
                pass  # gone meanwhile
    return found


def is_held(path: str) -> bool:
    """Whether the kernel that made it lives; a directory that is not held yet counts as held."""
    try:
        fd = os.open(os.path.join(path, _HOLD), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def write_file(directory: str, name: str, content: bytes) -> None:
    """Put a file of this user's own there, as a whole: who reads it meanwhile sees the one before."""
    unnamed = os.path.join(directory, f"{name}.new")
    fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb", closefd=True) as file:
            file.write(content)
        os.rename(unnamed, os.path.join(directory, name))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unnamed)
        raise


def read_file(directory: str, name: str, at_most: int = 1 << 24) -> bytes | None:
    """None where there is none, or it is not a file of this user's."""
    try:
        fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_size > at_most:
            return None
        return file.read(at_most)


def remove_directory(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def address(directory: str, name: str) -> str:
    return f"ipc://{directory}/{name}.ipc"


def bind_private(socket: zmq.Socket, where: str) -> None:
    """Bind for processes of this user alone."""
    if hasattr(zmq, "IPC_FILTER_UID") and os.uname().sysname == "Linux":
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    socket.bind(where)
