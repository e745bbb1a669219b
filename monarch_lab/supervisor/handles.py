"""What users hold of hosts and processes. They read records that the supervisor's loop writes, and send it commands."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol, SupportsIndex, overload

from monarch_lab.errors import UsageTypeError, UsageValueError
from monarch_lab.supervisor.core_events import SignalSent
from monarch_lab.supervisor.function_call import FunctionCall
from monarch_lab.supervisor.records import HostRecord, ProcessRecord

Command = Sequence[str | PurePath] | FunctionCall | Callable[..., Any]


class Office(Protocol):
    """The context, as its handles see it."""

    def send_to(self, processes: Sequence[ProcessRecord], message: object) -> None: ...

    def post(self, event: Any) -> None: ...

    def create_process(self, host: Host, args: Command, options: dict[str, Any]) -> Process: ...


class Host:
    """A host that was asked for: an agent comes to it, or has gone."""

    __slots__ = ("_record", "_office", "__weakref__")

    def __init__(self, record: HostRecord, office: Office) -> None:
        self._record = record
        self._office = office

    @property
    def hostname(self) -> str | None:
        """None until an agent has come."""
        return self._record.hostname or None

    @property
    def state(self) -> str:
        """ "unattached", "attached", "unreachable", "lost" or "closed", of this moment."""
        return self._record.state.name.lower()

    @property
    def reason(self) -> str:
        """Why it was lost, or given back; "" before."""
        return self._record.reason

    def create_process(
        self,
        args: Command,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        name: str | None = None,
        simulate: bool = False,
    ) -> Process:
        """A group of one process; see Context.create_process_group."""
        return self._office.create_process(self, args, dict(env=env, cwd=cwd, name=name, simulate=simulate))

    def record_for(self, office: Office) -> HostRecord:
        """Raises UsageValueError for a host of another context."""
        if office is not self._office:
            raise UsageValueError(f"{self!r} belongs to another context")
        return self._record

    def __repr__(self) -> str:
        return f"<Host {self._record.ident} {self.hostname or ''} {self.state}>"


class Process:
    __slots__ = ("_record", "_office", "__weakref__")

    def __init__(self, record: ProcessRecord, office: Office) -> None:
        self._record = record
        self._office = office

    @property
    def rank(self) -> int:
        return self._record.rank

    @property
    def host(self) -> Host:
        host: Host = self._record.host.handle
        return host

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def logfile(self) -> str | None:
        """Where its stdout and stderr go; None where it inherits its agent's."""
        return self._record.logfile or None

    @property
    def pid(self) -> int | None:
        """None until it has started."""
        return self._record.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal; None while it runs and where nobody knows."""
        return self._record.returncode

    @property
    def state(self) -> str:
        """ "launching", "running", "exited", "not_started" or "lost", of this moment."""
        return self._record.state.name.lower()

    def send(self, message: object) -> None:
        """Pickled now, sent soon; dropped when the process has ended.

        Waits while too much of what was sent before is not read, then DeviceException. UsageError for what cannot be
        pickled or is too large.
        """
        self._office.send_to([self._record], message)

    def signal(self, sig: int = signal.SIGTERM, group: bool = True) -> None:
        """To its whole process group, or to it alone. Nothing happens when it has ended."""
        self._office.post(SignalSent([self._record], _checked_signal(sig), group))

    def __repr__(self) -> str:
        return f"<Process {self.name} rank {self.rank} {self.state}>"


class ProcessList(tuple[Process, ...]):
    """The processes of a group, by rank. A slice is one too."""

    __slots__ = ()

    @overload
    def __getitem__(self, at: SupportsIndex) -> Process: ...
    @overload
    def __getitem__(self, at: slice) -> ProcessList: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Process | ProcessList:
        found = super().__getitem__(at)
        return ProcessList(found) if isinstance(at, slice) else found  # type: ignore[arg-type,return-value]

    def send(self, message: object) -> None:
        """The same message to each: pickled once, and one message on the wire a host. As Process.send otherwise."""
        for office, records in _by_office(self):
            office.send_to(records, message)

    def signal(self, sig: int = signal.SIGTERM, group: bool = True) -> None:
        for office, records in _by_office(self):
            office.post(SignalSent(records, _checked_signal(sig), group))


def _by_office(processes: Iterable[Process]) -> list[tuple[Office, list[ProcessRecord]]]:
    found: dict[int, tuple[Office, list[ProcessRecord]]] = {}
    for process in processes:
        office, record = process._office, process._record  # noqa: SLF001 - of this module's own class
        found.setdefault(id(office), (office, []))[1].append(record)
    return list(found.values())


def _checked_signal(sig: int) -> int:
    try:
        return int(signal.Signals(sig))
    except ValueError:
        raise UsageValueError(f"{sig!r} is no signal of this system") from None


def checked_command(args: Command) -> list[str] | FunctionCall:
    """Raises UsageTypeError or UsageValueError for what no process can run."""
    if isinstance(args, FunctionCall):
        return args
    if callable(args):
        return FunctionCall(args)
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise UsageTypeError(f"args is a sequence of strings, or a FunctionCall, not {args!r}")
    command = [os.fspath(arg) if isinstance(arg, os.PathLike) else arg for arg in args]
    if not command:
        raise UsageValueError("args is empty: there is nothing to run")
    for arg in command:
        if not isinstance(arg, str):
            raise UsageTypeError(f"args holds {arg!r}, which is no string")
        if "\0" in arg:
            raise UsageValueError(f"args holds {arg!r}: no command line can carry a zero byte")
    return command


def checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    env = dict(env or {})
    for name, text in env.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise UsageTypeError(f"env maps strings to strings; {name!r}: {text!r} does not")
        if not name or "=" in name or "\0" in name + text:
            raise UsageValueError(f"env holds {name!r}={text!r}, which no environment can carry")
    return env
