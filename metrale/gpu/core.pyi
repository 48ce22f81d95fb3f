# SPDX-License-Identifier: MIT OR Apache-2.0
from typing_extensions import disjoint_base

from metrale.gpu.driver import Driver
from metrale.gpu.ledger import Ledger

@disjoint_base
class Core(Driver):
    @property
    def ledger(self) -> Ledger: ...
    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def sm_count(self) -> int: ...
    @property
    def compute_capability(self) -> tuple[int, int]: ...
