"""The rows that a benchmark writes, and their files."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from course_lib.atomic import check_writable, write_atomically
from course_lib.errors import CourseError


@dataclass(frozen=True)
class Record:
    """One measured kernel; None where a column has no meaning.

    kernel: the operation, with its shape where the context does not say it. variant: instruction
    set, or "numpy". kv: "f32" or "q8" rows of a KV cache. context: tokens. ms: median of a call.
    gb_per_s: bytes that the call has to read, in 10^9 bytes a second. bandwidth_fraction: of what
    the same number of threads read in the same minute. vs_numpy, vs_portable: how many times
    faster than NumPy on one thread, and than the portable variant on as many threads.
    """

    kernel: str
    variant: str
    kv: str | None
    context: int | None
    threads: int
    ms: float
    gb_per_s: float | None = None
    bandwidth_fraction: float | None = None
    vs_numpy: float | None = None
    vs_portable: float | None = None


COLUMNS = tuple(field.name for field in fields(Record))


def as_row(record: Any) -> dict:
    """Return a record, a dataclass, with its numbers at four digits: more is noise."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in asdict(record).items()}


def json_text(records: Sequence[Any]) -> str:
    """A JSON array, one row a line."""
    rows = ",\n".join(json.dumps(as_row(record)) for record in records)
    return f"[\n{rows}\n]\n" if records else "[]\n"


def csv_text(records: Sequence[Any], columns: Sequence[str] = COLUMNS) -> str:
    """A header and one line a record; an empty cell is None."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_row(record) for record in records)
    return text.getvalue()


def check_targets(csv_path: str | None, json_path: str | None) -> None:
    """CourseError if a file could not be written later: better before the minutes than after."""
    for option, path in (("--csv", csv_path), ("--json", json_path)):
        if path is None:
            continue
        try:
            check_writable(path)
        except OSError as error:
            raise CourseError(
                f"bench: {option} {shlex.quote(path)} cannot be written ({error.strerror}); "
                "name a file in a folder that is there and may be written to.") from None
    if csv_path is not None and json_path is not None and (
            os.path.realpath(csv_path) == os.path.realpath(json_path)):
        raise CourseError(f"bench: --csv and --json both name {csv_path}; name two files.")


def write(path: str, text: str) -> None:
    """Write a file whole or not at all; CourseError if that fails."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise CourseError(f"bench: {path} was not written: {error.strerror or error}.") from None
