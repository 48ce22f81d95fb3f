# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the runtime takes as a device pointer, as a stream and as host memory, for annotations."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

    # NumPy declares __buffer__ for Python 3.12 and later only.
    HostBuffer = Buffer | npt.NDArray[Any]


class HasDlpack(Protocol):
    """An array of torch, CuPy, NumPy or another library, or a DeviceBuffer."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


class HasCudaArrayInterface(Protocol):
    """An array of Numba or another library."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class HasDataPtr(Protocol):
    """What has an address and says no more of itself."""

    def data_ptr(self) -> int: ...


class HasCudaStream(Protocol):
    """A stream of ``cuda.core`` or another library."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


PointerLike = int | HasDlpack | HasCudaArrayInterface | HasDataPtr | None
StreamLike = int | HasCudaStream | None
