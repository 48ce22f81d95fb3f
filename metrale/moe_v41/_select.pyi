# SPDX-License-Identifier: MIT OR Apache-2.0
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

MAX_ROUTED: int
MAX_TOPK: int
NOT_RESIDENT: int
NOT_FINITE: int

def route_select(
    logits: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32],
    topk: SupportsIndex,
    gate_temp: float,
    route_scale: float,
    norm_topk: bool,
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float32]]: ...
