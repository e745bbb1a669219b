"""Calls on one process whose result comes back: fetches and call_on_shard_and_fetch."""

from __future__ import annotations

from typing import Any

from monarch_lab.controller import failures, forgetting
from monarch_lab.controller.futures import Future
from monarch_lab.controller.recorder import refuse_fetch
from monarch_lab.controller.scanning import scan
from monarch_lab.controller.state import ambient_number, ambient_values
from monarch_lab.controller.waiting import Pending
from monarch_lab.tensors import payload
from monarch_lab.wire import engine as wire


class Named:
    """A function of the worker's package, by its path: the kernel never imports it."""

    def __init__(self, path: str, *, collective: bool = False, opaque: bool = False, shown: str = "") -> None:
        self.path = path
        self.collective = collective
        self.opaque = opaque
        self.shown = shown or path.rpartition(".")[2]
        self.__name__ = self.shown

    def remote_name(self, client: Any) -> str:
        return self.path


_named: dict[str, Named] = {}


def send_call(
    mesh: Any,
    rank: int,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    for_display: bool = False,
) -> Future[Any]:
    """Run ``func`` on one rank, after all that was issued; a Future of its result, tensors on the CPU."""
    from monarch_lab.controller.learning import template_of
    from monarch_lab.controller.state import active_mesh

    refuse_fetch("a call whose result is fetched")
    if isinstance(func, str):
        func = _named.setdefault(func, Named(func))
    client = mesh.client
    mesh.check_alive((rank,))
    if needed := client.ties.unsettled((rank,)):  # a value may hang on a failure of another rank
        client.settle(needed)
    ambient = ambient_number()
    token = active_mesh.set(mesh)
    try:
        call = scan(func, args, kwargs or {}, ambient)
    finally:
        active_mesh.reset(token)
    call.mesh = mesh
    forgetting.make_room(client)
    template = template_of(call)

    def make(ident: int) -> wire.Question:
        return wire.CallAndFetch(ident, client.cell, ambient, template, [t._ref.id for t in call.tensors], call.numbers)

    with client.lock:
        client.define_ambient(ambient, ambient_values(ambient), mesh.stream_number)
        pending = client.request(make, (rank,), stream=mesh.stream_number)
        if not call.hashable:
            forgetting.forget_template(client, template)
    return Future(client, pending, lambda p: opened(client, p, rank, raise_cause=not for_display))


def call_on(mesh: Any, rank: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    return send_call(mesh, rank, func, args, kwargs).result()


def opened(client: Any, pending: Pending, rank: int, *, raise_cause: bool = True) -> Any:
    """The value of one rank's answer. Raises what became of it instead; a display leaves the cause to be raised."""
    if rank not in pending.replies or pending.replies[rank][0] is None:
        client.check_alive([rank])
        client.check_alive()
    message, frames = pending.replies[rank]
    if isinstance(message, wire.FetchFailed):
        client.blame_death([message.failure])
        if message.failure.interrupted and not message.dependent:
            raise KeyboardInterrupt
        if message.dependent and raise_cause:
            if client.world > 1:  # the cause may be another rank's, whose word of it is on its way
                client.settle(client.ties.of((rank,)))
            client.raise_failure(message.failure)
        raise failures.build({rank: message.failure}, None, None)
    return payload.loads(frames)
