"""``ml.compile``: a function whose ops are recorded and then sent as one.

The first call of one kind runs the function as it always runs, and notes what it does. With ``verify`` the second
does so again and must have done the same; later ones are replays: the workers run the ops as one generated function,
and the Python of the function does not run.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from monarch_lab.controller import dispatch, lending, state
from monarch_lab.controller.breakpoints import may_stop
from monarch_lab.controller.front import get_default_front
from monarch_lab.controller.record_builder import build
from monarch_lab.controller.record_code import publish
from monarch_lab.controller.recorder import Recorder
from monarch_lab.controller.recording import Recording
from monarch_lab.controller.state import active_mesh, active_stream, ambient_number
from monarch_lab.controller.surroundings import View, look
from monarch_lab.controller.tape import MathHook
from monarch_lab.errors import UsageTypeError

_KINDS = 64  # recordings that one function may have, all kinds of call together
_SET = "breakpoints are set (%mesh break lists them)"
_TRIES = 24  # runs in a row that gave no recording which a later call could use


class Compiled:
    """What ``ml.compile`` gives: called as the function is."""

    def __init__(self, fn: Callable[..., Any], *, verify: bool) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._verify = verify
        self._shown = getattr(fn, "__qualname__", type(fn).__name__).replace("<locals>.", "")
        self._recordings: dict[tuple[Any, ...], list[Recording]] = {}
        self._count = 0
        self._idle = 0  # runs since the last replay
        self._told_in = -1  # the cell that was told last why nothing is replayed
        self._stopping: dict[tuple[Any, ...], str] = {}  # key of calls that may stop in a debugger -> where
        self._own: dict[int, set[int]] = {}  # length of a key -> places that the function itself changes

    def __repr__(self) -> str:
        return f"<compiled {self._shown}>"

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if state.recorder.get() is not None or self._idle > _TRIES:
            return self._fn(*args, **kwargs)  # a part of the recording around it
        view = look(self._fn, args, kwargs)
        client = _client_of(view)
        if client is None or client.callbacks:  # hooks and the like run here, and are waited for
            return self._fn(*args, **kwargs)
        self._refuse_grad(view)
        key = self._key(view, client)
        if client.breakpoints.all or self._stopping:  # to hash the key once more costs
            why = _SET if client.breakpoints.all else self._stopping.get(key)
            if why is not None:
                self._tell(client, why)
                return self._fn(*args, **kwargs)
        recordings = self._recordings.get(key, ())
        for recording in recordings:
            found = recording.fitting(view.tensors)
            if found is None:
                continue
            if recording.is_verified or not self._verify:
                self._idle = 0
                return recording.replay(view.tensors, *found)
            return self._record(view, client, key, args, kwargs, first=recording)
        return self._record(view, client, key, args, kwargs)

    def _refuse_grad(self, view: View) -> None:
        if torch.is_grad_enabled():
            for tensor in view.tensors[: view.explicit]:
                if tensor._meta.requires_grad:
                    raise UsageTypeError(
                        f"REQUIRES_GRAD: {self._shown} is recorded and was given a tensor that requires grad: let the "
                        "function find it among its outer variables, as it finds parameters, or give t.detach()"
                    )

    def _key(self, view: View, client: Any) -> tuple[Any, ...]:
        own = self._own.get(len(view.key))
        parts = view.key if not own else [None if k in own else part for k, part in enumerate(view.key)]
        mesh = active_mesh.get()
        return (ambient_number(), id(mesh), active_stream.get(), client.varied, id(client.varied_mesh), *parts)

    def _record(
        self,
        view: View,
        client: Any,
        key: tuple[Any, ...],
        args: Any,
        kwargs: Any,
        *,
        first: Recording | None = None,
    ) -> Any:
        if may_stop(self._fn):
            why = self._stopping[key] = "there is a breakpoint in it"
            self._tell(client, why)
            return self._fn(*args, **kwargs)
        self._idle += 1
        if first is not None:
            self._forget(key, first)  # whatever comes of it
        with client.lock:  # what other threads issue is no part of it
            result, recording, stop = self._noted(view, client, args, kwargs)
            self._check_schedulers(view)
            if stop is not None:
                self._stopping[self._own_changes(view, key, client, args, kwargs)] = stop
            if recording is not None:
                if first is not None:
                    first.compare(recording)
                recording.is_verified = first is not None
                if recording.is_verified or not self._verify:
                    publish(recording)
                self._keep(self._own_changes(view, key, client, args, kwargs), recording, view)
        if self._idle > _TRIES:
            warnings.warn(
                f"{self._shown} did another thing at each of its last {_TRIES} calls, so none was replayed; it runs as "
                "without ml.compile from now on",
                stacklevel=3,
            )
        return result

    def _tell(self, client: Any, why: str) -> None:
        """Once a cell: the call runs op by op, so that whoever stops does so as anywhere else."""
        if self._told_in != client.cell:
            self._told_in = client.cell
            front = client.front or get_default_front()
            front.tell(f"{self._shown} runs op by op and not as a recording: {why}")

    def _noted(self, view: View, client: Any, args: Any, kwargs: Any) -> tuple[Any, Recording | None, str | None]:
        """What it gave, its recording, and where it may stop in a debugger (it has no recording then)."""
        recorder = Recorder(client, self._shown, lambda why: self._tell(client, why))
        recorder.begin(view.tensors)
        hooks = (
            register_optimizer_step_pre_hook(recorder.enter_optimizer),
            register_optimizer_step_post_hook(recorder.leave_optimizer),
        )
        token = state.recorder.set(recorder)
        ties = client.ties.take()
        client.recorder = recorder
        try:
            with MathHook():
                result = self._fn(*args, **kwargs)
            recorder.check_loans()
            client.flush()
            client.recorder = None
            recording = None if recorder.stop else build(recorder, result)
            if recording is not None:
                recording.ties = client.ties.take()
                client.ties.put_back(recording.ties)
            return recorder.plain(result), recording, recorder.stop
        finally:
            client.recorder = None
            recorder.end()
            client.ties.put_back(ties)
            state.recorder.reset(token)
            for hook in hooks:
                hook.remove()

    def _check_schedulers(self, view: View) -> None:
        for scheduler, epoch in view.schedulers:
            if scheduler.last_epoch != epoch:
                raise UsageTypeError(
                    f"{self._shown} steps a {type(scheduler).__name__}, which replays would not: call scheduler.step() "
                    "after the recorded function; the rates it sets are read at each replay"
                )

    def _own_changes(self, view: View, key: tuple[Any, ...], client: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """The key, without plain values that the function changes itself: a counter, say."""
        after = look(self._fn, args, kwargs)
        if len(after.key) == len(view.key):
            places = [
                k for k, (a, b) in enumerate(zip(view.key, after.key, strict=True)) if _are_plain(a, b) and a != b
            ]
            if places:
                self._own.setdefault(len(view.key), set()).update(places)
                return self._key(view, client)
        return key

    def _keep(self, key: tuple[Any, ...], recording: Recording, view: View) -> None:
        if self._count >= _KINDS:
            self._recordings.clear()
            self._count = 0
        recording.anchor(view.anchors)
        kept = [r for r in self._recordings.get(key, ()) if not r.is_dead]
        self._recordings[key] = [*kept, recording]
        self._count += 1

    def _forget(self, key: tuple[Any, ...], recording: Recording) -> None:
        self._recordings[key] = [r for r in self._recordings[key] if r is not recording]


def _are_plain(a: Any, b: Any) -> bool:
    return all(type(x) is tuple and len(x) == 2 and type(x[0]) is type and type(x[1]) is x[0] for x in (a, b))


def _client_of(view: View) -> Any:
    """Of the mesh that the function's ops will be on; None where it sees none."""
    for value in (*view.tensors, *view.anchors):
        if type(value) in dispatch.all_classes:
            return lending.behind(value._ref.mesh).client
    mesh = active_mesh.get()
    return None if mesh is None else mesh.client


def compile(fn: Callable[..., Any] | None = None, verify: bool = True) -> Any:
    """A function whose calls become one message: its ops are recorded, then replayed by the workers on their own.

    Also a decorator, with or without arguments. Arguments and results are pytrees; mesh tensors may be any arguments
    and any outer variables of ``fn``, which it may write to; a whole training step (forward, ``backward()``,
    ``optimizer.step()``, ``zero_grad()``) is one. The first call of a kind runs ``fn`` as it is; with ``verify`` the
    second does too, and RuntimeError tells where it did something else; from then on the ops alone are done, and the
    Python of ``fn`` (prints, counters) does not run. A kind is: the values of arguments and outer variables that are
    no tensors, the tensors' metadata and which share memory, modules and whether they train, the ambient state,
    which leaves have gradients. Rates of optimizers and step counters are read and advanced at each replay; random
    numbers are drawn anew.

    Raises TypeError (REQUIRES_GRAD) for an argument or result that requires grad, and for what a replay could not do:
    fetching a value, a result whose shape hangs on values, putting local values on the mesh, seeding, ops on another
    mesh's processes, moving a value that requires grad. Loans to streams begin and end inside (RuntimeError), or
    outside. A tensor made inside that is neither returned nor a gradient is dropped: TypeError (DROPPED) when it is
    used. An op that fails does so with its own line.
    """
    if fn is None:
        return functools.partial(compile, verify=verify)
    if isinstance(fn, Compiled):
        return fn
    if not callable(fn):
        raise UsageTypeError(f"ml.compile takes a function, not {type(fn).__name__}")
    for is_odd in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        if is_odd(fn):
            raise UsageTypeError("ml.compile takes a plain function: a coroutine or generator does not run at its call")
    return Compiled(fn, verify=verify)
