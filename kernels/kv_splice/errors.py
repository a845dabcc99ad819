"""What can go wrong before a single element is written.

KvSpliceError
├── UnsupportedRope     the model's rotary embedding is of a kind this package does not compute
├── UnsupportedDevice   no path for this device
└── SpliceError         arguments that do not fit together; the pools are untouched
"""

__all__ = ["KvSpliceError", "SpliceError", "UnsupportedDevice", "UnsupportedRope"]


class KvSpliceError(Exception):
    """Root of this package's errors."""


class UnsupportedRope(KvSpliceError, ValueError):
    """A rotary embedding whose rotation is not a fixed function of one position."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"unsupported rotary embedding: {kind} (supported: default, linear, llama3, yarn)")
        self.kind = kind


class UnsupportedDevice(KvSpliceError, ValueError):
    """Tensors on a device that holds no data to splice."""


class SpliceError(KvSpliceError, ValueError):
    """Tensors of the wrong dtype, shape, device or stride, or indices out of range; raised before any write."""
