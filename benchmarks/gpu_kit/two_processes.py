"""One of two ranks that train together on one device: `python -m gpu_kit.two_processes MODEL FOLDER DEVICE RANK`.

Rank 0 writes the gradient of rows and of trees as FOLDER/rows.safetensors and FOLDER/tree.safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed
from safetensors.torch import save_file

from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import TrainerConfig
from verbatim.trainer import optim
from verbatim.trainer.parallel.ranks import Ranks
from verbatim.trainer.trainer import Trainer

from .ours import NO_CHANGE
from .setting import Setting, shared_prefixes

dist: Any = torch.distributed
"""Typed as Any: its stubs lack the stores."""


def main() -> None:
    """Take a step with each packing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("device")
    parser.add_argument("rank", type=int)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    setting = Setting(device=args.device, tiny=args.tiny, folder=args.folder)
    ranks = open_ranks(args.folder, args.rank, use_cuda=args.device == "cuda")
    for packing in ("rows", "tree"):
        config = TrainerConfig(optim=NO_CHANGE, device=args.device, packing=packing)
        trainer = Trainer(args.model, config, loss=LOSSES["default"], total_optimizer_steps=10, ranks=ranks)
        noted: dict[str, Any] = {}
        with mock.patch("verbatim.trainer.trainer.clip_gradients", lambda *given, noted=noted: _note(noted, *given)):
            if ranks.leads:
                trainer.train_batch(shared_prefixes(setting))
                ranks.end()
                save_file(noted, args.folder / f"{packing}.safetensors")
            else:
                ranks.follow(trainer.obey)
    dist.destroy_process_group()


def open_ranks(folder: Path, rank: int, *, use_cuda: bool) -> Ranks:
    """Both ranks on device 0, with gloo for its tensors too."""
    opened = dist.init_process_group

    def by_gloo(_: str, **settings: Any) -> None:
        opened("gloo", **settings)

    store = dist.FileStore(str(folder / "store"), 2)
    with mock.patch.object(dist, "init_process_group", by_gloo):
        return Ranks(store, rank=rank, size=2, local_rank=0, use_cuda=use_cuda, deadline=600)


def _note(noted: dict[str, Any], model: Any, *rest: Any) -> float:
    """Keep the whole gradient; every rank takes part in gathering it."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            noted[name] = parameter.grad.full_tensor().double().cpu().contiguous()
    return optim.clip_gradients(model, *rest)


if __name__ == "__main__":
    main()
