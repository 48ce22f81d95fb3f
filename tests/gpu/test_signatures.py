# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is read from a kernel's declaration, and what is refused."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.errors import MetraleError
from metrale.gpu.signatures import SignatureError, parse


def kinds(parameters, before="", **options):
    (signature,) = parse(f'{before}\nextern "C" __global__ void k({parameters}) {{}}', **options).values()
    return [kind for _, kind in signature]


def test_names_and_kinds_in_order():
    source = """
        #include <cuda_bf16.h>
        extern "C" __global__ void first(const __nv_bfloat16* __restrict__ A, float* C, unsigned int N) { int x; }
        extern "C" __global__ void second(uint64_t base, float eps);
    """
    assert parse(source) == {
        "first": (("A", "ptr"), ("C", "ptr"), ("N", "u32")),
        "second": (("base", "u64"), ("eps", "f32")),
    }
    assert list(parse(source)) == ["first", "second"]


@pytest.mark.parametrize("parameters", ["", "void", " /* none */ "])
def test_a_kernel_without_parameters(parameters):
    assert parse(f'extern "C" __global__ void k({parameters}) {{}}') == {"k": ()}


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        ("bool x", "u8"),
        ("char x", "i8"),
        ("signed char x", "i8"),
        ("unsigned char x", "u8"),
        ("short int x", "i16"),
        ("unsigned short x", "u16"),
        ("int x", "i32"),
        ("signed x", "i32"),
        ("unsigned x", "u32"),
        ("unsigned int x", "u32"),
        ("int unsigned x", "u32"),
        ("long x", "i64"),
        ("unsigned long x", "u64"),
        ("long long int x", "i64"),
        ("unsigned long long x", "u64"),
        ("long long unsigned x", "u64"),
        ("size_t x", "u64"),
        ("const uint8_t x", "u8"),
        ("int16_t x", "i16"),
        ("std::uint32_t x", "u32"),
        ("uint64_t const x", "u64"),
        ("float x", "f32"),
        ("double x", "f64"),
        ("float* x", "ptr"),
        ("const float *const __restrict__ x", "ptr"),
        ("const uint64_t* x", "ptr"),
        ("void** x", "ptr"),
        ("float x[]", "ptr"),
        ("const int x[4]", "ptr"),
        ("__half x", "bytes"),
        ("const __grid_constant__ struct Params x", "bytes"),
        ("tables::Row<float, 4> x", "bytes"),
        ("uint x", "u32"),
        ("ushort x", "u16"),
        ("CUdeviceptr x", "u64"),
        ("cudaTextureObject_t x", "u64"),
        ("float4 x", "bytes"),
    ],
)
def test_the_kind_of_a_type(declared, kind):
    assert kinds(declared) == [kind]


@pytest.mark.parametrize(
    ("alias", "kind"),
    [
        ("using T = uint32_t;", "u32"),
        ("typedef unsigned long long T;", "u64"),
        ("using T = const float*;", "ptr"),
        ("using U = short; typedef U T;", "i16"),
        ("struct T { int a; };", "bytes"),
        ("typedef struct { int a; } T;", "bytes"),
    ],
)
def test_aliases_are_followed(alias, kind):
    assert kinds("T x", before=alias) == [kind]


@pytest.mark.parametrize(
    "attributes",
    [
        "void __launch_bounds__(256)",
        "__launch_bounds__(32 * (4 + 4), 2) void",
        "void __launch_bounds__(THREADS) __cluster_dims__(2, 1, 1)",
        "__attribute__((used)) void",
    ],
)
def test_launch_bounds_and_attributes_are_passed_over(attributes):
    assert parse(f'extern "C" __global__ {attributes} k(int n) {{}}') == {"k": (("n", "i32"),)}


def test_a_block_of_extern_c():
    source = 'extern "C" { __device__ int f() { return 1; } __global__ void k(int n) {} } // closed'
    assert parse(source) == {"k": (("n", "i32"),)}


def test_comments_and_macro_definitions_hold_no_kernels():
    source = """
        // extern "C" __global__ void a(int n)
        /* extern "C" __global__ void b(int n) {} */
        #define KERNEL(name) extern "C" \\
            __global__ void name(int n) {}
        const char* text = "// no comment"; extern "C" __global__ void k(int /* rows */ n, // more
                                                                         float x) {}
    """
    assert parse(source) == {"k": (("n", "i32"), ("x", "f32"))}


def test_templates_are_no_entry_points():
    assert parse("template <class T> __global__ void k(T* x) {}") == {}


def test_a_declaration_and_its_definition_are_one_kernel():
    assert parse('extern "C" __global__ void k(int n); extern "C" __global__ void k(int n) {}') == {
        "k": (("n", "i32"),)
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__global__ void k(int n) {}", 'kernel k is not extern "C"'),
        ('extern "C" {} __global__ void k(int n) {}', 'kernel k is not extern "C"'),
        (
            'extern "C" __global__ void k(int) {}',
            r"kernel k, parameter 1 \('int'\): the parameter has no name",
        ),
        ('extern "C" __global__ void k(int a, unsigned int) {}', "parameter 2 .*: the parameter has no name"),
        ('extern "C" __global__ void k(float*) {}', "the parameter has no name"),
        ('extern "C" __global__ void k(int& n) {}', "a kernel cannot take a reference"),
        ('extern "C" __global__ void k(void (*f)(int)) {}', "a kernel cannot take a function pointer"),
        ('extern "C" __global__ void k(int n = 3) {}', "a kernel cannot take a default value"),
        ('extern "C" __global__ void k(odd type n) {}', "the type cannot be read"),
        ('using T = T; extern "C" __global__ void k(T n) {}', "the type is an alias of itself"),
        ('extern "C" __global__ void k(int n', "kernel k: the parameter list is not closed"),
        ('extern "C" __global__ void k;', "a function's parameter list was expected before ';'"),
        ('extern "C" __global__ void', "the text ends before the parameter list"),
        (
            'extern "C" __global__ void k(int n); extern "C" __global__ void k(float n) {}',
            "kernel k is declared twice, with different parameters",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(source, message):
    with pytest.raises(SignatureError, match=message) as caught:
        parse(source)
    assert isinstance(caught.value, MetraleError)


# A source as it stands, whose macros and headers nobody has looked into


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        ("Elsewhere x", "any"),
        ("lib::Type x", "any"),
        ("Row<float, 4> x", "any"),
        ("Elsewhere* x", "ptr"),
        ("struct Elsewhere x", "bytes"),
        ("uint x", "u32"),
        ("CUdeviceptr x", "u64"),
        ("cudaSurfaceObject_t x", "u64"),
        ("const __grid_constant__ CUtensorMap x", "bytes"),
        ("__nv_bfloat16 x", "bytes"),
        ("half2 x", "bytes"),
        ("uint4 x", "bytes"),
    ],
)
def test_a_type_of_a_header_is_known_to_cuda_or_by_its_size(declared, kind):
    assert kinds(declared, strict=False) == [kind]


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("typedef unsigned uint_of_mine; using T = uint_of_mine;", "u32"),
        ("struct T { int a; };", "bytes"),
        ("using uint = T; using T = float;", "f32"),
        ("#ifdef WIDE\nusing T = double;\n#else\nusing T = float;\n#endif", "any"),
        ("using T = decltype(1 + 1);", "any"),
        ("using T = T;", "any"),
    ],
)
def test_a_type_of_the_source_is_what_it_says_or_known_by_its_size(before, kind):
    assert kinds("T x", before=before, strict=False) == [kind]


@pytest.mark.parametrize(
    "hidden",
    [
        'extern "C" __global__ void k(PARAMETERS) {}',
        'extern "C" __global__ void k(int n EXTRA) {}',
        'extern "C" __global__ void NAME(k)(int n) {}',
        "EXTERN_C __global__ void k(int n) {}",
        "template <class T> __global__ void k(T n) {}",
        "__global__ void k(int n) {}",
        'extern "C" __global__ void k(int n); extern "C" __global__ void k(float n);',
        '#if 0\nextern "C" __global__ void k(int n) {}\n#else\nextern "C" __global__ void k(int m) {}\n#endif',
    ],
)
def test_a_kernel_that_the_text_does_not_tell_is_absent(hidden):
    assert parse(hidden + '\nextern "C" __global__ void seen(int n) {}', strict=False) == {"seen": (("n", "i32"),)}


TYPES = {"const float*": "ptr", "uint32_t": "u32", "int": "i32", "float": "f32", "unsigned long long": "u64"}
NAMES = st.from_regex(r"[a-z]\w{0,8}_", fullmatch=True)
SPACES = st.sampled_from([" ", "\n", "\t ", " /* , ) */ ", " // ) {\n"])


@given(st.dictionaries(NAMES, st.sampled_from(sorted(TYPES)), max_size=20), SPACES)
def test_any_list_of_parameters_is_read_whatever_the_spaces(parameters, space):
    listed = f"{space},{space}".join(f"{ctype}{space}{name}" for name, ctype in parameters.items())
    source = f'extern "C"{space}__global__{space}void{space}k{space}({space}{listed}{space}){space}{{}}'
    assert parse(source) == {"k": tuple((name, TYPES[ctype]) for name, ctype in parameters.items())}


@given(st.text(alphabet='_global exrn"C(){}<>,;*&[]=/\\#\nvoid k', max_size=200))
def test_any_text_is_read_or_refused(text):
    source = 'extern "C" __global__ ' + text
    with suppress(SignatureError):
        parse(source)
    parse(source, strict=False)
