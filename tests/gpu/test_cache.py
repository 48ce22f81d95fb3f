# SPDX-License-Identifier: MIT OR Apache-2.0
"""The folder of compiled kernels, and what the key of an entry covers."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from processes import output_of

from metrale.errors import ArgumentError, CompileError, KernelNotFound, MetraleError
from metrale.gpu import cache, cubin, hostlib, sources

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
    "cut in the seal": lambda data: data[:-20],
    "cut to less than a seal": lambda data: data[:20],
    "a byte more": lambda data: data + b"x",
    "a flipped bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "another format": lambda data: data.replace(b"metrale\x02", b"metrale\x01"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_none(folder, damage):
    cache.put("entry", b"payload of the entry")
    path = folder / "entry"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert cache.get("entry") is cache.file("entry") is None


def test_an_entry_that_is_loaded_by_path_begins_with_its_payload(folder):
    with cache.reserve("entry") as path:
        path.write_bytes(b"payload")
    assert cache.file("entry") == folder / "entry"
    assert (folder / "entry").read_bytes().startswith(b"payload")


@pytest.mark.parametrize("trouble", ["write_bytes", "replace"])
def test_a_payload_that_cannot_be_kept_is_a_warning(folder, monkeypatch, trouble):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, trouble, refuse)
    with pytest.warns(UserWarning, match="the cache does not keep entry.*No space left"):
        cache.put("entry", b"payload")
    assert list(folder.iterdir()) == []


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


def test_code_is_returned_though_there_can_be_no_cache(source, compilations, monkeypatch):
    monkeypatch.setenv("METRALE_CACHE_DIR", str(source / "no folder"))
    with pytest.warns(UserWarning, match="the cache does not keep answer"):
        assert cubin.cubin(source, ARCH) == b"code 1"


def test_an_unsafe_cache_is_an_error_all_the_same(source, folder, compilations):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(MetraleError, match="cache folder"):
        cubin.cubin(source, ARCH)


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


@pytest.mark.parametrize(
    "directive",
    [
        '# include "deeper.h"',
        '#include /* the deeper one */ "deeper.h"',
        '/* first\n */ #include "deeper.h"',
        '%:include "deeper.h"',
        '#inc\\\nlude "deeper.h"',
        "#include <deeper.h>",
        '#if __has_include("deeper.h")\n#endif',
    ],
)
def test_the_key_covers_a_header_however_it_is_named(source, compilations, directive):
    (source.parent / "deeper.h").write_text("#define DEEP 1\n")
    source.write_text(directive + "\n" + source.read_text())
    cubin.cubin(source, ARCH)
    touched(source.parent / "deeper.h")
    assert cubin.cubin(source, ARCH) == b"code 2"


@pytest.mark.parametrize("directive", ["#include WHICH", "# include /**/ WHICH", "%:include WHICH(1)"])
def test_a_source_that_names_a_header_by_a_macro_is_always_compiled(source, folder, compilations, directive):
    (source.parent / "answer.h").write_text(directive + "\n")
    assert [cubin.cubin(source, ARCH), cubin.cubin(source, ARCH)] == [b"code 1", b"code 2"]
    assert not folder.exists()


def test_headers_may_include_each_other_through_their_parents(source):
    inner = source.parent / "inner"
    inner.mkdir()
    (inner / "a.h").write_text('#include "../inner/b.h"\n')
    (inner / "b.h").write_text('#include "../inner/a.h"\n')
    source.write_text('#include "inner/a.h"\n')
    assert set(sources.digests(source, [])) == {"answer.cu", str(inner / "a.h"), str(inner / "b.h")}


def test_the_name_of_a_header_is_any_bytes(source):
    name = b"caf\xe9.h"
    (source.parent / os.fsdecode(name)).write_text("")
    source.write_bytes(b'#include "' + name + b'"\n#include "' + b"x" * 5000 + b'"\n')
    assert len(sources.digests(source, [])) == 2


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
        print([name for name in ("cuda.core", "cuda.bindings.nvrtc", "cuda.pathfinder") if name in sys.modules])
    """
    assert output_of(code, source) == "['cuda.core', 'cuda.bindings.nvrtc', 'cuda.pathfinder']\n"
    assert output_of(code, source) == "[]\n"


# Host libraries


@pytest.fixture
def builds(monkeypatch):
    """The sources that were made into libraries; the compiler only preprocesses."""
    calls, tool = [], hostlib.build_tool()

    def build(sources, output, **options):
        calls.append(sources[0].name)
        output.write_bytes(b"library %d" % len(calls))

    monkeypatch.setattr(tool, "build", build)
    monkeypatch.setattr(hostlib, "build_tool", lambda: tool)
    return calls


def test_a_library_is_built_once(source, builds):
    assert hostlib.compile(str(source)) == hostlib.compile(str(source))
    assert builds == ["answer.cu"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_built_again(source, builds, damage):
    path = Path(hostlib.compile(str(source)))
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert hostlib.compile(str(source)) == str(path)
    assert path.read_bytes().startswith(b"library 2")


def test_a_library_depends_on_what_the_compiler_sees(source, builds, monkeypatch):
    header = source.parent / "answer.h"
    header.write_text('#define WHICH "deeper.h"\n#include WHICH\n')
    (source.parent / "deeper.h").write_text("#define ANSWER 1\n")
    first = hostlib.compile(str(source))
    (source.parent / "deeper.h").write_text("#define ANSWER 2\n")
    second = hostlib.compile(str(source))
    (source.parent / "unused.h").write_text("")
    assert hostlib.compile(str(source)) == second != first
    monkeypatch.setenv("CXX", "g++ -O3")
    assert hostlib.compile(str(source)) not in (first, second)
