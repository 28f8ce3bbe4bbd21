"""The `megatrain` command. What needs torch is imported inside the commands, so that help comes at once."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from megatrain.machine import Machine
    from megatrain.plan import Plan

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: one line for an error, wherever it is printed
    context_settings={"help_option_names": ["-h", "--help"]},
)

DOES_NOT_FIT = FAILED = 1  # exit codes
WRONG_USE = 2
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatrain {metadata.version('megatrain')}")
        raise typer.Exit(0)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Print the version.")
    ] = False,
) -> None:
    """Train language models larger than your GPU, exactly."""


def parse_size(text: str) -> int:
    """Bytes of "24GB" (10⁹), "24GiB" (2³⁰), "1.5TB" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)?B?)", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is not a size; write 24GB, 24GiB, 1.5TB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse_resident(text: str) -> int | str:
    """A number of layers, or "auto"."""
    if text == "auto" or text.isdigit():
        return text if text == "auto" else int(text)
    raise typer.BadParameter(f'{text!r} is neither a number of layers nor "auto"')


@app.command(short_help="What a run needs of memory, and whether it fits.")
def plan(
    model: Annotated[
        str, typer.Argument(help="A preset (see below), a folder with a config.json, or a model of the hub.")
    ] = "llama-8b",
    machine: Annotated[
        str, typer.Option(help="A described machine instead of this one: h200, gh200, rtx-4090, rtx-3090 or dgx-spark.")
    ] = "this",
    device_memory: Annotated[
        Any, typer.Option(parser=parse_size, metavar="SIZE", help="A GPU with so much memory, such as 24GB.")
    ] = None,
    host_memory: Annotated[
        Any, typer.Option(parser=parse_size, metavar="SIZE", help="A machine with so much RAM, such as 1.5TB.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = 8,
    sequence: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 2048,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per layer visit; all if not given.")] = None,
    depth: Annotated[int, typer.Option(help="Layers loaded ahead.")] = 1,
    grad_buffers: Annotated[int, typer.Option(help="Device buffers for a layer's gradient.")] = 2,
    resident: Annotated[
        Any, typer.Option(parser=parse_resident, metavar="N|auto", help="Further layers kept on the device.")
    ] = "0",
    kept_graphs: Annotated[
        Any, typer.Option(parser=parse_resident, metavar="N|auto", help="Layers that are not computed again.")
    ] = "0",
    loss_chunk: Annotated[int, typer.Option(help="Tokens whose logits exist at one time.")] = 1024,
    dtype: Annotated[str, typer.Option(help="bfloat16 (with an exact fp32 master) or float32.")] = "bfloat16",
    moments: Annotated[str, typer.Option(help="float32, or bfloat16 for small hosts.")] = "float32",
    overlap: Annotated[
        str, typer.Option(help="When AdamW runs: forward, none, or backward (no clipping).")
    ] = "forward",
    optimizer_device: Annotated[
        str, typer.Option(help="Where AdamW of the layers runs: host, or device (with --overlap backward).")
    ] = "host",
    lora: Annotated[int | None, typer.Option(min=1, metavar="R", help="Only LoRA adapters of this rank.")] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload/--no-offload", help="Saved inputs go to the host; by default if needed.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run its schedule on a clock: step time, what binds, each knob.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Choose depth, buffers, micro-batch and more by measuring, and say why.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="With --simulate: the simulated timeline, .json or .json.gz, for Perfetto.")
    ] = None,
) -> None:
    """Say what a training run needs of RAM and device memory, and whether it fits. Nothing is allocated.

    Presets: gpt-oss-120b, gpt-oss-20b, llama-8b, dense-120b. Exit code 0: it fits; 1: it does not; 2: wrong use.
    """
    from megatrain.config import AdamWConfig, EngineConfig
    from megatrain.trace import require_trace_name

    try:
        config = EngineConfig(
            dtype=dtype,  # type: ignore[arg-type]
            micro_batch_size=micro_batch,
            prefetch_depth=depth,
            grad_buffers=grad_buffers,
            resident_layers=resident,
            kept_graphs=kept_graphs,
            loss_chunk_tokens=loss_chunk,
            moments_dtype=moments,  # type: ignore[arg-type]
            optimizer_overlap=overlap,  # type: ignore[arg-type]
            optimizer_device=optimizer_device,  # type: ignore[arg-type]
            offload_activations="auto" if offload is None else offload,
        )
        optimizer = AdamWConfig(max_grad_norm=None if overlap == "backward" else 1.0)
        if trace is not None and not simulate:
            raise ValueError("--trace writes a simulated timeline; add --simulate")
        if trace is not None:
            require_trace_name(trace)
        described = _machine(machine, device_memory, host_memory, rates=simulate or tune)
        rates = None
        if tune:
            config, rates = _print_tuned(model, lora, config, optimizer, described, batch, sequence)
        planned = _print_plan(model, lora, config, optimizer, described, batch, sequence)
        if simulate:
            _print_simulation(planned, trace, rates)
    except ValueError as error:
        typer.echo(f"Error: {str(error).splitlines()[0]}", err=True)  # transformers may list all its models after it
        raise typer.Exit(WRONG_USE) from None
    except OSError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(FAILED) from None
    raise typer.Exit(0 if planned.fits else DOES_NOT_FIT)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help='A YAML file; see README, "A run as a file".')],
    changes: Annotated[
        list[str] | None, typer.Argument(help="Changes on top of it, such as engine.prefetch_depth=2 run.steps=100.")
    ] = None,
) -> None:
    """Train what a configuration file says. Ctrl-C or SIGTERM stops after the step in progress, twice at once.

    Exit code 0: all steps done; 1: it failed; 2: wrong use; 3: stopped, with a checkpoint; 130: stopped at once.
    """
    from megatrain.settings import load_settings

    with _told_errors():
        settings = load_settings(config, changes or ())
        from megatrain import terminal

        code = terminal.train(settings)
    raise typer.Exit(code)


@app.command(short_help="Go on from a run's newest checkpoint.")
def resume(
    run: Annotated[Path, typer.Argument(help="The folder of a run begun by `megatrain train`.")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="What is to be otherwise from here, such as optimizer.lr=1e-5.")
    ] = None,
) -> None:
    """Go on from a run's newest checkpoint, with the same bits as without the break. Exit codes as for `train`.

    What was changed since, here or in the run's settings.yaml, is told and left in its changes.jsonl. The model, the
    data, the recipe, the seed and what numbers are kept in cannot change.
    """
    from megatrain.settings import settings_of

    with _told_errors():
        settings = settings_of(run, changes or ())
        from megatrain import terminal

        code = terminal.train(settings, resume=True)
    raise typer.Exit(code)


@app.command()
def status(run: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Say how a run is doing, wherever it trains. Exit code 0: it trains or is done; 1: it failed or is lost."""
    from megatrain.remote import RemoteRun
    from megatrain.report import RunState

    with _told_errors():
        found = RemoteRun(run)
        now, info = found.status(), found.info()
        found.close()
    total = f" of {info.steps:,}" if info else ""
    typer.echo(f"{now.state.value}: {now.steps_done:,}{total} steps done" + (f", {info.model}" if info else ""))
    if now.position is not None:
        typer.echo(f"at {now.position}")
    if now.error:
        typer.echo(now.error)
    raise typer.Exit(1 if now.state in (RunState.FAILED, RunState.LOST) else 0)


@app.command(short_help="Write the model of a checkpoint for from_pretrained.")
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run begun by `megatrain train`.")],
    out: Annotated[Path, typer.Argument(help="Where the model goes, in Hugging Face's format.")],
    step: Annotated[int | None, typer.Option(help="Of which checkpoint; the newest if not given.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Of a LoRA run: the whole model, adapter merged.")] = False,
) -> None:
    """Write the model of a checkpoint for from_pretrained; of a LoRA run its adapter, for peft."""
    from megatrain.settings import settings_of

    with _told_errors():
        settings_of(run)  # refused before anything heavy is loaded
        from megatrain.jobs import export as export_model

        done = export_model(run, out, step, merge=merge)
    typer.echo(f"the model after step {done} is in {out}")


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="The folder of a run, alive or over.")],
    out: Annotated[Path, typer.Argument(help="A .json or .json.gz file, for ui.perfetto.dev.")],
    steps: Annotated[int, typer.Option(min=1, help="How many of the last steps.")] = 10,
) -> None:
    """Write what every lane did in the last steps as a Chrome trace."""
    from megatrain.folder import RunFolder
    from megatrain.journal import JournalReader
    from megatrain.trace import require_trace_name, write_chrome_trace

    with _told_errors():
        require_trace_name(out)
        RunFolder(run).status()  # a folder that is no run is refused here
        if not out.absolute().parent.is_dir():
            raise ValueError(f"{out.parent} is no folder: make it, or write the trace elsewhere")
        reader = JournalReader(run)
        records = reader.poll()
        reader.close()
        last = records.steps[-steps:]
        write_chrome_trace(out, records, start_s=last[0].start_s if last else 0.0)
    typer.echo(f"{len(last)} {'step is' if len(last) == 1 else 'steps are'} in {out}")


@app.command(short_help="Train a small model on this machine, to see it work.")
def demo(
    run_dir: Annotated[Path, typer.Option(help="Folder for the model, the timeline page and the metrics.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long they may take; decides the model's size.")] = 3,
) -> None:
    """Train a small gpt-oss on Python's own docstrings, save it, load it back, and draw what every lane did.

    Needs no GPU, no network and no data. Exit code 0: the loss fell and the saved model loaded; 1: it did not.
    """
    from megatrain.demo import run_demo

    raise typer.Exit(0 if run_demo(run_dir, steps=steps, minutes=minutes) else 1)


@app.command(short_help="Show a run in the browser, live or over.")
def dashboard(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run (its run_dir).", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of this machine to serve on; 0 takes any.")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page, or only print its address.")
    ] = True,
) -> None:
    """Show a run in the browser, live or after its end, without JupyterLab. Ctrl-C ends the page, never the run.

    Only this machine can reach the page, and only with the token in its address. From another machine, forward the
    port (ssh -L 8866:127.0.0.1:8866 HOST, with --port 8866 there) and open the printed address.
    Exit code 0: ended by Ctrl-C; 2: wrong use, such as a folder that is no run.
    """
    from dashboard.viewer import serve

    try:
        serve(run, port, open_browser=browser)
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(WRONG_USE) from None


@contextmanager
def _told_errors() -> Iterator[None]:
    """What is wrong is told in one line: wrong use (ValueError) or what could not be read or written."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"Error: {_in_words(error)}", err=True)
        raise typer.Exit(WRONG_USE if isinstance(error, ValueError) else FAILED) from None


def _in_words(error: Exception) -> str:
    """Without the number that an error of the operating system has."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _print_plan(
    name: str, lora: int | None, config: Any, optimizer: Any, machine: Machine, batch: int, sequence: int
) -> Plan:
    from megatrain.plan import plan as plan_run

    planned = plan_run(_model(name, lora), config, optimizer, batch=batch, sequence=sequence, machine=machine)
    typer.echo(str(planned))
    return planned


def _print_tuned(
    name: str, lora: int | None, config: Any, optimizer: Any, machine: Machine, batch: int, sequence: int
) -> tuple[Any, Any]:
    """Choose; by data sheets for a machine that is not here. Returns the configuration, and the rates."""
    from megatrain.shapes import require_agreement
    from megatrain.simulate import Rates
    from megatrain.tune import NothingFitsError, table, tune

    require_agreement(config, optimizer)
    rates = Rates.of(machine) if machine.data_sheets else None
    try:
        tuned = tune(_model(name, lora), config, batch=batch, sequence=sequence, machine=machine, rates=rates)
    except NothingFitsError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(DOES_NOT_FIT) from None
    typer.echo("\n".join([*tuned.summary, "", *table(tuned.candidates, batch * sequence), ""]))
    return tuned.config, tuned.rates


def _print_simulation(planned: Plan, trace: Path | None, rates: Any = None) -> None:
    from megatrain.simulate import report, simulate
    from megatrain.trace import write_chrome_trace

    simulated = simulate(planned, rates)
    typer.echo("\n" + report(simulated))
    if trace is not None:
        write_chrome_trace(trace, simulated.recorder)
        typer.echo(f"\nthe simulated timeline is in {trace}")


def _model(name: str, lora: int | None) -> Any:
    from megatrain.anatomy.presets import named_config

    return named_config(name) if lora is None else _adapted(name, lora)


def _adapted(name: str, rank: int) -> Any:
    from megatrain.anatomy.adapters import add_lora
    from megatrain.anatomy.meta import meta_model
    from megatrain.anatomy.presets import named_config
    from megatrain.settings import LoraSettings

    return add_lora(meta_model(named_config(name)), LoraSettings(r=rank).options)


def _machine(name: str, device_bytes: int | None, host_bytes: int | None, *, rates: bool) -> Machine:
    """This machine or a described one, with other sizes where they are given. rates: they have to be known."""
    from megatrain.machine import MACHINES, detect, measure, resized

    if name != "this" and name not in MACHINES:
        raise ValueError(f"--machine must be one of {', '.join(['this', *MACHINES])}; got {name!r}")
    machine = detect() if name == "this" else MACHINES[name]
    if rates and name == "this":
        if device_bytes is not None and machine.gpu is None:
            raise ValueError("the rates of a GPU that is not here are not known; name a --machine to simulate")
        machine = measure(machine)
    return resized(machine, host_bytes=host_bytes, device_bytes=device_bytes)


def main() -> None:
    """Run the command line."""
    if not sys.stderr.isatty():  # in a log, bars of other libraries are pieces of lines
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    app()


if __name__ == "__main__":
    main()
