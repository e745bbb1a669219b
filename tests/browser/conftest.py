"""JupyterLab on a free port with a token, and a headless Chromium on it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no look-up leaves this machine
]
# The toolbar shows an idle circle before there is a kernel, and a cell run then is lost.
READY = """() => { const c = window.jupyterapp?.shell.currentWidget?.sessionContext;
  return !!(c?.isReady && c.session?.kernel?.status === 'idle'); }"""
PANEL = "#monarch-lab-panel"
STARTED = re.compile(r"http://127\.0\.0\.1:(\d+)/lab")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.browser)
        if not CHROMIUM and not os.environ.get("CI"):
            item.add_marker(pytest.mark.skip(reason="this machine has no chromium; set CHROMIUM to its path"))


@pytest.fixture(scope="session")
def browser_type_launch_args() -> dict[str, Any]:
    assert CHROMIUM, "CI has to have a chromium"
    return {"executable_path": CHROMIUM, "args": FLAGS, "headless": True}


@pytest.fixture(scope="session")
def browser_context_args() -> dict[str, Any]:
    return {"viewport": {"width": 1280, "height": 800}}


class Lab:
    """A JupyterLab server whose notebooks, settings and runtime files are this test run's own."""

    def __init__(self, root: Path, home: Path) -> None:
        self.root = root
        self.token = secrets.token_hex(16)
        self._home = home

    def __enter__(self) -> Lab:
        home = self._home
        settings = home / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        # A toast that asks whether to fetch news would lie over the cells.
        (settings / "notification.jupyterlab-settings").write_text(
            json.dumps({"fetchNews": "false", "checkForUpdates": False})
        )
        env = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_DATA_DIR": str(home / "data"),
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "IPYTHONDIR": str(home / "ipython"),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "PYTHONPATH": str(ROOT),  # cells import tests.fakes
        }
        self._log_path = home / "lab.log"
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
                    *("--port=0", f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.root}"),
                    *("--expose-app-in-browser", "--LabApp.open_browser=False"),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{self._wait_port()}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.send_signal(signal.SIGTERM)  # one SIGINT would ask whether we mean it
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _wait_port(self) -> int:
        deadline = time.monotonic() + 90
        while True:
            log = self._log_path.read_text()
            found = STARTED.search(log)
            if found and self._answers(int(found[1])):
                return int(found[1])
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("JupyterLab did not start:\n" + log[-3000:])
            time.sleep(0.1)

    def _answers(self, port: int) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status?token={self.token}", timeout=1).close()
        except OSError:
            return False
        return True

    def write(self, name: str, *cells: str) -> None:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.root / name)


class Notebook:
    """One notebook in the page, and the panel beside it, as a user sees them."""

    def __init__(self, lab: Lab, page: Page) -> None:
        self.lab, self.page = lab, page
        self.panel: Locator = page.locator(PANEL)
        self.status: Locator = self.panel.locator(".mlab-status")
        self.rows: Locator = self.panel.locator(".mlab-Row")

    def open(self, name: str, *cells: str) -> None:
        self.lab.write(name, *cells)
        self.page.goto(f"{self.lab.url}/lab/tree/{name}?token={self.lab.token}&reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.wait_idle()

    def wait_idle(self) -> None:
        self.page.wait_for_function(READY, timeout=60_000)

    def show_panel(self) -> None:
        self.page.locator(".jp-SideBar [data-id='monarch-lab-panel']").first.wait_for()
        if not self.panel.is_visible():
            self.page.locator(".jp-SideBar [data-id='monarch-lab-panel']").first.click()
        expect(self.panel).to_be_visible()

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(index)

    def output(self, index: int) -> Locator:
        return self.cell(index).locator(".jp-OutputArea")

    def run(self, index: int) -> None:
        """As a user does: click into the cell, press Control+Enter. Does not wait for its end."""
        self.cell(index).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("home")) as lab:
        yield lab


@pytest.fixture
def notebook(lab: Lab, page: Page) -> Iterator[Notebook]:
    yield Notebook(lab, page)
    # A kernel left running slows the tests after it.
    page.evaluate("() => window.jupyterapp?.serviceManager.sessions.shutdownAll()")
