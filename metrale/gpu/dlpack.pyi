# SPDX-License-Identifier: MIT OR Apache-2.0
# Only C functions: nothing for Python.
