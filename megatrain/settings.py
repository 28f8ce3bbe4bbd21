"""A run as a file: what to train, on what, how, and where to; YAML, with key=value on top.

Every key is a field of one of the dataclasses below or of `config`; a key that is none of them, or a value of another
type, is refused with its place in the file and what was probably meant.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Discriminator, TypeAdapter, ValidationError

from megatrain.config import AdamWConfig, EngineConfig, Knob, SinkName
from megatrain.folder import RunFolder
from megatrain.plain import to_plain
from megatrain.recipes import SFT, Pretrain, Recipe
from megatrain.yaml_values import AliasError, parsed, written

PARTS_OF_UNIONS = ("list[", "literal[", "function", "str", "int", "bool")  # in pydantic's places


class SettingsError(ValueError):
    """A file, key or value that cannot be used; the message names it and the way out."""


def _require(condition: bool, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{rule}; got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """name: a folder or a model of the hub, with its tokenizer. tokenizer: another one. chat_template: a file with one
    in Jinja, or plain (for a tokenizer that has none); the model is saved with it.

    from_scratch: random weights in the same form, seeded by `run.seed`. trust_remote_code: whether Python code that
    comes with the model may run, with all rights of the user.
    """

    name: str
    tokenizer: str | None = None
    chat_template: str | None = None
    from_scratch: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """source: files, a folder, or a data set of the hub (see README, "Data"). sequence: tokens, at most.

    loss_on: the tokens that are trained; None = every assistant turn of a chat, what follows a prompt, all of a raw
    text. too_long, on_bad_record: what becomes of records that are. pack: several documents per sequence, kept apart.
    """

    source: str | list[str]
    split: str = "train"
    config: str | None = None
    format: Literal["text", "alpaca", "messages", "sharegpt", "completion", "preference", "prompt"] | None = None
    sequence: int = 2048
    batch: int = 8
    loss_on: Literal["assistant", "completion", "all"] | None = None
    pack: bool = True
    too_long: Literal["split", "reject"] | None = None
    on_bad_record: Literal["error", "skip"] = "error"
    shuffle: bool = True

    def __post_init__(self) -> None:
        _require(self.sequence >= 2, "sequence must be at least 2 tokens", self.sequence)
        _require(self.batch >= 1, "batch must be at least 1 sequence per step", self.batch)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """folder: of the run. steps: optimizer steps. warmup: of them; schedule: what follows, down to `floor` × lr.

    checkpoint_every: steps between complete states; keep_last, keep_every: which of them stay.
    sinks: where the curves go besides: tensorboard, wandb.
    """

    folder: str
    steps: int
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: int = 0
    floor: float = 0.1
    checkpoint_every: int | None = None
    keep_last: int = 3
    keep_every: int | None = None
    seed: int = 0
    save: bool = True
    sinks: list[SinkName] = field(default_factory=list)

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps must be at least 1", self.steps)
        _require(0 <= self.warmup <= self.steps, "warmup must be between 0 and the number of steps", self.warmup)
        _require(0 <= self.floor <= 1, "floor must be between 0 and 1, a share of lr", self.floor)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """every: steps between two looks at other data. source, split, config: held-out data, of the kind that is trained;
    split: None = validation of a data set of the hub, all of files.

    prompts: that the model answers each time, each a text or a list of messages (all of one kind), with at most
    max_new_tokens tokens at temperature (0 = the likeliest).
    """

    every: int
    source: str | list[str] | None = None
    split: str | None = None
    config: str | None = None
    prompts: list[str | list[dict[str, str]]] = field(default_factory=list)
    max_new_tokens: int = 64
    temperature: float = 0.0

    def __post_init__(self) -> None:
        _require(self.every >= 1, "every must be at least 1 step", self.every)
        _require(self.max_new_tokens >= 1, "max_new_tokens must be at least 1", self.max_new_tokens)
        _require(self.temperature >= 0, "temperature must be at least 0", self.temperature)
        if self.source is None and not self.prompts:
            raise ValueError("there is nothing to look at: give source, prompts, or both")
        if len({type(prompt) for prompt in self.prompts}) > 1:
            raise ValueError("prompts must be all texts or all lists of messages; these are of both kinds")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Train low-rank adapters (peft) on a frozen model. r: their rank; alpha: they count alpha ÷ r (÷ √r with rslora).

    target_modules: ends of module names, a regular expression, or "all-linear". target_parameters: of experts that are
    stacked in one parameter. modules_to_save: trained whole, and saved with the adapter. dora: see peft.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        _require(self.r >= 1, "r must be at least 1, the rank of the adapters", self.r)
        _require(0 <= self.dropout < 1, "dropout must be at least 0 and below 1", self.dropout)

    @property
    def options(self) -> dict[str, Any]:
        """As peft.LoraConfig calls them."""
        return {
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": self.target_modules,
            "target_parameters": self.target_parameters,
            "modules_to_save": self.modules_to_save,
            "use_rslora": self.rslora,
            "use_dora": self.dora,
        }


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run. recipe: what a step is. lora: None trains all weights. evaluation: None looks at no other data.

    tune: knobs of `engine` that are chosen by measuring before the run begins, whatever `engine` says of them.
    `engine: auto` stands for all of them, and the defaults of everything else.
    """

    model: ModelSettings
    data: DataSettings
    run: RunSettings
    engine: EngineConfig = field(default_factory=EngineConfig)
    tune: Literal["all"] | list[Knob] = field(default_factory=list)
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    lora: LoraSettings | None = None
    evaluation: EvaluationSettings | None = None
    recipe: Annotated[Recipe, Discriminator("name")] = field(default_factory=SFT)

    def __post_init__(self) -> None:
        if isinstance(self.recipe, Pretrain) and self.data.loss_on not in (None, "all"):
            raise ValueError(f"the recipe pretrain trains all tokens; data.loss_on is {self.data.loss_on!r}: remove it")


def load_settings(path: str | Path, changes: Iterable[str] = ()) -> Settings:
    """Read a YAML file, then apply changes such as "engine.prefetch_depth=2"; SettingsError for what is not right."""
    values = _read(Path(path))
    _spell_out(values)
    for change in changes:
        _apply(values, change)
        _spell_out(values)
    return _settings(values, str(path))


def _spell_out(values: dict[str, Any]) -> None:
    """`engine: auto`, so that further keys of `engine` may follow."""
    if values.get("engine") == "auto":
        values |= {"engine": {}, "tune": "all"}


def dump_settings(settings: Settings) -> str:
    """The settings as YAML, every default written out, so that it says what ran."""
    return written(to_plain(settings))


def settings_of(folder: str | Path, changes: Iterable[str] = ()) -> Settings:
    """What a run was asked to do, with changes on top; SettingsError for a folder in which none was begun by
    `megatrain train`.

    Its folder is where it is now, whatever it was called when the run began, and from wherever that name was meant.
    """
    path = RunFolder(folder).settings
    if not path.exists():
        raise SettingsError(f"{folder} has no {path.name}: only runs begun by `megatrain train` can be found again")
    changes = list(changes)
    found = load_settings(path, changes)
    if changes and found.run.folder != load_settings(path).run.folder:
        raise SettingsError(f"run.folder is where the run is, {folder}: move the folder, and it goes on where it is")
    return replace(found, run=replace(found.run, folder=str(folder)))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except AliasError as error:
        raise SettingsError(f"{path}: {error}") from None
    except ValueError as error:
        raise SettingsError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if values is None:
        raise SettingsError(f"{path} is empty; it must hold keys such as model:, data: and run:")
    if not isinstance(values, dict):
        raise SettingsError(f"{path} must hold keys such as model:, data: and run:; it holds {type(values).__name__}")
    return values


def _apply(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not all(key.split(".")):
        raise SettingsError(f"a change is written key=value, such as engine.prefetch_depth=2; got {change!r}")
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise SettingsError(f"{change!r}: {name} is a value, and has no keys of its own")
    try:
        values[last] = parsed(text)
    except ValueError:
        raise SettingsError(f"{change!r}: the value is no YAML; quote it") from None


def _settings(values: Mapping[str, Any], where: str) -> Settings:
    _check_recipe(values.get("recipe", {"name": "sft"}), where)
    _check_keys(Settings, values, where, ())
    try:
        return TypeAdapter(Settings).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        problems = [_problem(problem) for problem in error.errors(include_url=False)]
        raise SettingsError(f"{where}: " + "; ".join(problems)) from None


def _check_recipe(recipe: Any, where: str) -> None:
    """Refuse a recipe that is none, before its keys are looked at."""
    names = [kind.name for kind in get_args(Recipe)]
    if not isinstance(recipe, Mapping):
        raise SettingsError(f"{where}: recipe must hold keys such as name: sft; it holds {recipe!r}")
    if "name" not in recipe:
        raise SettingsError(f"{where}: recipe.name is missing: one of {', '.join(names)}")
    name = recipe["name"]
    if name not in names:
        near = get_close_matches(str(name), names, n=1, cutoff=0.4)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise SettingsError(f"{where}: recipe: there is no recipe {name!r}; {meant}")


def _check_keys(kind: Any, values: Any, where: str, path: tuple[str, ...]) -> None:
    """Refuse keys that are no fields, at any depth, and suggest the nearest one that is."""
    if not isinstance(values, Mapping):
        return
    kinds, names = get_type_hints(kind), [each.name for each in fields(kind)]
    for key, value in values.items():
        if key not in names:
            raise SettingsError(
                f"{where}: {'.'.join((*path, str(key)))} is no setting; {_meant(str(key), path, names)}"
            )
        inner = _dataclass_in(kinds[key], value)
        if inner is not None:
            _check_keys(inner, value, where, (*path, key))


def _meant(key: str, path: tuple[str, ...], names: list[str]) -> str:
    near = get_close_matches(key, names, n=1, cutoff=0.4)
    if near:
        return f"did you mean {'.'.join((*path, near[0]))}?"
    return f"{'.'.join(path) or 'the file'} has {', '.join(names)}"


def _dataclass_in(hint: Any, value: Any) -> Any:
    """Return the dataclass that a value is to become: of several the one that has its name."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [option for option in options if is_dataclass(option)]
    if len(kinds) > 1:
        name = value.get("name") if isinstance(value, Mapping) else None
        return next((kind for kind in kinds if getattr(kind, "name", None) == name), None)
    return next(iter(kinds), None)


def _problem(problem: Any) -> str:
    location = list(problem["loc"])
    if location[:1] == ["recipe"]:
        del location[1:2]  # the recipe's name, which chose it
    place = ".".join(str(part) for part in location if not str(part).startswith(PARTS_OF_UNIONS))
    if problem["type"] == "missing":
        return f"{place} is missing"
    said = problem["msg"].removeprefix("Value error, ")
    given = "" if problem["type"] == "value_error" else f"; got {problem['input']!r}"
    return f"{place}: {said}{given}"
