#!/usr/bin/env python3
"""Compares the published figures in recipes/papers with a list of the papers' figures: figures.py papers.md

The list has fenced blocks of figures, one for each paper. Exits with 1 if a figure differs or is missing. The figures that the
recipes have beyond the list are unchecked; their number is printed by table.
"""
import math
import pathlib
import re
import sys
import tomllib

RECIPES = pathlib.Path(__file__).resolve().parents[3] / "recipes" / "papers"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SPEC_BENCH = ["translation", "qa", "summarization", "math_reasoning", "rag", "mt_bench"]


def numbers(text):
    return [float(it) for it in NUMBER.findall(text)]


def between(text, start, end):
    """Returns the text from the first `start` to the next `end`, without either."""
    begin = text.index(start) + len(start)
    return text[begin : text.index(end, begin)]


def tables(recipe):
    """Reads the published figures of a recipe's tables: {title: {(set, row, column): figure}}."""
    with open(RECIPES / f"{recipe}.toml", "rb") as file:
        papers = tomllib.load(file)["papers"]
    own = lambda of, key: [it.get("name") for it in of[key]]
    found = {}
    for paper in papers:
        cells = found.setdefault(paper["title"], {})
        for it in paper.get("published", []):
            rows, columns = it.get("rows") or own(paper, "rows"), it.get("columns") or own(paper, "columns")
            for row, figures in zip(rows, it["figures"]):
                cells |= {(it["name"], row, column): figure for column, figure in zip(columns, figures)}
    return found


def expected(text):
    """Yields (recipe, title, set, row, column, figure) for every figure of the list."""
    # SpecDec++
    at = ("specdec-pp", "Table 1")
    line = between(text, "Table 1   target", "over best K")
    rows = ["target", "best K", "SpecDec++"]
    for name in ("HumanEval", "GSM8K"):
        figures = numbers(between(line, f"{name} [[", "]]"))
        for y, row in enumerate(rows):
            yield *at, name, row, "tok/s", figures[2 * y]
            yield *at, name, row, "speed-up", figures[2 * y + 1]
    yield *at, "Llama 2 7B for 70B, Alpaca", "target", "tok/s", numbers(line)[0]
    at = ("specdec-pp", "§4.3: speed, threshold")
    names = ["Llama 2 7B for 70B, Alpaca", "HumanEval", "GSM8K"]
    for name, gain in zip(names, re.findall(r"\+([\d.]+) %", between(text, "over best K: ", "Table 2"))):
        yield *at, name, "fastest head", "over best K", float(gain) / 100
    line = between(text, "sec. 4.3  ", "sec. 2.1")
    h, share = numbers(between(line, "h = ", "of the best"))
    speeds = numbers(line.split("best;")[1])
    for name, speed in zip(names, speeds):
        yield *at, name, "D = 3", "w = 6", speed
        yield *at, name, "D = 3", "h, w = 6", h
    yield *at, "all three sets, at least", "D = 3", "share, w = 6", share
    at = ("specdec-pp", "Table 2")
    line = between(text, "Table 2   by itself", "sec. 4.3")
    alone, fits = line.split("SpecDec and SpecDec++")
    models = "Llama 2 7B for 70B, mean of both methods"
    yield *at, models, "draft by itself", "draft forward", numbers(alone)[0]
    yield *at, models, "target by itself", "target forward", numbers(alone)[1]
    draft, target = numbers(fits.split("):")[1])[:2]
    r_squared, error = numbers(fits.split(">=")[1])
    for row in ("fixed lengths", "SpecDec++"):
        yield *at, models, row, "draft forward", draft
        yield *at, models, row, "target forward", target
        yield *at, "R² at least and errors at most", row, "R²", r_squared
        yield *at, "R² at least and errors at most", row, "largest error", error / 100
    at = ("specdec-pp-oracle", "oracle")
    line = between(text, "oracle: N_target/N ", "(Table 1")
    share, _, speed, _, times, best = numbers(line.replace("best K there", ""))
    for row, column, figure in [
        ("oracle", "N_target/N", share),
        ("oracle", "tok/s", speed),
        ("oracle", "speed-up", times),
        ("best K", "tok/s", best),
    ]:
        yield *at, "Llama 2 7B for 70B, Alpaca", row, column, figure
    # SVIP
    at = ("svip-glide", "Table 3")
    columns = ["MT-Bench", "Code", "Finance", "GSM", "Spider", "speed-up"]
    for line in between(text, "7B GliDe", "over const.").splitlines():
        size = line.split()[0] if line.split()[0] in ("13B", "33B") else "7B"
        figures = [it for it in numbers(line.removeprefix(size)) if it < 5]
        for nth, name in enumerate(("GliDe", "GliDe with CaPE")):
            for y, row in enumerate(("without", "SVIP")):
                for x, column in enumerate(columns):
                    yield *at, f"{name}, Vicuna {size}", row, column, figures[12 * nth + 6 * y + x]
    line = between(text, "over const.: ", "Fig. 3")
    models = ["Pythia 160M for 6.9B", "Qwen2.5 0.5B for 14B", "Llama 3 8B for 70B"]
    pythia, two, glide = numbers(line.split("h: ")[1])
    for title, part in (("Table 1", between(line, "Table 1", "Table 5")), ("Table 5", between(line, "Table 5", "h: "))):
        gains = re.findall(r"[+-]\d+\.\d", part)
        for model, gain, h in zip(models, gains, (pythia, two, two)):
            yield "svip", title, model, "SVIP", "over K = 5", float(gain) / 100
            yield "svip", title, model, "SVIP", "its setting", h
    yield *at, "GliDe, Vicuna 7B", "SVIP", "its h", glide
    # Kangaroo
    for line in between(text, "7B  Lookahead", "Table 2 (parameters").splitlines():
        method = line.split("[")[0].split()[-1] if line.split("[")[0].split() else "Lookahead"
        lists = [numbers(it) for it in re.findall(r"\[([^]]*)\]", line)]
        for size, (rates, speeds) in zip(("7B", "13B"), (lists[:2], lists[2:])):
            at = ("kangaroo", "Table 1", f"Vicuna {size} on Spec-Bench, a V100", method)
            for category, rate, speed in zip(SPEC_BENCH, rates, speeds):
                yield *at, f"tok/fwd, {category}", rate
                yield *at, f"speed-up, {category}", speed
            yield *at, "speed-up", speeds[6]
    names = {
        "Medusa": "Medusa",
        "Kangaroo": "attention (Kangaroo)",
        "Kangaroo + Head": "attention, own LM head",
        "1-Layer Transformer": "a whole layer",
        "MLP Only": "MLP only",
    }
    for part in between(text, "Table 2 (parameters, speed-up): ", "\n").split(";"):
        name, size, speed = re.fullmatch(r"(.+) (\d+)M ([\d.]+)", part.strip()).groups()
        at = ("kangaroo", "Table 2", "Vicuna 7B on Spec-Bench, a V100", names[name])
        yield *at, "million parameters", float(size)
        yield *at, "speed-up", float(speed)
    # CS-Drafting
    forms = {
        "S base": "speculative, draft",
        "S small": "speculative, small",
        "CS base,mag": "draft and lookup",
        "CS small,mag": "small and lookup",
        "CS base,small,mag": "draft, small and lookup",
    }
    single = {"S base": "base", "S small": "small", "CS base,mag": "base and lookup", "CS small,mag": "small and lookup"}
    for data in ("GSM8K", "MMLU"):
        line = next(it for it in text.splitlines() if it.startswith(f"{data} ") and "S base" in it)
        for form, row in forms.items():
            found = re.search(rf"(?<![a-z,]){form} ([\d.]+) ([\d.]+) \(([^)]*)\)", line)
            published = f"FLAN-T5 base and small for XXL, {data}"
            for nth, price in enumerate(("MS", "PW")):
                at = ("cs-drafting-k", f"Table 2: standardised improvement with the K chosen for {data}", published)
                yield *at, f"{price}: {row}", price, float(found[nth + 1])
                lengths = numbers(found[3].split(";")[nth])
                at = ("cs-drafting-k", "Table 5")
                if form in single:
                    name = "one model: K of speculative decoding and of its cascade with lookup"
                    yield *at, name, f"{data}, {price}", single[form], lengths[0]
                    continue
                for column, length in zip(("k11", "k12", "k22", "l"), lengths):
                    yield *at, "base and small with lookup", f"{data}, {price}", column, length
    line = between(text, "tok/s: autoregressive", "Table 4")
    methods = ["target", "speculative decoding", "CS-Drafting", "Medusa", "CS-Drafting with tree attention"]
    for name, nth in (("Vicuna 7B on an A40, GSM8K", 0), ("MMLU", 1)):
        figures = [it for it in numbers(line) if it > 10]
        for y, row in enumerate(methods):
            yield "cs-drafting", "Table 3", name, row, "tok/s", figures[2 * y + nth]
    for nth, speed in re.findall(r"(\d) -> (\d+\.\d+)", between(text, "Table 4 K00", "Vicuna: K")):
        yield "cs-drafting", "Table 4", "Vicuna 7B on an A40, GSM8K", f"K00 = {nth}", "tok/s", float(speed)
    # Stratos
    at = ("expected-tokens", "Tokens per round", "Stratos's notes, independent candidates accepted with b = 0.8")
    yield *at, "K = 10", "expected", numbers(between(text, "Stratos: E[L] = ", " at"))[0]


def main():
    text = pathlib.Path(sys.argv[1]).read_text()
    text = text[text.index("### 2c") : text.index("## 3. Formulas")]
    recipes = {path.stem: tables(path.stem) for path in sorted(RECIPES.glob("*.toml"))}
    wrong, count = 0, 0
    for recipe, part, *cell, figure in expected(text):
        titles = [title for title in recipes[recipe] if part in title]
        assert len(titles) == 1, f"{recipe}: {len(titles)} tables `{part}`"
        entered = recipes[recipe][titles[0]].pop(tuple(cell), None)
        count += 1
        if entered is None or not math.isclose(entered, figure, abs_tol=1e-9):
            wrong += 1
            print(f"{recipe}, {part}, {', '.join(cell)} is {entered}, expected {figure}")
    for recipe, papers in recipes.items():
        for title, cells in papers.items():
            if unchecked := sum(not math.isnan(figure) for figure in cells.values()):
                print(f"{unchecked} figures unchecked, because the list lacks them: {recipe}, {title}")
    print(f"{count} figures compared, {wrong} differ")
    sys.exit(wrong > 0)


main()
