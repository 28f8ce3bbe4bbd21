"""AdamW equals torch.optim.AdamW bit for bit, however it is stored, built or split over threads."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatrain import native
from megatrain.native import build
from megatrain.optim import AdamWStep, _chunks, join, native_available, split, update

BF16 = torch.bfloat16
CHUNK = 1 << 17  # elements that one thread of the kernel claims at a time
LENGTHS = [0, 1, 7, 37, 511, 512, 513, 4099]


def compiler_is_there() -> bool:
    try:
        return bool(build.find_compiler())
    except build.BuildError:
        return False


needs_kernel = pytest.mark.skipif(not compiler_is_there(), reason="no C++ compiler")
both_ways = pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_kernel), False])
bit_patterns = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests with a `compiled` parameter run in the kernel or in torch operations; others in what there is."""
    compiled = compiler_is_there()
    if "compiled" in request.fixturenames:
        compiled = request.getfixturevalue("compiled")
    monkeypatch.setenv("MEGATRAIN_NATIVE", str(int(compiled)))


def numbers(step: int, **changed: float) -> AdamWStep:
    usual = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 1.0}
    return AdamWStep(**{**usual, **changed}, step=step)


def gradients(shape: tuple[int, ...], steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * 10.0**-i for i in range(steps)]


def reference(weight: Tensor, grads: list[Tensor], n: AdamWStep) -> list[Tensor]:
    parameter = torch.nn.Parameter(weight.clone())
    betas = (n.beta1, n.beta2)
    adamw = torch.optim.AdamW([parameter], n.lr, betas, n.eps, n.weight_decay, foreach=False, fused=False)
    for grad in grads:
        parameter.grad = grad.clone().mul_(torch.tensor(n.grad_scale))  # as clip_grad_norm_ scales
        adamw.step()
    state = adamw.state[parameter]
    return [parameter.detach().view(-1), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)]


def run(
    weight: Tensor, grads: list[Tensor], threads: int = 1, moments: torch.dtype = torch.float32, **changed: float
) -> list[Tensor]:
    """Flat [weight, exp_avg, exp_avg_sq] after one update per gradient, from zero moments."""
    state = [weight.clone().view(-1), *(torch.zeros(weight.numel(), dtype=moments) for _ in range(2))]
    for i, grad in enumerate(grads):
        update(state[0], None, grad.view(-1), *state[1:], numbers(i + 1, **changed), threads=threads)
    return state


def run_split(
    weight: Tensor, grads: list[Tensor], threads: int = 1, moments: torch.dtype = torch.float32
) -> list[Tensor]:
    """Flat [hi, lo, exp_avg, exp_avg_sq] after one update per gradient, from zero moments."""
    state = [*halves(weight), *(torch.zeros(weight.numel(), dtype=moments) for _ in range(2))]
    for i, grad in enumerate(grads):
        hi, lo, exp_avg, exp_avg_sq = state
        update(hi, lo, grad, exp_avg, exp_avg_sq, numbers(i + 1), threads=threads)
    return state


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    hi, lo = torch.empty_like(master, dtype=BF16), torch.empty_like(master, dtype=torch.int16)
    split(master, hi, lo)
    return hi, lo


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(left, right, strict=True))


def from_bits(pattern: int) -> Tensor:
    return torch.tensor([pattern], dtype=torch.int64).to(torch.int32).view(torch.float32)


@both_ways
@pytest.mark.parametrize("shape", [(64, 128), (128,), (1000, 64), (37,), (33, 7), (1, 1), (2 * CHUNK + 5,)])
@pytest.mark.parametrize(
    "changed",
    [
        {"grad_scale": 0.37109375},
        {"beta1": 0.5, "beta2": 0.95, "weight_decay": 0.0},
        {"beta1": 0.3, "eps": 1e-3, "lr": 1.0},
    ],
)
def test_bits_of_torch_adamw(compiled: bool, shape: tuple[int, ...], changed: dict[str, float]) -> None:
    weight, grads = torch.randn(shape), gradients(shape)
    assert_same(run(weight, grads, **changed), reference(weight, grads, numbers(1, **changed)))


@both_ways
def test_learning_rate_that_moves_every_bit(compiled: bool) -> None:
    """With weights as small as their update, one wrong bit in the root or the quotient shows."""
    weight, grads = torch.randn(5000) * 1e-3, gradients((5000,))
    assert_same(run(weight, grads), reference(weight, grads, numbers(1)))


@both_ways
def test_bfloat16_gradient_counts_as_its_float32_value(compiled: bool) -> None:
    weight, grads = torch.randn(1000), [g.to(BF16) for g in gradients((1000,))]
    assert_same(run(weight, grads), reference(weight, [g.float() for g in grads], numbers(1)))


@both_ways
@pytest.mark.parametrize("grad_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("numel", [*LENGTHS, CHUNK + 1])
def test_split_master_is_the_float32_master(compiled: bool, numel: int, grad_dtype: torch.dtype) -> None:
    weight, grads = torch.randn(numel), [g.to(grad_dtype) for g in gradients((numel,))]
    master, *moments = run(weight, grads)
    assert_same(run_split(weight, grads), [*halves(master), *moments])


@both_ways
def test_zero_gradient_on_zero_weight_stays_zero(compiled: bool) -> None:
    """The padding between the parameters of a flat buffer."""
    assert all(not tensor.any() for tensor in run(torch.zeros(200), [torch.zeros(200)] * 3))


@both_ways
def test_many_steps_take_the_bias_correction_of_their_number(compiled: bool) -> None:
    weight, grads = torch.randn(100), gradients((100,), steps=2) * 60
    assert_same(run(weight, grads), reference(weight, grads, numbers(1)))


@needs_kernel
@pytest.mark.parametrize("moments", [torch.float32, BF16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("numel", LENGTHS)
def test_kernel_equals_torch_operations(
    numel: int, grad_dtype: torch.dtype, moments: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, grads = torch.randn(numel), [g.to(grad_dtype) for g in gradients((numel,))]
    compiled = run(weight, grads, moments=moments) + run_split(weight, grads, moments=moments)
    monkeypatch.setenv("MEGATRAIN_NATIVE", "0")
    assert_same(compiled, run(weight, grads, moments=moments) + run_split(weight, grads, moments=moments))


@needs_kernel
@pytest.mark.parametrize("moments", [torch.float32, BF16])
def test_threads_do_not_change_the_result(moments: torch.dtype) -> None:
    numel = 5 * CHUNK + 77
    weight, grads = torch.randn(numel), gradients((numel,), steps=2)
    alone = run_split(weight, grads, threads=1, moments=moments)
    for threads in (2, 3, 16):
        assert_same(run_split(weight, grads, threads=threads, moments=moments), alone)


@needs_kernel
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_thread_count_of_mkl_is_put_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        run(torch.zeros(8), [torch.zeros(8)])
        assert "mkl_get_max_threads() : 3" in torch.__config__.parallel_info()
    finally:
        torch.set_num_threads(before)


def test_torch_operations_walk_every_element_once() -> None:
    numel = 3 * (1 << 20) + 5
    assert torch.cat([torch.arange(numel)[part] for part in _chunks(numel)]).equal(torch.arange(numel))


@needs_kernel
def test_gil_is_free_during_the_pass() -> None:
    def comes_back_before_the_pass_ends() -> bool:
        state = [torch.zeros(1 << 21) for _ in range(4)]
        work = threading.Thread(target=lambda: update(state[0], None, *state[1:], numbers(1), threads=1))
        work.start()
        alive = work.is_alive()
        work.join()
        return alive

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # seconds: nobody is made to give up the GIL, so the pass itself must let go of it
    try:
        assert any(comes_back_before_the_pass_ends() for _ in range(20))
    finally:
        sys.setswitchinterval(interval)


@both_ways
def test_stochastic_rounding_is_unbiased_and_between_neighbours(compiled: bool) -> None:
    grad = torch.full((100_000,), 1.0)
    _, exp_avg, exp_avg_sq = run(torch.zeros(100_000), [grad], moments=BF16, beta2=0.9)
    for moment, exact in ((exp_avg, 0.1), (exp_avg_sq, 0.1)):
        assert len(moment.unique()) == 2
        assert moment.double().mean().item() == pytest.approx(exact, rel=1e-4)


@both_ways
def test_second_moment_decays_where_rounding_to_nearest_would_freeze_it(compiled: bool) -> None:
    exp_avg, exp_avg_sq = torch.zeros(4096, dtype=BF16), torch.ones(4096, dtype=BF16)
    weight, grad = torch.zeros(4096), torch.zeros(4096)
    assert (exp_avg_sq * 0.999).equal(exp_avg_sq)
    for i in range(200):
        update(weight, None, grad, exp_avg, exp_avg_sq, numbers(i + 1))
    assert exp_avg_sq.double().mean().item() == pytest.approx(0.999**200, rel=2e-3)


def test_random_bits_differ_between_steps_and_elements() -> None:
    def rounded(step: int) -> Tensor:
        exp_avg, exp_avg_sq = torch.zeros(1000, dtype=BF16), torch.zeros(1000, dtype=BF16)
        update(torch.zeros(1000), None, torch.ones(1000), exp_avg, exp_avg_sq, numbers(step))
        return exp_avg

    assert torch.equal(rounded(3), rounded(3))
    assert not torch.equal(rounded(3), rounded(4))
    assert not torch.equal(rounded(3)[:500], rounded(3)[500:])


@given(bit_patterns)
def test_split_then_join_keeps_every_number(pattern: int) -> None:
    master = from_bits(pattern)
    hi, lo = halves(master)
    joined = join(hi, lo)
    if master.isnan():
        assert hi.isnan()
        assert joined.isnan()
    else:
        assert_same([joined], [master])
        assert bits(hi).item() & 0xFFFF == (pattern + 0x8000) >> 16


@given(bit_patterns)
def test_high_half_is_a_nearest_bfloat16(pattern: int) -> None:
    master = from_bits(pattern)
    if master.isfinite():
        hi, _ = halves(master)
        tie = pattern & 0xFFFF == 0x8000
        assert tie or torch.equal(hi, master.to(BF16))


@pytest.mark.parametrize(
    ("pattern", "hi", "lo"),
    [
        (0x00000000, 0x0000, 0),
        (0x80000000, 0x8000, 0),  # -0
        (0x00000001, 0x0000, 1),  # the smallest denormal
        (0x80008000, 0x8001, -0x8000),
        (0x3F7FFFFF, 0x3F80, -1),  # just below 1: rounds up into the next exponent
        (0x007FFFFF, 0x0080, -1),  # the largest denormal: rounds up to a normal number
        (0x7F7F7FFF, 0x7F7F, 0x7FFF),  # the largest that bfloat16 can reach
        (0x7F7FFFFF, 0x7F80, -1),  # the largest float32: infinite in bfloat16, exact when joined
        (0xFF7FFFFF, 0xFF80, -1),
        (0x7F800000, 0x7F80, 0),  # infinity
        (0xFF800000, 0xFF80, 0),
    ],
)
@both_ways
def test_split_at_the_edges(compiled: bool, pattern: int, hi: int, lo: int) -> None:
    """Once in split(), once as the update stores it: nothing changes a weight at learning rate 0."""
    master = from_bits(pattern)
    stored_hi, stored_lo = halves(master)
    assert (bits(stored_hi).item() & 0xFFFF, stored_lo.item()) == (hi, lo)
    moments = torch.zeros(2, 1)
    update(stored_hi, stored_lo, torch.zeros(1), *moments, numbers(1, lr=0.0))
    assert (bits(stored_hi).item() & 0xFFFF, stored_lo.item()) == (hi, lo)


@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_split_keeps_a_nan_whose_rounded_half_would_be_infinite_or_zero(pattern: int) -> None:
    hi, lo = halves(from_bits(pattern))
    assert hi.isnan()
    assert join(hi, lo).isnan()


@both_ways
@pytest.mark.parametrize("moments", [torch.float32, BF16])
def test_not_a_number_spreads_to_all_that_it_touches_and_no_further(compiled: bool, moments: torch.dtype) -> None:
    grad = torch.tensor([math.nan, 1.0])
    hi, lo, exp_avg, exp_avg_sq = run_split(torch.ones(2), [grad], moments=moments)
    for tensor in (hi, join(hi, lo), exp_avg, exp_avg_sq):
        assert tensor.isnan().tolist() == [True, False]


def arrays(**changed: Tensor | None) -> list[Tensor | None]:
    usual: dict[str, Tensor | None] = {"weight": torch.zeros(8), "low": None, "grad": torch.zeros(8)}
    return list((usual | {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)} | changed).values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.zeros(8, dtype=BF16)}, r"weight must be torch\.float32 here; got torch\.bfloat16"),
        ({"low": torch.zeros(8, dtype=torch.int16)}, r"weight must be torch\.bfloat16 here; got torch\.float32"),
        ({"weight": torch.zeros(8, dtype=BF16), "low": torch.zeros(8)}, r"low must be torch\.int16"),
        ({"grad": torch.zeros(8, dtype=torch.float16)}, r"grad must be torch\.float32 or torch\.bfloat16 here"),
        ({"exp_avg": torch.zeros(8, dtype=BF16)}, r"exp_avg_sq must be torch\.bfloat16 here; got torch\.float32"),
        ({"grad": torch.zeros(7)}, r"grad must have the length of the other arrays, 8; got 7"),
        ({"exp_avg": torch.zeros(2, 4)}, r"exp_avg must be 1-D and contiguous .* got shape \(2, 4\)"),
        ({"exp_avg_sq": torch.zeros(16)[::2]}, r"exp_avg_sq must be 1-D and contiguous .* strides \(2,\)"),
        ({"grad": torch.zeros(8, device="meta")}, r"grad must be in host memory .* got meta"),
    ],
)
def test_update_refuses(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        update(*arrays(**changed), numbers(1))  # type: ignore[arg-type]


def test_refuses_threads_and_steps_below_one() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, or None for one per core; got 0"):
        update(*arrays(), numbers(1), threads=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"step counts updates from 1 .* got 0"):
        numbers(0)


def test_split_and_join_refuse() -> None:
    with pytest.raises(ValueError, match=r"hi_out must be torch\.bfloat16"):
        split(torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.int16))
    with pytest.raises(ValueError, match="lo must have the length of the other arrays, 4; got 3"):
        join(torch.zeros(4, dtype=BF16), torch.zeros(3, dtype=torch.int16))


@pytest.fixture
def fresh_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and a kernel that is not loaded yet; the loaded one comes back afterwards."""
    monkeypatch.delenv("MEGATRAIN_NATIVE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._load.cache_clear()
    yield tmp_path / "megatrain"
    native._load.cache_clear()


def broken_compiler(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    monkeypatch.setenv("CXX", f"{shlex.quote(sys.executable)} --no-such-flag")
    return "--no-such-flag .* failed"


def missing_compiler(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    return "No such file or directory"


def no_compiler(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    return r"no C\+\+ compiler was found"


def unwritable_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv("CXX", "c++")
    folder.write_text("a file where the cache folder should be")
    return "XDG_CACHE_HOME can name a writable cache folder"


@pytest.mark.parametrize("fault", [broken_compiler, missing_compiler, no_compiler, unwritable_cache])
def test_without_a_build_it_warns_once_and_uses_torch_operations(
    fault: Callable[[pytest.MonkeyPatch, Path], str], fresh_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = fault(monkeypatch, fresh_build)
    with pytest.warns(UserWarning, match=f"separate torch operations.*{reason}"):
        assert not native_available()
    weight, grads = torch.randn(100), gradients((100,))
    assert_same(run(weight, grads), reference(weight, grads, numbers(1)))  # a second warning would be an error


def test_a_user_can_forbid_the_kernel(fresh_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_NATIVE", "0")
    assert not native_available()
    assert not fresh_build.exists()


@needs_kernel
def test_processes_build_at_once_into_one_file(fresh_build: Path) -> None:
    program = f"import runpy; print(runpy.run_path({build.__file__!r})['library_path']())"
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [str(path) for path in fresh_build.iterdir()] == [outputs[0]]
    assert outputs[0] == outputs[1]
    assert native_available()


@needs_kernel
def test_each_source_command_and_cpu_has_its_own_build(fresh_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_build", lambda command, target: None)
    paths = [build.library_path()]
    monkeypatch.setattr(build, "cpu_identity", lambda: "another CPU")
    paths.append(build.library_path())
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-g"])
    paths.append(build.library_path())
    assert len(set(paths)) == 3


@needs_kernel
@pytest.mark.parametrize("split_master", [False, True])
def test_fast_rounding_differs_by_the_last_places_of_an_update(split_master: bool) -> None:
    """From one state: the moments have the same bits, and weights part by some 2 ** -22 of the change, if at all."""
    generator = torch.Generator().manual_seed(0)
    weight, grad, m = (torch.randn(5000, generator=generator) for _ in range(3))
    v = torch.rand(5000, generator=generator)
    found = []
    for as_torch in (True, False):
        w, moments = weight.clone(), [m.clone(), v.clone()]
        high, low = torch.empty(5000, dtype=torch.bfloat16), torch.empty(5000, dtype=torch.int16)
        split(w, high, low)
        step = replace(numbers(3), as_torch=as_torch)
        if split_master:
            update(high, low, grad, *moments, step)
            w = join(high, low)
        else:
            update(w, None, grad, *moments, step)
        found.append([w, *moments])
    (exact, *moments), (fast, *same) = found
    assert all(map(torch.equal, same, moments))
    rounding = 2.0**-22 * (exact - weight).abs() + 2.0**-23 * weight.abs()  # of the change, and of adding it
    assert ((fast - exact).abs() <= rounding).all()
    assert not torch.equal(fast, exact) or torch.equal(exact, weight)
