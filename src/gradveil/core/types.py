"""The values that travel between the parts."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Images as NCHW floats in [0, 1] (normalisation lives in the model) and one class index for each."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)
