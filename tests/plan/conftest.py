# SPDX-License-Identifier: MIT OR Apache-2.0
import pytest
from model_files import v41_flash, write_model

from metrale.formats.gguf import GgufFile
from metrale.plan import model_plan


@pytest.fixture(scope="session")
def flash(tmp_path_factory):
    """The first part of a sparse split file of 261 GB."""
    return v41_flash(tmp_path_factory.mktemp("flash"))


@pytest.fixture
def planned(tmp_path):
    """`planned(architecture, keys, tensors, **options)`: the plan of such a model."""

    def plan(architecture, keys, tensors, **options):
        with GgufFile(write_model(tmp_path, architecture, keys, tensors)) as gguf:
            return model_plan(gguf, **options)

    return plan
