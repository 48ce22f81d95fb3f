# SPDX-License-Identifier: MIT OR Apache-2.0
"""cuda/host/build.py as a program and as a module."""

import runpy
import subprocess
import sys
from ctypes import c_float, c_int

import pytest
from library import CUDA, FOLDER, Library

COPY = 'extern "C" __global__ void copy(const int* in, int* out) { out[threadIdx.x] = in[threadIdx.x]; }\n'


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "sample.cu"
    path.write_text(COPY)
    return path


def test_the_program_builds_a_library_and_writes_signatures_and_dependencies(source, tmp_path):
    target, signatures, depfile = tmp_path / "lib.so", tmp_path / "signatures.py", tmp_path / "lib.d"
    command = [sys.executable, CUDA / "host" / "build.py", "-o", target, "--signatures", signatures, source]
    subprocess.run([*command, "--depfile", depfile], check=True)
    out = (c_int * 4)()
    Library(target).launch("copy", (c_int * 4)(1, 2, 3, 4), out, block=4)
    assert list(out) == [1, 2, 3, 4]
    kernels = {"sample": {"copy": (("in", "ptr"), ("out", "ptr"))}}
    assert runpy.run_path(str(signatures))["KERNELS"] == kernels
    dependencies = depfile.read_text()
    assert dependencies.startswith(f"{target}: ")
    assert {str(source), str(CUDA / "host" / "block.cpp")} <= set(dependencies.split())


def test_the_same_sources_give_the_same_bytes_anywhere(build, source, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copied = elsewhere / source.name
    copied.write_text(COPY)
    build.build([source], tmp_path / "a.so")
    build.build([copied], tmp_path / "b.so", jobs=1)
    assert (tmp_path / "a.so").read_bytes() == (tmp_path / "b.so").read_bytes()


def test_a_header_of_the_callers_own(build, source, tmp_path):
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "own.h").write_text("#define OWN 7\n")
    source.write_text('#include "own.h"\nextern "C" __global__ void own(int* out) { *out = OWN; }\n')
    build.build([source], tmp_path / "lib.so", include=[folder])
    out = (c_int * 1)()
    Library(tmp_path / "lib.so").launch("own", out, block=1)
    assert out[0] == 7


def test_arithmetic_is_not_contracted(build, source, tmp_path):
    source.write_text('extern "C" __global__ void square(float x, float* out) { *out = x * x - 1.0f; }\n')
    build.build([source], tmp_path / "lib.so", cxx="g++ -march=native")
    x, out = c_float(1 + 2**-12), (c_float * 1)()
    Library(tmp_path / "lib.so").launch("square", x, out, block=1)
    assert out[0] == 2**-11  # and 2**-11 + 2**-24 with a fused multiply-add


def test_other_architectures_switch_by_ucontext(build, tmp_path):
    build.build([FOLDER / "collectives.cu"], tmp_path / "lib.so", cxx="g++ -DMETRALE_UCONTEXT")
    values, out = (c_int * 2560)(*range(2560)), (c_int * 2560)()
    Library(tmp_path / "lib.so").launch("reverse_256", values, out, grid=10, block=256)
    assert list(out) == [x for i in range(10) for x in reversed(range(256 * i, 256 * i + 256))]


def refusal(build, source, **options):
    with pytest.raises(build.BuildError) as error:
        build.build([source], source.with_suffix(".so"), **options)
    return str(error.value)


def test_no_compiler(build, source):
    message = refusal(build, source, cxx="no-such-compiler")
    assert "no C++ compiler: 'no-such-compiler' is not on the path" in message


def test_no_cuda_headers(build, source, tmp_path):
    message = refusal(build, source, cuda_include=tmp_path)
    assert f"CUDA's headers are missing ({tmp_path})" in message
    assert "pip install nvidia-cuda-runtime" in message


def test_a_cuda_header_of_another_wheel(build, source, tmp_path):
    (tmp_path / "cuda_bf16.h").touch()
    assert f"{tmp_path} lacks crt/host_defines.h: pip install nvidia-cuda-crt" in refusal(
        build, source, cuda_include=tmp_path
    )


def test_what_the_compiler_said(build, source):
    source.write_text('extern "C" __global__ void broken(int* out) { *out = nothing; }\n')
    message = refusal(build, source)
    assert "sample.cu:1" in message
    assert "nothing" in message


def test_a_source_without_kernels(build, source):
    source.write_text("int nothing;\n")
    assert "sample.cu has no kernel" in refusal(build, source)


def test_a_signature_that_cannot_be_read(build, source):
    source.write_text('extern "C" __global__ void nameless(int*) {}\n')
    message = refusal(build, source)
    assert "sample.cu: kernel nameless, parameter 1 ('int *'): the parameter has no name" in message


def test_a_type_that_was_read_for_another(build, source):
    source.write_text(
        'template <class T> struct Id { using type = T; };\nextern "C" __global__ void odd(Id<int>::type x) {}\n'
    )
    assert "odd: its C++ signature differs from the parsed one" in refusal(build, source)


def test_the_program_says_what_is_wrong_and_fails(source, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            CUDA / "host" / "build.py",
            "-o",
            tmp_path / "lib.so",
            "--cuda-include",
            tmp_path,
            source,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("build.py: CUDA's headers are missing")
