# SPDX-License-Identifier: MIT OR Apache-2.0
"""What docs/embedding.md says: its code is the example's, its names are declared, and its import errors appear."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from processes import python

import metrale

EXAMPLE = Path(__file__).with_name("saxpy_demo")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
PACKAGE = Path(metrale.__file__).parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", DOCUMENT, re.DOTALL)
TABLES = "\n".join(line for line in DOCUMENT.splitlines() if line.startswith("|"))
DOCUMENTED = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", TABLES))))
FILES = {"cython": "saxpy_demo/launcher.pyx", "python": "saxpy_demo/__init__.py", "meson": "meson.build"}


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[language for language, _ in BLOCKS])
def test_the_code_is_the_examples(language, code):
    assert code in (EXAMPLE / FILES[language]).read_text()


def test_every_documented_name_is_declared():
    declared = "".join(path.read_text() for path in PACKAGE.rglob("*.pxd"))
    modules = {path.stem for path in PACKAGE.rglob("*.pxd")}
    assert modules | set(re.findall(r"\w+", declared)) >= DOCUMENTED - {"metrale", "ops"}


def test_every_name_that_the_package_offers_is_documented():
    offered = re.sub(r"#.*", "", (PACKAGE / "gpu" / "__init__.pxd").read_text())
    names = " ".join(re.findall(r"cimport (\([^)]*\)|.*)", offered))
    assert set(re.findall(r"\w+", names)) <= DOCUMENTED


def test_every_launcher_is_documented():
    launchers = {name for path in (PACKAGE / "ops").glob("*.pxd") for name in re.findall(r"\bc_\w+", path.read_text())}
    assert launchers <= DOCUMENTED


USER = """\
from metrale.gpu cimport GpuBackend, KernelHandle, Launch, launch

def use(GpuBackend gpu not None, KernelHandle kernel not None):
    cdef Launch l
    launch(gpu, kernel, &l, 0)
"""
LAUNCH = "cdef int launch(GpuBackend gpu, KernelHandle kernel, Launch* l, uint64_t stream) except -1 nogil"


def built_against(folder, changes, user=USER):
    """Compile `user` as if the declarations that are installed had been others: `changes` of gpu/*.pxd."""
    old = folder / "old" / "metrale"
    shutil.copytree(PACKAGE, old, ignore=shutil.ignore_patterns("*.so", "cuda", "__pycache__"))
    for name, (now, before) in changes.items():
        text = (old / "gpu" / name).read_text()
        assert now in text
        (old / "gpu" / name).write_text(text.replace(now, before))
    (folder / "user.pyx").write_text(user)
    unit, library = folder / "user.cpp", folder / f"user{sysconfig.get_config_var('EXT_SUFFIX')}"
    cython = [sys.executable, "-m", "cython", "--cplus", "-3", "-I", old.parent, "user.pyx", "-o", unit]
    subprocess.run(cython, check=True, cwd=folder)
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-shared", "-fPIC"]
    subprocess.run([*compiler, f"-I{sysconfig.get_path('include')}", unit, "-o", library], check=True)
    return folder


@pytest.mark.parametrize(
    ("changes", "user", "message"),
    [
        (
            {"core.pxd": ("    cdef bint started", "    cdef uint64_t gone\n    cdef bint started")},
            USER,
            r"ValueError: metrale\.gpu\.core\.Core size changed",
        ),
        (
            {"core.pxd": ("    cdef uint32_t max_block[3]\n", "")},
            USER,
            r"RuntimeWarning: metrale\.gpu\.backend\.GpuBackend size changed",
        ),
        (
            {"launch.pxd": (LAUNCH, LAUNCH.replace("uint64_t stream", "int priority"))},
            USER,
            r"TypeError: C function metrale\.gpu\.launch\.launch has wrong signature",
        ),
        (
            {
                "launch.pxd": (LAUNCH, LAUNCH.replace("launch(", "begin(")),
                "__init__.pxd": ("check_fit, launch,", "check_fit, begin,"),
            },
            USER.replace("launch(gpu", "begin(gpu").replace("Launch, launch", "Launch, begin"),
            r"ImportError: metrale\.gpu\.launch does not export expected C function begin",
        ),
    ],
    ids=["a class has shrunk", "a class has grown", "a function has changed", "a function is gone"],
)
def test_a_module_built_against_other_declarations_is_told_at_import(tmp_path, changes, user, message):
    folder = built_against(tmp_path, changes, user)
    assert re.search(message, python("import sys; sys.path.insert(0, sys.argv[1]); import user", folder).stderr)


def test_a_module_built_against_the_same_declarations_is_imported_in_silence(tmp_path):
    folder = built_against(tmp_path, {})
    done = python("import sys; sys.path.insert(0, sys.argv[1]); import user", folder)
    assert (done.returncode, done.stderr) == (0, "")
