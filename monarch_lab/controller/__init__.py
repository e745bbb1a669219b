"""The kernel's side of mesh tensors: intercepts ops, knows their results' metadata, and streams them out.

tensor.py     the tensor class           dispatch.py   one op, from call to stream
scanning.py   arguments taken apart      learning.py   the first call of a kind
cache.py      what was learned           autograd.py   backward and .grad
constants.py  numbers kept here          answers.py    what needs no op
mode.py       factories of a cell        patches.py    what torch does not route
mesh.py       meshes and their parts     moves.py      reduce, fetch
placing.py    local values onto a mesh   remote.py     user functions
client.py     the stream of one mesh     waiting.py, futures.py   answers on their way
failures.py   far errors                 front.py      who shows things to the user
display.py    values as text and HTML    copying.py    deepcopy
"""

from monarch_lab.controller import random, tensor
from monarch_lab.controller.futures import Future
from monarch_lab.controller.mesh import DeviceMesh, get_active_mesh, no_mesh
from monarch_lab.controller.moves import fetch_all, fetch_shard, inspect, reduce, reduce_
from monarch_lab.controller.remote import call_on_shard_and_fetch, remote
from monarch_lab.controller.tensor import MeshTensor

__all__ = [
    "DeviceMesh",
    "Future",
    "MeshTensor",
    "call_on_shard_and_fetch",
    "fetch_all",
    "fetch_shard",
    "get_active_mesh",
    "inspect",
    "no_mesh",
    "random",
    "reduce",
    "reduce_",
    "remote",
    "tensor",
]
