"""Running a chat template, which is a program from a checkpoint: no way out, and an end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 10.0
"""After them a template is stopped; real ones take milliseconds."""
MAX_CHARACTERS = 1 << 24
"""Far more than any context holds."""
MAX_SOURCE = 1 << 18
"""Characters of a template: real ones have some 10,000; a million take minutes to compile."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, with limits.

    The clock is looked at in every round of a loop and at every call, so that neither nested loops
    that write nothing nor macros that call each other run on. Products and powers are checked
    before they are computed. What remains: one operation that makes something huge in another way
    (`"%999999999d" % 1`, text doubled by `~`) takes its memory before its size is seen, and one
    filter that goes over something huge takes its time.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        self.filters["tojson"] = _tojson
        self.filters["_timed"] = self._timed
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]  # text at random, any amount of it
        self._deadline = 0.0

    def template(self, source: str) -> Template:
        """Compile `source`; any Exception means that it is not valid."""
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"it is longer than {MAX_SOURCE} characters")
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_timed", [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def run(self, template: Template, variables: dict[str, Any]) -> str:
        """What `template` writes; any Exception is its failure, TemplateError at a limit."""
        self._deadline = time.monotonic() + SECONDS
        pieces, size = [], 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise TemplateError(f"it writes more than {MAX_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._look_at_the_clock()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            size = _bits(left) * right if isinstance(right, int) else 0
        elif isinstance(left, int) and isinstance(right, int):
            size = _bits(left) + _bits(right)
        else:  # a text or list, repeated
            size = max(
                (len(a) * n for a, n in ((left, right), (right, left))
                 if isinstance(n, int) and hasattr(a, "__len__")), default=0,
            )
        if size > MAX_CHARACTERS:
            raise TemplateError(f"a result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def _timed(self, items: Iterable) -> Iterator:
        for item in items:
            self._look_at_the_clock()
            yield item

    def _look_at_the_clock(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateError(f"it does not end within {SECONDS:g} seconds")


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 0


class _GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %} marks answers for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; prompts are not HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
