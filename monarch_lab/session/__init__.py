"""A mesh as one object: what a user starts and stops. Joins the supervisor's processes and the controller's stream."""

from monarch_lab.session.local import local_mesh, start_local
from monarch_lab.session.session import Session, meshes

__all__ = ["Session", "local_mesh", "meshes", "start_local"]
