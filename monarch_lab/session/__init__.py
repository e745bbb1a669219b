"""A mesh as one object: what a user starts and stops. Joins the supervisor's processes and the controller's stream.

local.py      meshes on this machine      registry.py   the meshes of this kernel
session.py    one mesh, joined            relay.py      what is heard before they are joined
pool.py       a spare for the next mesh  record.py     what other kernels and shells are told of a mesh
found.py      the meshes of all kernels of this user
"""

from monarch_lab.session.local import local_mesh, start_local
from monarch_lab.session.pool import warm_pool
from monarch_lab.session.registry import meshes

__all__ = ["local_mesh", "meshes", "start_local", "warm_pool"]
