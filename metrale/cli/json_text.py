# SPDX-License-Identifier: MIT OR Apache-2.0
"""What commands print with ``--json``."""

import json
import math
from typing import Any

__all__ = ["print_json"]


def print_json(facts: dict[str, Any]) -> None:
    """Print ``facts``; a number that is not finite, for which JSON has no word, as null."""
    print(json.dumps(_finite(facts), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
