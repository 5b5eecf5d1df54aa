"""`+recipe=full_eval` of a PEFT adapter on a base, and of the checkpoint that it was merged into: what ran is that model, by transformers and PEFT themselves."""

import json

import pytest
import torch
from job import SHORT, run_trainer, table

from verl_opsd.models.tiny import make_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a base, an adapter that changes it, and both merged."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models")
    base = make_tiny(folder / "base", seed=5)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    )
    torch.manual_seed(0)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.3)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "merged")
    return folder


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_the_model_that_ran_is_the_one_named(models, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    named = [f"actor_rollout_ref.model.path={models / ('merged' if kind == 'merged' else 'base')}"]
    named += [f"actor_rollout_ref.model.lora_adapter_path={models / 'adapter'}"] * (kind == "adapter")
    job = run_trainer(tmp_path, "+recipe=full_eval", *SHORT, *named, "opsd.evaluation.alone=false")
    job.assert_done()
    said = json.loads((job.directory / "evaluation.json").read_text())
    assert said["adapter"] == (str(models / "adapter") if kind == "adapter" else None)
    turns = [t for t in table(job.directory, "turns", "eval") if t["turn"] == 0]
    assert len(turns) == 2

    def logprobs(folder, turn):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([turn["new_ids"] + turn["response_ids"]])
        with torch.no_grad():
            found = model(ids).logits[0].log_softmax(-1)
        return found[len(turn["new_ids"]) - 1 : -1].gather(1, ids[0, len(turn["new_ids"]) :, None])[:, 0]

    for turn in turns:
        stored = torch.tensor(turn["response_logprobs"])
        assert (logprobs(models / "merged", turn) - stored).abs().max() < 1e-3
        assert (logprobs(models / "base", turn) - stored).abs().max() > 0.05
