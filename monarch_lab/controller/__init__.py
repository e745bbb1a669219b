"""The kernel's side of mesh tensors: intercepts ops, knows their results' metadata, and streams them out.

tensor.py     the tensor class           dispatch.py   one op, from call to stream
operators.py  its arithmetic, the quickest way
scanning.py   arguments taken apart      learning.py   the first call of a kind
cache.py      what was learned           autograd.py   backward and .grad
constants.py  numbers kept here          answers.py    what needs no op
mode.py       factories of a cell        patches.py    what torch does not route
mesh.py       meshes and their parts     moves.py      reduce, fetch
placing.py    local values onto a mesh   remote_functions.py   user functions
client.py     a user's side of one mesh: cells, waits, failures
outgoing.py   its op stream              listener.py    what its processes say
waiting.py, futures.py   answers on their way   activation.py  which mesh is active
failures.py   far errors                 front.py      who shows things to the user
display.py    values as text and HTML    copying.py    deepcopy
prompts.py    debuggers that wait        flusher.py    sends what has waited
inputs.py     workers at input()         spmd_async.py %%spmd --async
lookup.py     names of %%spmd cells
state.py      active mesh, ambient       refs.py       names of far values
calling.py    calls that come back       locations.py  whose line it was
messages.py   sentences of errors        random.py     ml.random
hooks.py      gradient hooks             functions.py  autograd.Function
gradients.py  grad_generator and others  lazy.py   parameters of lazy modules
loading.py    load_state_dict of local values
callbacks.py  the workers call the kernel   called.py  one such call
crossings.py  values to another mesh   return_path.py  and their gradients back
reducing.py   reduce to another mesh   mesh_table.py    a mesh as text   mesh_split.py   its dims cut
interrupts.py a Ctrl-C that was dropped   propagating.py   results told by propagate=
process_groups.py  groups as arguments of user functions   opaque.py   far objects and modules
pipes.py      processes beside the workers   timer.py, builtins.py   timers and logging of the workers
showing.py    pictures and tables      streams.py     streams and loans between them
lending.py    what may not be used or written   spmd.py        %%spmd cells
spmd_ends.py  how they ended

ml.compile: compiling.py      which recording fits a call         surroundings.py   what a function can see
            recorder.py       what is noted while it runs         tape.py           numbers computed anew
            record_builder.py a recording made of the notes       record_code.py    as the workers get it
            recording.py      its replay                      record_steps.py  loans and moves inside
coalesce.py   a block sent as one batch   ties.py         which ranks a fetch waits for
defined.py    what the workers were told  forgetting.py   and what they need not know any more
looking.py    what workers do now         interrupting.py  an interrupt of some ranks alone
ladder.py     after a Ctrl-C              losing.py      what variables lose with a rank
stall_watch.py  asks whether ranks of a %%spmd cell wait in vain   stalls.py   the rules of that
debug_sessions.py, debug_console.py   debuggers: their states, what is typed   debugging.py, breakpoints.py   magics
anomaly.py    lines for the warnings of anomaly mode
"""

from __future__ import annotations

import importlib
from typing import Any

# Resolved when asked for: ``front`` is for whoever shows things, and must not import torch.
_NAMES = {
    "DeviceMesh": "mesh",
    "Future": "futures",
    "MeshTensor": "tensor",
    "OpaqueModule": "opaque",
    "Pipe": "pipes",
    "Stream": "streams",
    "get_active_stream": "streams",
    "builtins": "",
    "futures": "",
    "show": "showing",
    "timer": "",
    "create_pipe": "pipes",
    "remote_generator": "pipes",
    "OpaqueObject": "opaque",
    "call_on_shard_and_fetch": "remote_functions",
    "coalescing": "coalesce",
    "compile": "compiling",
    "fetch_all": "moves",
    "fetch_shard": "moves",
    "get_active_mesh": "activation",
    "grad_function": "gradients",
    "grad_generator": "gradients",
    "gradient_execution_order": "gradients",
    "GradGenerator": "gradients",
    "inspect": "moves",
    "no_mesh": "activation",
    "opaque_method": "opaque",
    "random": "",
    "reduce": "moves",
    "reduce_": "moves",
    "remote": "remote_functions",
    "remote_autograd_function": "gradients",
    "slice_mesh": "crossings",
    "to_mesh": "crossings",
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
