"""Certifies llama.cpp's and vLLM's servers with the embedded pair, as they should run and with faults.

    python server_certify.py DRAFTSMITH LLAMA_CPP [VLLM_PYTHON]

DRAFTSMITH is the command, LLAMA_CPP llama.cpp's source with `build/bin/llama-server`, VLLM_PYTHON a Python with vLLM 0.32 for
the CPU. The pair is converted to GGUF in f32. Each case starts a server that speculates beside one that does not, and runs
`draftsmith server certify`. Prints verdicts; the exit code is 1 if one differs from what is known of the case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from eagle3_llama import convert

ROOT = Path(__file__).resolve().parents[4]
PAIR = [ROOT / "checkpoints/tiny" / name for name in ("target", "draft")]
PROMPTS = ROOT / "data/tiny/prompts/test.jsonl"
PORTS = [18151, 18152]
K = 3


@dataclass
class Case:
    name: str
    expected: str
    flags: list[str]
    draws: int = 6000


LLAMA_CASES = [
    Case("draft model", "not_refuted", []),
    Case("drawn candidates", "not_refuted", ["--spec-draft-sampling", "probabilistic"]),
    Case("drawn, stopped by probability", "not_refuted", ["--spec-draft-sampling", "probabilistic", "--spec-draft-p-min", "0.5"]),
    Case("acceptance left synthetic", "refuted", ["--spec-synth-rates", "0.8,0.6,0.4"]),
]
VLLM_CASES = [
    Case("draft model, greedy", "not_refuted", [], 0),
    # Version 0.32 divides the logits of verified rows by memory that was never written (pull request 42638).
    Case("draft model", "refuted", [], 300),
]


def wait(port: int, server: subprocess.Popen) -> None:
    for _ in range(360):
        time.sleep(0.5)
        if server.poll() is not None:
            raise SystemExit(f"the server on port {port} ended: {server.args}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except OSError:
            pass
    raise SystemExit(f"the server on port {port} does not start")


def certify(command: str, case: Case) -> dict:
    urls = [f"http://127.0.0.1:{port}/v1" for port in PORTS]
    arguments = ["--server", urls[1], "--reference", urls[0], "--target", str(PAIR[0]), "--prompts", str(PROMPTS)]
    limits = ["--candidates", str(K), "--draws", str(case.draws), "--server-dtype", "f32"]
    done = subprocess.run([command, "server", "certify", *arguments, *limits, "--json", "--quiet"], capture_output=True, text=True)
    if not done.stdout:
        return {"verdict": f"failed: {done.stderr.strip()[-300:]}"}
    return json.loads(done.stdout)


def run(title: str, cases: list[Case], command: str, start) -> bool:
    """`start(port, flags)` starts a server, which does not speculate if flags are None."""
    is_known = True
    reference = start(PORTS[0], None)
    try:
        wait(PORTS[0], reference)
        for case in cases:
            server = start(PORTS[1], case.flags)
            try:
                wait(PORTS[1], server)
                begun = time.monotonic()
                found = certify(command, case)
            finally:
                server.terminate()
                server.wait()
            is_known &= found["verdict"] == case.expected
            mark = "" if found["verdict"] == case.expected else f" (expected: {case.expected})"
            counts = f", {found.get('num_accepted')} of {found.get('num_drafted')} candidates accepted"
            print(f"{title}, {case.name}: {found['verdict']}{mark}{counts}, {time.monotonic() - begun:.0f} s", flush=True)
            greedy = found.get("greedy") or {}
            gaps = sorted(it["gap"] if it["gap"] is not None else float("inf") for it in greedy.get("differences", []))
            print(f"  {greedy.get('num_tokens')} greedy tokens, {len(gaps)} differ, gaps {gaps[-3:]}")
            for test in (found.get("sampled") or {}).get("tests", [])[:3]:
                print(f"  {test}")
    finally:
        reference.terminate()
        reference.wait()
    return is_known


def main() -> int:
    draftsmith, llama_cpp, *vllm = sys.argv[1:]
    with tempfile.TemporaryDirectory() as place:
        models = [str(Path(place) / f"{path.name}.gguf") for path in PAIR]
        for path, out in zip(PAIR, models):
            convert(llama_cpp, str(path), out, [])

        def llama(port: int, flags: list[str] | None) -> subprocess.Popen:
            drafting = ["-md", models[1], "--spec-type", "draft-simple", "--spec-draft-n-max", str(K)]
            more = [] if flags is None else [*drafting, *flags]
            common = ["-m", models[0], "-c", "1024", "-np", "4", "-t", "1", "--port", str(port), "--metrics"]
            binary = f"{llama_cpp}/build/bin/llama-server"
            return subprocess.Popen([binary, *common, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        is_known = run("llama.cpp", LLAMA_CASES, draftsmith, llama)

        def served(port: int, flags: list[str] | None) -> subprocess.Popen:
            config = json.dumps({"method": "draft_model", "model": str(PAIR[1]), "num_speculative_tokens": K})
            more = [] if flags is None else ["--speculative-config", config, *flags]
            common = ["--model", str(PAIR[0]), "--served-model-name", "served", "--port", str(port), "--max-model-len", "256",
                      "--max-num-seqs", "8", "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
            env = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                   "OMP_NUM_THREADS": "1"}
            command = [vllm[0], "-m", "vllm.entrypoints.openai.api_server", *common, *more]
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)

        if vllm:
            is_known &= run("vLLM", VLLM_CASES, draftsmith, served)
    return 0 if is_known else 1


if __name__ == "__main__":
    sys.exit(main())
