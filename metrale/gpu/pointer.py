# SPDX-License-Identifier: MIT OR Apache-2.0
"""DevicePtr: a device address that says so."""


class DevicePtr(int):
    """A device address: an ``int`` with ``is_null``, ``offset`` and a readable repr."""

    __slots__ = ()

    @property
    def is_null(self) -> bool:
        """Whether this is the null pointer."""
        return self == 0

    def offset(self, nbytes: int) -> "DevicePtr":
        """The address ``nbytes`` bytes further on."""
        return DevicePtr(int(self) + nbytes)

    def __repr__(self) -> str:
        return f"DevicePtr({int(self):#x})"
