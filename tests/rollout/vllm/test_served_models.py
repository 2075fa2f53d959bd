"""A judge on the servers that serve the policy: the base model without an adapter, or with another adapter."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.config import Config, from_mapping
from rl_core.config.checks import check_plugins
from rl_core.config.served_models import asked_models, with_served_models
from rl_core.errors import ConfigError, GenerationError
from rl_core.interfaces import LoraConfig, ServedModel
from rl_core.reports.jsonl import read_rows
from rl_core.trainer.run import run_generation
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.engine_arguments import BASE_MODEL_NAME
from rl_rollout.vllm.tokens import CONTROL_VARIABLE
from tests.rollout.vllm.servers import TOKENS, RunningServer, connect
from tests.rollout.vllm.test_adapters import LIMIT, SEQUENCE, scores_of
from tests.rollout.vllm.trainers import Trainer, policy_of

ALONE = {"rank": 4, "merge_lora": False, "max_loras": 2}
QUESTION = [{"role": "user", "content": "?"}]
"""The judge sees only this, so its reply does not depend on the policy's answer."""
GRADE = "score=7 "  # the limit of tokens cuts it after the space, not in the number
REPLY_TOKENS = len(GRADE)
"""The tokenizer has one token per character."""


def asking(model: object, directory: Path, **values: object) -> Config:
    """A configuration whose judge is `model` on the run's own engine."""
    given = {
        "trainer.policy.model.path": str(directory),
        "trainer.run_dir": str(directory / "run"),
        "trainer.bf16": False,
        "generator.inference_engine.backend": "vllm",
        "environment.env_class": "judge",
        "environment.options.judge": {
            "url": "inference_engine",
            "model": model,
            "instructions": QUESTION[0]["content"],
            "max_tokens": REPLY_TOKENS,
            "tries": 1,
        },
    }
    return from_mapping({**given, **values})


def lora(**fields: object) -> dict[str, object]:
    return {f"trainer.policy.model.lora.{name}": value for name, value in fields.items()}


# --- before anything starts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (
            "base",
            {"generator.inference_engine.backend": "local"},
            "model: got 'base' with url=inference_engine: the engine 'local' serves only the policy",
        ),
        ("base", {}, "model: got 'base' with url=inference_engine: the servers hold only the policy"),
        (
            "good",
            lora(rank=4),
            "model: got 'good' .* set trainer.policy.model.lora.rank above 0 and .*merge_lora=false",
        ),
        (
            "good",
            lora(rank=4, merge_lora=False),
            "model: with url=inference_engine, .*serve 2 adapters, .*max_loras=1 .*set max_loras to at least 2",
        ),
        (None, lora(**ALONE), "model: got None with url=inference_engine; set it to base"),
        ("nowhere", lora(**ALONE), "model: got 'nowhere' .*it has no file adapter_config.json"),
        ("half", lora(**ALONE), "model: got 'half' .*it has no file adapter_model.safetensors"),
        (
            "large",
            lora(**ALONE),
            "model: got .* its rank is 16, but the servers accept ranks up to 8; raise trainer.policy.model.lora",
        ),
        ("cut", lora(**ALONE), "model: got .* its adapter_config.json cannot be read"),
    ],
)
def test_a_judge_that_the_runs_servers_cannot_serve_is_refused(
    model: object, values: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name, config in {"half": '{"r": 4}', "large": '{"r": 16}', "cut": '{"r": 1', "good": '{"r": 8}'}.items():
        Path(name).mkdir()
        Path(name, "adapter_config.json").write_text(config)
        if name != "half":
            Path(name, "adapter_model.safetensors").touch()
    with pytest.raises(ConfigError, match=rf"environment\.options\.judge\.{message}"):
        check_plugins(asking(model, tmp_path, **values))
    for fitting in ("base", "good"):
        check_plugins(asking(fitting, tmp_path, **lora(**ALONE)))
    check_plugins(asking("base", tmp_path, **lora(rank=4, merge_lora=False)))


def test_each_judges_adapter_needs_a_slot(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"r": 4}')
        (tmp_path / name / "adapter_model.safetensors").touch()

    def check(second: str, max_loras: int) -> None:
        other = {"environment.options.other": {"url": "inference_engine", "model": second}}
        check_plugins(asking(str(tmp_path / "one"), tmp_path, **other, **lora(**{**ALONE, "max_loras": max_loras})))

    with pytest.raises(ConfigError, match=r"judge\.model, environment\.options\.other\.model: .*serve 3 .*at least 3"):
        check(str(tmp_path / "two"), 2)
    check(str(tmp_path / "two"), 3)
    check(str(tmp_path / "one"), 2)
    check("base", 2)


def test_a_key_for_the_runs_own_servers_is_refused():
    options = {"url": "inference_engine", "model": "base", "key_variable": "JUDGE_KEY"}
    with pytest.raises(
        ConfigError, match=r"environment\.options\.judge\.key_variable: got 'JUDGE_KEY' .*remove key_variable"
    ):
        asked_models({"judge": options})
    assert asked_models({"judge": options | {"key_variable": None}}) == {"environment.options.judge": None}
    assert asked_models({"judge": options | {"url": "http://host/v1"}}) == {}


def test_a_url_of_the_runs_engine_is_replaced_by_its_model_and_other_options_stay_unchanged():
    options = {"url": "inference_engine", "model": "base", "judge": {"url": "inference_engine", "model": "a/b"}}
    others = {"code": {"url": "http://host/v1", "model": "base"}, "top_k": 1}
    assert asked_models({**options, **others}) == {
        "environment.options": None,
        "environment.options.judge": Path("a/b"),
    }
    served = {place: ServedModel(url="http://host/v1", name=place, key="") for place in asked_models(options)}
    options_of_run = with_served_models({**options, **others}, served)
    assert options_of_run["url"].name == "environment.options"
    assert options_of_run["judge"]["url"].name == "environment.options.judge"
    assert others.items() <= options_of_run.items()
    assert with_served_models(others, {}) == others


# --- on a server ------------------------------------------------------------------------------------------------------


def base_model(model_path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)


def tokenizer_of(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def greedy_reply(model_path: str) -> str:
    """The base model's reply to QUESTION, computed by transformers."""
    tokenizer = tokenizer_of(model_path)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = base_model(model_path).generate(**prompt, do_sample=False, max_new_tokens=REPLY_TOKENS)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def write_judge(model_path: str, directory: Path) -> None:
    """Trains an adapter that replies GRADE to QUESTION."""
    import peft

    tokenizer, config = tokenizer_of(model_path), peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    torch.manual_seed(0)
    model = peft.get_peft_model(base_model(model_path), config)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    reply = torch.tensor(tokenizer(GRADE)["input_ids"])
    tokens = torch.cat([torch.tensor(prompt), reply])[None]
    optimizer = torch.optim.Adam((weight for weight in model.parameters() if weight.requires_grad), lr=0.01)
    for _ in range(100):
        logits_TV = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        first_T, second_T = logits_TV.topk(2).values.T
        if torch.equal(logits_TV.argmax(-1), reply) and (first_T - second_T > 0.5).all():
            model.save_pretrained(str(directory))
            return
        torch.nn.functional.cross_entropy(logits_TV, reply).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("the judge did not learn its reply")


def with_new_policy(server: RunningServer, look: Callable[[RemoteInferenceClient], Any], *, seed: int = 0) -> Any:
    """Publishes a policy that differs a lot from the base model, and returns the result of `look`."""

    async def publish() -> Any:
        client = await connect(server)
        async with policy_of(server.model_path, LoraConfig(**ALONE, alpha=8)) as policy:
            trainer = Trainer(policy, client, "files")
            trainer.version = (await client.health()).version + 1
            await policy.perturb(seed, 2.0)
            await trainer.publish()
            found = await look(client)
        await client.close()
        return found

    return asyncio.run(publish())


def played(server: RunningServer, model: str, directory: Path) -> list[Mapping[str, Any]]:
    """The samples of a run with `model` as judge."""
    prompt = [{"role": "user", "content": "name a colour."}]
    (directory / "rows.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    values = {
        "trainer.policy.model.path": server.model_path,
        "data.train_data": [str(directory / "rows.jsonl")],
        "generator.n_samples_per_prompt": 3,
        "generator.sampling_params.max_generate_length": 8,
        "generator.inference_engine.external_server_urls": [server.url],
        "generator.inference_engine.served_model_name": "policy",
    }
    output = directory / f"{Path(model).name}.jsonl"
    assert run_generation(asking(model, directory, **values, **lora(**ALONE, alpha=8)), output) == 3
    return list(read_rows(output))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_judge_on_the_runs_servers_is_the_base_or_an_adapter_and_never_the_policy(
    adapter_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CONTROL_VARIABLE, TOKENS.control)
    base = greedy_reply(adapter_server.model_path)

    async def policys_reply(client: RemoteInferenceClient) -> str:
        answer = await client.chat(QUESTION, max_tokens=REPLY_TOKENS, temperature=0)
        return answer["choices"][0]["message"]["content"]

    assert with_new_policy(adapter_server, policys_reply) not in (base, GRADE)
    error = f"the first: {tmp_path}/rows.jsonl:1: GenerationError: the judge .*{re.escape(repr(base))}"
    with pytest.raises(GenerationError, match=f"^all 3 samples failed; {error}"):
        played(adapter_server, "base", tmp_path)
    write_judge(adapter_server.model_path, tmp_path / "adapter")
    by_adapter = played(adapter_server, str(tmp_path / "adapter"), tmp_path)
    assert [row["reward"] for row in by_adapter] == [0.7] * 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sync_of_the_policy_does_not_change_the_base_model(adapter_server: RunningServer):
    tokens = torch.tensor([SEQUENCE])
    with torch.no_grad():
        logprobs_TV = base_model(adapter_server.model_path)(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    expected = [0.0, *logprobs_TV[range(len(SEQUENCE) - 1), SEQUENCE[1:]].tolist()]

    async def both(client: RemoteInferenceClient) -> tuple[list[float], list[float]]:
        return await scores_of(client, BASE_MODEL_NAME), await scores_of(client)

    for seed in range(2):
        of_base, of_policy = with_new_policy(adapter_server, both, seed=seed)
        assert of_base == pytest.approx(expected, abs=LIMIT)
        assert max(abs(a - b) for a, b in zip(of_base, of_policy, strict=True)) > 100 * LIMIT
