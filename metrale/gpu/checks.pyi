# SPDX-License-Identifier: MIT OR Apache-2.0
from typing_extensions import disjoint_base

from metrale.gpu.graphs import Graphs
from metrale.gpu.ledger import Allocation

@disjoint_base
class Checks(Graphs):
    def scan_redzones(self) -> list[tuple[Allocation, int, int]]: ...
