"""What is known of a mesh and its processes, as plain strings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """``devices_labels``: for each process, in the order of the mesh's ranks."""

    mesh_labels: dict[str, str]
    devices_labels: list[dict[str, str]]
