# SPDX-License-Identifier: MIT OR Apache-2.0
from typing_extensions import disjoint_base

@disjoint_base
class HostView: ...
