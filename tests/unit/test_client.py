"""The client of /v1/chat/completions, against a server on this machine that can do anything."""

from __future__ import annotations

import gzip
import json
import socket
import sys
import threading
import time
from itertools import count
from types import SimpleNamespace

import httpx
import pytest

from course_lib.engine import client
from course_lib.engine.client import Client
from course_lib.engine.completions import Gathered, Part, joined
from course_lib.engine.server_url import base_url, is_loopback
from course_lib.errors import CourseError
from tests.chat_server import JSON, chat_server, chunk, event, send, stream, usage

ASK = [{"role": "user", "content": "What is Zara's favorite food?"}]


@pytest.fixture
def server():
    with chat_server() as made:
        yield made


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("COURSE_API_KEY", raising=False)


def ask(server, *, stream=True, max_tokens=8, timeout=5.0, **options):
    with Client(server.url, timeout=timeout, **options) as asked:
        return asked.chat(ASK, max_tokens, stream=stream).result()


def refused(server, **options) -> str:
    """The one sentence that asking ends with."""
    with pytest.raises(CourseError) as caught:
        ask(server, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.startswith(server.url) and ": " in sentence
    return sentence


def test_pieces_arrive_in_order_with_times_and_the_result_sums_them_up(server):
    gate = threading.Event()

    def answer(handler, body):
        send(handler, event(chunk("Zara's ")))
        gate.wait(5)
        for value in (chunk("favorite"), chunk(" 拉面"), chunk(reason="length"), usage(40, 3)):
            handler.wfile.write(event(value))
        handler.wfile.write(event("[DONE]"))

    server.answer = answer
    with Client(server.url) as asked:
        reply = asked.chat(ASK, 3)
        first = next(iter(reply))
        assert first.text == "Zara's "  # it came while the server was still writing
        gate.set()
        rest = list(reply)
        result = reply.result()
    assert [piece.text for piece in rest] == ["favorite", " 拉面"]
    times = [piece.seconds for piece in (first, *rest)]
    assert 0 < times[0] <= times[1] <= times[2] <= result.seconds
    assert result.text == "Zara's favorite 拉面" and result.finish_reason == "length"
    assert (result.prompt_tokens, result.completion_tokens) == (40, 3)
    assert result.first_token_s == times[0]
    assert result.tokens_per_s == pytest.approx(2 / (times[2] - times[0]))


def test_the_request_is_the_standard_one_and_asks_for_counts_and_no_thinking(server):
    ask(server, max_tokens=7, model="qwen")
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["messages"] == ASK and request["model"] == "qwen"
    assert (request["max_tokens"], request["temperature"], request["stream"]) == (7, 0.0, True)
    assert request["stream_options"] == {"include_usage": True}
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert not any(name.lower() == "authorization" for name in server.headers[0])


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_refuses_optional_fields_is_asked_without(server, status):
    def answer(handler, body):
        if "stream_options" in body:
            send(handler, b'{"error": "unknown field"}', kind=JSON, status=status)
        else:
            send(handler, stream("fine"))

    server.answer = answer
    assert ask(server, model="m").text == "fine"
    assert set(server.requests[1]) == {
        "model", "messages", "max_tokens", "temperature", "stream", "path"}


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    def answer(handler, body):
        send(handler, b'{"error": {"message": "bad key sk-123"}}', kind=JSON, status=401)

    server.answer = answer
    sentence = refused(server, api_key="sk-123")
    assert "bad key ***" in sentence and "COURSE_API_KEY" in sentence
    monkeypatch.setenv("COURSE_API_KEY", "from-environment")
    refused(server)
    keys = [h["Authorization"] for h in server.headers if "Authorization" in h]
    assert keys[0] == "Bearer sk-123" and keys[-1] == "Bearer from-environment"


@pytest.mark.parametrize("key", ["a b", "a\nb", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused(key):
    with pytest.raises(CourseError, match="COURSE_API_KEY") as caught:
        Client("http://127.0.0.1:1", api_key=key)
    assert key not in str(caught.value)


def test_the_one_served_model_is_used_and_of_several_one_must_be_chosen(server):
    server.models = ["qwen3-2b"]
    ask(server)
    assert server.requests[0]["model"] == "qwen3-2b"
    server.models = ["a", "b"]
    assert "serves 2 models (a, b): choose one with --served-model" in refused(server)
    server.models = None
    ask(server)
    assert "model" not in server.requests[-1]


@pytest.mark.parametrize("counts", [None, {"prompt_tokens": 5, "completion_tokens": 2}])
@pytest.mark.parametrize("asked", [True, False])
def test_an_answer_in_one_piece(server, counts, asked):
    message = {"choices": [{"message": {"role": "assistant", "content": "It is ramen."},
                            "finish_reason": "stop"}], "usage": counts}
    server.answers(json.dumps(message).encode(), kind=JSON + "; charset=utf-8")
    result = ask(server, stream=asked)
    assert result.text == "It is ramen." and result.finish_reason == "stop"
    assert result.first_token_s is None and result.tokens_per_s is None and result.seconds > 0
    assert result.completion_tokens == (counts and 2)
    assert ("stream_options" in server.requests[0]) is asked


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_multi_byte_characters_comments_and_line_ends_in_any_cut(server, size):
    body = (b": ping\r\n\r\n" + event(chunk("拉")) + event(chunk("面 😀")).replace(b"\n", b"\r\n")
            + event(chunk(reason="stop")) + b"data: [DONE]")
    server.answers(*(body[i : i + size] for i in range(0, len(body), size)))
    assert ask(server).text == "拉面 😀"


def test_thinking_is_kept_apart(server):
    thought = {"choices": [{"delta": {"content": None, "reasoning_content": "ramen?"}}]}
    server.answers(event(thought), stream("It is tea."))
    result = ask(server)
    assert (result.text, result.thinking) == ("It is tea.", "ramen?")


def test_no_content_type_is_read_as_asked_and_gzip_is_unpacked(server):
    server.answers(stream("plain"), kind=None)
    assert ask(server).text == "plain"
    server.answers(gzip.compress(stream("small")), **{"Content-Encoding": "gzip"})
    assert ask(server).text == "small"


GOOD = event(chunk("Zara"))


@pytest.mark.parametrize("parts, options, words", [
    ([b"<html>"], {"kind": "text/html"}, "answers text/html, neither JSON nor an event stream"),
    ([b"<html>"], {"kind": JSON}, "no JSON (<html>)"),
    ([], {"kind": JSON}, "no JSON ()"),
    ([GOOD, b"data: {oh\n\n"], {}, "no JSON ({oh)"),
    ([GOOD, b"data: " + b"[" * 100_000 + b"\n\n"], {}, "no JSON"),
    ([b"data: 3\n\n"], {}, "JSON that is no object (3)"),
    ([b"data: {}\n\n"], {}, "no choices"),
    ([event({"choices": [3]})], {}, "no choices"),
    ([event({"choices": [{"delta": {"content": 3}}]})], {}, "content that is no text"),
    ([GOOD, event({"error": {"message": "out of memory"}})], {}, "an error: out of memory"),
    ([b"data: " + json.dumps({"error": "so\nit\x1b[31m is"}).encode()], {}, "so it [31m is"),
    ([GOOD], {}, "ended its stream before the answer was whole"),
    ([], {}, "ended its stream before the answer was whole"),
    ([b"not gzip"], {"Content-Encoding": "gzip"}, "broke off"),
    ([GOOD], {"Content-Length": "999"}, "broke off"),
    ([b'{"error": {"message": "no such thing"}}'], {"status": 404, "kind": JSON},
     "HTTP 404 (no such thing): check the URL"),
    ([b'{"detail": "busy"}'], {"status": 429, "kind": JSON}, "HTTP 429 (busy): wait"),
    ([b"<html>nginx"], {"status": 502, "kind": "text/html"}, "HTTP 502: look at its log"),
    ([b'{"message": "the context is 512"}'], {"status": 400, "kind": JSON}, "the context is 512"),
    ([], {"status": 204}, "HTTP 204"),
    ([], {"status": 307, "Location": "http://other.example/v1"},
     "redirects to http://other.example/v1, which is not followed"),
])
def test_what_goes_wrong_is_one_sentence(server, parts, options, words):
    server.answers(*parts, **options)
    assert words in refused(server)


def test_a_redirect_takes_the_key_nowhere(server):
    with chat_server() as other:
        server.answers(status=307, Location=other.url + "/v1/chat/completions")
        refused(server, api_key="secret")
        assert not other.requests and not other.headers


def test_endless_answers_end(server):
    def endless(part):
        def answer(handler, body):
            send(handler)
            while True:
                handler.wfile.write(part)
        return answer

    server.answer = endless(event(chunk("again and " * 2000)))
    assert "does not end after 2 tokens" in refused(server, max_tokens=2)
    server.answer = endless(b": ping " * 4000 + b"\n")
    assert "does not end after 2 tokens" in refused(server, max_tokens=2)
    server.answer = endless(b"x" * 20_000)
    assert "does not end after 2 tokens" in refused(server, max_tokens=2)


def test_silence_is_given_up_also_where_it_is_filled_with_comments(server):
    stop = threading.Event()

    def silent(handler, body):
        stop.wait(5)

    def trickle(handler, body):
        send(handler)
        while not stop.wait(0.02):
            handler.wfile.write(b": ping\n\n")

    def failure(handler, body):
        send(handler, status=500)
        while not stop.wait(0.02):
            handler.wfile.write(b"x")

    for answer in (silent, trickle, failure):
        server.answer = answer
        started = time.perf_counter()
        assert "sent no text for 0.1 s: give it longer with --timeout" in refused(
            server, timeout=0.1)
        assert time.perf_counter() - started < 4
    stop.set()


def test_json_that_is_nested_too_deeply(server, monkeypatch):
    """How deep json.loads goes, and json.dumps, depends on the Python."""
    def deep(value):
        raise RecursionError

    monkeypatch.setattr(client, "part_of", deep)
    assert "sends JSON that is nested too deeply" in refused(server)


def test_a_long_answer_is_no_silence(server, monkeypatch):
    clock = count(0.0, 3.0)  # seconds pass at every look
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    server.answers(*(event(chunk("a")) for _ in range(9)), stream("."))
    result = ask(server, timeout=10.0)
    assert result.text == "a" * 9 + "." and result.seconds > 20


def test_a_stream_may_end_with_its_reason_alone(server):
    server.answers(event(chunk("It is ramen.")), event(chunk(reason="length")))
    assert ask(server).finish_reason == "length"


def test_a_server_that_is_not_there(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(CourseError, match=f"127.0.0.1:{port}.* cannot be reached .*start the"):
        Client(f"http://127.0.0.1:{port}", model="m").chat(ASK, 4).result()


def test_one_that_hangs_up_and_one_that_speaks_no_http(server):
    def hang_up(handler, body):
        handler.connection.shutdown(socket.SHUT_RDWR)

    server.answer = hang_up
    assert "broke off" in refused(server)
    server.answer = lambda handler, body: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n")
    assert "broke off" in refused(server)


def test_environment_proxies_are_not_asked_for_this_machine(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert ask(server).text == "hello"


@pytest.mark.parametrize(("name", "value"), [
    ("ALL_PROXY", "socks9://127.0.0.1:9"), ("ALL_PROXY", "socks5://127.0.0.1:9"),
    ("SSL_CERT_FILE", "no-such-file")])
def test_what_the_environment_says_of_proxies_may_be_of_no_use(monkeypatch, name, value):
    for proxy in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(proxy, raising=False)
        monkeypatch.delenv(proxy.upper(), raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "socksio", None)  # not installed
    with pytest.raises(CourseError, match=r"cannot be used \(.*look at ALL_PROXY") as error:
        Client("https://example.invalid")
    assert "\n" not in str(error.value)


def test_an_answer_given_up_half_way_can_be_read_on_but_not_after_an_error(server):
    server.answers(stream("a", "b", "c"))
    with Client(server.url) as asked:
        reply = asked.chat(ASK, 4)
        assert next(iter(reply)).text == "a"
        assert reply.result().text == "abc" and reply.result() is reply.result()
        server.answers(b"data: no\n\n")
        broken = asked.chat(ASK, 4)
        for _ in range(2):
            with pytest.raises(CourseError, match=server.url):
                broken.result()


@pytest.mark.parametrize("given, base", [
    ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
    (" http://127.0.0.1:8080/ ", "http://127.0.0.1:8080/v1"),
    ("http://board/v1", "http://board/v1"),
    ("http://board/v1//", "http://board/v1"),
    ("http://board:1/v1/chat/completions", "http://board:1/v1"),
    ("https://x.example/openai/v1/", "https://x.example/openai/v1"),
    ("http://[::1]:81", "http://[::1]:81/v1"),
])
def test_base_urls(given, base):
    assert base_url(given) == base


@pytest.mark.parametrize("given, words", [
    ("127.0.0.1:8080", "like http://127.0.0.1:8080"), ("", "like http://"),
    ("board", "like http://"), ("ftp://board", "like http://"), ("http://", "like http://"),
    ("http://board:99999", "like http://"), ("http://xn--/", "like http://"),
    ("http://me:secret@board", "name or password"), ("http://board?key=secret", "query"),
    ("http://board/#secret", "fragment"),
])
def test_urls_that_cannot_be_meant(given, words):
    with pytest.raises(CourseError, match=words) as caught:
        base_url(given)
    assert "secret" not in str(caught.value)


def test_loopback():
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "a.localhost"):
        assert is_loopback(host)
    for host in ("128.0.0.1", "localhost.example", "board", "0.0.0.0", "::2"):
        assert not is_loopback(host)
    assert httpx.URL(base_url("http://[::1]:81")).host == "::1"


def test_rates_are_of_tokens_that_came_one_by_one():
    def rate(times, tokens):
        gathered = Gathered()
        for seconds in times:
            gathered.add(Part(text="x"), seconds)
        gathered.add(Part(finish_reason="stop", usage=(1, tokens)), 99.0)
        return gathered.result(99.0, True).tokens_per_s

    assert rate([1.0, 2.0, 3.0], 3) == 1.0
    assert rate([1.0, 2.0, 3.0], None) == 1.0
    assert rate([1.0, 3.0], 3) == 1.0  # one token's bytes waited for the next
    assert rate([1.0, 3.0], 4) == 1.5
    assert rate([1.0, 3.0], 5) is None  # lumps
    assert rate([1.0], 1) is None and rate([], 0) is None and rate([2.0, 2.0], 2) is None


def test_thinking_is_heard_as_the_first_token_but_is_no_text():
    gathered = Gathered()
    gathered.add(Part(thinking="hm"), 1.0)
    gathered.add(Part(text="ramen"), 3.0)
    result = gathered.result(4.0, True)
    assert (result.first_token_s, result.tokens_per_s) == (1.0, 0.5)
    assert (result.text, result.thinking) == ("ramen", "hm")


def test_surrogate_halves_meet_and_lone_ones_are_marked():
    assert joined(["\ud83d", "\ude00"]) == "😀" and joined(["a\ud83d"]) == "a\ufffd"


@pytest.mark.parametrize("count", [True, -1, 2.5, "3", 2**60, None])
def test_counts_that_are_none_are_left_out(server, count):
    server.answers(event({"choices": [], "usage": {"prompt_tokens": count}}), stream("a"))
    assert ask(server).prompt_tokens is None


def test_a_server_s_certificate_is_verified(monkeypatch):
    made = []
    monkeypatch.setattr(httpx, "Client", lambda **options: made.append(options))
    Client("https://board")
    Client("http://board")
    assert [(o["verify"], o["trust_env"]) for o in made] == [(True, True), (False, True)]
