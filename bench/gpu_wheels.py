"""Download the wheels that `make gpu` needs on a machine without network.

    python -m bench.gpu_wheels DIR [--python 3.12] [--with-tests] [--with-video]

The other machine has torch, transformers, accelerate, numpy, Pillow and psutil. The wheels have the versions that are
installed here, without their dependencies. Copy DIR and the checkout to that machine. There, without pip:

    for wheel in DIR/*.whl; do python3 -m zipfile -e $wheel site; done
    PYTHONPATH=$PWD/site make gpu GPU_PYTHON=python3
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

#: Packages of the serving extra and their dependencies, beside those that the other machine has.
PACKAGES = (
    "annotated-doc",
    "annotated-types",
    "apsw",
    "certifi",
    "charset-normalizer",
    "diffusers",
    "fastapi",
    "fastapi-offline",
    "ftfy",
    "gguf",
    "httpcore2",
    "httpx2",
    "idna",
    "importlib-metadata",
    "llguidance",
    "msgspec",
    "opentelemetry-api",
    "prometheus-client",
    "pydantic",
    "pydantic-core",
    "python-multipart",
    "pyzmq",
    "requests",
    "sentencepiece",
    "standardwebhooks",
    "starlette",
    "structlog",
    "truststore",
    "typing-extensions",
    "typing-inspection",
    "urllib3",
    "uvicorn",
    "uvloop",
    "wcwidth",
    "xxhash",
    "zipp",
)

#: Packages of the tests.
TEST_PACKAGES = (
    "execnet",
    "hiredis",
    "jsonschema-rs",
    "obstore",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "redis",
)

#: The package that encodes videos, 36 MB.
VIDEO_PACKAGES = ("av",)

#: The glibc versions of the wheels that are accepted, newest first.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)] + ["manylinux2014_x86_64", "any"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_wheels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python (3.12)")
    parser.add_argument("--with-tests", action="store_true", help="with the packages of the tests")
    parser.add_argument("--with-video", action="store_true", help="with PyAV, which encodes videos")
    arguments = parser.parse_args()
    packages = (
        *PACKAGES,
        *(TEST_PACKAGES if arguments.with_tests else ()),
        *(VIDEO_PACKAGES if arguments.with_video else ()),
    )
    tag = f"cp{arguments.python.replace('.', '')}"
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    abis = ["--implementation", "cp", "--abi", tag, "--abi", "abi3", "--abi", "none"]
    requirements = [f"{name}=={version(name)}" for name in packages]
    command = ["download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", arguments.python]
    subprocess.run(
        [sys.executable, "-m", "pip", *command, *abis, *platforms, "-d", str(arguments.folder), *requirements],
        check=True,
    )
    size = sum(wheel.stat().st_size for wheel in arguments.folder.glob("*.whl"))
    print(f"{arguments.folder}: {len([*arguments.folder.glob('*.whl')])} wheels, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
