"""Where metrics are: in host memory, as submodules of the user's module; and what else is found."""

# torchmetrics has no public face for how often a metric was updated.
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric

from roundpipe_lightning.errors import ConfigurationError


def bring_home(name: str, metric: nn.Module) -> None:
    """Bring a metric to the host, where all the module's state is.

    Args:
        name: Its name in the user's module.
        metric: The metric, or a collection.

    Raises:
        ConfigurationError: It is on the meta device, and has no values.
    """
    devices = {part.device.type for part in metric.modules() if isinstance(part, Metric)}
    if "meta" in devices:
        raise ConfigurationError(
            f"The metric {name!r} is on the meta device, where it has no values. Make it without "
            "device='meta': metrics stay in host memory, and steps on a device get copies there."
        )
    if not devices <= {"cpu"}:
        metric.to("cpu")


class UnseenMetrics:
    """Metrics that a module keeps in lists and dicts, where no one finds them.

    PyTorch does not know them as submodules, so neither Lightning nor the strategy can stand copies
    in for them.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        known = {id(part) for part in module.modules()}
        self._unseen = [(n, m) for n, m in _in_containers(module) if id(m) not in known]
        self._owner = type(module).__name__

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say with an error about tensors on several devices that it may come from such a metric.

        Raises:
            ConfigurationError: In place of that error.
        """
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            is_metrics = "different devices in metric calculation" in text
            if not is_metrics and not (self._unseen and "all tensors to be on" in text):
                raise
            raise ConfigurationError(
                f"A metric met tensors of another device: {self._names()}. Assign it to an "
                "attribute of the module, or keep it in nn.ModuleList, nn.ModuleDict or "
                "MetricCollection; it is then found, and computes where its arguments are. Leave "
                ".to(device) out."
            ) from error

    def _names(self) -> str:
        return _words(self._unseen) or f"one that {self._owner} does not have as a submodule"

    @contextmanager
    def guarded(self, metrics: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        """Refuse that microbatches, which run at once, update what has no copies.

        Args:
            metrics: The metrics that have copies; these must not be updated themselves.

        Raises:
            ConfigurationError: At the end, naming what was updated.
        """
        watched = [*self._unseen]
        for name, metric in metrics:
            watched += [(name, part) for part in metric.modules() if isinstance(part, Metric)]
        before = [metric._update_count for _, metric in watched]
        yield
        pairs = zip(watched, before, strict=True)
        updated = [place for place, count in pairs if place[1]._update_count != count]
        if updated:
            raise ConfigurationError(
                f"training_step updated {_words(updated)} past the copy that each microbatch has. "
                "Use metrics as attributes of the module (self.metric), or keep them in "
                "nn.ModuleList, nn.ModuleDict or MetricCollection instead of a list or a dict, or "
                "set num_microbatches=1."
            )


def _words(metrics: Sequence[tuple[str, Metric]]) -> str:
    return ", ".join(f"{name} ({type(metric).__name__})" for name, metric in metrics)


def _in_containers(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    """Find metrics in the lists, tuples and dicts that are attributes of a module or a child."""
    for path, part in module.named_modules():
        if isinstance(part, Metric):
            continue
        for attribute, value in vars(part).items():
            place = f"{path}.{attribute}" if path else attribute
            if attribute.startswith("_") and attribute in vars(nn.Module()):
                continue
            if isinstance(value, (list, tuple)):
                items = [(f"{place}[{index}]", item) for index, item in enumerate(value)]
            elif isinstance(value, Mapping):
                items = [(f"{place}[{key!r}]", item) for key, item in value.items()]
            else:
                continue
            yield from ((name, item) for name, item in items if isinstance(item, Metric))
