"""``torch.distributed`` of ``%%spmd`` cells: the default group over all ranks, its own sockets, and the way out of it.

gloo over the loopback interface, NCCL too where every rank has a GPU of its own; a rendezvous file in the mesh's
directory, under a number that the kernel gives. ``sever`` shuts the sockets of every gloo group that was made here:
neither a signal nor gloo's own abort ends a wait in a collective, and the end of its connection does.

Runs on: the main thread; ``sever`` on the reader thread.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from monarch_lab.transport.platform import own_sockets
from monarch_lab.wire.looking import Collective
from monarch_lab.wire.supervision import WorkerSpec
from monarch_lab.worker.devices import are_apart
from monarch_lab.worker.failures import severed_when_it_fails
from monarch_lab.worker.meeting_point import Meeting

# In fact none: a rank waits for one that stands in a debugger, and gloo's clock does not stop meanwhile. Who waits in
# vain is told by the kernel (controller/watch.py, stalls.py), whose clocks do, and freed by an interrupt.
_TIMEOUT = datetime.timedelta(days=30)
_FORM_TIMEOUT = datetime.timedelta(minutes=2)  # every rank comes to it at once, with nothing of the user's before
_Gloo = dist.ProcessGroupGloo
_init_process_group = dist.init_process_group
_new_group = dist.new_group
_NEW_GROUP = inspect.signature(_new_group)
_destroy_process_group = dist.destroy_process_group


def _groups() -> list[tuple[Any, str]]:
    """Every process group that torch.distributed knows here, with its name."""
    return list(c10d._world.pg_names.items())  # noqa: SLF001


class SpmdGroup:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._number = -1
        self._made = 0  # groups that new_group made under it
        self._joined = 0  # how often the user's own init_process_group formed it under this number
        self._known: dict[int, tuple[int, int]] = {}  # sockets of gloo groups
        self._meeting = Meeting(spec)
        self._destroyed: list[Any] = []
        self.formed_ns = 0
        self.timeouts: dict[str, float] = {}  # seconds, by name, of the groups that the user made with one

    def form(self, number: int) -> None:
        """The default group under this number, which every rank of the mesh calls for; 0: leave it as it is."""
        if number in (0, self._number):
            return
        if self._number == -1:
            self._install()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._known.clear()
        self.timeouts = {}
        self._joined = self._made = 0
        self._join(f"spmd{number}")
        self._number = number

    def _join(self, name: str) -> None:
        spec = self._spec
        # torch's own sockets, and NCCL's, have no encryption: they never leave the host.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(os.path.join(spec.rendezvous, name), spec.world_size)
        store.set_timeout(_FORM_TIMEOUT)
        self.formed_ns = time.time_ns()
        with severed_when_it_fails():
            self._meeting.wait(name, "init_process_group")
            _init_process_group(
                self._backend, store=store, rank=spec.rank, world_size=spec.world_size, timeout=_TIMEOUT
            )

    @property
    def _backend(self) -> str:
        apart = self._spec.device == "cuda" and are_apart(range(self._spec.world_size), self._spec.gpus)
        return "cpu:gloo,cuda:nccl" if apart else "gloo"

    def sequences(self) -> dict[str, int]:
        """How many collectives each group has begun, by its name; empty where there is no default group.

        Ranks that differ are out of step: what one sends next the other takes for something else.
        """
        if not dist.is_initialized():
            return {}
        found = {}
        for group, name in _groups():
            with contextlib.suppress(RuntimeError):
                found[name] = group._get_sequence_number_for_group()  # noqa: SLF001
        return found

    def members(self) -> dict[str, list[int]]:
        """Ranks of each group that torch.distributed knows here, by its name."""
        world = c10d._world  # noqa: SLF001
        return {name: sorted(world.pg_group_ranks.get(group, {})) for group, name in _groups()}

    def forming(self) -> list[Collective]:
        """The group that this rank waits for others to form, if it does."""
        return self._meeting.now()

    def begin(self) -> None:
        """A cell begins: a wait that was ended is the last one's."""
        self._meeting.is_ended = False
        unused = 3  # references: the list's, the loop's, the call's
        self._destroyed = [group for group in self._destroyed if sys.getrefcount(group) > unused]

    def sever(self) -> None:
        """Shut the connections of every group: who waits in a collective gets an error. They are of no use after."""
        self._meeting.is_ended = True
        now = own_sockets()
        for fd, identity in list(self._known.items()):
            if now.get(fd) != identity:  # closed since, and the number may be another's
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.getpeername()  # never a listener: gloo ends the process where that is shut
                connection.shutdown(socket.SHUT_RDWR)
        if "nccl" in self._backend:
            for group, _ in _groups():
                with contextlib.suppress(RuntimeError):
                    group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001

    # --- what users call

    def _install(self) -> None:
        known = self._known

        class Meta(type(_Gloo)):  # type: ignore[misc]
            def __instancecheck__(cls, found: object) -> bool:
                return isinstance(found, _Gloo)  # torch asks it of groups that were made elsewhere

        class ProcessGroupGloo(_Gloo, metaclass=Meta):  # type: ignore[misc, valid-type]
            """Notes the sockets of a group, for ``sever``."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                before = own_sockets()
                with severed_when_it_fails():
                    super().__init__(*args, **kwargs)
                known.update((fd, what) for fd, what in own_sockets().items() if before.get(fd) != what)

        c10d.default_pg_timeout = _TIMEOUT  # of the groups that users make
        if c10d.default_pg_nccl_timeout is not None:
            c10d.default_pg_nccl_timeout = _TIMEOUT
        dist.ProcessGroupGloo = c10d.ProcessGroupGloo = ProcessGroupGloo
        dist.init_process_group = c10d.init_process_group = self._init_process_group
        dist.new_group = c10d.new_group = self._new_group
        dist.destroy_process_group = c10d.destroy_process_group = self._destroy_process_group

    @functools.wraps(_destroy_process_group)
    def _destroy_process_group(self, group: Any = None) -> None:
        """torch's. A DDP module holds its group to its own end: were it the last to, torch would join gloo's threads
        with Python's lock held, for which they may wait. Ours are let go without that lock."""
        __tracebackhide__ = True
        self._destroyed += [found for found, _ in _groups() if all(found is not other for other in self._destroyed)]
        _destroy_process_group(group)

    @functools.wraps(_new_group)
    def _new_group(self, *args: Any, **kwargs: Any) -> Any:
        """torch's, which every rank calls; who waits for the others can be told of and freed. A time-out is counted
        by the kernel (controller/stall_watch.py), whose clock stops while someone stands in a debugger."""
        __tracebackhide__ = True
        if not kwargs.get("use_local_synchronization") and dist.is_initialized():
            self._made += 1
            with severed_when_it_fails():
                self._meeting.wait(f"group{self._number}-{self._joined}-{self._made}", "new_group")
        asked = _NEW_GROUP.bind(*args, **kwargs)
        timeout = asked.arguments.get("timeout")
        if not isinstance(timeout, datetime.timedelta):
            return _new_group(*args, **kwargs)
        del asked.arguments["timeout"]
        group = _new_group(*asked.args, **asked.kwargs)
        if name := dict(_groups()).get(group):
            self.timeouts = {**self.timeouts, name: timeout.total_seconds()}
        return group

    def _init_process_group(
        self, backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """torch's, in cells: the group is there already, so a script that makes it goes on with ours.

        Raises ValueError where another one is asked for.
        """
        __tracebackhide__ = True
        spec = self._spec
        asked = {"rank": kwargs.get("rank", -1), "world_size": kwargs.get("world_size", -1)}
        for name, own in (("rank", spec.rank), ("world_size", spec.world_size)):
            if asked[name] not in (-1, own):
                raise ValueError(
                    f"init_process_group({name}={asked[name]}): {name} is {own} here; the group of all ranks of the "
                    "mesh is made before the first %%spmd cell, so leave the call out or give it no arguments"
                )
        if backend is not None and "nccl" in str(backend) and "nccl" not in self._backend:
            raise ValueError(
                f"init_process_group({backend!r}): this mesh has no GPU for each rank, so its group uses gloo: leave "
                "the call out or give it no arguments"
            )
        if not dist.is_initialized():  # they destroyed it
            self._joined += 1
            self._made = 0
            self._known.clear()
            self._join(f"spmd{self._number}-{self._joined}")
