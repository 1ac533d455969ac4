"""Assisted generation with a draft that its acceptance head stops. Written by draftsmith.

    assistant = AutoModelForCausalLM.from_pretrained(DIRECTORY, trust_remote_code=True)
    target.generate(**inputs, assistant_model=assistant)

transformers calls the assistant's `generate` to draft a round, and this module replaces it. Drafted
tokens are never removed, so the target's output does not change. Calls that do not draft go to the
original `generate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import cached_file

from .acceptance_head import CONFIG, WEIGHTS, AcceptanceHead, Forward, Round


class StopByHead(StoppingCriteria):
    """Ends a draft phase once the head expects a rejection."""

    def __init__(self, model: PreTrainedModel, head: AcceptanceHead) -> None:
        self.round = Round(head)
        self.embeddings = model.get_input_embeddings().weight
        self.forward: Forward | None = None

    def watch(self, lm_head: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """A hook on the LM head that keeps its last position."""
        self.forward = Forward(hidden=inputs[0][0, -1], logits=output[0, -1])

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        if input_ids.shape[0] != 1:
            raise ValueError("assisted generation takes one sequence at a time")
        candidate = int(input_ids[0, -1])
        stops = self.round.stops(self.forward, candidate, self.embeddings[candidate])
        return torch.full((1,), stops, device=input_ids.device, dtype=torch.bool)


def head_of(model: PreTrainedModel) -> AcceptanceHead:
    """The head in the model's directory or repository, read once."""
    head = getattr(model, "_acceptance_head", None)
    if head is None:
        # transformers runs this file from a cache, so the head is not beside it.
        path = cached_file(model.name_or_path, CONFIG)
        cached_file(model.name_or_path, WEIGHTS)
        head = AcceptanceHead(Path(path).parent, model.device)
        model._acceptance_head = head
    return head


@torch.no_grad()
def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`GenerationMixin.generate`, with a head that ends draft phases."""
    config = kwargs.get("generation_config")
    if not getattr(config, "is_assistant", False):
        return type(model).generate(model, *args, **kwargs)
    criterion = StopByHead(model, head_of(model))
    criteria = StoppingCriteriaList([*(kwargs.pop("stopping_criteria", None) or []), criterion])
    hook = model.get_output_embeddings().register_forward_hook(criterion.watch)
    try:
        return type(model).generate(model, *args, stopping_criteria=criteria, **kwargs)
    finally:
        hook.remove()
