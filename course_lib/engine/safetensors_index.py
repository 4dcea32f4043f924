"""The files of a folder's weights: model.safetensors, or the shards that an index names."""

from __future__ import annotations

from pathlib import Path

from course_lib.engine.files import is_there, read_json_object, require_file
from course_lib.engine.safetensors_file import REMEDY, SafetensorsFile
from course_lib.errors import CourseError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_REMEDY = f"copy {INDEX} and every shard again from where the checkpoint came from"


def open_weights(folder: Path) -> tuple[Path, list[SafetensorsFile]]:
    """What errors name, and the opened files that hold the weights of `folder`.

    model.safetensors where there is one, as transformers chooses, whatever an index says; else
    the shards. CourseError unless index and shards name the very same tensors, each once.
    """
    path, index = folder / ONE_FILE, folder / INDEX
    if is_there(path):
        return path, [SafetensorsFile(path)]
    if not is_there(index):
        _refuse_other_weights(folder)
        require_file(path, remedy=REMEDY)
    shards = _shards(index)
    files = []
    for shard, names in shards.items():
        if not is_there(folder / shard):
            raise CourseError(
                f"{folder / shard} is missing, {index.name} says that it holds {len(names)} "
                f"tensors: {INDEX_REMEDY}"
            )
        file = SafetensorsFile(folder / shard)
        for problem, differing in (
            ("lacks tensor", names - file.tensors.keys()),
            ("holds tensor", file.tensors.keys() - names),
        ):
            if differing:
                raise CourseError(
                    f"{file.path} {problem} {min(differing)}, unlike {index.name} says: "
                    f"{INDEX_REMEDY}"
                )
        files.append(file)
    return index, files


def _shards(index: Path) -> dict[str, set[str]]:
    """Shard's file name -> the tensors that the index says it holds, in the index's order."""
    weight_map = read_json_object(index, remedy=INDEX_REMEDY, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CourseError(f"{index} has no weight_map of tensors to files: {INDEX_REMEDY}")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not _is_shard_name(shard):
            raise CourseError(
                f"{index}: weight_map names {str(shard)[:80]!a}, not a .safetensors file of this "
                f"folder: {INDEX_REMEDY}"
            )
        shards.setdefault(shard, set()).add(tensor)
    return shards


def _is_shard_name(shard: object) -> bool:
    """Whether `shard` is a plain file name; a path could lead anywhere."""
    return (
        isinstance(shard, str)
        and shard.isprintable()
        and len(shard) <= 200
        and shard.endswith(".safetensors")
        and not any(mark in shard for mark in "/\\:")
    )


def _refuse_other_weights(folder: Path) -> None:
    """CourseError naming weights that are there in a form which is not read."""
    for pattern in ("pytorch_model*.bin", "*.safetensors", "*.bin", "*.gguf"):
        found = sorted(folder.glob(pattern))
        if found:
            remedy = (
                "give that file" if found[0].suffix == ".gguf" else
                "save the model again with transformers' save_pretrained, which writes that file"
            )
            raise CourseError(
                f"{folder / ONE_FILE} is missing, the folder holds {found[0].name}: {remedy}"
            )
