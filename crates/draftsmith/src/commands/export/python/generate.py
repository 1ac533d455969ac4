"""Assisted generation whose draft stops by its acceptance head. Written by draftsmith.

    assistant = AutoModelForCausalLM.from_pretrained(DIRECTORY, trust_remote_code=True)
    target.generate(**inputs, assistant_model=assistant)

transformers has an assistant draft a round by calling its `generate`, which this replaces. Drafted
tokens are never taken back, so what the target generates stays what it is. Anything but drafting goes
to transformers' own `generate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import cached_file

from .acceptance_head import CONFIG, WEIGHTS, AcceptanceHead, Forward, Round


class StopByHead(StoppingCriteria):
    """Ends a round of drafting once the head doubts its candidates."""

    def __init__(self, model: PreTrainedModel, head: AcceptanceHead, is_greedy: bool) -> None:
        self.round = Round(head, is_greedy)
        self.embeddings = model.get_input_embeddings().weight
        self.forward: Forward | None = None

    def watch(self, lm_head: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """A hook on the LM head: keeps the last position that it read."""
        self.forward = Forward(hidden=inputs[0][0, -1], logits=output[0, -1])

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        if input_ids.shape[0] != 1:
            raise ValueError("assisted generation takes one sequence at a time")
        candidate = int(input_ids[0, -1])
        stops = self.round.stops(self.forward, candidate, self.embeddings[candidate])
        return torch.full((1,), stops, device=input_ids.device, dtype=torch.bool)


def head_of(model: PreTrainedModel) -> AcceptanceHead:
    """The head in the model's own directory, or its repository, read once."""
    head = getattr(model, "_acceptance_head", None)
    if head is None:
        # Not beside this file, which transformers runs from a cache of its own.
        path = cached_file(model.name_or_path, CONFIG)
        cached_file(model.name_or_path, WEIGHTS)
        head = AcceptanceHead(Path(path).parent, model.device)
        model._acceptance_head = head
    return head


@torch.no_grad()
def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`GenerationMixin.generate`, with rounds that stop by the head where it drafts for a target."""
    config = kwargs.get("generation_config")
    if not getattr(config, "is_assistant", False):
        return type(model).generate(model, *args, **kwargs)
    criterion = StopByHead(model, head_of(model), is_greedy=not config.do_sample)
    criteria = StoppingCriteriaList([*(kwargs.pop("stopping_criteria", None) or []), criterion])
    hook = model.get_output_embeddings().register_forward_hook(criterion.watch)
    try:
        return type(model).generate(model, *args, stopping_criteria=criteria, **kwargs)
    finally:
        hook.remove()
