"""What starting costs: `import unfuse`, `unfuse --help`, `unfuse serve` until ready, and the memory of each process
after a picture, beside the fused pipeline's process. `python -m bench.start`
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.report import show, spread
from bench.split import Undivided, case, ours
from tools.server import family_of, serving

PAIRS = 15


def seconds(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def memory(process: psutil.Process) -> dict[str, object]:
    """MiB: anonymous memory is what a process has for itself; a map of the arena is not part of it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    fields = {
        line.split(":")[0]: int(line.split()[1]) / 1024
        for line in status.splitlines()
        if line.startswith(("Rss", "VmRSS"))
    }
    words = process.cmdline()
    name = "serve" if "serve" in words else words[words.index("--role") + 1] if "--role" in words else "compute"
    if "unfuse.worker.fork_server" in words:
        name = "fork server"
    if process.name().startswith("compute "):
        worker = psutil.Process(int(process.name().removeprefix("compute "))).cmdline()
        name = f"compute of {worker[worker.index('--role') + 1]}"
    return {"process": name, "anonymous_mib": round(fields["RssAnon"], 1), "resident_mib": round(fields["VmRSS"], 1)}


def main() -> None:
    nothing, imported, helped = [], [], []
    for _ in range(PAIRS):
        nothing.append(seconds("-c", "pass"))
        imported.append(seconds("-c", "import unfuse"))
        helped.append(seconds("-m", "unfuse", "--help"))
    started, processes = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            with serving(Path(folder), "--arena", "64MiB") as server:
                server.ready()
                started.append(time.perf_counter() - began)
                ours(server, 1, 20)
                processes = [memory(process) for process in family_of(server.process.pid)]
    fused = Undivided(1, 1)
    fused.run(0, case(1, 20))
    whole = memory(psutil.Process(fused.processes[0].pid))
    fused.close()
    show(
        "start",
        python_alone_s=spread(nothing),
        import_unfuse_s=spread([a - b for a, b in zip(imported, nothing, strict=True)]),
        help_s=spread(helped),
        serve_until_ready_s=spread(started),
        processes=processes,
        fused_process=whole | {"process": "undivided pipeline"},
    )


if __name__ == "__main__":
    main()
