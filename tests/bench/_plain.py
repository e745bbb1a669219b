"""Plain processes to measure against: torch.multiprocessing with a pipe each, as a user would write it by hand."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch


def _serve(rank: int, connection: Any) -> None:
    """Runs in the process: calls what arrives, sends back what it gave."""
    import cloudpickle

    torch.set_num_threads(1)
    torch.ones(2) + 1  # noqa: B018  (an op has run, as in a worker that is ready)
    connection.send(os.getpid())
    kept: dict[str, Any] = {}
    while (call := connection.recv()) is not None:
        try:
            fn, args = cloudpickle.loads(call)
            connection.send((True, fn(rank, kept, *args)))
        except Exception:
            connection.send((False, traceback.format_exc()))


class PlainProcesses:
    """``with PlainProcesses(n) as plain``: n spawned processes that have imported torch; ``call`` runs on all."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pids: list[int] = []

    def __enter__(self) -> PlainProcesses:
        context = torch.multiprocessing.get_context("spawn")
        self._connections, self._processes = [], []
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.pids = [connection.recv() for connection in self._connections]
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for connection in self._connections:
            try:
                connection.send(None)
            except OSError:  # it has died: its join says no more
                pass
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def call(self, fn: Callable[..., Any], *args: Any) -> Sequence[Any]:
        """``fn(rank, kept, *args)`` on each, ``kept`` a dict of the process's own; the answers by rank."""
        import cloudpickle

        pickled = cloudpickle.dumps((fn, args))
        for connection in self._connections:
            connection.send(pickled)
        answers = [connection.recv() for connection in self._connections]
        for rank, (is_good, value) in enumerate(answers):
            if not is_good:
                raise RuntimeError(f"plain process {rank}: {value}")
        return [value for _, value in answers]
