"""Reads the exports for the methods' authors with torch.

    python authors_forms.py ADAPTER KANGAROO HEAD SPECDEC_PP

KANGAROO must have ADAPTER's tensors. SPECDEC_PP is loaded strictly into a network of the SpecDec++ head's form,
one repeated block, and must predict the same as HEAD's tensors. The exit code is 1 otherwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, load_model
from torch import nn


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class Head(nn.Module):
    """The head as the authors build it: the same block for every layer."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.model = nn.Sequential(*([Block(hidden_size)] * num_layers), nn.Linear(hidden_size, 2))


def main() -> int:
    adapter, kangaroo, head, specdec_pp = map(Path, sys.argv[1:])
    ours, theirs = load_file(adapter / "model.safetensors"), torch.load(kangaroo / "pytorch_model.bin")
    is_same = ours.keys() == theirs.keys() and all(torch.equal(ours[k].float(), theirs[k]) for k in ours)
    config = json.loads((kangaroo / "config.json").read_text())
    is_same = is_same and config["num_hidden_layers"] == 1 and "exit_layer" not in config
    print(f"Kangaroo: {len(theirs)} tensors, {'equal' if is_same else 'DIFFERENT'}")

    keys = json.loads((specdec_pp / "config.json").read_text())
    network = Head(**keys)
    missing, unexpected = load_model(network, specdec_pp / "model.safetensors", strict=True)
    x = torch.randn(64, keys["hidden_size"], generator=torch.Generator().manual_seed(7))
    tensors = load_file(head / "model.safetensors")
    expected = x
    for _ in range(keys["num_layers"]):
        weight, bias = tensors["model.0.linear.weight"], tensors["model.0.linear.bias"]
        expected = expected + nn.functional.silu(expected @ weight.T + bias)
    last = f"model.{keys['num_layers']}"
    expected = expected @ tensors[f"{last}.weight"].T + tensors[f"{last}.bias"]
    with torch.no_grad():
        apart = (network.model(x) - expected).abs().max().item()
    print(f"SpecDec++: missing {list(missing)}, unexpected {list(unexpected)}, {apart:.1e} apart")
    return 0 if is_same and not missing and not unexpected and apart < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
