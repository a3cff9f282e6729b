"""What it costs to bring weights and a batch to the nodes of a cluster: Ray's object store against a shared folder.

    python benchmarks/cluster_transfer.py --nodes 4 --rounds 3

All nodes are on this machine. Each round publishes a folder of weights (safetensors) and a batch once, and has every
node read all of it, first through one and then through the other; a node reads each tensor into memory, as an engine
does. Prints, for each, the processor seconds of all processes and the bytes that went through files and sockets
(`rchar` and `wchar` of /proc/PID/io), and the median ratio of the pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors import safe_open
from safetensors.numpy import save_file

from verbatim.run.cluster.folders import bring, ship
from verbatim.run.cluster.node_folder import NodeFolder

MARK = f"VERBATIM_BENCHMARK_MARK={os.getpid()}"
TICKS = os.sysconf("SC_CLK_TCK")


class Node:
    """One node's engine."""

    def __init__(self, run: str) -> None:
        self._place = NodeFolder(run, ray.get_runtime_context().get_node_id())

    def take(self, shipped: Any, batch: Any) -> int:
        """Bring a folder from the object store, read it, and read the batch; return the number of bytes."""
        with self._place.locked():
            folder = bring(ray, shipped, self._place.path)
        found = read(folder)
        shutil.rmtree(folder)
        return found + (len(batch) if batch is not None else 0)

    def read(self, folder: str, batch: str | None) -> int:
        """Read a folder and a batch's file that all nodes see."""
        return read(Path(folder)) + (len(Path(batch).read_bytes()) if batch is not None else 0)

    def leave(self) -> None:
        """Remove this node's folder."""
        self._place.leave()


def read(folder: Path) -> int:
    """Read all tensors of a folder into memory; return their size in bytes."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                total += file.get_tensor(name).nbytes
    return total


def spent() -> tuple[float, int]:
    """Processor seconds, and bytes through files and sockets, of all processes of this program so far."""
    seconds, moved = 0.0, 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.name != str(os.getpid()) and MARK.encode() not in (process / "environ").read_bytes():
                continue
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / TICKS
            counts = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
            moved += int(counts["rchar"]) + int(counts["wchar"])
    return seconds, moved


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=538, help="size of the weights")
    parser.add_argument("--tokens", type=int, default=1024 * 16384, help="tokens of the batch, at 8 bytes each")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    quiet = {"object_store_memory": 3 * 10**9, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **quiet})
    try:
        for _ in range(args.nodes):
            cluster.add_node(num_cpus=1, **quiet)
        ray.init(cluster.address, log_to_driver=False)
        ids = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")]
        kind = ray.remote(num_cpus=0.1)(Node)
        nodes = [
            kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(f"b{os.getpid()}")
            for node in ids
        ]
        ray.get([node.read.remote("/nowhere", None) for node in nodes])
        with tempfile.TemporaryDirectory() as root:
            compare(Path(root), nodes, args)
        ray.get([node.leave.remote() for node in nodes])
    finally:
        ray.shutdown()
        cluster.shutdown()


def compare(root: Path, nodes: list[Any], args: argparse.Namespace) -> None:
    """Run the pairs."""
    generator = np.random.default_rng(0)
    each = 2**20
    tensors = {
        f"layer.{n}": generator.standard_normal(each, dtype=np.float32)
        for n in range(args.megabytes * 10**6 // (4 * each))
    }
    batch = generator.integers(0, 255, 8 * args.tokens, dtype=np.uint8) if args.tokens else None
    ratios: list[tuple[float, float]] = []
    for turn in range(args.rounds):
        figures = {}
        for how in ("store", "folder") if turn % 2 else ("folder", "store"):
            before, began = spent(), time.monotonic()
            folder = root / "weights" / f"v{turn:06d}-{how}"
            folder.mkdir(parents=True)
            save_file(tensors, folder / "model.safetensors")
            if how == "store":
                content = None if batch is None else ray.put(batch)
                shipped = ship(ray, root, folder.relative_to(root).as_posix())
                ray.get([node.take.remote(shipped, content) for node in nodes])
                del shipped, content
            else:
                file = None if batch is None else root / "batch.bin"
                if file is not None:
                    file.write_bytes(batch.tobytes())
                ray.get([node.read.remote(str(folder), file and str(file)) for node in nodes])
            wall = time.monotonic() - began
            after = spent()
            shutil.rmtree(folder)
            figures[how] = after[0] - before[0], (after[1] - before[1]) / 1e9
            print(f"{how:7} {figures[how][0]:6.2f} s of processor  {figures[how][1]:6.2f} GB  {wall:6.2f} s")
        ratios.append(tuple(figures["store"][i] / figures["folder"][i] for i in (0, 1)))
    for label, index in (("processor time", 0), ("bytes", 1)):
        print(f"store / folder, {label}: {statistics.median(ratio[index] for ratio in ratios):.2f}")


if __name__ == "__main__":
    main()
