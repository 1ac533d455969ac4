#!/usr/bin/env python3
"""Predicts the speed of llama.cpp's server at several loads and settings, then measures it.

    python3 server_settings.py DRAFTSMITH LLAMA_SERVER TARGET.gguf RECIPE QUESTIONS.jsonl NAME=TYPE=DRAFTER.gguf …

DRAFTSMITH is the command. RECIPE names the target and drafters of these NAMEs, with sections `[tune]` and `[evaluate]`, greedy
decoding and answers of 128 tokens; `draftsmith record RECIPE` has run. TYPE is llama.cpp's `--spec-type` of a drafter:
`draft-eagle3` or `draft-simple`. QUESTIONS are lines with a `question`: other ones than those of RECIPE.

Rounds of each number of candidates are timed by `draftsmith server costs` where none is accepted, and those without speculation for as
many requests as a round may have rows. `draftsmith tune --for llama.cpp` predicts. Then each setting answers the questions,
greedily, with 1, 2 and 4 clients that ask one after another, in two passes, next to a server without speculation; the
fastest of each load do so four more times. Prints
predicted and measured tokens per second over the server without speculation, the median error, how much slower the predicted
best setting of each load is than the measured best one, and tokens per round by recordings and by the server's counters. Needs
only the standard library, and an idle machine.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

LENGTHS = [1, 3]
LEAST_PROB = 0.5
LOOK_UPS = [(3, 4), (2, 2)]
PORTS = [8097, 8098]
"""Of the server that is measured, and of one without speculation that runs beside it, idle meanwhile."""
BATCHES = [1, 2, 4]
MORE_ROWS = "3,5,6,8,12,16,20"
NUM_THREADS = "1"
"""Two virtual CPUs may be one core at one time and two at another: rounds of several rows then take 1 or 1.13 times as long,
while those of one row, which wait for memory, take the same."""
NUM_PASSES = 2
NUM_MORE_PASSES = 4
CONTENDS_WITHIN = 0.05
"""Settings that are at most this much slower than the fastest of a load are measured again, more often, at that load."""
NUM_TOKENS = 128
NUM_QUESTIONS = 12
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@dataclass(frozen=True)
class Setting:
    drafter: str
    num_candidates: int
    least_prob: float = 0.0
    num_matched: int | None = None

    def flags(self, drafters: dict[str, tuple[str, str]]) -> list[str]:
        if self.num_candidates == 0:
            return []
        if self.num_matched is not None:
            sizes = ["--spec-ngram-simple-size-n", str(self.num_matched), "--spec-ngram-simple-size-m", str(self.num_candidates)]
            return ["--spec-type", "ngram-simple", *sizes, "--spec-ngram-simple-min-hits", "1"]
        kind, path = drafters[self.drafter]
        limits = ["--spec-draft-n-max", str(self.num_candidates), "--spec-draft-p-min", str(self.least_prob)]
        # With the default, an EAGLE-3 drafter accepts less as soon as several requests run.
        return ["-md", path, "--spec-type", kind, *limits, "--no-spec-draft-backend-sampling"]

    def __str__(self) -> str:
        if self.num_candidates == 0:
            return "off"
        if self.num_matched is not None:
            return f"{self.num_matched}x{self.num_candidates}"
        return f"{self.num_candidates}" + (f" p {self.least_prob}" if self.least_prob else "")


class Server:
    def __init__(self, command: list[str], port: int = PORTS[0], env: dict[str, str] | None = None) -> None:
        command = [*command, "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        for _ in range(480):
            time.sleep(0.5)
            try:
                # An error while the model is being loaded.
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
        raise SystemExit(f"the server does not start: {' '.join(command)}")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


def complete(question: str, port: int = PORTS[0]) -> tuple[int, str]:
    """The tokens of an answer, by number, and its text."""
    prompt = f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    body = {"model": "served", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "cache_prompt": False}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        found = json.load(answer)
    return found["usage"]["completion_tokens"], found["choices"][0]["text"]


def counters() -> float:
    """Accepted candidates since the server started."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[0]}/metrics") as page:
        text = page.read().decode()
    found = re.search(r"^\w+:spec_decode_num_accepted_tokens_total(?:{[^}]*})? (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def answer_all(questions: list[str], num_clients: int, port: int = PORTS[0]) -> tuple[float, float, list[str]]:
    """Tokens per second of all clients while all are busy, tokens per round, and the answers."""
    left, lock = list(enumerate(questions)), threading.Lock()
    answers: dict[int, tuple[int, str]] = {}
    spans: list[tuple[float, float, int]] = []
    idle_from = float("inf")

    def ask() -> None:
        nonlocal idle_from
        while True:
            with lock:
                if not left:
                    idle_from = min(idle_from, time.monotonic())
                    return
                nth, question = left.pop(0)
            begun = time.monotonic()
            answers[nth] = complete(question, port)
            spans.append((begun, time.monotonic(), answers[nth][0]))

    before = counters()
    clients = [threading.Thread(target=ask) for _ in range(num_clients)]
    begun = time.monotonic()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    accepted = counters() - before
    # Of an answer that others ended before, the share that was done by then.
    tokens = sum(num * min(1.0, (idle_from - start) / (end - start)) for start, end, num in spans)
    later = sum(num - 1 for num, _ in answers.values())
    return tokens / (idle_from - begun), later / max(later - accepted, 1), [answers[nth][1] for nth in range(len(questions))]


def main() -> None:
    draftsmith, binary, target, recipe, path, *given = sys.argv[1:]
    drafters = {name: (kind, gguf) for name, kind, gguf in (it.split("=") for it in given)}
    questions = [json.loads(line)["question"] for line in Path(path).read_text().splitlines()]
    questions = questions[:: max(len(questions) // NUM_QUESTIONS, 1)][:NUM_QUESTIONS]
    plain = Setting("", 0)

    def command(setting: Setting, num_slots: int, more: list[str]) -> list[str]:
        # Without a unified cache, requests that draft different numbers are computed one after another.
        slots = ["-c", str(1024 * num_slots), "-np", str(num_slots), "--kv-unified"]
        common = ["-t", NUM_THREADS, "--metrics"]
        return [binary, "-m", target, *slots, *common, *setting.flags(drafters), *more]

    def measure_costs(setting: Setting, out: Path, batches: str, num_slots: int, more: list[str]) -> None:
        with Server(command(setting, num_slots, more)):
            urls = [f"http://127.0.0.1:{port}/v1" for port in PORTS]
            arguments = ["--server", urls[0], "--reference", urls[1], "--candidates", str(setting.num_candidates)]
            sizes = ["--batch-sizes", batches, "--blocks", "4", "--rounds", "48", "--prompt-words", "90"]
            subprocess.run([draftsmith, "server", "costs", *arguments, *sizes, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)

    with Server(command(plain, 4, []), PORTS[1]):
        whole = Path("server-costs.json")
        measure_costs(plain, whole, "1,2,4", 4, [])
        measure_costs(plain, whole, MORE_ROWS, 20, [])
        settings = [Setting("look-up", most, 0.0, matched) for matched, most in LOOK_UPS]
        predicted: dict[tuple[int, Setting], dict] = {}
        for name in drafters:
            costs = Path(f"server-costs-{name}.json")
            if not costs.exists():
                shutil.copy(whole, costs)
            for length in LENGTHS:
                synthetic = ["--spec-synth-rates", ",".join(["0"] * length)]
                measure_costs(Setting(name, length), costs, "1,2,4", 4, synthetic)
            settings += [Setting(name, length) for length in LENGTHS] + [Setting(name, LENGTHS[-1], LEAST_PROB)]
            told = [draftsmith, "tune", recipe, "--for", "llama.cpp", "--costs", str(costs), "--json", "--quiet"]
            for found in json.loads(subprocess.run(told, check=True, capture_output=True, text=True).stdout):
                drafter = found["drafter"].split("+")[0]
                if found["decoding"] != "greedy" or drafter not in (name, "look-up", "lookup"):
                    continue
                for row in found["rows"]:
                    for cell in row["cells"]:
                        by = name if cell["num_matched"] is None else "look-up"
                        key = Setting(by, cell["num_candidates"], cell["least_prob"], cell["num_matched"])
                        predicted[row["batch_size"], key] = cell

        speeds: dict[tuple[int, Setting], list[float]] = {}
        plain_speeds: dict[int, list[float]] = {}
        per_round: dict[tuple[int, Setting], float] = {}
        texts: dict[Setting, list[str]] = {}

        def measure(loads: dict[Setting, list[int]], title: str) -> None:
            for setting, batches in loads.items():
                with Server(command(setting, 4, [])):
                    complete(questions[0])
                    for num_clients in batches:
                        beside, _, expected = answer_all(questions, num_clients, PORTS[1])
                        speed, per_round[num_clients, setting], answers = answer_all(questions, num_clients)
                        plain_speeds.setdefault(num_clients, []).append(beside)
                        speeds.setdefault((num_clients, setting), []).append(speed / beside)
                        if num_clients == 1:
                            texts[setting], texts[plain] = answers, expected
                print(f"{title}: {setting.drafter} {setting}", file=sys.stderr, flush=True)

        for nth in range(NUM_PASSES):
            measure({setting: BATCHES for setting in settings[:: -1 if nth % 2 else 1]}, f"pass {nth + 1}")
        contenders: dict[Setting, list[int]] = {}
        for num_clients in BATCHES:
            at_load = {setting: statistics.mean(speeds[num_clients, setting]) for setting in settings}
            least = max([1.0, *at_load.values()]) * (1 - CONTENDS_WITHIN)
            for setting in settings:
                if at_load[setting] >= least:
                    contenders.setdefault(setting, []).append(num_clients)
        for nth in range(NUM_MORE_PASSES):
            measure(dict(list(contenders.items())[:: -1 if nth % 2 else 1]), f"contenders, pass {nth + 1}")
        measured = {key: statistics.mean(passes) for key, passes in speeds.items()}
        apart = statistics.median(max(passes) / min(passes) - 1 for passes in speeds.values())
    errors, regrets = [], []
    print("clients  drafter   setting   predicted   measured    error   tokens per round: recorded, server")
    for num_clients in BATCHES:
        pairs = []
        for setting in settings:
            cell = predicted.get((num_clients, setting))
            if cell is None:
                print(f"{num_clients:7}  {setting.drafter:8}  {setting!s:8}   not predicted")
                continue
            speed = measured[num_clients, setting]
            error = cell["speedup"] / speed - 1
            errors.append(abs(error))
            pairs.append((cell["speedup"], speed, setting))
            print(
                f"{num_clients:7}  {setting.drafter:8}  {setting!s:8}   {cell['speedup']:9.3f}   {speed:8.3f}   {100 * error:+5.1f} %   "
                f"{cell['tokens_per_round']:.2f}   {per_round[num_clients, setting]:.2f}"
            )
        chosen = max([*pairs, (1.0, 1.0, plain)], key=lambda it: it[0])
        best = max([*pairs, (1.0, 1.0, plain)], key=lambda it: it[1])
        regrets.append(1 - chosen[1] / best[1])
        names = [f"{setting.drafter} {setting}".strip() for _, _, setting in (chosen, best)]
        print(f"  predicted best: {names[0]}, {100 * regrets[-1]:.1f} % slower than the measured best, {names[1]}")
    same = sum(texts[setting] == texts[plain] for setting in settings)
    print(f"median error {100 * statistics.median(errors):.1f} % of {len(errors)} settings, greatest regret {100 * max(regrets):.1f} %")
    print(f"the passes of a setting differ by {100 * apart:.1f} % in the median")
    print(f"all answers equal those without speculation under {same} of {len(settings)} settings")
    speeds = ", ".join(f"{num_clients}: {statistics.median(plain_speeds[num_clients]):.1f}" for num_clients in BATCHES)
    print(f"tokens per second without speculation by clients: {speeds}")


if __name__ == "__main__":
    main()
