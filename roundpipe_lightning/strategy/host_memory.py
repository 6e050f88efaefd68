"""How much host memory this process has had."""

from __future__ import annotations

import sys


def peak_host_bytes() -> int | None:
    """Return the most memory that this process has had resident; None where nobody counts it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
