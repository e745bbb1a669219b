"""What a user may say of a mesh, checked before anything starts; and the devices that follow from it."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from monarch_lab.config import (
    VISIBLE_DEVICES,
    ControllerParams,
    LoggingLocation,
    Settings,
    SocketType,
    SupervisionParams,
    visible_devices,
)
from monarch_lab.errors import UsageTypeError, UsageValueError
from monarch_lab.supervisor import MeshLaunch

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``local_mesh``, but for the name."""

    hosts: int = 1
    gpus_per_host: int | None = None
    device: str | None = None
    socket_type: SocketType | str = SocketType.UNIX
    logging_location: LoggingLocation | str = LoggingLocation.FILE
    supervision_params: SupervisionParams | None = None
    controller_params: ControllerParams | None = None
    labels: Mapping[str, str] | None = None
    env: Mapping[str, str] | None = None

    def applied(self, settings: Settings) -> Settings:
        """The settings of this mesh. UsageError for what is no such option, or does not fit together."""
        for value, kind in ((self.supervision_params, SupervisionParams), (self.controller_params, ControllerParams)):
            if value is not None and not isinstance(value, kind):
                raise UsageTypeError(f"{_snake(kind)} is an ml.{kind.__name__}, not {value!r}")
        if self.supervision_params is not None:
            settings = replace(settings, timeouts=self.supervision_params.applied(settings.timeouts))
        if self.controller_params is not None:
            settings = replace(settings, controller=self.controller_params)
        return settings

    def launch(self, name: str, settings: Settings) -> MeshLaunch:
        """UsageError for a mesh that cannot be."""
        env = _strings("env", self.env, "variable")
        device, per_host, gpus = _devices(self.hosts, self.gpus_per_host, self.device, settings, env)
        return MeshLaunch(
            name=name,
            hosts=self.hosts,
            per_host=per_host,
            device=device,
            gpus=gpus,
            seed=0,
            env=env,
            python_path=[p for p in sys.path if p],
            cwd=os.getcwd(),
            labels=_strings("labels", self.labels, "label"),
            socket_type=_choice("socket_type", SocketType, self.socket_type).value,
            logging_location=_choice("logging_location", LoggingLocation, self.logging_location).value,
        )


def check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageValueError(f"{name!r} is no name for a mesh: use letters, digits and _")


def _choice(what: str, kind: type[_Choice], value: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        choices = " or ".join(f'"{choice}"' for choice in kind)
        raise UsageValueError(f"{what} is {choices}, not {value!r}") from None


def _strings(what: str, given: Mapping[str, str] | None, one: str) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageTypeError(f"{what} is a dict of strings, not {given!r}")
    for name, value in given.items():
        for part in (name, value):
            if not isinstance(part, str):
                raise UsageTypeError(f"{what}: the {one} {name!r}: {value!r} is not two strings")
        if not name or "\0" in name + value or (what == "env" and "=" in name):
            raise UsageValueError(f"{what}: {name!r}: {value!r} cannot be a {one}")
    return dict(given)


def _snake(kind: type) -> str:
    return kind.__name__.replace("Params", "_params").lower()


def _visible_gpus() -> int:
    if "torch" not in sys.modules and not glob.glob("/dev/nvidia[0-9]*") and not os.path.exists("/dev/kfd"):
        return 0  # without a device file there is no need to import torch for the question
    from monarch_lab.controller.state import visible_gpus

    return visible_gpus()


def check_count(what: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UsageValueError(f"there is at least 1 of {what}, not {number!r}")


def part_of_gpus(options: Options, parts: int) -> list[Options]:
    """The options of each of several meshes: where all have GPUs enough together, each sees its own ones only."""
    gpus = _visible_gpus() if options.device != "cpu" else 0
    each = options.hosts * (options.gpus_per_host or max(1, gpus // (parts * options.hosts)))
    if parts == 1 or not gpus or VISIBLE_DEVICES in (options.env or {}):
        return [options] * parts
    if gpus < parts * each:
        if options.device == "cuda":
            raise UsageValueError(
                f"{parts} meshes of {each} workers with a GPU each were asked for and this machine has {gpus}: use "
                'device="cpu" for CPU workers'
            )
        return [replace(options, device="cpu")] * parts
    named = visible_devices() or [str(index) for index in range(gpus)]
    return [
        replace(
            options,
            gpus_per_host=each // options.hosts,
            env={**(options.env or {}), VISIBLE_DEVICES: ",".join(named[part * each : (part + 1) * each])},
        )
        for part in range(parts)
    ]


def _devices(
    hosts: int, per_host: int | None, device: str | None, settings: Settings, env: Mapping[str, str]
) -> tuple[str, int, int]:
    """(device, workers for each host, GPUs of the workers)."""
    for what, number in (("hosts", hosts), ("workers for each host", per_host)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise UsageValueError(f"a mesh has at least 1 of {what}, not {number!r}")
    if device not in (None, "cpu", "cuda"):
        raise UsageValueError(f'device is "cpu" or "cuda", not {device!r}')
    gpus = _gpus_of_workers(env) if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise UsageValueError(
            'workers with a GPU were asked for and this machine has none: use --cpu (device="cpu") for CPU workers'
        )
    if device is None:
        device = "cuda" if gpus and gpus >= hosts * (per_host or 1) else "cpu"
    if per_host is None:
        per_host = max(1, gpus // hosts) if device == "cuda" else settings.default_cpu_workers
    return device, per_host, gpus if device == "cuda" else 0


def _gpus_of_workers(env: Mapping[str, str]) -> int:
    """How many GPUs the workers see: this process may see others, or be kept from CUDA."""
    if VISIBLE_DEVICES in env:
        return len(visible_devices(env) or [])
    return _visible_gpus()
