"""`./course needle --url`: the same prompts against a server on this machine."""

from __future__ import annotations

import json

import pytest

from course_lib.cli import main
from course_lib.engine.client import Client
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.server_needle import run_server_trials, server_result
from tests.chat_server import JSON, chat_server, send, stream

SHORT = ["--tokens", "320"]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("COURSE_API_KEY", raising=False)
    with chat_server() as made:
        made.models = ["qwen3-2b"]
        made.answers(stream("Zara's favorite food", " is ramen.", counts=(411, 9)))
        yield made


def needle(server, capsys, *argv):
    code = main(["needle", "--url", server.url, *SHORT, *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_report_shows_the_arm_and_both_counts(server, capsys):
    code, out, err = needle(server, capsys)
    assert code == 0 and err == ""
    assert "qwen3-2b at " + server.url in out
    assert "320 by the tokenizer of data/models/needle-qwen3, 411 by the server's own count" in out
    row = out.splitlines()[-1].split()
    assert row[:2] == ["server", "1.000"] and out.endswith("Zara's favorite food is ramen.\n")
    (request,) = server.requests
    assert request["model"] == "qwen3-2b" and request["max_tokens"] == 32
    assert request["messages"][0]["content"].count("Zara's favorite food is ramen.") == 1


def test_json(server, capsys):
    code, out, _ = needle(server, capsys, "--json", "--prompts", "2", "--seed", "3",
                          "--position", "1", "--max-new-tokens", "9", "--served-model", "mine")
    result = json.loads(out)
    (arm,) = result["arms"]
    assert code == 0 and arm["k"] == "server" and arm["recall"] == 0.0
    assert arm["prompt_tokens"] == [411, 411] and arm["completion_tokens"] == [9, 9]
    assert arm["first_token_s"] > 0 and arm["texts"] == ["Zara's favorite food is ramen."] * 2
    assert result["served_model"] == "mine" and result["prompts"] == 2 and result["seed"] == 3
    first, second = (request["messages"][0]["content"] for request in server.requests)
    assert first != second and server.requests[0]["max_tokens"] == 9


def test_prompts_are_those_of_a_local_run(server, shipped_engine):
    options = NeedleOptions(tokens=320, prompts=2, seed=1)
    with Client(server.url) as client:
        trials = list(run_server_trials(client, shipped_engine.tokenizer, options))
    asked = [request["messages"][0]["content"] for request in server.requests]
    assert asked == [prompt_of(shipped_engine, options, index).content for index in range(2)]
    assert [trial.recalled for trial in trials] == [False, False]


def test_the_template_is_with_instructions_unless_model_or_template_say_otherwise(server, capsys):
    for argv, instructed in (([], True), (["--template", "chat"], False),
                             (["--model", "data/models/needle-qwen3"], False)):
        needle(server, capsys, *argv)
        content = server.requests[-1]["messages"][0]["content"]
        assert ("Answer in one short sentence" in content) is instructed


def test_the_first_token_counts_here_and_thinking_does_not(server, shipped_engine):
    thought = {"choices": [{"delta": {"reasoning_content": "ramen"}}]}
    options = NeedleOptions(tokens=320)

    def recall(*parts):
        server.answers(*parts)
        with Client(server.url) as client:
            trials = list(run_server_trials(client, shipped_engine.tokenizer, options))
        return server_result(trials).recall

    assert recall(stream("ramen")) == 1.0
    assert recall(f"data: {json.dumps(thought)}\n\n".encode(), stream("I do not know.")) == 0.0


def test_a_server_that_streams_nothing_and_counts_nothing(server, capsys):
    server.answers(json.dumps({"choices": [{"message": {"content": "\x1b[31m ramen\n"}}]}).encode(),
                   kind=JSON)
    _, out, _ = needle(server, capsys)
    assert "unknown by the server's own count" in out
    assert out.splitlines()[-1].split() == ["server", "1.000", "-", "-", "·[31m", "ramen⏎"]


@pytest.mark.parametrize("json_wanted", [True, False])
@pytest.mark.parametrize("failure, code, words", [
    (KeyboardInterrupt, 130, "course: interrupted; kept 1 of 3 prompts"),
    (None, 1, "HTTP 500: look at its log (kept 1 of 3 prompts)"),
])
def test_finished_prompts_are_kept(server, capsys, monkeypatch, failure, code, words, json_wanted):
    def answer(handler, body):
        if len(server.requests) > 1:
            send(handler, status=500)
        else:
            send(handler, stream("ramen"))

    server.answer = answer
    if failure:
        def chat(self, *args, chat=Client.chat):
            if server.requests:
                raise failure
            return chat(self, *args)

        monkeypatch.setattr(Client, "chat", chat)
    got, out, err = needle(server, capsys, "--prompts", "3", *["--json"] * json_wanted)
    assert got == code and words in err and err.count("\n") == 1
    if json_wanted:
        assert json.loads(out)["prompts"] == 1
    else:
        assert ": 1 prompt, " in out


def test_a_first_prompt_that_fails_is_one_sentence(server, capsys):
    server.answers(status=500)
    code, out, err = needle(server, capsys)
    assert code == 2 and out == "" and err.startswith(f"course: {server.url}/v1/chat/completions")


@pytest.mark.parametrize("argv, words", [
    (["--k", "8"], "--k is for an engine here"),
    (["--kv", "f32"], "--kv is for an engine here"),
    (["--prefill-k", "4"], "--prefill-k is for"),
    (["--prefill-group", "4"], "--prefill-group is for"),
    (["--one-flag"], "--one-flag is for"),
    (["--importance", "none"], "--importance is for"),
    (["--window", "4"], "--window is for"),
    (["--weights", "f32"], "--weights is for"),
    (["--template", "bare"], "choose chat or instruct"),
    (["--timeout", "0"], "seconds above 0"),
    (["--timeout", "inf"], "seconds above 0"),
    (["--timeout", "1e300"], "seconds above 0, at most 1000000"),
    (["--model", "no-such-folder"], "no-such-folder"),
    (["--tokens", "12"], "needs at least"),
])
def test_what_does_not_go_together_is_one_sentence(server, capsys, argv, words):
    code, out, err = needle(server, capsys, *argv)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1
    assert not server.requests


def test_a_url_that_cannot_be_meant(capsys):
    assert main(["needle", "--url", "127.0.0.1:80"]) == 2
    assert "like http://127.0.0.1:8080" in capsys.readouterr().err
