"""Whether hooks for the tensors that autograd saves are set on this thread, in the kernel and on a worker.

In the kernel ``kind`` is part of the ambient state: calls under hooks are kinds of their own. On a worker it says which
hooks torch has, put there by worker/saving.py, and taken away when an op comes with none around it, so that an
interrupt between two ops leaves none behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

NONE, CHECKPOINT, ASKED, ELSEWHERE = range(4)
# CHECKPOINT: what is saved is dropped and made again; ASKED: the notebook's hooks are called; ELSEWHERE: such hooks,
# set where no mesh was active.

Hooks = tuple[int, Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]  # kind, pack, unpack

was_used = False  # read with each op: the thread is looked at only where it can matter
_here = threading.local()


def kind() -> int:
    """What is around the ops of this thread."""
    return getattr(_here, "kind", NONE)


def set_kind(value: int) -> None:
    global was_used
    was_used = True
    _here.kind = value


def held() -> Hooks | None:
    """The hooks that this thread of a worker has."""
    return getattr(_here, "hooks", None)


def hold(hooks: Hooks | None) -> None:
    """These and no others, from now on."""
    if held() is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001
    _here.hooks = hooks
    set_kind(NONE if hooks is None else hooks[0])
    if hooks is not None:
        torch._C._autograd._push_saved_tensors_default_hooks(hooks[1], hooks[2])  # noqa: SLF001
