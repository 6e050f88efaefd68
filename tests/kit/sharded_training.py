"""A process of a training with torch's FSDP2, on the CPU; its arguments are folder and checkpoint.

    MASTER_ADDR=... MASTER_PORT=... RANK=... python -m tests.kit.sharded_training FOLDER FILE

It goes on from the checkpoint for one epoch more and writes `fsdp.ckpt`, the gathered full state.
Every process has the same batches, so it trains as one device would.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.kit.training import Regressor, make_trainer, regression_data


class Sharded(Regressor):
    """Each process has a part of every parameter."""

    def configure_model(self) -> None:
        meshes: Any = self.device_mesh
        mesh = meshes["data_parallel"]
        assert mesh.size() > 1
        for part in (*self.layers, self):
            fully_shard(part, mesh=mesh)


def main(folder: Path, checkpoint: Path) -> None:
    torch.set_num_threads(1)
    num_processes = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(
        data_parallel_size=num_processes,
        tensor_parallel_size=1,
        save_distributed_checkpoint=False,
        process_group_backend="gloo",
    )
    trainer = make_trainer(
        folder,
        strategy=strategy,
        devices=num_processes,
        max_epochs=2,
        use_distributed_sampler=False,
    )
    trainer.fit(Sharded("adamw", num_blocks=2), regression_data(24), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "fsdp.ckpt")
    # Lightning leaves gloo's group to the end of the interpreter. A thread of the group that then
    # still lets go of a tensor asks for the interpreter's lock, is ended inside a destructor, and
    # C++ ends the process with "terminate called without an active exception".
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
