"""Measures what the proof of hidden states compares, for right states, rounded weights and faults: states_bounds.py MODEL TEXTS

MODEL is a checkpoint that transformers loads, TEXTS a file with a text on each line. Prints one line for each pair of states that
an EAGLE-3 drafter reads, and one for each rounding. The bounds are in `served_states/middle.rs` and `proof.rs` of draftsmith-tune.
"""

from __future__ import annotations

import math
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_grad_enabled(False)


def unit(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)


def directions(states: torch.Tensor) -> torch.Tensor:
    rows = unit(states)
    rows = rows - rows.mean(0)
    return unit(rows / rows.square().mean(0).sqrt().clamp_min(1e-30))


def nearest(own: torch.Tensor, other: torch.Tensor, ids: torch.Tensor) -> list[bool]:
    """Whether each token's other state is among the 2 % that are nearest to its state."""
    cosines = directions(own) @ directions(other).T
    nearer = (cosines > cosines.diagonal()[:, None]) & (ids[:, None] != ids[None, :])
    return ((nearer.sum(1) <= len(ids) // 50) & (cosines.diagonal() > 0)).tolist()


def evidence(hits: list[bool], least: float = 0.6) -> float:
    """The negative logarithm of Chernoff's bound for the least likely stretch of tokens."""
    most = 0.0
    for begin in range(len(hits)):
        num_hits = 0
        for num, hit in enumerate(hits[begin:], 1):
            num_hits += hit
            share = num_hits / num
            if share < least:
                of_hits = share * math.log(share / least) if share else 0.0
                most = max(most, num * (of_hits + (1 - share) * math.log((1 - share) / (1 - least))))
    return most


def rounded(weights: torch.Tensor, form: str) -> torch.Tensor:
    if form == "fp8":
        scale = weights.abs().max() / 448
        return (weights / scale).to(torch.float8_e4m3fn).float() * scale
    groups = weights.reshape(weights.shape[0], -1, 64 if weights.shape[1] % 64 == 0 else weights.shape[1])
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / (2 ** (int(form) - 1) - 1)
    return (torch.round(groups / scale) * scale).reshape(weights.shape)


class Target:
    def __init__(self, path: str, dtype: torch.dtype = torch.float32, form: str = "") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.layers = self.model.model.layers
        for name, weights in self.model.named_parameters():
            if form and ".layers." in name and weights.dim() == 2:
                weights.copy_(rounded(weights, form))

    def run(self, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The states after 0, 1, … layers in the model's type, and the logits."""
        states = []
        keep = lambda _, inputs, output: states.append((output[0] if isinstance(output, tuple) else output)[0])
        hooks = [layer.register_forward_hook(keep) for layer in self.layers]
        logits = self.model(ids[None]).logits[0]
        for hook in hooks:
            hook.remove()
        return [torch.zeros_like(states[0]), *states], logits.float()


def main() -> None:
    path, texts = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = pathlib.Path(texts).read_text().splitlines()
    rows = [tokenizer(text, return_tensors="pt").input_ids[0, :400] for text in texts]
    right = Target(path)
    num = len(right.layers)
    slots = [2, num // 2, num - 3, num]
    states = [[state.float() for state in right.run(ids)[0]] for ids in rows]
    for first, second in zip(slots, slots[1:]):
        found, ratios, shifted = [], [], []
        for ids, own in zip(rows, states):
            hits = nearest(own[first], own[second], ids)
            found.append((sum(hits) / len(hits), evidence(hits)))
            ratios.append((own[first].norm(dim=1) / own[second].norm(dim=1)).median().item())
            hits = nearest(own[first].roll(1, 0), own[second], ids)
            shifted.append((sum(hits) / len(hits), evidence(hits)))
        print(
            f"{first} to {second}: nearest {min(it[0] for it in found):.2f} or more, evidence at most {max(it[1] for it in found):.1f}, "
            f"ratio of sizes {min(ratios):.2f} to {max(ratios):.2f}; shifted: nearest at most {max(it[0] for it in shifted):.2f}, "
            f"evidence {min(it[1] for it in shifted):.1f} or more",
            flush=True,
        )
    served = Target(path, torch.bfloat16)
    worst = []
    for ids in rows:
        last, logits = served.run(ids)
        served_log_probs = logits.log_softmax(-1)
        own = right.model.lm_head(right.model.model.norm(last[-1].float()))
        top = served_log_probs.topk(20).indices
        errors = (own.log_softmax(-1).gather(1, top) - served_log_probs.gather(1, top)).abs().mean(1)
        limit = 1e-3 + 2.0 ** (math.floor(math.log2(max(1.0, own.abs().max().item()))) - 8)
        worst.append((errors.mean().item() / limit, errors.max().item() / limit))
    print(f"bf16: mean error {max(it[0] for it in worst):.2f} of the limit, at one position {max(it[1] for it in worst):.2f}", flush=True)
    for form in ("bf16", "8", "fp8", "4"):
        other = served if form == "bf16" else Target(path, form=form)
        apart, sizes, beside, hits = [], [], [], []
        for ids, own in list(zip(rows, states))[:6]:
            theirs = [state.float() for state in other.run(ids)[0]]
            for slot in slots:
                distance = lambda layer: ((theirs[slot] - own[layer]).norm(dim=1) / own[layer].norm(dim=1)).median().item()
                apart.append(distance(slot))
                beside += [distance(layer) / apart[-1] for layer in (slot - 1, slot + 1) if 0 < layer < len(own)]
                sizes.append((theirs[slot].norm(dim=1) / own[slot].norm(dim=1)).median().item())
                hits.append(evidence(nearest(theirs[slot], own[slot], ids)))
        print(
            f"weights in {form}: {max(apart):.3f} apart at most, another layer {min(beside):.2f} times as far or more, sizes "
            f"{min(sizes):.2f} to {max(sizes):.2f}, evidence at most {max(hits):.1f}",
            flush=True,
        )


main()
