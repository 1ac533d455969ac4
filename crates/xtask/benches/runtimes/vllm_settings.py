#!/usr/bin/env python3
"""Measures vLLM's table of candidates by batch size, as draftsmith writes it, against each number of candidates.

    VLLM_PYTHON vllm_settings.py DRAFTSMITH TARGET DRAFTER RECIPE NAME QUESTIONS.jsonl

DRAFTSMITH is the command, TARGET and DRAFTER the directories of a model and of an exported EAGLE-3 drafter, NAME the drafter's name
in RECIPE, which has sections `[tune]` and `[evaluate]`, greedy decoding and answers of 128 tokens; `draftsmith record RECIPE` has
run. Rounds are timed with a drafter of random weights, since vLLM for the CPU has no synthetic acceptance. `draftsmith tune --for
vllm` predicts and writes the table. Then each number of candidates and the table answer the questions, greedily, with 1, 2 and 4
clients, each time after a server without speculation did. Prints predicted and measured tokens per second over vLLM without speculation.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import server_settings
import torch
from safetensors.torch import load_file, save_file
from server_settings import PORTS, Server, answer_all, complete

LENGTHS = [1, 2, 3]
BATCHES = [1, 2, 4]
server_settings.NUM_QUESTIONS = 12
# One thread, for the reason that `server_settings.py` gives.
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"}
ENV = {**os.environ, **THREADS, "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def write_untrained(drafter: Path, out: Path) -> None:
    shutil.copytree(drafter, out)
    torch.manual_seed(1)
    weights = load_file(drafter / "model.safetensors")
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.dim() > 1:
            weights[name] = (torch.randn(weight.shape) * 0.02).to(weight.dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    draftsmith, target, drafter, recipe, name, path = sys.argv[1:]
    questions = [json.loads(line)["question"] for line in Path(path).read_text().splitlines()]
    questions = questions[:: max(len(questions) // server_settings.NUM_QUESTIONS, 1)][: server_settings.NUM_QUESTIONS]
    place = Path(tempfile.mkdtemp())
    write_untrained(Path(drafter), place / "untrained")

    def command(config: dict | None) -> list[str]:
        common = ["--model", target, "--served-model-name", "served", "--max-model-len", "1024", "--max-num-seqs", "4", "--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching"]
        more = [] if config is None else ["--speculative-config", json.dumps(config)]
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *common, *more]

    def static(length: int, model: str) -> dict | None:
        return {"method": "eagle3", "model": model, "num_speculative_tokens": length} if length else None

    costs = Path("vllm-costs.json")
    urls = [f"http://127.0.0.1:{port}/v1" for port in PORTS]
    with Server(command(None), PORTS[1], ENV):
        for length in [0, *LENGTHS]:
            with Server(command(static(length, str(place / "untrained"))), env=ENV):
                arguments = ["--server", urls[0], "--reference", urls[1], "--candidates", str(length), "--out", str(costs)]
                sizes = ["--batch-sizes", "1,2,4", "--blocks", "3", "--rounds", "32", "--prompt-words", "90"]
                subprocess.run([draftsmith, "server", "costs", *arguments, *sizes], check=True)
        told = [draftsmith, "tune", recipe, "--for", "vllm", "--costs", str(costs), "--clients", "1", "--json", "--quiet"]
        found = json.loads(subprocess.run(told, check=True, capture_output=True, text=True).stdout)
        found = next(it for it in found if it["decoding"] == "greedy" and it["drafter"] == name)
        predicted = {(row["batch_size"], cell["num_candidates"]): cell for row in found["rows"] for cell in row["cells"]}
        best = {row["batch_size"]: row["best"] for row in found["rows"]}
        written = next((json.loads(file["text"]) for file in found["files"] if file["name"] == "speculative.json"), None)
        print(f"the table: {written and written['num_speculative_tokens_per_batch_size']}")
        runs: list[tuple[str, dict | None]] = [(f"K = {length}", static(length, drafter)) for length in LENGTHS]
        if written:
            runs.append(("table", {**written, "model": drafter}))
        measured: dict[tuple[int, str], float] = {}
        per_round: dict[tuple[int, str], float] = {}
        texts: dict[str, list[str]] = {}
        for title, config in runs:
            with Server(command(config), env=ENV):
                complete(questions[0])
                for num_clients in BATCHES:
                    beside, _, expected = answer_all(questions, num_clients, PORTS[1])
                    speed, per_round[num_clients, title], answers = answer_all(questions, num_clients)
                    measured[num_clients, title] = speed / beside
                    if num_clients == 1:
                        texts[title], texts["off"] = answers, expected
            print(title, file=sys.stderr, flush=True)
    errors = []
    print("clients  setting   predicted   measured    error   tokens per round: recorded, server")
    for num_clients in BATCHES:
        for title, _ in runs:
            length = best[num_clients] if title == "table" else int(title.split()[-1])
            cell = predicted.get((num_clients, length), {"speedup": 1.0, "tokens_per_round": 1.0})
            speed = measured[num_clients, title]
            errors.append(abs(cell["speedup"] / speed - 1))
            print(f"{num_clients:7}  {title:8}  {cell['speedup']:9.3f}   {speed:8.3f}   {100 * (cell['speedup'] / speed - 1):+5.1f} %   "
                  f"{cell['tokens_per_round']:.2f}   {per_round[num_clients, title]:.2f}")
    print(f"median error {100 * statistics.median(errors):.1f} % of {len(errors)} cells")
    print("answers equal those without speculation: " + ", ".join(
        f"{title} {sum(one == other for one, other in zip(answers, texts['off']))} of {len(questions)}" for title, answers in texts.items()))
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
