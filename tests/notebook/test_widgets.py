from __future__ import annotations

import io
import threading

import msgspec
import pytest
from PIL import Image

from monarch_lab.notebook import widgets
from monarch_lab.wire.snapshot import ProcessState
from tests.fakes.engine import FakeMesh


def test_up_to_eight_processes_are_rows() -> None:
    view = widgets.MeshView(FakeMesh(gpus=8))
    assert len(view.children) == 1
    assert "<tbody>" in view.children[0].value
    view.close()


def test_more_are_a_heat_map_of_one_widget() -> None:
    view = widgets.MeshView(FakeMesh(hosts=128, gpus=8))
    assert len(view.children) == 3
    assert "<tbody>" not in view.children[0].value
    assert len(view.children[1].value) < 20_000
    view.close()


def test_a_heat_map_is_a_square_of_its_states_colour_each() -> None:
    states: list[ProcessState] = ["idle", "busy", "lost"]
    image = Image.open(io.BytesIO(widgets.heat_map(states, 2))).convert("RGBA")
    assert image.size == (2 * widgets.SQUARE_PX, 2 * widgets.SQUARE_PX)
    middle = widgets.SQUARE_PX // 2

    def colour(column: int, row: int) -> str:
        r, g, b, alpha = image.getpixel((column * widgets.SQUARE_PX + middle, row * widgets.SQUARE_PX + middle))
        return f"#{r:02x}{g:02x}{b:02x}" if alpha else "clear"

    assert [colour(0, 0), colour(1, 0), colour(0, 1), colour(1, 1)] == [
        widgets.COLOURS["idle"],
        widgets.COLOURS["busy"],
        widgets.COLOURS["lost"],
        "clear",
    ]


@pytest.mark.parametrize(
    ("hosts", "gpus", "wide"), [(4, 8, 8), (128, 8, 32), (1, 1024, 32), (1, 12, 12), (1000, 1, 32)]
)
def test_a_map_has_a_fair_shape(hosts: int, gpus: int, wide: int) -> None:
    assert widgets.columns(FakeMesh(hosts=hosts, gpus=gpus).status()) == wide


def test_a_shown_view_follows_the_mesh_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widgets, "PERIOD_S", 0.001)
    mesh = FakeMesh()
    view = widgets.MeshView(mesh)
    assert view._thread is None
    view._repr_mimebundle_()
    drawn = threading.Event()
    view.children[0].observe(lambda change: drawn.set() if "SIGKILL" in change["new"] else None, "value")
    real = mesh.status
    monkeypatch.setattr(mesh, "status", lambda: msgspec.structs.replace(real(), note="signal SIGKILL"))
    assert drawn.wait(30)
    mesh.state = "closed"
    thread = view._thread
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()
    view.close()


def test_closing_ends_the_thread() -> None:
    view = widgets.MeshView(FakeMesh())
    view._repr_mimebundle_()
    thread = view._thread
    view.close()
    assert thread is not None and not thread.is_alive()
