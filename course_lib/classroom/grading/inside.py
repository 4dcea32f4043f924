"""What runs inside the sandbox: a process that has NumPy loaded and forks one for every case.

It reads messages from stdin and writes one answer per case to stdout. The forked process alone runs
the submission; it holds nothing but that one case and a pipe for its result.
"""

from __future__ import annotations

import importlib
import os
import resource
import select
import shutil
import signal
import time
from typing import Any, BinaryIO

from course_lib.classroom.grading import reached
from course_lib.classroom.grading.wire import MAX_BYTES, decode, encode
from course_lib.classroom.running import Result, TookTooLong, run
from course_lib.classroom.values import type_name

GRACE = 1.0
"""Seconds beyond an answer's own limit until it is killed from outside."""


def main(alone: bool, processes: int) -> None:
    """Serve cases until stdin ends.

    alone: this is bubblewrap's own process namespace, so whatever else runs here is the answer's
    and is killed after each case, and the working folder is nobody else's. processes: the limit,
    set here because outside the namespace it would count what the same user runs elsewhere.
    """
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    commands = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    program = decode(read_frame(commands))
    item = _item(program["item"])
    write_frame(answers, encode({"ready": True}))
    while (frame := read_frame(commands)) != b"":
        write_frame(answers, _run_case(program, item, frame, (commands, answers), alone))


def _item(item_id: str) -> Any:
    """The exercise's public half: `call` and the time limit."""
    day = importlib.import_module(f"course_lib.classroom.exercises.day{item_id[1:3]}")
    return next(item for item in day.EXERCISES if item.id == item_id)


def read_frame(file: BinaryIO) -> bytes:
    """The next message; empty where the stream ends."""
    head = file.read(8)
    size = int.from_bytes(head, "little") if len(head) == 8 else 0
    body = file.read(size)
    return body if len(body) == size else b""


def write_frame(file: BinaryIO, body: bytes) -> None:
    """Write a message with its length in front."""
    file.write(len(body).to_bytes(8, "little") + body)
    file.flush()


def _run_case(program: dict, item: Any, frame: bytes, streams: tuple, alone: bool) -> bytes:
    """The bytes that the case's process wrote, or what became of it."""
    if alone:
        _empty_folder()
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for stream in streams:
                os.close(stream.fileno())
            os.close(receive)
            _child(program, item, frame, send)
        finally:
            os._exit(1)
    os.close(send)
    seconds = item.seconds + GRACE
    body, timely = _read_all(receive, time.monotonic() + seconds)
    os.close(receive)
    os.kill(-1 if alone else pid, signal.SIGKILL)  # -1: all of this namespace but its first and us
    _, status = os.waitpid(pid, 0)
    if not timely:
        return encode({"end": "timeout"})
    if body:
        return body
    signal_number = status & 0x7F
    return encode({"end": "timeout" if signal_number == signal.SIGXCPU else "crash"})


def _read_all(pipe: int, until: float) -> tuple[bytes, bool]:
    """The message in a pipe, empty where it ends before, and whether that was in time. Not up to
    the pipe's end: a process that the answer has left behind may hold it open."""
    parts = bytearray()
    while len(parts) < 8 or len(parts) - 8 < int.from_bytes(parts[:8], "little"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return b"", False
        part = os.read(pipe, 2**20)
        if not part:
            return b"", True
        parts += part
        if len(parts) > MAX_BYTES + 8:  # an answer that writes here itself
            return encode({"end": "too_large"}), True
    return bytes(parts[8:]), True


def _empty_folder() -> None:
    """A case finds nothing that another has left in the one place that can be written to."""
    for entry in os.scandir("."):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry, ignore_errors=True)
        else:
            os.unlink(entry)


def _child(program: dict, item: Any, frame: bytes, send: int) -> None:
    """Run the submission on one case and write what came of it."""
    own, seconds = os.getpid(), int(item.seconds + GRACE) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    case = decode(frame)
    namespace: dict[str, Any] = {"__name__": "__main__"}

    def answer(*args: Any, **kwargs: Any) -> Any:
        target = namespace[program["function"]]
        return target(*args, **kwargs) if item.call is None else item.call(target, *args, **kwargs)

    made = run(_define, (program["sources"],), {}, call=lambda define, sources: define(
        sources, namespace), seconds=item.seconds)
    stage = "define" if made.error is not None else "call"
    if stage == "call" and program["function"] not in namespace:
        made, stage = Result(error=NameError, text=program["function"]), "define"
    found = made if stage == "define" else run(
        answer, case["args"], case["kwargs"], seconds=item.seconds)
    body = encode(_report(found, stage))
    if len(body) > MAX_BYTES:
        body = encode({"end": "too_large"})
    body = len(body).to_bytes(8, "little") + body
    while body and os.getpid() == own:  # not for a fork that the answer made and came back in
        body = body[os.write(send, body):]
    os._exit(0)


def _define(sources: list[str], namespace: dict[str, Any]) -> None:
    for number, source in enumerate(sources):
        exec(compile(source, f"<cell {number}>", "exec"), namespace)


def _report(found: Result, stage: str) -> dict[str, Any]:
    if reached.names:
        return {"end": "uses_reference", "names": [str(name) for name in reached.names[:5]]}
    if found.error is None:
        return {"end": "value", "value": found.value, "mutated": found.mutated}
    if found.error is TookTooLong:
        return {"end": "timeout"}
    kinds = [type_name(kind) for kind in found.error.__mro__]
    return {"end": "error", "stage": stage, "kinds": kinds, "text": found.text[:500]}
