"""AdamW over flat arrays: parameters/s and GB/s beside plain copies and torch's fused AdamW.

    python -m benchmarks.adamw --out adamw.json

Every case runs once per round, in turn, so that a busy neighbour or a hot CPU meets all of them alike; the table
holds medians. GB/s counts each byte read and each byte written once. Each number of threads is measured in a process
of its own, which starts with it in OMP_NUM_THREADS: OpenMP, which DeepSpeed's CPU Adam runs on, looks there once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.fresh import in_fresh_process
from megatrain.optim import AdamWStep, native_available, split, update

BF16 = torch.bfloat16
STEP = AdamWStep(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10, grad_scale=0.5)
FAST = replace(STEP, as_torch=False)

Work = Callable[[int], None]
"""Does all of a case's work once, in so many threads."""


@dataclass(frozen=True)
class Case:
    name: str
    bytes_per_param: int
    work: Work


@dataclass(frozen=True)
class Row:
    name: str
    threads: int
    params_per_s: float
    gb_per_s: float


def make_cases(numel: int, *, deepspeed: bool = False) -> list[Case]:
    """All cases, with 38 bytes of arrays per parameter between them, and 12 more for each of DeepSpeed's."""
    weight, grad, exp_avg, exp_avg_sq = (torch.full((numel,), x) for x in (0.02, 1e-3, 1e-4, 1e-6))
    hi, lo = torch.empty_like(weight, dtype=BF16), torch.empty_like(weight, dtype=torch.int16)
    split(weight, hi, lo)
    grad16, exp_avg16, exp_avg_sq16 = (a.to(BF16) for a in (grad, exp_avg, exp_avg_sq))
    target = torch.zeros(numel)
    cases = [
        Case("copy, memcpy", 8, memcpy(target, weight)),
        Case("copy, torch", 8, in_torch_threads(lambda: target.copy_(weight))),
        Case("torch AdamW fused, fp32", 28, in_torch_threads(torch_fused(weight, grad))),
        Case("AdamW fp32", 28, adamw(weight, None, grad, exp_avg, exp_avg_sq)),
        Case("AdamW fp32, fast", 28, adamw(weight, None, grad, exp_avg, exp_avg_sq, FAST)),
        Case("AdamW split", 26, adamw(hi, lo, grad16, exp_avg, exp_avg_sq)),
        Case("AdamW split, fast", 26, adamw(hi, lo, grad16, exp_avg, exp_avg_sq, FAST)),
        Case("AdamW split, bf16 moments", 18, adamw(hi, lo, grad16, exp_avg16, exp_avg_sq16)),
    ]
    return cases + deepspeed_cases(weight, grad) if deepspeed else cases


def deepspeed_cases(weight: Tensor, grad: Tensor) -> list[Case]:
    """DeepSpeed's CPU Adam, its moments in float32. With bfloat16 weights it keeps no float32 master of them."""
    return [
        Case(f"DeepSpeed CPU Adam, {name}", nbytes, lambda _, step=step: step())  # type: ignore[misc]
        for name, nbytes, step in (
            ("fp32", 28, deepspeed_adam(weight.clone(), grad)),
            ("bf16", 22, deepspeed_adam(weight.to(BF16), grad.to(BF16))),
        )
    ]


def deepspeed_adam(weight: Tensor, grad: Tensor) -> Callable[[], object]:
    from benchmarks.peers.with_deepspeed import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    step: Callable[[], object] = DeepSpeedCPUAdam([parameter], lr=STEP.lr, weight_decay=STEP.weight_decay).step
    return step


def adamw(
    weight: Tensor, low: Tensor | None, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamWStep = STEP
) -> Work:
    return lambda threads: update(weight, low, grad, exp_avg, exp_avg_sq, step, threads=threads)


def torch_fused(weight: Tensor, grad: Tensor) -> Callable[[], object]:
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    return torch.optim.AdamW([parameter], lr=STEP.lr, weight_decay=STEP.weight_decay, fused=True).step


def in_torch_threads(work: Callable[[], object]) -> Work:
    def run(threads: int) -> None:
        torch.set_num_threads(threads)
        work()

    return run


def memcpy(target: Tensor, source: Tensor) -> Work:
    """The C library's memcpy, one block per thread; ctypes lets go of the GIL for it."""
    pool = ThreadPoolExecutor(os.cpu_count())
    nbytes = source.numel() * source.element_size()

    def run(threads: int) -> None:
        starts = [nbytes * i // threads for i in range(threads + 1)]

        def copy(begin: int, end: int) -> None:
            ctypes.memmove(target.data_ptr() + begin, source.data_ptr() + begin, end - begin)

        list(pool.map(copy, starts[:-1], starts[1:]))

    return run


def measure(cases: list[Case], threads: int, numel: int, rounds: int) -> list[Row]:
    times_s: dict[str, list[float]] = {case.name: [] for case in cases}
    for round_ in range(rounds + 1):
        for case in cases:
            start = time.perf_counter()
            case.work(threads)
            if round_ > 0:  # the first touches pages and starts threads
                times_s[case.name].append(time.perf_counter() - start)
    return [row(case, threads, numel / statistics.median(times_s[case.name])) for case in cases]


def measure_all(numel: int, rounds: int, *, deepspeed: bool) -> list[Row]:
    """Every case with every sensible number of threads."""
    return [
        row
        for threads in thread_counts()
        for row in in_fresh_process(threads, measure_made, numel, threads, rounds, deepspeed=deepspeed)
    ]


def measure_made(numel: int, threads: int, rounds: int, *, deepspeed: bool) -> list[Row]:
    return measure(make_cases(numel, deepspeed=deepspeed), threads, numel, rounds)


def row(case: Case, threads: int, params_per_s: float) -> Row:
    return Row(case.name, threads, params_per_s, case.bytes_per_param * params_per_s / 1e9)


def deepspeed_installed() -> bool:
    return find_spec("deepspeed") is not None


def thread_counts() -> list[int]:
    """1, 2, 4, ... and all cores."""
    cores = os.cpu_count() or 1
    return sorted({*(2**i for i in range(cores.bit_length())), cores})


# Ours, and what it is measured against. DeepSpeed's with bfloat16 weights keeps no float32 master, which is less work.
RIVALS = {
    "AdamW fp32": "DeepSpeed CPU Adam, fp32",
    "AdamW fp32, fast": "DeepSpeed CPU Adam, fp32",
    "AdamW split": "DeepSpeed CPU Adam, bf16",
    "AdamW split, fast": "DeepSpeed CPU Adam, bf16",
}
TARGET = 1.5  # times as many parameters/s


def ratio_lines(rows: list[Row]) -> list[str]:
    """Our parameters/s ÷ DeepSpeed's, where it was measured."""
    rates = {(row.name, row.threads): row.params_per_s for row in rows}
    return [
        f"{name} ÷ {RIVALS[name]}, {threads} threads: {rate / rates[RIVALS[name], threads]:.2f} (target {TARGET})"
        for (name, threads), rate in rates.items()
        if name in RIVALS and (RIVALS[name], threads) in rates
    ]


def print_table(rows: list[Row]) -> None:
    print(f"{'case':<32}{'threads':>8}{'G params/s':>12}{'GB/s':>8}")
    for r in rows:
        print(f"{r.name:<32}{r.threads:>8}{r.params_per_s / 1e9:>12.2f}{r.gb_per_s:>8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=64 << 20, help="length of the arrays (default 64 Mi)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the rows as JSON to this path")
    args = parser.parse_args()
    if not native_available():
        print("No compiled kernel: these are the torch operations.")
    rows = measure_all(args.params, args.rounds, deepspeed=deepspeed_installed())
    print_table(rows)
    print(*ratio_lines(rows), sep="\n")
    if args.out:
        about = {"params": args.params, "rounds": args.rounds, "torch": torch.__version__}
        args.out.write_text(json.dumps({**about, "rows": [asdict(r) for r in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
