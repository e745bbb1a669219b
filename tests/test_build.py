"""The files that make a release agree with each other, and name no machine."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import monarch_lab

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def test_versions_agree() -> None:
    version = PROJECT["project"]["version"]
    assert monarch_lab.__version__ == version
    assert json.loads((ROOT / "labextension/package.json").read_text())["version"] == version
    assert json.loads((ROOT / "labextension/package-lock.json").read_text())["version"] == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_lock_file_names_no_registry() -> None:
    lock = json.loads((ROOT / "labextension/package-lock.json").read_text())
    assert [name for name, entry in lock["packages"].items() if "resolved" in entry and not entry.get("link")] == []


def test_no_file_names_a_registry_or_an_index() -> None:
    words = re.compile(r"--(extra-)?index-url|PIP_INDEX_URL|https?://[^\s\"']*(pypi|registry|npmjs|download\.pytorch)")
    found = [
        path
        for path in tracked_files()
        if path != Path(__file__).relative_to(ROOT) and words.search((ROOT / path).read_text(errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize("document", ["README.md", ".ci/run"])
def test_every_make_command_that_is_named_exists(document: str) -> None:
    goals = set(re.findall(r"^ *(?:\$ )?make ([a-z-]+)", (ROOT / document).read_text(), re.M))
    assert goals
    assert goals <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


def test_the_continuous_check_runs_the_tests_that_the_readme_names() -> None:
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()


def test_the_panel_asks_for_the_package_it_came_with() -> None:
    install = json.loads((ROOT / "labextension/install.json").read_text())
    assert install["packageName"] == PROJECT["project"]["name"]
    assert monarch_lab._jupyter_labextension_paths() == [{"src": "labextension", "dest": "monarch-lab"}]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
