"""Tensors of a folder: one file or shards, whole or by rows; an index that lies is found out."""

import errno
import gc
import hashlib
import json
import os
import tracemalloc
import warnings

import numpy as np
import pytest
from safetensors.numpy import save_file

from course_lib.engine import Engine, safetensors_file
from course_lib.engine.config import ModelConfig
from course_lib.engine.conversion import load_weights
from course_lib.engine.fingerprint import add_sample
from course_lib.engine.safetensors_source import SafetensorsSource
from course_lib.errors import CourseError
from tests.tiny_checkpoint import BASE_CONFIG, random_tensors, write_checkpoint

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"


def write_shards(folder, shards, weight_map=None):
    """Write `shards` (name -> tensors) and an index of them, or the given weight_map."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def in_three(tensors):
    """A checkpoint's tensors in three shards, neighbours in different ones."""
    names = list(tensors)
    return {f"model-{i + 1:05}-of-00003.safetensors": {n: tensors[n] for n in names[i::3]}
            for i in range(3)}


@pytest.fixture
def tensors():
    return random_tensors(BASE_CONFIG)


@pytest.fixture
def sharded(tmp_path, tensors):
    """A folder of three shards, its tensors' names in order."""
    write_checkpoint(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, in_three(tensors))
    return tmp_path


def test_shards_are_the_same_model(sharded, tensors, tmp_path_factory):
    whole = tmp_path_factory.mktemp("whole")
    write_checkpoint(whole, tensors)
    source = SafetensorsSource(sharded)
    assert source.stored == SafetensorsSource(whole).stored
    assert source.path == sharded / INDEX
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(source.read(name), tensor)
    ids = [5, 90, 17]
    np.testing.assert_array_equal(Engine.load(sharded).forward(ids),
                                  Engine.load(whole).forward(ids))


def test_shards_may_be_links(sharded, tensors):
    """As the cache of huggingface_hub has them."""
    (sharded / "blobs").mkdir()
    for i, shard in enumerate(sorted(sharded.glob("*.safetensors"))):
        shard.rename(sharded / "blobs" / str(i))
        shard.symlink_to(sharded / "blobs" / str(i))
    np.testing.assert_array_equal(SafetensorsSource(sharded).read(NORM), tensors[NORM])


def test_one_file_wins_over_an_index(sharded, tensors):
    """As transformers chooses."""
    save_file({NORM: tensors[NORM] + 1}, sharded / "model.safetensors")
    source = SafetensorsSource(sharded)
    assert list(source.stored) == [NORM] and source.path == sharded / "model.safetensors"
    np.testing.assert_array_equal(source.read(NORM), tensors[NORM] + 1)


def test_rows_of_a_matrix(sharded, tensors):
    source = SafetensorsSource(sharded)
    for first, last in [(0, 300), (0, 1), (299, 300), (7, 7), (17, 205)]:
        rows = source.read_rows(EMBEDDING, first, last)
        np.testing.assert_array_equal(rows, tensors[EMBEDDING][first:last])
        assert rows.dtype == np.float32 and rows.flags.c_contiguous and rows.flags.writeable
    for name, first, last in [(NORM, 0, 1), (EMBEDDING, -1, 2), (EMBEDDING, 3, 2),
                              (EMBEDDING, 0, 301)]:
        with pytest.raises(ValueError, match=r"has (shape|rows)"):
            source.read_rows(name, first, last)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_pieces_join_without_a_seam(tmp_path, monkeypatch, kind):
    """The same numbers, read seven at a time; the last piece is shorter."""
    values = (np.arange(26, dtype=np.float32).reshape(13, 2) - 12) / 4
    as_16 = values.astype(np.float16)
    data = {"F32": values, "F16": as_16, "BF16": as_16}[kind]
    save_file({"x": data, "y": data}, tmp_path / "model.safetensors")
    if kind == "BF16":  # written as F16, then renamed in the header: the bits are of bfloat16
        path = tmp_path / "model.safetensors"
        raw = path.read_bytes().replace(b'"F16"', b'"BF16"').replace(b"  ", b"", 1)
        bits = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        head = raw[: len(raw) - 2 * len(bits)]
        path.write_bytes(head + bits + bits)
    monkeypatch.setattr(safetensors_file, "PIECE", 7)
    source = SafetensorsSource(tmp_path)
    np.testing.assert_array_equal(source.read("y"), values)
    np.testing.assert_array_equal(source.read_rows("y", 3, 9), values[3:9])


def test_a_scalar_and_nothing(tmp_path):
    save_file({"a": np.array(2.5, np.float32), "b": np.zeros((0, 4), np.float16)},
              tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.read("a").shape == () and source.read("a") == 2.5
    assert source.read("b").shape == (0, 4) and source.read_rows("b", 0, 0).shape == (0, 4)


def test_a_read_needs_little_beside_its_result(tmp_path):
    save_file({"x": np.ones((4096, 1024), np.float16)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    source.read_rows("x", 0, 1)
    tracemalloc.start()
    values = source.read("x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values.nbytes == 16 << 20 and peak < values.nbytes + (2 << 20)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_a_file_cut_short_after_it_was_opened_is_an_error(tmp_path, tensors, keep):
    """Reading a mapped file would kill the process."""
    write_checkpoint(tmp_path, tensors)
    source = SafetensorsSource(tmp_path)
    path = tmp_path / "model.safetensors"
    os.truncate(path, int(keep * path.stat().st_size))
    names = []
    for name in tensors:
        try:
            np.testing.assert_array_equal(source.read(name), tensors[name])
        except CourseError as error:
            assert str(error).startswith(f"{path} is damaged or truncated (at tensor {name}): copy")
            names.append(name)
    assert names
    with pytest.raises(CourseError, match="truncated"):
        load_weights(source, ModelConfig.from_folder(tmp_path))


def test_a_file_replaced_after_it_was_opened_is_still_the_old_one(tmp_path, tensors):
    write_checkpoint(tmp_path, tensors)
    source = SafetensorsSource(tmp_path)
    save_file({NORM: tensors[NORM] + 1}, tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "model.safetensors")
    np.testing.assert_array_equal(source.read(NORM), tensors[NORM])


def open_below(folder) -> int:
    """How many of this process's open files lie in a folder."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    # One of them was the listing itself, which is closed by now.
    return sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.lexists(link))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_files_are_closed(sharded):
    with warnings.catch_warnings(record=True) as caught:  # Python complains of those it closes
        warnings.simplefilter("always")
        source = SafetensorsSource(sharded)
        assert open_below(sharded) == 3
        del source
        gc.collect()
    assert open_below(sharded) == 0
    assert not [w for w in caught if str(sharded) in str(w.message)]


ONE, TWO, THREE = (f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3))


def lie(folder, change):
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


LIES = {
    "a tensor in no file": (lambda m: m.update(ghost=TWO), rf"{TWO} lacks tensor ghost, unlike"),
    "a tensor in another file": (
        lambda m: m.update({EMBEDDING: TWO}), rf"{TWO} lacks tensor {EMBEDDING}, unlike"),
    "a tensor left out": (lambda m: m.pop(EMBEDDING), rf"{ONE} holds tensor {EMBEDDING}, unlike"),
    "a file left out": (
        lambda m: [m.pop(name) for name in [n for n in m if m[n] == THREE]],
        "lacks tensor model.layers"),
    "a missing file": (
        lambda m: m.update(ghost="model-00004-of-00003.safetensors"),
        r"model-00004-of-00003.safetensors is missing, .* it holds 1 tensors"),
    "a path upwards": (lambda m: m.update(x=f"../{ONE}"), r"names '\.\./model-00001"),
    "an absolute path": (lambda m: m.update(x="/etc/x.safetensors"), "names '/etc/x.safe"),
    "a windows path": (lambda m: m.update(x="..\\x.safetensors"), r"names '\.\.\\\\x"),
    "a drive": (lambda m: m.update(x="C:x.safetensors"), "names 'C:x"),
    "no text": (lambda m: m.update(x=5), "names '5', not a .safetensors file of this folder"),
    "null": (lambda m: m.update(x=None), "names 'None'"),
    "another file": (lambda m: m.update(x="config.json"), "names 'config.json'"),
    "a NUL": (lambda m: m.update(x="a\0.safetensors"), r"names 'a\\x00.safetensors'"),
    "a long name": (lambda m: m.update(x="a" * 5000 + ".safetensors"), "names 'aaa"),
    "nothing": (lambda m: m.clear(), "has no weight_map"),
}


@pytest.mark.parametrize("kind", LIES)
def test_an_index_that_lies(sharded, kind):
    change, words = LIES[kind]
    lie(sharded, change)
    with pytest.raises(CourseError, match=words) as error:
        Engine.load(sharded)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400 + len(str(sharded))
    assert INDEX in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "JSON list, not an object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "it names 'a' twice"),
        ('{"weight_map": {"a": "x.safetensors"}, "weight_map": {}}', "'weight_map' twice"),
    ],
)
def test_a_damaged_index(sharded, text, words):
    (sharded / INDEX).write_text(text)
    with pytest.raises(CourseError, match=words) as error:
        SafetensorsSource(sharded)
    assert f"{sharded / INDEX} " in str(error.value) and "every shard again" in str(error.value)


def test_a_tensor_in_two_shards(tmp_path):
    """The index has to choose one of them: then the other holds one too many."""
    x = np.zeros(3, np.float32)
    write_shards(tmp_path, {"a.safetensors": {"x": x, "y": x}, "b.safetensors": {"x": x}})
    with pytest.raises(CourseError, match="a.safetensors holds tensor x, unlike"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("shard", [ONE, THREE])
@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_shard_is_named(sharded, shard, keep):
    (sharded / shard).write_bytes((sharded / shard).read_bytes()[:keep])
    with pytest.raises(CourseError, match=f"{shard} is damaged or truncated.*copy the file again"):
        SafetensorsSource(sharded)


def test_a_file_that_may_not_be_opened(tmp_path, tensors, monkeypatch):
    write_checkpoint(tmp_path, tensors)

    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(safetensors_file, "open", refuse, raising=False)
    with pytest.raises(CourseError, match="safetensors cannot be read .Permission denied.: copy"):
        SafetensorsSource(tmp_path)


def test_a_disk_that_fails_while_reading(tmp_path, tensors, monkeypatch):
    write_checkpoint(tmp_path, tensors)
    source = SafetensorsSource(tmp_path)

    opened = source._files[0]._file

    class Broken:
        def fileno(self):
            return opened.fileno()

        def seek(self, offset):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(source._files[0], "_file", Broken())
    with pytest.raises(CourseError, match=f"error, at tensor {NORM}.: copy the file again"):
        source.read(NORM)
    with pytest.raises(CourseError, match="cannot be read .Input/output error.: copy"):
        source.fingerprint()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "model.safetensors is missing: copy"),
        (["pytorch_model-00001-of-00002.bin"], "holds pytorch_model-00001.*save_pretrained"),
        (["consolidated.safetensors"], "holds consolidated.safetensors: save"),
        (["model-q8_0.gguf"], "holds model-q8_0.gguf: give that file"),
    ],
)
def test_weights_in_another_form_are_named(tmp_path, names, words):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CourseError, match=words):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "x" * 300, "\x1b[2J"])
def test_names_that_would_spoil_a_message_are_refused(tmp_path, name):
    save_file({name: np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CourseError, match="header cannot be read .a tensor is named '") as error:
        SafetensorsSource(tmp_path)
    assert str(error.value).isprintable() and len(str(error.value)) < 300 + len(str(tmp_path))


def test_the_fingerprint_follows_every_file(sharded):
    def fingerprint():
        return SafetensorsSource(sharded).fingerprint()

    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    for path in [*sharded.glob("*.safetensors"), sharded / "config.json"]:
        data, times = path.read_bytes(), path.stat()
        changed = data[:-1] + bytes([data[-1] ^ 1])
        if path.suffix == ".json":
            changed = data[:-1] + b" }"
        path.write_bytes(changed)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        seen.append(fingerprint())  # another byte, size and time as before
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert fingerprint() == seen[0]
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1000))
        if path.suffix != ".json":
            seen.append(fingerprint())
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(set(seen)) == len(seen) == 1 + 3 * 2 + 1
    assert all(len(digits) == 64 and int(digits, 16) for digits in seen)


def test_the_fingerprint_holds_the_whole_header(tmp_path):
    """Not only the pages of it that are sampled."""
    path = tmp_path / "model.safetensors"
    save_file({f"tensor-{i:04}": np.zeros(10_000, np.float32) for i in range(150)}, path)
    data, times = path.read_bytes(), path.stat()
    first = SafetensorsSource(tmp_path).fingerprint()
    at = data.index(b"tensor-", 6000)
    path.write_bytes(data[:at] + b"Tensor-" + data[at + 7 :])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert SafetensorsSource(tmp_path).fingerprint() != first


def test_a_sample_tells_sizes_apart(tmp_path):
    """Of files whose sampled pages are the same."""
    digests = set()
    for size in (1 << 20, 2 << 20):
        path = tmp_path / str(size)
        path.write_bytes(bytes(size))
        os.utime(path, ns=(10**18, 10**18))
        digest = hashlib.sha256()
        with path.open("rb") as file:
            add_sample(digest, file)
        digests.add(digest.hexdigest())
    assert len(digests) == 2
