"""Meshes without workers, for the notebook: ``install()`` puts them where ``monarch_lab.session`` would be.

What a cell's ops do is what a test queues: ``client.prints`` comes out while the cell waits, ``client.fails`` is
what the wait ends with. ``client.log`` tells what the notebook asked, in order.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from monarch_lab.errors import ClosedError, DeviceException, RemoteFrame, UsageValueError
from monarch_lab.wire.looking import Memory
from monarch_lab.wire.ranks import parse_ranks
from monarch_lab.wire.snapshot import MeshSnapshot, MeshState, ProcessSnapshot

MIB = 1 << 20
_meshes: dict[str, FakeMesh] = {}
active: list[FakeMesh] = []


@dataclass
class Prompt:
    """controller.front.DebugPrompt, without what that package imports."""

    rank: int
    label: str
    text: str
    prompt: str
    alive: Callable[[], bool]


class FakeClient:
    def __init__(self) -> None:
        self.front: Any = None
        self.log: list[str] = []
        self.cells = 0
        self.prints: list[tuple[int, str, str]] = []  # rank, stream, text: shown at the next sync
        self.fails: list[BaseException] = []  # the next syncs raise these, one each
        self.during_sync: Callable[[FakeClient], None] | None = None

    def begin_cell(self, name: str) -> int:
        self.cells += 1
        self.log.append(f"begin {name}")
        return self.cells

    def end_cell(self, number: int) -> None:
        self.log.append("end")

    def sync(self) -> None:
        __tracebackhide__ = True  # as the frames of the real one are
        self.log.append("sync")
        for rank, stream, text in self.prints:
            self.front.output(self.cells, rank, f"0.{rank}", stream, text)
        self.prints.clear()
        if self.during_sync is not None:
            self.during_sync(self)
        if self.fails:
            raise self.fails.pop(0)

    def stop_cell(self) -> None:
        self.log.append("interrupt")


class FakeMesh:
    names = ("host", "gpu")

    def __init__(self, name: str = "mesh", hosts: int = 1, gpus: int = 2) -> None:
        self.name = name
        self.sizes = {"host": hosts, "gpu": gpus}
        self.client = FakeClient()
        self.state: MeshState = "live"
        self.note = ""
        self.acted: list[str] = []
        self.stuck: set[int] = set()
        self.on_exit: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        try:
            yield
        finally:
            active.remove(self)

    def activate(self) -> contextlib.AbstractContextManager[None]:
        active.append(self)
        return self._active()

    def interrupt(self, ranks: str | None = None) -> tuple[int, ...]:
        if ranks is None:
            self.client.stop_cell()
            return ()
        self.acted.append(f"interrupt {self.chosen(ranks)}")
        return tuple(rank for rank in self.chosen(ranks) if rank in self.stuck)

    def stacks(self, ranks: str | None = None) -> Any:
        from monarch_lab.controller.looking import RankStacks, Stacks, ThreadStack

        frames = (RemoteFrame("/src/train.py", 7, "step", "loss.backward()"),)
        return Stacks({rank: RankStacks((ThreadStack("MainThread", frames),)) for rank in self.chosen(ranks)})

    def memory(self, ranks: str | None = None) -> dict[int, Memory]:
        told = Memory(300 * MIB, 100 * MIB, 4 * MIB, 2, 0, [("model", 3 * MIB)])
        return {rank: told for rank in self.chosen(ranks) if rank not in self.stuck}

    def chosen(self, ranks: str | None) -> tuple[int, ...]:
        return parse_ranks("all" if ranks is None else ranks, self.sizes)

    def __len__(self) -> int:
        return self.sizes["host"] * self.sizes["gpu"]

    def restart(self, ranks: str | None = None) -> tuple[int, ...]:
        self.acted.append(f"restart {self.chosen(ranks)}")
        return self.chosen(ranks)

    def kill(self, ranks: str) -> tuple[int, ...]:
        self.acted.append(f"kill {self.chosen(ranks)}")
        return self.chosen(ranks)

    def die(self, note: str) -> None:
        self.state, self.note = "dead", note

    def check_alive(self) -> None:
        __tracebackhide__ = True
        if self.state == "dead":
            raise DeviceException(f'Mesh "{self.name}" is dead: {self.note}. Type %mesh start')
        if self.state == "closed":
            raise ClosedError(f'Mesh "{self.name}" was stopped')

    def exit(self) -> None:
        self.on_exit()
        self.state = "closed"
        _meshes.pop(self.name, None)

    def status(self) -> MeshSnapshot:
        state = "exited" if self.state == "dead" else "idle"
        processes = [
            ProcessSnapshot(rank, f"{rank // self.sizes['gpu']}.{rank % self.sizes['gpu']}", "h0", 4000 + rank, state)
            for rank in range(self.sizes["host"] * self.sizes["gpu"])
        ]
        return MeshSnapshot(self.name, self.state, list(self.sizes.items()), "cpu", processes, note=self.note)


class MeshTensor:
    """What the notebook must not keep alive."""

    def __repr__(self) -> str:
        return "tensor on the mesh"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": "<b>tensor on the mesh</b>"}


def start_local(
    *,
    hosts: int = 1,
    gpus_per_host: int | None = None,
    name: str = "mesh",
    device: str | None = None,
    env: dict[str, str] | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> FakeMesh:
    __tracebackhide__ = True
    if gpus_per_host is not None and gpus_per_host > 8:
        raise UsageValueError(f"{gpus_per_host} GPUs for each host were asked for, this machine has 0")
    mesh = FakeMesh(name, hosts, gpus_per_host or 2)
    workers = hosts * (gpus_per_host or 2)
    for step in (("agent", 0, 1), ("import torch", 0, 1), ("workers", 0, workers)):
        if on_progress is not None:
            on_progress(*step)
    if on_progress is not None:
        on_progress("workers", workers, workers)
    _meshes[name] = mesh
    return mesh


def meshes() -> dict[str, FakeMesh]:
    return dict(_meshes)


# What find_meshes finds.
found: list[Any] = []


def find_meshes() -> list[Any]:
    return list(found)


FAKES = {
    "monarch_lab.session": ("meshes", "start_local"),
    "monarch_lab.session.found": ("find_meshes",),
    "monarch_lab.controller.tensor": ("MeshTensor",),
}


_real: dict[str, types.ModuleType | None] = {}


def install() -> None:
    """Until ``uninstall``, the notebook's session and mesh tensors are these, whatever was imported before."""
    for name, members in FAKES.items():
        module = types.ModuleType(name)
        for member in members:
            setattr(module, member, globals()[member])
        _real[name] = sys.modules.get(name)
        _put(name, module)


def uninstall() -> None:
    for name in FAKES:
        _put(name, _real.pop(name, None))
    _meshes.clear()
    active.clear()
    found.clear()


def _put(name: str, module: types.ModuleType | None) -> None:
    """As an import does: in sys.modules, and as an attribute of the package that holds it."""
    package, _, last = name.rpartition(".")
    parent = sys.modules.get(package)
    if module is not None:
        sys.modules[name] = module
        if parent is not None:
            setattr(parent, last, module)
        return
    sys.modules.pop(name, None)
    if parent is not None and last in vars(parent):
        delattr(parent, last)
