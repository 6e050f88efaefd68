"""How many blocks a stage may have, so that a worker can hold what it needs at once.

A worker holds the weights of two visits (the present and the prefetched one), the gradients of two
(being computed, being downloaded), the activations of the present stage and four boundaries (one
coming and one going for each of two microbatches). With W, G, A, b the weights, gradients,
activations and boundary of the largest block, and D the device's memory less a reserve:

    FORWARD of n blocks       2 n W + A + 4 b              <= D    (activations of one block at a
    time) BACKWARD of n blocks      n (2 W + 2 G + A) + 4 b      <= D
    FUSED of n and the tail   n (2 W + 2 G + A) + 2 W' + 2 G' + A' + 4 b  <= D    (primes: the
    tail's)

Where a profile says nothing about activations, a BACKWARD or FUSED stage gets no more blocks than a
worker would hold if the blocks were dealt out evenly, and a FORWARD stage twice as many.
"""

from __future__ import annotations

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.hardware import HardwareSpec
from roundpipe_lightning.planning.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.search import StageLimits

RESERVED_BYTES = 1_500_000_000
"""Device memory that plans leave alone: the runtime's context and the allocator's fragments."""

_NO_BLOCK = BlockProfile(name="none")


def stage_limits(profile: ModelProfile, hardware: HardwareSpec) -> StageLimits:
    """Return how many blocks a stage may have on this machine.

    Args:
        profile: The model, with its sizes where they are known.
        hardware: The machine; its `device_bytes` is the limit.

    Raises:
        PlanError: If a device cannot hold even one block, or not the tail segment.
    """
    blocks = profile.blocks or (_NO_BLOCK,)
    weights = max(block.parameter_bytes for block in blocks)
    gradients = max(block.trainable_bytes for block in blocks)
    activations = max(block.activation_bytes for block in blocks)
    boundaries = 4 * max(block.boundary_bytes for block in blocks)
    room = hardware.device_bytes - RESERVED_BYTES - boundaries
    per_block = 2 * weights + 2 * gradients + activations
    tail = profile.tail
    tail_bytes = 2 * tail.parameter_bytes + 2 * tail.trainable_bytes + tail.activation_bytes
    for what, size in (("block", per_block), ("tail segment", tail_bytes)):
        if size > room:
            raise PlanError(
                f"{hardware.name} cannot hold the largest {what}: it needs {_gb(size)} of "
                f"{_gb(hardware.device_bytes)} per device, of which "
                f"{_gb(RESERVED_BYTES + boundaries)} "
                "are reserved or hold boundaries. Use smaller microbatches, LoRA, or devices with "
                "more memory."
            )
    forward = (room - activations) // (2 * weights) if weights else profile.num_blocks
    backward = room // per_block if per_block else profile.num_blocks
    fused = (room - tail_bytes) // per_block if per_block else profile.num_blocks
    if not activations:
        share = -(-profile.num_blocks // hardware.num_devices)
        forward, backward, fused = min(forward, 2 * share), min(backward, share), min(fused, share)
    most = max(profile.num_blocks, 1)
    return StageLimits(
        forward=min(max(forward, 1), most),
        backward=min(max(backward, 1), most),
        fused=min(fused, most),
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
