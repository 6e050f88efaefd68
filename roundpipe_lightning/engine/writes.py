"""What one microbatch's user code writes into the attributes of modules.

Adapters switched off for a reference pass, `eval()` for a while, a counter: such writes are the
microbatch's own until the step ends. Other microbatches run at the same time and must not see
them; the microbatch's blocks must, on whichever worker they run, and in their recompute as they
were in the forward pass.

```
user code      off ── pass 1 ── on ── pass 2 ──▶ loss
its blocks          [off] 0 1 2      [on] 0 1 2        recompute [on] 2 1 0, [off] 2 1 0
the module     as before the step ─────────────────────────────────────────▶ told, in order
```
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import nn

from roundpipe_lightning.engine.view import write_through

ModuleWrites: TypeAlias = list[tuple[nn.Module, dict[str, Any]]]
"""Originals with the attributes that were written, `DELETED` for one that was deleted."""


class Writes:
    """The attributes that user code has written, by the original module.

    Attributes:
        were_any: Whether the user's code or a block has written attributes or buffers.
    """

    def __init__(self) -> None:
        # By identity: the hash of a metric changes with its state. The original is kept alive.
        self._written: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self.were_any = False

    def note(self, module: nn.Module, name: str, value: Any) -> None:
        """Keep what the user's code has written, or `DELETED`."""
        self.were_any = True
        self._written.setdefault(id(module), (module, {}))[1][name] = value

    def renew(self, module: nn.Module, name: str, value: Any) -> None:
        """Hear that a block has written, and the original knows: it is the latest value."""
        self.were_any = True
        if id(module) in self._written and name in self._written[id(module)][1]:
            self.note(module, name, value)

    def within(self, block: nn.Module) -> ModuleWrites:
        """Return what has been written so far into a block and its children."""
        if not self._written:
            return []
        found = (self._written.get(id(module)) for module in block.modules())
        return [(entry[0], dict(entry[1])) for entry in found if entry is not None]

    def tell(self) -> None:
        """Write everything into the originals, and forget it."""
        written, self._written = self._written, {}
        for module, attributes in written.values():
            for name, value in attributes.items():
                write_through(module, name, value)
