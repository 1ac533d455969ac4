"""A vLLM `custom_class` proposer: a draft that its acceptance head stops.

Written by draftsmith for vLLM @VERSIONS@. The directory of this file is a Python package; with its
parent on `PYTHONPATH`:

    --speculative-config '{"method": "custom_class", "model": "@PACKAGE@.Proposer",
                           "num_speculative_tokens": @MOST@}'

vLLM verifies proposals as certain, so candidates are the draft's most probable tokens, and the head
decides how many each request gets. The output is the target's, as with any proposer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from transformers import AutoModelForCausalLM, DynamicCache

from .acceptance_head import AcceptanceHead, Forward, Round

VERSIONS = (@VERSION_TUPLE@)


@dataclass
class Sequence:
    """The tokens of a request that the draft has read. vLLM moves requests between rows without
    identifying them, so we match them by their prefix."""

    tokens: list[int]
    cache: DynamicCache


class Proposer:
    def __init__(self, vllm_config: Any) -> None:
        version = ".".join(vllm.__version__.split(".")[:2])
        if version not in VERSIONS:
            raise RuntimeError(
                f"this proposer supports vLLM {' and '.join(VERSIONS)}, not {vllm.__version__}; "
                "install a supported version, or export again with a newer draftsmith"
            )
        directory = Path(__file__).parent
        device = torch.device(vllm_config.device_config.device)
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=vllm_config.model_config.dtype
        ).to(device).eval()
        self.head = AcceptanceHead(directory, device)
        self.model.get_output_embeddings().register_forward_hook(self._watch)
        self.embeddings = self.model.get_input_embeddings().weight
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.most = min(
            self.head.max_candidates, vllm_config.speculative_config.num_speculative_tokens
        )
        self.max_len = min(
            vllm_config.model_config.max_model_len, self.model.config.max_position_embeddings
        )
        self.device = device
        self.sequences: list[Sequence] = []

    def load_model(self, model: Any) -> None:
        """Ignores the target that vLLM offers: the draft is a separate model."""

    @torch.inference_mode()
    def propose(self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any,
                slot_mappings: Any = None) -> list[list[int]]:
        """Candidates of each row; none for rows without a sampled token."""
        kept: list[Sequence] = []
        proposals = []
        for row, sampled in enumerate(sampled_token_ids):
            if not sampled:
                proposals.append([])
                continue
            tokens = [int(token) for token in token_ids_cpu[row, : int(num_tokens_no_spec[row])]]
            sequence = self._take(tokens)
            kept.append(sequence)
            proposals.append(self._draft(tokens, sequence))
        # Requests without a row have ended, or are read again when they return.
        self.sequences = kept
        return proposals

    def _watch(self, lm_head: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.forward = Forward(hidden=inputs[0][0, -1], logits=output[0, -1])

    def _take(self, tokens: list[int]) -> Sequence:
        """Removes and returns the sequence with the longest common prefix, cut to that prefix."""
        best, most = None, 0
        for sequence in self.sequences:
            shared = 0
            for one, other in zip(sequence.tokens, tokens):
                if one != other:
                    break
                shared += 1
            if shared > most:
                best, most = sequence, shared
        # Read the last token again: the first candidate is drawn from its forward.
        most = min(most, len(tokens) - 1)
        if best is None or most == 0:
            return Sequence([], DynamicCache(config=self.model.config))
        self.sequences.remove(best)
        if most < len(best.tokens):
            best.cache.crop(most - len(best.tokens))
            del best.tokens[most:]
        return best

    def _draft(self, tokens: list[int], sequence: Sequence) -> list[int]:
        room = min(self.most, self.max_len - len(tokens) - 1)
        candidates: list[int] = []
        this_round = Round(self.head)
        unread = tokens[len(sequence.tokens):]
        while len(candidates) < room:
            ids = torch.tensor([unread], device=self.device)
            self.model(ids, past_key_values=sequence.cache, use_cache=True, logits_to_keep=1)
            sequence.tokens.extend(unread)
            candidate = int(self.forward.logits.argmax())
            candidates.append(candidate)
            if this_round.stops(self.forward, candidate, self.embeddings[candidate]):
                break
            if candidate in self.ends:
                break
            unread = [candidate]
        return candidates
