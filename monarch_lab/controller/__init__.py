"""The kernel's side of mesh tensors: intercepts ops, knows their results' metadata, and streams them out.

tensor.py     the tensor class           dispatch.py   one op, from call to stream
scanning.py   arguments taken apart      learning.py   the first call of a kind
cache.py      what was learned           autograd.py   backward and .grad
constants.py  numbers kept here          answers.py    what needs no op
mode.py       factories of a cell        patches.py    what torch does not route
mesh.py       meshes and their parts     moves.py      reduce, fetch
placing.py    local values onto a mesh   remote_functions.py   user functions
client.py     the stream of one mesh     waiting.py, futures.py   answers on their way
failures.py   far errors                 front.py      who shows things to the user
display.py    values as text and HTML    copying.py    deepcopy
prompts.py    debuggers that wait        flusher.py    sends what has waited
state.py      active mesh, ambient       refs.py       names of far values
calling.py    calls that come back       locations.py  whose line it was
messages.py   sentences of errors        random.py     ml.random
interrupts.py a Ctrl-C that was dropped

ml.compile: compiling.py      which recording fits a call         surroundings.py   what a function can see
            recorder.py       what is noted while it runs         tape.py           numbers computed anew
            record_builder.py a recording made of the notes       record_code.py    as the workers get it
            recording.py      its replay
coalesce.py   a block sent as one batch
"""

from __future__ import annotations

import importlib
from typing import Any

# Resolved when asked for: ``front`` is for whoever shows things, and must not import torch.
_NAMES = {
    "DeviceMesh": "mesh",
    "Future": "futures",
    "MeshTensor": "tensor",
    "call_on_shard_and_fetch": "remote_functions",
    "coalescing": "coalesce",
    "compile": "compiling",
    "fetch_all": "moves",
    "fetch_shard": "moves",
    "get_active_mesh": "mesh",
    "inspect": "moves",
    "no_mesh": "mesh",
    "random": "",
    "reduce": "moves",
    "reduce_": "moves",
    "remote": "remote_functions",
}

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.tensor")  # whoever makes a tensor needs its class in place
    module = importlib.import_module(f"{__name__}.{_NAMES[name] or name}")
    found = getattr(module, name) if _NAMES[name] else module
    globals()[name] = found
    return found
