"""Reading CIFAR's official pickles with an unpickler that can build byte arrays and plain containers, and nothing else."""

import io
import pickle
from typing import Any

import numpy as np

from gradveil.core.errors import GradveilError

_reconstruct: Any = np.empty(0).__reduce__()[0]  # its module was renamed in NumPy 2


def _array(kind: type, shape: tuple[int, ...], code: bytes) -> Any:
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"array of {kind!r}")
    return _reconstruct(kind, shape, code)


def _dtype(spec: bytes | str, *_: object) -> Any:
    """Bytes alone: an array of objects could carry anything. NumPy 2.4 warns of the flags that old pickles pass, so they stay out."""
    text = spec.decode() if isinstance(spec, bytes) else spec
    if text != "u1":
        raise pickle.UnpicklingError(f"array of {text!r}")
    return np.dtype("u1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def loads(data: bytes, origin: object) -> dict[bytes, Any]:
    """The dictionary in a pickle whose checksum has been compared already; `origin` names the file in errors."""
    try:
        found = _Restricted(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise GradveilError(f"{origin}: refused to unpickle: {error}") from error
    if not isinstance(found, dict):
        raise GradveilError(f"{origin}: refused to unpickle: it holds a {type(found).__name__}, not a dictionary")
    return found
