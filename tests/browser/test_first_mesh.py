"""The first minute of a user in JupyterLab, with real processes."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.conftest import Notebook

CELLS = (
    "%load_ext monarch_lab\nimport torch",
    "%mesh start --cpu",
    "%%mesh\nx = torch.ones(4, 4)\ny = x @ x.T\ny.sum()",
)


def test_a_mesh_cell_run_with_the_mouse_shows_its_value_and_the_panel_its_processes(notebook: Notebook) -> None:
    page = notebook.page
    run = page.locator(".jp-NotebookPanel-toolbar [data-jp-item-name='run']")
    notebook.open("first_mesh.ipynb", *CELLS)
    notebook.show_panel()
    notebook.cell(0).locator(".cm-content").click()
    run.click()
    expect(notebook.status).to_have_text("connected", timeout=30_000)
    expect(notebook.panel).to_contain_text("%mesh start")
    notebook.cell(1).locator(".cm-content").click()
    run.click()
    expect(notebook.rows).to_have_count(2, timeout=60_000)
    expect(notebook.rows.nth(0).locator(".mlab-Row-state")).to_have_text("idle", timeout=60_000)
    expect(notebook.rows.nth(1).locator(".mlab-Row-state")).to_have_text("idle", timeout=60_000)
    expect(notebook.rows.nth(1)).to_contain_text(re.compile(r"pid [1-9]\d*"))
    notebook.cell(2).locator(".cm-content").click()
    run.click()
    expect(notebook.output(2)).to_contain_text("64", timeout=60_000)  # 4 x 4 entries of 4
    expect(notebook.rows).to_have_count(2)
    notebook.panel.locator(".mlab-stop").click()
    page.locator(".jp-Dialog").get_by_role("button", name="Stop").click()
    expect(notebook.rows).to_have_count(0, timeout=30_000)
