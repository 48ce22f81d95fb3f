# SPDX-License-Identifier: MIT OR Apache-2.0
"""A free-threaded Python runs metrale with the GIL, which the ledger, builders and captures rely on."""

import sysconfig

import pytest
from processes import python

pytestmark = pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has the GIL")


def test_an_import_enables_the_gil():
    done = python("import sys, metrale; print(sys._is_gil_enabled())", PYTHON_GIL="")
    assert done.stdout == "True\n"


def test_an_import_says_that_it_enables_the_gil():
    done = python("import metrale", PYTHON_GIL="")
    assert "The global interpreter lock (GIL) has been enabled to load module 'metrale." in done.stderr
