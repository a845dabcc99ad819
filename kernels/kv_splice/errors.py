"""What can go wrong before a single element is written.

KvSpliceError
├── UnsupportedRope     the model's rotary embedding is of a kind this package does not compute
├── UnsupportedDevice   no path for this device
├── QuantiseError       keys or values that int8 does not hold
└── SpliceError         arguments that do not fit together; the pools are untouched
"""

__all__ = ["KvSpliceError", "QuantiseError", "SpliceError", "UnsupportedDevice", "UnsupportedRope"]


class KvSpliceError(Exception):
    """Root of this package's errors."""


class UnsupportedRope(KvSpliceError, ValueError):
    """A rotary embedding whose rotation is not a fixed function of one position."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"unsupported rotary embedding: {kind} (supported: default, linear, llama3, yarn)")
        self.kind = kind


class UnsupportedDevice(KvSpliceError, ValueError):
    """Tensors on a device that holds no data to splice."""


class QuantiseError(KvSpliceError, ValueError):
    """Keys or values that are not finite, too large for a scale in fp16, or not of a known shape and dtype."""


class SpliceError(KvSpliceError, ValueError):
    """Tensors of the wrong dtype, shape, device or stride, or indices out of range; raised before any write."""
