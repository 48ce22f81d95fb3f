# SPDX-License-Identifier: MIT OR Apache-2.0
"""Parameter lists of CUDA kernels, read from their source.

Of C++ this knows what an entry point's parameter list can hold: pointers, numbers, structs by value and aliases
of these. Macros are not expanded: give it the preprocessor's output where there is one, and a source as it stands
with `strict=False`. cuda/host/build.py uses it before there is a package, so it does without one.
"""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from metrale.errors import MetraleError
else:
    MetraleError = Exception

Signature = tuple[tuple[str, str], ...]

_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"\b__global__\b")
_EXTERN_C = re.compile(r'\bextern\s*"C"')
_EXTERN_C_BLOCK = re.compile(r'\bextern\s*"C"\s*\{')
_TOKEN = re.compile(r"\w+|\S")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")

_WITH_ARGUMENTS = {
    "__launch_bounds__",
    "__cluster_dims__",
    "__block_size__",
    "__maxnreg__",
    "__attribute__",
    "alignas",
}
_QUALIFIERS = {
    *("const", "volatile", "restrict", "__restrict", "__restrict__", "__grid_constant__", "register"),
    *("struct", "class", "typename"),
    (_NULLABLE := "METRALE_NULLABLE"),
}
_OPENING, _CLOSING = "([{<", ")]}>"

_WORDS = {
    "bool": "u8",
    "char": "i8",
    "signed char": "i8",
    "unsigned char": "u8",
    "short": "i16",
    "unsigned short": "u16",
    "int": "i32",
    "unsigned": "u32",
    "long": "i64",
    "unsigned long": "u64",
    "long long": "i64",
    "unsigned long long": "u64",
    "float": "f32",
    "double": "f64",
    "size_t": "u64",
    "ptrdiff_t": "i64",
    "intptr_t": "i64",
    "uintptr_t": "u64",
    **{f"int{bits}_t": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}_t": f"u{bits}" for bits in (8, 16, 32, 64)},
}
# What CUDA's and the C library's headers give a name, if the source itself has no such alias.
_TYPEDEFS = {
    **{"uchar": "u8", "ushort": "u16", "uint": "u32", "ulong": "u64"},
    **dict.fromkeys(("CUdeviceptr", "CUtexObject", "CUsurfObject"), "u64"),
    **dict.fromkeys(("cudaTextureObject_t", "cudaSurfaceObject_t"), "u64"),
}
_STRUCTS = re.compile(
    r"(?:__)?half2?|(?:__)?nv_bfloat16[12]?|__nv_bfloat162|__nv_fp8_e\dm\d|CUtensorMap|dim3"
    r"|(?:u?(?:char|short|int|long|longlong)|float|double)[1-4]"
)
_INTEGER_WORDS = ("signed", "unsigned", "char", "short", "int", "long")


class SignatureError(ValueError, MetraleError):
    """A kernel's declaration that cannot be read, or that is no kernel's."""


def parse(text: str, *, strict: bool = True) -> dict[str, Signature]:
    """The `extern "C" __global__` functions of a source in its order: `{kernel: ((parameter, kind), ...)}`.

    Kinds: ptr (ptr? with METRALE_NULLABLE), u8 to u64, i8 to i64, f32, f64, and bytes for a struct by value. Templates
    are no entry points and are passed over; a `__global__` function that is neither raises SignatureError, as does
    what cannot be read.

    Not strict, nothing is raised. A type that the text does not explain is of the kind any; and a kernel whose
    parameters the text does not tell is absent: one of a macro's making, or declared in two ways (`#if`).
    """
    text = _COMMENT.sub(lambda match: match[0] if match[0][0] == '"' else " ", text)
    text = _DIRECTIVE.sub("", text)
    kernels: dict[str, Signature] = {}
    ambiguous = set()
    for entry in _ENTRY.finditer(text):
        try:
            kernel = _kernel(text, entry, strict)
        except SignatureError:
            if strict:
                raise
            continue
        if kernel is None:
            continue
        name, signature = kernel
        if kernels.setdefault(name, signature) != signature:
            if strict:
                raise SignatureError(f"kernel {name} is declared twice, with different parameters")
            ambiguous.add(name)
    return {name: signature for name, signature in kernels.items() if name not in ambiguous}


def _kernel(text: str, entry: re.Match[str], strict: bool) -> tuple[str, Signature] | None:
    """Name and parameters of the function that is `__global__` at `entry`; None for a template."""
    start = max(text.rfind(mark, 0, entry.start()) for mark in ";{}") + 1
    head = text[start : entry.start()]
    if re.search(r"\btemplate\b", head):
        return None
    name, parameters = _declaration(text, entry.end())
    if not _EXTERN_C.search(head) and not _in_extern_c_block(text, entry.start()):
        raise SignatureError(f'kernel {name} is not extern "C": it could not be found by its name')
    return name, tuple(_parameter(name, i, tokens, text, strict) for i, tokens in enumerate(parameters, 1))


def _in_extern_c_block(text: str, position: int) -> bool:
    return any(
        text.count("{", block.start(), position) > text.count("}", block.start(), position)
        for block in _EXTERN_C_BLOCK.finditer(text, 0, position)
    )


def _declaration(text: str, position: int) -> tuple[str, list[list[str]]]:
    """Name and parameters (as tokens) of the function whose declaration goes on at `position`."""
    tokens = (match[0] for match in _TOKEN.finditer(text, position))
    name = ""
    for token in tokens:
        if token == "(":
            arguments = _group(tokens, name)
            if name not in _WITH_ARGUMENTS:
                break
        elif token in ";{}":
            raise SignatureError(f"__global__ {name}: a function's parameter list was expected before {token!r}")
        else:
            name = token
    else:
        raise SignatureError(f"__global__ {name}: the text ends before the parameter list")
    if not _NAME.match(name):
        raise SignatureError(f"__global__: {name!r} is not a function's name")
    return name, [] if arguments in ([[]], [["void"]]) else arguments


def _group(tokens: Iterator[str], name: str) -> list[list[str]]:
    """The comma-separated items up to the parenthesis that closes the one just read."""
    items: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        if token in _CLOSING:
            if depth == 0:
                return items
            depth -= 1
        elif token in _OPENING:
            depth += 1
        if token == "," and depth == 0:
            items.append([])
        else:
            items[-1].append(token)
    raise SignatureError(f"kernel {name}: the parameter list is not closed")


def _parameter(kernel: str, position: int, tokens: list[str], text: str, strict: bool) -> tuple[str, str]:
    def refuse(why: str) -> SignatureError:
        return SignatureError(f"kernel {kernel}, parameter {position} ({' '.join(tokens)!r}): {why}")

    for token, why in (
        ("&", "a reference"),
        ("(", "a function pointer"),
        ("=", "a default value"),
        (".", "a pack"),
    ):
        if token in tokens:
            raise refuse(f"a kernel cannot take {why}")
    words = [token for token in tokens if token not in _QUALIFIERS]
    pointer = "ptr?" if _NULLABLE in tokens else "ptr"
    is_array = "[" in words
    if is_array:
        words = words[: words.index("[")]
    name = words.pop() if words else ""
    if not words or not _NAME.match(name) or name in _WORDS or name in _INTEGER_WORDS:
        raise refuse("the parameter has no name")
    if is_array:
        return name, pointer
    is_struct = not {"struct", "class"}.isdisjoint(tokens)
    kind = _kind(words, text, refuse, "bytes" if strict or is_struct else "any")
    return name, pointer if kind == "ptr" else kind


def _kind(words: list[str], text: str, refuse: Callable[[str], SignatureError], unknown: str, depth: int = 8) -> str:
    """The kind of a type; `unknown` for a name that neither the text nor CUDA explains."""
    if "*" in words:
        return "ptr"
    if words[:3] == ["std", ":", ":"]:
        words = words[3:]
    known = _WORDS.get(" ".join(words)) or _WORDS.get(_canonical_integer(words))
    if known:
        return known
    name = words[0]
    if not _NAME.match(name) or (len(words) > 1 and words[1] not in (":", "<")):
        raise refuse("the type cannot be read")
    if len(words) > 1:
        return unknown
    aliases = re.findall(rf"\busing\s+{name}\s*=\s*([^;]+);|\btypedef\s+([^;{{}}()]+?)\b{name}\s*;", text)
    if not aliases:
        structs = rf"\b(?:struct|class|union)\s+{name}\b|\}}\s*{name}\s*;"
        is_struct = _STRUCTS.fullmatch(name) or re.search(structs, text)
        return "bytes" if is_struct else _TYPEDEFS.get(name, unknown)
    if depth == 0:
        raise refuse("the type is an alias of itself")
    kinds = set()
    for target in aliases if unknown == "any" else aliases[:1]:
        tokens = [token for token in _TOKEN.findall(target[0] or target[1]) if token not in _QUALIFIERS]
        try:
            kinds.add(_kind(tokens or [""], text, refuse, unknown, depth - 1))
        except SignatureError:
            if unknown != "any":
                raise
            return unknown
    return kinds.pop() if len(kinds) == 1 else unknown  # an alias of several branches of an #if


def _canonical_integer(words: list[str]) -> str:
    """`long unsigned int` as `unsigned long`: the word order of _WORDS, without a redundant int or signed."""
    if not set(words) <= set(_INTEGER_WORDS):
        return ""
    sign = "unsigned" if "unsigned" in words else "signed" if "char" in words and "signed" in words else ""
    size = [word for word in words if word in ("char", "short", "long")]
    return " ".join([sign, *size]).strip() or "int"
