"""No attention function ignores a setting of a model's layers without being noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.interfaces import RankInfo
from rl_fsdp import FsdpOptions, fsdp
from rl_fsdp.worker import FsdpWorker
from rl_rollout.local.model import load_model, token_logprobs
from rl_transformers.attention_proof import default_attention, sdpa_with_mask, with_eager_attention
from rl_transformers.rank.attention import packed_attention_of_rows
from rl_transformers.rank.token_scorer import load_scorer
from rl_transformers.testing.cases import LIMITS
from rl_transformers.testing.ranks import RankGroup
from tests.fsdp.conftest import spec_of
from tests.fsdp.test_models import require_reference_scores
from tests.model_families import TINY, random_model

CAPPED: dict[str, Any] = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 1,
    "initializer_range": 0.3,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "cohere2": {"sliding_window": 8},
    "mixtral": EXPERTS,
}
TOKENS = (torch.arange(24) * 7) % 47


def small(family: str, **config: Any) -> Any:
    torch.manual_seed(0)
    fields = AutoConfig.for_model(family, **{**TINY, **config})
    return AutoModelForCausalLM.from_config(fields, attn_implementation="eager").eval()


def fault_of(model: Any, attend: Any) -> str | None:
    with torch.no_grad():
        return with_eager_attention(model, lambda: model(input_ids=TOKENS[None], use_cache=False), attend)[1]


def eager_logprobs(path: Path, attention: str = "eager") -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention).eval()
    with torch.no_grad():
        logits_TV = model(input_ids=TOKENS[None]).logits[0, :-1]
    return logits_TV.log_softmax(-1).gather(1, TOKENS[1:, None]).squeeze(1)


def batch_of_rows() -> Batch:
    return Batch.from_sequences([{"tokens": TOKENS}, {"tokens": TOKENS[:5]}])


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = random_model(tmp_path_factory.mktemp("capped"), "gemma2", **CAPPED)
    difference = (eager_logprobs(path, "sdpa") - eager_logprobs(path)).abs().max()
    assert difference > 0.1  # transformers' SDPA ignores the cap
    return path


def test_padded_rows_of_a_policy_keep_the_softcap_of_attention(capped: Path):
    worker = FsdpWorker(spec_of(capped, use_sample_packing=False), RankInfo())
    found_T = worker.forward(batch_of_rows(), [[0, 1]], temperature=1.0)["logprobs"][1:24]
    torch.testing.assert_close(found_T, eager_logprobs(capped), rtol=0, atol=1e-5)
    require_reference_scores(capped, use_sample_packing=False)


def test_padded_rows_of_a_critic_keep_the_softcap_of_attention(capped: Path):
    scorer = load_scorer(spec_of(capped, role="critic", use_sample_packing=False), torch.device("cpu"))
    expected = AutoModel.from_pretrained(capped, attn_implementation="eager").eval()
    with torch.no_grad():
        found, wanted = (m(input_ids=TOKENS[None]).last_hidden_state for m in (scorer.model, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_packing_is_refused_and_the_advice_helps(capped: Path):
    with pytest.raises(ConfigError, match=r"softcap.*trainer\.use_sample_packing=false"):
        FsdpWorker(spec_of(capped, use_sample_packing=True), RankInfo())


def test_a_plan_without_weights_assumes_the_same_attention(capped: Path, tmp_path: Path):
    plain = random_model(tmp_path, "qwen3")
    for path, attention in ((capped, "eager"), (plain, "sdpa")):
        for device in ("cpu", "meta"):
            scorer = load_scorer(spec_of(path, use_sample_packing=False), torch.device(device))
            assert scorer.model.config._attn_implementation == attention


def test_the_local_engine_keeps_the_softcap_and_refuses_an_attention_that_ignores_it(capped: Path):
    model = load_model(str(capped), dtype="float32", device="cpu", model_kwargs={})
    found = torch.tensor(token_logprobs(model, TOKENS.tolist())[1:])
    torch.testing.assert_close(found, eager_logprobs(capped), rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match=r"attn_implementation: got sdpa.*softcap.*set it to eager"):
        load_model(str(capped), dtype="float32", device="cpu", model_kwargs={"attn_implementation": "sdpa"})


@pytest.mark.parametrize("attend", [sdpa_with_mask, packed_attention_of_rows])
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_that_implement_all_settings_agree_with_eager_attention(family: str, attend: Any):
    model = small(family, **FAMILIES[family])
    assert fault_of(model, attend) is None
    assert default_attention(model) == "sdpa"


def test_a_large_cap_and_the_sinks_of_gpt_oss_are_noticed():
    capped = small("gemma2", **{**CAPPED, "attn_logit_softcapping": 400.0})
    assert "softcap" in str(fault_of(capped, sdpa_with_mask))
    assert "s_aux" in str(fault_of(small("gpt_oss", **EXPERTS), sdpa_with_mask))


@pytest.mark.parametrize("ignored", ["scaling", "sliding_window", "softcap"])
def test_a_function_that_ignores_a_setting_is_noticed(ignored: str):
    def ignoring(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any):
        if ignored == "sliding_window":
            return packed_attention_of_rows(module, query, key, value, mask, **{**settings, ignored: 99})
        return sdpa_with_mask(module, query, key, value, mask, **{**settings, ignored: None})

    family = {"scaling": "granite", "sliding_window": "mistral", "softcap": "gemma2"}[ignored]
    config = {"granite": {"attention_multiplier": 0.7}, "mistral": {"sliding_window": 8}, "gemma2": CAPPED}[family]
    assert fault_of(small(family, **config), ignoring) is not None


def test_ulysses_without_packing_is_refused_and_the_advice_helps(capped: Path, tmp_path: Path):
    options = FsdpOptions(sequence_parallel_size=2)
    spec = spec_of(capped, use_sample_packing=False, options=options)
    with pytest.raises(ConfigError, match=r"softcap.*sequence_parallel_size=1"):
        RankGroup(fsdp, spec, 2, directory=tmp_path, timeout_s=240)
    group = RankGroup(fsdp, spec_of(capped, use_sample_packing=False), 2, directory=tmp_path, timeout_s=240)
    try:
        scores = group.forward(batch_of_rows(), LIMITS, temperature=1.0)
    finally:
        group.close()
    torch.testing.assert_close(scores["logprobs"][1:24], eager_logprobs(capped), rtol=0, atol=1e-5)
