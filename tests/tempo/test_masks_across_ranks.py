"""Under DDP, with and without activation checkpointing, the backward pass drops what the forward pass dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tempo

BATCH, WIDTH, P, SEED = 3, 40, 0.4, 11


class Dropping(nn.Module):
    """Linear, then dropout; hands out the linear layer's result, whose gradient shows the backward pass's mask."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.linear, self.checkpointing = nn.Linear(WIDTH, WIDTH), checkpointing

    def forward(self, x: Tensor, rng: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x) + 10.0  # far from 0: a zero is a dropped element
        hidden.retain_grad()
        if self.checkpointing:
            return hidden, checkpoint(tempo.dropout, hidden, P, rng, 3, use_reentrant=False)
        return hidden, tempo.dropout(hidden, P, rng, 3)


def run_rank(rank: int, folder: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    for checkpointing in (False, True):
        model = DistributedDataParallel(Dropping(checkpointing))
        rng = tempo.make_rng(SEED, first_sample=rank * BATCH)
        hidden, y = model(torch.ones(BATCH, WIDTH), rng)
        y.sum().backward()
        assert hidden.grad is not None
        results[rank, checkpointing] = ((y != 0).tolist(), (hidden.grad != 0).tolist())
    dist.destroy_process_group()


def test_forward_and_backward_drop_the_same_elements_on_every_rank(tmp_path: Path) -> None:
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(run_rank, args=(str(tmp_path), results), nprocs=2, start_method="spawn")
        seen = dict(results)
    whole = tempo.keep_mask((2 * BATCH, WIDTH), P, tempo.make_rng(SEED), 3)
    assert len(seen) == 4
    for (rank, _), (forward, backward) in seen.items():
        assert forward == backward == whole[rank * BATCH : (rank + 1) * BATCH].tolist()
