"""P3: a training step (8 linear layers, MSE, backward, AdamW with a scheduler) as an eager cell, 1 worker.

Reference: the same cell on a local copy of the model in local eager torch. The second line is the same with layers
so small that only the overhead of each op is seen.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import monarch_lab as ml
from tests.bench._mesh import mesh_of
from tests.bench._report import Line, interleaved, main, median

BATCH = 64
STEPS = 10  # of a cell
CELL = compile(
    """\
for _ in range(steps):
    loss = nn.functional.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.detach())
""",
    "<cell>",
    "exec",
)
STEP = """\
def step():
    loss = nn.functional.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""
RECORDED_CELL = compile(
    """\
for _ in range(steps):
    losses.append(step())
    scheduler.step()
""",
    "<cell>",
    "exec",
)


class Training:
    """What a notebook would hold for it: a model, its optimizer and data, on the mesh or local."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        target: Any,
        fetch: Callable[[list[Any]], list[Any]],
        wrap: Callable[..., Any] | None = None,
    ) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.names: dict[str, Any] = {
            "nn": nn,
            "model": model,
            "x": x,
            "target": target,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9),
            "losses": [],
        }
        self._cell = CELL
        if wrap is not None:
            exec(STEP, self.names)
            self.names["step"] = wrap(self.names["step"])
            self._cell = RECORDED_CELL
        self.losses: list[float] = []
        self._fetch = fetch

    def run(self, steps: int = STEPS) -> float:
        """One cell; milliseconds a step, until the losses are here."""
        self.names.update(steps=steps, losses=[])
        began = time.perf_counter()
        exec(self._cell, self.names)
        values = self._fetch(self.names["losses"])
        took = time.perf_counter() - began
        self.losses += [float(v) for v in values]
        return took * 1e3 / steps

    def state_bytes(self) -> int:
        return sum(3 * 4 * p.numel() for p in self.names["model"].parameters())


def layers(narrow: int, wide: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(narrow, wide), nn.Linear(wide, narrow))))


def measure_shapes(narrow: int, wide: int, turns: int) -> Iterator[Line]:
    model = layers(narrow, wide)
    x, target = torch.randn(BATCH, narrow), torch.randn(BATCH, narrow)
    with mesh_of(1) as mesh:
        misses = mesh.client.cache
        local = Training(copy.deepcopy(model), x, target, lambda losses: losses)
        ours = Training(mesh.replicate(model), mesh.replicate(x), mesh.replicate(target), ml.inspect)

        def on_mesh(steps: int = STEPS) -> float:
            with mesh.activate():
                return ours.run(steps)

        replayed = Training(
            mesh.replicate(model), mesh.replicate(x), mesh.replicate(target), ml.inspect, wrap=ml.compile
        )

        def recorded(steps: int = STEPS) -> float:
            with mesh.activate():
                return replayed.run(steps)

        on_mesh(3)
        recorded(4)  # one makes the optimizer's state, two have to agree
        local.run(4)
        on_mesh(1)
        learned = misses.misses
        walls, recorded_walls, eager = interleaved(turns, on_mesh, recorded, local.run)
        missed = misses.misses - learned
    worst = _worst(ours.losses, local.losses)
    shapes = f"{narrow}->{wide}, {wide}->{narrow}" if narrow != wide else f"{narrow}->{wide}"
    details = {
        "shapes": shapes,
        "batch": BATCH,
        "state_bytes": ours.state_bytes(),
        "runs": turns,
        "steps_a_run": STEPS,
        "misses_of_the_first_3_steps": learned,
        "first_loss": local.losses[0],
        "last_loss": local.losses[-1],
        "best_ms": min(walls),
        "best_eager_ms": min(eager),
    }
    yield Line(
        "P3",
        f"training step, {shapes}, 1 worker",
        median(walls),
        "ms/step",
        goal=1.25,
        reference=median(eager),
        reference_is="local eager",
        details=details,
    )
    yield Line(
        "P3",
        f"recorded training step, {shapes}, 1 worker",
        median(recorded_walls),
        "ms/step",
        goal=1.15,
        reference=median(eager),
        reference_is="local eager",
        details={"runs": turns, "best_ms": min(recorded_walls), "best_eager_ms": min(eager)},
    )
    relative = _worst(replayed.losses, local.losses)
    yield Line("P3", f"recorded losses, {shapes}", relative, "relative", goal=1e-6, absolute=True)
    yield Line("P3", f"calls that waited, a step after the third, {shapes}", missed, "misses", goal=0, absolute=True)
    yield Line("P3", f"losses against local eager, {shapes}", worst, "relative", goal=1e-6, absolute=True)


def _worst(ours: list[float], local: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, local, strict=True))


def measure(quick: bool) -> Iterator[Line]:
    turns = 3 if quick else 9
    yield from measure_shapes(256, 1024, turns)
    yield from measure_shapes(32, 32, turns)


if __name__ == "__main__":
    main("p3_training_step", measure)
