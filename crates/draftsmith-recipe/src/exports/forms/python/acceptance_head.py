"""An acceptance head: predicts the probability that the target accepts a draft's candidate.

Written by draftsmith. The head is SpecDec++'s (Huang et al. 2024, section 3): residual blocks
`x + silu(W x + b)` over the draft's hidden state after its final norm, and a linear layer to two
logits. A look-ahead head reads the state that a candidate was drawn from, the candidate's embedding
and its log-probability. The paper's head reads the candidate's hidden state, one forward later.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, silu

CONFIG = "acceptance_head.json"
WEIGHTS = "acceptance_head.safetensors"


def sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(min(-logit, 700.0)))


@dataclass
class Forward:
    """The draft's output that a candidate is drawn from."""

    hidden: torch.Tensor  # [hidden], input of the LM head
    logits: torch.Tensor  # [vocab], raw


class AcceptanceHead:
    """A head with its stop threshold, read from a directory."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.config = json.loads((directory / CONFIG).read_text())
        tensors = load_file(directory / WEIGHTS)
        self.tensors = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
        self.looks_ahead: bool = self.config["form"] == "look-ahead"
        self.stop_threshold: float = self.config["stop_threshold"]
        self.min_candidates: int = self.config["min_candidates"]
        self.max_candidates: int = self.config["max_candidates"]

    def scalars(self, forward: Forward, candidate: int) -> list[float]:
        """The scalar inputs of a candidate, scaled to the order of 1."""
        if not (self.looks_ahead or self.config["inputs"]):
            return []
        cap = self.config["logit_soft_cap"]
        logits = forward.logits.double()
        logits = cap * torch.tanh(logits / cap) if cap else logits
        log_probs = torch.log_softmax(logits, dim=-1)
        probs = log_probs.exp()
        largest_entropy = math.log(max(self.config["vocab_size"], 2))
        numbers = []
        if self.looks_ahead:
            numbers.append(max(log_probs[candidate].item() / largest_entropy, -2.0))
        for name in self.config["inputs"]:
            if name == "entropy":
                entropy = -torch.where(probs > 0, probs * log_probs, 0.0).sum().item()
                numbers.append(entropy / largest_entropy)
            elif name == "top_prob":
                top = probs.max().item()
                log_odds = math.inf if top >= 1.0 else math.log(top / (1.0 - top))
                numbers.append(min(max(log_odds / 5.0, -2.0), 2.0))
        return numbers

    def probability(self, hidden: torch.Tensor, embedding: torch.Tensor | None,
                    scalars: list[float]) -> float:
        """The probability that a candidate is accepted."""
        x = hidden.float()
        extra = [embedding.float() * self.config["embedding_scale"]] if self.looks_ahead else []
        extra += [torch.tensor(scalars, device=x.device)] if scalars else []
        if extra:
            x = x + linear(torch.cat(extra), self.tensors["input.weight"])
        for depth in range(self.config["num_layers"]):
            block = f"blocks.{min(depth, self.config['num_stored_blocks'] - 1)}"
            x = x + silu(linear(x, self.tensors[f"{block}.weight"], self.tensors[f"{block}.bias"]))
        reject, accept = linear(x, self.tensors["output.weight"], self.tensors["output.bias"]).tolist()
        return sigmoid(accept - reject)


class Round:
    """A draft phase: takes each candidate after it is drawn and decides when to stop.

    It stops once the probability that any candidate is rejected exceeds the threshold. With the paper's
    head the last candidate's prediction is not known yet and does not count.
    """

    def __init__(self, head: AcceptanceHead) -> None:
        self.head = head
        self.all_accepted = 1.0
        self.num_candidates = 0
        self.last: tuple[Forward, int] | None = None

    def stops(self, forward: Forward, candidate: int, embedding: torch.Tensor) -> bool:
        """Whether to stop after `candidate`, which was drawn from `forward`."""
        head = self.head
        self.num_candidates += 1
        if head.looks_ahead:
            scalars = head.scalars(forward, candidate)
            self.all_accepted *= head.probability(forward.hidden, embedding, scalars)
        elif self.last is not None:
            drawn_from, previous = self.last
            scalars = head.scalars(drawn_from, previous)
            self.all_accepted *= head.probability(forward.hidden, None, scalars)
        self.last = (forward, candidate)
        doubts = 1.0 - self.all_accepted > head.stop_threshold
        return doubts and self.num_candidates >= head.min_candidates
