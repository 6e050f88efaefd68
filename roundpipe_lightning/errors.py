"""Every error this package raises on purpose.

An exception raised by *user* code (training_step, a block, an optimizer) keeps its own type: it
leaves the engine unchanged, with a note that says where it happened. Only a device's lack of memory
becomes a `DeviceMemoryError`, whose cause is the allocator's error. docs/troubleshooting.md has
every message with its cure.
"""


class RoundPipeError(Exception):
    """Root of this package's errors: `except RoundPipeError` catches them all."""


class ConfigurationError(RoundPipeError, ValueError):
    """A setting or a combination of settings cannot work. The message names it and the way out."""


class StepModeError(ConfigurationError):
    """A step does what cannot be done once per microbatch, in the mode that does so."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}, but microbatching='step' runs training_step once per microbatch. Set "
            "microbatching='blocks', or leave it out."
        )
        self.reason = reason


class PlanError(ConfigurationError):
    """A plan, schedule or partition is malformed, would deadlock, or belongs to another model."""


class FitError(PlanError):
    """A training does not fit a machine's memory. The message says what is missing, what helps."""


class HardwareError(ConfigurationError):
    """A hardware description has missing, negative or unknown figures."""


class BatchError(RoundPipeError, ValueError):
    """A batch cannot be split into the wanted number of microbatches."""


class DataError(RoundPipeError, ValueError):
    """A sample or a file of samples cannot be read or used. The message names file and line."""


class CaptureError(RoundPipeError, RuntimeError):
    """User code calls a stack of blocks in a way that cannot be cut into stages."""


class GlueError(CaptureError):
    """Code between two blocks changed the tensor that flows from one to the next."""


class RandomnessError(CaptureError):
    """Random numbers were drawn outside the reproducible streams, so a recompute would differ."""


class GradientError(RoundPipeError, RuntimeError):
    """A gradient is not finite and was looked for. The message names parameter, block and batch."""


class DivergedError(RoundPipeError, RuntimeError):
    """The loss or the weights of a training are no longer finite. The message says since when."""


class HostError(RoundPipeError, RuntimeError):
    """Another host of the training has ended, hangs, or is out of reach."""


class ModelSourceError(RoundPipeError, OSError):
    """An architecture or its weights cannot be found or loaded."""


class CheckpointError(RoundPipeError, OSError):
    """A checkpoint cannot be written or read. A previous file of the same name is untouched."""


class DeviceMemoryError(RoundPipeError, RuntimeError):
    """A device ran out of memory in a step. The message says where, what held it and what helps.

    Lightning's batch-size scaler takes it for what it is.
    """


class OffloadError(RoundPipeError, OSError):
    """Optimizer state cannot be kept on disk. The message says how much, where and what is free."""


class WatchdogError(RoundPipeError, RuntimeError):
    """A step made no progress for `timeout_seconds`; the message shows where workers stand."""
