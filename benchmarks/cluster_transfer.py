"""What it costs to bring weights and a batch to the nodes of a cluster: Ray's object store against a shared folder.

    python benchmarks/cluster_transfer.py --nodes 4 --rounds 3
    python benchmarks/cluster_transfer.py --nodes 2 --shared /tmp/share --mount /mnt/1 --mount /mnt/2

All nodes are on this machine, and nothing else may run on it. Each round publishes a folder of weights (safetensors)
and a batch once, and has every node read all of it, first through one and then through the other; a node copies each
tensor, as an engine does. Without `--mount`, all nodes read the same pages of memory, as no two machines can. With it,
each node reads the folder `--shared` through a mount of its own, such as one of sshfs.

Prints the processor seconds of the whole machine and the bytes through the loopback device, and the median ratios.
"""

from __future__ import annotations

import argparse
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
from safetensors.numpy import save_file

from verbatim.run.cluster.folders import bring, ship
from verbatim.run.cluster.node_folder import NodeFolder

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
        return found + (len(np.array(batch)) if batch is not None else 0)

    def read(self, root: str, folder: str, batch: str | None) -> int:
        """Read a folder and a batch's file below a shared folder that this node sees at `root`."""
        content = (Path(root) / batch).read_bytes() if batch is not None else b""
        return read(Path(root) / folder) + len(content)

    def leave(self) -> None:
        """Remove this node's folder."""
        self._place.leave()


def read(folder: Path) -> int:
    """Read all tensors of a folder into memory; return their size in bytes."""
    from safetensors import safe_open  # Ray cannot pickle this class among the globals of a script

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                total += np.array(file.get_tensor(name)).nbytes
    return total


def spent() -> tuple[float, int]:
    """Processor seconds of the whole machine, and bytes through the loopback device, so far."""
    user, nice, system, _idle, _wait, hard, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    (loopback,) = (
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.split(":")[0].strip() == "lo"
    )
    return (user + nice + system + hard + soft) / TICKS, int(loopback.split(":")[1].split()[0])


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=538, help="size of the weights")
    parser.add_argument("--tokens", type=int, default=1024 * 16384, help="tokens of the batch, at 8 bytes each")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", type=Path, help="an empty folder to publish in (default: a temporary one)")
    parser.add_argument("--mount", action="append", default=[], help="where one node sees --shared; once for each node")
    args = parser.parse_args()
    if args.mount and (args.shared is None or len(args.mount) != args.nodes):
        parser.error(f"--mount needs --shared, and as many mounts as --nodes {args.nodes} (found {len(args.mount)})")
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
        ray.get([node.read.remote("/nowhere", "nothing", None) for node in nodes])
        with tempfile.TemporaryDirectory() as folder:
            compare(args.shared or Path(folder), nodes, args)
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
                file = None if batch is None else f"batch-{turn}.bin"
                if file is not None:
                    (root / file).write_bytes(batch.tobytes())
                below = str(folder.relative_to(root))
                places = args.mount or [str(root)] * len(nodes)
                ray.get([node.read.remote(place, below, file) for node, place in zip(nodes, places, strict=True)])
            wall = time.monotonic() - began
            after = spent()
            shutil.rmtree(folder)
            figures[how] = after[0] - before[0], (after[1] - before[1]) / 1e9
            print(
                f"{how:7} {figures[how][0]:6.2f} s of processor  {figures[how][1]:6.2f} GB by loopback  {wall:6.2f} s"
            )
        ratios.append(tuple(figures["store"][i] / max(figures["folder"][i], 1e-3) for i in (0, 1)))
    for label, index in (("processor time", 0), *((("bytes", 1),) if args.mount else ())):
        print(f"store / folder, {label}: {statistics.median(ratio[index] for ratio in ratios):.2f}")


if __name__ == "__main__":
    main()
