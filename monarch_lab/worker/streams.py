"""Streams beside the default one: each has an engine, a thread and a queue of its own.

Until the first of them is asked for, the worker's main thread reads its orders itself. From then on a feeder thread
reads them and hands each to the queue of its stream; the default stream's is the main thread's. Streams share the cells
(a value's ref says nothing of its stream) and meet at events that the kernel puts into them (Op.SIGNAL, Op.WAIT).

A report of a batch says that every op up to it has run, of every stream: it is put into each queue where it came in,
and sent by the stream that reaches it last. So no stream waits for another to be reported.

torch has one generator of random numbers for a process. A second stream drawing from it would take numbers at a place
that differs between ranks, so that ranks which must stay equal would not: a draw there is refused.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_lab.errors import UsageRuntimeError
from monarch_lab.wire import engine as wire
from monarch_lab.worker.engine import Engine
from monarch_lab.worker.groups import Groups, use_on_this_thread
from monarch_lab.worker.randomness import Randomness

Item = tuple[Any, Any]
_NO_DRAWS = (
    "random numbers are drawn on the default stream alone, where the processes stay in step: draw there and lend the "
    "result with stream.borrow(t)"
)
_streams_here = threading.local()


def number_here() -> int:
    """The stream of the calling thread."""
    return getattr(_streams_here, "number", 0)


class NoRandomness(Randomness):
    """Of a stream that may not draw: changes nothing of torch's generator."""

    def __init__(self) -> None:
        pass

    def use(self, scope: int) -> None:
        pass

    @contextmanager
    def private(self) -> Iterator[None]:
        yield


class NoDraws(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see worker/learning.py, Watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs or {}):
            raise UsageRuntimeError(f"{func._schema.name.removeprefix('aten::')}: {_NO_DRAWS}")
        return func(*args, **(kwargs or {}))


def _draws_nothing(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Functions that are tagged for their dropout, called without it."""
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    p = given.get("dropout_p", given.get("p", given.get("dropout", defaults.get("dropout_p"))))
    return given.get("train") is False or (isinstance(p, float) and p == 0.0)


def _refuse_seeds() -> None:
    """``torch.manual_seed`` in a function on another stream would begin the default stream's numbers again."""
    original = torch.manual_seed
    if getattr(original, "refuses_on_streams", False):
        return

    @functools.wraps(original)
    def manual_seed(seed: Any) -> torch._C.Generator:
        if getattr(_streams_here, "number", 0):
            raise UsageRuntimeError(f"torch.manual_seed: {_NO_DRAWS}")
        return original(seed)

    manual_seed.refuses_on_streams = True  # type: ignore[attr-defined]
    torch.manual_seed = torch.random.manual_seed = manual_seed


class _Shared:
    """A report that every stream adds to."""

    def __init__(self, number: int, parts: int, send: Callable[[wire.Done], None]) -> None:
        self._done = wire.Done(number, [], [])
        self._left = parts
        self._send = send
        self._lock = threading.Lock()  # guards what is above

    def add(self, part: wire.Done) -> None:
        with self._lock:
            before = self._done
            self._done = wire.Done(
                before.batch, before.poisoned + part.poisoned, sorted({*before.unwritten, *part.unwritten})
            )
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._send(self._done)


class _Stream:
    """Runs on: its own thread, but for ``put`` and ``interrupt``."""

    def __init__(self, number: int, main: Engine, groups: Groups, obey: Callable[[Engine, Any, Any], None]) -> None:
        self._number = number
        self._main = main
        self._groups = groups
        self._obey = obey
        self._queue: queue.SimpleQueue[Item | _Shared | None] = queue.SimpleQueue()
        self.engine = Engine(main.rank, main.report, NoRandomness())
        self.engine.cells, self.engine.events = main.cells, main.events
        self._groups.meshes = self.engine.known.meshes
        self._thread = threading.Thread(target=self._run, name=f"monarch-stream-{number}", daemon=True)
        self._thread.start()

    def put(self, item: Item | _Shared | None) -> None:
        self._queue.put(item)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the user's function that runs there: signals reach the main thread alone."""
        if self.engine.in_user_code and self._thread.ident is not None:
            kind = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), kind)

    def _run(self) -> None:
        _streams_here.number = self._number
        use_on_this_thread(self._groups)
        torch.set_autocast_cache_enabled(False)  # kept for each thread; see tensors/ambient.py
        if torch.cuda.is_available():
            torch.cuda.set_stream(torch.cuda.Stream())
        with NoDraws():
            while (item := self._queue.get()) is not None:
                self._take(item)

    def _take(self, item: Item | _Shared) -> None:
        try:
            if isinstance(item, _Shared):
                item.add(self.engine.account(0))
                return
            order, frames = item
            self.engine.forget_ambient()
            self._main.cell = getattr(order, "cell", self._main.cell)  # what is printed belongs there
            self._obey(self.engine, order, frames)
        except KeyboardInterrupt:
            return  # came too late for the function it was meant for
        except BaseException:
            self._main.report(wire.Crashed(traceback.format_exc()))
        finally:
            self._main.forget_ambient()


class Streams:
    """``receive`` gives the next order (or what was wrong with it) and its frames. Runs on: the main thread, but where
    the feeder is named."""

    def __init__(
        self,
        main: Engine,
        receive: Callable[[], Item],
        obey: Callable[[Engine, Any, Any], None],
        groups: Callable[[int], Groups],
    ) -> None:
        self._main = main
        self._receive = receive
        self._obey = obey
        self._groups = groups
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}
        self._shared: dict[int, _Shared] = {}  # number of the batch -> its report

    def start(self, first: Item) -> None:
        """The order ``first`` was received and not obeyed."""
        _refuse_seeds()
        self._main.on_account = self._add
        self._route(first)
        threading.Thread(target=self._feed, name="monarch-feeder", daemon=True).start()

    def next(self) -> Item:
        """The default stream's next order."""
        return self._inbox.get()

    def engines(self) -> list[Engine]:
        return [s.engine for s in list(self._streams.values())]

    def interrupt(self) -> None:
        for stream in list(self._streams.values()):
            stream.interrupt()

    def _add(self, done: wire.Done) -> None:
        shared = self._shared.pop(done.batch, None)
        if shared is None:
            self._main.report(done)
        else:
            shared.add(done)

    def _feed(self) -> None:
        """Runs on: the feeder."""
        while True:
            try:
                item = self._receive()
            except Exception:  # the link is closed: nothing more comes
                item = (wire.Exit(), [])
            self._route(item)
            if isinstance(item[0], wire.Exit):
                return

    def _route(self, item: Item) -> None:
        """Runs on: the feeder, and once before it is there."""
        order, frames = item
        if isinstance(order, wire.OnStream):
            self._of(order.stream).put((order.order, frames))
            return
        batch = order.batch if isinstance(order, wire.Together) else order
        if isinstance(batch, wire.Batch) and batch.report:
            shared = _Shared(batch.number, 1 + len(self._streams), self._main.report)
            self._shared[batch.number] = shared
            for stream in self._streams.values():
                stream.put(shared)
        elif isinstance(order, (wire.Define, wire.Rejoin)):
            for stream in self._streams.values():
                stream.put(item)
        elif isinstance(order, wire.Exit):
            for stream in self._streams.values():
                stream.put(None)
        self._inbox.put(item)

    def _of(self, number: int) -> _Stream:
        if number not in self._streams:
            self._streams[number] = _Stream(number, self._main, self._groups(number), self._obey)
        return self._streams[number]
