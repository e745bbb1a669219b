"""A breakpoint of the workers, under the cell in JupyterLab."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.conftest import Notebook

CELLS = (
    "%load_ext monarch_lab\n%mesh start --cpu -n 4",
    "%%spmd -q\nx = torch.arange(6.).view(2, 3) + rank\nbreakpoint()\ny = x.mean()\ny",
)


def test_a_prompt_under_the_cell_takes_commands_for_one_rank_and_for_all(notebook: Notebook) -> None:
    notebook.open("debugger.ipynb", *CELLS)
    notebook.run(0)
    expect(notebook.output(0)).to_contain_text("4 workers", timeout=60_000)
    notebook.run(1)
    box = notebook.cell(1).locator(".jp-Stdin-input").last  # the one before may still be there for a moment
    for line in ("rank 3", "p x", "ranks"):
        expect(box).to_be_focused(timeout=60_000)  # its handlers are there
        expect(box).to_have_value("")  # the next one, not what was typed before
        box.fill(line)
        box.press("Enter")
        expect(notebook.output(1)).to_contain_text(f"(Pdb)  {line}")  # the box has become text
    expect(notebook.output(1)).to_contain_text("[0.3] tensor float32 (2, 3) cpu · min 3, max 8, mean 5.5")
    expect(box).to_be_focused()
    expect(box).to_have_value("")
    box.fill("c all")
    box.press("Enter")
    expect(notebook.output(1)).to_contain_text("rank 3: tensor(5.5000)", timeout=30_000)
