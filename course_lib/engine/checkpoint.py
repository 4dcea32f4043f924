"""Opening a checkpoint: a Hugging Face folder, or one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from course_lib.engine.config import ModelConfig
from course_lib.engine.files import checkpoint_folder, is_there
from course_lib.engine.gguf_config import gguf_config
from course_lib.engine.gguf_header import REMEDY
from course_lib.engine.gguf_source import GgufSource
from course_lib.engine.gguf_tokenizer import gguf_tokenizer
from course_lib.engine.safetensors_source import SafetensorsSource
from course_lib.engine.tensor_source import TensorSource
from course_lib.engine.tokenizer import Tokenizer
from course_lib.errors import CourseError
from course_lib.known_models import find_model


class Checkpoint(NamedTuple):
    """What a model is made from; no weight is read yet."""

    config: ModelConfig
    source: TensorSource
    tokenizer: Tokenizer


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: a folder, a .gguf file, a folder of one, or a known model's name.

    Raises CourseError, one sentence that names the file and the remedy, for anything absent,
    damaged or not supported.
    """
    found = find_model(path)
    file = gguf_file(found)
    return _of_folder(checkpoint_folder(found)) if file is None else _of_gguf(file)


def gguf_file(path: Path) -> Path | None:
    """The .gguf file that `path` is or, as a folder without config.json, holds; else None.

    Raises CourseError for a folder with several of them.
    """
    try:
        path = path.expanduser()
        if path.suffix.lower() == ".gguf" and not path.is_dir():
            return path
        if not path.is_dir() or is_there(path / "config.json"):
            return None
        found = sorted(path.glob("*.gguf"))
    except (OSError, RuntimeError):  # what opens the folder says why
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CourseError(f"{path} holds several models ({names}): give one of these files")
    return found[0] if found else None


def _of_folder(folder: Path) -> Checkpoint:
    config = ModelConfig.from_folder(folder)
    tokenizer = Tokenizer.from_folder(folder)
    check_vocabulary(folder / "tokenizer.json", tokenizer, config,
                     "use the tokenizer.json and config.json of one checkpoint")
    return Checkpoint(config, SafetensorsSource(folder), tokenizer)


def _of_gguf(file: Path) -> Checkpoint:
    source = GgufSource(file)
    config, tokenizer = gguf_config(source), gguf_tokenizer(source.metadata, file)
    check_vocabulary(file, tokenizer, config, REMEDY)
    return Checkpoint(config, source, tokenizer)


def check_vocabulary(path: Path, tokenizer: Tokenizer, config: ModelConfig, remedy: str) -> None:
    """CourseError naming `path` and `remedy` unless tokenizer and model are of one checkpoint."""
    size = tokenizer.vocab_size
    if size > config.vocab_size:
        raise CourseError(f"{path} has token ids up to {size - 1}, the model knows "
                          f"{config.vocab_size} tokens: {remedy}")
    for token in config.eos_token_ids:
        if token >= size:
            raise CourseError(f"{path} has token ids up to {size - 1}, the model ends with token "
                              f"{token}: {remedy}")
