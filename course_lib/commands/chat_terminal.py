"""A conversation on a terminal or in a pipe: questions in, text out, what it cost on stderr."""

from __future__ import annotations

import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import chain

from course_lib.commands.phase_bar import PhaseBar
from course_lib.commands.shown import shown
from course_lib.engine import Conversation, GeneratedToken, Reply
from course_lib.errors import CourseError

LONGEST = 1 << 24  # characters of a line, far more than any context holds
HINT = "course: /reset starts anew, /exit leaves, Ctrl-C ends an answer"


def answer_one(talk: Conversation, question: str, trace: bool) -> int:
    """Print the answer to one question: 0, or 130 if Ctrl-C ended it."""
    return 0 if _answer(talk, question, trace) else 130


def answer_lines(talk: Conversation, trace: bool) -> int:
    """Answer every line of the standard input: 0, or 130 after Ctrl-C."""
    for question in _lines():
        if question == "/exit":
            break
        if question == "/reset":
            talk.reset()
        elif not _answer(talk, question, trace):
            return 130
    return 0


def converse(talk: Conversation, trace: bool) -> int:
    """Ask and answer until /exit or the end of the input (0), or Ctrl-C twice in a row (130)."""
    try:
        import readline  # noqa: F401 - its import makes input() edit lines and remember them
    except ImportError:  # Windows has none
        pass
    print(HINT, file=sys.stderr)
    pressed = False
    while True:
        try:
            question = input("> " if sys.stdout.isatty() else "").strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except UnicodeDecodeError:
            raise CourseError("chat: the input is not UTF-8 text; write it in UTF-8") from None
        except KeyboardInterrupt:
            print("\ncourse: Ctrl-C again, or /exit, leaves" if not pressed else "",
                  file=sys.stderr)
            if pressed:
                return 130
            pressed = True
            continue
        pressed = False
        if question == "/exit":
            return 0
        if question == "/reset":
            talk.reset()
        elif question.startswith("/") and question[1:].isalpha():
            print(f"course: there is no {question}; {HINT[8:]}", file=sys.stderr)
        elif question:
            try:
                pressed = not _answer(talk, question, trace)
            except CourseError as error:  # such as a context that is full: /reset helps
                print(f"course: {error}", file=sys.stderr)


def _lines() -> Iterator[str]:
    """The lines of the standard input that are not blank."""
    try:
        while sys.stdin is not None and (line := sys.stdin.readline(LONGEST + 1)):
            if len(line) > LONGEST:
                raise CourseError(f"chat: a line of the input is longer than {LONGEST} characters; "
                                  "write questions on lines of their own")
            if line.strip():
                yield line.strip()
    except UnicodeDecodeError:
        raise CourseError("chat: the input is not UTF-8 text; write it in UTF-8") from None


def _answer(talk: Conversation, question: str, trace: bool) -> bool:
    """Print an answer as it comes, then a line of what it cost; False if Ctrl-C ended it."""
    try:
        question.encode("utf-8")
    except UnicodeEncodeError:
        raise CourseError("chat: the input is not UTF-8 text; write it in UTF-8") from None
    bar: PhaseBar | None = None

    def on_progress(done: int, total: int) -> None:
        if bar is not None:
            bar("prefill", done, total)

    shows_bar = sys.stderr.isatty()
    answer, ended = talk.ask(question, on_progress=on_progress if shows_bar else None), True
    try:
        bar = PhaseBar(answer.reply.prompt_tokens - answer.reply.reused_tokens)
        with closing(bar):
            first = next(answer, None)
        for count, token in enumerate(chain([first] if first else [], answer)):
            _show(count, token, trace)
    except KeyboardInterrupt:
        answer.close()
        ended = False
    if trace:
        sys.stdout.write(_printable(answer.reply.text))
    print(flush=True)
    print(_cost(answer.reply), file=sys.stderr)
    return ended


def _show(count: int, token: GeneratedToken, trace: bool) -> None:
    if trace:
        print(_trace(count, token), file=sys.stderr)
    else:
        sys.stdout.write(_printable(token.text))
        sys.stdout.flush()


def _trace(count: int, token: GeneratedToken) -> str:
    """One line about a token."""
    text = f"{count:>5}  {shown(token.text)!r:<16} margin {token.margin:7.3f}  {token.ms:8.1f} ms"
    if token.attn_ms is None:
        return text
    text += f"  attention {token.attn_ms:7.2f} ms  blocks {token.blocks_read:.1f}"
    chosen = [head.ids.tolist() for layer in token.selections or [] for head in layer]
    most = Counter(block for ids in chosen for block in ids).most_common(8)
    heads = " ".join(f"{block}×{times}" for block, times in sorted(most))
    return f"{text}  (block×heads of {len(chosen)}: {heads})" if chosen else text


def _cost(reply: Reply) -> str:
    """One line about an answer."""
    reused = f" ({reply.reused_tokens} reused)" if reply.reused_tokens else ""
    parts = [f"prompt {reply.prompt_tokens} tokens{reused}"]
    if reply.prefill_tokens_per_s is not None:
        parts[0] += f", {reply.prefill_tokens_per_s:.1f}/s"
    parts.append(f"answer {len(reply.ids)} tokens")
    if reply.decode_tokens_per_s is not None:
        blocks = sum(reply.blocks_read) / len(reply.blocks_read)
        parts[1] += f", {reply.decode_tokens_per_s:.1f}/s, {blocks:.1f} blocks read a token"
    why = {"length": "cut at its longest", "interrupted": "interrupted"}.get(reply.stopped)
    return "course: " + "; ".join(parts + ([why] if why else []))


def _printable(text: str) -> str:
    """Text for a terminal, which obeys control characters: those but line ends as a dot."""
    if not sys.stdout.isatty():
        return text
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else "·" for c in text
    )
