#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fails unless two wheels hold the same files, byte for byte where they are not compiled."""

import sys
from zipfile import ZipFile

COMPILED = (".so", "RECORD")


def contents(path: str) -> dict[str, int | None]:
    """`{name: checksum}`, without one for what a compiler made."""
    with ZipFile(path) as wheel:
        return {entry.filename: None if entry.filename.endswith(COMPILED) else entry.CRC for entry in wheel.infolist()}


first, second = contents(sys.argv[1]), contents(sys.argv[2])
different = sorted(name for name in first.keys() | second.keys() if first.get(name, -1) != second.get(name, -1))
print(f"{len(first)} files, {len(different)} of them different or in one wheel only", *different, sep="\n  ")
sys.exit(bool(different))
