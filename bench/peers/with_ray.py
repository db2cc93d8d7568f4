"""Ray's object store: an actor on one node puts an array, this process gets it on another; both nodes are here.

Answers every line "BYTES" of standard input with the seconds of the get. `python -m bench.peers.with_ray`
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

STORE = 3 << 30


@ray.remote(resources={"owner": 1})  # type: ignore[untyped-decorator]
class Owner:
    def put(self, nbytes: int) -> list[Any]:
        return [ray.put(np.full(nbytes, 7, np.uint8))]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # it logs to standard output
    cluster = Cluster(True, head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False})
    cluster.add_node(num_cpus=1, object_store_memory=STORE, resources={"owner": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    owner = Owner.remote()
    for line in sys.stdin:
        nbytes = int(line)
        (put,) = ray.get(owner.put.remote(nbytes))
        began = time.perf_counter()
        got = ray.get(put)
        print(time.perf_counter() - began, file=answers, flush=True)
        assert got.nbytes == nbytes and got[-1] == 7
        del got, put
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
