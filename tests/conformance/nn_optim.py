"""torch's own samples of every nn module and optimizer (module_db, optim_db), on a mesh against eager torch (C4).

    python -m tests.conformance.nn_optim [--per-module N] [--only NAME] [--json FILE]

A module is built, run and differentiated twice, in training and in evaluation, from one seed: outputs, the gradients of
parameters and inputs, and buffers must be equal on every process. An optimizer takes three steps: losses, parameters
and state must be equal.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import tree_leaves, tree_map

import monarch_lab as ml
from tests.controller.compare import by_rank, is_mesh

Case = tuple[str, Callable[[Any], Any]]  # name, run(place): the tensors to be compared


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return copy.deepcopy(value)
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _on(mesh: Any) -> Callable[[Any], Any]:
    def place(value: Any) -> Any:
        return mesh.replicate(value) if isinstance(value, (torch.Tensor, nn.Module)) else value

    return place


def _differentiable(outputs: Any) -> list[Any]:
    return [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]


def run_module(info: Any, sample: Any, training: bool, place: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    built = sample.constructor_input
    module = info.module_cls(*tree_map(place, built.args), **tree_map(place, built.kwargs))
    module.train(training)
    given = sample.forward_input
    if given is None:
        return list(module.parameters())
    found = []
    torch.manual_seed(1)
    args, kwargs = tree_map(place, given.args), tree_map(place, given.kwargs)
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    for _ in range(2):
        module.zero_grad()
        outputs = module(*args, **kwargs)
        wanted = _differentiable(outputs)
        if wanted:
            sum((t * t.conj()).real.sum() if t.is_complex() else (t * t).sum() for t in wanted).backward()
        found += [tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, outputs)]
        found += [t.grad for t in (*module.parameters(), *leaves)]
    return [found, list(module.buffers())]


def module_cases(per_module: int | None, only: str = "") -> Iterator[Case]:
    for info in module_db:
        if only and only not in info.name:
            continue
        for training in (True, False):
            torch.manual_seed(0)
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
            for k, sample in enumerate(itertools.islice(samples, per_module)):
                name = f"{info.name} {'training' if training else 'evaluation'} {k}"
                yield name, lambda place, i=info, s=sample, t=training: run_module(i, s, t, place)


def run_optimizer(cls: Any, options: dict[str, Any], sparse: bool, place: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    if sparse:
        model: Any = nn.Embedding(5, 3, sparse=True)
        batch: Any = torch.tensor([0, 2, 2])
    else:
        bias = cls is not torch.optim.Muon  # which takes matrices alone
        model = nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias))
        batch = torch.randn(5, 3)
    # A learning rate as a tensor, as it would be written in the cell.
    options = {k: torch.tensor(v.item()) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    optimizer = cls(model.parameters(), **options)
    losses = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch).pow(2).sum()
        loss.backward()
        losses.append(loss.detach())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, (torch.Tensor, float, int))]
    return [losses, [p.detach() for p in model.parameters()], state]


def optimizer_cases(only: str = "") -> Iterator[Case]:
    for info in optim_db:
        name = info.optim_cls.__name__
        if only and only not in name:
            continue
        for given in info.optim_inputs_func(device="cpu"):
            for way in ({}, {"foreach": True}, {"fused": True}):
                (switch,) = way or ("",)
                if switch and (switch not in info.supported_impls or switch in given.kwargs):
                    continue
                if switch == "fused" and "cpu" not in info.supports_fused_on:
                    continue
                if given.kwargs.get("differentiable"):
                    continue  # for parameters that are no leaves
                options, sparse = {**given.kwargs, **way}, info.only_supports_sparse_grads
                label = f"{name} {given.desc} {switch}".strip()
                yield label, lambda place, c=info.optim_cls, o=options, s=sparse: run_optimizer(c, o, s, place)


def judged(mesh: Any, run: Callable[[Any], Any]) -> tuple[str, str]:
    """(verdict, why): pass, differ, error (only the mesh's fails), or eager, where eager torch fails too."""
    try:
        with ml.no_mesh.activate():
            local = run(_plain)
    except Exception as e:
        return "eager", f"{type(e).__name__}: {e}"
    try:
        with mesh.activate():
            far = run(_on(mesh))
            mesh.sync()
            return _compared(far, local)
    except Exception as e:
        return "error", f"{type(e).__name__}: {str(e)[:300]}"


def _compared(far: Any, local: Any) -> tuple[str, str]:
    fars, locals_ = tree_leaves(far), tree_leaves(local)
    if len(fars) != len(locals_):
        return "differ", f"{len(fars)} values instead of {len(locals_)}"
    for k, (f, x) in enumerate(zip(fars, locals_, strict=True)):
        if not isinstance(x, torch.Tensor):
            if f != x and not abs(f - x) < 1e-6:
                return "differ", f"value {k}: {f!r} instead of {x!r}"
            continue
        values = by_rank(f) if is_mesh(f) else [f]
        for value in values:
            try:
                torch.testing.assert_close(_dense(value), _dense(x), equal_nan=True)
            except AssertionError as e:
                return "differ", f"value {k} of {len(fars)}: {e}"
    return "pass", ""


def _dense(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return t if t.layout is torch.strided else t.to_dense()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-module", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as a worker's: sums in another order differ in the last digits
    counts: Counter[str] = Counter()
    faults: dict[str, str] = {}
    mesh = ml.local_mesh(gpus_per_host=2, device="cpu")
    try:
        for name, run in itertools.chain(optimizer_cases(options.only), module_cases(options.per_module, options.only)):
            verdict, why = judged(mesh, run)
            counts[verdict] += 1
            if verdict in ("differ", "error"):
                faults[name] = f"{verdict}: {why}"
                print(name, verdict, why[:300].replace("\n", " "), flush=True)
    finally:
        mesh.exit()
    print(dict(counts))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"counts": counts, "faults": faults}, file)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
