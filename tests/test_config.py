"""The one table of time-outs, and settings from the environment."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from monarch_lab import config
from monarch_lab.config import ControllerParams, SupervisionParams, Timeouts
from monarch_lab.errors import UsageValueError

# Each outer time is longer than the one it waits for.
NESTED = [
    ("beat", "unreachable", "lost"),
    ("look", "unreachable"),
    ("beat", "stopped_told", "prompt_back"),
    ("interrupt_heard", "prompt_back"),
    ("stop_grace", "stop", "letter_taken", "lease"),
    ("lost", "lease"),
    ("agent_hello", "zygote_ready", "worker_hello"),
]


@pytest.mark.parametrize("names", NESTED)
def test_each_outer_time_is_longer(names: tuple[str, ...]) -> None:
    times = [getattr(Timeouts(), name) for name in names]
    assert all(a < b for a, b in zip(times, times[1:], strict=False)), dict(zip(names, times, strict=True))


def test_every_time_is_positive() -> None:
    assert all(getattr(Timeouts(), f.name) > 0 for f in fields(Timeouts))


def test_settings_come_from_the_environment() -> None:
    found = config.load(
        {
            "MONARCH_LAB_TIMEOUTS_LOST": "30",
            "MONARCH_LAB_CONTROLLER_OPERATION_TIMEOUT": "7.5",
            "MONARCH_LAB_CONTROLLER_FAIL_ON_WORKER_TIMEOUT": "yes",
            "MONARCH_LAB_ENGINE_FLUSH_OPS": "64",
            "MONARCH_LAB_LOG_DIR": "/logs",
            "OTHER": "x",
        }
    )
    assert found.timeouts == replace(Timeouts(), lost=30.0)
    assert found.controller == ControllerParams(operation_timeout=7.5, fail_on_worker_timeout=True)
    assert (found.engine.flush_ops, found.log_dir) == (64, "/logs")


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("MONARCH_LAB_TIMEOUTS_BAET", "1", "MONARCH_LAB_TIMEOUTS_BAET is not a setting.*did you mean .*_BEAT"),
        ("MONARCH_LAB_TIMEOUTS_BEAT", "soon", "'soon' is not a valid float"),
        ("MONARCH_LAB_CONTROLLER_FAIL_ON_WORKER_TIMEOUT", "maybe", "'maybe' is not a valid bool"),
    ],
)
def test_a_wrong_setting_is_one_sentence(variable: str, value: str, sentence: str) -> None:
    with pytest.raises(UsageValueError, match=sentence):
        config.load({variable: value})


def test_supervision_params_are_the_table_for_one_mesh() -> None:
    changed = SupervisionParams(update_timeout=6, query_interval=0.5, update_interval=2).applied(Timeouts())
    assert (changed.lost, changed.unreachable, changed.look, changed.beat) == (6, 4, 0.5, 2)
    assert SupervisionParams().applied(Timeouts()) == Timeouts()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SupervisionParams(update_timeout=0),
        lambda: SupervisionParams(update_interval=-1),
        lambda: SupervisionParams(update_timeout=1.5).applied(Timeouts()),
        lambda: ControllerParams(operation_timeout=0),
        lambda: ControllerParams(progress_check_interval=float("inf")),
        lambda: ControllerParams(operations_per_progress_request="many"),  # type: ignore[arg-type]
    ],
)
def test_params_that_cannot_be_are_refused(wrong: object) -> None:
    with pytest.raises(UsageValueError, match="Params: "):
        wrong()  # type: ignore[operator]
