"""Ranges of files, by RFC 9110 section 14."""

from __future__ import annotations

import email
import random
from email.utils import formatdate

import httpx2
import pytest
from hypothesis import given, strategies as st

from tests.server.served import PICTURES, Served
from unfuse.server.responses import parse_ranges

VIDEO = {"model": PICTURES.name, "prompt": "a red circle", "num_frames": 5}


@pytest.fixture(scope="module")
def address(served: Served) -> str:
    """The address of a video's content."""
    with httpx2.Client(base_url=served.url, timeout=600, trust_env=False) as http:
        video = http.post("/v1/videos", json=VIDEO).json()["id"]
    served.next_event(video, "completed")
    return f"/v1/videos/{video}/content"


@pytest.fixture
def whole(http: httpx2.Client, address: str) -> bytes:
    return http.get(address).content


@pytest.mark.row("P38")
@pytest.mark.parametrize(
    "header",
    [
        "items=0-1",
        "bytes",
        "bytes=",
        "bytes=,",
        "bytes=-",
        "bytes=a-b",
        "bytes=5-2",
        "bytes=0-1;2-3",
        "=0-1",
        "0-1",
        "bytes=0-1,oops",
        "bytes=--5",
        "bytes=0x1-2",
        "bytes=1_0-20",
        "bytes=+1-2",
        "bytes=" + ",".join(["0-0"] * 101),
        "bytes=\xb2-5",
        "seconds=1-2",
        "bytes 0-1",
    ],
)
def test_malformed_range_header_is_ignored(http: httpx2.Client, address: str, whole: bytes, header: str) -> None:
    answer = http.get(address, headers={"range": header.encode("latin-1")})
    assert (answer.status_code, answer.content) == (200, whole)


@pytest.mark.parametrize(
    ("header", "first", "end"),
    [
        ("bytes=0-1", 0, 2),
        ("bytes=7-7", 7, 8),
        ("bytes=9-", 9, None),
        ("bytes=-4", -4, None),
        ("BYTES=0-1", 0, 2),
        ("bytes=0-99999999999999999999999999", 0, None),
        ("bytes=-99999999999999999999999999", 0, None),
        ("bytes= 0-1", 0, 2),
        ("bytes=,0-1,,", 0, 2),
        ("bytes=0-5,3-9", 0, 10),
        ("bytes=0-1,2-3", 0, 4),
        ("bytes=99999999-,0-1", 0, 2),
        ("bytes=000-0001", 0, 2),
        ("bytes=0-1,-0", 0, 2),
    ],
)
def test_single_range_returns_206(
    http: httpx2.Client, address: str, whole: bytes, header: str, first: int, end: int | None
) -> None:
    answer = http.get(address, headers={"range": header})
    expected = whole[first:end]
    assert (answer.status_code, answer.content) == (206, expected)
    begin = len(whole) + first if first < 0 else first
    assert answer.headers["content-range"] == f"bytes {begin}-{begin + len(expected) - 1}/{len(whole)}"
    assert answer.headers["content-length"] == str(len(expected))
    assert answer.headers["accept-ranges"] == "bytes"


def test_multiple_ranges_return_multipart_byteranges(http: httpx2.Client, address: str, whole: bytes) -> None:
    answer = http.get(address, headers={"range": "bytes=0-1, 10-14"})
    assert answer.status_code == 206
    message = email.message_from_bytes(
        b"Content-Type: " + answer.headers["content-type"].encode() + b"\n\n" + answer.content
    )
    parts = [(str(part["content-range"]), part.get_payload(decode=True)) for part in message.get_payload()]
    size = len(whole)
    assert parts == [(f"bytes 0-1/{size}", whole[:2]), (f"bytes 10-14/{size}", whole[10:15])]


@pytest.mark.parametrize("header", ["bytes=99999999-", "bytes=-0", "bytes=99999999-99999999999,-0"])
def test_range_beyond_the_end_returns_416_with_the_file_size(
    http: httpx2.Client, address: str, whole: bytes, header: str
) -> None:
    answer = http.get(address, headers={"range": header})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(whole)}"
    assert answer.json()["error"]["code"] == "range_not_satisfiable"


def test_if_range_returns_the_range_only_if_the_validator_matches(
    http: httpx2.Client, address: str, whole: bytes
) -> None:
    told = http.head(address).headers
    for condition in (told["etag"], told["last-modified"]):
        assert http.get(address, headers={"range": "bytes=0-1", "if-range": condition}).content == whole[:2]
    for condition in ('"another"', f"W/{told['etag']}", formatdate(0, usegmt=True), "nonsense", ""):
        answer = http.get(address, headers={"range": "bytes=99999999-", "if-range": condition})
        assert (answer.status_code, answer.content) == (200, whole), condition


def test_head_ignores_the_range_header(http: httpx2.Client, address: str, whole: bytes) -> None:
    for header in ("bytes=0-1", "bytes=99999999-"):
        head = http.head(address, headers={"range": header})
        assert (head.status_code, head.headers["content-length"]) == (200, str(len(whole)))


def test_two_range_headers_are_ignored(http: httpx2.Client, address: str, whole: bytes) -> None:
    answer = http.get(address, headers=[("range", "bytes=0-1"), ("range", "bytes=2-3")])
    assert (answer.status_code, answer.content) == (200, whole)


def test_matching_if_none_match_returns_304(http: httpx2.Client, address: str, whole: bytes) -> None:
    etag = http.head(address).headers["etag"]
    for known in (etag, f"W/{etag}", f'"another", {etag}', "*"):
        for method in ("GET", "HEAD"):
            answer = http.request(method, address, headers={"if-none-match": known, "range": "bytes=0-1"})
            assert (answer.status_code, answer.content) == (304, b""), known
            assert answer.headers["etag"] == etag
    for other in ('"another"', etag.strip('"'), "nonsense"):
        assert http.get(address, headers={"if-none-match": other}).content == whole


def test_if_match_with_another_etag_returns_412(http: httpx2.Client, address: str, whole: bytes) -> None:
    etag = http.head(address).headers["etag"]
    for meant in (etag, f'"another", {etag}', "*"):
        assert http.get(address, headers={"if-match": meant}).content == whole
    for other in ('"another"', f"W/{etag}"):
        answer = http.get(address, headers={"if-match": other})
        assert (answer.status_code, answer.json()["error"]["code"]) == (412, "precondition_failed")


@pytest.mark.parametrize("header", ["items=0-1", "bytes=99999999-", "bytes=0-1"])
def test_static_pages_ignore_the_range_header(http: httpx2.Client, header: str) -> None:
    path = "/static-offline-docs/swagger-ui.css"
    answer = http.get(path, headers={"range": header})
    assert (answer.status_code, answer.content) == (200, http.get(path).content)


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6))
def test_parsed_ranges_select_exactly_the_requested_bytes(size: int, pairs: list[tuple[int, int]]) -> None:
    """Compared byte by byte: position p is selected if any first-last has it."""
    pairs = [(min(pair), max(pair)) for pair in pairs]
    selected = {at for first, last in pairs for at in range(first, last + 1) if at < size}
    found = parse_ranges("bytes=" + ",".join(f"{first}-{last}" for first, last in pairs), size)
    assert found is not None
    assert {at for first, end in found for at in range(first, end)} == selected


def test_random_range_headers_return_200_206_or_416(http: httpx2.Client, address: str) -> None:
    draw = random.Random(7)
    for _ in range(100):
        text = "".join(draw.choice("bytes=0123456789-,; \t*/x") for _ in range(draw.randrange(40)))
        assert http.get(address, headers={"range": f"bytes={text}".strip()}).status_code in (200, 206, 416)
