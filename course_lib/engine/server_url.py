"""The base URL of an OpenAI-compatible server, from what people paste."""

from __future__ import annotations

import ipaddress

import httpx

from course_lib.errors import CourseError

KEY_VARIABLE = "COURSE_API_KEY"
ROUTE = "/chat/completions"


def base_url(url: str) -> str:
    """`url` ending in /v1; CourseError, which repeats no password, for one that cannot be meant."""
    try:
        parsed = httpx.URL(url.strip())
        meant = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 1) < 65536
    except (httpx.InvalidURL, ValueError):  # an IDNAError is a ValueError
        meant = False
    if not meant:
        raise CourseError("the server's URL must be like http://127.0.0.1:8080, with http:// or "
                          "https:// in front")
    if parsed.userinfo:
        raise CourseError(f"the URL of {parsed.host} holds a name or password: leave it out and "
                          f"give the key in {KEY_VARIABLE}")
    if parsed.query or parsed.fragment:
        raise CourseError(f"the URL of {parsed.host} holds a query or fragment: give the base URL, "
                          "like http://127.0.0.1:8080")
    path = parsed.path.rstrip("/").removesuffix(ROUTE).rstrip("/")
    path = path if path.endswith("/v1") else path + "/v1"
    return str(parsed.copy_with(path=path))


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
