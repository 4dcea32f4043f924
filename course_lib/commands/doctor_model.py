"""`./course doctor --model`: what a checkpoint needs in memory, beside what is free."""

from __future__ import annotations

from pathlib import Path

from course_lib import memory
from course_lib.engine.checkpoint import open_checkpoint
from course_lib.engine.conversion import weight_bytes
from course_lib.engine.fits import CONTEXT, kinds_of, need, verdict
from course_lib.engine.weight_cache import cache_report
from course_lib.engine.weights import check_tensors
from course_lib.errors import CourseError
from course_lib.kvcache import CACHE_DTYPES
from course_lib.memory import gigabytes
from course_lib.paths import relative


def report(path: str | Path, context: int | None) -> int:
    """Print a table of what weights and caches of every kind need; 1 if no way to run fits.

    Reads the config and the headers, and all of a file of packed weights. Raises CourseError for
    a checkpoint that could not be loaded, and for a context longer than the model's.
    """
    config, source, _ = open_checkpoint(path)
    check_tensors(source, config)
    most = config.max_position_embeddings
    context = min(CONTEXT, most) if context is None else context
    if not 1 <= context <= most:
        raise CourseError(f"--context {context} must be from 1 to the model's {most}")
    free = memory.available()
    values = weight_bytes(config, "f32") / 4
    print(f"{relative(path)}: {config.family}, {values / 1e6:,.0f} million weights; with {context} "
          f"of at most {most} tokens:")
    print(f"\n{'weights':8}{'GB':>7}  {'KV cache':8}{'GB':>7}{'prompt GB':>11}{'in all GB':>11}")
    for kind in kinds_of(config):
        for kv in CACHE_DTYPES:
            way = need(config, kind, kv, context)
            fits = "" if free is None else "fits" if way.running <= free else "does not fit"
            line = (f"{kind:8}{way.weights / 1e9:7.2f}  {kv:8}{way.cache / 1e9:7.2f}"
                    f"{way.scratch / 1e9:11.2f}{way.running / 1e9:11.2f}   {fits}")
            print(line.rstrip())
    loading = need(config, "f32", "f32", 1).loading
    print(f"\nreading or packing needs {loading / 1e6:.0f} MB more, whatever the kind")
    for kind in kinds_of(config):
        if kind != "f32":
            print(f"{kind}: {cache_report(source, config, kind)}")  # type: ignore[arg-type]
    ok, line = verdict(config, context, free)
    if free is not None:
        print(f"free: {gigabytes(free)}")
    print(line)
    return 0 if ok else 1
