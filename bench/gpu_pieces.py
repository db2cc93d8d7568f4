"""The pieces of `make gpu`, the most valuable first, each with a limit of at most 90 seconds."""

from __future__ import annotations

from dataclasses import dataclass

from tools import tiny

#: Kinds of tiny models in a piece that compares them with the CPU.
GROUP_SIZE = 4

#: The kinds of each of these pieces.
GROUPS = tuple(tiny.KINDS[start : start + GROUP_SIZE] for start in range(0, len(tiny.KINDS), GROUP_SIZE))

#: The families that `tests/integration/test_gpu.py` serves, a piece each.
TESTED_KINDS = ("flux", "wan", "hunyuan-video", "qwen-image")

#: Those of them whose results are videos, which PyAV encodes.
VIDEO_KINDS = ("wan", "hunyuan-video")

#: Prefixes of names in `bench/gpu_widths.py`, a piece each.
WIDTHS = ("flux", "qwen", "sd3", "sdxl", "wan", "hunyuan", "z-image", "t5", "clip")


@dataclass(frozen=True)
class Piece:
    """A process to run on the GPU."""

    #: Name in the log.
    name: str

    #: Arguments of Python.
    command: list[str]

    #: Most seconds that it may take.
    seconds: float = 90.0

    #: Packages that only this piece needs.
    packages: tuple[str, ...] = ()

    #: Whether it is a test, whose output is recorded even if it passes.
    is_test: bool = False


def pieces(device: str, tiny: bool) -> list[Piece]:
    """Return all pieces that run on this device."""
    options = ["--device", device, *(["--tiny"] if tiny else [])]

    def part(name: str, seconds: float = 90.0, packages: tuple[str, ...] = ()) -> Piece:
        return Piece(name, ["-m", "bench.gpu", *options, *name.split()], seconds, packages)

    def families(group: int) -> Piece:
        return Piece(f"families {group}", ["-m", "bench.gpu_families", "--device", device, str(group)])

    def test(kind: str) -> Piece:
        command = [
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            "tests/integration/test_gpu.py",
            "-k",
            kind,
        ]
        packages = ("pytest", "pytest_asyncio", "redis", "obstore", "jsonschema_rs")
        video = ("av",) if kind in VIDEO_KINDS else ()
        return Piece(f"test {kind}", command, packages=packages + video, is_test=True)

    def widths(name: str) -> Piece:
        return Piece(f"widths {name}", ["-m", "bench.gpu_widths", "--device", device, "--only", name])

    return [
        part("facts", 45.0),
        part("served whole"),
        part("served split"),
        *(families(group) for group in range(len(GROUPS))),
        part("text"),
        part("steps flux"),
        part("vae flux", 60.0),
        part("vae wan", 60.0),
        part("decode llama"),
        part("offload flux"),
        *(test(kind) for kind in TESTED_KINDS),
        *(widths(name) for name in WIDTHS),
        part("stages flux"),
        part("stages wan"),
        part("steps wan"),
        part("verdicts"),
        part("products bfloat16"),
        part("products float32"),
        part("rates wan"),
        part("layouts wan"),
        part("stream wan", packages=("av",)),
        part("compare flux"),
    ]
