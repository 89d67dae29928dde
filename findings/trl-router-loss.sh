#!/usr/bin/env bash
# A model fine-tuned by trl returns another loss than the one it was loaded with: the router's
# loss is switched on in it.
#
# Versions: trl 1.16.0, transformers 5.24.0, torch 2.13.0.
# Guess:    training settings stay in the trainer; config.json of the result is that of the base,
#           and model(labels=...).loss is the cross-entropy.
# Seen:     SFTTrainer sets output_router_logits in the model's config and it is saved. Whoever
#           loads the result and reads .loss gets the cross-entropy plus the auxiliary loss times
#           router_aux_loss_coef, in evaluation as well.
# Where:    router_aux_loss_coef of SFTConfig is said to be of the training loss; not that the saved
#           config has it.
# Hurts:    perplexities by .loss of base and fine-tuned model, which don't compare: with top-2 and
#           a coefficient of 0.01 the difference is 0.02 nats or more, as much as a careful
#           compression costs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 trl==1.16.0
export HF_HOME=$folder/cache HF_HUB_OFFLINE=1

venv/bin/python - <<'END' 2> log || { cat log; exit 1; }
import json
import sys
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0")),
    pad_token="w0", eos_token="w1",
)
config = AutoConfig.for_model(
    "qwen3_moe", vocab_size=64, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=2,
    router_aux_loss_coef=0.01, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)
AutoModelForCausalLM.from_config(config).save_pretrained("base")
tokenizer.save_pretrained("base")
rows = Dataset.from_dict({"input_ids": [list(range(2, 34))] * 4})
settings = SFTConfig(
    output_dir="run", max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True, bf16=False,
    gradient_checkpointing=False, save_strategy="no")
trainer = SFTTrainer("base", args=settings, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_model("tuned")

tokens = torch.arange(2, 62)[None]
extra = {}
for name in ("base", "tuned"):
    with open(f"{name}/config.json") as stream:
        fields = json.load(stream)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    with torch.no_grad():
        output = model(tokens, labels=tokens)
    entropy = torch.nn.functional.cross_entropy(output.logits[0, :-1], tokens[0, 1:])
    extra[name] = fields["output_router_logits"], (output.loss - entropy).item()
    print(f"{name}: output_router_logits {fields['output_router_logits']}, router_aux_loss_coef "
          f"{fields['router_aux_loss_coef']}; .loss is {output.loss:.4f}, the cross-entropy {entropy:.4f}")
before, after = extra["base"], extra["tuned"]
sys.exit(0 if before[0] is False and abs(before[1]) < 1e-5 and after[0] is True and after[1] > 0.01 else "changed")
END
