"""``Context``: hosts, processes on them, and their letters, for one user."""

from __future__ import annotations

import itertools
import logging
import os
import string
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import zmq

from monarch_lab.config import Settings, load
from monarch_lab.errors import ClosedError, LaunchError, UsageTypeError, UsageValueError
from monarch_lab.supervisor.backlog import LETTER_COST_BYTES, Backlog
from monarch_lab.supervisor.context_loop import ContextLoop, LoopPlan
from monarch_lab.supervisor.core_events import (
    GroupLaunched,
    HostsRequested,
    HostsReturned,
    LetterSent,
    LetterTaken,
    ShutdownAsked,
)
from monarch_lab.supervisor.function_call import FunctionCall
from monarch_lab.supervisor.handles import Command, Host, Process, ProcessList, checked_command, checked_env
from monarch_lab.supervisor.inbox import Inbox, View
from monarch_lab.supervisor.letters import pack_letter
from monarch_lab.supervisor.records import HostRecord, HostTimes, ProcessRecord
from monarch_lab.supervisor.status import Status
from monarch_lab.transport.directory import hold_directory, make_directory, remove_directory, sweep_directories
from monarch_lab.transport.keys import Invitation
from monarch_lab.wire.hosts import LaunchProcesses

log = logging.getLogger(__name__)
_CLOSED = "the context was shut down"


class Context(View):
    """A supervisor of hosts and processes. Use it with ``with``, or call ``shutdown``.

    ``listen``      "ipc" for agents of this machine; "tcp" (on loopback) or "tcp://ADDRESS" for others, encrypted
    ``launcher``    "local": a host that is asked for is an agent on this machine. None: agents come by ``invitation``
    ``log_format``  a path with {name}, for the stdout and stderr of each process; None: they go where the agent's go
    ``log_interval``  seconds between two calls of ``log_status``, which logs a Status; 0: never

    ``heartbeat_interval``, ``unreachable_after``, ``lost_after``: how often an agent is heard, after what silence its
    host is shown as unreachable, and given up. ``lease``: how long an agent lives that hears nothing of us.

    Everything may be called from any thread. Nothing is started before the first host or invitation is asked for.
    """

    def __init__(
        self,
        listen: str = "ipc",
        *,
        launcher: Literal["local"] | None = "local",
        log_format: str | None = None,
        log_interval: float = 60.0,
        heartbeat_interval: float | None = None,
        unreachable_after: float | None = None,
        lost_after: float | None = None,
        lease: float | None = None,
    ) -> None:
        settings = load()
        self._settings = _with_times(settings, heartbeat_interval, unreachable_after, lost_after, lease)
        if launcher not in ("local", None):
            raise UsageValueError(f'launcher is "local" or None, not {launcher!r}')
        if log_interval < 0:
            raise UsageValueError(f"log_interval is seconds, or 0 for never, not {log_interval!r}")
        self._listen = _checked_listen(listen)
        self._log_format = _checked_log_format(log_format)
        self._log_interval = log_interval
        self._starts_agents = launcher == "local"
        self._inbox = Inbox("the supervisor", self._taken)
        super().__init__(self._inbox)
        self._backlog = Backlog(self._settings.letters.window_bytes)
        self._lock = threading.Lock()  # guards what follows
        self._loop: ContextLoop | None = None
        self._is_closed = False
        self._directory = ""
        self._hold = -1  # a descriptor, while the directory is ours
        self._host_numbers = itertools.count()
        self._next_process = 0
        self._next_group = 0
        # Called with each Status; yours instead of this one, if you like.
        self.log_status: Callable[[Status], None] = lambda status: log.info("%s", status)

    def __enter__(self) -> Context:
        self._running()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # --- hosts

    def request_hosts(self, n: int) -> tuple[Host, ...]:
        """``n`` hosts, at once; each tells by HostConnected when its agent has come, first come first served."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise UsageValueError(f"request_hosts takes a number of hosts, not {n!r}")
        records = [HostRecord(number) for number in itertools.islice(self._host_numbers, n)]
        for record in records:
            record.handle = Host(record, self)
        if records:
            self._running().post(HostsRequested(records))
        return tuple(record.handle for record in records)

    def return_hosts(self, hosts: Host | Sequence[Host], error: str | None = None) -> None:
        """Give hosts back: their processes are reported as aborted, and then they as disconnected.

        Their agents end everything and exit with code 0, or with 1 and ``error``. Those that are gone are passed over.
        """
        self._running().post(HostsReturned(self._records(hosts), error))

    def replace_hosts(self, hosts: Host | Sequence[Host]) -> tuple[Host, ...]:
        """Give hosts back as broken, and ask for as many others."""
        records = self._records(hosts)
        self._running().post(HostsReturned(records, "another host was asked for in its place"))
        return self.request_hosts(len(records))

    def invitation(self, address: str | None = None) -> Invitation:
        """What lets one agent join: ``transport.keys.write_invitation`` puts it into a file that only you can read,
        for ``monarch-lab agent FILE``. It holds keys: no command line, no environment variable.

        ``address``: where the agent finds us, when that is not where we listen (a forwarded port).
        """
        loop = self._running()
        return loop.call(lambda: loop.invite(address), self._settings.timeouts.stop)

    # --- processes

    def create_process_group(
        self,
        hosts: Host | Sequence[Host],
        args: Command,
        processes_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        name: str | None = None,
        simulate: bool = False,
    ) -> ProcessList:
        """Start ``processes_per_host`` processes on each host; returns at once, and each tells by ProcessStarted.

        ``args``  a command, or a FunctionCall
        ``env``   beside the agent's own; $RANK, $LOCAL_RANK and the like are filled in. RANK, WORLD_SIZE, LOCAL_RANK
                  and LOCAL_WORLD_SIZE themselves are always ours
        ``name``  of each process; {rank} is its rank, as wide as the largest. Without one: pg0, pg1, ...
        ``simulate``  say that it started and ended, and start nothing

        Processes that cannot start end with ProcessExited(ProcessFailedToStart); those of a lost host as aborted.
        """
        records = self._records(hosts)
        if isinstance(processes_per_host, bool) or not isinstance(processes_per_host, int) or processes_per_host < 1:
            raise UsageValueError(f"processes_per_host is a number above 0, not {processes_per_host!r}")
        if name is not None and not isinstance(name, str):
            raise UsageTypeError(f"name is a string, not {name!r}")
        command = checked_command(args)
        asked = checked_env(env)
        call = command.pack(self._settings.letters.largest_bytes) if isinstance(command, FunctionCall) else b""
        loop = self._running()
        world_size = len(records) * processes_per_host
        with self._lock:
            first = self._next_process
            self._next_process += world_size
            if name is None:
                name = f"pg{self._next_group}"
                self._next_group += 1
        width = len(str(max(0, world_size - 1)))
        names = [name.replace("{rank}", str(rank).zfill(width)) for rank in range(world_size)]
        made: list[ProcessRecord] = []
        for index, host in enumerate(records):
            rank = index * processes_per_host
            group = [
                self._make_process(first + r, host, r, world_size, names[r])
                for r in range(rank, rank + processes_per_host)
            ]
            order = LaunchProcesses(
                first=first + rank,
                rank=rank,
                world_size=world_size,
                per_host=processes_per_host,
                names=names[rank : rank + processes_per_host],
                logs=[process.logfile for process in group],
                argv=[] if isinstance(command, FunctionCall) else command,
                env=asked,
                cwd=os.fspath(cwd) if cwd is not None else "",
                simulate=simulate,
                window_bytes=self._settings.letters.window_bytes,
            )
            loop.post(GroupLaunched(host, group, order, call))
            made += group
        return ProcessList(process.handle for process in made)

    def _make_process(self, ident: int, host: HostRecord, rank: int, world_size: int, name: str) -> ProcessRecord:
        logfile = os.path.abspath(self._log_format.format(name=name)) if self._log_format is not None else ""
        record = ProcessRecord(ident, host, rank, world_size, name, logfile)
        record.handle = Process(record, self)
        self._backlog.open(ident)
        return record

    # --- for handles and views

    def create_process(self, host: Host, args: Command, options: dict[str, Any]) -> Process:
        return self.create_process_group(host, args, **options)[0]

    def send_to(self, processes: Sequence[ProcessRecord], message: object) -> None:
        """Pickle once, wait for room, send."""
        loop = self._running()
        data = pack_letter(message, self._settings.letters.largest_bytes)
        idents = [process.ident for process in processes]
        live = set(self._backlog.reserve(idents, len(data), self._settings.timeouts.letter_taken))
        if live:
            loop.post(LetterSent([process for process in processes if process.ident in live], data))

    def post(self, event: Any) -> None:
        self._running().post(event)

    def _taken(self, sender: Any, size: int) -> None:
        loop = self._loop
        if loop is not None and isinstance(sender, Process):
            loop.post(LetterTaken(sender._record, size + LETTER_COST_BYTES))  # noqa: SLF001

    def _records(self, hosts: Host | Sequence[Host]) -> list[HostRecord]:
        listed = [hosts] if isinstance(hosts, Host) else list(hosts)
        for host in listed:
            if not isinstance(host, Host):
                raise UsageTypeError(f"{host!r} is no Host; request_hosts gives them")
        if len({id(host) for host in listed}) < len(listed):
            raise UsageValueError("a host is named twice")
        return [host.record_for(self) for host in listed]

    # --- how it is, and the end

    def status(self) -> Status:
        """Of this moment. Starts a new interval for the figures that are counted between two."""
        loop = self._running()
        return loop.call(lambda: loop.status(time.monotonic()), self._settings.timeouts.stop)

    def shutdown(self) -> None:
        """Give every host back and end: all processes are gone then. Within ``timeouts.stop``; again: does nothing.

        Letters that came can still be received.
        """
        with self._lock:
            loop, self._is_closed = self._loop, True
        if loop is None:
            self._inbox.close(_CLOSED)
            return
        loop.post(ShutdownAsked())
        timeouts = self._settings.timeouts
        # The loop keeps to the bound itself; one more grace is for a machine that stands still.
        if loop.join(timeouts.stop + timeouts.stop_grace):
            with self._lock:
                if self._hold >= 0:
                    remove_directory(self._directory)
                    os.close(self._hold)
                    self._hold = -1

    def _running(self) -> ContextLoop:
        with self._lock:
            if self._is_closed:
                raise ClosedError(_CLOSED)
            if self._loop is None:
                self._loop = self._start()
            return self._loop

    def _start(self) -> ContextLoop:
        self._directory = make_directory()
        self._hold = hold_directory(self._directory)
        sweep_directories(os.path.dirname(self._directory))
        timeouts = self._settings.timeouts
        plan = LoopPlan(
            address=self._listen or f"ipc://{self._directory}/hub.ipc",
            directory=self._directory,
            times=HostTimes(
                timeouts.beat, timeouts.lease, timeouts.unreachable, timeouts.lost, timeouts.stop_grace, timeouts.stop
            ),
            settings=self._settings,
            starts_agents=self._starts_agents,
            status_s=self._log_interval,
            on_status=lambda status: self.log_status(status),
        )
        loop = ContextLoop(plan, self._inbox, self._backlog)
        try:
            loop.start()
        except BaseException as e:
            remove_directory(self._directory)
            os.close(self._hold)
            if isinstance(e, (OSError, zmq.ZMQError)):
                raise LaunchError(f"the supervisor cannot listen at {plan.address}: {e}") from e
            raise
        return loop


def _with_times(
    settings: Settings, beat: float | None, unreachable: float | None, lost: float | None, lease: float | None
) -> Settings:
    asked = {"beat": beat, "unreachable": unreachable, "lost": lost, "lease": lease}
    timeouts = replace(settings.timeouts, **{name: float(value) for name, value in asked.items() if value is not None})
    if not 0 < timeouts.beat < timeouts.unreachable < timeouts.lost < timeouts.lease:
        raise UsageValueError(
            f"a beat ({timeouts.beat:g} s) must be shorter than unreachable_after ({timeouts.unreachable:g} s), that"
            f" than lost_after ({timeouts.lost:g} s), and that than the lease ({timeouts.lease:g} s)"
        )
    return replace(settings, timeouts=timeouts)


def _checked_listen(listen: str) -> str:
    """The hub's address; "" for a socket in the context's own directory."""
    if listen == "ipc":
        return ""
    if listen == "tcp":
        return "tcp://127.0.0.1:*"
    if isinstance(listen, str) and listen.startswith("tcp://") and len(listen) > len("tcp://"):
        host, _, port = listen.removeprefix("tcp://").rpartition(":")
        if host and (port == "*" or port.isdecimal()):
            return listen
        return f"{listen}:*"
    raise UsageValueError(f'listen is "ipc", "tcp" or "tcp://ADDRESS", not {listen!r}')


def _checked_log_format(log_format: str | None) -> str | None:
    if log_format is None:
        return None
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(log_format) if field is not None]
    except ValueError as e:
        raise UsageValueError(f"log_format {log_format!r} is no path with {{name}}: {e}") from None
    if fields != ["name"] * len(fields) or not fields:
        raise UsageValueError(f"log_format is a path with {{name}} and no other field, not {log_format!r}")
    return log_format
