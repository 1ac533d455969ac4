"""Writes an EAGLE-3 drafter of another width than its target's that computes the same.

    python eagle3_wider.py TARGET DRAFTER OUT

The hidden states get 8 more channels a head, which are always 0, and the drafter an embedding table of its own, the target's
in this width. Norms divide by the root of a mean over more channels, so their weights and epsilon make up for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

def main() -> None:
    target, drafter, out = map(Path, sys.argv[1:])
    config = json.loads((drafter / "config.json").read_text())
    weights = load_file(drafter / "model.safetensors")
    weights["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    width = config["hidden_size"]
    more = 8 * config["num_attention_heads"]
    share = width / (width + more)

    def padded(x: torch.Tensor, dim: int, start: int) -> torch.Tensor:
        """`x` with zeros after the channels that begin at `start`."""
        before, after = x.split([start + width, x.shape[dim] - start - width], dim)
        zeros = list(x.shape)
        zeros[dim] = more
        return torch.cat([before, torch.zeros(zeros), after], dim)

    for name, x in weights.items():
        if name == "d2t":
            continue
        x, kind = x.float(), name.split(".")[-2]
        if kind.endswith("norm"):
            x = padded(x * share**0.5, 0, 0)
        elif kind in ("q_proj", "k_proj", "v_proj"):
            x = padded(padded(x, 1, width), 1, 0)
        elif kind in ("gate_proj", "up_proj", "lm_head", "embed_tokens"):
            x = padded(x, 1, 0)
        elif kind in ("o_proj", "down_proj", "fc"):
            x = padded(x, 0, 0)
        weights[name] = x.contiguous()
    config.pop("weights_hash", None)
    config |= {
        "hidden_size": width + more, "target_hidden_size": width, "rms_norm_eps": config["rms_norm_eps"] * share,
        "head_dim": config.get("head_dim", width // config["num_attention_heads"]), "dtype": "float32", "torch_dtype": "float32",
    }
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, out / "model.safetensors")


if __name__ == "__main__":
    main()
