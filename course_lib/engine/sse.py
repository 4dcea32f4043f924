"""Server-sent events: the lines a streaming server sends, as the data of whole events.

Source: the HTML standard, "Server-sent events", parsing an event stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_LINE_END = re.compile(rb"\r\n|\n|\r")


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The lines of a byte stream that ends them with LF, CRLF or CR, however it was cut.

    A line is decoded when it is whole, so a character split over two chunks comes out right; what
    is not UTF-8 becomes U+FFFD, a byte order mark at the start is dropped. The last line counts
    without an end too.
    """
    held: list[bytes] = []
    first, after_cr = True, False
    for chunk in chunks:
        if after_cr and chunk.startswith(b"\n"):  # the second half of a CRLF
            chunk = chunk[1:]
            after_cr = False
        if not chunk:
            continue
        after_cr = chunk.endswith(b"\r")
        rest, *others = _LINE_END.split(chunk)
        held.append(rest)
        for other in others:
            yield _text(b"".join(held), first)
            held, first = [other], False
    if any(held):
        yield _text(b"".join(held), first)


def _text(line: bytes, first: bool) -> str:
    text = line.decode("utf-8", "replace")
    return text.removeprefix("\ufeff") if first else text


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of each event: its `data:` lines joined; comments and other fields are left out.

    An event ends at an empty line. Unlike a browser we also take the one that the stream's end
    cuts off: small servers forget the last empty line, and a torn one is no JSON anyway.
    """
    data: list[str] = []
    for line in lines(chunks):
        if not line:
            if data:
                yield "\n".join(data)
            data = []
            continue
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
    if data:
        yield "\n".join(data)
