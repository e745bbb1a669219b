"""Interactive, distributed PyTorch for Jupyter.

    config        every setting, the only reader of the environment
    errors        the whole error tree
    wire          what travels, as plain data: ids, messages, codec, the browser's snapshot
    transport     moving frames between known peers
    tensors       what controller and worker must agree on about torch (torch begins here)
    supervisor    in the kernel: keeps hosts and processes
    agent         one a host: starts, watches and ends its processes
    worker        one a device: runs the ops
    controller    in the kernel: mesh tensors, what failed where, futures
    session       a mesh as one object: what a user starts and stops
    notebook      everything that knows Jupyter

Imports point down this list (``lint-imports`` checks it). Public names load on first use: ``import monarch_lab``
costs nothing, and an agent that imports ``monarch_lab.agent`` never loads torch or IPython.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"

_HOMES = {
    "monarch_lab.session": ("local_mesh", "meshes"),
    "monarch_lab.session.several": ("local_mesh_provider", "local_meshes", "local_meshes_and_bootstraps"),
    "monarch_lab.config": ("ControllerParams", "LoggingLocation", "SocketType", "SupervisionParams"),
    "monarch_lab.session.provider": ("MeshProvider",),
    "monarch_lab.session.worlds": ("Bootstrap", "WorldStatus"),
    "monarch_lab.controller": (
        "DeviceMesh",
        "Future",
        "call_on_shard_and_fetch",
        "coalescing",
        "compile",
        "OpaqueModule",
        "Pipe",
        "Stream",
        "get_active_stream",
        "builtins",
        "show",
        "timer",
        "futures",
        "create_pipe",
        "remote_generator",
        "OpaqueObject",
        "fetch_all",
        "fetch_shard",
        "get_active_mesh",
        "grad_function",
        "grad_generator",
        "gradient_execution_order",
        "GradGenerator",
        "inspect",
        "no_mesh",
        "opaque_method",
        "random",
        "reduce",
        "reduce_",
        "remote",
        "remote_autograd_function",
        "slice_mesh",
        "to_mesh",
    ),
    "monarch_lab.tensors.opaque": ("OpaqueRef",),  # not by way of the controller: users' functions make it on workers
    "monarch_lab.errors": (
        "ClosedError",
        "DeviceException",
        "InternalError",
        "LaunchError",
        "MeshError",
        "ProtocolError",
        "RemoteException",
        "UsageError",
    ),
    "monarch_lab.notebook.widgets": ("MeshView",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
# Used as they are: ml.supervisor.Context.
_MODULES = ("supervisor",)

__all__ = ["__version__", *sorted([*_HOME_OF, *_MODULES])]  # noqa: PLE0604  (the table's names are strings)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})


def load_ipython_extension(ip: InteractiveShell) -> None:
    from monarch_lab.notebook import extension

    extension.load(ip)


def unload_ipython_extension(ip: InteractiveShell) -> None:
    from monarch_lab.notebook import extension

    extension.unload(ip)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    return [{"src": "labextension", "dest": "monarch-lab"}]
