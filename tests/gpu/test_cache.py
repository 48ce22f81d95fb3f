# SPDX-License-Identifier: MIT OR Apache-2.0
"""The folder of compiled kernels, and what the key of an entry covers."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from processes import output_of

from metrale.errors import ArgumentError, CompileError, KernelNotFound, MetraleError
from metrale.gpu import cache, cubin, sources

ARCH = "sm_90a"
KERNEL = '#include "answer.h"\nextern "C" __global__ void answer(int* out) { out[0] = ANSWER; }\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    path = tmp_path / "cache"
    monkeypatch.setenv("METRALE_CACHE_DIR", str(path))
    return path


@pytest.fixture
def source(tmp_path, folder):
    """A kernel and its header."""
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    path = tmp_path / "answer.cu"
    path.write_text(KERNEL)
    return path


@pytest.fixture
def compilations(monkeypatch):
    """What was compiled, (file, architecture); the compiler is not run."""
    calls = []

    def compile_cubin(path, arch):
        calls.append((path.name, arch))
        return b"code %d" % len(calls), ""

    monkeypatch.setattr(cubin, "compile_cubin", compile_cubin)
    return calls


# The folder


def test_the_folder_is_made_for_its_user_alone(folder):
    assert cache.folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"METRALE_CACHE_DIR": "own", "XDG_CACHE_HOME": "xdg", "HOME": "home"}, "own"),
        ({"METRALE_CACHE_DIR": "", "XDG_CACHE_HOME": "xdg", "HOME": "home"}, "xdg/metrale"),
        ({"METRALE_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "home"}, "home/.cache/metrale"),
    ],
)
def test_the_environment_says_where_it_is(tmp_path, monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    assert cache.folder() == tmp_path / expected


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_write_to_is_refused(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(MetraleError, match=f"cache folder {folder}: got owner .* and mode {mode:o}, allowed: owned by"):
        cache.get("entry")


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(MetraleError, match="allowed: owned by user"):
        cache.put("entry", b"payload")
    assert list(folder.iterdir()) == []


# Entries


def test_an_entry_comes_back(folder):
    assert cache.get("entry") is None
    cache.put("entry", b"payload")
    assert cache.get("entry") == b"payload"
    assert cache.usage()[0] == 1


@pytest.mark.parametrize("payload", [b"", b"\0" * 5000])
def test_payloads_are_any_bytes(folder, payload):
    cache.put("entry", payload)
    assert cache.get("entry") == payload


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "cut in the head": lambda data: data[:20],
    "a byte more": lambda data: data + b"x",
    "a flipped bit": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "another format": lambda data: b"M" + data[1:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_none(folder, damage):
    cache.put("entry", b"payload of the entry")
    path = folder / "entry"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert cache.get("entry") is None


def test_a_failed_write_leaves_the_entry_and_no_file_behind(folder):
    cache.put("entry", b"before")
    with pytest.raises(KeyError), cache.reserve("entry") as path:
        path.write_bytes(b"half")
        raise KeyError
    assert cache.get("entry") == b"before"
    assert [path.name for path in folder.iterdir()] == ["entry"]


def test_readers_see_an_entry_whole(folder):
    """One thread writes two payloads in turn, others read."""
    payloads = {bytes([i]) * 200_000 for i in (1, 2)}
    cache.put("entry", next(iter(payloads)))
    seen, stop = set(), threading.Event()

    def read():
        while not stop.is_set():
            seen.add(cache.get("entry"))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(25):
        for payload in payloads:
            cache.put("entry", payload)
    stop.set()
    for reader in readers:
        reader.join()
    assert seen <= payloads


# Keys


def test_a_second_request_compiles_nothing(source, compilations):
    assert cubin.cubin(source, ARCH) == cubin.cubin(source, ARCH) == b"code 1"
    assert compilations == [("answer.cu", ARCH)]


def test_a_damaged_entry_is_compiled_again(source, folder, compilations):
    cubin.cubin(source, ARCH)
    (entry,) = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert cubin.cubin(source, ARCH) == b"code 2"
    assert cache.get(entry.name) == b"code 2"


def touched(path):
    path.write_text(path.read_text() + "\n")


CHANGES = {
    "the source": lambda source, patch: touched(source),
    "a header": lambda source, patch: touched(source.parent / "answer.h"),
    "an option": lambda source, patch: patch.setitem(cubin.OPTIONS, "fma", True),
    "the compiler": lambda source, patch: patch.setattr(cubin, "nvrtc_library", lambda: Path(cubin.__file__)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_covers(source, compilations, monkeypatch, change):
    cubin.cubin(source, ARCH)
    CHANGES[change](source, monkeypatch)
    assert cubin.cubin(source, ARCH) == b"code 2"


def test_the_key_covers_the_architecture(source, compilations):
    for arch in ("sm_80", "sm_90", "sm_90a"):
        cubin.cubin(source, arch)
    assert [arch for _, arch in compilations] == ["sm_80", "sm_90", "sm_90a"]


def test_the_key_covers_headers_of_headers(source, compilations):
    (source.parent / "deeper.h").write_text("#define DEEP 1\n")
    header = source.parent / "answer.h"
    header.write_text('#include "deeper.h"\n' + header.read_text())
    cubin.cubin(source, ARCH)
    touched(source.parent / "deeper.h")
    assert cubin.cubin(source, ARCH) == b"code 2"


def test_the_key_covers_a_header_that_takes_anothers_place(source, compilations):
    source.write_text('#include "common/types.cuh"\n' + source.read_text())
    cubin.cubin(source, ARCH)
    (source.parent / "common").mkdir()
    shutil.copy(sources.CUDA_DIR / "common" / "types.cuh", source.parent / "common")
    touched(source.parent / "common" / "types.cuh")
    assert cubin.cubin(source, ARCH) == b"code 2"


@pytest.mark.parametrize("arch", ["sm_9", "90a", "compute_90", "sm_90b", "sm_90a;", ""])
def test_an_architecture_has_a_name(source, compilations, arch):
    with pytest.raises(ArgumentError, match=f"arch: got {arch!r}, allowed: a name like sm_80"):
        cubin.cubin(source, arch)
    assert compilations == []


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")],
)
def test_the_architecture_of_a_device(capability, arch):
    assert cubin.architecture(capability) == arch


def test_a_module_of_the_package_has_a_source():
    assert sources.source_path("gemv").name == "gemv.cu"
    with pytest.raises(KernelNotFound, match="no kernel module 'gemw'; nearest: gemv"):
        sources.source_path("gemw")


# The compiler


def test_the_compiler_gives_machine_code(source):
    assert cubin.cubin(source, ARCH)[:4] == b"\x7fELF"


def test_the_compiler_reports_registers_when_asked(source):
    _, log = cubin.compile_cubin(source, ARCH, resource_report=True)
    assert "registers" in log


def test_an_error_of_the_source_carries_the_compilers_log(source, folder):
    source.write_text(KERNEL.replace("ANSWER;", "QUESTION;"))
    with pytest.raises(CompileError, match=r"^answer.cu for sm_90a does not compile") as caught:
        cubin.cubin(source, ARCH)
    for text in (caught.value.log, str(caught.value)):
        assert 'identifier "QUESTION" is undefined' in text
        assert "answer.cu" in text
    assert cache.usage() == (0, 0)


def test_a_hit_loads_no_compiler(source):
    code = """
        import sys
        from pathlib import Path
        from metrale.gpu import cubin
        assert cubin.cubin(Path(sys.argv[1]), "sm_90a")[:4] == b"\\x7fELF"
        print([name for name in ("cuda.core", "cuda.bindings.nvrtc") if name in sys.modules])
    """
    assert output_of(code, source) == "['cuda.core', 'cuda.bindings.nvrtc']\n"
    assert output_of(code, source) == "[]\n"
