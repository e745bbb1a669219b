"""A mesh: processes with named dims, whole or a part. A value object: equal ones are one object."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from monarch_lab.controller import looking, mesh_split, placing
from monarch_lab.controller.activation import Activation, no_mesh
from monarch_lab.controller.interrupting import interrupt_ranks
from monarch_lab.controller.mesh_table import table
from monarch_lab.controller.refs import GRAPH
from monarch_lab.controller.state import active_stream
from monarch_lab.controller.state import recorder as current_recorder
from monarch_lab.controller.streams import StreamActivation, stream_named
from monarch_lab.errors import DeviceException, UsageIndexError, UsageKeyError, UsageTypeError, UsageValueError
from monarch_lab.wire import engine as wire
from monarch_lab.wire.looking import Memory
from monarch_lab.wire.ranks import parse_ranks
from monarch_lab.wire.shape import Slice
from monarch_lab.wire.snapshot import MeshSnapshot

if TYPE_CHECKING:
    from monarch_lab.controller.client import Client
    from monarch_lab.controller.process_groups import RemoteProcessGroup

Ranks = int | Sequence[int] | str | None


class DeviceMesh:
    """Processes with named dims. Get one from ``ml.local_mesh``, parts of it from ``slice``, ``split`` ...

    Two meshes over the same processes with the same names are equal. ``with mesh:`` stops it at the end.
    """

    def __init__(self, client: Client, slice_: Slice, names: Sequence[str], owner: Any, stream: Any = None) -> None:
        self.client = client
        self.slice_ = slice_
        self.names = tuple(names)
        self.sizes: dict[str, int] = dict(zip(self.names, slice_.sizes, strict=True))
        self.ranks_key: tuple[int, ...] = tuple(slice_)
        full = (1 << len(self.names)) - 1
        self.all_equal = full | full << GRAPH
        # Of values on another stream than the default one, the mesh is an object of its own, so that an op that mixes
        # streams is seen as one that mixes meshes is. See streams.py.
        self.stream = stream
        self.stream_number: int = 0 if stream is None else stream.number
        self.let_go = client.dead_of(self.stream_number).append
        self.let_go_large = client.let_go_large if stream is None else self.let_go
        client.learn_names(self)
        self.lost = ""  # of what was made before a rank had another process: why it cannot be used
        self.lost_ranks: frozenset[int] = frozenset()
        self._owner = owner
        self._number = 0
        self._activations: list[Activation] = []

    # --- identity

    def _other(self, slice_: Slice, names: Sequence[str]) -> DeviceMesh:
        """The one object for these processes and names (and stream)."""
        return self._twin(slice_, names, self.stream)

    def _twin(self, slice_: Slice, names: Sequence[str], stream: Any) -> DeviceMesh:
        key = (slice_, tuple(names)) if stream is None else (slice_, tuple(names), stream)
        known = self._owner.parts
        found = known.get(key)
        if found is None:
            found = known[key] = DeviceMesh(self.client, slice_, names, self._owner, stream)
        return found

    def on(self, stream: Any) -> DeviceMesh:
        """The mesh as values on ``stream`` (None: the default one) have it."""
        return self if stream is self.stream else self._twin(self.slice_, self.names, stream)

    def __repr__(self) -> str:
        dims = ", ".join(f"{n}={s}" for n, s in self.sizes.items()) or f"rank {self.ranks_key[0]}"
        return f'mesh "{self.name}" ({dims})'

    def describe(self) -> str:
        """For headings: name, dims and processes."""
        dims = "×".join(f"{n} {s}" for n, s in self.sizes.items()) or f"rank {self.ranks_key[0]}"
        return f'mesh "{self.name}" ({dims})'

    def __reduce__(self) -> Any:
        raise UsageTypeError("a mesh cannot be pickled: its processes belong to this kernel")

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def device(self) -> str:
        """Where its tensors live: "cpu" or "cuda"."""
        return self._owner.device

    @property
    def torch_device(self) -> str:
        """Where its factories put tensors, by torch's name: each worker sees one GPU. "" is the CPU."""
        return "cuda:0" if self.device == "cuda" else ""

    @property
    def ndim(self) -> int:
        return len(self.names)

    def __len__(self) -> int:
        return len(self.ranks_key)

    # --- parts

    def slice(self, **dims: int | slice) -> DeviceMesh:
        """A part: an index drops its dim, a ``slice`` (steps too) keeps it.

        Raises TypeError for an unknown dim, IndexError out of range, ValueError where nothing is left.
        """
        part, names = self.slice_, list(self.names)
        for name, at in dims.items():
            if name not in self.names:
                raise UsageTypeError(f"{self} has no dim {name!r}; it has {', '.join(self.names)}")
            axis = names.index(name)
            if isinstance(at, slice):
                if at.step is not None and at.step < 1:
                    raise UsageValueError(f"{name}={at}: the step of a slice of a mesh is positive")
                part = part.cut(axis, at)
                if not part.sizes[axis]:
                    raise UsageValueError(f"{name}={at.start}:{at.stop} leaves no process of {self}")
                continue
            size = self.sizes[name]
            if not -size <= at < size:
                raise UsageIndexError(f"{name}={at}: index out of range, {self} has {size}, so {-size} to {size - 1}")
            part = part.fix(axis, at % size)
            del names[axis]
        return self._other(part, names)

    def __call__(self, **dims: Any) -> DeviceMesh:
        """Deprecated: ``slice``."""
        warnings.warn("mesh(...) is deprecated: use mesh.slice(...)", DeprecationWarning, stacklevel=2)
        return self.slice(**dims)

    def rename(self, **dims: str) -> DeviceMesh:
        """The same processes under other names: ``mesh.rename(host="dp")``."""
        for name in dims:
            self.axis(name)
        names = [dims.get(n, n) for n in self.names]
        if len(set(names)) != len(names):
            raise UsageValueError(f"Duplicate dimension name in {names}")
        return self._other(self.slice_, names)

    def flatten(self, name: str) -> DeviceMesh:
        """All its processes along one dim. ValueError where they are not evenly spaced."""
        if not self.slice_.is_dense:
            raise UsageValueError("cannot flatten sparse mesh: its processes are not consecutive")
        return self._other(Slice.dense(len(self), offset=self.slice_.offset), [name])

    def split(self, **dims: Any) -> DeviceMesh:
        """Cut dims into several: ``mesh.split(host=("dp", "pp"), pp=4)``; at most one size of each may be left out."""
        slice_, names = mesh_split.split(self.slice_, self.names, dims)
        return self._other(slice_, names)

    def axis(self, name: str) -> int:
        """Place of a dim among the names. KeyError for an unknown one."""
        if name not in self.names:
            raise UsageKeyError(f"{self} does not have dimension {name!r}; it has {', '.join(self.names)}")
        return self.names.index(name)

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Number of processes along a dim, or several, or all. KeyError for an unknown dim."""
        dims = self.names if dim is None else (dim,) if isinstance(dim, str) else dim
        total = 1
        for name in dims:
            total *= self.slice_.sizes[self.axis(name)]
        return total

    def process_group(self, dims: str | Sequence[str] = ()) -> RemoteProcessGroup:
        """The processes along ``dims`` (all where none is named) as a group for remote functions, which get a torch
        ProcessGroup. Each call gives another. Raises KeyError for an unknown dim, TypeError for one named twice."""
        from monarch_lab.controller.process_groups import RemoteProcessGroup

        return RemoteProcessGroup(self, dims)

    def to_tensor(self) -> torch.Tensor:
        """The processes' rank numbers, a local int64 tensor of the mesh's sizes."""
        with no_mesh.activate():
            return torch.tensor(self.ranks_key).reshape(self.slice_.sizes)

    def to_table(self) -> str:
        """Its processes as text, rows by all dims but the last: ``host.gpu[rank]`` of each."""
        return table(self.slice_, self.sizes, self.client.label)

    # --- tensors on it

    def rank(self, dim: str | Sequence[str]) -> Any:
        """A 0-dim int64 mesh tensor: each process's coordinate along a dim (several: row-major in that order)."""
        dims = [dim] if isinstance(dim, str) else list(dim)
        axes = [self.axis(d) for d in dims]
        values = {}
        for rank in self.ranks_key:
            at, total = self.slice_.coordinates(rank), 0
            for axis in axes:
                total = total * self.slice_.sizes[axis] + at[axis]
            values[rank] = total
        return self._per_rank(values, axes)

    def process_idx(self) -> Any:
        """A 0-dim int64 mesh tensor: each process's global rank."""
        return self._per_rank({r: r for r in self.ranks_key}, list(range(self.ndim)))

    def _per_rank(self, numbers: dict[int, int], axes: Sequence[int]) -> Any:
        from monarch_lab.controller.dispatch import make_handle
        from monarch_lab.controller.refs import Ref
        from monarch_lab.tensors.meta import describe, intern

        bits = sum(1 << a for a in axes if self.slice_.sizes[a] > 1)
        mesh = self.on(active_stream.get())
        ref = Ref(next(self.client.refs), mesh, self.all_equal & ~(bits | bits << GRAPH))
        with no_mesh.activate():
            values = {rank: [torch.tensor(number)] for rank, number in numbers.items()}
            placing.place(mesh, values, [ref.id])
        told = describe(values[self.ranks_key[0]][0])
        return make_handle(intern(replace(told, device=self.torch_device or told.device)), ref)

    @property
    def ranks(self) -> Mapping[str, Any]:
        """dim -> ``rank(dim)``."""
        return {name: self.rank(name) for name in self.names}

    def replicate(self, value: Any) -> Any:
        """Local tensors (a tensor, a module or a pytree) onto the mesh, whole on each process, on the active stream."""
        return self._placed(value, lambda t: placing.replicate(self.on(active_stream.get()), t))

    def shard(self, value: Any, dim_name: str, dim: int = 0) -> Any:
        """Local tensors onto the mesh, cut along tensor dim ``dim`` over mesh dim ``dim_name``, on the active stream.

        Raises KeyError for an unknown mesh dim, ValueError where the size does not divide.
        """
        self.axis(dim_name)
        return self._placed(value, lambda t: placing.shard(self.on(active_stream.get()), t, dim_name, dim))

    def _placed(self, value: Any, put: Any) -> Any:
        if (recorder := current_recorder.get()) is not None:
            raise recorder.refuse("a local value put on the mesh", "put it there before the call and pass it in")
        return placing.placed(value, put)

    @property
    def scope(self) -> int:
        """The number of its stream of random numbers: 0 for all processes, else that of the mesh."""
        if len(self.ranks_key) == self.client.world:
            return 0
        number = self.defined()
        self.client.scope_ranks[number] = self.ranks_key
        return number

    def next_number(self) -> int:
        """One that no mesh of its processes has."""
        return self._owner.next_number()

    def defined(self) -> int:
        """The number under which the workers know this mesh."""
        if not self._number:
            with self.client.lock:
                number = self.next_number()
                self.client.define(
                    wire.MeshDef(number, list(self.names), list(self.slice_.sizes), list(self.ranks_key))
                )
                self._number = number
        return self._number

    # --- life

    def activate(self) -> Activation:
        """Factory calls of this context make tensors on it. In force when called; a ``with`` ends it."""
        self.check_alive()
        self._activations = [a for a in self._activations if a.is_active]
        self._activations.append(Activation(self))
        return self._activations[-1]

    def deactivate(self) -> None:
        """End the last activation of this mesh that is in force. ValueError where there is none."""
        while self._activations:
            last = self._activations.pop()
            if last.is_active:
                return last.deactivate()
        raise UsageValueError(f"{self} is not active, so it cannot be deactivated")

    def activate_stream(self, name: str) -> StreamActivation:
        """For ``%%mesh --stream NAME``: the last stream made with that name is active, or a new one."""
        return stream_named(name).activate()

    def check_alive(self, ranks: Iterable[int] | None = None) -> None:
        """Raises ClosedError or DeviceException where ops on its processes (or ``ranks`` of them) cannot run."""
        ranks = self.ranks_key if ranks is None else ranks
        self.client.check_alive(ranks)
        if not self.lost_ranks.isdisjoint(ranks):
            raise DeviceException(self.lost, tuple(sorted(self.lost_ranks)))

    def before(self, ranks: Iterable[int], lost: str) -> DeviceMesh:
        """A stand-in, for what was made on it before ``ranks`` of it had other processes: it is gone there."""
        past = DeviceMesh(self.client, self.slice_, self.names, self._owner, self.stream)
        past.lost, past.lost_ranks = lost, self.lost_ranks | frozenset(ranks)
        return past

    @property
    def now(self) -> DeviceMesh:
        """Itself, or the mesh that a stand-in stands for."""
        return self._other(self.slice_, self.names) if self.lost_ranks else self

    @property
    def state(self) -> str:
        """starting, live, dead or closed."""
        return self._owner.state

    def status(self) -> MeshSnapshot:
        """What displays show of it."""
        return self._owner.snapshot()

    def get_info(self) -> Any:
        """Its labels, and of each of its processes, in the order of ``ranks``, what is known in words."""
        return self._owner.info(self.ranks_key)

    def sync(self) -> None:
        """Until every op issued so far has run; raises the first failure among them."""
        self.client.sync()

    def interrupt(self, ranks: Ranks = None) -> tuple[int, ...]:
        """Stop what its workers (or these ranks alone) run, as Ctrl-C does, a wait in a collective too. Any thread;
        returns within 5 s, whatever they do. Of ``ranks``, those that run it still: ``restart`` ends them."""
        if ranks is not None:
            return interrupt_ranks(self.client, self.chosen(ranks))
        self.client.stop_cell()
        return ()

    def stacks(self, ranks: Ranks = None) -> looking.Stacks:
        """rank -> what its threads do now, innermost frame last, also while it is stuck in C code or a collective. As
        text, equal ones once, with their ranks. Any thread; a rank that does not answer in 3 s says so."""
        return looking.stacks(self.client, self.chosen(ranks))

    def memory(self, ranks: Ranks = None) -> dict[int, Memory]:
        """rank -> bytes: ``rss`` and ``pss`` of the process (shared pages in part; 0 where the system does not say),
        ``tensors`` held for the notebook, ``device`` reserved on the GPU, the ``largest`` variables of ``%%spmd``
        cells. Ranks that do not answer in 3 s are left out. Any thread."""
        return looking.memory(self.client, self.chosen(ranks))

    def restart(self, ranks: Ranks = None) -> tuple[int, ...]:
        """Give ranks other processes, of the same ranks; all of them where none is named. The ranks that got one.

        ``ranks``: a number, several, or a text as ``%mesh restart --ranks`` takes it, counted along this mesh. What the
        other processes hold stays; values with a part on a restarted one can still be fetched from the others, and an
        op on them raises DeviceException. Process groups are formed again at their next use, random numbers go on as if
        nothing had been. Raises UsageError for a rank that is not there, or inside ``ml.random.vary``; LaunchError
        where a process does not come up.
        """
        return self._owner.restart(self.chosen(ranks))

    def kill(self, ranks: Ranks) -> tuple[int, ...]:
        """SIGKILL the processes of these ranks, and what they have started. The ranks that had one."""
        chosen = self.chosen(ranks)
        self.client.check_open()
        return self.client.kill(chosen)

    def chosen(self, ranks: Ranks) -> tuple[int, ...]:
        """Global ranks of what a user wrote, counted along this mesh. UsageValueError for one that is not there."""
        if isinstance(ranks, str):
            return tuple(self.ranks_key[k] for k in parse_ranks(ranks, self.sizes))
        if ranks is None:
            return self.ranks_key
        wanted = [ranks] if isinstance(ranks, int) else list(ranks)
        return self.chosen(",".join(map(str, wanted)))

    def exit(self, error: BaseException | None = None) -> None:
        """Stop every process of the whole mesh; nothing is left running. Safe to call twice."""
        self._owner.stop()

    stop = exit

    def __enter__(self) -> DeviceMesh:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        self.exit(error)
