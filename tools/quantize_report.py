"""What `kvcompile quantize` reports: a row per linear for the JSON file, a table by kind of linear for the reader."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvcompile.ops.w4a8 import W4A8Weight, dequantize
from kvcompile.tools.quantize_model import LINEARS

REPORT = "kvcompile_quantize.json"

Row = dict[str, Any]


def linear_row(name: str, weight: Tensor, quantised: W4A8Weight, output_error: float | None = None) -> Row:
    """The report of one linear.

    weight_error: |W - Q| / |W| (Frobenius). output_error: |Y - Y'| / |Y| on the calibration text, where Y' has the
    quantised model's own inputs, rounded to int8; None without calibration. stored_bits: of the weight with all scales.
    """
    wide = weight.float()
    norm = wide.norm().item()
    return {
        "name": name,
        "kind": name.rpartition(".")[2],
        "shape": list(weight.shape),
        "group_size": quantised.group_size,
        "weight_error": (wide - dequantize(quantised)).norm().item() / norm if norm else 0.0,
        "output_error": output_error,
        "stored_bits": sum(8 * part.nbytes for part in quantised),
    }


def summary(rows: list[Row]) -> list[Row]:
    """One row per kind of linear, in the order of a layer, and one for all: mean and worst errors, bits per weight."""
    groups = {part.rpartition(".")[2]: [] for part in LINEARS}
    for row in rows:
        groups[row["kind"]].append(row)
    groups["all"] = rows
    return [_summarised(kind, group) for kind, group in groups.items()]


def show(console: Console, rows: list[Row], sizes: tuple[int, int], seconds: float) -> None:
    """Print the summary. `sizes`: bytes of all tensors, before and after."""
    calibrated = rows[0]["output_error"] is not None
    table = Table(title="Relative error of the weights, mean (worst layer)", title_justify="left")
    columns = ["linear", "layers", "weights", "bits per weight", "weight error"]
    for column in [*columns, "output error"] if calibrated else columns:
        table.add_column(column, justify="left" if column == "linear" else "right")
    for row in summary(rows):
        cells = [row["kind"], str(row["layers"]), f"{row['weights'] / 1e6:.1f} M", f"{row['bits_per_weight']:.3f}"]
        table.add_row(*cells, *(_cell(row, key) for key in ("weight_error", "output_error") if row[key]))
    console.print(table)
    before, after = sizes
    console.print(f"tensors: {before / 1e6:.1f} MB before, {after / 1e6:.1f} MB after ({after / before:.1%}), ", end="")
    console.print(f"in {seconds:.0f} s")


def _summarised(kind: str, rows: list[Row]) -> Row:
    weights = sum(row["shape"][0] * row["shape"][1] for row in rows)
    return {
        "kind": kind,
        "layers": len(rows),
        "weights": weights,
        "bits_per_weight": sum(row["stored_bits"] for row in rows) / weights,
        "weight_error": _mean_and_worst(rows, "weight_error"),
        "output_error": _mean_and_worst(rows, "output_error"),
    }


def _mean_and_worst(rows: list[Row], key: str) -> dict[str, float] | None:
    values = [row[key] for row in rows]
    return None if None in values else {"mean": sum(values) / len(values), "worst": max(values)}


def _cell(row: Row, key: str) -> str:
    return f"{row[key]['mean']:.2%} ({row[key]['worst']:.2%})"
