"""`./course lab`: JupyterLab on the student's copies."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HELP = "open JupyterLab on your copies of the days"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--ip", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=port, default=8888, help="first port to try (8888)")


def port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 65535, not {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Copy the days not yet started and replace this process by JupyterLab."""
    from course_lib.launcher import workspace

    work = workspace.folder()
    new = workspace.copy_missing(workspace.days(), work)
    workspace.link_sources(work)
    workspace.trust_unchanged(workspace.days(), work)
    print(f"course: your copies are in {work}, {len(new)} new", file=sys.stderr)
    if args.ip not in ("127.0.0.1", "localhost", "::1"):
        print("course: whoever has the token and reaches this address can run code here",
              file=sys.stderr)
    sys.stderr.flush()
    command = jupyter_command(work, args.ip, args.port, browser=wants_browser(args.no_browser))
    os.execv(command[0], command)


def wants_browser(no_browser: bool) -> bool:
    """False where a browser would be none or one in the terminal (a board without a screen)."""
    screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get(
        "WAYLAND_DISPLAY"
    )
    return bool(screen) and not no_browser


SETTINGS = Path(__file__).resolve().parent.parent / "launcher" / "lab_settings"
"""No question about news; no client of language servers (none is installed); no launcher cards of
Jupytext, an authors' tool."""


def jupyter_command(work: Path, ip: str, port: int, *, browser: bool) -> list[str]:
    """Return the command; its options win over the user's own Jupyter configuration. A token is
    made anew at every start."""
    # The folder around `work` is served, so that a copy's links to sources and data work.
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={work.parent}"]
    command += [f"--LabApp.default_url=/lab/tree/{work.name}"]
    command += [f"--ServerApp.ip={ip}", f"--ServerApp.port={port}"]
    # Warnings and the address; not a page about extensions.
    command += ["--Application.log_level=WARN"]
    quiet = {"filters": {"quiet": {"()": "course_lib.launcher.log_filter.WithoutPingAdvice"}},
             "handlers": {"console": {"filters": ["quiet"]}}}
    command += [f"--Application.logging_config={quiet}"]
    command += [f"--LabApp.app_settings_dir={SETTINGS}"]
    off = {"jupyterlab_jupytext": False, "jupyter_lsp": False}
    command += [f"--ServerApp.jpserver_extensions={off}"]
    # Other users of the machine can reach a kernel's ports.
    command += ["--KernelManager.transport_encryption=auto"]
    # Nothing on the network: no news, no update check, no extension listing.
    command += ["--LabApp.news_url=None", "--LabApp.extension_manager=readonly"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command += [f"--ServerApp.open_browser={browser}"]
    if os.geteuid() == 0:  # boards are often used as root, and JupyterLab refuses that by default
        command.append("--allow-root")
    return command
