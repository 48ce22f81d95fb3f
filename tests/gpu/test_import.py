# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `import metrale` costs."""

import pytest
from processes import output_of


@pytest.mark.parametrize("module", ["numpy", "cuda.bindings", "cuda.core", "metrale.gpu.cuda", "metrale.gpu.host"])
def test_the_package_loads_little(module):
    assert output_of("import sys, metrale; print(sys.argv[1] in sys.modules)", module) == "False\n"


def test_launchers_load_no_more():
    assert output_of("import sys, metrale.ops; print('numpy' in sys.modules, 'cuda.bindings' in sys.modules)") == (
        "False False\n"
    )


def test_the_host_backend_loads_no_driver():
    code = "import sys, metrale; metrale.open('host').close(); print('cuda.bindings' in sys.modules)"
    assert output_of(code) == "False\n"
