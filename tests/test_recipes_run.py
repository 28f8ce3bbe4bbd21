"""Recipes in configuration files and runs: what is wrong is refused, and a run goes on with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from families import build
from reference import make_batch
from safetensors.torch import load_file

from examples.make_inputs import main as make_inputs
from megatrain.anatomy.load import without_dropout
from megatrain.jobs import make_batches, make_engine, make_run, settle
from megatrain.recipes import DPO, GRPO, SFT, Reward
from megatrain.settings import Settings, SettingsError, dump_settings, load_settings

LEAST = {"model": {"name": "m"}, "data": {"source": "d.jsonl"}, "run": {"folder": "r", "steps": 4}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def written(folder: Path, recipe: object = None, **changes: object) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**LEAST, **changes, **({} if recipe is None else {"recipe": recipe})}))
    return path


def test_supervised_fine_tuning_unless_told_otherwise(tmp_path: Path) -> None:
    assert load_settings(written(tmp_path)).recipe == SFT()


def test_a_recipe_comes_back_from_a_file(tmp_path: Path) -> None:
    recipe = GRPO(rewards=["a:b"], num_generations=4, epsilon_high=0.28, server="http://127.0.0.1:8000/v1")
    path = written(tmp_path, {"name": "grpo", "rewards": ["a:b"], "num_generations": 4, "epsilon_high": 0.28})
    settings = load_settings(path, ["recipe.server=http://127.0.0.1:8000/v1"])
    assert settings.recipe == recipe
    path.write_text(dump_settings(settings))
    assert load_settings(path) == settings


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"name": "dpo", "betta": 1}, "recipe.betta is no setting; did you mean recipe.beta?"),
        ({"name": "dpo", "num_generations": 1}, "recipe.num_generations is no setting; recipe has name, beta,"),
        ({"name": "ppo"}, "recipe: there is no recipe 'ppo'; did you mean dpo?"),
        ({"name": "xyz"}, "recipe: there is no recipe 'xyz'; there are sft, pretrain, dpo, reward, grpo"),
        ({"beta": 1}, "recipe.name is missing: one of sft, pretrain, dpo, reward, grpo"),
        ("dpo", "recipe must hold keys such as name: sft; it holds 'dpo'"),
        ({"name": "dpo", "beta": "much"}, "recipe.beta: Input should be a valid number; got 'much'"),
        ({"name": "dpo", "beta": -1}, "recipe: beta must be above 0; got -1.0"),
        ({"name": "dpo", "loss_type": "best"}, "recipe.loss_type: Input should be 'sigmoid', 'hinge', 'ipo' or"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, recipe: object, said: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(written(tmp_path, recipe))
    assert said in str(error.value)


def test_pretraining_leaves_no_token_out(tmp_path: Path) -> None:
    data = {"source": "d", "loss_on": "assistant"}
    with pytest.raises(SettingsError, match=r"the recipe pretrain trains all tokens; data\.loss_on is 'assistant'"):
        load_settings(written(tmp_path, {"name": "pretrain"}, data=data))


def settings_for(inputs: Path, folder: Path, recipe: dict[str, object], source: str, **data: object) -> Settings:
    path = written(
        folder,
        recipe,
        model={"name": str(inputs / "tiny"), "from_scratch": True},
        data={"source": str(inputs / source), "sequence": 64, "batch": 4, **data},
        engine={"dtype": "float32", "device": "cpu"},
        run={"folder": str(folder / "run"), "steps": 5, "checkpoint_every": 2, "schedule": "constant"},
    )
    return load_settings(path)


GRPO_RECIPE = {
    "name": "grpo",
    "rewards": [str(Path(__file__).parent.parent / "examples" / "rewards.py") + ":no_letters"],
    "num_generations": 3,
    "max_completion_length": 5,
    "beta": 0.1,
}


@pytest.mark.parametrize(
    ("recipe", "data"),
    [({"name": "dpo"}, {"source": "pairs.jsonl"}), (GRPO_RECIPE, {"source": "prompts.jsonl", "format": "prompt"})],
    ids=["dpo", "grpo"],
)
def test_a_run_that_was_broken_off_ends_with_the_same_bits(
    recipe: dict[str, object], data: dict[str, object], inputs: Path, tmp_path: Path
) -> None:
    found = []
    for name, breaks in (("whole", []), ("broken", [2])):
        folder = tmp_path / name
        folder.mkdir()
        settings = settings_for(inputs, folder, recipe, **data)  # type: ignore[arg-type]
        for steps in breaks:
            broken = load_settings(folder / "run.yaml", [f"run.steps={steps}"])
            make_run(broken).start().wait(60)
        make_run(settings, resume=bool(breaks)).start().wait(60)
        found.append(load_file(folder / "run" / "model" / "model.safetensors"))
    whole, broken_off = found
    assert all(torch.equal(whole[name], broken_off[name]) for name in whole)


def test_a_reference_is_kept_where_it_is_asked(inputs: Path, tmp_path: Path) -> None:
    for recipe, kept in (({"name": "dpo"}, True), ({**GRPO_RECIPE, "beta": 0.0}, False), ({"name": "sft"}, False)):
        with make_engine(settings_for(inputs, tmp_path, recipe, "pairs.jsonl")) as engine:
            assert engine.config.keep_reference == kept


@pytest.mark.parametrize(
    ("recipe", "data", "rows", "tokens"),
    [
        ({"name": "reward"}, {"source": "pairs.jsonl"}, 2 * 4, 64),
        (GRPO_RECIPE, {"source": "prompts.jsonl", "format": "prompt"}, 3 * 4, 64 + 5),
    ],
    ids=["reward", "grpo"],
)
def test_settings_are_chosen_for_what_a_step_of_the_recipe_trains(
    recipe: dict[str, object], data: dict[str, object], rows: int, tokens: int, inputs: Path, tmp_path: Path
) -> None:
    open_settings = replace(settings_for(inputs, tmp_path, recipe, **data), tune=["grad_buffers"])  # type: ignore[arg-type]
    settings, tuned = settle(open_settings)
    assert tuned is not None
    assert (tuned.plan.subject.batch, tuned.plan.subject.sequence) == (rows, tokens)
    assert settings.engine == replace(open_settings.engine, grad_buffers=tuned.plan.needs.knobs.grad_buffers)
    assert settle(settings) == (settings, None)


def test_data_of_another_kind_is_refused(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be 'preference' here; it is 'messages'"):
        make_batches(settings_for(inputs, tmp_path, {"name": "dpo"}, "chats.jsonl"))
    with pytest.raises(ValueError, match=r"it is 'preference'\. Text and chats are for"):
        make_batches(settings_for(inputs, tmp_path, {"name": "sft"}, "pairs.jsonl"))


def test_dpo_without_a_reference_says_what_to_set(inputs: Path, tmp_path: Path) -> None:
    settings = settings_for(inputs, tmp_path, {"name": "sft"}, "pairs.jsonl")
    batch = next(make_batches(settings_for(inputs, tmp_path, {"name": "dpo"}, "pairs.jsonl")))
    with make_engine(settings) as engine, pytest.raises(ValueError, match="keep_reference=True"):
        DPO().step(engine, batch)


def test_preferences_are_learnt_without_dropout() -> None:
    """So that policy and reference differ by their weights alone; TRL does so, too."""
    model = build("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)
    llama = build("llama", attention_dropout=0.3)
    for each in (model, llama):
        without_dropout(each)
        batch = make_batch(each)
        assert torch.equal(each.train()(**batch).logits, each.eval()(**batch).logits)
    assert DPO().disable_dropout
    assert Reward().disable_dropout
    assert not SFT().disable_dropout


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([], "recipe.rewards must name at least one function: nothing else says what an answer is worth"),
        (["no_such.py:good"], "names a file that is not there"),
    ],
)
def test_rewards_are_looked_up_before_anything_is_loaded(tmp_path: Path, rewards: list[str], said: str) -> None:
    """The model and the data that are asked for are not there either."""
    with pytest.raises(ValueError, match=said):
        make_run(load_settings(written(tmp_path, {"name": "grpo", "rewards": rewards})))
