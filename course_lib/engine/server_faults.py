"""What can go wrong at a server, each as one sentence that names its URL and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from course_lib.engine.completions import (
    REPORTS,
    AnswerError,
    error_text,
    json_object,
    shortened,
)
from course_lib.engine.server_url import KEY_VARIABLE
from course_lib.errors import CourseError

CONNECT_TIMEOUT = 10.0


@dataclass(frozen=True)
class Faults:
    """The errors of one route: its URL, the key that no sentence repeats, the seconds waited."""

    url: str
    key: str
    timeout: float

    def fault(self, problem: str) -> CourseError:
        """The error for `problem`."""
        text = f"{self.url} {problem}"
        return CourseError(text.replace(self.key, "***") if self.key else text)

    def silence(self) -> CourseError:
        """The error for a server that sends no text."""
        return self.fault(
            f"sent no text for {self.timeout:g} s: give it longer with --timeout, or ask with a "
            "shorter prompt"
        )

    def refusal(self, status: int, body: bytes, location: str = "") -> CourseError:
        """The error for an HTTP status other than 200."""
        if 300 <= status < 400:
            return self.fault(
                f"redirects to {shortened(location)}, which is not followed: give that server's "
                "URL if you trust it"
            )
        key = f"set {KEY_VARIABLE} to a key that it takes"
        remedy = {
            401: key,
            403: key,
            404: "check the URL and the model's name (--served-model)",
            413: "ask with a shorter prompt (--tokens)",
            429: "wait and try again",
        }.get(status, "look at its log" if status >= 500 else "change what it names")
        said = _said(body)
        return self.fault(f"answers HTTP {status}{f' ({said})' if said else ''}: {remedy}")

    @contextmanager
    def said_plainly(self) -> Iterator[None]:
        """What goes wrong inside, as a CourseError."""
        try:
            yield
        except AnswerError as error:
            raise self.fault(f"{error}: look at its log") from None
        except RecursionError:
            raise self.fault("sends JSON that is nested too deeply: look at its log") from None
        except httpx.ConnectTimeout:
            raise self.fault(
                f"is not reached in {min(CONNECT_TIMEOUT, self.timeout):g} s: check the address "
                "and the network"
            ) from None
        except httpx.TimeoutException:
            raise self.silence() from None
        except httpx.ConnectError as error:
            raise self.fault(
                f"cannot be reached ({shortened(str(error))}): start the server, or check its "
                "address and port"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.fault(
                f"broke off ({shortened(str(error)) or type(error).__name__}): look at its log "
                "and ask again"
            ) from None


def _said(body: bytes) -> str:
    """The message in the body of a refusal; none where it is no JSON object (a proxy's page)."""
    try:
        return error_text(json_object(body))
    except AnswerError as error:
        return str(error).removeprefix(REPORTS) if str(error).startswith(REPORTS) else ""
