"""What `benchmarks.gpu` measured, in short tables."""

from __future__ import annotations

from typing import Any

from benchmarks import attention, cpu, depth, layer, profiled
from benchmarks.gpu_parts import FAILED, SKIPPED, measured
from benchmarks.table import Cell, table


def summary(values: dict[str, Any]) -> str:
    """The short tables, of whatever was measured."""
    blocks = [_parity_lines, _rate_lines, _attention_table, _layer_table, _profile_table, _stream_table, _plain_table]
    blocks += [_peers_table, _depth_table, _wide_table, _trouble_lines]
    return "\n\n".join(text for block in blocks if (text := block(values)))


def _parity_lines(values: dict[str, Any]) -> str:
    rows: list[list[Cell]] = []
    for found in values.get("parity", []) if measured(values.get("parity")) else []:
        verdict = found.get(SKIPPED) or found.get("error") or ("equal" if found["passed"] else "DIFFERS")
        figures = [found.get(name) for name in ("loss", "norm", "weights")]
        rows.append([found["family"], found["dtype"], *figures, verdict])
    return table(["parity", "dtype", "loss", "norm", "weights", ""], rows) if rows else ""


def _rate_lines(values: dict[str, Any]) -> str:
    lines = []
    if measured(values.get("link")):
        for kind, rates in values["link"].items():
            ways = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())
            lines.append(f"link, {kind} memory, GB/s: {ways}")
    if measured(values.get("matmul")):
        lines.append(f"bfloat16 product: {values['matmul']['flops_per_s'] / 1e12:.1f} TFLOP/s")
    if measured(values.get("adamw")):
        for name in dict.fromkeys(row["name"] for row in values["adamw"]):
            best = max((r for r in values["adamw"] if r["name"] == name), key=lambda r: float(r["params_per_s"]))
            rate = f"{best['params_per_s'] / 1e9:.2f} G/s, {best['gb_per_s']:.0f} GB/s"
            lines.append(f"{name}: {rate} with {best['threads']} threads")
    return "\n".join(lines)


def _attention_table(values: dict[str, Any]) -> str:
    return attention.summary(values["attention"]) if measured(values.get("attention")) else ""


def _layer_table(values: dict[str, Any]) -> str:
    return layer.summary(values["layer"], values["sizes"]["sequence"]) if measured(values.get("layer")) else ""


def _profile_table(values: dict[str, Any]) -> str:
    return profiled.summary(values["profile"]) if measured(values.get("profile")) else ""


STREAM_HEADER = [
    "",
    "s/step",
    "predicted",
    "÷",
    "tok/s",
    "TFLOP/s",
    "MFU",
    "h2d",
    "d2h",
    "AdamW",
    "waits",
    "GB",
    "planned",
]


def _stream_table(values: dict[str, Any]) -> str:
    rows, bounds = [], []
    for part in ("stream", "capped"):
        for name, found in values.get(part, {}).items() if measured(values.get(part)) else ():
            label = f"{name}, capped" if part == "capped" else name
            if "refused" in found:
                bounds.append(f"{label}: {found['refused']}")
                continue
            rows.append([label, *_stream_cells(found)])
            bounds.append(f"{label}: bound by {found.get('bound', 'what was not measured')}")
    notes = "h2d, d2h, AdamW: share hidden under compute; waits: share of the step without compute"
    return "\n".join([table(STREAM_HEADER, rows), notes, *bounds]) if rows or bounds else ""


def _stream_cells(found: dict[str, Any]) -> list[Cell]:
    return [
        found["step_s"],
        found.get("predicted_s"),
        found["step_s"] / found["predicted_s"] if "predicted_s" in found else None,
        found["tokens_per_s"],
        found["flops_per_s"] / 1e12,
        found.get("mfu"),
        found["h2d_hidden"],
        found["d2h_hidden"],
        found["update_hidden"],
        sum(found["waits_s"].values()) / found["step_s"],
        found["peak_bytes"] / 1e9,
        found["planned_bytes"]["with workspace"] / 1e9,
    ]


def _plain_table(values: dict[str, Any]) -> str:
    found = values.get("plain")
    if not measured(found) or found is None:
        return ""
    names = [name for name, value in found.items() if isinstance(value, dict)]
    rows = [[n, found[n]["step_s"], found[n]["tokens_per_s"], found[n]["flops_per_s"] / 1e12] for n in names]
    title = f"{found['layers']} layers, {found['tokens']:,} tokens"
    lines = [table([title, "s/step", "tok/s", "TFLOP/s"], rows)]
    if "ratio" in found:
        difference = found["worst_relative_loss_difference"]
        lines.append(f"ours ÷ plain: {found['ratio']:.3f}; losses differ by at most {difference:.1e}")
    return "\n".join(lines)


def _peers_table(values: dict[str, Any]) -> str:
    found = values.get("peers")
    if not measured(found) or found is None:
        return ""
    title = f"peers: {found['layers']} layers, {found['tokens']:,} tokens"
    return f"{title}\n{cpu.summary({'bfloat16': found})}"


def _depth_table(values: dict[str, Any]) -> str:
    if not measured(values.get("depth")):
        return ""
    depths = values["depth"]["depths"]
    rates = ", ".join(f"{name} {found['flops_per_s'] / 1e12:.3g} TFLOP/s" for name, found in depths.items())
    return "\n".join([depth.summary(values["depth"]), rates])


WIDE_HEADER = ["", "s/step", "predicted", "by own rates", "tok/s", "TFLOP/s", "MFU", "GB", "planned"]


def _wide_table(values: dict[str, Any]) -> str:
    every = values.get("wide", {}) if measured(values.get("wide")) else {}
    rows = [_wide_row(values, name, found) for name, found in every.items() if SKIPPED not in found]
    lines = [table(WIDE_HEADER, rows)] if rows else []
    return "\n".join(lines + [f"{name}: {found[SKIPPED]}" for name, found in every.items() if SKIPPED in found])


def _wide_row(values: dict[str, Any], name: str, found: dict[str, Any]) -> list[Cell]:
    peak = values["matmul"]["flops_per_s"] if measured(values.get("matmul")) else None
    times = [found[f"{of}_s"] for of in ("step", "predicted", "by_own_rates")]
    rates = [found["tokens_per_s"], found["flops_per_s"] / 1e12, peak and found["flops_per_s"] / peak]
    return [f"{name}, {found['depth']}", *times, *rates, found["peak_bytes"] / 1e9, found["planned_bytes"] / 1e9]


def _trouble_lines(values: dict[str, Any]) -> str:
    lines = [f"{name}: {value['error']}" for name, value in values.items() if name.endswith(FAILED)]
    return "\n".join(lines + [f"{n}: {v[SKIPPED]}" for n, v in values.items() if isinstance(v, dict) and SKIPPED in v])
