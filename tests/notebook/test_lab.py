"""JupyterLab as `./course lab` starts it: its token, its folder, what it asks and says, what its
kernels can import."""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from tornado.ioloop import IOLoop
from tornado.websocket import websocket_connect

from course_lib.commands.lab import jupyter_command
from course_lib.launcher import state, workspace
from course_lib.launcher.log_filter import PING, WithoutPingAdvice
from course_lib.paths import DATA, ROOT

PATIENCE = 300  # seconds until a server or kernel counts as stuck, on a busy board too


class Lab(NamedTuple):
    """A running server: its address, its token, the file its stderr goes to, the copies."""

    address: str
    token: str
    log: Path
    work: Path

    def get(self, path: str, **query: str):
        query["token"] = self.token
        return get(f"{self.address}/{urllib.parse.quote(path)}?{urllib.parse.urlencode(query)}")


def get(request: str | urllib.request.Request):
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def address_in(log: Path, process: subprocess.Popen) -> tuple[str, str]:
    """Return address and token once the server has printed them."""
    deadline = time.monotonic() + PATIENCE
    while True:
        text = log.read_text()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/lab/tree/work\?token=([0-9a-f]{40,})\n", text)
        if found:
            return found[1], found[2]
        assert process.poll() is None and time.monotonic() < deadline, text
        time.sleep(0.05)


def wait_for(address: str) -> None:
    """Return when the server answers: it prints its address a moment before."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            get(f"{address}/api")
            return
        except urllib.error.URLError as error:
            refused = isinstance(error.reason, ConnectionRefusedError)
            assert refused and time.monotonic() < deadline, error
            time.sleep(0.05)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A server on a free port, as for a checkout that is read-only; the second day is changed."""
    home = tmp_path_factory.mktemp("home")
    work = home / "work"
    workspace.copy_missing(workspace.days(), work)
    workspace.link_sources(work)
    changed = work / workspace.days()[1].name
    notebook = nbformat.read(changed, as_version=4)
    notebook.cells[0].source += "\nA student's note."
    nbformat.write(notebook, changed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(home / ".jupyter-data"))
        patch.setenv("JUPYTER_CONFIG_DIR", str(home / ".jupyter-config"))
        if not state.inside(state.find_environment(str(ROOT))):
            patch.setenv("PYTHONPATH", str(ROOT))  # another environment, a maintainer's
        workspace.trust_unchanged(workspace.days(), work)
        command = jupyter_command(work, "127.0.0.1", 0, browser=False)
        log = home / "stderr"
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL, stderr=file)
    try:
        address, token = address_in(log, process)
        wait_for(address)
        yield Lab(address, token, log, work)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


def test_lab_serves_the_copies_to_the_holder_of_the_token(lab):
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{lab.address}/api/contents")
    assert refused.value.code == 403
    listing = lab.get("api/contents/work")
    names = [entry["name"] for entry in listing["content"]]
    assert sorted(names) == [day.name for day in workspace.days()] != []


def relative_links(notebook: Path) -> set[str]:
    """Return the targets of a notebook's Markdown links that lead to files."""
    cells = nbformat.read(notebook, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    return {target for target in targets if target and not urllib.parse.urlsplit(target).scheme}


@pytest.mark.parametrize("day", workspace.days(), ids=lambda day: day.stem)
def test_every_link_of_a_copy_leads_somewhere(lab, day):
    links = relative_links(lab.work / day.name)
    assert links
    for link in links:
        path = posixpath.normpath(f"work/{link}")
        assert lab.get(f"api/contents/{path}", content="0")["path"] == path, link


def test_in_a_checkout_that_can_be_written_the_checkout_is_served():
    command = jupyter_command(ROOT / "work", "127.0.0.1", 8888, browser=False)
    assert f"--ServerApp.root_dir={ROOT}" in command
    before = sorted(ROOT.iterdir())
    workspace.link_sources(ROOT / "work")
    assert sorted(ROOT.iterdir()) == before


def test_a_copy_is_trusted_as_it_came_and_no_other_file(lab):
    first, second = (day.name for day in workspace.days()[:2])

    def trusted(name: str) -> set[bool]:
        cells = lab.get(f"api/contents/work/{name}")["content"]["cells"]
        return {cell["metadata"]["trusted"] for cell in cells if cell["cell_type"] == "code"}

    assert trusted(first) == {True}
    assert trusted(second) == {False}


def page_config(lab: Lab) -> dict:
    with urllib.request.urlopen(f"{lab.address}/lab?token={lab.token}", timeout=PATIENCE) as page:
        found = re.search(r'id="jupyter-config-data"[^>]*>(.*?)</script>', page.read().decode(),
                          re.DOTALL)
    assert found
    return json.loads(found[1])


def test_nobody_is_asked_about_news_and_nothing_asks_the_network(lab):
    plugin = lab.get("lab/api/settings/@jupyterlab/apputils-extension:notification")
    served = plugin["schema"]["properties"]
    assert served["fetchNews"]["default"] == "false"
    assert served["checkForUpdates"]["default"] is False
    assert json.loads(plugin["raw"] or "{}") == {}


def test_no_client_of_what_is_not_there(lab):
    off = page_config(lab)["disabledExtensions"]
    assert {"@jupyterlab/lsp-extension", "jupyterlab-jupytext"} <= set(off)


def test_a_page_and_a_kernel_leave_stderr_as_it_was(lab):
    before = lab.log.read_text()
    lab.get(f"api/contents/work/{workspace.days()[0].name}")
    page_config(lab)
    headers = {"Authorization": f"token {lab.token}"}
    kernel = get(urllib.request.Request(f"{lab.address}/api/kernels", b"{}", headers))

    async def first_message() -> str:
        channels = f"{lab.address}/api/kernels/{kernel['id']}/channels".replace("http", "ws", 1)
        connection = await websocket_connect(f"{channels}?token={lab.token}&session_id=test")
        message = await connection.read_message()  # the kernel says that it starts
        connection.close()
        return json.loads(message)["channel"]

    assert IOLoop(make_current=False).run_sync(first_message, timeout=PATIENCE) == "iopub"
    after = lab.log.read_text()  # a kernel that is ended while it starts may complain of that
    address = f"{lab.address}/api/kernels/{kernel['id']}"
    urllib.request.urlopen(urllib.request.Request(address, headers=headers, method="DELETE"),
                           timeout=PATIENCE).close()
    assert after == before


def test_only_the_advice_about_pings_is_left_out():
    def passes(message: str) -> bool:
        record = logging.LogRecord("x", logging.WARNING, "x", 1, message, (), None)
        return WithoutPingAdvice().filter(record)

    assert not passes(f"{PING}(90000) cannot be longer than")
    assert passes("WebSocket ping timeout after 90001 ms.")


def test_links_to_an_earlier_checkout_are_renewed_and_files_kept(tmp_path):
    (tmp_path / "data").symlink_to(tmp_path / "gone")
    (tmp_path / "docs").write_text("mine")
    (tmp_path / "work").mkdir()
    for _ in range(2):
        workspace.link_sources(tmp_path / "work")
        assert (tmp_path / "data").readlink() == ROOT / "data"
        assert (tmp_path / "docs").read_text() == "mine"
    assert not any(name.startswith(".") for name in os.listdir(tmp_path))


def test_a_kernel_anywhere_imports_the_library_and_finds_the_data(tmp_path, monkeypatch):
    if not state.inside(state.find_environment(str(ROOT))):
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # another environment, a maintainer's
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path),
                                       startup_timeout=PATIENCE)
    try:
        code = "import os, course_lib.paths as p; print(os.getcwd(), p.DATA, p.DATA.is_dir())"
        seen: list[dict] = []
        client.execute_interactive(code, timeout=PATIENCE,
                                   output_hook=lambda message: seen.append(message["content"]))
        printed = "".join(c.get("text", "") + "".join(c.get("traceback", [])) for c in seen)
        assert printed.split() == [str(tmp_path), str(DATA), "True"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
