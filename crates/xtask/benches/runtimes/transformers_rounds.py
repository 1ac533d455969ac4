"""Compares assisted generation in transformers with plain generation and with draftsmith's rounds.

    python transformers_rounds.py DRAFTSMITH TARGET DRAFT PROMPTS COUNT -- GENERATE_ARGUMENTS

TARGET and DRAFT are directories. Each line of PROMPTS is a JSON object with `question`, `prompt`, `instruction` or
`turns`. Every prompt is answered greedily in f32 by the target, by the target with DRAFT as its assistant (whose
code is trusted), and by `draftsmith generate GENERATE_ARGUMENTS` with the same ids. Tokens must be equal, and so
must the drafted and kept tokens of each round except the last two, where the limits of the two sides differ. The
exit code is 1 otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

NUM_TOKENS = 64


def prompt_of(line: str) -> str:
    row = json.loads(line)
    text = next(row[key] for key in ("question", "prompt", "instruction", "turns") if row.get(key))
    return text if isinstance(text, str) else text[0]


def prompts_of(path: str, count: str) -> list[str]:
    """The first prompts of a file."""
    with open(path) as lines:
        return [prompt_of(line) for line in lines][: int(count)]


def ours(binary: str, arguments: list[str], prompt: str, num_tokens: int = NUM_TOKENS) -> dict:
    command = [binary, "generate", "--json", "--quiet", "--max-new-tokens", str(num_tokens), "--prompt",
               prompt, *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


class Rounds:
    """Counts the drafted and kept tokens of each call of the assistant's `generate`."""

    def __init__(self, assistant: torch.nn.Module) -> None:
        self.assistant, self.generate, self.drafts = assistant, assistant.generate, []
        assistant.generate = self

    def __call__(self, *args, **kwargs):
        output = self.generate(*args, **kwargs)
        given = kwargs["input_ids"].shape[-1]
        self.drafts.append((given, output.sequences.shape[-1] - given))
        return output

    def take(self, total: int) -> list[tuple[int, int]]:
        """(drafted, accepted) of each round of a sequence of `total` tokens."""
        ends = [given for given, _ in self.drafts[1:]] + [total]
        rounds = [(drafted, end - given - 1) for (given, drafted), end in zip(self.drafts, ends)]
        self.drafts = []
        return rounds


def main() -> int:
    split = sys.argv.index("--")
    binary, target_dir, draft_dir, prompts, count = sys.argv[1:split]
    arguments = sys.argv[split + 1:]
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    assistant = AutoModelForCausalLM.from_pretrained(
        draft_dir, dtype=torch.float32, trust_remote_code=True
    ).eval()
    rounds = Rounds(assistant)
    greedy = GenerationConfig.from_pretrained(target_dir)
    greedy.do_sample, greedy.max_new_tokens = False, NUM_TOKENS
    wrong = num_rounds = 0
    texts = prompts_of(prompts, count)
    for number, text in enumerate(texts):
        expected = ours(binary, arguments, text)
        ids = torch.tensor([expected["prompt_ids"]])
        mask = torch.ones_like(ids)
        plain = target.generate(ids, attention_mask=mask, generation_config=greedy)
        assisted = target.generate(
            ids, attention_mask=mask, generation_config=greedy, assistant_model=assistant
        )
        found = rounds.take(assisted.shape[-1])
        generated = [(one["num_drafted"], one["num_accepted"]) for one in expected["rounds"]]
        generated = [one for one in generated if one[0] > 0]
        is_same = (
            torch.equal(plain, assisted)
            and plain[0, ids.shape[-1]:].tolist() == expected["token_ids"]
        )
        compared = min(len(found), len(generated)) - 2
        num_rounds += max(compared, 0)
        if not is_same or found[:max(compared, 0)] != generated[:max(compared, 0)]:
            wrong += 1
            print(f"prompt {number}: tokens {'equal' if is_same else 'DIFFER'}\n  {found}\n  {generated}")
    print(f"{len(texts)} prompts, {num_rounds} rounds compared, {wrong} prompts differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
