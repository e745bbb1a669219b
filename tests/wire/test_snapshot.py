"""The snapshot and its TypeScript twin say the same, field by field and state by state."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec
import pytest

from monarch_lab.wire import snapshot

TWIN = (Path(__file__).parents[2] / "labextension/src/protocol.ts").read_text()
IN_TYPESCRIPT = {
    int: "number",
    float: "number",
    str: "string",
    snapshot.ProcessState: "ProcessState",
    snapshot.MeshState: "MeshState",
    list[tuple[str, int]]: "[string, number][]",
    list[snapshot.ProcessSnapshot]: "ProcessSnapshot[]",
    list[snapshot.MeshSnapshot]: "MeshSnapshot[]",
    snapshot.DebuggerState: "DebuggerState",
    list[snapshot.DebuggerSnapshot]: "DebuggerSnapshot[]",
}


@pytest.mark.parametrize(
    "cls", [snapshot.ProcessSnapshot, snapshot.DebuggerSnapshot, snapshot.MeshSnapshot, snapshot.KernelSnapshot]
)
def test_the_browser_knows_every_field_and_its_type(cls: type[msgspec.Struct]) -> None:
    body = re.search(rf"interface {cls.__name__} {{(.*?)}}", TWIN, re.S)
    assert body
    in_browser = dict(re.findall(r"(\w+): (.*?);", body[1]))
    hints = typing.get_type_hints(cls)
    assert in_browser == {field.name: IN_TYPESCRIPT[hints[field.name]] for field in msgspec.structs.fields(cls)}


@pytest.mark.parametrize(
    ("constant", "states"),
    [
        ("PROCESS_STATES", snapshot.ProcessState),
        ("MESH_STATES", snapshot.MeshState),
        ("DEBUGGER_STATES", snapshot.DebuggerState),
    ],
)
def test_the_browser_knows_every_state(constant: str, states: object) -> None:
    listed = re.search(rf"{constant} = \[(.*?)\]", TWIN)
    assert listed
    assert tuple(re.findall(r"'(\w+)'", listed[1])) == typing.get_args(states)


def test_a_snapshot_survives_the_way_to_the_browser() -> None:
    process = snapshot.ProcessSnapshot(0, "0.0", "h0", 1, "idle")
    sent = snapshot.KernelSnapshot(1, "m", [snapshot.MeshSnapshot("m", "live", [("gpu", 1)], "cpu", [process])])
    assert msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(sent)), type=snapshot.KernelSnapshot) == sent
