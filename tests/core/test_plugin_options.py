"""Keys of engines and generators are loaded, checked, shown, written and documented like those of the core."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from rl_core import plugins
from rl_core.config import Config, ConfigWarning, dump_yaml, engine_spec, from_mapping, generator_spec, load
from rl_core.config.checks import check_plugins
from rl_core.config.loading import own_keys
from rl_core.config.plugin_options import SECTIONS, installed_classes
from rl_core.config.reference import field_docs, reference_page
from rl_core.config.resolving import value_at
from rl_core.config.sources import origins
from rl_core.errors import ConfigError, PluginError
from rl_core.interfaces import EngineSpec
from rl_rollout.vllm.options import VLLMOptions
from tests.core.fake_plugins import install

ENGINE = "generator.inference_engine"
SOURCE = '''
import attrs
from rl_core.errors import ConfigError
from rl_core.interfaces import EnginePlugin, GeneratorPlugin, above, at_least, between
from rl_core.interfaces import Recipe

@attrs.frozen(kw_only=True)
class Cache:
    """What the cache keeps."""

    policy: str = "lru"
    """Which entry is evicted first."""


@attrs.frozen(kw_only=True)
class Options:
    """An engine with a beam."""

    beam_width: int = attrs.field(default=4, validator=at_least(1))
    """Hypotheses that are kept."""
    decay: float = attrs.field(default=0.5, validator=between(0, 1))
    """Factor of a hypothesis's score per token."""
    patience_s: float | None = attrs.field(default=None, validator=above(0))
    """Longest wait; None: no limit."""
    even: int = attrs.field(default=2)
    """An even number."""
    cache: Cache = attrs.field(factory=Cache)
    """Settings of the cache."""
    num_prefill: int = 3
    """A name that other trainers know as something else."""

    @even.validator
    def _is_even(self, field, value):
        if value % 2:
            raise ValueError(f"even must be even, not {value}")


class Engine(EnginePlugin):
    name = "beam"
    options_class = Options

    def validate(self, spec):
        if spec.options.beam_width > spec.max_num_seqs:
            raise ConfigError(
                f"generator.inference_engine.beam_width: {spec.options.beam_width} are more than max_num_seqs"
            )

    async def create(self, spec):
        return spec


engine = Engine()


@attrs.frozen
class GeneratorOptions:
    """A generator that retries."""

    retries: int = attrs.field(default=0, validator=at_least(0))
    """Times that a failed episode is played again."""


class Generator(GeneratorPlugin):
    name = "retrying"
    options_class = GeneratorOptions

    def validate(self, spec):
        if spec.options.retries and spec.max_turns > 1:
            raise ConfigError("generator.retries: episodes of several turns are not played again")

    def create(self, spec, client):
        return spec, client


generator = Generator()
recipe = Recipe(summary="a test's", config={"generator.inference_engine.beam_width": 7})


class TakesACoreKey(Engine):
    @attrs.frozen
    class options_class:
        num_engines: int = 1


class HasNoDefault(Engine):
    @attrs.frozen
    class options_class:
        width: int


class HasNoAttrs(Engine):
    options_class = dict


class HasUnknownTypes(Engine):
    @attrs.frozen
    class options_class:
        width: "Missing" = 1


takes_a_core_key, has_no_default, has_no_attrs = TakesACoreKey(), HasNoDefault(), HasNoAttrs()
has_unknown_types = HasUnknownTypes()


@attrs.frozen
class TextOptions:
    """An engine whose width is a word."""

    tensor_parallel_size: str = "auto"
    """A name that vllm has too, of another type."""


class TextEngine(Engine):
    options_class = TextOptions


text_engine = TextEngine()
'''


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs `rl_beam`, with an engine and a generator as entry points."""
    site = tmp_path / "site"
    site.mkdir()
    install(
        site,
        monkeypatch,
        "rl_beam",
        SOURCE,
        inference__beam="rl_beam:engine",
        generators__retrying="rl_beam:generator",
    )
    yield
    plugins._installed.cache_clear()


def config_of(**engine: Any) -> Config:
    return from_mapping(
        {"trainer.policy.model.path": "model", **{f"{ENGINE}.{key}": value for key, value in engine.items()}}
    )


def sources(loaded: Any) -> dict[str, tuple[Any, str]]:
    return {origin.key: (origin.value, origin.source) for origin in origins(loaded)}


# --- the chosen plug-in's keys --------------------------------------------------------------------------------------


async def test_an_engines_spec_has_its_own_options_and_those_of_every_engine():
    config = config_of(backend="beam", beam_width=8, **{"cache.policy": "fifo"}, num_engines=3)
    plugin, spec = engine_spec(config)
    assert isinstance(spec.options, plugin.options_class)
    assert (spec.options.beam_width, spec.options.cache.policy, spec.options.decay) == (8, "fifo", 0.5)
    assert (spec.model_path, spec.num_engines, spec.dtype, spec.shares_devices) == ("model", 3, "bfloat16", True)
    assert await plugin.create(spec) is spec


def test_the_specs_are_plain_data_and_every_field_has_a_text():
    _, spec = engine_spec(config_of(backend="beam"))
    assert pickle.loads(pickle.dumps(spec)) == spec
    for cls in (EngineSpec, type(generator_spec(config_of())[1])):
        assert [field.name for field in attrs.fields(cls) if not field_docs(cls).get(field.name)] == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{ENGINE}.beam_width=x", rf"^{ENGINE}\.beam_width: got 'x' \(str, command line\); expected int\.$"),
        (f"{ENGINE}.beam_width=0", rf"^{ENGINE}\.beam_width: got 0; expected at least 1$"),
        (f"{ENGINE}.decay=1.5", rf"^{ENGINE}\.decay: got 1\.5; expected between 0 and 1$"),
        (f"{ENGINE}.patience_s=0", rf"^{ENGINE}\.patience_s: got 0\.0; expected a finite number above 0$"),
        (f"{ENGINE}.patience_s=.inf", rf"^{ENGINE}\.patience_s: got inf; expected a finite number above 0$"),
        (f"{ENGINE}.even=3", rf"^{ENGINE}: even must be even, not 3$"),
        (
            f"{ENGINE}.cache=3",
            rf"^{ENGINE}\.cache: got 3 \(int, .* expected a section, e\.g\. {ENGINE}\.cache\.pol",
        ),
        (
            f"{ENGINE}.beam_widht=2",
            rf"^{ENGINE}\.beam_widht: unknown key \(command line, with backend=beam\)\. Did you mean .*\.beam_width\?$",
        ),
        (
            f"{ENGINE}.tensor_paralel_size=2",
            rf"Did you mean {ENGINE}\.tensor_parallel_size \(of backend=vllm\)\?",
        ),
        (f"{ENGINE}.zzz=2", rf"{ENGINE} has backend, .*, beam_width, decay, patience_s, even, cache, num_prefill\.$"),
        (f"{ENGINE}.plugin_options=2", r"plugin_options: unknown key"),
        ("trainer.beam_width=2", rf"Did you mean {ENGINE}\.beam_width\?"),
    ],
)
def test_a_wrong_plug_in_key_is_reported_like_a_wrong_key_of_the_core(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        from_mapping({f"{ENGINE}.backend": "beam"}, [override])


def test_text_that_only_begins_like_a_number_stays_text():
    config = from_mapping({f"{ENGINE}.backend": "beam"}, [f"{ENGINE}.cache.policy=1.5e3.2."])
    assert config.generator.inference_engine.options.cache.policy == "1.5e3.2."


def test_the_plug_in_validates_its_options_before_a_run():
    refused = config_of(
        backend="beam", beam_width=9, max_num_seqs=8, weight_sync_backend="tests.core.idle_plugins:transport"
    )
    with pytest.raises(ConfigError, match="beam_width: 9 are more than max_num_seqs"):
        check_plugins(refused)


def test_a_plug_ins_keys_are_shown_with_their_source_and_written_into_the_runs_file(tmp_path: Path):
    loaded = load("rl_beam:recipe", [f"{ENGINE}.backend=beam", f"{ENGINE}.decay=0.25"])
    shown = sources(loaded)
    assert shown[f"{ENGINE}.beam_width"] == (7, "recipe rl_beam:recipe")
    assert shown[f"{ENGINE}.decay"] == (0.25, "command line")
    assert shown[f"{ENGINE}.cache.policy"] == ("lru", "default")
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(loaded.config))
    written = yaml.safe_load(file.read_text())["generator"]["inference_engine"]
    assert (written["beam_width"], written["decay"], written["cache"]) == (7, 0.25, {"policy": "lru"})
    assert load(str(file)).config == loaded.config


def test_a_path_may_refer_to_a_plug_ins_own_key():
    values = {f"{ENGINE}.backend": "beam", "trainer.run_name": f"beam${{{ENGINE}.beam_width}}"}
    assert str(from_mapping(values).run_dir) == "runs/beam4"
    with pytest.raises(ConfigError, match="is not a key"):
        from_mapping({"trainer.run_name": f"beam${{{ENGINE}.beam_width}}"})


def test_a_plug_ins_own_key_takes_precedence_over_a_foreign_key_of_that_name():
    assert config_of(backend="beam", num_prefill=9).generator.inference_engine.options.num_prefill == 9
    with pytest.warns(ConfigWarning, match=r"num_prefill: without effect: only backend=beam reads it; this run has"):
        config_of(num_prefill=9)
    with pytest.raises(ConfigError, match=r"enable_pd: not supported by this version"):
        config_of(backend="beam", enable_pd=True)


def test_the_reference_page_has_the_keys_of_installed_plug_ins_under_their_section():
    page = reference_page()
    engine = page.index(f"### {ENGINE}, backend=beam")
    assert page.index(f"### {ENGINE}\n") < engine < page.index(f"### {ENGINE}.weight_verification")
    assert "An engine with a beam. Keys of rl-beam, read only with `generator.inference_engine.backend=beam`." in page
    assert "| `beam_width` | int, at least 1 | `4` | Hypotheses that are kept. |" in page
    assert f"### {ENGINE}.cache\n" in page
    assert "| `retries` | int, at least 0 | `0` | Times that a failed episode is played again. |" in page


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.path)
def test_every_key_of_our_own_plug_ins_has_a_text_that_ends_as_a_sentence(section: Any):
    for name, cls in installed_classes(section):
        assert [key for key in own_keys(cls) if not field_docs(cls).get(key, "").endswith((".", "`"))] == [], name


# --- the keys of plug-ins that are not chosen -----------------------------------------------------------------------


def test_a_key_of_another_installed_engine_is_kept_with_a_warning(tmp_path: Path):
    reason = "only backend=vllm reads it; this run has backend=beam"
    keys = rf"{ENGINE}\.tensor_parallel_size, {ENGINE}\.host"
    given = [f"{ENGINE}.backend=beam", f"{ENGINE}.tensor_parallel_size=2", f"{ENGINE}.host=h"]
    with pytest.warns(ConfigWarning, match=f"^{keys}: without effect: {reason}$"):
        loaded = load("rl_beam:recipe", given)
    assert sources(loaded)[f"{ENGINE}.tensor_parallel_size"] == (2, f"command line; without effect: {reason}")
    assert f"{ENGINE}.enforce_eager" not in sources(loaded)
    assert loaded.config.generator.inference_engine.options.beam_width == 7
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(loaded.config))
    with pytest.warns(ConfigWarning, match=f"^{keys}: without effect"):
        assert load(str(file)).config == loaded.config
    back = load(str(file), [f"{ENGINE}.backend=vllm", f"{ENGINE}.beam_width=4"]).config
    assert back.generator.inference_engine.options == VLLMOptions(tensor_parallel_size=2, host="h")


def test_a_key_of_another_backend_on_the_command_line_is_kept_with_a_warning(tmp_path: Path):
    key, reason = "trainer.policy.megatron_config.tensor_model_parallel_size", "trainer.strategy=fsdp1 reads only"
    with pytest.warns(ConfigWarning, match=f"^{key}: without effect: {reason} fsdp_config$"):
        loaded = load("quickstart", ["trainer.strategy=fsdp1", f"{key}=2"])
    assert sources(loaded)[key] == (2, f"command line; without effect: {reason} fsdp_config")
    assert sources(loaded)["trainer.policy.megatron_config.context_parallel_size"] == (1, "default")
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(loaded.config))
    again = load(str(file))  # without a warning: files may have sections of several backends
    assert again.config == loaded.config
    assert sources(again)[key][1].endswith(f"; without effect: {reason} fsdp_config")


def test_a_file_that_was_written_for_one_engine_runs_with_another(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(config_of(backend="vllm", router_port=0)))
    assert "heartbeat_interval_s" in file.read_text()
    with pytest.warns(ConfigWarning) as caught:
        config = load(str(file), [f"{ENGINE}.backend=local"]).config
    assert [str(warning.message) for warning in caught] == [
        f"{ENGINE}.router_port: without effect: only backend=vllm reads it; this run has backend=local"
    ], "one warning, and none for keys that only repeat a default"
    assert engine_spec(config)[1].options is None
    assert "heartbeat_interval_s" not in dump_yaml(config)


def test_keys_of_a_recipe_cause_no_warning_with_another_engine():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("rl_beam:recipe", [f"{ENGINE}.backend=local"])


def test_values_for_an_engine_that_is_not_chosen_are_checked_too():
    with pytest.raises(ConfigError, match=rf"{ENGINE}\.beam_width: got 'x' \(str, "):
        config_of(beam_width="x")
    with pytest.raises(ConfigError, match=rf"{ENGINE}\.beam_width: got 0; expected at least 1"):
        config_of(beam_width=0)


def test_a_key_of_two_engines_is_read_by_the_chosen_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, monkeypatch, "rl_text", "from rl_beam import text_engine", inference__atext="rl_text:text_engine")
    assert (
        config_of(backend="vllm", tensor_parallel_size=2).generator.inference_engine.options.tensor_parallel_size == 2
    )
    assert config_of(backend="atext").generator.inference_engine.options.tensor_parallel_size == "auto"
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 2 \(int, .* expected text"):
        config_of(backend="atext", tensor_parallel_size=2)
    with pytest.warns(ConfigWarning, match="only backend=vllm reads it"):
        config_of(backend="local", tensor_parallel_size=2)
    with pytest.warns(ConfigWarning, match="only backend=atext reads it"):
        config_of(backend="local", tensor_parallel_size="wide")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 2\.5 \(float, "):
        config_of(backend="local", tensor_parallel_size=2.5)


# --- plug-ins that cannot be used -----------------------------------------------------------------------------------


def test_keys_of_a_missing_engine_are_kept_unchecked_but_the_run_is_refused():
    with pytest.warns(ConfigWarning, match=rf"{ENGINE}: beam_widht: kept unchecked: .*'beem' is not among .* 'beam'\?"):
        config = config_of(backend="beem", beam_widht=2)
    assert yaml.safe_load(dump_yaml(config))["generator"]["inference_engine"]["beam_widht"] == 2
    with pytest.raises(PluginError, match=rf"{ENGINE}\.backend: 'beem' is not among"):
        engine_spec(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("takes_a_core_key", "its option 'num_engines' is already a key of generator.inference_engine; rename it"),
        ("has_no_default", "its option 'width' has no default; give it one in options_class"),
        ("has_no_attrs", "its options_class is <class 'dict'>; expected an attrs class"),
        ("has_unknown_types", "the type hints of options_class cannot be resolved: name 'Missing' is not defined"),
    ],
)
def test_an_options_class_that_cannot_hold_keys_is_reported_as_a_fault_of_the_plug_in(name: str, message: str):
    with pytest.raises(PluginError, match=rf"{ENGINE}\.backend: 'rl_beam:{name}': {message}"):
        engine_spec(config_of(backend=f"rl_beam:{name}"))


@pytest.mark.parametrize("given", [{}, {"trainer.policy.odd_config.width": 2}])
def test_a_backends_option_without_a_default_is_reported_as_a_fault_of_the_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
):
    source = """
import attrs
from tests.core.plain_backend import PlainBackend, PlainWorker

@attrs.frozen(kw_only=True)
class OddOptions:
    width: int

odd = PlainBackend(worker_class=PlainWorker, name="odd", config_section="odd_config", options_class=OddOptions)
"""
    install(tmp_path, monkeypatch, "rl_odd", source, backends__odd="rl_odd:odd")
    message = "trainer.strategy: 'odd': its option 'width' has no default; give it one in OddOptions"
    with pytest.raises(PluginError, match=message):
        from_mapping({"trainer.policy.model.path": "model", "trainer.strategy": "odd", **given})


def test_an_unknown_key_warns_of_broken_engines_that_may_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, monkeypatch, "rl_broken", "import no_such_module", inference__broken="rl_broken:engine")
    config_of(beam_width=4)
    with (
        pytest.warns(ConfigWarning, match="'broken' .* could not be imported: .*no_such_module"),
        pytest.raises(ConfigError, match=f"{ENGINE}.its_own: unknown key"),
    ):
        config_of(its_own=1)


def test_an_unresolved_configuration_says_so_when_asked_for_a_spec():
    config = config_of(backend="beam")
    engine = attrs.evolve(config.generator.inference_engine, plugin_options={})
    with pytest.raises(
        ConfigError, match=rf"{ENGINE}: the options of backend=beam \(Options\) are missing; call .*resolve first"
    ):
        engine_spec(attrs.evolve(config, generator=attrs.evolve(config.generator, inference_engine=engine)))


# --- generators -----------------------------------------------------------------------------------------------------


def test_a_generator_can_have_its_own_keys():
    values = {"trainer.policy.model.path": "model", "generator.type": "retrying", "environment.options.depth": 3}
    config = from_mapping({**values, "generator.retries": 2})
    plugin, spec = generator_spec(config)
    assert plugin.create(spec, None) == (spec, None)  # pyright: ignore[reportArgumentType]
    assert (spec.options.retries, spec.environment_options) == (2, {"depth": 3})
    assert value_at(config, "generator.retries") == 2
    with pytest.raises(ConfigError, match=r"^generator\.retries: got -1; expected at least 0$"):
        from_mapping({**values, "generator.retries": -1})
    with pytest.raises(ConfigError, match=r"retris: unknown key \(code, with type=retrying\)\. .*generator\.retries\?"):
        from_mapping({**values, "generator.retris": 1})
    with pytest.warns(
        ConfigWarning, match=r"^generator\.max_concurrency: without effect: only type=environment reads it"
    ):
        from_mapping({**values, "generator.max_concurrency": 3})
    with pytest.raises(ConfigError, match="episodes of several turns are not played again"):
        check_plugins(from_mapping({**values, "generator.retries": 2, "generator.max_turns": 2}))
