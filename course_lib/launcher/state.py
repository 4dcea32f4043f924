"""Where the environment is, and whether it can be used as it is: its stamp.

Standard library only and few imports: this runs before every command.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable

CACHE_NAME = "rk3588-inference-course"
STAMP = "course-setup.json"


def find_environment(root: str) -> str:
    """Return the folder of the environment: `.venv` in the checkout, or, when the checkout is
    read-only and holds no finished one, a folder of the user's cache named after the checkout."""
    local = os.path.join(root, ".venv")
    if os.access(root, os.W_OK) or problem(root, local) is None:
        return local
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return os.path.join(cache, CACHE_NAME, name)


def python_of(env: str) -> str:
    return os.path.join(env, "bin", "python")


def inside(env: str) -> bool:
    return os.path.realpath(sys.prefix) == os.path.realpath(env)


def requirements_digest(root: str) -> str:
    """Return a digest of what the set-up installs: the [project] part of pyproject.toml (all
    before the first [tool.…] table) and constraints.txt."""
    digest = hashlib.sha256()
    with open(os.path.join(root, "pyproject.toml"), "rb") as file:
        digest.update(file.read().split(b"\n[tool.", 1)[0])
    with open(os.path.join(root, "constraints.txt"), "rb") as file:
        digest.update(file.read())
    return digest.hexdigest()


def kernels_digest(root: str) -> str:
    """Return a digest of what the kernels are compiled from."""
    digest = hashlib.sha256()
    paths = [os.path.join(root, "setup.py")]
    for folder, folders, files in os.walk(os.path.join(root, "kernels_pyx")):
        folders.sort()
        sources = sorted(name for name in files if name.endswith((".pyx", ".pxi", ".c", ".h")))
        paths += [os.path.join(folder, name) for name in sources]
    for path in paths:
        digest.update(os.path.relpath(path, root).encode())
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def read_stamp(env: str) -> dict | None:
    """Return the stamp that a finished set-up wrote last, or None."""
    try:
        with open(os.path.join(env, STAMP), encoding="utf-8") as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def problem(root: str, env: str) -> str | None:
    """Return what keeps the environment from being used as it is, or None.

    "incomplete": never finished; "python": its Python is gone or another one; "moved": the folder
    or the checkout has a new path; "requirements", "kernels": made from other versions of them (or
    the kernels' files are gone or cut short).
    """
    stamp = read_stamp(env)
    if stamp is None:
        return "incomplete"
    python = python_of(env)
    if not os.access(python, os.X_OK) or os.path.realpath(python) != stamp.get("python"):
        return "python"
    if stamp.get("env") != env or stamp.get("root") != root:
        return "moved"
    if stamp.get("requirements") != requirements_digest(root):
        return "requirements"
    if stamp.get("kernels") != kernels_digest(root):
        return "kernels"
    sizes = stamp.get("kernels_files", {})
    # A file cut short (a full disk, a broken copy) would end the process that loads it.
    if sizes != sizes_of(root, sizes):
        return "kernels"
    missing = stamp.get("kernels_missing")
    if missing and (os.environ.get("COURSE_REQUIRE_KERNELS") == "1" or found(missing)):
        return "kernels"
    return None


def sizes_of(root: str, names: Iterable[str]) -> dict[str, int]:
    """Return the size in bytes of every named file below `root` that is there."""
    paths = {name: os.path.join(root, name) for name in names}
    return {name: os.path.getsize(path) for name, path in paths.items() if os.path.exists(path)}


def found(missing: str) -> bool:
    """True when what the last kernel build lacked (a program's name or a header's path) is there
    now, so that installing a compiler is all a user has to do."""
    if os.path.isabs(missing):
        return os.path.exists(missing)
    return any(
        os.access(os.path.join(folder, missing), os.X_OK)
        for folder in os.environ.get("PATH", "").split(os.pathsep)
    )


def clean_environ(env: str | None = None) -> dict[str, str]:
    """Return the process environment without what points Python or pip elsewhere; with `env`, as
    if that environment had been activated."""
    unwanted = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"}
    environ = {k: v for k, v in os.environ.items() if k not in unwanted}
    if env is not None:
        environ["VIRTUAL_ENV"] = env
        environ["PATH"] = os.path.join(env, "bin") + os.pathsep + environ.get("PATH", os.defpath)
        # A kernel spec or data folder in the user's home must not win over the environment's.
        environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    return environ
