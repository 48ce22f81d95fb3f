# SPDX-License-Identifier: MIT OR Apache-2.0
"""What fits: the memory that the model of a GGUF file takes, and the bytes of a token, from the header alone."""

from metrale.plan.model import H200_COPY_BANDWIDTH, ModelPlan, model_plan

__all__ = ["H200_COPY_BANDWIDTH", "ModelPlan", "model_plan"]
