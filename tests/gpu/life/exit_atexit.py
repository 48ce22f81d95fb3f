# SPDX-License-Identifier: MIT OR Apache-2.0
"""Live objects in atexit callbacks: those registered after metrale's import see the backend open, others closed."""
# stderr: metrale: .*: never freed: 3 allocations, 448 bytes: .*; 1 streams \(.*\); 1 events \(.*\)\n

import atexit


def late():
    assert things["gpu"].closed
    things["acc"].free()
    things["own"].free()
    assert "closed" in refusal(things["launch"].launch)
    assert "closed" in refusal(things["prepared"].launch)
    assert things["gpu"].close() == []


atexit.register(late)

from things import everything, open_backend, refusal  # noqa: E402

things = everything(open_backend())


@atexit.register
def early():
    things["launch"].launch()
    things["prepared"].launch()
    things["gpu"].synchronize()


atexit.register(things["launch"].launch)
