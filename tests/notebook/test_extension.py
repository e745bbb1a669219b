from __future__ import annotations

import builtins
import subprocess
import sys

from monarch_lab.notebook.transform import RUNNER
from tests.fakes import engine
from tests.fakes.shell import Shell


def test_unloading_stops_the_meshes_and_says_which(started: Shell) -> None:
    mesh = started.mesh()
    started.run("%unload_ext monarch_lab")
    assert started.text == 'Stopped mesh "mesh" (2 workers).\n'
    assert mesh.state == "closed"


def test_unloading_takes_everything_out(bare: Shell) -> None:
    ip = bare.ip

    def parts() -> list[object]:
        return [
            list(ip.input_transformers_cleanup),
            list(ip.ast_transformers),
            list(ip.Completer.custom_matchers),
            [list(callbacks) for callbacks in ip.events.callbacks.values()],
            sorted(vars(ip.displayhook)),
            hasattr(builtins, RUNNER),
            "mesh" in ip.magics_manager.magics["line"],
            "spmd" in ip.magics_manager.magics["cell"],
        ]

    before = parts()
    bare.run("%load_ext monarch_lab")
    assert parts() != before
    bare.run("%unload_ext monarch_lab")
    assert bare.text == "monarch_lab is unloaded; no mesh was running.\n"
    assert parts() == before
    bare.run("%%mesh\n1")
    assert "Cell magic `%%mesh` not found" in bare.text


def test_reloading_stops_the_mesh_and_works_on(started: Shell) -> None:
    mesh = started.mesh()
    started.run("%reload_ext monarch_lab")
    assert started.text == 'Stopped mesh "mesh" (2 workers).\n'
    assert mesh.state == "closed"
    assert len(started.ip.ast_transformers) == 1
    started.run("%mesh start\n")
    assert started.run("%%mesh\n3").success
    assert ": 3\n" in started.text


def test_loading_twice_changes_nothing(started: Shell) -> None:
    started.run("%load_ext monarch_lab")
    assert started.mesh().state == "live"
    assert len(started.ip.ast_transformers) == 1


def test_a_mesh_that_cannot_be_stopped_does_not_keep_the_others(started: Shell) -> None:
    def refuse() -> None:
        raise RuntimeError("stuck")

    started.run("%mesh start --name b")
    other = started.mesh("b")
    started.mesh().on_exit = refuse
    started.run("%unload_ext monarch_lab")
    assert started.text.endswith("a mesh could not be stopped: RuntimeError: stuck\n")
    assert other.state == "closed"
    assert not hasattr(builtins, RUNNER)
    engine.uninstall()


def test_loading_brings_neither_torch_nor_widgets() -> None:
    code = (
        "import sys; from IPython.core.interactiveshell import InteractiveShell as S; ip = S.instance();"
        "ip.run_line_magic('load_ext', 'monarch_lab'); ip.run_line_magic('mesh', 'list');"
        "print([m for m in ('torch', 'ipywidgets', 'ipykernel') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()  # this user's other kernels may have meshes
    assert first.endswith("is running: type %mesh start") and last == "[]"
