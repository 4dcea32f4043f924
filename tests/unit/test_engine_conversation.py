"""Answers that may be stopped anywhere, and conversations that go on from the rows they have."""

import numpy as np
import pytest

from course_lib import backend
from course_lib.engine import Conversation, Engine, Sampler
from course_lib.engine.chat import ChatTemplate
from course_lib.engine.prompt_cache import PromptCache, common_prefix, extend
from course_lib.errors import CourseError
from tests.chat_templates import THINKING
from tests.tiny_checkpoint import tiny_engine, write_checkpoint

COMPILED = backend.info().name == "kernels_pyx"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return tiny_engine(tmp_path_factory)


def ask(text):
    return [{"role": "user", "content": text}]


def prompt_of(engine, messages, **options):
    return engine.apply_chat_template(messages, **options)


def random_ids(n, seed=0):
    return np.random.default_rng(seed).integers(3, 266, n).tolist()


# Answers


@pytest.mark.parametrize("options", [
    {}, {"decode_k": 2}, {"decode_k": "auto", "kv": "q8"}, {"sampler": Sampler(1.0, seed=2)},
    {"decode_k": 1, "importance": "last_window", "n_probe": 2, "block_size": 16},
])
def test_an_answer_is_what_generation_gives(engine, options):
    messages = ask("hello " * 20)
    prompt = prompt_of(engine, messages)
    answer = engine.chat(messages, max_new_tokens=6, trace=True, **options)
    assert answer.reply.ids == [] and answer.reply.text == ""
    assert answer.reply.stopped == "interrupted" and answer.reply.prefill_tokens_per_s is None
    items = list(answer)
    reply = answer.reply
    steps = {key: options[key] for key in ("decode_k", "sampler", "n_probe") if key in options}
    prefill = {key: options[key] for key in options if key not in steps}
    prefill.setdefault("importance", "none" if "decode_k" not in options else "all_queries")
    expected = engine.generate_from(engine.prefill(prompt, **prefill), 6, **steps)
    assert reply.ids == [item.id for item in items] == expected.ids
    assert reply.text == "".join(item.text for item in items) == engine.decode(expected.ids)
    assert reply.blocks_read == expected.blocks_read and len(reply.attn_ms) == 5
    assert (reply.stopped, reply.prompt_tokens, reply.reused_tokens) == ("length", len(prompt), 0)
    assert reply.prefill_tokens_per_s > 0 and reply.decode_tokens_per_s > 0
    assert items[1].selections is not None and items[0].selections is None


def test_an_answer_ends_before_the_end_token(tmp_path, engine):
    free = list(engine.chat(ask("hello"), max_new_tokens=20))
    ids = [item.id for item in free]
    known = engine.tokenizer.vocab_size  # the model knows more tokens than the tokenizer
    stop = next(t for i, t in enumerate(ids) if i >= 2 and t not in ids[:i] and t < known)
    write_checkpoint(tmp_path, eos_token_id=stop)
    answer = Engine.load(tmp_path).chat(ask("hello"), max_new_tokens=20)
    items = list(answer)
    assert answer.reply.ids == ids[: ids.index(stop)] and answer.reply.stopped == "eos"
    assert items[-1].stopped == "eos" and items[-1].id == stop
    assert len(answer.reply.attn_ms) == len(answer.reply.ids)


def test_an_answer_takes_no_more_than_the_context_has_room_for(engine):
    limit = engine.config.max_position_embeddings
    overhead = len(prompt_of(engine, ask("")))
    answer = engine.chat(ask("x" * (limit - overhead - 3)), max_new_tokens=50)
    assert len(list(answer)) == 3 and answer.reply.stopped == "length"
    with pytest.raises(CourseError, match="of 512 tokens fills the model's context of 512: start"):
        engine.chat(ask("x" * (limit - overhead)))


@pytest.mark.parametrize(("options", "words"), [
    ({"max_new_tokens": 0}, "max_new_tokens must be"), ({"decode_k": 0}, "decode_k must be"),
    ({"kv": "f16"}, "kv must be one of"), ({"importance": "tail"}, "importance must be one of"),
    ({"n_probe": 0}, "n_probe must be"), ({"prefill_k": 0}, "prefill_k must be"),
    ({"window": 3}, "window needs"),
])
def test_wrong_options_are_refused_before_any_work(engine, options, words):
    with pytest.raises(ValueError, match=words):
        engine.chat(ask("x"), **options)
    with pytest.raises(TypeError, match="no_such"):
        engine.chat(ask("x"), no_such=1)
    with pytest.raises(ValueError, match="messages must be a list"):
        engine.chat("x")


def test_a_checkpoint_without_a_template_says_so(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CourseError, match="has no chat template"):
        Engine.load(tmp_path).chat(ask("x"))


def raising(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("place", [
    "model.Model.logits", "decode.DecodeAttention.stats", "sampling.argmax",
    "text_stream.TextStream.push",
])
def test_an_interrupt_anywhere_keeps_what_was_generated(engine, monkeypatch, place, after):
    expected = [item.id for item in engine.chat(ask("hello"), max_new_tokens=8)]
    answer = engine.chat(ask("hello"), max_new_tokens=8)
    shown = "".join(next(answer).text for _ in range(after))
    if place == "decode.DecodeAttention.stats" and not after:
        return  # no token has been fed yet
    with monkeypatch.context() as patch:
        patch.setattr(f"course_lib.engine.{place}", raising)
        with pytest.raises(KeyboardInterrupt):
            next(answer)
    assert answer.reply.ids == expected[:after] and answer.reply.stopped == "interrupted"
    assert answer.reply.text.startswith(shown)
    assert list(answer) == []


def test_closing_an_answer_keeps_what_was_generated(engine):
    answer = engine.chat(ask("hello"), max_new_tokens=8)
    first = [next(answer).id, next(answer).id]
    answer.close()
    answer.close()
    assert list(answer) == [] and answer.reply.ids == first
    assert answer.reply.stopped == "interrupted" and answer.reply.decode_tokens_per_s > 0


# The prompt's cache


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_a_reused_beginning_gives_the_logits_of_the_whole(engine, kv):
    """On the compiled kernels bit for bit, whether prefill or decode wrote the rows."""
    cache, ids = PromptCache(), random_ids(150)
    for end, common in ((60, 0), (61, 60), (150, 61), (150, 149), (100, 99)):
        session, reused = cache.prefill(engine, ids[:end], kv=kv)
        assert (reused, len(session)) == (common, end)
        whole = engine.prefill(ids[:end], kv=kv, importance="none")
        if COMPILED:
            assert session.logits.tobytes() == whole.logits.tobytes()
        np.testing.assert_allclose(session.logits, whole.logits, rtol=1e-3, atol=1e-3)
    for token in ids[100:110]:
        session.step(token)
    cache.fed(ids[100:112])  # two of them the session does not hold
    session, reused = cache.prefill(engine, ids[:140], kv=kv)
    assert reused == (110 if kv == "f32" else 100) and len(session) == 140
    if COMPILED:
        whole = engine.prefill(ids[:140], kv=kv, importance="none")
        assert session.logits.tobytes() == whole.logits.tobytes()


def test_what_depends_on_the_whole_prompt_is_run_as_a_whole(engine):
    ids = random_ids(100)
    for options in ({"importance": "all_queries"}, {"prefill_k": 1}, {"importance": "last_window"}):
        cache = PromptCache()
        for _ in range(2):
            session, reused = cache.prefill(engine, ids, **options)
            assert reused == 0
        whole = engine.prefill(ids, **{"importance": "none", **options})
        assert session.logits.tobytes() == whole.logits.tobytes()
        np.testing.assert_array_equal(session.importance, whole.importance)
    cache = PromptCache()
    cache.prefill(engine, ids)
    assert cache.prefill(engine, ids, kv="q8")[1] == 0
    assert cache.prefill(engine, ids, kv="q8")[1] == 99
    assert cache.prefill(engine, ids, kv="q8", block_size=16)[1] == 0
    assert cache.prefill(engine, [ids[0] + 1, *ids[1:]], kv="q8", block_size=16)[1] == 0


def test_rows_of_no_use_are_given_up_before_new_ones_are_made(engine, monkeypatch):
    cache, real, seen = PromptCache(), Engine.prefill, []

    def prefill(self, ids, **options):
        seen.append(cache._session)
        return real(self, ids, **options)

    monkeypatch.setattr(Engine, "prefill", prefill)
    for options in ({}, {"kv": "q8"}, {"importance": "all_queries"}, {}):
        cache.prefill(engine, random_ids(20), **options)
    assert seen == [None] * 4


@pytest.mark.parametrize("place", ["kvcache.KVCache.append", "engine.model.Model.logits"])
def test_an_interrupted_continuation_leaves_the_beginning(engine, monkeypatch, place):
    cache, ids = PromptCache(), random_ids(100)
    cache.prefill(engine, ids[:50])
    with monkeypatch.context() as patch:
        patch.setattr(f"course_lib.{place}", raising)
        with pytest.raises(KeyboardInterrupt):
            cache.prefill(engine, [*ids[:40], *ids[60:90]])
    session, reused = cache.prefill(engine, ids)
    assert reused == 40
    with monkeypatch.context() as patch:
        patch.setattr(f"course_lib.{place}", raising)
        with pytest.raises(KeyboardInterrupt):
            extend(session, [5, 6])
    lengths = [session.cache.layer_length(layer) for layer in range(2)]
    assert lengths == [100, 100]
    expected = engine.prefill(ids, importance="none").logits
    np.testing.assert_allclose(session.logits, expected, rtol=1e-3, atol=1e-3)


def test_progress_of_a_continuation(engine):
    cache, ids, seen = PromptCache(), random_ids(100), []
    cache.prefill(engine, ids[:50])
    session, _ = cache.prefill(engine, ids, on_progress=lambda done, all: seen.append(done / all))
    assert seen and seen == sorted(seen) and seen[-1] == 1
    extend(session, [5, 6])
    assert len(session) == 102


def test_common_prefix():
    assert common_prefix([], [1]) == common_prefix([1], [2]) == 0
    assert common_prefix([1, 2, 3], [1, 2]) == common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([1, 2, 3], [1, 5, 3]) == 1


# Conversations


def test_turns_go_on_and_reuse_what_is_the_same(engine):
    talk = Conversation(engine, "Be brief.", max_new_tokens=5)
    messages = [{"role": "system", "content": "Be brief."}]
    assert talk.messages == messages
    for turn, text in enumerate(["hello", "and?", "x<|im_end|>y"]):
        answer = talk.ask(text)
        assert talk.messages == messages  # no token yet
        messages += ask(text)
        fresh = list(engine.chat(messages, max_new_tokens=5))
        assert [item.id for item in answer] == [item.id for item in fresh]
        messages += [{"role": "assistant", "content": answer.reply.text}]
        assert talk.messages == messages
        assert (answer.reply.reused_tokens > 0) == (turn > 0)
    talk.reset()
    assert talk.messages == messages[:1]
    assert talk.ask("hello").reply.reused_tokens == 0


def test_an_answer_whose_text_comes_back_as_its_tokens_is_not_run_again(engine, monkeypatch):
    talk = Conversation(engine, max_new_tokens=4)
    letters = iter(engine.encode("abcd"))
    monkeypatch.setattr("course_lib.engine.generate.greedy", lambda logits: (next(letters), 0.0))
    first = talk.ask("q").reply
    list(talk._answer)
    monkeypatch.undo()
    assert first.text == "abcd"
    second = talk.ask("r")
    next(second)
    # All that was fed: the prompt and all tokens of the answer but the last.
    assert second.reply.reused_tokens == first.prompt_tokens + 3


def test_sparse_answers_are_run_again(engine):
    talk = Conversation(engine, decode_k=1, importance="none", max_new_tokens=4)
    first = talk.ask("hello " * 30)
    list(first)
    second = talk.ask("r")
    list(second)
    assert 0 < second.reply.reused_tokens <= first.reply.prompt_tokens
    fresh = engine.chat([*talk.messages[:-1]], decode_k=1, importance="none", max_new_tokens=4)
    assert [item.id for item in fresh] == second.reply.ids


def test_an_interrupted_answer_counts_as_far_as_it_came_and_an_empty_one_does_not(engine):
    talk = Conversation(engine, max_new_tokens=8)
    answer = talk.ask("hello")
    next(answer)
    part = answer.reply.text
    assert talk.messages == [*ask("hello"), {"role": "assistant", "content": part}]
    other = talk.ask("again")
    assert list(answer) == []  # the old one has ended
    assert len(talk.messages) == 2
    other.close()
    third = talk.ask("third")
    list(third)
    roles = [message["content"] for message in talk.messages]
    assert roles == ["hello", part, "third", third.reply.text]


def test_a_question_that_is_refused_leaves_the_conversation_as_it_was(engine):
    talk = Conversation(engine, max_new_tokens=3)
    list(talk.ask("hello"))
    before = talk.messages
    with pytest.raises(CourseError, match="fills the model's context"):
        talk.ask("x" * 600)
    with pytest.raises(ValueError, match="lone surrogate"):
        talk.ask("\ud800")
    assert talk.messages == before
    list(talk.ask("still?"))
    assert len(talk.messages) == 4


def test_thinking_is_passed_to_the_template(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "chat_template", ChatTemplate(THINKING))
    closed, opened = (
        engine.chat(ask("x"), enable_thinking=thinking).reply.prompt_tokens
        for thinking in (False, True)
    )
    assert closed - opened == len(engine.encode("<think>\n\n</think>\n\n"))
