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

# several.py and what it needs is loaded when somebody asks for it: a first mesh waits for every import here.
__all__ = ["local_mesh", "meshes", "start_local", "warm_pool"]
