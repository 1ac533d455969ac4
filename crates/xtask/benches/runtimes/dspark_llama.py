"""Compares llama.cpp's draft-dspark and draft-dflash with plain decoding and with draftsmith's block drafter.

    python dspark_llama.py DRAFTSMITH LLAMA_CPP TARGET DRAFTER EXPORT PROMPTS COUNT

LLAMA_CPP is llama.cpp's source with `build/bin/llama-server`. DRAFTER is the block drafter that draftsmith decodes with, and
EXPORT the same one as the server gets it. TARGET and EXPORT are converted to GGUF in f32, whatever the tokenizer, since
prompts are sent as ids. Answers are greedy and end before the end token.

Tokens must equal those of `draftsmith generate --target TARGET`, and the server's counts of drafted and accepted tokens those
of `draftsmith generate --drafter DRAFTER`, for every prompt. This is repeated with 3, 5 and 7 candidates a round, for one
request at a time and four at once, and with three thresholds if the drafter has a confidence head. With a threshold, counts
may also be those at a threshold that is 1e-4 higher or lower. The exit code is 1 otherwise.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from eagle3_llama import complete, convert, plain_answers, serving
from tokenizers import Tokenizer
from transformers_rounds import ours

LENGTHS = [3, 5, 7]
THRESHOLDS = [0.0, 0.3, 0.6]
SLOTS = [1, 4]
TOLERANCE = 1e-4
# The server's default attention rounds enough to change a candidate where two are almost equally probable.
EXACT = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
# Renders a message as the text that it contains.
TEMPLATE = "{{ messages[0]['content'] }}"
RECIPE = """
name = "block"
[models]
target = {}
chat_template = {}
[drafters.block]
kind = "block"
path = {}
max_candidate_length = {}
"""


class Counts:
    """draftsmith's counts of drafted and accepted tokens, as the server counts them.

    The server takes the first token from the prompt's forward and drafts from there. So we decode from the prompt followed
    by that token. From then on no round of either side drafts the last token of an answer. draftsmith ends a draft at an end
    token, and the server does not, so we name a token as the end that is not drafted, the mask.
    """

    def __init__(self, binary: str, target: str, drafter: str, mask: int, place: str, answers: list[dict]) -> None:
        self.binary, self.answers, self.place, self.mask = binary, answers, Path(place), str(mask)
        self.tokenizer = Tokenizer.from_file(f"{target}/tokenizer.json")
        template = self.place / "text.jinja"
        template.write_text(TEMPLATE)
        self.models = [json.dumps(str(path)) for path in (target, template, Path(drafter).resolve())]

    def arguments(self, length: int, threshold: float) -> list[str]:
        """The drafter, and the rule that ends a round as the server does."""
        recipe = self.place / f"{length}.toml"
        recipe.write_text(RECIPE.format(*self.models, length))
        rule = f"confidence-head={threshold}" if threshold > 0 else f"fixed={length}"
        return ["--recipe", str(recipe), "--drafter", "block", "--eos-token-id", self.mask, "--rule", rule]

    @cache
    def of(self, number: int, length: int, threshold: float) -> list[int] | None:
        """The counts of an answer; `None` if its first token is not one when the text is read again."""
        own = self.answers[number]
        start, rest = own["prompt_ids"] + own["token_ids"][:1], own["token_ids"][1:]
        text = self.tokenizer.decode(start, skip_special_tokens=False)
        found = ours(self.binary, self.arguments(length, threshold), text, len(rest))
        if found["prompt_ids"] != start:
            return None
        if found["token_ids"] != rest:
            raise SystemExit(f"prompt {number}: draftsmith's own tokens with the drafter DIFFER")
        return [sum(one[name] for one in found["rounds"]) for name in ("num_drafted", "num_accepted")]

    def near(self, number: int, length: int, threshold: float) -> list[list[int] | None]:
        """The counts at thresholds that differ by the tolerance."""
        changes = (-TOLERANCE, TOLERANCE) if threshold > 0 else ()
        return [self.of(number, length, threshold + change) for change in changes]


def compare(counts: Counts, length: int, threshold: float, slots: int) -> tuple[int, str]:
    """Compares all answers. Returns how many differ, and what to print."""
    with ThreadPoolExecutor(slots) as requests:
        served = list(requests.map(complete, counts.answers))
    wrong, num_near, totals = 0, 0, [0, 0]
    for number, (own, (tokens, theirs)) in enumerate(zip(counts.answers, served)):
        expected = counts.of(number, length, threshold)
        totals = [one + other for one, other in zip(totals, theirs)]
        if tokens != own["token_ids"]:
            wrong += 1
            print(f"prompt {number}: tokens DIFFER")
        elif theirs == expected:
            continue
        elif theirs in counts.near(number, length, threshold):
            num_near += 1
        else:
            wrong += 1
            print(f"prompt {number}: drafted and accepted {theirs}, expected {expected}: DIFFER")
    near = f", {num_near} equal within {TOLERANCE:.0e} of p" if num_near else ""
    return wrong, f"{len(served)} prompts, {totals[0]} drafted, {totals[1]} accepted, {wrong} differ{near}"


def main() -> int:
    binary, source, target, drafter, export, path, count = sys.argv[1:]
    config = json.loads((Path(export) / "config.json").read_text())
    spec_type = "draft-dspark" if config.get("markov_rank") else "draft-dflash"
    # Without a confidence head, a threshold switches the server's drafting off. draft-dflash cuts by another probability.
    thresholds = THRESHOLDS if config.get("enable_confidence_head") else THRESHOLDS[:1]
    # The rows of a bidirectional block depend on their number, which is the whole block's in draftsmith.
    lengths = LENGTHS if config.get("is_causal") else [config["block_size"]]
    answers, failed = plain_answers(binary, target, path, count), 0
    with tempfile.TemporaryDirectory() as place:
        convert(source, target, f"{place}/target.gguf", [])
        convert(source, export, f"{place}/draft.gguf", ["--target-model-dir", target])
        counts = Counts(binary, target, drafter, config["mask_token_id"], place, answers)
        again = [number for number in range(len(answers)) if counts.of(number, lengths[0], 0.0) is not None]
        if len(again) < len(answers):
            print(f"{len(answers) - len(again)} prompts left out: their text is not read as the same tokens again")
            counts = Counts(binary, target, drafter, config["mask_token_id"], place, [answers[at] for at in again])
        for length in lengths:
            for threshold in thresholds:
                for slots in SLOTS:
                    options = ["--spec-type", spec_type, "--spec-draft-n-max", str(length), "--spec-draft-p-min",
                               str(threshold), "-c", str(512 * slots), "-np", str(slots), *EXACT]
                    # With several requests, sampling in the backend now and then drafts other tokens.
                    options += ["--no-spec-draft-backend-sampling"] if slots > 1 else []
                    with serving(source, place, options):
                        wrong, text = compare(counts, length, threshold, slots)
                    failed += wrong
                    what = f"{Path(export).name}, K = {length}, p = {threshold:g}, {slots} slot{'s' * (slots > 1)}"
                    print(f"{what}: {text}", flush=True)
    return 1 if failed or not again else 0


if __name__ == "__main__":
    sys.exit(main())
