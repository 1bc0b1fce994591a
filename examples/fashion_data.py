"""Fashion-MNIST as tensors in memory, from wherever this machine can get it."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import torch

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the four IDX files, compressed."""
IDX_FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


@dataclass(frozen=True)
class Split:
    """Pictures (float32, count x 1 x 28 x 28, normalized) and their classes (int64, count)."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Data:
    """What to train and to test on, and where it came from."""

    train: Split
    test: Split
    source: str


def load(root: Path, *, digits: bool = False) -> Data:
    """Reads Fashion-MNIST with torchvision's own class.

    Debian's package is unpacked into `root`, else torchvision downloads to it; where neither is
    possible, scikit-learn's digits stand in. Several processes may do this at once.

    Args:
        root: where the data set is unpacked.
        digits: take the digits at once (1 500 pictures to train on: for a quick try).

    Raises:
        RuntimeError: no package, no network and no scikit-learn; the message says what to install.
    """
    if digits:
        return _digits("as asked")

    from torchvision.datasets import FashionMNIST

    raw = root / "FashionMNIST" / "raw"
    source = "Fashion-MNIST (already unpacked)"
    if not all((raw / name).exists() for name in IDX_FILES):
        if all((DEBIAN / f"{name}.gz").exists() for name in IDX_FILES):
            source = "Fashion-MNIST (Debian's dataset-fashion-mnist)"
            _unpack(raw)
        else:
            source = "Fashion-MNIST (downloaded by torchvision)"
            try:
                FashionMNIST(str(root), download=True)
            except (OSError, RuntimeError) as error:
                return _digits(f"no dataset-fashion-mnist package here, and the download failed: {error}")
    train, test = (_split(FashionMNIST(str(root), train=train)) for train in (True, False))
    return Data(train, test, source)


def _unpack(raw: Path) -> None:
    raw.mkdir(parents=True, exist_ok=True)
    for name in IDX_FILES:
        # Renamed into place: another process never reads half a file.
        partial = raw / f"{name}.{os.getpid()}"
        partial.write_bytes(gzip.decompress((DEBIAN / f"{name}.gz").read_bytes()))
        partial.replace(raw / name)


def _split(dataset: object) -> Split:
    pixels, labels = dataset.data, dataset.targets  # type: ignore[attr-defined]
    return Split((pixels.float().unsqueeze(1) / 255 - 0.286) / 0.353, labels.long())


def _digits(reason: str) -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RuntimeError(
            f"no data: {reason}; apt-get install dataset-fashion-mnist, or pip install scikit-learn for its digits"
        ) from None
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
    images = torch.nn.functional.pad(images.repeat_interleave(3, 2).repeat_interleave(3, 3), (2, 2, 2, 2), value=-0.3)
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    return Data(
        Split(images[:1500], labels[:1500]),
        Split(images[1500:], labels[1500:]),
        f"scikit-learn's digits, 8 x 8 pixels ({reason})",
    )
