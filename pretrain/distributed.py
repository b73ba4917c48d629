"""The ranks of one training: torchrun's environment, sums over ranks, and agreement on when to stop."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# A rank that died must not leave the others waiting for long.
_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks.

    Attributes:
        rank: 0 .. world_size - 1; rank 0 writes.
        world_size: number of processes.
        device: where this rank computes.
        cpu_group: for flags that must not stop the device; None without ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    cpu_group: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; every rank gets the same answer."""
        if self.world_size == 1:
            return flag
        value = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.cpu_group)
        return bool(value.item())

    def agree_on(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the sums of the parameters are the same on every rank; every rank gets the same answer."""
        if self.world_size == 1:
            return True
        total = torch.stack([p.detach().sum(dtype=torch.float64) for p in parameters]).sum()
        extremes = torch.stack([total, -total])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        return bool(extremes.sum().item() == 0.0)

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.cpu_group)
        return values[0]

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model with gradients averaged over the ranks."""
        if self.world_size == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def start(device: str) -> Ranks:
    """Join the other ranks, if torchrun started this process.

    Args:
        device: auto, cpu or cuda.

    Raises:
        ValueError: cuda is asked for and there is none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device is 'cuda', but PyTorch sees no GPU here; set train.device to 'cpu' or 'auto'")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    where = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        return Ranks(0, 1, where)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT)
    cpu_group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if device == "cuda" else dist.group.WORLD
    return Ranks(dist.get_rank(), dist.get_world_size(), where, cpu_group)


def stop() -> None:
    """Leave the group of ranks, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
