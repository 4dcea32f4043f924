"""Every explorer in JupyterLab: run, moved by keyboard and by drag, it shows what `compute` says;
without a kernel its picture is there all the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=20_000)  # a board's kernel beside a browser takes its time

ROOT = Path(__file__).resolve().parents[2]
SHOTS = Path(__file__).parent / "screenshots"
BOOK = Path(__file__).with_name("explorer_book.py")
NAMES = re.findall(r'^    "(\w+Explorer)": Moves', BOOK.read_text(), re.M)
DAY_10 = "day10_sparse_attention.ipynb"
PYTHON = os.environ.get("COURSE_PYTHON", sys.executable)
LIMIT = 400  # seconds after which a server ends by itself, whatever became of the tests
SERVE = """
import os, signal, sys
from pathlib import Path
from course_lib.commands.lab import jupyter_command
signal.alarm({limit})  # outlives exec
command = jupyter_command(Path({folder!r}), "127.0.0.1", {port}, browser=False)
os.execv(command[0], command)
"""
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings":
        {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin.jupyterlab-settings": {"autosave": False},
}


def environ(folder: Path) -> dict[str, str]:
    """The environment of the course's own processes, with no setting of the user's."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1",
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "IPYTHONDIR": str(folder / "ipython")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the book, what it must show, and JupyterLab's settings."""
    folder = tmp_path_factory.mktemp("lab")
    book = folder / "book"
    book.mkdir()
    subprocess.run([PYTHON, str(BOOK), str(book)], cwd=ROOT, env=environ(folder), check=True,
                   timeout=150)
    shutil.copy(ROOT / "notebooks" / DAY_10, book)
    for name, values in SETTINGS.items():
        path = folder / "settings" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return json.loads((folder / "book" / "expected.json").read_text())


@pytest.fixture(scope="module")
def lab(folder):
    """The address of JupyterLab on the book's folder, as `./course lab` starts it, with its
    token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = SERVE.format(limit=LIMIT, folder=str(folder / "book"), port=port)
    server = subprocess.Popen([PYTHON, "-c", code], cwd=ROOT, env=environ(folder), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              start_new_session=True)
    try:
        yield address(server)
    finally:
        stop(server)


def address(server: subprocess.Popen) -> tuple[str, str]:
    seen = []
    for line in server.stdout:
        seen.append(line)
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)", line):
            # Who does not read on would stop a server that has much to say.
            threading.Thread(target=server.stdout.read, daemon=True).start()
            return found[1], found[2]
    raise AssertionError(f"JupyterLab ended with {server.wait()}: {''.join(seen)}")


def stop(server: subprocess.Popen) -> None:
    """End the server; it ends its kernels, and what is left of its session is killed."""
    server.terminate()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def open_book(page, lab, name="book.ipynb"):
    """Open a notebook; its cells are there, nothing is run."""
    base, token = lab
    page.goto(f"{base}/lab/tree/book/{name}?reset&token={token}")
    expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=40_000)


def run_all(page, lab, name="book.ipynb", tries=3):
    """Open a notebook and Run > Run All Cells until its last cell has run.

    JupyterLab drops what is run before the kernel is ready, so that is waited for; where a cold
    start goes wrong all the same, the page is opened anew.
    """
    for _ in range(tries):
        open_book(page, lab, name)
        try:
            expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=30_000)
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            expect(page.locator(".jp-Notebook .widget-vbox").first).to_be_visible(timeout=30_000)
            expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle", timeout=40_000)
            return
        except AssertionError:
            continue
    raise AssertionError(f"{name} did not run in {tries} tries")


class Shown:
    """The explorer of one cell."""

    def __init__(self, page, cell):
        self.page, self.cell = page, cell
        self.view = self.cell.locator(".jp-OutputArea .widget-vbox").first
        self.picture = self.view.locator("img")

    def expect(self, state):
        """Text and picture are those of a state, in time."""
        expect(self.view.locator("pre")).to_have_text(state["text"], use_inner_text=False)
        expect(self.picture).to_have_attribute("src", "data:image/png;base64," + state["png"])
        expect(self.view.locator("[role=alert], [role=status]")).to_have_count(0)

    def control(self, state):
        row = self.view.locator(".widget-inline-hbox").filter(
            has=self.page.locator(f".widget-label:text-is('{state['control']}')"))
        expect(row).to_have_count(1)
        return row

    def press(self, state):
        """One arrow key on a slider that has the focus. A list is opened by the space bar: while
        it is closed, JupyterLab takes the arrows for itself."""
        row = self.control(state)
        forward = state["index"] > state["before"]
        if state["slider"]:
            row.locator(".noUi-handle").focus()
            self.page.keyboard.press("ArrowRight" if forward else "ArrowLeft")
        else:
            row.locator("select").focus()
            for key in ("Space", "ArrowDown" if forward else "ArrowUp", "Enter"):
                self.page.keyboard.press(key)

    def drag(self, state):
        """The handle of a slider, to the place of a value."""
        row = self.control(state)
        row.scroll_into_view_if_needed()
        track = row.locator(".noUi-base").bounding_box()
        handle = row.locator(".noUi-handle").bounding_box()
        mouse = self.page.mouse
        mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
        mouse.down()
        target = track["x"] + track["width"] * state["index"] / (state["count"] - 1)
        for part in (0.3, 0.7, 1.0):
            start = handle["x"] + handle["width"] / 2
            mouse.move(start + part * (target - start), handle["y"] + 3)
        mouse.up()


def explorer(page, number):
    """The explorer of the book's code cell `number`; the first cell has none."""
    shown = Shown(page, page.locator(".jp-Notebook .jp-CodeCell").nth(number))
    shown.cell.scroll_into_view_if_needed()
    return shown


@pytest.fixture(scope="module")
def live(chromium, lab):
    """The book, run; one page for all tests of it."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_default_timeout(15_000)
    run_all(page, lab)
    yield page
    context.close()
    assert errors == []


def shot(locator, name):
    SHOTS.mkdir(exist_ok=True)
    locator.screenshot(path=str(SHOTS / f"explorer_{name}.png"))


@pytest.mark.parametrize("name", NAMES)
def test_moved_by_keyboard_and_by_drag_it_shows_what_compute_says(live, expected, name):
    number = NAMES.index(name)
    wanted, shown = expected["book"][number], explorer(live, number + 1)
    assert wanted["name"] == name
    shown.expect(wanted["start"])
    expect(shown.picture).to_have_attribute("alt", wanted["alt"])
    shown.press(wanted["key"])
    shown.expect(wanted["key"])
    shown.drag(wanted["drag"])
    shown.expect(wanted["drag"])
    shot(shown.view, name)


def test_an_error_is_shown_beside_the_controls_and_goes_away(live):
    shown = explorer(live, len(NAMES) + 1)
    before = shown.picture.get_attribute("src")
    slider = shown.control({"control": "outlier ×"}).locator(".noUi-handle")
    slider.focus()
    live.keyboard.press("ArrowRight")
    alert = shown.view.locator("[role=alert]")
    expect(alert).to_contain_text("ValueError: two is <not> for this explorer")
    assert shown.picture.get_attribute("src") == before
    slider.focus()
    live.keyboard.press("ArrowRight")
    expect(alert).to_have_count(0)
    expect(shown.view.locator("pre")).to_contain_text("largest value × 4")


def test_a_slow_change_says_that_it_is_computing(live):
    shown = explorer(live, 1 + NAMES.index("BlockSelectionExplorer"))
    shown.view.evaluate("""view => {
        window.seen = [];
        new MutationObserver(() => {
            for (const e of view.querySelectorAll("[role=status]")) window.seen.push(e.textContent);
        }).observe(view, {childList: true, subtree: true});
    }""")
    shown.control({"control": "prefill k"}).locator(".noUi-handle").focus()
    live.keyboard.press("ArrowLeft")
    expect(shown.view.locator("pre")).to_contain_text("prefill k = 32")
    expect(shown.view.locator("[role=status]")).to_have_count(0)
    seen = live.evaluate("window.seen")
    assert any("computing: the same prompt, prefill k = 32" in text for text in seen)
    assert any("computing: what the model says at k = " in text for text in seen)


# The contrast of an element's text with what lies behind it (WCAG 2).
CONTRAST = """element => {
    const parts = text => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ink = parts(getComputedStyle(element).color);
    let paper = [255, 255, 255];
    for (let at = element; at; at = at.parentElement) {
        const color = parts(getComputedStyle(at).backgroundColor);
        if (color.length < 4 || color[3] > 0) { paper = color; break; }
    }
    const [high, low] = [light(ink), light(paper)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
}"""


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_readable_in_both_themes_at_the_usual_and_at_twice_the_size(live, theme):
    live.get_by_role("menuitem", name="Settings", exact=True).click()
    live.locator(".lm-Menu-itemLabel:text-is('Theme')").hover()
    live.locator(f".lm-Menu-itemLabel:text-is('JupyterLab {theme}')").click()
    expect(live.locator("body")).to_have_attribute("data-jp-theme-light",
                                                   "true" if theme == "Light" else "false")
    try:
        for width in (1280, 640):  # 640 pixels of a page: 1280 at 200 %
            live.set_viewport_size({"width": width, "height": 800})
            for number, name in enumerate(NAMES, 1):
                shown = explorer(live, number)
                for words in shown.view.locator("pre, b, .widget-label:visible").all():
                    assert words.evaluate(CONTRAST) >= 4.5, words.text_content()
                inside = shown.view.evaluate(
                    "e => [e.scrollWidth <= e.clientWidth, e.closest('.jp-OutputArea-output')]"
                    ".map(x => x === true || x.scrollWidth <= x.clientWidth)")
                assert inside == [True, True], f"{name} is wider than its cell at {width}"
                assert shown.picture.bounding_box()["width"] >= 640, "too small to read"
        shot(explorer(live, 1).view, f"{theme}_narrow")
    finally:
        live.set_viewport_size({"width": 1280, "height": 800})


def test_without_a_run_the_notebook_shows_the_stored_pictures(page, lab, expected):
    open_book(page, lab)
    for number, wanted in enumerate(expected["book"], 1):
        cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
        expect(cell.locator(".jp-OutputArea img")).to_have_attribute(
            "src", "data:image/png;base64," + wanted["start"]["png"])
        expect(cell.locator(".widget-vbox")).to_have_count(0)


def test_without_jupyter_a_page_shows_the_stored_pictures(page, folder, expected):
    page.goto((folder / "book" / "book.html").as_uri())
    pictures = page.locator("img")
    assert [img.get_attribute("src") for img in pictures.all()] == [
        "data:image/png;base64," + wanted["start"]["png"] for wanted in expected["book"]]
    assert all(img.evaluate("e => e.naturalWidth > 100") for img in pictures.all())


def test_day_10_whole(page, lab, expected):
    run_all(page, lab, DAY_10)
    wanted = expected["day 10"]
    cell = page.locator(".jp-Notebook .jp-CodeCell").filter(
        has_text="explorer = BlockSelectionExplorer(engine, k=1)")
    shown = Shown(page, cell)
    shown.cell.scroll_into_view_if_needed()
    shown.expect(wanted["start"])
    shown.press(wanted["key"])
    shown.expect(wanted["key"])
    shown.drag(wanted["drag"])
    shown.expect(wanted["drag"])
    failed = page.locator(".jp-Notebook [data-mime-type='application/vnd.jupyter.error']")
    expect(failed).to_have_count(0)
