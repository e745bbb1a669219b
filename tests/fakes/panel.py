"""Meshes for a panel to show, without processes: what they hold is what a test sets."""

from __future__ import annotations

from typing import Any

import msgspec

from monarch_lab.notebook.comm import Panel
from monarch_lab.wire.snapshot import KernelSnapshot, MeshSnapshot, ProcessSnapshot, ProcessState

MIB = 1 << 20


class FakeMeshes:
    """A panel's snapshot source and its commands in one."""

    def __init__(self, processes: int = 2, name: str = "mesh0") -> None:
        self.commands: list[tuple[str, str]] = []
        self.seq = 0
        self.panel: Panel | None = None
        self.meshes = [MeshSnapshot(name, "live", [("host", 1), ("gpu", processes)], "cpu", [])]
        self.set_processes(*(["idle"] * processes))

    def set_processes(self, *states: ProcessState, **fields: Any) -> None:
        made = [
            ProcessSnapshot(
                rank=rank,
                label=f"0.{rank}",
                host="h0",
                pid=4000 + rank,
                state=state,
                rss_bytes=300 * MIB + rank,
                op="aten.mm" if state == "busy" else "",
                op_age_s=12.0 if state == "busy" else 0.0,
                pending_ops=3 if state == "busy" else 0,
                exit="signal SIGKILL" if state == "exited" else "",
            )
            for rank, state in enumerate(states)
        ]
        self.meshes[0] = msgspec.structs.replace(self.meshes[0], processes=made, **fields)

    def snapshot(self) -> KernelSnapshot:
        self.seq += 1
        return KernelSnapshot(self.seq, self.meshes[0].name if self.meshes else "", list(self.meshes))

    def interrupt(self, mesh: str) -> None:
        self.commands.append(("interrupt", mesh))

    def stop(self, mesh: str) -> None:
        if mesh not in [m.name for m in self.meshes]:
            raise KeyError(f"no mesh is named {mesh}")
        self.commands.append(("stop", mesh))
        self.meshes = [m for m in self.meshes if m.name != mesh]

    def debug_attach(self, mesh: str, session: str) -> None:
        self.commands.append(("attach", session))
        assert self.panel is not None
        self.panel.debugger_news(mesh, session, "> cell.py(4)f()\n", "(Pdb) ")

    def debug_line(self, mesh: str, session: str, line: str) -> str:
        self.commands.append((line, session))
        return "there is nobody else" if line == "ranks" else ""

    def debug_detach(self, mesh: str, session: str) -> None:
        self.commands.append(("detach", session))

    def start(self, ip: Any) -> Panel:
        self.panel = panel = Panel(self.snapshot, self)
        panel.start(ip)
        return panel
