"""Packed weights made once: from a file beside the checkpoint, or written there while packing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from course_lib.engine.cache_file import (
    CODES,
    SCALES,
    CacheFileError,
    Layout,
    Writer,
    check_codes,
    open_file,
)
from course_lib.engine.cache_place import clean, places, unfinished_file
from course_lib.engine.config import ModelConfig
from course_lib.engine.conversion import (
    Counter,
    Progress,
    check_columns,
    load_weights,
    pieces_packed,
    weight_bytes,
)
from course_lib.engine.tensor_source import TensorSource
from course_lib.engine.weights import Weights, check_tensors, check_tied, slots_of
from course_lib.memory import gigabytes
from course_lib.weight_blocks import Kind

SMALL = 1 << 25  # bytes of weights that are packed in less time than a file takes

Note = Callable[[str], None]


def cached_weights(
    source: TensorSource,
    config: ModelConfig,
    kind: Kind,
    on_progress: Progress | None = None,
    on_note: Note | None = None,
) -> Weights:
    """The packed weights of `source`, mapped from their file; packed into it where there is none.

    Packing needs 30 MB of memory, whatever the model: pieces go to the file one by one. A file of
    another checkpoint or format or a damaged one is made again, and `on_note` is told in one
    sentence. Packs in memory where COURSE_CACHE is "off", and always a small model. Raises what
    `load_weights` raises, and CourseError where the file cannot be written.
    """
    options = places(source.path, kind)
    if not options or weight_bytes(config, kind) < SMALL:
        return load_weights(source, config, kind, on_progress)
    check_tensors(source, config)
    check_columns(source, config, kind)
    clean(options)
    layout = Layout(config, kind, source.fingerprint())
    for path in options:
        weights = _opened(path, layout, on_note)
        if weights is not None:
            return weights
    return open_file(_pack(source, layout, options, on_progress), layout)


def cache_report(source: TensorSource, config: ModelConfig, kind: Kind) -> str:
    """Where `cached_weights` takes packed weights from, in a few words; reads a whole file."""
    options = places(source.path, kind)
    if not options or weight_bytes(config, kind) < SMALL:
        return "packed in memory at every start"
    layout = Layout(config, kind, source.fingerprint())
    size = gigabytes(layout.size)
    notes: list[str] = []
    for path in options:
        if _opened(path, layout, notes.append) is not None:
            try:
                check_codes(path, layout)
            except (CacheFileError, OSError) as error:
                return f"{path} {error}: remove it"
            return f"{path}, {size}, is whole"
    return notes[0] if notes else f"the first start packs {size} into {options[0]}"


def _opened(path: Path, layout: Layout, on_note: Note | None) -> Weights | None:
    try:
        return open_file(path, layout)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CacheFileError, OSError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            problem = f"cannot be read ({error.strerror or error})"
        if on_note is not None:
            on_note(f"{path} {problem}: packing the weights again")
        return None


def _pack(
    source: TensorSource, layout: Layout, options: list[Path], on_progress: Progress | None
) -> Path:
    """Write the file of the weights; where it is."""
    check_tied(source, layout.config)
    kind = layout.kind
    count = Counter(layout.config, kind, on_progress)
    with unfinished_file(options, layout.size) as (handle, path):
        writer = Writer(handle, layout)
        for slot in slots_of(layout.config):
            if not slot.packed:
                array = source.read(slot.tensors[0])
                writer.write(slot.name, 0, array)
                count.add(array.nbytes)
                continue
            codes = scales = 0
            for _, piece in pieces_packed(source, slot, kind):
                writer.write(slot.name + CODES, codes, piece.codes)
                writer.write(slot.name + SCALES, scales, piece.scales)
                codes, scales = codes + piece.codes.nbytes, scales + piece.scales.nbytes
                count.add(piece.nbytes)
        writer.finish()
    return path
