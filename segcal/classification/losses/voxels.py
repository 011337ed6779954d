"""What every loss reads off a batch: log-probabilities in full precision, labels, and which voxels count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from segcal.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Voxels:
    """A batch in the layout the network gave it; everything per voxel comes out as one flat vector of kept voxels.

    Nothing is transposed: classes stay on axis 1, so a dense batch costs one copy (the log-probabilities) and a few
    vectors as long as its voxels. All methods are differentiable where the quantity is.

    Attributes:
        log_p: (n, C, s) log-softmax of the logits; float32, or float64 for float64 logits.
        labels: (n, s) int64; ignored voxels carry 0.
        keep: (n, s) bool of the voxels that count, or None if all do.
    """

    log_p: Tensor
    labels: Tensor
    keep: Tensor | None

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, ignore_index: int) -> Self:
        """Check shapes and labels; half precision becomes float32 before the softmax.

        Args:
            logits: (n, C, *spatial) of any floating type.
            labels: (n, *spatial) or, as nnU-Net has them, (n, 1, *spatial); whole numbers of any type.
            ignore_index: voxels with this label do not count.

        Raises:
            DataError: shapes that do not belong together, one class only, labels outside the classes.
        """
        if logits.ndim < 2 or not logits.is_floating_point():
            raise DataError(
                f"logits {tuple(logits.shape)} of {logits.dtype}: expected floating values (n, C, *spatial) with the "
                "classes on axis 1"
            )
        n, n_classes = logits.shape[:2]
        if n_classes < 2:
            raise DataError(
                f"logits {tuple(logits.shape)}: one class leaves nothing to calibrate. A model with one sigmoid output "
                "is a region-based one: wrap the loss in BinaryRegions."
            )
        if labels.shape != (n, *logits.shape[2:]):
            if labels.shape != (n, 1, *logits.shape[2:]):
                raise DataError(
                    f"labels {tuple(labels.shape)} do not belong to logits {tuple(logits.shape)}: expected "
                    f"{(n, *logits.shape[2:])} or {(n, 1, *logits.shape[2:])}"
                )
            labels = labels[:, 0]
        flat = labels.reshape(n, -1)
        whole = flat.to(torch.int64)
        if flat.is_floating_point() and bool((whole != flat).any()):
            raise DataError("labels hold fractions: expected class numbers; soft labels are not supported")
        ignored = whole == ignore_index
        keep = ~ignored if bool(ignored.any()) else None
        whole = whole.masked_fill(ignored, 0)
        if whole.numel() and not 0 <= int(whole.min()) <= int(whole.max()) < n_classes:
            raise DataError(
                f"labels from {int(whole.min())} to {int(whole.max())} for {n_classes} classes; expected 0 to "
                f"{n_classes - 1}, or {ignore_index} for voxels to ignore (`ignore_index`)"
            )
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return cls(torch.log_softmax(wide.reshape(n, n_classes, -1), dim=1), whole, keep)

    @property
    def n_classes(self) -> int:
        return int(self.log_p.shape[1])

    @property
    def count(self) -> int:
        """How many voxels count."""
        return self.labels.numel() if self.keep is None else int(self.keep.sum())

    def zero(self) -> Tensor:
        """0 that still hangs on the graph, for batches that give a loss nothing to say."""
        return self.log_p[:0].sum()

    def log_prob_of_label(self) -> Tensor:
        """(m,) ln p_y."""
        return self._kept(self.log_p.gather(1, self.labels[:, None])[:, 0])

    def log_confidence(self) -> Tensor:
        """(m,) ln max p."""
        return self._kept(self.log_p.amax(dim=1))

    def confidence(self) -> Tensor:
        """(m,) max p."""
        return self.log_confidence().exp()

    def log_second(self) -> Tensor:
        """(m,) logarithm of the second largest probability."""
        top = self.log_p.detach().argmax(dim=1, keepdim=True)
        return self._kept(self.log_p.scatter(1, top, -torch.inf).amax(dim=1))

    def log_competitor(self) -> Tensor:
        """(m,) logarithm of the largest probability of a class other than the label."""
        return self._kept(self.log_p.scatter(1, self.labels[:, None], -torch.inf).amax(dim=1))

    def log_below_label(self) -> Tensor:
        """(m,) logarithm of the largest probability strictly below the label's, -inf where there is none."""
        reached = self.log_p.detach() >= self.log_p.detach().gather(1, self.labels[:, None])
        return self._kept(self.log_p.masked_fill(reached, -torch.inf).amax(dim=1))

    def hits(self) -> Tensor:
        """(m,) bool: the largest probability is the label's (the first of equals wins, as in argmax)."""
        return self._kept(self.log_p.detach().argmax(dim=1) == self.labels)

    def entropy(self) -> Tensor:
        """(m,) entropy of p in nats. A probability that underflows contributes 0, and its gradient is 0."""
        return self._kept(-(self.log_p.exp() * self.log_p).sum(dim=1))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """(k, C) log-probabilities and (k,) labels of the kept voxels at `index`, counted along the flat order."""
        flat = index if self.keep is None else self.keep.reshape(-1).nonzero()[:, 0][index]
        sample, place = flat // self.labels.shape[1], flat % self.labels.shape[1]
        return self.log_p[sample, :, place], self.labels[sample, place]

    def _kept(self, values: Tensor) -> Tensor:
        return values.reshape(-1) if self.keep is None else values[self.keep]


def mean(values: Tensor) -> Tensor:
    """Mean of a vector, summed in float64 where the device has it, in the type of the vector."""
    wide = None if values.device.type == "mps" else torch.float64
    return values.mean(dtype=wide).to(values.dtype)
