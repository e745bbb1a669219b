"""Hosts and processes, kept by a thread of this process. It never loads the agent's or the worker's modules, or torch.

For users, as ``monarch_lab.supervisor``: supervise any processes on any hosts (docs/supervisor.md).

context.py        Context: what a user holds
handles.py        Host, Process, ProcessList
letters.py        what is sent and received; the one place that pickles
inbox.py          where letters wait; recv, and filters that keep their place
function_call.py  a function to be run by a process
child_queue.py    in a process: its link to the supervisor
bootstrap.py      what a process runs that was started with a FunctionCall
core.py           the rules; core_events.py what goes in and out of them, records.py what they keep
host_states.py    states of hosts and processes, every move between them
backlog.py        how much each process has not read
context_loop.py   the I/O thread
local_hosts.py    agents on this machine
status.py         how it is doing, in numbers
ttl.py            how much of a time is left

For a mesh of workers, forked from one zygote:

launch.py         what to start, and who is told
lifecycle.py      states of a process, every move between them
progress.py       how far the start is, and its deadlines
groundwork.py     what a mesh stands on before it has a name
roll.py           who belongs to the mesh, and who has proved it; pure
silence.py        when an agent that says nothing is given up
agent_process.py  starts the agent and sees it end
process_table.py  which process has each rank, and what is known of it
order_channel.py  the socket on which orders go out
loop.py           the I/O thread; report_socket.py what it reads, held_ends.py ends that wait to be told,
                  leftovers.py the processes of an agent that has ended
supervisor.py     what the rest of the kernel holds
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_lab.supervisor.child_queue import MessageQueue as MessageQueue
    from monarch_lab.supervisor.child_queue import get_message_queue as get_message_queue
    from monarch_lab.supervisor.context import Context as Context
    from monarch_lab.supervisor.function_call import FunctionCall as FunctionCall
    from monarch_lab.supervisor.groundwork import Ground as Ground
    from monarch_lab.supervisor.groundwork import Groundwork as Groundwork
    from monarch_lab.supervisor.handles import Host as Host
    from monarch_lab.supervisor.handles import Process as Process
    from monarch_lab.supervisor.handles import ProcessList as ProcessList
    from monarch_lab.supervisor.inbox import Filter as Filter
    from monarch_lab.supervisor.launch import Listener as Listener
    from monarch_lab.supervisor.launch import MeshLaunch as MeshLaunch
    from monarch_lab.supervisor.letters import HostConnected as HostConnected
    from monarch_lab.supervisor.letters import HostDisconnected as HostDisconnected
    from monarch_lab.supervisor.letters import Letter as Letter
    from monarch_lab.supervisor.letters import ProcessExited as ProcessExited
    from monarch_lab.supervisor.letters import ProcessFailedToStart as ProcessFailedToStart
    from monarch_lab.supervisor.letters import ProcessStarted as ProcessStarted
    from monarch_lab.supervisor.letters import UnreadableMessage as UnreadableMessage
    from monarch_lab.supervisor.lifecycle import ProcessInfo as ProcessInfo
    from monarch_lab.supervisor.lifecycle import ProcessState as ProcessState
    from monarch_lab.supervisor.progress import MeshState as MeshState
    from monarch_lab.supervisor.status import Status as Status
    from monarch_lab.supervisor.supervisor import Supervisor as Supervisor
    from monarch_lab.supervisor.ttl import TTL as TTL

# On first use: a process that was started with a FunctionCall loads no more than its queue.
_HOMES = {
    "child_queue": ("MessageQueue", "get_message_queue"),
    "context": ("Context",),
    "function_call": ("FunctionCall",),
    "groundwork": ("Ground", "Groundwork"),
    "handles": ("Host", "Process", "ProcessList"),
    "inbox": ("Filter",),
    "launch": ("Listener", "MeshLaunch"),
    "letters": (
        "HostConnected",
        "HostDisconnected",
        "Letter",
        "ProcessExited",
        "ProcessFailedToStart",
        "ProcessStarted",
        "UnreadableMessage",
    ),
    "lifecycle": ("ProcessInfo", "ProcessState"),
    "progress": ("MeshState",),
    "status": ("Status",),
    "supervisor": ("Supervisor",),
    "ttl": ("TTL",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF)]  # noqa: PLE0604  (the table's names are strings)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
