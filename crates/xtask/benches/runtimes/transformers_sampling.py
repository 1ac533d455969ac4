"""Compares greedy answers under a repetition penalty, stop strings and end tokens with transformers.

    python transformers_sampling.py DRAFTSMITH TARGET [FLAGS ...]

Each prompt is answered by `DRAFTSMITH generate`, plainly and with FLAGS such as `--draft DIR` or
`--prompt-lookup`, and by transformers' `generate` in f32 under the same settings. Prints how many answers have the
same ids and, for the others, the difference between transformers' two largest penalised logits at the first
different token. The exit code is 1 if such a difference is more than rounding.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "What is 47 + 85? Show the steps.",
    "Write a short story about a robot that learns to paint.",
    "List ten fruits, one a line, and repeat each name twice.",
    "Explain why the sky is blue. Use simple words, then say it again in other words.",
    "Translate to French: The cat sleeps on the warm windowsill.",
    "Copy the second sentence: The red lamp is near the door. The old clock is on the shelf.",
]
NUM_TOKENS = 80
# Equivalent flags of draftsmith and arguments of transformers.
SETTINGS = [
    ([], {}),
    (["--repetition-penalty", "1.1"], {"repetition_penalty": 1.1}),
    (["--repetition-penalty", "1.3"], {"repetition_penalty": 1.3}),
    (["--repetition-penalty", "0.9"], {"repetition_penalty": 0.9}),
    (["--stop-string", ". "], {"stop_strings": [". "]}),
    (["--stop-string", "\n\n", "--stop-string", "ar"], {"stop_strings": ["\n\n", "ar"]}),
    (["--stop-string", "he", "--repetition-penalty", "1.2"], {"stop_strings": ["he"], "repetition_penalty": 1.2}),
]


def main() -> int:
    program, directory, *flags = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def ours(prompt: str, extra: list[str]) -> dict:
        command = [program, "generate", "--target", directory, "--prompt", prompt, "--json", "--greedy"]
        command += ["--max-new-tokens", str(NUM_TOKENS), *extra]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    same = total = 0
    failed = False
    for our_flags, their_arguments in SETTINGS:
        for prompt in PROMPTS:
            answers = [ours(prompt, our_flags), ours(prompt, our_flags + flags)] if flags else [ours(prompt, our_flags)]
            ids = torch.tensor([answers[0]["prompt_ids"]])
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                tokenizer=tokenizer,
                return_dict_in_generate=True,
                output_scores=True,
                **their_arguments,
            )
            theirs = found.sequences[0, ids.shape[1] :].tolist()
            for which, answer in zip(["alone", "drafted"], answers):
                total += 1
                if answer["token_ids"] == theirs:
                    same += 1
                    continue
                pairs = enumerate(zip(answer["token_ids"], theirs))
                at = next((at for at, (one, other) in pairs if one != other), None)
                gap = None
                if at is not None:
                    best = found.scores[at][0].topk(2).values
                    gap = ((best[0] - best[1]) / best[0].abs()).item()
                failed |= gap is None or gap > 1e-5
                print(f"{our_flags} {which}, {prompt[:30]!r}: differs at {at}, best logits {gap} apart")
    print(f"{same} of {total} answers have the same ids")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
