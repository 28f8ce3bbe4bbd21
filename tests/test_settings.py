"""Configuration files: what is right becomes dataclasses, what is wrong is refused with its place and the way out."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import AdamWConfig, EngineConfig, Throttle
from megatrain.settings import DataSettings, LoraSettings, SettingsError, dump_settings, load_settings, settings_of

LEAST = {
    "model": {"name": "m"},
    "data": {"source": "d.jsonl"},
    "run": {"folder": "runs/x", "steps": 10},
}


def written(folder: Path, values: object) -> Path:
    path = folder / "run.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


def test_the_least_that_is_needed(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, LEAST))
    assert (settings.model.name, settings.data.source, settings.run.steps) == ("m", "d.jsonl", 10)
    assert (settings.engine, settings.optimizer) == (EngineConfig(), AdamWConfig())


def test_everything_can_be_said_and_comes_back(tmp_path: Path) -> None:
    values = {
        **LEAST,
        "data": {"source": ["a.jsonl", "b.jsonl"], "sequence": 128, "pack": False, "too_long": "reject"},
        "engine": {"prefetch_depth": 2, "resident_layers": "auto", "throttle": {"link_bytes_per_s": 1e9}},
        "optimizer": {"lr": 1, "betas": [0.8, 0.9], "max_grad_norm": None},
    }
    settings = load_settings(written(tmp_path, values))
    assert settings.engine == EngineConfig(
        prefetch_depth=2, resident_layers="auto", throttle=Throttle(link_bytes_per_s=1e9)
    )
    assert settings.optimizer.betas == (0.8, 0.9)
    assert settings.optimizer.lr == 1.0
    again = load_settings(written(tmp_path, dump_settings(settings)))
    assert again == settings


def test_an_engine_that_is_to_be_chosen(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, {**LEAST, "engine": "auto"}))
    assert (settings.engine, settings.tune) == (EngineConfig(), "all")
    further = load_settings(written(tmp_path, {**LEAST, "engine": "auto"}), ["engine.dtype=float32"])
    assert (further.engine.dtype, further.tune) == ("float32", "all")
    assert load_settings(written(tmp_path, LEAST), ["engine=auto"]).tune == "all"
    assert load_settings(written(tmp_path, dump_settings(settings))) == settings


def test_single_knobs_can_be_left_to_be_chosen(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, {**LEAST, "tune": ["prefetch_depth"], "engine": {"grad_buffers": 3}}))
    assert (settings.tune, settings.engine.grad_buffers) == (["prefetch_depth"], 3)
    with pytest.raises(SettingsError, match=r"tune.*should be 'micro_batch_size', .*got 'dtype'"):
        load_settings(written(tmp_path, {**LEAST, "tune": ["dtype"]}))


def test_a_name_that_looks_like_a_number_stays_a_name(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, LEAST), ["run.folder='1e5'", "model.name='-3E+2'"])
    again = load_settings(written(tmp_path, dump_settings(settings)))
    assert (again.run.folder, again.model.name) == ("1e5", "-3E+2")


def test_changes_come_on_top(tmp_path: Path) -> None:
    path = written(tmp_path, LEAST)
    changed = load_settings(path, ["engine.prefetch_depth=3", "run.steps=5", "optimizer.lr=3e-5", "data.source=[x, y]"])
    assert (changed.engine.prefetch_depth, changed.run.steps, changed.data.source) == (3, 5, ["x", "y"])
    assert changed.optimizer.lr == 3e-5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("engine.prefetch_dept=2", "engine.prefetch_dept is no setting; did you mean engine.prefetch_depth?"),
        ("enigne.prefetch_depth=2", "enigne is no setting; did you mean engine?"),
        ("run.zzz=1", "run.zzz is no setting; run has folder, steps,"),
        (
            "engine.throttle.link=1",
            "engine.throttle.link is no setting; did you mean engine.throttle.link_bytes_per_s?",
        ),
        ("engine.prefetch_depth=two", "engine.prefetch_depth: Input should be a valid integer; got 'two'"),
        ("engine.prefetch_depth=-1", "engine: prefetch_depth must be a whole number ≥ 0 "),
        ("engine.dtype=float16", "engine.dtype: Input should be 'bfloat16' or 'float32'; got 'float16'"),
        ("run.steps=0", "run: steps must be at least 1; got 0"),
        ("run.steps=null", "run.steps: Input should be a valid integer; got None"),
        ("data.source=null", "data.source"),
        ("optimizer.lr=fast", "optimizer.lr: Input should be a valid number; got 'fast'"),
        ("run.warmup=11", "run: warmup must be between 0 and the number of steps; got 11"),
        ("engine", "a change is written key=value"),
        ("=3", "a change is written key=value"),
        ("model.name.x=3", "name is a value, and has no keys of its own"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(written(tmp_path, LEAST), [change])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is no YAML"),
        ("- 1\n- 2\n", "must hold keys such as model:, data: and run:; it holds list"),
        ("", "run.yaml is empty; it must hold keys such as model:, data: and run:"),
        ("model: {name: m}\n", "data is missing; run is missing"),
        ("model: 3\ndata: {source: d}\nrun: {folder: f, steps: 1}\n", "model: "),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=r"run\.yaml") as error:
        load_settings(written(tmp_path, text))
    assert said in str(error.value)


def test_aliases_are_refused_before_they_grow(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]  # 10¹² words
    with pytest.raises(SettingsError, match=r"run\.yaml: line 2 holds the alias \*a0, and a run file takes none:"):
        load_settings(written(tmp_path, "\n".join(lines)))
    with pytest.raises(SettingsError, match=r"'run\.steps=\*a': the value is no YAML; quote it"):
        load_settings(written(tmp_path, LEAST), ["run.steps=*a"])


def test_what_occurs_twice_is_written_out(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "hello"}]
    path = written(tmp_path, {**LEAST, "evaluation": {"every": 1}})
    settings = load_settings(path, [f"evaluation.prompts={[prompt, prompt]}"])
    same = replace(settings.evaluation, prompts=[prompt, prompt])  # type: ignore[type-var]
    assert load_settings(written(tmp_path, dump_settings(replace(settings, evaluation=same)))) == settings


def test_the_place_of_a_value_that_may_be_of_several_kinds_is_that_of_its_key(tmp_path: Path) -> None:
    said = (
        r"yaml: data.source: Input should be a valid string; got 3; data.source: Input should be a valid array; got 3"
    )
    with pytest.raises(SettingsError, match=said):
        load_settings(written(tmp_path, LEAST), ["data.source=3"])


def test_a_run_is_where_its_folder_is_now(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, LEAST))
    (tmp_path / "settings.yaml").write_text(dump_settings(settings))
    assert settings_of(tmp_path).run == replace(settings.run, folder=str(tmp_path))


def test_a_run_is_asked_for_something_else_but_not_elsewhere(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, LEAST))
    (tmp_path / "settings.yaml").write_text(dump_settings(settings))
    changed = settings_of(tmp_path, ["run.steps=20", "optimizer.lr=3e-5"])
    assert (changed.run.steps, changed.optimizer.lr, changed.run.folder) == (20, 3e-5, str(tmp_path))
    with pytest.raises(SettingsError, match=r"run\.folder is where the run is, .*: move the folder, and it goes on"):
        settings_of(tmp_path, ["run.folder=elsewhere"])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load_settings(tmp_path / "none.yaml")


@given(st.text(max_size=200))
def test_no_text_is_more_than_refused(text: str) -> None:

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8", newline="")
        with pytest.raises(SettingsError):
            load_settings(path)


def test_data_rules() -> None:
    with pytest.raises(ValueError, match="sequence must be at least 2 tokens; got 1"):
        DataSettings(source="x", sequence=1)


def test_lora_is_off_unless_said_and_any_of_its_keys_turns_it_on(tmp_path: Path) -> None:
    path = written(tmp_path, LEAST)
    assert load_settings(path).lora is None
    assert load_settings(path, ["lora={}"]).lora == LoraSettings()
    settings = load_settings(path, ["lora.r=4", "lora.target_modules=[q_proj, v_proj]", "lora.dora=true"])
    assert settings.lora == LoraSettings(r=4, target_modules=["q_proj", "v_proj"], dora=True)
    without = dump_settings(load_settings(path))
    assert load_settings(written(tmp_path, dump_settings(settings))) == settings
    assert load_settings(written(tmp_path, without)).lora is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lora.rank=4", r"lora\.rank is no setting"),
        ("lora.r=0", "lora: r must be at least 1"),
        ("lora.dropout=1", "lora: dropout must be at least 0 and below 1"),
        ("lora.target_modules=3", r"lora\.target_modules"),
    ],
)
def test_lora_settings_that_cannot_be_are_refused(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(written(tmp_path, LEAST), [change])


def test_lora_settings_are_peft_s_own_under_its_names() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**LoraSettings(alpha=7, rslora=True, modules_to_save=["lm_head"]).options)
    assert (config.r, config.lora_alpha, config.use_rslora, config.use_dora) == (16, 7, True, False)
    assert config.modules_to_save == ["lm_head"]
