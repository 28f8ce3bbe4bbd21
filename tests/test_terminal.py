"""The commands that train: a run from a file, its end told by exit codes, Ctrl-C, resume, status, export, trace."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from megatrain import cli, terminal
from megatrain.checkpoint import Checkpoints
from megatrain.data import PLAIN_CHAT_TEMPLATE, train_tokenizer
from megatrain.report import RunState

pytestmark = pytest.mark.timeout(240)

TEXTS = ["the cat sat on the mat and saw a dog", "a dog sat on the cat and the mat", "mats and cats and dogs"] * 8


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, its tokenizer, and a data file."""
    folder = tmp_path_factory.mktemp("workplace")
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def settings_file(workplace: Path, folder: Path, **run: Any) -> Path:
    values = {
        "model": {"name": str(workplace / "model")},
        "data": {"source": str(workplace / "data.jsonl"), "sequence": 16, "batch": 4},
        "engine": {"device": "cpu", "dtype": "float32", "micro_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "run": {"folder": str(folder), "steps": 6, "warmup": 1, "checkpoint_every": 2, **run},
    }
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "megatrain.cli", *map(str, arguments)]


def megatrain(*arguments: object, expected: int = 0) -> str:
    """Run the command in this process: to start another one takes longer than to train a tiny model."""
    done = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert done.exit_code == expected, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output


def megatrain_apart(*arguments: object) -> str:
    """Run it as a user does."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def begun(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_from_a_file_to_its_exported_model(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = megatrain_apart("train", settings_file(workplace, folder), "run.steps=7")
    assert f"done: 7 steps; model in {folder}/model" in said
    assert re.search(r"step 7 of 7: loss \d", said)  # lines where there is no terminal
    assert "\r" not in said
    assert AutoTokenizer.from_pretrained(folder / "model").pad_token_id is not None
    assert {path.stat().st_mode & 0o777 for path in (folder / "model").iterdir()} == {0o600}
    assert len(losses(folder)) == 7
    assert yaml.safe_load((folder / "settings.yaml").read_text())["run"]["steps"] == 7
    assert "torch==" in (folder / "environment.txt").read_text()
    assert Checkpoints(folder / "checkpoints").steps() == [4, 6, 7]
    assert "finished: 7 of 7 steps done, llama" in megatrain("status", folder)
    assert "2 steps are in" in megatrain("trace", folder, tmp_path / "out.json.gz", "--steps", "2")
    with gzip.open(tmp_path / "out.json.gz") as file:
        steps = {e["name"] for e in json.load(file)["traceEvents"] if e.get("cat") == "step"}
    assert steps == {"step 5", "step 6"}
    assert "after step 7" in megatrain("export", folder, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), trained.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token_id is not None


def test_a_lora_run_leaves_an_adapter_and_exports_it_merged(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    megatrain("train", settings_file(workplace, folder), "lora.r=4", "lora.dropout=0.1", "optimizer.lr=0.05")
    assert yaml.safe_load((folder / "settings.yaml").read_text())["lora"]["target_modules"] == "all-linear"
    assert "peft==" in (folder / "environment.txt").read_text()
    megatrain("export", folder, tmp_path / "adapter")
    megatrain("export", folder, tmp_path / "merged", "--merge")
    tokens = torch.arange(3, 11)[None]
    base, *others = (AutoModelForCausalLM.from_pretrained(workplace / "model") for _ in range(3))
    adapters = (folder / "model", tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        unadapted = base(tokens).logits
        adapted = [PeftModel.from_pretrained(*pair)(tokens).logits for pair in zip(others, adapters, strict=True)]
        assert torch.equal(*adapted)
        torch.testing.assert_close(merged(tokens).logits, adapted[0])
        assert not torch.allclose(unadapted, adapted[0], atol=1e-3)


def test_a_run_of_the_whole_model_has_no_adapter_to_merge(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    megatrain("train", settings_file(workplace, folder), "run.steps=2")
    said = megatrain("export", folder, tmp_path / "out", "--merge", expected=2)
    assert "there is no adapter to merge; export it without --merge" in said


def test_skipped_records_are_told_and_left_in_the_folder(workplace: Path, tmp_path: Path) -> None:
    data, folder = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text((workplace / "data.jsonl").read_text() + "oops\n" + '{"text": 3}\n')
    file = settings_file(workplace, folder, steps=1)
    assert f"{data}, line {len(TEXTS) + 1}: not JSON" in megatrain("train", file, f"data.source={data}", expected=2)
    said = megatrain("train", file, f"data.source={data}", "data.on_bad_record=skip")
    assert f"data: {len(TEXTS)} records, 2 skipped, {len(TEXTS)} documents" in said  # zeros are not told
    about = json.loads((folder / "data.json").read_text())
    assert (about["origin"], about["counts"]["skipped"]) == (str(data), 2)


def test_ctrl_c_stops_with_a_checkpoint_and_resume_goes_on_exactly(workplace: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    megatrain("train", settings_file(workplace, straight, steps=40))
    folder = tmp_path / "broken"
    file = settings_file(workplace, folder, steps=40, checkpoint_every=1000)
    process = begun("train", file, "engine.throttle.link_bytes_per_s=1e6")
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert "stopping after this step" in said
    assert f"go on with: megatrain resume {folder}" in said
    done = len(losses(folder))
    assert done < 40
    assert Checkpoints(folder / "checkpoints").steps() == [done]
    assert f"stopped: {done} of 40 steps done" in megatrain("status", folder)
    settings = (folder / "settings.yaml").read_text().replace("link_bytes_per_s: 1000000.0", "link_bytes_per_s: null")
    (folder / "settings.yaml").write_text(settings)
    said = megatrain("resume", folder)
    assert f"changed since the checkpoint of step {done}: engine.throttle.link_bytes_per_s 1000000.0 → null\n" in said
    assert losses(folder) == losses(straight)


def test_a_stopped_run_leaves_a_checkpoint_also_where_none_were_wanted(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = settings_file(workplace, folder, steps=1000, checkpoint_every=None)
    process = begun("train", file, "engine.throttle.link_bytes_per_s=1e6")
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 2)
    process.send_signal(signal.SIGTERM)  # as a cluster does, where a user types Ctrl-C
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 3, said
    before = losses(folder)
    assert Checkpoints(folder / "checkpoints").steps() == [len(before)]
    moved = folder.rename(tmp_path / "moved")  # it goes on where it is, not where it began
    changes = ("engine.throttle=null", "optimizer.lr=2e-3", "run.schedule=constant", f"run.steps={len(before) + 2}")
    said = megatrain("resume", moved, *changes)
    assert f"going on after step {len(before)}, from its checkpoint" in said
    assert f'step {len(before)}: run.steps 1000 → {len(before) + 2}; run.schedule "cosine" → "constant"; ' in said
    assert losses(moved)[:-2] == before
    assert yaml.safe_load((moved / "settings.yaml").read_text())["optimizer"]["lr"] == 2e-3
    noted = json.loads((moved / "changes.jsonl").read_text())
    assert (noted["step"], noted["changed"]["optimizer.lr"]) == (len(before), [1e-3, 2e-3])
    rates = [json.loads(line)["lr"] for line in (moved / "metrics.jsonl").read_text().splitlines()]
    assert (max(rates[:-2]) <= 1e-3, rates[-2:]) == (True, [2e-3] * 2)
    assert not folder.exists()


def test_resume_says_that_it_begins_anew_where_there_is_no_checkpoint(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = begun("train", settings_file(workplace, folder, steps=1000, checkpoint_every=None, save=False))
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 2)
    process.kill()
    process.communicate(timeout=60)
    done = len(losses(folder))
    assert f"lost: {done} of 1,000 steps done" in megatrain("status", folder, expected=1)
    settings = (folder / "settings.yaml").read_text().replace("steps: 1000", "steps: 2")
    (folder / "settings.yaml").write_text(settings)
    assert "there is no checkpoint: beginning with step 1 again; what was there before is in" in megatrain(
        "resume", folder
    )
    said = megatrain("export", folder, tmp_path / "out", expected=2)
    assert "a run leaves some where run.checkpoint_every is set" in said


def test_a_run_that_fails_once_it_has_begun_is_no_wrong_use(workplace: Path, tmp_path: Path) -> None:
    file = settings_file(workplace, tmp_path / "run", steps=100)
    said = megatrain("train", file, "optimizer.lr=1e30", "optimizer.max_grad_norm=null", expected=1)
    assert re.search(r"Error: the .* of step \d+ is (nan|inf); nothing was applied", said)
    assert "Traceback" not in said


class _Run:
    """A run that fails, and is over before anybody waits for it."""

    state = RunState.FAILED

    def wait(self, timeout_s: float | None = None) -> None:
        raise TimeoutError("the server did not answer")


def test_a_failure_is_told_also_where_it_looks_like_the_end_of_waiting() -> None:
    with pytest.raises(TimeoutError, match="the server did not answer"):
        terminal._wait(_Run())  # type: ignore[arg-type]


def test_a_run_goes_on_when_nobody_reads_what_it_prints(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = begun("train", settings_file(workplace, folder))
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert len(losses(folder)) == 6


def test_chats_for_a_base_model(workplace: Path, tmp_path: Path) -> None:
    """Its tokenizer has no chat template; what is trained with one is saved with it."""
    base, data, folder = tmp_path / "base", tmp_path / "chats.jsonl", tmp_path / "run"
    shutil.copytree(workplace / "model", base)
    (base / "chat_template.jinja").unlink()
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    data.write_text(json.dumps({"messages": chat}) + "\n")
    file = settings_file(workplace, folder, steps=1)
    changes = (f"model.name={base}", f"data.source={data}", "data.sequence=64")
    assert "set model.chat_template to a file with one" in megatrain("train", file, *changes, expected=2)
    said = megatrain("train", file, *changes, "model.chat_template=none.jinja", expected=2)
    assert "model.chat_template must be plain or a file; none.jinja cannot be read: No such file" in said
    megatrain("train", file, *changes, "model.chat_template=plain")
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template == PLAIN_CHAT_TEMPLATE


def test_held_out_data_from_files_needs_no_split(workplace: Path, tmp_path: Path) -> None:
    folder, source = tmp_path / "run", workplace / "data.jsonl"
    file = settings_file(workplace, folder, steps=2)
    said = megatrain("train", file, "evaluation.every=2", f"evaluation.source={source}")
    assert "after step 2: held-out loss" in said
    assert [json.loads(line)["step"] for line in (folder / "evaluations.jsonl").read_text().splitlines()] == [0, 2]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_ctrl_c_twice_stops_at_once(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = settings_file(workplace, folder, steps=1000)
    slow = "engine.throttle.link_bytes_per_s=2e3"  # a step would take minutes
    process = begun("train", file, slow)
    assert process.stdout is not None
    wait_for(lambda: (folder / "run.json").exists())
    time.sleep(1.0)  # until signals are heard, of which nothing tells
    process.send_signal(signal.SIGINT)
    assert any("stopping after this step" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130, said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["train", "none.yaml"], 2, "none.yaml cannot be read"),
        (["train", "{file}", "engine.prefetch_dept=2"], 2, "did you mean engine.prefetch_depth?"),
        (["train", "{file}", "data.source=none.jsonl"], 2, "none.jsonl"),
        (["resume", "{nowhere}"], 2, "only runs begun by `megatrain train` can be found again"),
        (["status", "{nowhere}"], 2, "a run's folder is needed"),
        (["trace", "{nowhere}", "x.json"], 2, "a run's folder is needed"),
        (["export", "{nowhere}", "x"], 2, "only runs begun by"),
        (["train", "{file}", "model.tokenizer={nothing}"], 2, "there is no tokenizer in"),
        (["train", "{file}", "data.source={nothing}/data.jsonl", "run.folder=/proc/x"], 2, "no such file or folder"),
        (["train", "{file}", "run.folder={file}"], 1, "run.yaml: Not a directory"),
    ],
)
def test_wrong_use_is_told_in_a_line(
    workplace: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    file = settings_file(workplace, tmp_path / "run")
    nothing = tmp_path / "nothing"  # but a model's form
    LlamaConfig().save_pretrained(nothing)
    filled = [argument.format(file=file, nowhere=tmp_path / "nowhere", nothing=nothing) for argument in arguments]
    output = megatrain(*filled, expected=code)
    assert said in output
    assert "Traceback" not in output


def test_settings_that_are_left_open_are_chosen_once_and_told(workplace: Path, tmp_path: Path) -> None:
    file = settings_file(workplace, tmp_path / "run", steps=2)
    said = megatrain("train", file, "tune=all")
    assert "measured in " in said
    assert "chosen: micro_batch_size=" in said
    kept = yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())
    assert kept["tune"] == []
    assert kept["engine"]["micro_batch_size"] in (1, 2, 4)
    tuning = json.loads((tmp_path / "run" / "tuning.json").read_text())
    assert any(reason.startswith("chosen: ") for reason in tuning["reasons"])
    assert tuning["candidates"][0]["knob"] is None
    assert tuning["rates"]["flops_per_s"]["forward"] > 0
    assert "measured in" not in megatrain("resume", tmp_path / "run")


def test_a_model_with_code_of_its_own_is_not_measured(workplace: Path, tmp_path: Path) -> None:
    file = settings_file(workplace, tmp_path / "run")
    said = megatrain("train", file, "engine=auto", "model.trust_remote_code=true", expected=2)
    assert "which one that brings its own code (model.trust_remote_code) does not allow" in said
