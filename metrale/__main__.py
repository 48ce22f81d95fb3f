# SPDX-License-Identifier: MIT OR Apache-2.0
"""``python -m metrale``."""

import sys

from metrale.cli import main

sys.exit(main())
