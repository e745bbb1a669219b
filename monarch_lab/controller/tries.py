"""Ops that can fail on values, issued inside a user's ``try``: they wait there, so that ``except`` catches (rule 8).

Whether an instruction lies in such a block is read from the exception table of its code object, once for each. Only
blocks with an ``except`` count, not ``with`` and ``finally``, and only in the user's own code: torch, the standard
library and what is installed beside it catch for reasons of their own.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeVar

from monarch_lab.controller.locations import Location, here, is_library

T = TypeVar("T")

_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ends = frozenset({"PUSH_EXC_INFO", "RERAISE", "POP_TOP", "RETURN_VALUE", "WITH_EXCEPT_START"})
# By id: the hash of a code object takes longer than all else here. It is kept, so that its id stays its own.
_blocks: dict[int, tuple[tuple[tuple[int, int], ...], CodeType]] = {}

# Functions of torch that read values as indices, as probabilities, or as what has a factorisation.
_VALUES = frozenset(
    """__getitem__ __setitem__ index_select index_add index_copy index_fill index_reduce index_put gather scatter
    scatter_add scatter_reduce select_scatter take take_along_dim put embedding embedding_bag embedding_renorm one_hot
    cross_entropy nll_loss ctc_loss multi_margin_loss multilabel_margin_loss binary_cross_entropy multinomial bernoulli
    normal poisson binomial bincount histc histogram repeat_interleave tensor_split max_unpool1d max_unpool2d
    max_unpool3d pack_padded_sequence inverse pinverse cholesky cholesky_inverse cholesky_solve lu lu_solve lu_unpack
    lstsq triangular_solve slogdet logdet det qr svd geqrf ormqr orgqr lobpcg svd_lowrank pca_lowrank
    _assert_async""".split()
)
_INTEGERS = frozenset("floor_divide __floordiv__ __rfloordiv__ remainder __mod__ __rmod__ fmod div divide".split())
_MODULES = ("torch.linalg", "torch._C._linalg", "torch.distributions")


def can_fail(func: Any, tensors: Sequence[Any]) -> bool:
    """Whether a call that was right once may raise for other values of the same shapes. ``tensors``: its own."""
    if getattr(func, "opaque", False):  # a user's function
        return True
    name = getattr(func, "__name__", "")
    stem = name if name.startswith("__") else name.rstrip("_")
    if stem in ("__getitem__", "__setitem__") and len(tensors) < 2:  # by numbers and slices: the shape decides
        return False
    if stem in _VALUES or stem.startswith("linalg_"):
        return True
    if stem in _INTEGERS:  # by zero
        return not any(t._meta.dtype.is_floating_point or t._meta.dtype.is_complex for t in tensors)
    return str(getattr(func, "__module__", "")).startswith(_MODULES)


def around(depth: int) -> bool:
    """Whether a frame of the user's, ``depth`` frames up at the least, is in a block with an ``except``."""
    frame: Any = sys._getframe(depth)
    known = _blocks
    while frame is not None:
        code = frame.f_code
        found = known.get(id(code))
        if found is None:
            found = known[id(code)] = _blocks_of(code), code
        if found[0]:
            at = frame.f_lasti
            for start, end in found[0]:
                if start <= at < end:
                    return True
        frame = frame.f_back
    return False


def _blocks_of(code: CodeType) -> tuple[tuple[int, int], ...]:
    name = code.co_filename
    if is_library(code) or name.startswith(_INSTALLED) or name.startswith("<frozen "):
        return ()
    return except_blocks(code)


def except_blocks(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Instructions (from, to) of a code object whose exceptions come to an ``except``."""
    bytecode = dis.Bytecode(code)
    entries: list[Any] = getattr(bytecode, "exception_entries", [])
    if not entries:
        return ()
    instructions = list(bytecode)
    place = {instruction.offset: k for k, instruction in enumerate(instructions)}
    targets = {entry.target for entry in entries}
    caught = {t for t in targets if _is_except([i.opname for i in instructions[place[t] :]])}
    return tuple((entry.start, entry.end) for entry in entries if entry.target in caught)


def _is_except(handler: list[str]) -> bool:
    """An ``except`` tests the type first, or drops the exception; ``with`` calls ``__exit__``, ``finally`` does the
    user's work."""
    if handler[0] != "PUSH_EXC_INFO":
        return False
    rest = [name for name in handler[1:] if name not in ("NOP", "CACHE", "EXTENDED_ARG")]
    if rest[0] == "POP_TOP":
        return True
    for name in rest:
        if name in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH"):
            return True
        if name in _ends or name.startswith("STORE_"):
            return False
    return False


def wait(client: Any, issue: Callable[[], T]) -> T:
    """Issue an op and raise what it fails with. What failed before is left for where it would be raised anyway: this
    block's ``except`` is not for it."""
    if client.recorder is not None:  # a replay of the recording would not come to the ``except``
        return issue()
    location: Location = here(2)
    batch = client.batch
    result = issue()
    client.settle()
    client.raise_failure_at(location, batch)
    return result
