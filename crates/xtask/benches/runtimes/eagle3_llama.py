"""Compares llama.cpp's draft-eagle3 with plain decoding and with the reference of `eagle3_reference.py`.

    python eagle3_llama.py DRAFTSMITH LLAMA_CPP TARGET DRAFTER PROMPTS COUNT K

LLAMA_CPP is llama.cpp's source with `build/bin/llama-server`. TARGET and DRAFTER are converted to GGUF in f32, whatever
the tokenizer, since prompts are sent as ids. Answers are greedy and end before the end token. Tokens must equal those of
`draftsmith generate --target TARGET`, and the server's counts of drafted and accepted tokens those of the reference with
K candidates a round. The exit code is 1 otherwise.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from eagle3_reference import Drafter
from transformers import AutoModelForCausalLM
from transformers_rounds import ours, prompts_of

# A free port, so that no run asks another's server.
with socket.create_server(("127.0.0.1", 0)) as taken:
    PORT = taken.getsockname()[1]
# A pre-tokenizer that the converter knows, in place of one that it does not: the server reads ids only.
CONVERT = """
import sys, runpy
sys.path[:0] = [sys.argv[1], sys.argv[1] + '/gguf-py']
sys.argv = sys.argv[1:]
sys.argv[0] += '/convert_hf_to_gguf.py'
import importlib
try:
    base = importlib.import_module('conversion.base')
except ImportError:
    base = importlib.import_module('convert_hf_to_gguf')
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def ask(path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", data, timeout=600) as answer:
        return json.load(answer)


def convert(source: str, model: str, out: str, more: list[str]) -> None:
    command = [sys.executable, "-c", CONVERT, source, model, "--outfile", out, "--outtype", "f32", *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the conversion of {model} failed:\n{done.stderr[-3000:]}")


@contextmanager
def serving(source: str, place: str, options: list[str]) -> Iterator[None]:
    """Runs llama-server with the models that `place` contains, on one thread."""
    log = Path(f"{place}/server.log")
    command = [f"{source}/build/bin/llama-server", "-m", f"{place}/target.gguf", "-md", f"{place}/draft.gguf", *options,
               "-t", "1", "--port", str(PORT)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            for _ in range(600):
                try:
                    ask("/health")
                    break
                except OSError:
                    if process.poll() is not None:
                        raise SystemExit(log.read_text()[-3000:])
                    time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait()


def plain_answers(binary: str, target: str, path: str, count: str) -> list[dict]:
    """Answers without a drafter and without their end token, of at least two tokens."""
    answers = [ours(binary, ["--target", target], text) for text in prompts_of(path, count)]
    for one in answers:
        if one["finish_reason"] != "length":
            one["token_ids"].pop()
    return [one for one in answers if len(one["token_ids"]) > 1]


def complete(own: dict) -> tuple[list[int], list[int]]:
    """The server's tokens for a prompt, and its counts of drafted and accepted tokens."""
    answer = ask("/completion", {
        "prompt": own["prompt_ids"], "n_predict": len(own["token_ids"]), "temperature": 0, "return_tokens": True,
        "cache_prompt": False})
    return answer["tokens"], [answer["timings"].get(name, 0) for name in ("draft_n", "draft_n_accepted")]


@torch.no_grad()
def counts_of(target: torch.nn.Module, drafter: Drafter, own: dict, length: int) -> list[int]:
    """Drafted and accepted tokens as the server counts them: the first token is not drafted, and no round drafts
    the last token of an answer."""
    prompt, answer = own["prompt_ids"], own["token_ids"]
    ids = prompt + answer
    hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    states = [hidden[layer][0] for layer in drafter.layers]
    known, counts = len(prompt) + 1, [0, 0]
    while known < len(ids):
        num = min(length, len(ids) - known - 1)
        drafted = drafter.draft(ids[:known], [one[:known - 1] for one in states], num)
        pairs = list(zip(drafted, ids[known:]))
        accepted = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
        counts = [counts[0] + num, counts[1] + accepted]
        known += accepted + 1
    return counts


def main() -> int:
    binary, source, target, drafter, path, count, length = sys.argv[1:]
    answers = plain_answers(binary, target, path, count)
    network = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    reference = Drafter(drafter, network)
    with tempfile.TemporaryDirectory() as place:
        convert(source, target, f"{place}/target.gguf", [])
        convert(source, drafter, f"{place}/draft.gguf", ["--target-model-dir", target])
        options = ["--spec-type", "draft-eagle3", "--spec-draft-n-max", length, "-c", "512", "-np", "1"]
        with serving(source, place, options):
            wrong, counts = 0, [0, 0]
            for number, own in enumerate(answers):
                tokens, theirs = complete(own)
                expected = counts_of(network, reference, own, int(length))
                counts = [one + other for one, other in zip(counts, expected)]
                if tokens != own["token_ids"]:
                    wrong += 1
                    print(f"prompt {number}: tokens DIFFER")
                elif theirs != expected:
                    wrong += 1
                    print(f"prompt {number}: drafted and accepted {theirs}, expected {expected}: DIFFER")
    print(f"{len(answers)} prompts, {counts[0]} drafted, {counts[1]} accepted, {wrong} differ")
    return 1 if wrong or not answers else 0


if __name__ == "__main__":
    sys.exit(main())
