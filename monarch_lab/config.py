"""Every setting, and the only reader of the environment and of the user's file of settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from monarch_lab.errors import UsageValueError

PREFIX = "MONARCH_LAB_"
# Inherited by every process of a mesh, so that a sweep finds what a worker left behind.
MARK_VARIABLE = "MONARCH_LAB_MARK"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """One table: each outer time is longer than what it waits for (a test asserts it). Seconds."""

    beat: float = 1.0  # an agent reports its processes
    agent_hello: float = 30.0  # the agent's own interpreter is up
    zygote_ready: float = 120.0  # torch imported in the zygote, on a slow disk
    worker_hello: float = 150.0  # a forked worker has said hello, its zygote's import included
    interrupt_heard: float = 1.0  # SIGINT reached user code
    prompt_back: float = 5.0  # the cell ends, whatever the workers do
    stopped_told: float = 3.0  # a worker stopped by a signal is told
    stop_grace: float = 3.0  # between asking a worker to end and SIGKILL
    stop: float = 15.0  # stop() returns
    look: float = 1.0  # how often silence is judged
    unreachable: float = 10.0  # a silent host is shown as such
    lost: float = 15.0  # a silent host is given up, with its processes
    # The link to a host's agent (docs/protocol.md).
    link_ack: float = 0.02  # what was heard is acknowledged
    link_resend: float = 0.5  # at the earliest, what was not acknowledged is sent again
    link_resend_at_most: float = 4.0  # the longest pause between two tries
    link_handshake: float = 5.0  # a connection that has not proved itself is closed
    link_connection: float = 5.0  # a TCP connection that moves nothing is made anew
    lease: float = 600.0  # an agent that hears nothing from its owner ends everything
    letter_taken: float = 30.0  # a process that does not read makes room for another letter


class SocketType(StrEnum):
    """How kernel and workers of one machine are connected."""

    UNIX = "unix"  # sockets in a directory that only the user can enter
    TCP = "tcp"  # the loopback interface, every connection encrypted and of a listed key


class LoggingLocation(StrEnum):
    """Where C code of the workers writes."""

    FILE = "file"  # a file for each worker and stream, in the mesh's directory or MONARCH_LAB_LOG_DIR
    DEFAULT = "default"  # where the kernel's own goes


@dataclass(frozen=True, slots=True)
class Engine:
    """How ops are batched. Counts of ops, unless named otherwise."""

    flush_ops: int = 128
    flush_after_s: float = 0.001
    max_batches_in_flight: int = 64
    cache_entries: int = 20_000


@dataclass(frozen=True, slots=True)
class Link:
    """What the link to one host may hold. Bytes, unless named otherwise."""

    message_bytes: int = 256 << 20
    piece_bytes: int = 1 << 20  # larger messages travel in pieces, between which a beat gets through
    window_bytes: int = 32 << 20  # under way and not acknowledged
    window_messages: int = 1024
    backlog_bytes: int = 1 << 30  # under way or waiting; more is an error


@dataclass(frozen=True, slots=True)
class Letters:
    """Between the supervision library and the processes it started. Bytes."""

    window_bytes: int = 64 << 20  # sent to a process, or by it, and not read
    largest_bytes: int = 255 << 20  # one letter: less than a message of the link


@dataclass(frozen=True, slots=True)
class SupervisionParams:
    """How a mesh's host is watched, in seconds. None: as ``Timeouts`` has it.

    update_timeout   a host that was silent for so long is lost, and its processes with it (15)
    query_interval   how often that is looked at (1)
    update_interval  how often the host reports its processes (1)
    """

    update_timeout: float | None = None
    query_interval: float | None = None
    update_interval: float | None = None

    def __post_init__(self) -> None:
        _check_positive(self)

    def applied(self, timeouts: Timeouts) -> Timeouts:
        """The table with these in it. UsageValueError where they do not fit together."""
        lost = self.update_timeout or timeouts.lost
        changed = replace(
            timeouts,
            lost=lost,
            unreachable=min(timeouts.unreachable, lost * 2 / 3),
            look=self.query_interval or timeouts.look,
            beat=self.update_interval or timeouts.beat,
        )
        if lost <= 2 * max(changed.look, changed.beat):
            raise UsageValueError(
                f"SupervisionParams: update_timeout ({lost:g} s) must be more than twice query_interval "
                f"({changed.look:g} s) and update_interval ({changed.beat:g} s)"
            )
        return changed


@dataclass(frozen=True, slots=True)
class ControllerParams:
    """When an operation counts as stuck. Seconds, but for the count.

    progress_check_interval          how often the ranks' progress is looked at
    operation_timeout                a rank that is in one operation for so long is told of, once
    operations_per_progress_request  after so many ops the ranks are asked how far they are
    fail_on_worker_timeout           such a rank then counts as failed: waits for it end with DeviceException
    """

    progress_check_interval: float = 10.0
    operation_timeout: float = 120.0
    operations_per_progress_request: int = 1024
    fail_on_worker_timeout: bool = False

    def __post_init__(self) -> None:
        _check_positive(self)


def _check_positive(params: SupervisionParams | ControllerParams) -> None:
    for f in fields(params):
        value = getattr(params, f.name)
        if value is None or isinstance(value, bool):
            continue
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise UsageValueError(f"{type(params).__name__}: {f.name} is a positive number, not {value!r}")


@dataclass(frozen=True, slots=True)
class Settings:
    timeouts: Timeouts = Timeouts()
    controller: ControllerParams = ControllerParams()
    engine: Engine = Engine()
    link: Link = Link()
    letters: Letters = Letters()
    default_cpu_workers: int = 2
    warm_pool: int = 1  # spares (agent and zygote) kept ready for a later mesh: 0 or 1
    warm_pool_delay: float = 5.0  # seconds between a mesh that has come up and the making of a spare
    warm_pool_idle: float = 600.0  # seconds after which a spare that nobody took is ended
    faults: str = ""  # made on purpose, for tests: transport/faults.py
    log_dir: str = ""  # "" is a directory of the mesh's own, removed when it stops


# Prefix of the variables -> table; "" is Settings itself, whose other fields these tables are.
_GROUPS: dict[str, type] = {
    "TIMEOUTS": Timeouts,
    "ENGINE": Engine,
    "CONTROLLER": ControllerParams,
    "LINK": Link,
    "LETTERS": Letters,
    "": Settings,
}
_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Described:
    """One setting: its ``name`` in the file, its ``value``, and the variable or file that gives it, or DEFAULT."""

    name: str
    value: object
    source: str


def file_path(environ: Mapping[str, str] | None = None) -> str:
    """Of the user's settings; "" where there is no home."""
    environ = os.environ if environ is None else environ
    home = environ.get("HOME", "")
    folder = environ.get("XDG_CONFIG_HOME") or (os.path.join(home, ".config") if home else "")
    return os.path.join(folder, "monarch_lab.toml") if folder else ""


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from ``~/.config/monarch_lab.toml`` and, before it, ``MONARCH_LAB_*`` variables.

    A table's field is ``beat`` under ``[timeouts]`` in the file and ``MONARCH_LAB_TIMEOUTS_BEAT`` as a variable. Raises
    UsageValueError for an unknown name (with the nearest known one), a value of the wrong kind, a file that is no TOML.
    """
    found = _given(os.environ if environ is None else environ)
    groups: dict[str, dict[str, object]] = {group: {} for group in _GROUPS}
    for (group, name), (value, _) in found.items():
        groups[group][name] = value
    spare, source = found.get(("", "warm_pool"), (1, ""))
    if spare not in (0, 1):
        raise UsageValueError(f"{source}={spare} is too many: it is 0 (no spare) or 1")
    tables = {group.lower(): cls(**groups[group]) for group, cls in _GROUPS.items() if group}
    return Settings(**tables, **groups[""])  # type: ignore[arg-type]


def described(environ: Mapping[str, str] | None = None) -> list[Described]:
    """Every setting, in the order of the tables. Raises what ``load`` does."""
    found = _given(os.environ if environ is None else environ)
    rows = []
    for group, name, default in _known():
        value, source = found.get((group, name), (default, DEFAULT))
        rows.append(Described(f"{group.lower()}.{name}" if group else name, value, source))
    return rows


def _known() -> list[tuple[str, str, object]]:
    """(table, name, default) of every setting."""
    found: list[tuple[str, str, object]] = []
    for group, cls in _GROUPS.items():
        for f in fields(cls):
            default = getattr(cls(), f.name)
            if isinstance(default, (int, float, str)):
                found.append((group, f.name, default))
    return found


def _given(environ: Mapping[str, str]) -> dict[tuple[str, str], tuple[object, str]]:
    """(table, name) -> (value, where it comes from) of those that were set; a variable counts before the file."""
    kinds = {(group, name): type(default) for group, name, default in _known()}
    found = _from_file(file_path(environ), kinds)
    by_variable = {PREFIX + (f"{group}_" if group else "") + name.upper(): (group, name) for group, name in kinds}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in (MARK_VARIABLE,):
            continue
        if variable not in by_variable:
            raise UsageValueError(f"{variable} is not a setting of monarch_lab{_hint(variable, by_variable)}")
        key = by_variable[variable]
        kind = kinds[key]
        try:
            found[key] = (_BOOLS[text.lower()] if kind is bool else kind(text), variable)  # type: ignore[call-arg]
        except (ValueError, KeyError):
            raise UsageValueError(f"{variable}={text!r} is not a valid {kind.__name__}") from None
    return found


def _from_file(path: str, kinds: Mapping[tuple[str, str], type]) -> dict[tuple[str, str], tuple[object, str]]:
    import tomllib

    try:
        with open(path, "rb") as file:
            read = tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as e:
        raise UsageValueError(f"{path} cannot be read: {e}") from None
    found: dict[tuple[str, str], tuple[object, str]] = {}
    names = {f"{group.lower()}.{name}" if group else name: (group, name) for group, name in kinds}
    for name, value in _flattened(read):
        if name not in names:
            raise UsageValueError(f"{name} in {path} is not a setting of monarch_lab{_hint(name, names)}")
        kind = kinds[names[name]]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UsageValueError(f"{name} = {value!r} in {path} is not a valid {kind.__name__}")
        found[names[name]] = (value, path)
    return found


def _flattened(read: Mapping[str, object]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in read.items():
        if isinstance(value, Mapping):
            found += [(f"{name}.{inner}", v) for inner, v in value.items()]
        else:
            found.append((name, value))
    return found


def _hint(name: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def visible_devices(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None where it says nothing."""
    named = (os.environ if environ is None else environ).get(VISIBLE_DEVICES)
    return [name.strip() for name in named.split(",")] if named else None


def narrow_to_gpu(index: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Let this process see one GPU: entry ``index`` of CUDA_VISIBLE_DEVICES, or of all. Before CUDA is touched."""
    environ = os.environ if environ is None else environ
    visible = visible_devices(environ)
    environ[VISIBLE_DEVICES] = str(index) if visible is None else visible[index]


def threads_of_worker(workers: int, environ: Mapping[str, str] | None = None) -> int:
    """Threads for the ops of one of ``workers`` on a host: OMP_NUM_THREADS where it is set, or a share of the cores.

    One core is left to the controller: OpenMP's threads wait for each other, and one that shares its core with the
    issuing thread makes a step of milliseconds one of a hundred. The zygote's OpenMP has read the variable long
    before, so it is read again in each worker.
    """
    asked = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (cores - 1) // max(1, workers))
