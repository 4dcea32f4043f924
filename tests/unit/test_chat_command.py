"""`./course chat`: one answer, lines of a pipe, a terminal, Ctrl-C at each place, and mistakes."""

import argparse
import io
import subprocess
import sys

import pytest

from course_lib.cli import main
from course_lib.commands import chat, chat_terminal
from course_lib.engine import Conversation, Engine
from course_lib.engine.session import Session
from course_lib.errors import CourseError
from course_lib.paths import ROOT
from tests.signals import hear_ctrl_c
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, eos_token_id=None)
    return str(folder)


@pytest.fixture(scope="module")
def engine(model):
    return Engine.load(model)


def text_of(engine, *questions, system=None, **options):
    """What the engine answers in a conversation, one line each."""
    talk, lines = Conversation(engine, system, max_new_tokens=5, **options), []
    for question in questions:
        answer = talk.ask(question)
        list(answer)
        lines.append(answer.reply.text)
    return "".join(line + "\n" for line in lines)


def run(model, *argv):
    return main(["chat", "--model", model, "--max-new-tokens", "5", *argv])


@pytest.mark.parametrize(("argv", "options"), [
    ([], {}), (["--k", "1"], {"decode_k": 1}), (["--k", "auto", "--kv", "q8"], {"decode_k": "auto",
                                                                               "kv": "q8"}),
    (["--system", "Sing."], {"system": "Sing."}),
    (["--temperature", "1.5", "--seed", "7", "--top-k", "200", "--top-p", "0.99",
      "--min-p", "1e-4"], {"sampler": chat.Sampler(1.5, 200, 0.99, 1e-4, 7)}),
])
def test_one_answer(model, engine, argv, options, capsys):
    assert run(model, *argv, "hello " * 20) == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(engine, "hello " * 20, **options)
    assert captured.err.startswith("course: prompt ") and captured.err.count("\n") == 1
    assert "; answer 5 tokens, " in captured.err and captured.err.endswith("cut at its longest\n")
    assert ("1.0 blocks read" in captured.err) == (argv[:2] == ["--k", "1"])


def test_every_line_of_a_pipe_is_a_question(model, engine, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n and?  \n/reset\nhello\n/exit\nno\n"))
    assert run(model) == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(engine, "hello", "and?") + text_of(engine, "hello")
    lines = captured.err.splitlines()
    assert len(lines) == 3 and "reused" in lines[1] and "reused" not in lines[0] + lines[2]


def test_text_comes_as_it_is_generated(model, capsys, monkeypatch):
    """Before a token is fed, its text is out."""
    seen, real = [], Session.step

    def step(self, token, **options):
        seen.append(capsys.readouterr().out)
        return real(self, token, **options)

    monkeypatch.setattr(Session, "step", step)
    assert run(model, "hello") == 0
    assert len(seen) == 4 and all(len(piece) <= 4 for piece in seen) and any(seen)


def test_a_trace_has_a_line_for_every_token(model, engine, capsys):
    assert run(model, "--trace", "--k", "1", "hello " * 20) == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(engine, "hello " * 20, decode_k=1)
    lines = captured.err.splitlines()
    assert len(lines) == 6 and lines[5].startswith("course: prompt")
    assert [int(line.split()[0]) for line in lines[:5]] == list(range(5))
    assert "attention" not in lines[0] and "attention" in lines[1]
    assert all("blocks 1.0  (block×heads of 8: " in line for line in lines[1:5])
    assert run(model, "--trace", "hello") == 0
    assert "heads" not in capsys.readouterr().err


# Ctrl-C


def interrupt_step(monkeypatch, *at):
    """Ctrl-C in these steps of the process, counted from 1."""
    count, real = iter(range(1, 1000)), Session.step

    def step(self, token, **options):
        if next(count) in at:
            raise KeyboardInterrupt
        return real(self, token, **options)

    monkeypatch.setattr(Session, "step", step)


def test_ctrl_c_keeps_what_was_generated(model, engine, capsys, monkeypatch):
    interrupt_step(monkeypatch, 3)
    assert run(model, "hello") == 130
    captured = capsys.readouterr()
    talk = Conversation(engine, max_new_tokens=3)
    answer = talk.ask("hello")
    monkeypatch.undo()
    list(answer)
    # Half a character at its end would not have been shown.
    assert captured.out.rstrip("\n") == answer.reply.text.rstrip("\ufffd\n")
    assert "answer 3 tokens" in captured.err and captured.err.endswith("; interrupted\n")


def test_ctrl_c_in_prefill(model, capsys, monkeypatch):
    monkeypatch.setattr("course_lib.engine.model.Model.hidden", raising)
    assert run(model, "hello") == 130
    captured = capsys.readouterr()
    assert captured.out == "\n"
    assert captured.err == "course: prompt 21 tokens; answer 0 tokens; interrupted\n"


def raising(*arguments, **options):
    raise KeyboardInterrupt


def test_ctrl_c_in_a_pipe_leaves(model, engine, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand?\nmore\n"))
    interrupt_step(monkeypatch, 6)
    assert run(model) == 130
    assert capsys.readouterr().err.count("course: prompt") == 2


def terminal(monkeypatch, *typed):
    """A terminal at which these lines and exceptions are typed; returns what was asked."""
    lines = iter(typed)

    def answer(prompt):
        line = next(lines)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys, "stdin", argparse.Namespace(isatty=lambda: True))
    return lines


def test_a_conversation_on_a_terminal(model, engine, capsys, monkeypatch):
    terminal(monkeypatch, "hello", "", "and?", "/reset", "/frobnicate", "hello", "/exit", "no")
    assert run(model) == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(engine, "hello", "and?") + text_of(engine, "hello")
    assert "course: there is no /frobnicate; /reset starts anew" in captured.err


def test_the_end_of_the_input_leaves(model, capsys, monkeypatch):
    terminal(monkeypatch, "hello", EOFError)
    assert run(model) == 0


def test_ctrl_c_ends_the_answer_and_twice_leaves(model, engine, capsys, monkeypatch):
    rest = terminal(monkeypatch, "hello", "and?", KeyboardInterrupt, "more", KeyboardInterrupt,
                    KeyboardInterrupt, "never")
    interrupt_step(monkeypatch, 3)  # of the first answer's four
    assert run(model) == 130
    assert list(rest) == ["never"]
    captured = capsys.readouterr()
    assert captured.err.count("course: prompt") == 3
    assert captured.err.count("course: Ctrl-C again, or /exit, leaves") == 2
    assert captured.err.count("; interrupted\n") == 1


def test_ctrl_c_after_an_interrupted_answer_leaves(model, monkeypatch):
    rest = terminal(monkeypatch, "hello", KeyboardInterrupt, "never")
    interrupt_step(monkeypatch, 2)
    assert run(model) == 130
    assert list(rest) == ["never"]


def test_an_interrupted_answer_stays_in_the_conversation(engine, monkeypatch, capsys):
    talk = Conversation(engine, max_new_tokens=5)
    terminal(monkeypatch, "hello", "and?", "/exit")
    interrupt_step(monkeypatch, 3)
    assert chat_terminal.converse(talk, False) == 0
    messages = talk.messages
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    whole = Conversation(engine, max_new_tokens=3).ask("hello")
    list(whole)
    assert messages[1]["content"] == whole.reply.text


def test_a_full_context_is_said_and_the_conversation_goes_on(model, capsys, monkeypatch):
    terminal(monkeypatch, "x" * 600, "hello", "/exit")
    assert run(model) == 0
    captured = capsys.readouterr()
    assert "fills the model's context of 512: start" in captured.err
    assert captured.err.count("course: prompt") == 1


# Mistakes


@pytest.mark.parametrize(("argv", "message"), [
    (["--temperature", "-1", "x"], "argument --temperature: must be 0 (greedy) or from"),
    (["--temperature", "nan", "x"], "argument --temperature: must be a finite number, not nan"),
    (["--temperature", "1", "--top-k", "0", "x"], "argument --top-k: must be an integer of at"),
    (["--temperature", "1", "--top-p", "2", "x"], "argument --top-p: must be above 0 and at most"),
    (["--temperature", "1", "--min-p", "2", "x"], "argument --min-p: must be from 0 to 1, not 2"),
    (["--temperature", "1", "--seed", "-1", "x"], "argument --seed: must be an integer from 0"),
    (["--temperature", "hot", "x"], "argument --temperature: invalid float value: 'hot'"),
    (["--top-k", "3", "x"], "--top-k needs --temperature above 0"),
    (["--seed", "3", "x"], "--seed needs --temperature above 0"),
    (["--k", "0", "x"], "argument --k: must be an integer of at least 1, not '0'"),
    (["--weights", "q2", "x"], "argument --weights: invalid choice: 'q2'"),
    (["--max-new-tokens", "0", "x"], "argument --max-new-tokens: must be"),
    (["--think", "x"], "this model's template has no switch for thinking; omit --think"),
    ([""], "PROMPT is empty"),
    ([" \n"], "PROMPT is empty"),
    (["a\udce9"], "PROMPT is not UTF-8 text"),
    (["--system", "\udce9", "x"], "--system is not UTF-8 text"),
    (["x" * 600], ""),
    (["--modle", "y", "x"], "unknown option --modle; did you mean --model?"),
])
def test_a_mistake_is_one_line_and_2(model, argv, message, capsys):
    assert run(model, *argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("course: chat: " if message else "course: the conversation of ")
    assert message in captured.err


def test_a_model_without_a_template_is_one_line_and_2(tmp_path, capsys):
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert run(str(tmp_path), "x") == 2
    assert capsys.readouterr().err == (
        "course: chat: this checkpoint has no chat template (chat_template.jinja, or "
        "chat_template in tokenizer_config.json): copy that file too, or choose an instruct or "
        "chat checkpoint\n"
    )
    assert run(str(tmp_path / "nothing"), "x") == 2
    assert "nothing" in capsys.readouterr().err


def test_input_that_is_no_text(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n\xff\n"), "utf-8"))
    assert run(model) == 2
    assert capsys.readouterr().err.endswith("the input is not UTF-8 text; write it in UTF-8\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\udcff\n"))
    assert run(model) == 2
    assert "not UTF-8 text" in capsys.readouterr().err


def test_a_line_without_end_is_not_read_for_ever(model, capsys, monkeypatch):
    monkeypatch.setattr(chat_terminal, "LONGEST", 10)
    monkeypatch.setattr(sys, "stdin", io.StringIO("0123456789\n\n"))
    assert run(model) == 2
    assert "a line of the input is longer than 10 characters" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("012345678\n\nabc"))
    assert run(model) == 0


def test_the_shipped_model_says_that_it_does_not_chat(capsys):
    assert main(["chat", "--max-new-tokens", "2", "What is Zara's favorite food?"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == f"course: {chat.SHIPPED}" and "no chat model: give a chat model" in first


def test_a_terminal_is_sent_no_control_characters(monkeypatch):
    text = "a\x1b[2J\x07\x9b b\n\tc👩‍🚀é"
    assert chat_terminal._printable(text) == text  # a pipe or file gets the text itself
    monkeypatch.setattr(sys, "stdout", argparse.Namespace(isatty=lambda: True))
    assert chat_terminal._printable(text) == "a·[2J·· b\n\tc👩‍🚀é"


def test_ctrl_c_from_outside_ends_the_answer(model):
    """A real signal in a process of its own: the text so far, its line, 130."""
    code = (
        "import os, signal, sys; from course_lib import cli\n"
        "from course_lib.engine.session import Session\n"
        "real = Session.step\n"
        "def step(self, token, **options):\n"
        "    if len(self) > 25: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(self, token, **options)\n"
        "Session.step = step\n"
        f"sys.exit(cli.main(['chat', '--model', {model!r}, 'hello']))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                            preexec_fn=hear_ctrl_c)
    assert result.returncode == 130, result.stderr
    assert result.stderr.endswith("; interrupted\n") and "Traceback" not in result.stderr


def test_a_conversation_needs_a_template_before_any_question(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    with pytest.raises(CourseError, match="no chat template"):
        chat.check_template(engine, False)
