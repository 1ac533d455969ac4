"""Reads a data directory with DuckDB, Polars and pandas, and compares them with each other and with data/README.md.

    pip install duckdb polars pandas pyarrow
    python crates/xtask/benches/open_formats.py data/NAME [labels.json]

A file of `draftsmith export --for specdec-pp` is read in the way of the SpecDec++ authors' training script and
must give the same labels.
"""

import ast
import json
import math
import pathlib
import re
import sys

import duckdb
import pandas
import polars


def documented(readme: str, name: str) -> set[str]:
    """The columns in the README's table for this kind of file."""
    lines = readme.split(f"**{name}**", 1)[1].split("\n")
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = lines[first : lines.index("", first)]
    return {column for row in table for column in re.findall(r"`([a-z_]+)`", row.split("|")[1])}


def figures_of_pandas(files: list[str]) -> dict:
    frame = pandas.concat([pandas.read_parquet(file) for file in files])
    pairs = zip(frame["target_log_prob"], frame["draft_log_prob"])
    accepted = [math.exp(min(0.0, float(p) - float(q))) for ps, qs in pairs for p, q in zip(ps, qs)]
    overlap = [float(value) for values in frame["overlap"] for value in values]
    return {
        "columns": set(frame.columns),
        "rows": len(frame),
        "tokens": sum(map(len, frame["response_ids"])),
        "overlap": sum(overlap) / len(overlap),
        "accepted": sum(accepted) / len(accepted),
    }


def figures_of_polars(files: list[str]) -> dict:
    frame = polars.concat([polars.read_parquet(file) for file in files])
    flat = frame.select("target_log_prob", "draft_log_prob", "overlap").explode(
        "target_log_prob", "draft_log_prob", "overlap"
    ).cast(polars.Float64)
    ratio = (flat["target_log_prob"] - flat["draft_log_prob"]).clip(upper_bound=0.0).exp()
    return {
        "columns": set(frame.columns),
        "rows": frame.height,
        "tokens": int(frame["response_ids"].list.len().sum()),
        "overlap": flat["overlap"].mean(),
        "accepted": ratio.mean(),
    }


def figures_of_duckdb(files: list[str]) -> dict:
    table = f"read_parquet({files!r})"
    columns = {row[0] for row in duckdb.sql(f"DESCRIBE SELECT * FROM {table}").fetchall()}
    rows, tokens = duckdb.sql(f"SELECT count(*), sum(len(response_ids)) FROM {table}").fetchall()[0]
    overlap, accepted = duckdb.sql(
        "SELECT avg(overlap), avg(exp(least(0, p::DOUBLE - q::DOUBLE))) FROM (SELECT "
        "unnest(overlap)::DOUBLE AS overlap, unnest(target_log_prob) AS p, "
        f"unnest(draft_log_prob) AS q FROM {table})"
    ).fetchall()[0]
    return {
        "columns": columns,
        "rows": rows,
        "tokens": int(tokens),
        "overlap": overlap,
        "accepted": accepted,
    }


def figures_of_authors(path: str) -> dict:
    """Reads data like train.py of SpecDec++: lists with literal_eval."""
    with open(path) as file:
        items = json.load(file)
    accepted, tokens = [], 0
    for item in items:
        ids, draft, p_acc = (ast.literal_eval(item[key]) for key in ("tokens", "draft", "p_acc"))
        assert len(ids) == len(draft) == len(p_acc), item["id"]
        assert all(isinstance(token, int) for token in ast.literal_eval(item["prefix"]) + ids + draft)
        logs = (ast.literal_eval(item["log_p_70b"]), ast.literal_eval(item["log_p_7b"]))
        for p, q, label in zip(*logs, p_acc):
            assert abs(math.exp(min(0.0, p - q)) - label) < 1e-5, (item["id"], p, q, label)
        accepted += p_acc
        tokens += len(ids)
    return {"rows": len(items), "tokens": tokens, "accepted": sum(accepted) / len(accepted)}


def main() -> None:
    data = pathlib.Path(sys.argv[1])
    readme = (pathlib.Path(__file__).parents[3] / "data/README.md").read_text()
    files = sorted(str(file) for file in data.glob("responses-*.parquet"))
    assert files, f"there are no responses in {data}"
    names = documented(readme, "Responses")
    read = {
        "pandas": figures_of_pandas(files),
        "polars": figures_of_polars(files),
        "duckdb": figures_of_duckdb(files),
    }
    for name, figures in read.items():
        columns = figures.pop("columns")
        assert columns == names, f"{name}: read {sorted(columns ^ names)} beside what is documented"
    if len(sys.argv) > 2:
        read["SpecDec++"] = figures_of_authors(sys.argv[2])
    first = read["pandas"]
    for name, figures in read.items():
        for key, value in figures.items():
            assert math.isclose(value, first[key], rel_tol=1e-6), (name, key, value, first[key])
        print(f"{name}: {figures}")
    size = sum(pathlib.Path(file).stat().st_size for file in files)
    print(f"{size / first['tokens']:.1f} bytes a token")
    rollouts = sorted(str(file) for file in data.glob("rollouts-*.parquet"))
    names = documented(readme, "Rollouts")
    for file in rollouts:
        lengths = {
            "pandas": int(pandas.read_parquet(file)["candidate_ids"].map(len).sum()),
            "polars": int(polars.read_parquet(file)["candidate_ids"].list.len().sum()),
            "duckdb": int(duckdb.sql(f"SELECT sum(len(candidate_ids)) FROM '{file}'").fetchall()[0][0]),
        }
        assert len(set(lengths.values())) == 1, (file, lengths)
        columns = set(polars.read_parquet(file).columns)
        assert columns == names, f"{file}: {sorted(columns ^ names)} beside what is documented"
        print(f"{pathlib.Path(file).name}: {lengths['duckdb']} candidates")


if __name__ == "__main__":
    main()
