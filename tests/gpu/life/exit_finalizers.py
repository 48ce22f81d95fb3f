# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finalizers that give everything back: of weakref.finalize, which runs first, and of objects, which run late."""

import weakref

from things import everything, give_back, open_backend


class Model:
    def __init__(self, things):
        self.things, self.me = things, self

    def __del__(self):
        give_back(self.things)
        self.things["gpu"].close()


model = Model(everything(open_backend()))
weakref.finalize(model, give_back, model.things)
