"""P4: the first mesh of 4 workers in a kernel that has imported torch, until an op has run on each and a reduction too.

Reference: one ``import torch`` in a fresh interpreter, before and after in turn. Then later meshes of the same kernel:
on the spare (as when some seconds lie between them), and at once after the last, when there is none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.bench._peers import ROOT
from tests.bench._report import Line, main, median

WORKERS = 4
IMPORT = """
import json, time
began = time.perf_counter()
import torch
print(json.dumps({"import_s": time.perf_counter() - began}))
"""
START = f"""
import json, os, time
os.environ["MONARCH_LAB_WARM_POOL_DELAY"] = "0.2"
begun = time.perf_counter()
import torch

def usable(number):
    began = time.perf_counter()
    import monarch_lab as ml
    ml.local_mesh
    imported = time.perf_counter()
    mesh = ml.local_mesh(gpus_per_host={WORKERS}, device="cpu")
    up = time.perf_counter()
    with mesh.activate():
        x = torch.ones(16) + 1
    mesh.sync()
    ran = time.perf_counter()
    assert (ml.fetch_all(x.reduce("gpu")) == {2 * WORKERS}).all()
    formed = time.perf_counter()
    mesh.exit()
    return {{
        "usable_s": formed - began,
        "import_ours_s": imported - began,
        "local_mesh_s": up - imported,
        "first_op_s": ran - up,
        "group_and_fetch_s": formed - ran,
        "exit_s": time.perf_counter() - formed,
    }}

def on_spare():
    from monarch_lab.session.pool import warm_pool
    began = time.perf_counter()
    while not warm_pool.is_ready:
        time.sleep(0.01)
    made = time.perf_counter() - began
    return {{**usable(0), "spare_made_s": made}}

found = {{"first": usable(1), "total_s": time.perf_counter() - begun}}
found["later"] = [on_spare() for _ in range(LATER)]
found["cold"] = [usable(0)["usable_s"] for _ in range(LATER)]
print(json.dumps(found))
"""


def fresh(code: str) -> dict:
    """Run ``code`` in a fresh interpreter; what it printed, and how long the process took."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return {**json.loads(done.stdout), "process_s": time.perf_counter() - began}


def measure(quick: bool) -> Iterator[Line]:
    turns, later = (1, 2) if quick else (5, 5)
    imports, starts = [], []
    for _ in range(turns):
        imports.append(fresh(IMPORT)["import_s"])
        starts.append(fresh(START.replace("LATER", str(later))))
    imports.append(fresh(IMPORT)["import_s"])
    firsts = [s["first"] for s in starts]
    parts = {key: median(f[key] for f in firsts) for key in firsts[0]}
    details = {**parts, "runs": turns, "total_with_import_torch_s": median(s["total_s"] for s in starts)}
    yield Line(
        "P4",
        f"first mesh of {WORKERS} workers, group formed",
        parts["usable_s"],
        "s",
        goal=1.3,
        reference=median(imports),
        reference_is="one import torch",
        details=details,
    )
    later_ones = [one for start in starts for one in start["later"]]
    usable = median(one["usable_s"] for one in later_ones)
    details = {key: median(one[key] for one in later_ones) for key in later_ones[0]}
    yield Line("P4", "a later mesh, on the spare", usable, "s", goal=0.3, absolute=True, details=details)
    yield Line(
        "P4",
        "a later mesh, on the spare",
        usable,
        "s",
        goal=0.3,
        reference=median(imports),
        reference_is="one import torch",
        details={"without_a_spare_s": median(s for start in starts for s in start["cold"])},
    )


if __name__ == "__main__":
    main("p4_first_mesh", measure)
