"""The command line: what it prints, its exit codes, and that help does not wait for torch."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from typer.testing import CliRunner

from megatrain import cli
from megatrain.folder import RunFolder
from megatrain.report import RunState, Status

BIG = ["--host-memory", "4TB", "--device-memory", "80GB"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), terminal_width=200)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(cli.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": root} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_starts_without_torch() -> None:
    code = """
import sys
from megatrain.cli import main
for arguments in (["--help"], ["plan", "--help"], ["train", "--help"], ["dashboard", "--help"]):
    sys.argv = ["megatrain", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
heavy = {"torch", "transformers", "numpy", "voila", "tensorboard", "wandb"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "megatrain" in done.stdout
    assert "gpt-oss-120b" in done.stdout


def test_the_version_is_that_of_the_package() -> None:
    said = invoke("--version")
    assert (said.exit_code, said.output) == (0, f"megatrain {metadata.version('megatrain')}\n")


def test_help_says_what_each_exit_code_means() -> None:
    result = invoke("plan", "--help")
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "Exit code 0: it fits; 1: it does not; 2: wrong use." in words
    for option in ("--device-memory", "--host-memory", "--micro-batch", "--depth", "--no-offload"):
        assert option in words


def test_a_plan_that_fits() -> None:
    result = invoke("plan", "gpt-oss-120b", "--micro-batch", "1", *BIG)
    assert result.exit_code == 0, result.output
    assert "116.83 B parameters" in result.output
    assert "it fits" in result.output


def test_a_plan_that_does_not_fit() -> None:
    result = invoke("plan", "dense-120b", "--machine", "rtx-4090")
    assert result.exit_code == 1
    assert "it does not fit:\n- RAM: " in result.output


def test_a_plan_of_adapters_takes_two_bytes_a_parameter() -> None:
    result = invoke("plan", "llama-8b", "--lora", "16", *BIG)
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM with adapters: 8.07 B parameters, 41.94 M trained" in result.output
    assert "16.23" in result.output  # GB of weights


def test_plans_llama_on_this_machine_where_nothing_is_said() -> None:
    result = invoke("plan")
    assert result.exit_code in (0, 1)
    assert "8.03 B parameters" in result.output


def test_a_simulation_says_what_binds_and_writes_its_timeline(tmp_path: Path) -> None:
    trace = tmp_path / "t.json.gz"
    result = invoke(
        *("plan", "gpt-oss-120b", "--machine", "h200", "--moments", "bfloat16", "--micro-batch", "4", "--batch", "16"),
        *("--sequence", "4096", "--simulate", "--trace", str(trace)),
    )
    assert result.exit_code == 0, result.output
    assert "optimizer binds: twice as fast, a step would take" in result.output
    assert "* prefetch depth 1" in result.output
    assert "data-sheet rates; no run has confirmed it" in result.output
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name", "").startswith("forward") for event in events) == 3 * 36 * 4


def test_this_machine_is_measured_to_be_simulated() -> None:
    result = invoke("plan", "--simulate", "--dtype", "float32", "--batch", "1", "--sequence", "128")
    assert "measured rates; no run has confirmed it" in result.output


def test_settings_are_chosen_by_measuring_this_machine(tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=64
    ).save_pretrained(tmp_path)
    result = invoke(
        *("plan", str(tmp_path), "--tune", "--simulate", "--dtype", "float32", "--batch", "2", "--sequence", "16")
    )
    assert result.exit_code == 0, result.output
    assert result.output.startswith("measured in ")
    assert "chosen: micro_batch_size=" in result.output
    assert "one knob turned                   step   tokens/s     memory\nchosen " in result.output
    assert "prefetch_depth=2" in result.output
    assert "it fits" in result.output
    assert "simulated step: " in result.output


def test_settings_for_a_described_machine_are_chosen_by_its_data_sheet() -> None:
    result = invoke("plan", "llama-8b", "--machine", "gh200", "--tune", "--batch", "2")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("by the rates given: ")


def test_settings_that_cannot_fit_are_no_wrong_use() -> None:
    result = invoke("plan", "dense-120b", "--machine", "rtx-4090", "--tune", "--batch", "2")
    assert result.exit_code == 1
    assert "Error: no setting fits; the nearest is micro_batch_size=" in result.output


def test_a_timeline_that_cannot_be_written_is_no_wrong_use(tmp_path: Path) -> None:
    result = invoke("plan", "llama-8b", "--machine", "h200", "--simulate", "--trace", str(tmp_path / "no" / "t.json"))
    assert result.exit_code == 1
    assert "Error: " in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "3", "--sequence", "100"], "3 × 100 = 300 tokens"),
        (["--micro-batch", "2"], "micro-batches: 4"),
        (["--depth", "2"], "prefetch depth: 2"),
        (["--resident", "3"], "resident layers: 3"),
        (["--resident", "auto"], "resident layers: 32"),
        (["--kept-graphs", "3"], "kept graphs: 3"),
        (["--kept-graphs", "auto", "--batch", "2"], "kept graphs: 32"),
        (["--offload"], "saved inputs: offloaded"),
        (["--no-offload"], "saved inputs: kept"),
        (["--dtype", "float32"], "float32, 8 × 2,048"),
        (["--moments", "bfloat16"], "10.0 bytes a parameter"),
        (["--overlap", "backward"], "12.4 bytes a parameter"),
        (["--overlap", "backward", "--optimizer-device", "device"], "optimizer buffers"),
    ],
)
def test_options_reach_the_plan(options: list[str], words: str) -> None:
    assert words in invoke("plan", "llama-8b", *BIG, *options).output


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=128
    ).save_pretrained(tmp_path)
    result = invoke("plan", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "3 layers" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/folder"], "Error: no configuration found for '/no/such/folder'"),
        (["--depth", "-1"], "Error: prefetch_depth must be a whole number ≥ 0"),
        (["--dtype", "fp8"], "Error: dtype must be one of"),
        (
            ["--machine", "abacus"],
            "Error: --machine must be one of this, h200, gh200, rtx-4090, rtx-3090, dgx-spark; got 'abacus'",
        ),
        (["--device-memory", "24 parsecs"], "is not a size; write 24GB, 24GiB, 1.5TB or a number of bytes"),
        (["--simulate", "--trace", "t.txt"], "Error: a trace is JSON, and its name must end in .json or .json.gz"),
        (["--trace", "t.json"], "Error: --trace writes a simulated timeline; add --simulate"),
        (["--simulate", "--device-memory", "24GB"], "Error: the rates of a GPU that is not here are not known"),
        (["--resident", "few"], "'few' is neither a number of layers nor \"auto\""),
        (["--batch", "0"], "Error: batch must be a whole number ≥ 1; got 0"),
    ],
)
def test_wrong_use_is_told_in_a_line(arguments: list[str], words: str) -> None:
    result = invoke("plan", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    if words.startswith("Error"):
        assert result.stderr.count("\n") == 1


def test_a_model_that_is_no_causal_lm_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    result = invoke("plan", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: Unrecognized configuration class")
    assert result.stderr.count("\n") == 1


def test_an_unknown_name_without_a_network_is_told_in_a_line() -> None:
    code = 'import sys; from megatrain.cli import main; sys.argv = ["megatrain", "plan", "no-one/no-model"]; main()'
    done = run_python(code, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    assert "no configuration found for 'no-one/no-model'" in line


def test_a_command_is_told_in_whole_sentences_in_a_narrow_terminal() -> None:
    lines = invoke("--help").output.split("Commands:")[1].strip().splitlines()
    assert {line.split()[0] for line in lines} >= {"plan", "train", "resume", "status", "export", "trace", "dashboard"}
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_what_the_system_refuses_is_told_without_its_number(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_status(Status(RunState.NEW))
    (tmp_path / "file").touch()
    said = invoke("trace", str(tmp_path), str(tmp_path / "nowhere" / "trace.json"))
    assert (said.exit_code, said.stderr) == (
        2,
        f"Error: {tmp_path}/nowhere is no folder: make it, or write the trace elsewhere\n",
    )
    said = invoke("trace", str(tmp_path), str(tmp_path / "trace.txt"))
    assert (said.exit_code, said.stderr) == (
        2,
        f"Error: a trace is JSON, and its name must end in .json or .json.gz (packed); got {tmp_path}/trace.txt\n",
    )
    said = invoke("train", str(tmp_path / "file" / "run.yaml"))
    assert said.stderr.endswith("cannot be read: Not a directory\n")


# ---- dashboard ----


def test_dashboard_help_says_who_can_reach_the_page_and_how() -> None:
    result = invoke("dashboard", "--help")
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "Ctrl-C ends the page, never the run." in words
    assert "ssh -L 8866:127.0.0.1:8866 HOST" in words
    assert "Exit code 0: ended by Ctrl-C; 2: wrong use, such as a folder that is no run." in words
    for option in ("--port", "--no-browser"):
        assert option in words


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"port": 0, "open_browser": True}),
        (["--port", "8866", "--no-browser"], {"port": 8866, "open_browser": False}),
    ],
)
def test_dashboard_serves_the_run(
    options: list[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "dashboard.viewer.serve",
        lambda run, port, *, open_browser: served.append({"run": run, "port": port, "open_browser": open_browser}),
    )
    assert invoke("dashboard", "runs/mine", *options).exit_code == 0
    assert served == [{"run": Path("runs/mine")} | expected]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/folder"], "Error: a run's folder is needed; /no/such/folder is no folder"),
        ([], "Missing argument 'RUN'"),
        (["run", "--port", "70000"], "Invalid value for '--port'"),
    ],
)
def test_wrong_use_of_dashboard_is_told_in_a_line(arguments: list[str], words: str) -> None:
    result = invoke("dashboard", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


# ---- sizes ----


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GB", 24 * 10**9),
        ("24 gb", 24 * 10**9),
        ("24G", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("512MiB", 512 * 2**20),
        ("1000", 1000),
        ("10B", 10),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert cli.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1,5TB", "24XB", "1e9", "0GB", "nan"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size; write 24GB"):
        cli.parse_size(text)


@given(st.integers(1, 10**6), st.sampled_from(["K", "M", "G", "T"]), st.sampled_from(["", "B", "i", "iB"]))
def test_every_unit_is_a_thousand_of_the_one_below(number: int, unit: str, end: str) -> None:
    base = 1024 if end.startswith("i") else 1000
    assert cli.parse_size(f"{number}{unit}{end}") == number * base ** (" KMGT".index(unit))
