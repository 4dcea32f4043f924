"""The file of packed weights: what it holds, where it lies, what is refused, what is left."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from course_lib.engine import Engine, cache_file, cache_place, conversion, weight_cache
from course_lib.engine.cache_file import CODES, Layout
from course_lib.engine.checkpoint import open_checkpoint
from course_lib.engine.conversion import load_weights, weight_bytes
from course_lib.engine.weight_cache import cache_report, cached_weights
from course_lib.errors import CourseError
from course_lib.linear import PackedMatrix
from course_lib.paths import ROOT
from course_lib.weight_blocks import quantize_q4_0, quantize_q8_0
from tests.tiny_checkpoint import ArraySource, random_tensors, write_checkpoint

SHAPE = dict(vocab_size=300, hidden_size=64, intermediate_size=96, head_dim=16)
each_kind = pytest.mark.parametrize("kind", ["q8_0", "q4_0"])


@pytest.fixture(autouse=True)
def cached(monkeypatch, tmp_path):
    """Small models are cached too, and the user's own cache folder is out of reach."""
    monkeypatch.setattr(weight_cache, "SMALL", 0)
    monkeypatch.delenv("COURSE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


@pytest.fixture
def model(tmp_path):
    write_checkpoint(tmp_path / "model", **SHAPE)
    return tmp_path / "model"


def opened(folder):
    config, source, _ = open_checkpoint(folder)
    return source, config


def load(folder, kind="q8_0"):
    """The weights, whether they were packed now, and what was said."""
    packed, notes = [], []
    weights = cached_weights(*opened(folder), kind, lambda *done: packed.append(done), notes.append)
    return weights, bool(packed), notes


def arrays(weights):
    """Every array in order: what two sets of weights are compared by."""
    found = []

    def collect(thing):
        if isinstance(thing, PackedMatrix):
            found.extend((thing.codes, thing.scales))
        elif isinstance(thing, np.ndarray):
            found.append(thing)
        elif isinstance(thing, tuple):
            for part in thing:
                collect(part)
        elif thing is not None and not isinstance(thing, (int, str)):
            for part in vars(thing).values():
                collect(part)

    collect(weights)
    return found


def assert_same(weights, others):
    for found, expected in zip(arrays(weights), arrays(others), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def cache_of(folder, kind="q8_0"):
    return folder / "course-cache" / f"{kind}.safetensors"


@pytest.mark.parametrize("free", [None, 0], ids=["read", "mapped"])
@each_kind
def test_packed_once_then_read_or_mapped(model, kind, free, monkeypatch):
    monkeypatch.setattr(cache_file, "available", lambda: free)
    expected = load_weights(*opened(model), kind)
    first, packed, notes = load(model, kind)
    assert packed and not notes
    again, packed, notes = load(model, kind)
    assert not packed and not notes
    for weights in (first, again):
        assert_same(weights, expected)
        assert not any(array.flags.writeable for array in arrays(weights))
        assert weights.output is weights.embedding
    assert os.listdir(model / "course-cache") == [f"{kind}.safetensors"]
    assert stat.S_IMODE(cache_of(model, kind).stat().st_mode) == 0o644


@each_kind
def test_every_matrix_has_the_blocks_of_the_quantizers(tmp_path, kind):
    shape = SHAPE | dict(num_key_value_heads=1, head_dim=8)  # 32 + 8 + 8 rows: no whole panels
    tensors = random_tensors(write_checkpoint(tmp_path, **shape))
    layer = load(tmp_path, kind)[0].layers[1]
    quantize = {"q8_0": quantize_q8_0, "q4_0": quantize_q4_0}[kind]
    for matrix, names in ((layer.qkv_proj, ["self_attn.q_proj", "self_attn.k_proj",
                                            "self_attn.v_proj"]),
                          (layer.mlp.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"]),
                          (layer.mlp.down_proj, ["mlp.down_proj"])):
        stacked = np.concatenate([tensors[f"model.layers.1.{name}.weight"] for name in names])
        np.testing.assert_array_equal(matrix.to_blocks(), quantize(stacked))


@each_kind
def test_the_file_is_a_safetensors_file_with_arrays_at_pages(model, kind):
    weights = load(model, kind)[0]
    path = cache_of(model, kind)
    stored = load_file(path)
    np.testing.assert_array_equal(stored["model.layers.1.self_attn.qkv_proj.codes"],
                                  weights.layers[1].qkv_proj.codes)
    np.testing.assert_array_equal(stored["model.norm.weight"], weights.final_norm)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    facts = json.loads(path.read_bytes()[8 : 8 + header])
    assert facts["__metadata__"]["kind"] == kind
    for name, entry in facts.items():
        if name != "__metadata__" and not name.startswith("padding"):
            assert (8 + header + entry["data_offsets"][0]) % 4096 == 0, name


def test_pieces_of_any_length_give_the_same_weights(model, monkeypatch):
    expected = load_weights(*opened(model), "q8_0")
    for piece in (1, 64 * 16, 64 * 48):
        monkeypatch.setattr(conversion, "PIECE", piece)
        assert_same(load_weights(*opened(model), "q8_0"), expected)
        assert_same(load_weights(*opened(model), "f32"), load_weights(*opened(model)))


def test_blocks_that_a_file_stores_are_kept(tmp_path):
    """As in a GGUF file: k_proj in blocks that no quantizer would make, q_proj and v_proj not."""
    config = opened_config(tmp_path)
    tensors = random_tensors(json.loads((tmp_path / "config.json").read_text()))
    k = "model.layers.0.self_attn.k_proj.weight"
    own = quantize_q8_0(tensors[k])
    own[:, 2:34] ^= 1

    class Source(ArraySource):
        def blocks(self, name, kind):
            return own if name == k and kind == "q8_0" else None

    heads = config.num_attention_heads * config.head_dim
    found = load_weights(Source(tensors), config, "q8_0").layers[0].qkv_proj.to_blocks()
    np.testing.assert_array_equal(found[heads : heads + len(own)], own)
    np.testing.assert_array_equal(
        found[:heads], quantize_q8_0(tensors["model.layers.0.self_attn.q_proj.weight"]))
    own[3, :2] = 0xFF
    with pytest.raises(CourseError, match="arrays: tensor .* scale that is NaN or infinite"):
        load_weights(Source(tensors), config, "q8_0")


def opened_config(folder):
    write_checkpoint(folder, **SHAPE)
    return opened(folder)[1]


def test_progress_counts_the_bytes_of_the_result(model):
    source, config = opened(model)
    for kind in ("f32", "q8_0", "q4_0"):
        told = []
        weights = load_weights(source, config, kind, lambda *done, told=told: told.append(done))
        total = sum(array.nbytes for array in arrays(weights))
        total -= 0 if not config.tie_word_embeddings else sum(
            array.nbytes for array in arrays((weights.embedding,)))
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert {of for _, of in told} == {total} == {told[-1][0]} == {weight_bytes(config, kind)}


@pytest.mark.parametrize("through_file", [False, True])
def test_packing_needs_the_result_and_less_than_a_layer(tmp_path, monkeypatch, through_file):
    monkeypatch.setattr(conversion, "PIECE", 1 << 14)
    write_checkpoint(tmp_path, vocab_size=4096, hidden_size=256, intermediate_size=1024)
    source, config = opened(tmp_path)
    layer = 3 * 256 * 1024 * 4
    tracemalloc.start()
    if through_file:
        kept = cached_weights(source, config, "q8_0")
    else:
        kept = load_weights(source, config, "q8_0")
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result = 0 if through_file else weight_bytes(config, "q8_0")
    assert kept is not None and peak < result + layer / 2


def test_values_and_shapes_that_cannot_be_packed(tmp_path):
    tensors = random_tensors(write_checkpoint(tmp_path, **SHAPE))
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][70, 3] = 1e9
    save_file(tensors, tmp_path / "model.safetensors")
    for kind in ("q8_0", "q4_0"):
        with pytest.raises(CourseError, match=f"up to 1e.09, too large for {kind}: load .* as f32"):
            load(tmp_path, kind)
    assert not (tmp_path / "course-cache").exists()
    write_checkpoint(tmp_path / "odd")
    with pytest.raises(CourseError, match="embed_tokens.weight has rows of 24 values, q8_0 needs a "
                                          "multiple of 32: load the weights as f32"):
        Engine.load(tmp_path / "odd", "q8_0")


def test_a_changed_checkpoint_is_packed_again(model):
    load(model)
    save_file(random_tensors(json.loads((model / "config.json").read_text()), seed=9),
              model / "model.safetensors")
    weights, packed, (note,) = load(model)
    assert packed and "was made from another state of the checkpoint: packing the weights" in note
    assert_same(weights, load_weights(*opened(model), "q8_0"))
    assert load(model)[1:] == (False, [])


def test_files_of_others_are_packed_again(model, tmp_path):
    load(model), load(model, "q4_0")
    path = cache_of(model)
    good = path.read_bytes()
    other = tmp_path / "other"
    write_checkpoint(other, **SHAPE | dict(num_hidden_layers=3))
    load(other)
    foreign = {
        "another kind": cache_of(model, "q4_0").read_bytes(),
        "another model": cache_of(other).read_bytes(),
        "another format": good.replace(b"packed weights, version 1", b"packed weights, version 0"),
        "no safetensors": b"x" * len(good),
        "an empty file": b"",
        "another state": good.replace(opened(model)[0].fingerprint().encode(), b"0" * 64),
    }
    for what, content in foreign.items():
        path.write_bytes(content)
        weights, packed, notes = load(model)
        assert packed and len(notes) == 1, what
        assert_same(weights, load_weights(*opened(model), "q8_0"))
        assert path.read_bytes() == good, what


def test_a_pipe_of_that_name_is_not_waited_for(model):
    cache_of(model).parent.mkdir()
    os.mkfifo(cache_of(model))
    assert len(load(model)[2]) == 1 and cache_of(model).is_file()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_or_a_short_file_is_never_a_crash(tmp_path, data):
    """Header, scales and gains are checked at every start, codes by the doctor."""
    model = tmp_path / "model"
    path = cache_of(model)
    if not path.exists():
        write_checkpoint(model, **SHAPE | dict(num_hidden_layers=1))
        load(model)
    source, config = opened(model)
    layout = Layout(config, "q8_0", source.fingerprint())
    good = path.read_bytes()
    codes = np.zeros(len(good), bool)
    gaps = np.ones(len(good), bool)
    gaps[: layout.data] = False
    for name, stored in layout.arrays.items():
        place = slice(layout.data + stored.begin, layout.data + stored.begin + stored.nbytes)
        codes[place], gaps[place] = name.endswith(CODES), False
    bad = bytearray(good)
    where = data.draw(st.sampled_from(["header", "scales", "codes", "gap", "end"]))
    if where == "end":
        del bad[data.draw(st.integers(0, len(good) - 1)):]
    else:
        header = np.arange(len(good)) < layout.data
        choice = {"header": header, "codes": codes, "gap": gaps,
                  "scales": ~(header | codes | gaps)}[where]
        place = int(data.draw(st.sampled_from(np.flatnonzero(choice).tolist())))
        bad[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bad)
    try:
        weights, packed, notes = load(model)
        report = cache_report(source, config, "q8_0")
        if where == "codes":
            path.write_bytes(good)
            assert not packed and not notes and report.endswith("is damaged: remove it")
            return
        # In the header only spaces, the checksum of the codes and who made the file may differ.
        harmless = where == "gap" or where == "header" and not packed
        assert harmless or (packed and len(notes) == 1)
        assert_same(weights, load_weights(source, config, "q8_0"))
    finally:
        path.write_bytes(good)


def test_the_doctor_s_words(model, monkeypatch):
    source, config = opened(model)
    path = cache_of(model)
    assert cache_report(source, config, "q8_0") == f"the first start packs 0.00 GB into {path}"
    load(model)
    assert cache_report(source, config, "q8_0") == f"{path}, 0.00 GB, is whole"
    path.write_bytes(b"short")
    assert "is truncated or of another model: packing the weights again" in cache_report(
        source, config, "q8_0")
    monkeypatch.setenv("COURSE_CACHE", "off")
    assert cache_report(source, config, "q8_0") == "packed in memory at every start"


def test_course_cache_names_a_folder_or_is_off(model, tmp_path, monkeypatch):
    expected = load_weights(*opened(model), "q8_0")
    monkeypatch.setenv("COURSE_CACHE", "off")
    assert_same(load(model)[0], expected)
    assert load(model)[1] and not (model / "course-cache").exists()
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "a" / "b"))
    assert load(model)[1] and not load(model)[1]
    (file,) = (tmp_path / "a" / "b").rglob("*.safetensors")
    assert file.parent.name.startswith("model-") and not (model / "course-cache").exists()


def test_users_without_a_home_folder(model, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", "~no-user-of-this-name/cache")
    with pytest.raises(CourseError, match="COURSE_CACHE=~no-user-of-this-name/.* names the home"):
        load(model)
    monkeypatch.delenv("COURSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-user-of-this-name/cache")
    assert load(model)[1] and cache_of(model).exists()


def test_small_models_have_no_file(model, monkeypatch):
    source, config = opened(model)
    monkeypatch.setattr(weight_cache, "SMALL", weight_bytes(config, "q8_0") + 1)
    load(model)
    assert not (model / "course-cache").exists()


def test_a_folder_that_cannot_be_written_sends_the_file_to_the_user_s(model, tmp_path):
    (model / "course-cache").write_text("a file where the folder would be")
    assert load(model)[1] and not load(model)[1]
    (file,) = (tmp_path / "user" / "rk3588-inference-course").rglob("*.safetensors")
    assert file.name == "q8_0.safetensors"


def test_no_place_at_all_is_one_sentence_and_leaves_nothing(model, tmp_path):
    (model / "course-cache").write_text("")
    (tmp_path / "user").write_text("")
    with pytest.raises(CourseError, match=r"cannot be written \(.*\), the packed weights need 0.00 "
                                          "GB: free some space, set COURSE_CACHE") as error:
        load(model)
    assert "\n" not in str(error.value)
    assert (model / "course-cache").read_text() == "" and (tmp_path / "user").read_text() == ""


def test_a_folder_in_the_file_s_place_sends_the_file_elsewhere(model, tmp_path):
    cache_of(model).mkdir(parents=True)
    assert load(model)[1] and list((tmp_path / "user").rglob("*.safetensors"))


def test_a_disk_without_room_is_refused_before_anything_is_written(model, tmp_path, monkeypatch):
    usage = cache_place.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(cache_place.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CourseError, match=r"\(0.00 GB are free there\)"):
        load(model)
    assert not (model / "course-cache").exists() and not (tmp_path / "user").exists()


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [0, 7])
def test_what_stops_the_writing_leaves_nothing_behind(model, tmp_path, monkeypatch, problem, after):
    real, calls = os.pwrite, []

    def pwrite(*arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise problem
        return real(*arguments)

    monkeypatch.setattr(cache_file.os, "pwrite", pwrite)
    wanted = CourseError if isinstance(problem, OSError) else KeyboardInterrupt
    with pytest.raises(wanted, match="No space left" if wanted is CourseError else None):
        load(model)
    assert not (model / "course-cache").exists() and not (tmp_path / "user").exists()


def test_a_failure_keeps_the_old_file(model, monkeypatch):
    load(model)
    old = cache_of(model).read_bytes().replace(b"version 1", b"version 0")
    cache_of(model).write_bytes(old)
    monkeypatch.setattr(cache_file.Writer, "finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(model)
    assert cache_of(model).read_bytes() == old
    assert os.listdir(model / "course-cache") == ["q8_0.safetensors"]


SLOW_LOAD = """
import sys, time
from pathlib import Path
from course_lib.engine import cache_file, weight_cache
from course_lib.engine.checkpoint import open_checkpoint
weight_cache.SMALL = 0
real = cache_file.Writer.write
def write(self, *arguments):
    real(self, *arguments)
    if (count := len(done)) == 5:
        print("half", flush=True)
        time.sleep(float(sys.argv[2]))
    done.append(count)
done = []
cache_file.Writer.write = write
config, source, _ = open_checkpoint(sys.argv[1])
weight_cache.cached_weights(source, config, "q8_0")
print("whole", flush=True)
"""


def child(folder, seconds):
    process = subprocess.Popen([sys.executable, "-c", SLOW_LOAD, str(folder), str(seconds)],
                               cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    return process


def test_a_killed_writer_leaves_what_the_next_start_removes(model):
    process = child(model, 60)
    try:
        (left,) = os.listdir(model / "course-cache")
        assert left.endswith(".unfinished")
        assert load(model)[1]  # beside a writer that lives: both are fine
        assert sorted(os.listdir(model / "course-cache")) == sorted([left, "q8_0.safetensors"])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    weights, packed, notes = load(model)
    assert not packed and not notes
    assert os.listdir(model / "course-cache") == ["q8_0.safetensors"]
    assert_same(weights, load_weights(*opened(model), "q8_0"))


def test_two_at_once_and_a_file_in_use_that_is_replaced(model):
    process = child(model, 0.2)
    mine = load(model)[0]
    before = [array.copy() for array in arrays(mine)]
    assert process.stdout.read() == "whole\n"  # it replaces the file that is mapped here
    assert process.wait() == 0
    process.stdout.close()
    for found, expected in zip(arrays(mine), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert os.listdir(model / "course-cache") == ["q8_0.safetensors"]
    assert load(model)[1:] == (False, [])


def test_an_unfinished_file_that_is_removed_before_its_lock_is_made_again(model, monkeypatch):
    real, made = cache_place.tempfile.mkstemp, []

    def mkstemp(**options):
        handle, path = real(**options)
        if not made:
            os.unlink(path)
        made.append(path)
        return handle, path

    monkeypatch.setattr(cache_place.tempfile, "mkstemp", mkstemp)
    assert load(model)[1] and len(made) == 2 and not load(model)[1]


def test_the_engine_gives_the_same_logits_from_memory_and_from_a_file(model, monkeypatch):
    ids = [5, 90, 17, 200]
    first = Engine.load(model, "q8_0").forward(ids)
    second = Engine.load(model, "q8_0").forward(ids)
    monkeypatch.setenv("COURSE_CACHE", "off")
    np.testing.assert_array_equal(Engine.load(model, "q8_0").forward(ids), first)
    np.testing.assert_array_equal(second, first)
    with pytest.raises(ValueError, match="weights must be one of f32, q8_0, q4_0, not 'q5_0'"):
        Engine.load(model, "q5_0")


def test_a_tied_checkpoint_that_differs_is_refused_before_it_is_packed(model):
    tensors = random_tensors(json.loads((model / "config.json").read_text()))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CourseError, match="lm_head.weight differs"):
        load(model)
    assert not (model / "course-cache").exists()
