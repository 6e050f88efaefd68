"""Each microbatch's share of the batch's loss, so that their number changes only rounding.

A loss is a mean over something: over samples, or over the tokens that have a target. The mean over
the batch is the sum over microbatches of their mean times their *share* of what is averaged over:

```
microbatch 0: 3 samples, 10 targets     mean over samples: 3/4     mean over targets: 10/40
microbatch 1: 1 sample,  30 targets                        1/4                        30/40
```

Equal weights would be wrong for the padded batch above, whose microbatches differ in targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from roundpipe_lightning.errors import BatchError, ConfigurationError
from roundpipe_lightning.models.batches import batch_size_of

__all__ = ["MicrobatchWeight", "count_targets", "microbatch_weights"]

MicrobatchWeight = Literal["auto", "tokens", "samples"] | Callable[[Any], float]

IGNORED_LABEL = -100  # the label that cross-entropy leaves out by default


def microbatch_weights(microbatches: Sequence[Any], mode: MicrobatchWeight) -> tuple[float, ...]:
    """Return every microbatch's share of what the batch's loss averages over.

    `"samples"` counts samples: for a loss that is a mean over the first dimension.

    `"tokens"` counts labels that are not -100: for a loss that is a mean over target tokens. Causal
    language models shift the labels inside, so that the first one of a sequence is never a target.
    That is decided from the data: where `labels` has the shape of `input_ids` and equals it
    wherever it is not -100, the labels are the inputs, hence the model shifts, and the first column
    is left out. Labels that differ from the inputs (shifted before, masked words, classes per
    token) count in full.

    `"auto"` is `"tokens"` for mappings with whole-number `labels` and `input_ids` of one shape and
    two dimensions, which is what causal language models take, and `"samples"` for all else.

    Args:
        microbatches: The microbatches of one batch, as `split_batch` gives them. One alone weighs
            1, whatever it holds.
        mode: One of the three, or a function from a microbatch to its count, a number of 0 or more.

    Returns:
        One weight per microbatch; they sum to 1 up to rounding. Counts are exact whole numbers.

    Raises:
        BatchError: If nothing is counted in any microbatch (no label that is not -100), or the
            batch has nothing of the kind to count.
        ConfigurationError: If there is no such mode.
    """
    if not callable(mode) and mode not in ("auto", "tokens", "samples"):
        raise ConfigurationError(
            f"microbatch_weight={mode!r} is not known. Use 'auto', 'tokens', 'samples' or a "
            "function from a microbatch to a number."
        )
    if len(microbatches) == 1:
        return (1.0,)
    counts = _counts(microbatches, mode)
    total = sum(counts)
    if total == 0:
        raise BatchError(_nothing_counted(mode))
    return tuple(count / total for count in counts)


def count_targets(batch: Any) -> int | None:
    """Return how many labels of a batch are targets, as `microbatch_weights` counts them.

    Args:
        batch: A batch, as the data loader gives it.

    Returns:
        The number; None for a batch whose microbatches `"auto"` does not weigh by tokens.
    """
    return _target_counts([batch])[0] if _is_language_batch(batch) else None


def _counts(microbatches: Sequence[Any], mode: MicrobatchWeight) -> Sequence[float]:
    if callable(mode):
        return [_checked(mode(microbatch)) for microbatch in microbatches]
    if mode == "tokens" or (mode == "auto" and all(map(_is_language_batch, microbatches))):
        return _target_counts(microbatches)
    return [batch_size_of(microbatch) for microbatch in microbatches]


def _checked(count: Any) -> float:
    value = float(count)
    if not (math.isfinite(value) and value >= 0):
        raise BatchError(
            f"microbatch_weight returned {value} for a microbatch. "
            "It must return a finite number of 0 or more, such as its number of target tokens."
        )
    return value


def _is_language_batch(microbatch: Any) -> bool:
    labels, inputs = _entry(microbatch, "labels"), _entry(microbatch, "input_ids")
    return (
        labels is not None
        and inputs is not None
        and labels.dim() == 2
        and labels.shape == inputs.shape
        and not labels.is_floating_point()
        and not labels.is_complex()
    )


def _entry(microbatch: Any, key: str) -> Tensor | None:
    value = microbatch.get(key) if isinstance(microbatch, Mapping) else None
    return value if isinstance(value, Tensor) else None


def _target_counts(microbatches: Sequence[Any]) -> list[int]:
    labels = []
    for microbatch in microbatches:
        entry = _entry(microbatch, "labels")
        if entry is None:
            raise BatchError(
                "microbatch_weight='tokens' counts the labels that are not -100, but the batch has "
                "no tensor under the key 'labels'. Use 'samples', or a function from a microbatch "
                "to its number of targets."
            )
        labels.append(entry)
    if all(_labels_are_inputs(microbatch) for microbatch in microbatches):
        labels = [entry[..., 1:] for entry in labels]
    return [int((entry != IGNORED_LABEL).sum()) for entry in labels]


def _labels_are_inputs(microbatch: Mapping[str, Any]) -> bool:
    labels, inputs = _entry(microbatch, "labels"), _entry(microbatch, "input_ids")
    if labels is None or inputs is None or labels.shape != inputs.shape:
        return False
    return bool(((labels == inputs) | (labels == IGNORED_LABEL)).all())


def _nothing_counted(mode: MicrobatchWeight) -> str:
    if callable(mode):
        return (
            "microbatch_weight returned 0 for every microbatch of the batch, so none can have a "
            "share of the loss. It must be above 0 for one at least."
        )
    return (
        "No label of the batch is a target: all are -100, or stand first in their sequence where "
        "the model shifts them, so the loss is a mean over nothing. Leave such batches out of the "
        "data, or set microbatch_weight='samples'."
    )
