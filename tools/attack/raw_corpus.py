"""Bytes that are hardly HTTP, or nothing that this server should take."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from tools.attack.client import CHAT, request
from tools.attack.corpus import broken


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes for a connection of their own. ``whole``: the server must answer or close at once."""

    name: str
    data: bytes
    whole: bool = True
    statuses: frozenset[int] | None = None
    """What an answer may be, if one comes; ``None``: anything below 500. With 200 among them, one must come."""


END = b"Connection: close\r\n\r\n"
LOCAL = b"Host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + LOCAL
BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\n" + LOCAL + b"Content-Type: application/json\r\n"


def chunked(*chunks: bytes, extension: bytes = b"") -> bytes:
    return b"".join(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks) + b"0\r\n\r\n"


def posted(fields: bytes, body: bytes) -> bytes:
    return POST + fields + END + body


def in_chunks(data: bytes) -> bytes:
    return posted(b"Transfer-Encoding: chunked\r\n", data)


def raw_corpus() -> list[Raw]:
    length = b"Content-Length: %d\r\n" % len(BODY)
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AAAA\r\n\r\n"
    ok, bad, foreign, nowhere = frozenset({200}), frozenset({400}), frozenset({403}), frozenset({400, 404})
    return [
        *(Raw(f"request line {li[:12]!r}", li + b"\r\n" + LOCAL + END, statuses=nowhere) for li in REQUEST_LINES),
        *(Raw(f"target {t[:20]!r}", b"GET " + t + b" HTTP/1.1\r\n" + LOCAL + END) for t in TARGETS),
        *(Raw(f"method {m[:12]!r}", m + b" /health HTTP/1.1\r\n" + LOCAL + END) for m in METHODS),
        *(Raw(f"header {h[:16]!r}", HEALTH + h + b"\r\n" + END) for h in HEADERS),
        *(Raw(f"host {h!r}", b"GET /health HTTP/1.1\r\nHost: " + h + b"\r\n" + END, statuses=foreign) for h in SPOOFS),
        *(Raw(f"length {n!r}", posted(b"Content-Length: " + n + b"\r\n", BODY), statuses=bad) for n in LENGTHS),
        *(Raw(f"coding {c!r}", posted(b"Transfer-Encoding: " + c + b"\r\n", chunked(BODY))) for c in CODINGS),
        *(Raw(f"chunk {c[:12]!r}", in_chunks(c), whole=False) for c in CHUNKS),
        *(Raw(f"body coded {c!r}", posted(length + b"Content-Encoding: " + c + b"\r\n", BODY)) for c in ENCODINGS),
        *(Raw(f"body type {c!r}", posted(length + b"Content-Type: " + c + b"\r\n", BODY)) for c in TYPES),
        Raw("duplicate Host", HEALTH + LOCAL + END, statuses=bad),
        Raw("no Host", b"GET /health HTTP/1.1\r\n" + END),
        Raw("length and chunked", posted(length + b"Transfer-Encoding: chunked\r\n", chunked(BODY)), statuses=bad),
        Raw("two lengths", posted(length + b"Content-Length: 3\r\n", BODY), statuses=bad),
        Raw("chunk extension", in_chunks(chunked(BODY, extension=b";a=b")), statuses=ok),
        Raw("long chunk extension", in_chunks(chunked(BODY, extension=b";" + b"a" * 9000))),
        Raw("1-byte chunks", in_chunks(chunked(*(bytes([b]) for b in BODY))), statuses=ok),
        Raw("20,000 1-byte chunks", in_chunks(chunked(*[b" "] * 20_000, BODY)), statuses=ok),
        Raw("2,000 headers", HEALTH + b"".join(b"X-%d: a\r\n" % i for i in range(2000)) + END, statuses=bad),
        Raw("5 MB of header", HEALTH + b"X: " + b"a" * 5_000_000 + b"\r\n" + END, statuses=bad),
        Raw("Expect 100", posted(length + b"Expect: 100-continue\r\n", BODY)),
        Raw("Expect the moon", posted(length + b"Expect: the-moon\r\n", BODY), statuses=frozenset({417})),
        Raw("HTTP/1.0", b"GET /health HTTP/1.0\r\n\r\n"),
        Raw("HTTP/0.9", b"GET /health\r\n\r\n"),
        Raw("websocket", HEALTH + upgrade, whole=False),
        Raw("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        Raw("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500),
        Raw("only newlines", b"\r\n" * 2000 + HEALTH + END),
        Raw("body after a GET", HEALTH + length + END + BODY),
        Raw("smuggled request", posted(b"Content-Length: 0\r\n", HEALTH + END)),
    ]  # fmt: skip


REQUEST_LINES = (
    *(b"GARBAGE", b"\0\0\0\0", b"GET", b"GET /x", b" GET /x HTTP/1.1", b"GET /x HTTP/9.9", b"GET /x HTTP/1.1 extra"),
    *(b"GET /x HTTP/1.", b"GET /x FTP/1.1", b"GET /\x01 HTTP/1.1", b"G\xc3\x89T /x HTTP/1.1", b"GET  HTTP/1.1"),
    *(b"GET /" + b"a" * 9000 + b" HTTP/1.1", b"GET /x http/1.1", b"GET /x HTTP/-1.1", b"GE(T /x HTTP/1.1"),
)
TARGETS = (
    *(
        b"*",
        b"//health",
        b"/health//",
        b"/%68ealth",
        b"/health?" + b"a=b&" * 500,
        b"/health;x",
        b"/HEALTH",
        b"/./health",
    ),
    *(b"/v1/models/../../etc", b"/v1/models/%2e%2e%2f%2e%2e", b"/v1/models/%00", b"/v1/models/%ff%fe", b"/%", b"/%zz"),
    *(b"http://localhost/health", b"http://evil.com/health", b"http://[::1", b"https://a:b@c:99999/", b"evil.com:80"),
    *(
        b"/v1/models/" + b"%2f" * 500,
        b"/v1/models/a\\b",
        b"/health#frag",
        b"?",
        b"/v1/models/\xc3\xa9",
        b"http:///health",
    ),
)
METHODS = (
    *(
        b"HEAD",
        b"PUT",
        b"DELETE",
        b"OPTIONS",
        b"TRACE",
        b"CONNECT",
        b"PATCH",
        b"PROPFIND",
        b"get",
        b"X" * 500,
        b"M-SEARCH",
    ),
)
HEADERS = (
    *(b"X: a\0b", b"X : a", b": a", b"X", b"X: \xff\xfe", b"X: a\r\n folded", b"X: " + b"a" * 9000, b"\xc3\xa9: a"),
    *(b"X: a\rY: b", b"X: a\nY: b", b"Connection: upgrade, \0", b"Cookie: " + b"a=b;" * 1000, b"Range: bytes=0-,1-"),
    *(b"X-Request-Id: a\x1b[31m", b"X-Request-Id: " + b"9" * 5000, b"Authorization: Bearer \xff", b"Origin: null"),
    *(
        b"Content-Length: 0\r\nContent-Length: 0",
        b"Content-Type: \xff",
        b"Accept-Encoding: " + b"gzip," * 500,
        b"Date: x",
    ),
)
SPOOFS = (
    *(b"evil.com", b"localhost.evil.com", b"localhost:80.evil.com", b"127.0.0.1.evil.com", b"evil.com:8000"),
    *(b"[::1].evil.com", b"localhost/evil.com", b"evil.com/localhost", b"localhost#evil.com", b"x/health?"),
    *(b"localhost@evil.com", b"localhost evil.com"),
    *(b"localhost:", b"localhost:80:80", b"localhost:999999", b"localhost.", b"0x7f.evil.com", b"[::1", b"."),
    *(b"localhost:-1", b"xlocalhost"),
    *(b"127.0.0.1:80@evil.com", b"localhost\\evil.com", b"evil.com,localhost", b"localhost,evil.com", b"%6cocalhost"),
)  # fmt: skip
LENGTHS = (b"-1", b"+5", b"0x5", b"5 5", b"5,5", b"a", b"", b"1" * 30, b"5.0", b"\xd9\xa5")
CODINGS = (
    b"gzip, chunked",
    b"identity",
    b"chunked, chunked",
    b"Chunked",
    b"chunked\0",
    b"xchunked",
    b"chunked;a=b",
    b"",
)
CHUNKS = (
    *(b"5\r\nabc\r\n0\r\n\r\n", b"-1\r\na\r\n0\r\n\r\n", b"ffffffffffffffffff\r\na\r\n0\r\n\r\n"),
    *(b"0x3\r\nabc\r\n0\r\n\r\n", b"3\r\nabcd\r\n0\r\n\r\n"),
    *(b"3 \r\nabc\r\n0\r\n\r\n", b"3\nabc\n0\n\n", b"3;\r\nabc\r\n0\r\n\r\n", b"g\r\nabc\r\n0\r\n\r\n"),
    *(b"0\r\nX-Trailer: a\r\n\r\n", b"0\r\n" + b"X: a\r\n" * 5000 + b"\r\n", b"\r\n0\r\n\r\n"),
    *(b"0;" + b"a" * 20_000 + b"\r\n\r\n", b""),
)  # fmt: skip
ENCODINGS = (b"gzip", b"deflate", b"br", b"zstd", b"identity", b"x-unknown", b"gzip, identity", b"\xff")
TYPES = (
    b"text/plain",
    b"multipart/form-data",
    b"application/x-www-form-urlencoded",
    b"application/json; charset=utf-16",
    b"x",
)


def broken_raw(rng: random.Random) -> Raw:
    """A valid request with a few bytes of it changed: the server may well wait for more."""
    valid = rng.choice((HEALTH + END, posted(b"Content-Length: %d\r\n" % len(BODY), BODY), request(CHAT, {"n": 1})))
    return Raw("changed bytes", broken(valid, rng), whole=False)
