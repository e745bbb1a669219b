"""A mesh as one object: what a user starts and stops. Joins the supervisor's processes and the controller's stream.

local.py      a mesh on this machine      registry.py   the meshes of this kernel
options.py    what may be said of one     start.py      one under way
session.py    one mesh, joined            relay.py      what is heard before they are joined
pool.py       a spare for the next mesh  record.py     what other kernels and shells are told of a mesh
found.py      the meshes of all kernels of this user       logs.py   their log files
worlds.py     several at once, each a failure domain       provider.py   hands out the healthy ones
several.py    local_meshes and its kin  info.py       what is known of one, in words
"""

from monarch_lab.session.local import local_mesh, start_local
from monarch_lab.session.pool import warm_pool
from monarch_lab.session.registry import meshes
from monarch_lab.session.several import local_mesh_provider, local_meshes, local_meshes_and_bootstraps

__all__ = [
    "local_mesh",
    "local_mesh_provider",
    "local_meshes",
    "local_meshes_and_bootstraps",
    "meshes",
    "start_local",
    "warm_pool",
]
