# SPDX-License-Identifier: MIT OR Apache-2.0
import numpy as np
import numpy.typing as npt

def route_select(
    logits: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32],
    topk: int,
    gate_temp: float,
    route_scale: float,
    norm_topk: bool,
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float32]]: ...
