"""Every setting, and the only reader of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields

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
    stop_grace: float = 3.0  # between asking a worker to end and SIGKILL
    stop: float = 15.0  # stop() returns
    # The link to a host's agent (docs/protocol.md).
    link_ack: float = 0.02  # what was heard is acknowledged
    link_resend: float = 0.5  # at the earliest, what was not acknowledged is sent again
    link_resend_at_most: float = 4.0  # the longest pause between two tries
    link_handshake: float = 5.0  # a connection that has not proved itself is closed
    link_connection: float = 5.0  # a TCP connection that moves nothing is made anew
    unreachable: float = 10.0  # a silent host is shown as such
    lost: float = 15.0  # a silent host is given up, with its processes
    lease: float = 600.0  # an agent that hears nothing from its owner ends everything


@dataclass(frozen=True, slots=True)
class Engine:
    """How ops are batched. Counts of ops, unless named otherwise."""

    flush_ops: int = 128
    flush_after_s: float = 0.001
    max_batches_in_flight: int = 64
    report_every_batches: int = 8
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
class Settings:
    timeouts: Timeouts = Timeouts()
    engine: Engine = Engine()
    link: Link = Link()
    default_cpu_workers: int = 2
    log_dir: str = ""  # "" is a directory of the mesh's own, removed when it stops


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from ``MONARCH_LAB_*`` variables; a table's field is ``MONARCH_LAB_TIMEOUTS_BEAT``.

    Raises UsageValueError for an unknown name (with the nearest known one) or a value of the wrong kind.
    """
    import difflib

    environ = os.environ if environ is None else environ
    groups: dict[str, dict[str, object]] = {"TIMEOUTS": {}, "ENGINE": {}, "LINK": {}, "": {}}
    known: dict[str, tuple[str, str, type]] = {}
    for group, cls in (("TIMEOUTS", Timeouts), ("ENGINE", Engine), ("LINK", Link), ("", Settings)):
        for f in fields(cls):
            default = getattr(cls(), f.name)
            if isinstance(default, (int, float, str)):
                name = PREFIX + (group + "_" if group else "") + f.name.upper()
                known[name] = (group, f.name, type(default))
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in (MARK_VARIABLE,):
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageValueError(f"{name} is not a setting of monarch_lab{hint}")
        group, attribute, kind = known[name]
        try:
            groups[group][attribute] = kind(text)
        except ValueError:
            raise UsageValueError(f"{name}={text!r} is not a valid {kind.__name__}") from None
    return Settings(
        timeouts=Timeouts(**groups["TIMEOUTS"]),  # type: ignore[arg-type]
        engine=Engine(**groups["ENGINE"]),  # type: ignore[arg-type]
        link=Link(**groups["LINK"]),  # type: ignore[arg-type]
        **groups[""],  # type: ignore[arg-type]
    )


def narrow_to_gpu(local_rank: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Let this process see one GPU: entry ``local_rank`` of CUDA_VISIBLE_DEVICES, or of all. Before CUDA is touched."""
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if environ.get("CUDA_VISIBLE_DEVICES") else None
    environ["CUDA_VISIBLE_DEVICES"] = str(local_rank) if visible is None else visible[local_rank].strip()


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
