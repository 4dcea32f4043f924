"""JupyterLab as `./course lab` starts it: its token, its folder, what its kernels can import."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from jupyter_client.manager import start_new_kernel

from course_lib.commands.lab import jupyter_command
from course_lib.launcher import state
from course_lib.paths import DATA, ROOT


def get(address: str):
    with urllib.request.urlopen(address, timeout=20) as answer:
        return json.load(answer)


def wait_for(address: str) -> None:
    """Return when the server listens: it prints its address a moment before."""
    host, _, port = address.removeprefix("http://").partition(":")
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.05)


@pytest.fixture
def lab(tmp_path):
    """A running server on a free port: (address, token)."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "day09_x.ipynb").write_text("{}")
    command = jupyter_command(str(tmp_path / "work"), "127.0.0.1", 0, browser=False)
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        found = None
        for line in process.stderr:
            found = re.search(r"(http://127\.0\.0\.1:\d+)/lab\?token=([0-9a-f]{40,})", line)
            if found:
                break
        assert found, "the server printed no address"
        wait_for(found[1])
        yield found[1], found[2]
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(timeout=30)


def test_lab_serves_the_copies_to_the_holder_of_the_token(lab):
    address, token = lab
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{address}/api/contents")
    assert refused.value.code == 403
    listing = get(f"{address}/api/contents?token={token}")
    assert [entry["name"] for entry in listing["content"]] == ["day09_x.ipynb"]
    with urllib.request.urlopen(f"{address}/lab?token={token}", timeout=20) as page:
        assert '"news": {"disabled": true}' in page.read().decode()


def test_a_kernel_anywhere_imports_the_library_and_finds_the_data(tmp_path, monkeypatch):
    if not state.inside(state.find_environment(str(ROOT))):
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # another environment, a maintainer's
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        code = "import os, course_lib.paths as p; print(os.getcwd(), p.DATA, p.DATA.is_dir())"
        seen: list[dict] = []
        client.execute_interactive(code, timeout=60,
                                   output_hook=lambda message: seen.append(message["content"]))
        printed = "".join(c.get("text", "") + "".join(c.get("traceback", [])) for c in seen)
        assert printed.split() == [str(tmp_path), str(DATA), "True"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
