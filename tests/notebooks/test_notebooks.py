"""The notebooks of the repository, run from clean."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

BOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", BOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not any(c.get("outputs") or c.get("execution_count") for c in notebook.cells)


@pytest.mark.timeout(300)
def test_the_first_notebook_trains_to_95_percent_and_shows_its_two_errors() -> None:
    path = next(p for p in BOOKS if p.stem == "01_first_mesh")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    code = [c for c in notebook.cells if c.cell_type == "code"]
    printed = "".join(o.text for o in code[-1].outputs if o.output_type == "stream")
    assert printed.startswith("accuracy on held-out digits: ")
    assert float(printed.split()[-1].rstrip("%")) >= 95
    errors = [o for c in code for o in c.outputs if o.output_type == "error"]
    assert [e.ename for e in errors] == ["RemoteException", "UsageTypeError"]
    assert "mat1 and mat2 shapes cannot be multiplied" in errors[0].evalue
    assert "LOCAL_TENSOR" in errors[1].evalue
    assert sum("image/png" in o.get("data", {}) for c in code for o in c.outputs) == 3


@pytest.mark.timeout(300)
def test_both_ways_train_the_same_and_read_the_same_each_time() -> None:
    path = next(p for p in BOOKS if p.stem == "02_spmd_and_single_controller")
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": 240, "coalesce_streams": True}
    NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}, **options).execute()
    code = [c for c in notebook.cells if c.cell_type == "code"]
    texts = [
        o.text if o.output_type == "stream" else o.get("data", {}).get("text/plain", "")
        for c in code[1:]
        for o in c.outputs
        if o.output_type != "error"
    ]
    spmd, controller = (f'{way} · mesh "mesh" · 2 workers' for way in ("spmd", "controller"))
    loss = texts[3]
    assert loss.startswith("mesh tensor scalar float32") and "[all] tensor(0.0" in loss
    assert texts == [
        "<Figure size 300x300 with 1 Axes>",
        "torch.Size([400, 2])",
        controller,
        loss,
        controller,
        spmd,
        "rank 0: 'rank 0 of 2 has 400 points'\nrank 1: 'rank 1 of 2 has 400 points'",
        controller,
        "equal losses: True\nequal weights: True\n",
        "<Figure size 500x220 with 1 Axes>",
        spmd,
        "rank 0:",
        "<Figure size 200x200 with 1 Axes>",
        "rank 1:",
        "<Figure size 200x200 with 1 Axes>",
        "[0.0] only here",
        spmd,
        "ranks 0, 1: 400",
        "400",
        controller,
        spmd,
        'Pulled world_size from rank 0.\ntrained twice on 2 workers\nStopped mesh "mesh" (2 workers).\n',
    ]
    [error] = [o for c in code for o in c.outputs if o.output_type == "error"]
    assert error.evalue.startswith("ValueError: rank 1 has had enough (on rank 1); rank 0 waited in line 4")


@pytest.mark.timeout(120)
def test_the_debugger_notebook_says_where_it_stopped_where_nobody_can_be_asked() -> None:
    path = next(p for p in BOOKS if p.stem == "03_debugger")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=100, allow_errors=True, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    code = [c for c in notebook.cells if c.cell_type == "code"]
    texts = ["\n".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in c.outputs) for c in code]
    assert "ranks 0, 1, 2, 3: [nan, nan]" in str(code[1].outputs)
    assert "rank 2 stopped at In[2]:9 in masked_mean: kept = values[mask]" in texts[3]
    assert "[0.2]   In[2](16)step()\n[0.2] -> loss = masked_mean(error, x >= 0)" in texts[3]
    assert "[0.1/pm] > In[7](3)<module>()" in texts[7].split("nobody can be asked")[1]
    assert "[0.0] slope and offset: [3.0, 1.0]" in texts[8]
    assert [o.ename for c in code for o in c.outputs if o.output_type == "error"] == ["RemoteException"]
