#!/usr/bin/env python3
"""Predicts the speed of llama.cpp's server at several loads and numbers of candidates, then measures it.

    python3 server_settings.py DRAFTSMITH LLAMA_SERVER TARGET.gguf DRAFTER.gguf TYPE RECIPE QUESTIONS.jsonl

DRAFTSMITH is the command. TYPE is llama.cpp's `--spec-type` of the drafter: `draft-eagle3` or `draft-simple`. RECIPE names
target and drafter, with sections `[tune]` and `[evaluate]`; `draftsmith record RECIPE` has run. QUESTIONS are lines with a
`question`: other ones than those of `[tune]`. For each number of candidates a server without accepted candidates gives the
cost of rounds (`draftsmith costs`), and one that speculates answers the questions, greedily, with 1, 2 and 4 of them side by
side. Prints predicted and measured speed over the server without speculation, the median error, and how much slower the
predicted best setting of each load is than the measured best one, and the tokens per round by recordings and by the server's
counters. Needs only the standard library.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

LENGTHS = [0, 1, 2, 3, 4, 6]
BATCHES = [1, 2, 4]
PORT = 8097
NUM_TOKENS = 128
NUM_QUESTIONS = 12
ROUNDS = 2
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


class Server:
    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(120):
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health") as answer:
                    if json.load(answer)["status"] == "ok":
                        return
            except OSError:
                pass
        raise SystemExit("the server does not start")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


def complete(question: str) -> dict:
    prompt = f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    body = {"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "cache_prompt": False}
    url = f"http://127.0.0.1:{PORT}/completion"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def counters() -> tuple[float, float]:
    """Rounds with candidates and accepted candidates since the server started."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics") as page:
        text = page.read().decode()
    found = [re.search(rf"spec_decode_num_{name}_total(?:{{[^}}]*}})? (\S+)", text) for name in ("drafts", "accepted_tokens")]
    rounds, accepted = (float(it[1]) if it else 0.0 for it in found)
    return rounds, accepted


def answer_all(questions: list[str], at_once: int) -> tuple[float, list[str]]:
    """Seconds per token of a request after its first token, while `at_once` clients ask, and the answers."""
    left, lock = list(enumerate(questions)), threading.Lock()
    answers: dict[int, dict] = {}

    def ask() -> None:
        while True:
            with lock:
                if not left:
                    return
                nth, question = left.pop(0)
            answers[nth] = complete(question)

    clients = [threading.Thread(target=ask) for _ in range(at_once)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    timings = [answers[nth]["timings"] for nth in range(len(questions))]
    seconds = sum(timing["predicted_ms"] for timing in timings) / 1e3
    return seconds / sum(timing["predicted_n"] - 1 for timing in timings), [answers[nth]["content"] for nth in range(len(questions))]


def main() -> None:
    draftsmith, binary, target, drafter, kind, recipe, path = sys.argv[1:]
    questions = [json.loads(line)["question"] for line in Path(path).read_text().splitlines()]
    questions = questions[:: max(len(questions) // NUM_QUESTIONS, 1)][:NUM_QUESTIONS]
    common = [binary, "-m", target, "-c", "4096", "-np", "4", "-t", "2", "--port", str(PORT), "--metrics"]

    def command(length: int, synthetic: bool) -> list[str]:
        if length == 0:
            return common
        speculation = ["-md", drafter, "--spec-type", kind, "--spec-draft-n-max", str(length)]
        return common + speculation + (["--spec-synth-rates", ",".join(["0"] * length)] if synthetic else [])

    costs = Path("server-costs.json")
    for length in LENGTHS:
        with Server(command(length, True)):
            arguments = ["--server", f"http://127.0.0.1:{PORT}/v1", "--candidates", str(length), "--out", str(costs)]
            subprocess.run([draftsmith, "costs", *arguments, "--batch-sizes", "1,2,4", "--blocks", "3"], check=True)
    told = [draftsmith, "tune", recipe, "--for", "llama.cpp", "--costs", str(costs), "--json", "--quiet"]
    settings = json.loads(subprocess.run(told, check=True, capture_output=True, text=True).stdout)
    predicted = next(it for it in settings if it["decoding"] == "greedy")
    measured: dict[tuple[int, int], list[float]] = {}
    texts: dict[int, list[str]] = {}
    per_round: dict[tuple[int, int], float] = {}
    for nth in range(ROUNDS):
        for length in LENGTHS:
            with Server(command(length, False)):
                complete(questions[0])
                for at_once in BATCHES:
                    rounds, accepted = counters()
                    seconds, answers = answer_all(questions, at_once)
                    rounds, accepted = counters()[0] - rounds, counters()[1] - accepted
                    per_round[at_once, length] = 1 + accepted / max(rounds, 1)
                    measured.setdefault((at_once, length), []).append(seconds)
                    if at_once == 1:
                        texts[length] = answers
        print(f"round {nth + 1} of {ROUNDS}", file=sys.stderr)
    errors, regrets = [], []
    print("at once   K   predicted   measured   error   tokens per round: recorded, server")
    for row in predicted["rows"]:
        speeds = {}
        for cell in row["cells"]:
            key = (row["batch_size"], cell["num_candidates"])
            plain = statistics.median(measured[row["batch_size"], 0])
            speeds[cell["num_candidates"]] = speed = plain / statistics.median(measured[key])
            if key[1] == 0:
                continue
            errors.append(abs(cell["speedup"] / speed - 1))
            print(f"{key[0]:7}  {key[1]:2}   {cell['speedup']:9.3f}   {speed:8.3f}   {100 * (cell['speedup'] / speed - 1):+.1f} %   {cell['tokens_per_round']:.2f}   {per_round[key]:.2f}")
        regrets.append(1 - speeds[row["best"]] / max(speeds.values()))
        print(f"  chosen: K = {row['best']}, {100 * regrets[-1]:.1f} % slower than the measured best")
    same = sum(texts[length] == texts[0] for length in LENGTHS)
    print(f"median error {100 * statistics.median(errors):.1f} % of {len(errors)} settings, greatest regret {100 * max(regrets):.1f} %")
    print(f"answers equal those without speculation at {same - 1} of {len(LENGTHS) - 1} numbers of candidates")


if __name__ == "__main__":
    main()
