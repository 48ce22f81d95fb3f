# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a program did with GPU memory: recorded in its process, kept in a file, read afterwards.

`METRALE_AUDIT=FILE` in the environment makes a program record itself; ``metrale audit`` runs one so, and reports on the
capture that it leaves.
"""

from metrale.audit.capture import BackendCapture, Capture, Entry, Process

__all__ = ["BackendCapture", "Capture", "Entry", "Process"]
