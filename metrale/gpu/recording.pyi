# SPDX-License-Identifier: MIT OR Apache-2.0
from typing_extensions import disjoint_base

@disjoint_base
class LaunchStep: ...

@disjoint_base
class Recording:
    def __new__(cls, id: int) -> Recording: ...

@disjoint_base
class Recorder: ...
