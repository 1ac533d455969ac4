"""Compares drafters from served hidden states with drafters from local ones, for `states.sh`.

    python states_compare.py perturb TARGET COPY SEED [SIZE]
    python states_compare.py compare CHECKPOINTS

`perturb` copies a target and changes the weights of its first layer by SIZE (1e-6) of their size, which moves its states by about
as much. `compare` reads the drafters `served`, `local`, `perturbed-1`, `perturbed-2` and `bf16`. The served one must agree with the
target on held-out responses as often as the local one, within 0.005 at each place of a round. Its weights must be no further
from the local ones than three times the largest distance between local drafters. The exit code is 1 otherwise.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def perturb(target: str, copy: str, seed: str, size: str = "1e-6") -> int:
    shutil.copytree(target, copy)
    path = Path(copy) / "model.safetensors"
    tensors = load_file(path)
    random = torch.Generator().manual_seed(int(seed))
    for name, tensor in tensors.items():
        if ".layers.0." in name:
            exact = tensor.float()
            tensors[name] = exact * (1 + float(size) * torch.randn(exact.shape, generator=random))
    save_file(tensors, path, metadata={"format": "pt"})
    return 0


def drafter(checkpoints: str, name: str) -> tuple[list[float], torch.Tensor]:
    place = Path(checkpoints) / name / "e3"
    agreement = json.loads((place / "scores.json").read_text())["agreement"]
    tensors = load_file(place / "model.safetensors")
    weights = [tensors[key].float().flatten() for key in sorted(tensors) if tensors[key].is_floating_point()]
    return agreement, torch.cat(weights)


def compare(checkpoints: str) -> int:
    names = ["served", "local", "perturbed-1", "perturbed-2", "bf16"]
    agreement, weights = zip(*(drafter(checkpoints, name) for name in names))
    for name, places in zip(names, agreement):
        print(f"{name:12} agreement {' '.join(f'{share:.4f}' for share in places)}")
    apart = lambda one, other: (weights[one] - weights[other]).norm().item() / weights[1].norm().item()  # noqa: E731
    spread = max(apart(1, 2), apart(1, 3), apart(2, 3))
    difference = max(abs(one - other) for one, other in zip(agreement[0], agreement[1]))
    in_bf16 = max(abs(one - other) for one, other in zip(agreement[4], agreement[1]))
    print(f"served and local: agreement {difference:.4f} apart (allowed 0.005), weights {apart(0, 1):.2e} of their norm; "
          f"local ones among each other {spread:.2e} (allowed three times that). bf16 and local: {in_bf16:.4f}")
    return 0 if difference <= 0.005 and apart(0, 1) <= 3 * spread else 1


if __name__ == "__main__":
    sys.exit(perturb(*sys.argv[2:]) if sys.argv[1] == "perturb" else compare(*sys.argv[2:]))
