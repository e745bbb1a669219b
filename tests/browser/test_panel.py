"""The side panel in JupyterLab, with meshes that are made up (tests/fakes/panel.py)."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Notebook

START = """
from tests.fakes.panel import FakeMeshes
meshes = FakeMeshes({processes})
panel = meshes.start(get_ipython())
"""
TWO = START.format(processes=2)


def test_the_panel_shows_a_mesh_and_what_its_processes_are_at(notebook: Notebook) -> None:
    notebook.open("show.ipynb", TWO, "meshes.set_processes('busy', 'exited')")
    notebook.show_panel()
    expect(notebook.status).to_have_text("not loaded in this kernel")
    expect(notebook.panel).to_contain_text("%load_ext monarch_lab")
    notebook.run(0)
    expect(notebook.status).to_have_text("connected")
    expect(notebook.panel.locator(".mlab-Mesh-name")).to_have_text("mesh0")
    expect(notebook.rows).to_have_count(2)
    expect(notebook.rows.nth(1)).to_contain_text("0.1")
    expect(notebook.rows.nth(1)).to_contain_text("pid 4001 · 300 MiB")
    notebook.run(1)
    expect(notebook.rows.nth(0)).to_contain_text("aten.mm · 12 s")
    expect(notebook.rows.nth(0)).to_contain_text("3 pending")
    expect(notebook.rows.nth(1)).to_contain_text("signal SIGKILL")


def test_buttons_work_while_a_cell_runs(notebook: Notebook) -> None:
    notebook.open(
        "busy.ipynb",
        TWO,
        "while ('interrupt', 'mesh0') not in meshes.commands: pass\nprint('heard it')",
        "while ('stop', 'mesh0') not in meshes.commands: pass\nprint('stopped it')",
    )
    notebook.show_panel()
    notebook.run(0)
    expect(notebook.rows).to_have_count(2)
    notebook.run(1)
    expect(notebook.cell(1).locator(".jp-InputPrompt")).to_have_text("[*]:")
    notebook.panel.locator(".mlab-interrupt").click()
    expect(notebook.output(1)).to_contain_text("heard it")
    notebook.run(2)
    notebook.panel.locator(".mlab-stop").click()
    dialog = notebook.page.locator(".jp-Dialog")
    expect(dialog).to_contain_text("Stop mesh0?")
    dialog.get_by_role("button", name="Cancel").click()
    expect(notebook.rows).to_have_count(2)
    notebook.panel.locator(".mlab-stop").click()
    dialog.get_by_role("button", name="Stop").click()
    expect(notebook.output(2)).to_contain_text("stopped it")
    expect(notebook.rows).to_have_count(0)
    expect(notebook.panel).to_contain_text("%mesh start")


def test_a_failed_command_is_told_in_the_panel(notebook: Notebook) -> None:
    notebook.open("failed.ipynb", TWO + "\ndef refuse(mesh): raise RuntimeError('not now')\nmeshes.interrupt = refuse")
    notebook.show_panel()
    notebook.run(0)
    notebook.panel.locator(".mlab-interrupt").click()
    expect(notebook.panel.locator(".mlab-notice")).to_have_text("interrupt mesh0: not now")


def test_the_panel_survives_a_reload_while_a_cell_runs_and_a_kernel_restart(notebook: Notebook) -> None:
    page = notebook.page
    notebook.open("reload.ipynb", TWO, "while ('interrupt', 'mesh0') not in meshes.commands: pass\nprint('heard it')")
    notebook.show_panel()
    notebook.run(0)
    expect(notebook.rows).to_have_count(2)
    page.keyboard.press("Control+s")
    notebook.run(1)
    expect(notebook.cell(1).locator(".jp-InputPrompt")).to_have_text("[*]:")
    page.on("dialog", lambda dialog: dialog.accept())
    page.reload()
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    notebook.show_panel()
    expect(notebook.rows).to_have_count(2, timeout=20_000)
    notebook.panel.locator(".mlab-interrupt").click()
    notebook.wait_idle()
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    expect(notebook.rows).to_have_count(0, timeout=20_000)
    expect(notebook.status).to_have_text("not loaded in this kernel", timeout=20_000)
    notebook.wait_idle()
    notebook.run(0)
    expect(notebook.rows).to_have_count(2)


@pytest.mark.slow
def test_a_large_mesh_is_a_heat_map_that_names_the_process_pointed_at(notebook: Notebook) -> None:
    notebook.open("large.ipynb", START.format(processes=100), "meshes.set_processes(*['idle'] * 98, 'busy', 'lost')")
    notebook.show_panel()
    notebook.run(0)
    notebook.run(1)
    counts = notebook.panel.locator(".mlab-HeatMap-counts")
    expect(counts).to_contain_text("98 idle")
    expect(counts).to_contain_text("1 busy")
    expect(counts).to_contain_text("1 lost")
    expect(notebook.panel.locator(".mlab-Rows")).to_be_hidden()
    notebook.panel.locator(".mlab-HeatMap-canvas").hover(position={"x": 3, "y": 3})
    expect(notebook.panel.locator(".mlab-HeatMap-told")).to_have_text(re.compile(r"^0\.0 · idle · pid 4000"))


@pytest.mark.slow
def test_the_panel_follows_the_notebook_in_front(notebook: Notebook) -> None:
    notebook.lab.write("other.ipynb", "1 + 1")
    notebook.open("first.ipynb", TWO)
    notebook.show_panel()
    notebook.run(0)
    expect(notebook.rows).to_have_count(2)
    notebook.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:open', {path: 'other.ipynb'})")
    expect(notebook.status).to_have_text("not loaded in this kernel", timeout=20_000)
    expect(notebook.rows).to_have_count(0)
    notebook.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:open', {path: 'first.ipynb'})")
    expect(notebook.rows).to_have_count(2)


@pytest.mark.slow
def test_the_command_palette_opens_the_panel(notebook: Notebook) -> None:
    notebook.open("palette.ipynb", "1")
    notebook.page.evaluate("() => window.jupyterapp.commands.execute('monarch-lab:open')")
    expect(notebook.panel).to_be_visible()


def test_the_status_bar_names_the_current_mesh_and_counts_what_is_left_of_it(notebook: Notebook) -> None:
    notebook.open("status.ipynb", TWO, "meshes.set_processes('idle', 'lost')", "panel.stop()")
    status = notebook.page.locator(".mlab-Status")
    expect(status).to_be_hidden()
    notebook.run(0)
    expect(status).to_have_text("mesh0: 2 processes")
    notebook.run(1)
    expect(status).to_have_text("mesh0: 1 of 2 processes")
    status.locator("button").click()
    expect(notebook.rows).to_have_count(2)
    notebook.run(2)
    expect(status).to_be_hidden()
    expect(notebook.status).to_have_text("not loaded in this kernel")
