# SPDX-License-Identifier: MIT OR Apache-2.0
"""The GGUF reader on good files, with the `gguf` package as its oracle."""

import struct
import subprocess
import sys
import threading
import time

import gguf as gguf_package
import numpy as np
import pytest
from gguf_files import BOOL, F32, I32, STRING, U16, U32, U64, Image, array, text, value

from metrale.errors import ArgumentError, FormatError
from metrale.formats import kquant
from metrale.formats.gguf import GgufFile


@pytest.fixture(scope="module")
def oracle(tiny_path):
    return gguf_package.GGUFReader(tiny_path)


@pytest.fixture
def tiny(tiny_path):
    with GgufFile(tiny_path) as opened:
        yield opened


def write(path, image):
    path.write_bytes(image.encode())
    return path


# Against the oracle


def test_keys_and_values_are_the_oracles(tiny, oracle):
    expected = {name: f.contents() for name, f in oracle.fields.items() if not name.startswith("GGUF.")}
    assert {name: tiny[name] for name in tiny.keys} == expected


def test_tensors_are_the_oracles(tiny, oracle):
    found = [(t.name, t.type.ggml_id, t.shape, t.nbytes, t.offset) for t in tiny.tensors.values()]
    expected = [
        (t.name, int(t.tensor_type), tuple(int(n) for n in reversed(t.shape)), t.n_bytes, t.data_offset)
        for t in oracle.tensors
    ]
    assert found == expected


def test_tensor_bytes_are_the_oracles(tiny, oracle):
    for expected in oracle.tensors:
        assert bytes(tiny.tensors[expected.name].data) == expected.data.tobytes(), expected.name


def test_values_of_every_type_are_the_oracles(tmp_path):
    path = tmp_path / "written.gguf"
    writer = gguf_package.GGUFWriter(path, "test")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -5)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("string", "grün ✓")
    writer.add_array("strings", ["a", "", "ß"])
    writer.add_array("floats", [0.5, -2.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    expected = gguf_package.GGUFReader(path).fields
    with GgufFile(path) as written:
        for name in written.keys:
            assert written[name] == expected[name].contents(), name
        assert written["yes"] is True


# Values


def test_a_typed_value_is_returned(tiny):
    assert tiny.scalar("deepseek41.expert_count", int) == 8
    assert tiny.scalar("deepseek41.expert_weights_norm", bool) is True
    assert tiny.array("deepseek41.swiglu_clamp_exp", float) == [10.0, 10.0]


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        (
            "deepseek41.no_such",
            int,
            r"tiny-v41.gguf: key 'deepseek41.no_such': got none in the file, needed: a single int",
        ),
        ("deepseek41.expert_count", float, r"got u32, needed: a single float"),
        ("deepseek41.expert_weights_norm", int, r"got bool, needed: a single int"),
        ("deepseek41.swiglu_clamp_exp", float, r"got array of 2 f32, needed: a single float"),
    ],
)
def test_a_value_of_another_type_is_refused(tiny, key, kind, message):
    with pytest.raises(FormatError, match=message):
        tiny.scalar(key, kind)


def test_a_scalar_is_no_array(tiny):
    with pytest.raises(FormatError, match="got u32, needed: an array of int"):
        tiny.array("deepseek41.expert_count", int)


# Tensors


def test_a_tensor_is_found_by_name_type_and_shape(tiny):
    router = tiny.tensor("blk.0.ffn_gate_inp.weight", (kquant.BF16,), (8, 512))
    assert router.numpy().shape == (8, 512)
    assert router.numpy().dtype == np.uint16


@pytest.mark.parametrize(
    ("name", "types", "shape", "message"),
    [
        (
            "blk.7.x",
            (kquant.Q2_K,),
            (1, 256),
            r"tensor 'blk.7.x': got none in the file, needed: Q2_K \[1, 256\]",
        ),
        (
            "blk.0.exp_probs_b.bias",
            (kquant.BF16, kquant.F16),
            (8,),
            r"got F32 \[8\], needed: BF16 or F16 \[8\]",
        ),
        ("blk.0.exp_probs_b.bias", (kquant.F32,), (9,), r"got F32 \[8\], needed: F32 \[9\]"),
    ],
)
def test_another_tensor_is_refused(tiny, name, types, shape, message):
    with pytest.raises(FormatError, match=message):
        tiny.tensor(name, types, shape)


def test_quantised_rows_keep_their_bytes(tiny):
    gate = tiny.tensors["blk.0.ffn_gate_exps.weight"]
    assert gate.numpy().shape == (8, 256, 512 // 256 * 84)
    assert gate.slice_nbytes == 256 * 168
    assert bytes(gate.slice(5)) == gate.numpy()[5].tobytes()


def test_the_view_is_the_map_itself_and_read_only(tiny):
    data = tiny.tensors["blk.0.ffn_up_exps.weight"].data
    assert type(data.obj).__name__ == "mmap"
    assert data.readonly


def test_read_into_fills_the_buffer_from_an_offset(tiny):
    gate = tiny.tensors["blk.0.ffn_gate_exps.weight"]
    target = np.zeros((2, gate.slice_nbytes // 2), np.uint8)
    gate.read_into(target, 3 * gate.slice_nbytes)
    assert target.tobytes() == bytes(gate.slice(3))


def test_read_into_from_several_threads(tiny):
    gate = tiny.tensors["blk.0.ffn_gate_exps.weight"]
    targets = np.zeros((8, gate.slice_nbytes), np.uint8)
    readers = [threading.Thread(target=gate.read_into, args=(targets[e], e * gate.slice_nbytes)) for e in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert targets.tobytes() == bytes(gate.data)


@pytest.mark.parametrize(("size", "offset"), [(33, 0), (1, 32), (1, -1)])
def test_read_into_outside_the_tensor_is_refused(tiny, size, offset):
    with pytest.raises(ArgumentError, match=r"buffer: got .*within the 32 bytes of 'blk.0.exp_probs_b.bias'"):
        tiny.tensors["blk.0.exp_probs_b.bias"].read_into(bytearray(size), offset)


@pytest.mark.parametrize("index", [-1, 8])
def test_a_slice_outside_the_tensor_is_refused(tiny, index):
    with pytest.raises(ArgumentError, match=rf"index: got {index}, allowed: 0..7"):
        tiny.tensors["blk.0.ffn_gate_exps.weight"].slice(index)


def test_a_type_without_sizes_keeps_its_name_and_refuses_its_bytes(tmp_path):
    path = write(tmp_path / "odd.gguf", Image(tensors={"odd": (99, [64], b"\0" * 64)}))
    with GgufFile(path) as opened:
        odd = opened.tensors["odd"]
        assert (odd.type.name, odd.type.ggml_id, odd.shape) == ("type 99", 99, (64,))
        with pytest.raises(FormatError, match=r"odd.gguf: tensor 'odd': got type 99"):
            odd.numpy()


# Life


def test_views_outlive_the_file(tiny_path):
    with GgufFile(tiny_path) as opened:
        view = opened.tensors["blk.0.exp_probs_b.bias"].numpy()
        before = view.copy()
    assert (view == before).all()


def test_a_closed_file_says_so(tiny_path):
    opened = GgufFile(tiny_path)
    bias = opened.tensors["blk.0.exp_probs_b.bias"]
    opened.close()
    opened.close()
    for use in (lambda: bias.data, lambda: bias.read_into(bytearray(4)), lambda: opened["general.name"]):
        with pytest.raises(ArgumentError, match=r"tiny-v41.gguf: the file is closed"):
            use()


def test_a_path_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        GgufFile(tmp_path / "none.gguf")


def test_numpy_is_loaded_only_for_arrays(tiny_path, tmp_path):
    code = (
        "import sys\n"
        "from metrale.formats.gguf import GgufFile\n"
        "from metrale.formats.deepseek41 import moe_layer_spec\n"
        f"with GgufFile({str(tiny_path)!r}) as g: moe_layer_spec(g, 0)\n"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


# Size


def test_hundreds_of_gigabytes_open_in_milliseconds(tmp_path):
    n_tensors, nbytes = 1200, 200 << 20
    infos = b"".join(
        text(f"blk.{i}.w") + struct.pack("<IQIQ", 1, nbytes, kquant.quant_type(24).ggml_id, i * nbytes)
        for i in range(n_tensors)
    )
    vocabulary = [f"token {i}" for i in range(130_000)]
    keys = text("tokens") + array(STRING, vocabulary) + text("types") + array(I32, [1] * 130_000)
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, 2) + keys + infos)
        file.truncate(n_tensors * nbytes + (64 << 20))

    times = []
    for _ in range(3):
        start = time.perf_counter()
        with GgufFile(path) as opened:
            times.append(time.perf_counter() - start)
            assert len(opened.tensors) == n_tensors
    # The usual time is 20 ms; a reader that decodes the arrays takes seconds.
    assert min(times) < 0.25
    with GgufFile(path) as opened:
        assert opened.array("tokens", str) == vocabulary
        assert bytes(opened.tensors["blk.1199.w"].data[-4:]) == b"\0" * 4


# Splits


def split(folder, count=3, **changes):
    """`count` parts, one tensor each; `changes` replaces encoded keys of the last part."""
    paths = []
    for number in range(count):
        keys = {
            "split.no": value(U16, number),
            "split.count": value(U16, count),
            "split.tensors.count": value(I32, count),
        }
        if number == 0:
            keys["general.name"] = value(STRING, "whole")
        if number == count - 1:
            keys |= {name.replace("_", "."): encoded for name, encoded in changes.items()}
        image = Image(keys, {f"t{number}": (0, [2], struct.pack("<2f", number, -number))})
        paths.append(write(folder / f"m-{number + 1:05}-of-{count:05}.gguf", image))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_opens_the_whole(tmp_path, given):
    with GgufFile(split(tmp_path)[given]) as opened:
        assert opened["general.name"] == "whole"
        assert [t.numpy().tolist() for t in opened.tensors.values()] == [[0, 0], [1, -1], [2, -2]]
        assert [t.path[-18:-5] for t in opened.tensors.values()] == [f"{n:05}-of-00003"[-13:] for n in (1, 2, 3)]


def test_a_missing_part_is_named(tmp_path):
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(FormatError, match=r"m-00002-of-00003.gguf: part: got no such file"):
        GgufFile(paths[0])


def test_a_part_under_another_name_is_refused(tmp_path):
    path = split(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(FormatError, match=r"renamed.gguf: key 'split.count': got 3, needed: .*-NNNNN-of-00003.gguf"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"split_no": value(U16, 0)},
            r"m-00003-of-00003.gguf: split: got split.no 0, split.count 3, needed: split.no 2",
        ),
        ({"split_count": value(U16, 4)}, r"m-00003-of-00003.gguf: split: got split.no 2, split.count 4"),
        ({"split_count": value(STRING, "3")}, r"key 'split.count': got string, needed: a single int"),
    ],
)
def test_parts_of_different_models_are_refused(tmp_path, changes, message):
    with pytest.raises(FormatError, match=message):
        GgufFile(split(tmp_path, **changes)[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    paths = split(tmp_path, 2)
    keys = {"split.no": value(U16, 1), "split.count": value(U16, 2)}
    write(paths[1], Image(keys, {"t0": (0, [1], b"\0" * 4)}))
    with pytest.raises(FormatError, match=r"00002-of-00002.gguf: tensor 't0': got the name of one in .*00001-of-00002"):
        GgufFile(paths[0])


def test_a_wrong_total_of_tensors_is_refused(tmp_path):
    paths = split(tmp_path, 2)
    keys = {"split.no": value(U16, 1), "split.count": value(U16, 2)}
    write(paths[1], Image(keys))
    with pytest.raises(FormatError, match=r"key 'split.tensors.count': got 2, needed: 1, the sum over all parts"):
        GgufFile(paths[0])


# Layout


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 256])
def test_versions_and_alignments(tmp_path, version, alignment):
    keys = {"general.alignment": value(U32, alignment), "flag": value(BOOL, True), "n": value(U64, 7)}
    tensors = {"a": (0, [3], struct.pack("<3f", 1, 2, 3)), "b": (24, [2, 2], bytes([1, 2, 3, 4]))}
    path = write(tmp_path / "a.gguf", Image(keys, tensors, version, alignment))
    with GgufFile(path) as opened:
        assert opened.version == version
        assert opened.tensors["a"].numpy().tolist() == [1, 2, 3]
        assert opened.tensors["b"].numpy().tolist() == [[1, 2], [3, 4]]
        assert opened.tensors["b"].offset % alignment == 0


def test_float_arrays_need_no_alignment(tmp_path):
    keys = {"x": value(STRING, "odd"), "limits": array(F32, [0.5, 1.5])}
    with GgufFile(write(tmp_path / "a.gguf", Image(keys))) as opened:
        assert opened.array("limits", float) == [0.5, 1.5]
        assert "limits" in opened
        assert "none" not in opened
