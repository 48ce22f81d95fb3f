# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an installation holds, compared with the source tree."""

from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

import metrale

TREE = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed():
    """The installed files, relative to site-packages."""
    files = {PurePosixPath(path) for path in metadata.files("metrale")}
    if PurePosixPath("metrale/__init__.py") not in files:
        pytest.skip("an editable installation has its files elsewhere")
    return {path for path in files if "__pycache__" not in path.parts}


def in_tree(folder, *suffixes):
    found = (path for path in (TREE / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {PurePosixPath(path.relative_to(TREE)) for path in found if not suffixes or path.suffix in suffixes}


def test_the_version_is_the_same_everywhere():
    assert metadata.version("metrale") == metrale.__version__


def test_every_module_declaration_and_stub_is_installed(installed):
    assert in_tree("metrale", ".py", ".pyi", ".pxd", ".typed") <= installed


def test_every_compiled_module_has_a_stub(installed):
    compiled = {path.parent / path.name.split(".")[0] for path in installed if ".cpython-" in path.name}
    assert len(compiled) == len(in_tree("metrale", ".pyx"))
    assert {path.with_suffix(".pyi") for path in compiled} <= installed


def test_the_kernel_sources_are_installed_and_nothing_else_of_their_folder(installed):
    sources = in_tree("cuda") - {PurePosixPath("cuda/meson.build")}
    assert {path.relative_to("metrale") for path in installed if path.is_relative_to("metrale/cuda")} == sources


def test_every_kernel_module_has_its_parameters_and_host_code(installed):
    from metrale.gpu import sources

    assert sources.modules() == sorted(path.stem for path in in_tree("cuda", ".cu") if path.parent.name == "cuda")
    assert PurePosixPath("metrale/gpu/libmetrale_host.so") in installed


def test_no_build_input_is_installed(installed):
    assert not [path for path in installed if path.suffix in (".pyx", ".build", ".d")]


def test_both_licences_are_installed(installed):
    assert {path.name for path in installed if path.parent.name == "licenses"} == {"LICENSE-MIT", "LICENSE-APACHE"}
