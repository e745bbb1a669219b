"""What is one operating system's alone: pidfd, subreaper, parent-death signal, /proc, memory accounting.

Everywhere else the answer is the weaker portable one, said at each function. Standard library only: the guard
loads this without site-packages. Processes are ended here by a pidfd opened *before* they are recognised, so a
number that was reused meanwhile is never hit.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _prctl(option: int, value: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


if LINUX:
    # ctypes is loaded now: in a forked child, or while the machine is short of memory, it would be too late.
    import ctypes  # noqa: F401


def set_parent_death_signal(sig: int = signal.SIGKILL) -> bool:
    """This process gets ``sig`` when its parent ends. False where there is no such thing.

    Check ``os.getppid()`` afterwards: the parent may have ended before.
    """
    if not LINUX:
        return False
    _prctl(_PR_SET_PDEATHSIG, sig)
    return True


def become_subreaper() -> bool:
    """Orphans below this process become its children. False where there is no such thing."""
    if not LINUX:
        return False
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return True


def open_pidfd(pid: int) -> int | None:
    """A descriptor that is readable once ``pid`` has ended; None where there is none, or no such process."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def wait_for_end(pids: Iterable[int], fds: Iterable[int], poll_s: float = 1.0) -> None:
    """Return when one of the processes has ended. Without pidfds (``fds`` empty) by asking every ``poll_s``."""
    fds = list(fds)
    if fds:
        poll = select.poll()  # not select(): a number above 1023 may be inherited
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.poll()
        return
    pids = list(pids)
    while all(is_alive(pid) for pid in pids):
        time.sleep(poll_s)


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not."""
    stat = read_stat(pid)
    if stat is not None:
        return stat[0] not in "ZX"
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def read_stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state letter on; None for no such process or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """When ``pid`` was started, in ticks since the boot: with the pid it names a process for good.

    None for no such process, or one that has ended; 0 where the system does not say.
    """
    stat = read_stat(pid)
    if stat is None:
        return 0 if is_alive(pid) else None
    return int(stat[19]) if stat[0] not in "ZX" else None


def ticks_now() -> int:
    """Of the clock of ``start_time``; 0 where the system has none."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS) if LINUX else 0


def ignores(pid: int, sig: int) -> bool:
    """Whether a process has a signal ignored; False where the system does not say."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            mask = next(int(line.split()[1], 16) for line in file if line.startswith(b"SigIgn:"))
    except (OSError, StopIteration):
        return False
    return bool(mask >> (sig - 1) & 1)


def boot_id() -> str:
    """Names this boot of the machine; "" where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Names what pids mean here; "" where there is one meaning."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def command_and_directory(pid: int) -> tuple[list[str], str] | None:
    """(words of the command line, working directory) of a process of this user; None where that is not told."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode(errors="replace").split("\0")
        return words, os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return None


def all_pids() -> list[int]:
    """Empty without /proc."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def free_descriptors() -> int | None:
    """How many more this process may open; None where the system does not say."""
    import resource  # not at the top: the guard loads this module and needs none of it

    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def own_sockets() -> dict[int, tuple[int, int]]:
    """Descriptors of this process that are sockets; each with device and inode, which tell it from a later one of that
    number (elsewhere than on Linux these may be alike)."""
    found = {}
    for name in os.listdir("/proc/self/fd" if LINUX else "/dev/fd"):
        try:
            facts = os.fstat(int(name))
        except OSError:  # that of the listing itself, or closed by another thread
            continue
        if stat.S_ISSOCK(facts.st_mode):
            found[int(name)] = (facts.st_dev, facts.st_ino)
    return found


def memory_bytes() -> tuple[int, int]:
    """(resident, proportional) bytes of this process: of a page that n processes map, the second counts an nth. 0 where
    the system does not say."""
    found = {"Rss": 0, "Pss": 0}
    try:
        with open("/proc/self/smaps_rollup") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) << 10
    except OSError:
        pass
    return found["Rss"], found["Pss"]


def thread_count() -> int:
    """Threads of this process, as the system counts them; 1 where it does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def usage(pid: int) -> tuple[int, float, str] | None:
    """(resident bytes, CPU seconds, state letter); None where the process or /proc is not there."""
    stat = read_stat(pid)
    if stat is None:
        return None
    return int(stat[21]) * _PAGE, (int(stat[11]) + int(stat[12])) / _TICKS, stat[0]


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, parents first, zombies included."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _parents() -> Iterable[tuple[int, int]]:
    if os.path.isdir("/proc/self"):
        for pid in all_pids():
            stat = read_stat(pid)
            if stat is not None:
                yield pid, int(stat[1])
        return
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    for line in listing.splitlines():
        pid_text, parent_text = line.split()
        yield int(pid_text), int(parent_text)


def marked(variable: str, mark: str) -> list[int]:
    """Processes, other than this one, that were started with ``variable=mark``. Empty without /proc."""
    return [pid for pid in all_pids() if pid != os.getpid() and _carries(pid, variable, mark)]


def _carries(pid: int, variable: str, mark: str) -> bool:
    return variable_of(pid, variable) == mark


def variable_of(pid: int, variable: str) -> str | None:
    """The value a process was started with; None for none, no such process, or one that may not be asked."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    name = os.fsencode(variable) + b"="
    return next((os.fsdecode(entry[len(name) :]) for entry in entries if entry.startswith(name)), None)


def is_own(pid: int) -> bool:
    """Whether a process runs as this user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def kill_marked(variable: str, mark: str) -> int:
    """SIGKILL every process that carries the mark; how many were found."""
    return sum(kill_checked(pid, partial(_carries, pid, variable, mark)) for pid in marked(variable, mark))


def kill_descendants(of: int, spare: Iterable[int] = ()) -> int:
    """SIGKILL every process below ``of`` but ``spare`` (and what is below those); how many were found."""
    spared = set(spare)
    for pid in list(spared):
        spared.update(descendants(pid))
    # Children first: without a subreaper the child of a killed parent would no longer be found below.
    todo = [pid for pid in reversed(descendants(of)) if pid not in spared]
    return sum(kill_checked(pid, partial(_is_below, pid, of)) for pid in todo)


def _is_below(pid: int, ancestor: int) -> bool:
    if not os.path.isdir("/proc/self"):
        return pid in descendants(ancestor)
    while (stat := read_stat(pid)) is not None:
        pid = int(stat[1])
        if pid == ancestor:
            return True
    return False


def kill_checked(pid: int, is_it: Callable[[], bool]) -> bool:
    """SIGKILL ``pid`` if ``is_it()`` still holds once the process is pinned; False if it was not there."""
    return signal_checked(pid, signal.SIGKILL, is_it)


def signal_checked(pid: int, sig: int, is_it: Callable[[], bool]) -> bool:
    """Signal ``pid`` if ``is_it()`` still holds once the process is pinned; False if it was not there."""
    fd = open_pidfd(pid)
    if fd is None:
        if hasattr(os, "pidfd_open") or not is_it():
            return False
        return send_signal(pid, sig)
    try:
        if not is_it():
            return False
        signal.pidfd_send_signal(fd, sig)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def send_signal(pid: int, sig: int, group: bool = False) -> bool:
    """Signal a process that cannot have been reaped (our own child) or its group; False if it is gone."""
    try:
        if group:
            os.killpg(pid, sig)
        else:
            os.kill(pid, sig)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def peek_ended_child() -> int | None:
    """A child that has ended and was not collected: its number stays its own until ``collect_child``.

    None when there is none; also where the system cannot look without collecting.
    """
    if not hasattr(os, "waitid"):
        return None
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def collect_child(pid: int = -1) -> tuple[int, int] | None:
    """(pid, code) of an ended child, code negative for a signal; None when none has ended."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return (found, os.waitstatus_to_exitcode(status)) if found else None


def count_out_of_memory_kills() -> int | None:
    """How often the system killed for memory so far: in our control group where that is told, else on the machine."""
    for path, prefix in _memory_event_files():
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith(prefix):
                        return int(line.split()[1])
        except (OSError, ValueError):
            continue
    return None


def _memory_event_files() -> Iterable[tuple[str, str]]:
    try:
        with open("/proc/self/cgroup") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers == "":
            yield f"/sys/fs/cgroup{path}/memory.events", "oom_kill "
        elif controllers == "memory":
            yield f"/sys/fs/cgroup/memory{path}/memory.oom_control", "oom_kill "
    yield "/proc/vmstat", "oom_kill "
