"""Run a notebook from clean, without a browser, and print what its last cell printed.

python notebooks/run.py notebooks/01_first_mesh.ipynb
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

TIMEOUT_S = 600


def run(path: Path) -> str:
    """The text of the last code cell; raises CellExecutionError with the cell's traceback."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=ERROR"],  # else it warns of the TCP that nbclient chose for it
    )
    client.execute()
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    texts = [
        output["text"] if output.output_type == "stream" else output.get("data", {}).get("text/plain", "") + "\n"
        for output in last.outputs
    ]
    return "".join(texts).strip()


def main() -> None:
    for name in sys.argv[1:]:
        print(f"{name}: running", flush=True)
        try:
            print(run(Path(name)))
        except CellExecutionError as error:
            sys.exit(f"{name} failed:\n{error}")


if __name__ == "__main__":
    main()
