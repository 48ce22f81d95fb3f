# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the runtime takes as a device pointer, as a stream and as host memory, for annotations."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

    # NumPy declares __buffer__ for Python 3.12 and later only.
    HostBuffer = Buffer | npt.NDArray[Any]


class HasCudaArrayInterface(Protocol):
    """An array of CuPy, Numba or another library, or a DeviceBuffer."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class HasDataPtr(Protocol):
    """A torch tensor."""

    def data_ptr(self) -> int: ...


class HasCudaStream(Protocol):
    """A stream of ``cuda.core`` or another library."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


PointerLike = int | HasCudaArrayInterface | HasDataPtr | None
StreamLike = int | HasCudaStream | None
