"""Streams: text piece by piece, tokens one by one, interrupts at every place."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from course_lib.engine import Engine, generate_from, stream_from
from course_lib.engine.layers import argmax
from course_lib.engine.sampling import Sampler
from course_lib.engine.text_stream import TextStream
from course_lib.engine.tokenizer import BYTE_OF_LETTER
from course_lib.errors import CourseError
from tests.tiny_checkpoint import tiny_engine, write_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory)


def random_ids(n, seed=0):
    return np.random.default_rng(seed).integers(3, 266, n).tolist()


# Text


def test_the_alphabet_of_bytes_is_that_of_the_tokenizers_package():
    assert set(BYTE_OF_LETTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_LETTER.values()) == list(range(256))
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in (*range(0x80), 0xE9, 0x62C9, 0x1F600):
        ((letters, _),) = splitter.pre_tokenize_str(chr(code))
        assert bytes(BYTE_OF_LETTER[letter] for letter in letters) == chr(code).encode()


def tokens(engine):
    """Ids at random, and those of characters that are spread over several tokens."""
    spread = [engine.encode(text) for text in ("😀", "拉", "é", "\ufffd", "a<|im_end|>")]
    part = st.one_of(
        st.lists(st.integers(0, 310), max_size=4),
        st.sampled_from([ids[:cut] for ids in spread for cut in range(1, len(ids) + 1)]),
    )
    return st.lists(part, max_size=8).map(lambda parts: list(itertools.chain(*parts)))


@given(st.data())
def test_pieces_joined_are_the_decoded_ids(engine, data):
    ids = data.draw(tokens(engine))
    stream = TextStream(engine.tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == engine.decode(ids)
    assert engine.decode(ids) == engine.tokenizer._control.decode(ids, skip_special_tokens=False)
    assert stream.push(engine.encode("x")[0]) == "x"  # it starts anew
    known = [token for token in ids if token < 266]  # those above have no bytes: no padding of 0
    assert b"".join(map(engine.tokenizer.token_bytes, ids)) == b"".join(
        map(engine.tokenizer.token_bytes, known)
    )


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_piece_comes_as_soon_as_its_characters_are_whole(engine, text):
    stream, shown, have = TextStream(engine.tokenizer), "", b""
    for token in engine.encode(text, allow_special=False):
        shown += stream.push(token)
        have += engine.tokenizer.token_bytes(token)
        assert text.startswith(shown)
        assert len(have) - len(shown.encode()) < 4  # what is held back is less than a character
    assert shown == text and stream.finish() == ""


def test_half_a_character_is_held_back_and_shown_as_such_at_the_end(engine):
    ids = engine.encode("😀")
    assert len(ids) == 4
    stream = TextStream(engine.tokenizer)
    assert [stream.push(token) for token in ids] == ["", "", "", "😀"]
    assert [stream.push(token) for token in ids[:2]] == ["", ""]
    assert stream.push(2) == "\ufffd<|im_end|>"
    assert stream.push(ids[0]) == "" and stream.finish() == "\ufffd" and stream.finish() == ""
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="is impossible"):
            stream.push(bad)


# Tokens


def literal(session, count, sampler, k):
    """The loop of generation, spelled out on a fork."""
    session, ids = session.fork(), []
    for _ in range(count):
        token = argmax(session.logits) if sampler is None else sampler(session.logits, len(session))
        if token in session.model.config.eos_token_ids:
            break
        ids.append(token)
        session.step(token, decode_k=k)
    return ids


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("sampler", [None, Sampler(), Sampler(1.0, seed=4), Sampler(0.7, top_k=20)])
def test_streams_and_generations_are_one_loop(engine, sampler, k):
    session = engine.prefill(random_ids(100))
    expected = literal(session, 8, sampler, k)
    result = generate_from(session, 8, k, sampler=sampler, trace=True)
    assert result.ids == expected and len(session) == 100
    fed = session.fork()
    items = list(engine.stream(fed, 8, k, sampler=sampler, trace=True))
    assert [item.id for item in items] == expected
    assert "".join(item.text for item in items) == engine.decode(expected)
    assert [item.margin for item in items] == result.logits_margin
    assert [item.blocks_read for item in items[1:]] == result.blocks_read
    assert [item.stopped for item in items] == [None] * 7 + ["length"]
    assert min(item.ms for item in items) > 0 and min(item.attn_ms for item in items[1:]) > 0
    assert [len(item.selections) for item in items[1:]] == [2] * 7
    first = items[0]
    assert (first.attn_ms, first.blocks_read, first.selections) == (None, None, None)
    assert len(fed) == 107  # the last token is not fed
    assert engine.generate(random_ids(100), 8, k, sampler=sampler) == expected


def test_other_seeds_give_other_tokens_and_positions_other_draws(engine):
    session = engine.prefill(random_ids(60))
    made = {tuple(generate_from(session, 6, sampler=Sampler(2.0, seed=s)).ids) for s in range(5)}
    assert len(made) == 5
    # A draw belongs to the position: going on from a middle gives the same tokens.
    ids = generate_from(session, 6, sampler=Sampler(2.0, seed=1)).ids
    middle = session.fork()
    for token in ids[:3]:
        middle.step(token)
    assert generate_from(middle, 3, sampler=Sampler(2.0, seed=1)).ids == ids[3:]


def test_margin_is_that_of_the_logits_also_when_another_token_is_drawn(engine):
    session = engine.prefill(random_ids(60))
    best, second = np.sort(session.logits)[[-1, -2]]
    for seed in range(5):
        (item,) = stream_from(session, 1, sampler=Sampler(3.0, seed=seed))
        assert item.margin == pytest.approx(float(best - second)) and item.text == ""


def test_the_end_token_ends_the_stream_and_brings_held_back_text(tmp_path, engine):
    ids = random_ids(30)
    free = engine.generate(ids, 10)
    known = engine.tokenizer.vocab_size  # the model knows more tokens than the tokenizer
    stop = next(t for i, t in enumerate(free) if i >= 3 and t not in free[:i] and t < known)
    at = free.index(stop)
    assert 0 not in free
    write_checkpoint(tmp_path, eos_token_id=[0, stop])
    stopping = Engine.load(tmp_path)
    for most in (10, at + 1):
        items = list(stopping.stream(stopping.prefill(ids), most))
        assert [item.id for item in items] == free[: at + 1]
        assert items[-1].stopped == "eos" and items[-2].stopped is None
        assert "".join(item.text for item in items) == engine.decode(free[:at])
    assert generate_from(stopping.prefill(ids), at + 1).stopped == "eos"
    short = list(stopping.stream(stopping.prefill(ids), at))
    assert short[-1].stopped == "length" and len(short) == at


def test_a_request_that_cannot_be_is_refused_by_the_call(engine):
    session = engine.prefill(random_ids(500))
    for call in (stream_from, generate_from, engine.stream, engine.generate_from):
        with pytest.raises(CourseError, match="513 tokens do not fit"):
            call(session, 13)
        with pytest.raises(ValueError, match="max_new_tokens must be"):
            call(session, 0)
        with pytest.raises(ValueError, match="decode_k must be"):
            call(session, 2, 0)
    assert len(session) == 500


# Interrupts


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_in_on_step_keeps_what_was_yielded(engine, at):
    session, seen = engine.prefill(random_ids(40)), []
    expected = engine.generate(random_ids(40), 8)
    steps = itertools.count(1)

    def on_step(token, session):
        if next(steps) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for item in stream_from(session, 8, on_step=on_step):
            seen.append(item.id)
    assert seen == expected[:at] and len(session) == 40 + at  # the interrupt came after feeding
    assert generate_from(session, 8 - at).ids == expected[at:]


def test_an_interrupt_inside_a_step_leaves_the_token_unfed(engine, monkeypatch):
    session, expected = engine.prefill(random_ids(40)), engine.generate(random_ids(40), 8)
    stream = stream_from(session, 8)
    assert [next(stream).id for _ in range(3)] == expected[:3]
    with monkeypatch.context() as patch:
        patch.setattr("course_lib.engine.decode.DecodeAttention.stats", raising)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert list(stream) == []  # a stream that was interrupted has ended
    assert len(session) == 42
    session.step(expected[2])
    assert generate_from(session, 5).ids == expected[3:]


def raising(*arguments):
    raise KeyboardInterrupt


def test_a_stream_closed_early_has_fed_all_but_the_last(engine):
    session = engine.prefill(random_ids(40))
    stream = stream_from(session, 8)
    for count in range(1, 4):
        next(stream)
        assert len(session) == 40 + count - 1
    stream.close()
    assert list(stream) == [] and len(session) == 42
