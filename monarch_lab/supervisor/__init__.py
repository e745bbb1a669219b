"""A thread in the kernel that keeps the processes of a mesh. It never loads the agent's or the worker's modules.

launch.py         what to start, and who is told
lifecycle.py      states of a process, every move between them
progress.py       how far the start is, and its deadlines
groundwork.py     what a mesh stands on before it has a name
roll.py           who belongs to the mesh, and who has proved it; pure
agent_process.py  starts the agent and sees it end
loop.py           the I/O thread
supervisor.py     what the rest of the kernel holds
"""

from monarch_lab.supervisor.groundwork import Ground, Groundwork
from monarch_lab.supervisor.launch import Listener, MeshLaunch
from monarch_lab.supervisor.lifecycle import ProcessInfo, ProcessState
from monarch_lab.supervisor.progress import MeshState
from monarch_lab.supervisor.supervisor import Supervisor

__all__ = ["Ground", "Groundwork", "Listener", "MeshLaunch", "MeshState", "ProcessInfo", "ProcessState", "Supervisor"]
