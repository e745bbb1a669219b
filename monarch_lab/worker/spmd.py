"""``%%spmd`` cells on this process: the namespace that lasts, and running one cell in it.

Runs on: the main thread; ``stop_waiting`` on the reader thread.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.utils import _device as default_device

from monarch_lab.tensors import ambient, payload
from monarch_lab.tensors.meta import describe
from monarch_lab.wire import engine as wire
from monarch_lab.wire.shape import Slice
from monarch_lab.wire.supervision import WorkerSpec
from monarch_lab.worker import randomness
from monarch_lab.worker.debugger import Debugger
from monarch_lab.worker.engine import Engine, _portable
from monarch_lab.worker.failures import DependentOnError, Failed
from monarch_lab.worker.failures import describe as describe_error
from monarch_lab.worker.learning import version
from monarch_lab.worker.spmd_group import SpmdGroup
from monarch_lab.worker.spmd_shell import SpmdShell
from monarch_lab.worker.syncing import Modules

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_OURS = {"rank", "local_rank", "world_size", "device", "mesh_coordinates"}
_LAST = "_monarch_lab_last"
_MAX_SHOWN = 20_000  # characters of a value's repr


class Spmd:
    """Made once for a worker; the namespace is made with the first cell."""

    def __init__(self, engine: Engine, spec: WorkerSpec, flush: Callable[[], None], debugger: Debugger) -> None:
        self._engine = engine
        self._debugger = debugger
        self._spec = spec
        self.group = SpmdGroup(spec)
        self._module = types.ModuleType("__main__")
        self.shell = SpmdShell(self._module, engine, flush)
        self._bound: dict[str, int] = {}  # name -> ref of the notebook's tensor that was put there last
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # ref -> (the shard, its version)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._random: tuple[torch.Tensor, ...] | None = None
        self._device: torch.device | None = None  # of set_default_device
        self._state = ambient.capture()  # of torch, before anything has changed it
        self._running = 0  # the cell's ident
        self.in_cell = False  # the user's lines run; a cell that has caught one interrupt hears the next
        self._is_freed = False
        self._files: set[str] = set()
        self._modules = Modules()

    @property
    def namespace(self) -> dict[str, Any]:
        """Variables of the cells."""
        names = self._module.__dict__
        if "rank" not in names:
            spec = self._spec
            names |= {
                "__builtins__": builtins,  # the module, as in a script: else locals() shows all of them
                "rank": spec.rank,
                "local_rank": spec.local_rank,
                "world_size": spec.world_size,
                "device": torch.device("cuda:0" if spec.device == "cuda" else "cpu"),
                "torch": torch,
                "dist": dist,
            }
        return names

    def run(self, order: wire.RunSpmd) -> None:
        """Answers with SpmdEnded, whatever happens."""
        self._engine.cell = order.cell
        self._is_freed = False
        self._written()  # by the notebook's own ops since: it knows
        self._running = order.ident
        self.group.begin()
        shown, rich, failure, missing, was_severed = None, "", None, "", False
        outs: list[wire.TensorMeta | str] = []
        try:
            self.group.form(order.group)
            if self._spec.rank in order.ranks:
                shown, rich = self._run_cell(order)
                outs = [self._lift(name, ref) for name, ref in order.out]
        except BaseException as e:
            failure = e.failure if isinstance(e, DependentOnError) else self._failure(e)
            was_severed = isinstance(e, RuntimeError)
            missing = e.name or "" if isinstance(e, NameError) else ""
        finally:
            self._running = 0
            self._engine.interruptible = False
        # A rank that was slow to raise its own error was not waiting, though it was told not to.
        freed = self._is_freed and was_severed
        self._engine.report(
            wire.SpmdEnded(
                order.ident,
                shown=shown,
                rich=rich,
                failure=failure,
                freed=freed,
                missing=missing,
                outs=outs,
                written=self._written(),
                sequences={} if self._is_freed else self.group.sequences(),
                names=self._users_names(),
            )
        )
        if failure is not None:
            gc.collect()  # frames that failed are often in cycles with their exception, and hold large tensors

    def stop_waiting(self, ident: int | None = None) -> None:
        """End the wait of the running cell in a collective; None: whichever cell runs. Runs on: the reader thread."""
        if self._running and ident in (None, self._running):
            self._is_freed = True
            self.group.sever()

    def push(self, order: wire.PushSpmd, frames: Sequence[bytes | memoryview]) -> None:
        """Answers with Fetched or FetchFailed."""
        try:
            payload.remember_sources(order.sources)
            self.namespace.update(zip(order.names, payload.loads(frames) if order.names else [], strict=True))
            self._bind(order.shards)
        except BaseException as e:
            self._refuse(order.ident, e)
            return
        self._engine.report(wire.Fetched(order.ident), ())

    def pull(self, order: wire.PullSpmd) -> None:
        """Answers with Fetched or FetchFailed."""
        try:
            for name in order.names:
                if name not in self.namespace:
                    raise NameError(f"name {name!r} is not defined on rank {self._spec.rank}", name=name)
            values = [self.namespace[name] for name in order.names]
            frames, sources = payload.dumps(torch.utils._pytree.tree_map(_portable, values))
        except BaseException as e:
            self._refuse(order.ident, e)
            return
        self._engine.report(wire.Fetched(order.ident), frames)

    def sync(self, order: wire.SyncModules) -> None:
        """Answers with Fetched or FetchFailed."""
        try:
            with self._engine.user_code(order.ident):
                frames, _ = payload.dumps([self._modules.sync(order.path, self.namespace)])
        except BaseException as e:
            self._refuse(order.ident, e)
            return
        self._engine.report(wire.Fetched(order.ident), frames)

    def variables(self) -> dict[str, Any]:
        """Of the cells, without what was there before them. Any thread."""
        names = self._module.__dict__.copy()
        return {name: names[name] for name in self._users_names(names)}

    def _users_names(self, names: dict[str, Any] | None = None) -> list[str]:
        """Variables that cells have made."""
        return [
            name
            for name, value in (self.namespace if names is None else names).items()
            if not (name.startswith("_") or name in _OURS or isinstance(value, types.ModuleType))
        ]

    def _refuse(self, ident: int, error: BaseException) -> None:
        failure = error.failure if isinstance(error, DependentOnError) else describe_error(error)
        self._engine.report(wire.FetchFailed(ident, failure))

    # --- a cell

    def _run_cell(self, order: wire.RunSpmd) -> tuple[str | None, str]:
        """The text and the rich form of the last expression."""
        self._bind(order.shards)
        here = Slice.dense(*order.sizes).coordinates(self._spec.rank)
        self.namespace["mesh_coordinates"] = dict(zip(order.names, here, strict=True))
        payload.remember_sources({order.filename: order.source})
        self._files.add(order.filename)
        tree = ast.parse(order.code or order.source, order.filename)
        _keep_last(tree)
        with self._around_cell(order.ident), self._debugging(order.debug):
            self.shell.begin_cell(order.source)
            try:
                self._execute(compile(tree, order.filename, "exec", _FLAGS))
                value = self.namespace.pop(_LAST, None)
                if value is not None and not order.is_quiet:
                    return _shown(value), self.shell.bundle(value)
            finally:
                self.namespace.pop(_LAST, None)
                self.shell.end_cell()
                self._modules.note()
        return None, ""

    @contextmanager
    def _around_cell(self, ident: int) -> Iterator[None]:
        """It is ``__main__``, can be interrupted, and has random numbers and settings of torch (grad mode, default
        dtype, switches of backends) of its own."""
        engine = self._engine
        main = sys.modules["__main__"]
        with engine.user_code(ident), torch.inference_mode(False):
            common, ops_state = randomness.get_state(), ambient.capture()
            # A new one each time: it finds what the switches are, and users' code moves them behind others' backs.
            ambient.Applied().apply(self._state)
            if self._random is None:
                # As scripts do that set no seed: a rank's numbers are its own.
                torch.manual_seed(randomness.mixed(self._spec.seed ^ 0x5B3D, self._spec.rank))
            else:
                randomness.set_state(*self._random)
            sys.modules["__main__"] = self._module
            if self._device is not None:
                torch.set_default_device(self._device)
            try:
                engine.interruptible = self.in_cell = True
                yield
            finally:
                engine.interruptible = self.in_cell = False
                sys.modules["__main__"] = main
                self._device = default_device.CURRENT_DEVICE
                if self._device is not None:
                    torch.set_default_device(None)
                self._random = randomness.get_state()
                randomness.set_state(*common)
                self._state = {**ambient.capture(), "inference": False}
                ambient.Applied().apply(ops_state)

    @contextmanager
    def _debugging(self, is_asked: bool) -> Iterator[None]:
        """With ``%%spmd --debug``: stop at the first line, and where an error leaves the cell."""
        if not is_asked:
            yield
            return
        self._debugger.stop_at_first_line()
        try:
            yield
        except BaseException as error:
            self._debugger.leave_user_code()
            self._debugger.stop_after(error)
            raise

    def _execute(self, code: types.CodeType) -> Any:
        if not code.co_flags & inspect.CO_COROUTINE:
            return eval(code, self.namespace)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return _wait_for(self._loop, types.FunctionType(code, self.namespace))

    def _failure(self, error: BaseException) -> wire.Failure:
        """From the cell's own line on: what is above it is how we came there."""
        failure = describe_error(error)
        first = next((k for k, frame in enumerate(failure.frames) if frame[0] in self._files), 0)
        return replace(failure, frames=failure.frames[first:], rank=self._spec.rank)

    # --- tensors of the notebook

    def _bind(self, shards: list[tuple[str, int]]) -> None:
        """The notebook's tensors under their names. A name that a cell has assigned since keeps the cell's value
        until the notebook's is another one."""
        for name, ref in shards:
            if self._bound.get(name) == ref and name in self.namespace:
                continue
            value = self._engine.cells.get(ref)
            if value is None:
                continue  # of a part of the mesh that this rank is not in
            if isinstance(value, Failed):
                raise DependentOnError(value.failure)
            # Its data, with the version of it that says whether it was written; the notebook knows its metadata and
            # its graph, which a cell must not change.
            shard = value.detach()
            self.namespace[name] = shard
            self._bound[name] = ref
            self._given[ref] = (weakref.ref(value), version(value))

    def _written(self) -> list[int]:
        """Refs of the notebook's tensors whose data was written since they were given or this was last asked."""
        written = []
        for ref, (given, before) in list(self._given.items()):
            value = given()
            if value is None or self._engine.cells.get(ref) is not value:
                del self._given[ref]
                continue
            if version(value) != before:
                written.append(ref)
                self._given[ref] = (given, version(value))
        return written

    def _lift(self, name: str, ref: int) -> wire.TensorMeta | str:
        """Keep a copy of a variable under ``ref``; what it is, or why it cannot be kept."""
        if name not in self.namespace:
            return "not defined"
        value = self.namespace[name]
        if not isinstance(value, torch.Tensor):
            return f"a {type(value).__name__}"
        # A copy: the notebook would not know of what cells write to it later, or what else shares its memory.
        kept = value.detach().clone()
        self._engine.cells[ref] = kept
        return describe(kept)


def _keep_last(tree: ast.Module) -> None:
    """The last expression's value under ``_LAST``: in one piece with the rest, one event loop runs it all."""
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        kept = ast.Assign([ast.Name(_LAST, ast.Store())], last.value)
        tree.body[-1] = ast.fix_missing_locations(ast.copy_location(kept, last))


def _wait_for(loop: asyncio.AbstractEventLoop, start: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    task = loop.create_task(start())
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:
        task.cancel()
        with_cancelled = asyncio.gather(task, return_exceptions=True)
        loop.run_until_complete(with_cancelled)
        raise


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " …"
