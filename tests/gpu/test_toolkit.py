# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where CUDA's headers and NVRTC are looked for."""

import sys

import pytest

from metrale.gpu import cubin, hostlib, toolkit


@pytest.fixture
def tool():
    """cuda/host/build.py, loaded while the module path is whole."""
    return hostlib.build_tool()


@pytest.fixture
def places(tmp_path, monkeypatch):
    """`places(kind)`: the root of an installation of the kind wheel, conda or toolkit, where it is looked for."""

    def make(kind):
        root = tmp_path / kind
        if kind == "wheel":
            monkeypatch.setattr(sys, "path", [str(root), *sys.path])
            root = root / "nvidia" / "cu13"
        elif kind == "conda":
            monkeypatch.setenv("CONDA_PREFIX", str(root))
            root = root / "targets" / "x86_64-linux"
        else:
            monkeypatch.setenv("CUDA_HOME", str(root))
        for header in toolkit.HOST_HEADERS:
            path = root / "include" / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        (root / "lib").mkdir()
        (root / "lib" / "libnvrtc.so.13").touch()
        return root

    monkeypatch.setattr(toolkit.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "path", [])
    for name in ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return make


@pytest.mark.parametrize(
    ("there", "taken"),
    [(["toolkit"], "toolkit"), (["toolkit", "conda"], "conda"), (["toolkit", "conda", "wheel"], "wheel")],
)
def test_wheels_come_before_conda_and_toolkits(places, there, taken):
    roots = {kind: places(kind) for kind in there}
    assert toolkit.include_folders(toolkit.HOST_HEADERS) == [roots[taken] / "include"]
    assert toolkit.nvrtc_library() == roots[taken] / "lib" / "libnvrtc.so.13"


def test_both_backends_take_the_same_headers(tool, places, tmp_path):
    include = places("wheel") / "include"
    assert tool.find_cuda_include() == [include]
    assert cubin.include_dirs(tmp_path / "a.cu")[-1] == include


def test_a_place_without_all_headers_is_passed_over(places):
    incomplete, other = places("wheel"), places("toolkit")
    (incomplete / "include" / "nv" / "target").unlink()
    assert toolkit.include_folders(toolkit.HOST_HEADERS) == [other / "include"]
    assert toolkit.include_folders(toolkit.NVRTC_HEADERS) == [incomplete / "include"]


def test_headers_of_toolkits_may_lie_in_two_folders(places):
    include = places("toolkit") / "include"
    (include / "cccl").mkdir()
    (include / "nv").rename(include / "cccl" / "nv")
    assert toolkit.include_folders(toolkit.HOST_HEADERS) == [include, include / "cccl"]


def test_what_is_missing_is_told(tmp_path):
    with pytest.raises(toolkit.HeadersMissing, match=r"headers are missing .*: pip install nvidia-cuda-runtime"):
        toolkit.include_folders(toolkit.HOST_HEADERS, tmp_path)
